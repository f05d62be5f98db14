// SPDX-License-Identifier: Apache-2.0
// The loops for x86 processors with avx2,fma,f16c.
#ifdef __x86_64__
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "cpu/level.h"

// After the includes: nothing of the standard library may be compiled for this target here, since
// the linker would keep one copy for all.
#pragma GCC target("avx2,fma,f16c")
#pragma GCC diagnostic ignored "-Wpsabi"

namespace fk::cpu::avx2 {
namespace {
#define FK_VECTOR_BYTES 32
#include "cpu/vector.inl"
// Order matters: the loops use the vectors.
#include "cpu/loops.inl"
#include "cpu/sum.inl"
}  // namespace

extern const Level kLevel;
const Level kLevel{"avx2", adam, square_sum, cast<false>, cast<true>, sum<false>, sum<true>};

}  // namespace fk::cpu::avx2
#endif
