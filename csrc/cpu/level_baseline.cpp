// SPDX-License-Identifier: Apache-2.0
// The loops for any processor of the architecture that the compiler targets.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "cpu/level.h"

#pragma GCC diagnostic ignored "-Wpsabi"

namespace fk::cpu::baseline {
namespace {
#define FK_VECTOR_BYTES 16
#include "cpu/vector.inl"
// Order matters: the loops use the vectors.
#include "cpu/loops.inl"
#include "cpu/sum.inl"
}  // namespace

extern const Level kLevel;
const Level kLevel{"baseline", adam, square_sum, cast<false>, cast<true>, sum<false>, sum<true>};

}  // namespace fk::cpu::baseline
