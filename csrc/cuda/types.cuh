// SPDX-License-Identifier: Apache-2.0
// The element types, their conversions, and groups of elements that travel 16 bytes at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_types.h>

#include <cstdint>

#include "cuda/index.cuh"

namespace fk::cuda {

using BFloat16 = __nv_bfloat16;
using Float16 = __half;

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(BFloat16 x) { return __bfloat162float(x); }
__device__ inline float widen(Float16 x) { return __half2float(x); }

template <class T>
__device__ T narrow(float x);
template <>
__device__ inline float narrow<float>(float x) {
  return x;
}
template <>
__device__ inline BFloat16 narrow<BFloat16>(float x) {
  return __float2bfloat16_rn(x);  // a NaN stays one
}
template <>
__device__ inline Float16 narrow<Float16>(float x) {
  return __float2half_rn(x);
}

// Rounds once, to nearest even. Between equal types it copies the bits, NaNs' too.
template <class Out, class In>
__device__ inline Out convert(In x) {
  return narrow<Out>(widen(x));
}
template <>
__device__ inline BFloat16 convert<BFloat16, BFloat16>(BFloat16 x) {
  return x;
}
template <>
__device__ inline Float16 convert<Float16, Float16>(Float16 x) {
  return x;
}

// kCount elements that lie at a multiple of 16 bytes and fill a multiple of 16 bytes.
template <class T, int kCount>
struct alignas(kVectorBytes) Group {
  static constexpr int kVectors = kCount * sizeof(T) / kVectorBytes;
  static_assert(kVectors * kVectorBytes == kCount * sizeof(T));
  T values[kCount];

  __device__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      reinterpret_cast<uint4*>(values)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
  }

  __device__ void store(T* to) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(values)[i];
    }
  }
};

__device__ inline uintptr_t address_of(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

}  // namespace fk::cuda
