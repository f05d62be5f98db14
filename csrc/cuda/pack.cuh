// SPDX-License-Identifier: Apache-2.0
// Gradients into a flat bucket. The table of gradients is the kernel's parameter: nothing is
// uploaded, so it may differ at every step at no cost.
#pragma once

#include "cuda/kernels.h"
#include "cuda/types.cuh"

namespace fk::cuda {

constexpr int kMaxParameterBytes = 4096;  // of a kernel, on every architecture

// Fills [start, stop) of the bucket: `numel` elements from `data`, then zeros.
struct DenseEntry {
  const void* data;
  int64_t start, numel, stop;
  int32_t first_chunk;  // the chunks of earlier entries
  DType dtype;
};

struct StridedEntry {
  const void* data;
  int64_t start, numel;
  int32_t first_chunk;
  DType dtype;
  int64_t dims;
  int64_t sizes[kMaxDims], strides[kMaxDims];
};

template <class Entry>
struct Table {
  static constexpr int kCapacity = (kMaxParameterBytes - 16) / sizeof(Entry);
  void* out;
  int count;
  Entry entries[kCapacity];
};
static_assert(sizeof(Table<DenseEntry>) <= kMaxParameterBytes);
static_assert(sizeof(Table<StridedEntry>) <= kMaxParameterBytes);

template <class Out, bool kAccumulate, class In>
__device__ inline Out moved(In in, Out old) {
  if constexpr (kAccumulate) return narrow<Out>(widen(old) + widen(in));
  return convert<Out>(in);
}

// Moves `count` <= kChunkNumel elements with all threads of the block.
template <class Out, bool kAccumulate, class In>
__device__ void move(const In* __restrict__ in, Out* __restrict__ out, int count) {
  constexpr int kNumel = kGroup<sizeof(In), sizeof(Out)>;
  constexpr int kRounds = kChunkNumel / kNumel / kThreads;
  const Split split = split_copy<sizeof(In), sizeof(Out)>(address_of(in), address_of(out), count);
  // All loads come before the first store: the compiler may not move them past it by itself.
  Group<In, kNumel> source[kRounds];
  Group<Out, kNumel> target[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int group = static_cast<int>(threadIdx.x) + round * kThreads;
    if (group >= split.groups) continue;
    source[round].load(in + split.head + group * kNumel);
    if constexpr (kAccumulate) target[round].load(out + split.head + group * kNumel);
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int group = static_cast<int>(threadIdx.x) + round * kThreads;
    if (group >= split.groups) continue;
#pragma unroll
    for (int i = 0; i < kNumel; ++i) {
      Out& value = target[round].values[i];
      value = moved<Out, kAccumulate>(source[round].values[i], value);
    }
    target[round].store(out + split.head + group * kNumel);
  }
  const int lone = count - split.groups * kNumel;
  for (int k = static_cast<int>(threadIdx.x); k < lone; k += kThreads) {
    const int i = lone_element(split, kNumel, k);
    out[i] = moved<Out, kAccumulate>(in[i], out[i]);
  }
}

template <class Out>
__device__ void fill_zero(Out* out, int count) {
  constexpr int kNumel = kGroup<sizeof(Out)>;
  const Split split = split_run(address_of(out), sizeof(Out), kNumel, count);
  for (int group = static_cast<int>(threadIdx.x); group < split.groups; group += kThreads) {
    *reinterpret_cast<uint4*>(out + split.head + group * kNumel) = uint4{0, 0, 0, 0};
  }
  const int lone = count - split.groups * kNumel;
  for (int k = static_cast<int>(threadIdx.x); k < lone; k += kThreads) {
    out[lone_element(split, kNumel, k)] = narrow<Out>(0.0f);
  }
}

// Calls f with a pointer of the type that the code names.
template <class F>
__device__ inline void with_type(DType dtype, const void* data, const F& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(static_cast<const float*>(data));
    case DType::kBFloat16:
      return f(static_cast<const BFloat16*>(data));
    case DType::kFloat16:
      return f(static_cast<const Float16*>(data));
  }
}

// One block a chunk.
template <class Out, bool kAccumulate>
__global__ void __launch_bounds__(kThreads, kBlocksResident)
    pack_dense(const __grid_constant__ Table<DenseEntry> table) {
  const int64_t block = blockIdx.x;
  const DenseEntry& entry = table.entries[find_entry(table.entries, table.count, block)];
  const Range part = chunk_of({entry.start, entry.stop}, block - entry.first_chunk);
  Out* const out = static_cast<Out*>(table.out) + part.start;
  const int64_t offset = part.start - entry.start;
  const int64_t left = entry.numel - offset;
  const int count = static_cast<int>(part.stop - part.start);
  const int readable = left <= 0 ? 0 : left < count ? static_cast<int>(left) : count;
  if (readable > 0) {
    with_type(entry.dtype, entry.data,
              [&](const auto* data) { move<Out, kAccumulate>(data + offset, out, readable); });
  }
  if (readable < count) fill_zero(out + readable, count - readable);
}

template <class Out, bool kAccumulate, class Index, class In>
__device__ void move_strided(const StridedEntry& entry, const In* in, Out* out, Range part) {
  const int dims = static_cast<int>(entry.dims);
  for (int64_t i = part.start + threadIdx.x; i < part.stop; i += kThreads) {
    const auto index = static_cast<Index>(i - entry.start);
    const In value = in[strided_offset(entry.sizes, entry.strides, dims, index)];
    out[i] = moved<Out, kAccumulate>(value, out[i]);
  }
}

// One block a chunk; every element finds its own place in the gradient.
template <class Out, bool kAccumulate>
__global__ void __launch_bounds__(kThreads, kBlocksResident)
    pack_strided(const __grid_constant__ Table<StridedEntry> table) {
  const int64_t block = blockIdx.x;
  const StridedEntry& entry = table.entries[find_entry(table.entries, table.count, block)];
  const Range all{entry.start, entry.start + entry.numel};
  const Range part = chunk_of(all, block - entry.first_chunk);
  Out* const out = static_cast<Out*>(table.out);
  with_type(entry.dtype, entry.data, [&](const auto* data) {
    if (entry.numel <= UINT32_MAX) {
      move_strided<Out, kAccumulate, uint32_t>(entry, data, out, part);
    } else {
      move_strided<Out, kAccumulate, uint64_t>(entry, data, out, part);
    }
  });
}

}  // namespace fk::cuda
