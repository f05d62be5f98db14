// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/launch.cuh"
#include "cuda/pack.cuh"

namespace fk::cuda {
namespace {

[[noreturn]] void fail(const std::string& expected, const std::string& got,
                       const std::string& advice) {
  throw std::invalid_argument("pack: expected " + expected + ", got " + got + ". " + advice);
}

std::string range(int64_t start, int64_t stop) {
  std::string text = "[";  // appended to: GCC 12 warns about a literal plus a string
  return text.append(std::to_string(start)).append(", ").append(std::to_string(stop)).append(")");
}

// Checks a source against the bucket and the end of the source before it.
void check(const Source& source, int64_t last, int64_t numel) {
  const int64_t stop = source.start + source.numel;
  if (source.numel < 0 || source.start < last || stop > numel) {
    fail("a gradient inside " + range(last, numel), range(source.start, stop),
         "Pass gradients in segment order.");
  }
  if (source.data == nullptr && source.numel > 0) {
    fail("a gradient", "a null pointer", "Pass a CUDA tensor.");
  }
  int64_t product = 1;
  for (int64_t size : source.sizes) product *= size;
  const bool strided = !source.sizes.empty();
  if (source.sizes.size() != source.strides.size() || (strided && product != source.numel)) {
    fail("sizes and strides of " + std::to_string(source.numel) + " elements",
         std::to_string(source.sizes.size()) + " sizes of " + std::to_string(product) +
             " elements with " + std::to_string(source.strides.size()) + " strides",
         "Pass the gradient's own.");
  }
}

// Drops dimensions of one element and merges those that lie side by side in memory.
StridedEntry merged(const Source& source) {
  StridedEntry entry{source.data, source.start, source.numel, 0, source.dtype, 0, {}, {}};
  for (size_t i = 0; i < source.sizes.size(); ++i) {
    const int64_t size = source.sizes[i], stride = source.strides[i];
    if (size == 1) continue;
    const int64_t last = entry.dims - 1;
    if (last >= 0 && entry.strides[last] == stride * size) {
      entry.sizes[last] *= size;
      entry.strides[last] = stride;
      continue;
    }
    if (entry.dims == kMaxDims) {
      fail("at most 8 dimensions that do not merge", "more", "Pass a contiguous gradient.");
    }
    entry.sizes[entry.dims] = size;
    entry.strides[entry.dims++] = stride;
  }
  return entry;
}

bool is_dense(const StridedEntry& entry) {
  return entry.dims == 0 || (entry.dims == 1 && entry.strides[0] == 1);
}

struct Plan {
  std::vector<DenseEntry> dense;
  std::vector<StridedEntry> strided;

  // Zeros follow what was moved before them in the same entry: a pad costs no block of its own.
  void zero(int64_t start, int64_t stop) {
    if (start >= stop) return;
    if (!dense.empty() && dense.back().stop == start) {
      dense.back().stop = stop;
    } else {
      dense.push_back({nullptr, start, 0, stop, 0, DType::kFloat32});
    }
  }
};

Plan make_plan(std::span<const Source> sources, int64_t numel, bool accumulate) {
  Plan plan;
  int64_t last = 0;
  for (const Source& source : sources) {
    check(source, last, numel);
    if (source.numel == 0) continue;
    if (!accumulate) plan.zero(last, source.start);
    last = source.start + source.numel;
    const StridedEntry entry = merged(source);
    if (is_dense(entry)) {
      plan.dense.push_back({source.data, source.start, source.numel, last, 0, source.dtype});
    } else {
      plan.strided.push_back(entry);
    }
  }
  if (!accumulate) plan.zero(last, numel);
  return plan;
}

Range range_of(const DenseEntry& entry) { return {entry.start, entry.stop}; }
Range range_of(const StridedEntry& entry) { return {entry.start, entry.start + entry.numel}; }

// Launches `kernel` on as many entries at a time as its parameter holds.
template <class Entry>
void launch_all(void (*kernel)(Table<Entry>), const std::vector<Entry>& entries, void* out,
                void* stream) {
  for (size_t done = 0; done < entries.size();) {
    Table<Entry> table{};
    table.out = out;
    table.count = static_cast<int>(std::min<size_t>(entries.size() - done, table.kCapacity));
    int64_t chunks = 0;
    for (int i = 0; i < table.count; ++i, ++done) {
      table.entries[i] = entries[done];
      table.entries[i].first_chunk = static_cast<int32_t>(chunks);
      chunks += chunk_count(range_of(entries[done]));
    }
    launch("pack", kernel, chunks, stream, table);
  }
}

template <class Out, bool kAccumulate>
void run(const Plan& plan, void* out, void* stream) {
  launch_all(&pack_dense<Out, kAccumulate>, plan.dense, out, stream);
  launch_all(&pack_strided<Out, kAccumulate>, plan.strided, out, stream);
}

template <class Out>
void run(const Plan& plan, void* out, bool accumulate, void* stream) {
  accumulate ? run<Out, true>(plan, out, stream) : run<Out, false>(plan, out, stream);
}

}  // namespace

void pack(std::span<const Source> sources, Bucket out, bool accumulate, void* stream) {
  if (out.data == nullptr && out.numel > 0) fail("a bucket", "a null pointer", "Allocate it.");
  const Plan plan = make_plan(sources, out.numel, accumulate);
  switch (out.dtype) {
    case DType::kFloat32:
      return run<float>(plan, out.data, accumulate, stream);
    case DType::kBFloat16:
      return run<BFloat16>(plan, out.data, accumulate, stream);
    case DType::kFloat16:
      return run<Float16>(plan, out.data, accumulate, stream);
  }
}

}  // namespace fk::cuda
