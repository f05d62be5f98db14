// SPDX-License-Identifier: Apache-2.0
// Tries the index arithmetic of the kernels against what it stands for, element by element.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda/index.cuh"

namespace {

using namespace fk::cuda;

long checked = 0;

#define CHECK(condition)                                                   \
  do {                                                                     \
    ++checked;                                                             \
    if (!(condition)) {                                                    \
      std::printf("%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

// The chunks of a range follow each other, cover it once, and stay between the bucket's multiples.
void check_chunks(Range range) {
  int64_t at = range.start;
  const int64_t count = chunk_count(range);
  for (int64_t k = 0; k < count; ++k) {
    const Range part = chunk_of(range, k);
    CHECK(part.start == at);
    CHECK(part.start < part.stop);
    CHECK(part.start / kChunkNumel == (part.stop - 1) / kChunkNumel);
    at = part.stop;
  }
  CHECK(at == range.stop || (count == 0 && range.start >= range.stop));
}

void check_all_chunks() {
  const int64_t c = kChunkNumel, far = int64_t{1} << 40;
  const int64_t points[] = {0, 1, 7, c - 1, c, c + 1, 2 * c - 1, 2 * c, 3 * c + 5, 7 * c};
  for (int64_t base : {int64_t{0}, far, far - 1}) {
    for (int64_t start : points) {
      for (int64_t stop : points) check_chunks({base + start, base + stop});
    }
  }
}

struct Entry {
  int32_t first_chunk;
};

// Every chunk of a table belongs to the entry that counted it.
void check_find_entry() {
  for (int count = 1; count < 40; ++count) {
    std::vector<Entry> entries;
    std::vector<int> owners;
    for (int i = 0; i < count; ++i) {
      entries.push_back({static_cast<int32_t>(owners.size())});
      owners.insert(owners.end(), 1 + (i * 7 + count) % 5, i);
    }
    for (size_t chunk = 0; chunk < owners.size(); ++chunk) {
      CHECK(find_entry(entries.data(), count, static_cast<int64_t>(chunk)) == owners[chunk]);
    }
  }
}

// Each element is moved once, groups lie at multiples of 16 bytes, and there is no more to gain.
template <int kSource, int kTarget>
void check_split(uintptr_t source, uintptr_t target, int count) {
  constexpr int kNumel = kGroup<kSource, kTarget>;
  const Split split = split_copy<kSource, kTarget>(source, target, count);
  std::vector<int> moved(count);
  for (int group = 0; group < split.groups; ++group) {
    const int first = split.head + group * kNumel;
    CHECK((source + first * kSource) % kVectorBytes == 0);
    CHECK((target + first * kTarget) % kVectorBytes == 0);
    for (int i = first; i < first + kNumel; ++i) ++moved.at(i);
  }
  const int lone = count - split.groups * kNumel;
  for (int k = 0; k < lone; ++k) ++moved.at(lone_element(split, kNumel, k));
  for (int times : moved) CHECK(times == 1);
  int best = 0;  // groups that any head would give
  for (int head = 0; head < kNumel && head < count; ++head) {
    const bool wide = (source + head * kSource) % kVectorBytes == 0 &&
                      (target + head * kTarget) % kVectorBytes == 0;
    if (wide) best = best > (count - head) / kNumel ? best : (count - head) / kNumel;
  }
  CHECK(split.groups == best);
}

template <int kSource, int kTarget>
void check_splits() {
  const uintptr_t base = uintptr_t{1} << 44;
  for (int source = 0; source < 32; source += kSource) {
    for (int target = 0; target < 32; target += kTarget) {
      for (int count = 0; count < 40; ++count) {
        check_split<kSource, kTarget>(base + source, base + target, count);
      }
    }
  }
}

void check_runs() {
  for (int itemsize : {2, 4}) {
    for (uintptr_t address = 64; address < 96; address += itemsize) {
      for (int count = 0; count < 40; ++count) {
        const Split split = split_run(address, itemsize, 8, count);
        CHECK(split.head + 8 * split.groups <= count);
        CHECK(split.groups == 0 || (address + split.head * itemsize) % kVectorBytes == 0);
        CHECK(split.groups > 0 || count < 8 + kVectorBytes / itemsize);
      }
    }
  }
}

// Walks the indices of a tensor as an odometer does.
template <class Index>
void check_strided(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  const int dims = static_cast<int>(sizes.size());
  std::vector<int64_t> at(dims);
  int64_t numel = 1;
  for (int64_t size : sizes) numel *= size;
  for (int64_t i = 0; i < numel; ++i) {
    int64_t expected = 0;
    for (int d = 0; d < dims; ++d) expected += at[d] * strides[d];
    CHECK(strided_offset(sizes.data(), strides.data(), dims, static_cast<Index>(i)) == expected);
    for (int d = dims - 1; d >= 0 && ++at[d] == sizes[d]; --d) at[d] = 0;
  }
}

void check_all_strided() {
  const int64_t far = int64_t{1} << 33;  // an offset is 64 bits wide, whatever the index is
  for (int64_t stride : {int64_t{0}, int64_t{1}, int64_t{9}, far}) {
    check_strided<uint32_t>({7}, {stride});
    check_strided<uint32_t>({3, 5}, {1, stride});
    check_strided<uint64_t>({3, 1, 5}, {stride, 4, 2});
    check_strided<uint32_t>({2, 3, 2, 2, 1, 2, 3, 2}, {5, 1, stride, 7, 2, 3, 11, 1});
  }
  const int64_t sizes[] = {3, int64_t{1} << 33}, strides[] = {1, 3};
  const auto last = (uint64_t{3} << 33) - 1;
  CHECK(strided_offset(sizes, strides, 2, last) == 2 + 3 * ((int64_t{1} << 33) - 1));
}

}  // namespace

int main() {
  check_all_chunks();
  check_find_entry();
  check_splits<4, 4>();
  check_splits<4, 2>();
  check_splits<2, 4>();
  check_splits<2, 2>();
  check_runs();
  check_all_strided();
  std::printf("checked %ld\n", checked);
}
