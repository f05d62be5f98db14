// SPDX-License-Identifier: Apache-2.0
// Sum of squares and count of non-finite elements, in two kernels without atomics: the same order,
// and so the same bits, at every run and on every device.
#pragma once

#include <cmath>

#include "cuda/types.cuh"

namespace fk::cuda {

constexpr int kNormBlocks = 1024;  // at most: what the second kernel's one block then adds
constexpr int kWarp = 32;
constexpr int kNormGroup = 8;   // elements that are added in float32 before float64 takes them
constexpr int kNormRounds = 2;  // groups of a thread that are loaded together
// Outside this range a sum of squares in float32 has overflowed or may have lost some to underflow.
constexpr float kTrustedMin = 1e-30f;
constexpr float kTrustedMax = 3.4e38f;

struct NormSums {
  double squares = 0;
  double bad = 0;  // a count: exact to 2^53

  __device__ void add(const NormSums& other) {
    squares += other.squares;
    bad += other.bad;
  }

  __device__ void add(float x) {
    squares += static_cast<double>(x) * static_cast<double>(x);
    bad += fabsf(x) < INFINITY ? 0 : 1;  // false for a NaN too
  }

  // Squares are added in pairs in float32, which keeps float64 out of most of the arithmetic: some
  // devices have hardly any.
  template <class T>
  __device__ void add(const Group<T, kNormGroup>& group) {
    float squared[kNormGroup];
#pragma unroll
    for (int i = 0; i < kNormGroup; ++i) {
      const float x = widen(group.values[i]);
      squared[i] = x * x;
    }
#pragma unroll
    for (int width = kNormGroup / 2; width > 0; width /= 2) {
#pragma unroll
      for (int i = 0; i < width; ++i) squared[i] += squared[i + width];
    }
    if (squared[0] >= kTrustedMin && squared[0] <= kTrustedMax) {
      squares += static_cast<double>(squared[0]);  // finite, so every term is
      return;
    }
    for (int i = 0; i < kNormGroup; ++i) add(widen(group.values[i]));
  }
};

// Adds the sums of all threads; the result is thread 0's.
__device__ inline NormSums block_sum(NormSums sums) {
  __shared__ double squares[kThreads / kWarp];
  __shared__ double bad[kThreads / kWarp];
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    NormSums other;
    other.squares = __shfl_down_sync(0xffffffffu, sums.squares, lanes);
    other.bad = __shfl_down_sync(0xffffffffu, sums.bad, lanes);
    sums.add(other);
  }
  if (thread % kWarp == 0) {
    squares[thread / kWarp] = sums.squares;
    bad[thread / kWarp] = sums.bad;
  }
  __syncthreads();
  if (thread == 0) {
    for (int warp = 1; warp < kThreads / kWarp; ++warp) {
      NormSums other;
      other.squares = squares[warp];
      other.bad = bad[warp];
      sums.add(other);
    }
  }
  return sums;
}

// One block takes every gridDim.x-th chunk, and writes two doubles.
template <class T>
__global__ void __launch_bounds__(kThreads, kBlocksResident)
    norm_blocks(const T* grads, const int64_t* chunks, int64_t chunk_count, double* partials) {
  NormSums sums;
  for (int64_t chunk = blockIdx.x; chunk < chunk_count; chunk += gridDim.x) {
    const int64_t start = chunks[3 * chunk];
    const T* const first = grads + start;
    const int count = static_cast<int>(chunks[3 * chunk + 1] - start);
    const Split split = split_run(address_of(first), sizeof(T), kNormGroup, count);
    // All loads of a round come before the first sum: the branch in it would hold them back.
    for (int base = static_cast<int>(threadIdx.x); base < split.groups;
         base += kNormRounds * kThreads) {
      Group<T, kNormGroup> values[kNormRounds];
#pragma unroll
      for (int round = 0; round < kNormRounds; ++round) {
        const int group = base + round * kThreads;
        if (group < split.groups) values[round].load(first + split.head + group * kNormGroup);
      }
#pragma unroll
      for (int round = 0; round < kNormRounds; ++round) {
        if (base + round * kThreads < split.groups) sums.add(values[round]);
      }
    }
    const int lone = count - split.groups * kNormGroup;
    for (int k = static_cast<int>(threadIdx.x); k < lone; k += kThreads) {
      sums.add(widen(first[lone_element(split, kNormGroup, k)]));
    }
  }
  sums = block_sum(sums);
  if (threadIdx.x == 0) {
    partials[2 * int64_t{blockIdx.x}] = sums.squares;
    partials[2 * int64_t{blockIdx.x} + 1] = sums.bad;
  }
}

// One block adds what the blocks before it wrote.
static __global__ void __launch_bounds__(kThreads, kBlocksResident)
    norm_total(const double* partials, int count, double* out) {
  NormSums sums;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    NormSums other;
    other.squares = partials[2 * i];
    other.bad = partials[2 * i + 1];
    sums.add(other);
  }
  sums = block_sum(sums);
  if (threadIdx.x == 0) {
    out[0] = sums.squares;
    out[1] = sums.bad;
  }
}

}  // namespace fk::cuda
