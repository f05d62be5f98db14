// SPDX-License-Identifier: Apache-2.0
// The loops for x86 processors with avx512f,avx512bw,avx512dq,avx512vl,fma,f16c.
#ifdef __x86_64__
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "cpu/level.h"

// After the includes: nothing of the standard library may be compiled for this target here, since
// the linker would keep one copy for all.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,prefer-vector-width=512")
#pragma GCC diagnostic ignored "-Wpsabi"

namespace fk::cpu::avx512 {
namespace {
#define FK_VECTOR_BYTES 64
#include "cpu/vector.inl"
// Order matters: the loops use the vectors.
#include "cpu/loops.inl"
#include "cpu/sum.inl"
}  // namespace

extern const Level kLevel;
const Level kLevel{"avx512", adam, square_sum, cast<false>, cast<true>, sum<false>, sum<true>};

}  // namespace fk::cpu::avx512
#endif
