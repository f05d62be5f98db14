// SPDX-License-Identifier: Apache-2.0
// The index arithmetic of the kernels: integers only, the same on the device and on the host, where
// tests/cuda_host/index_cases.cpp tries every case.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FK_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FK_HOST_DEVICE inline
#endif

namespace fk::cuda {

constexpr int kThreads = 256;
constexpr int kBlocksResident = 4;     // on a multiprocessor: 64 registers a thread
constexpr int kVectorBytes = 16;       // one 128-bit access
constexpr int64_t kChunkNumel = 4096;  // what a block moves at a time: 16 elements a thread
constexpr int kMaxDims = 8;            // of a strided gradient

// Elements [start, stop).
struct Range {
  int64_t start, stop;
};

// A range is cut at the bucket's multiples of kChunkNumel, wherever it starts: its chunks but the
// first start as well aligned as the bucket does.
FK_HOST_DEVICE int64_t chunk_count(Range range) {
  if (range.start >= range.stop) return 0;
  return (range.stop - 1) / kChunkNumel - range.start / kChunkNumel + 1;
}

FK_HOST_DEVICE Range chunk_of(Range range, int64_t index) {
  const int64_t first = (range.start / kChunkNumel + index) * kChunkNumel;
  const int64_t last = first + kChunkNumel;
  return {first > range.start ? first : range.start, last < range.stop ? last : range.stop};
}

// Returns the last of `count` >= 1 entries with first_chunk <= chunk. Entries have at least one
// chunk each, and the first entry's first chunk is 0.
template <class Entry>
FK_HOST_DEVICE int find_entry(const Entry* entries, int count, int64_t chunk) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (entries[middle].first_chunk <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// How `count` elements are moved: `head` one by one, `groups` of a fixed number of elements with
// 128-bit accesses, and what is left one by one.
struct Split {
  int head, groups;
};

// The number of elements from an address to the next multiple of 16 bytes.
FK_HOST_DEVICE int numel_to_vector(uintptr_t address, int itemsize) {
  const int past = static_cast<int>(address % kVectorBytes);
  return past == 0 ? 0 : (kVectorBytes - past) / itemsize;
}

// Elements that the narrower of two types has in 16 bytes.
template <int kFirst, int kSecond = kFirst>
constexpr int kGroup = kVectorBytes / (kFirst < kSecond ? kFirst : kSecond);

// Splits elements that lie at one address, so that the groups start at a multiple of 16 bytes.
FK_HOST_DEVICE Split split_run(uintptr_t address, int itemsize, int group, int count) {
  const int head = numel_to_vector(address, itemsize);
  if (count <= head) return {count, 0};
  return {head, (count - head) / group};
}

// Splits a copy between types of kSource and kTarget bytes: into groups where, after the same head,
// both sides are at a multiple of 16 bytes; otherwise everything is head.
template <int kSource, int kTarget>
FK_HOST_DEVICE Split split_copy(uintptr_t source, uintptr_t target, int count) {
  constexpr bool kNarrowSource = kSource < kTarget;
  // The narrower side leaves one choice of head; the wider one has to fit.
  const Split split = split_run(kNarrowSource ? source : target, kNarrowSource ? kSource : kTarget,
                                kGroup<kSource, kTarget>, count);
  const bool alike = (source + split.head * kSource) % kVectorBytes == 0 &&
                     (target + split.head * kTarget) % kVectorBytes == 0;
  return alike ? split : Split{count, 0};
}

// The k-th element that is moved one by one.
FK_HOST_DEVICE int lone_element(Split split, int group, int k) {
  return k < split.head ? k : k + split.groups * group;
}

// The place of the index-th element, in row-major order, of a strided tensor. Index is unsigned:
// 32 bits divide several times faster than 64.
template <class Index>
FK_HOST_DEVICE int64_t strided_offset(const int64_t* sizes, const int64_t* strides, int dims,
                                      Index index) {
  int64_t offset = 0;
  for (int dim = dims - 1; dim > 0; --dim) {
    const Index size = static_cast<Index>(sizes[dim]);
    offset += static_cast<int64_t>(index % size) * strides[dim];
    index /= size;
  }
  return offset + static_cast<int64_t>(index) * strides[0];
}

}  // namespace fk::cuda
