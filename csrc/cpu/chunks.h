// SPDX-License-Identifier: Apache-2.0
// What the kernels share: checks of their numbers, and a table of fragments as chunks of work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/level.h"

namespace fk::cpu {

// What one thread takes at a time, in elements. Also the unit in which a norm is summed, so that
// its result does not depend on the number of threads.
inline constexpr int64_t kChunkNumel = int64_t{1} << 15;

[[noreturn]] inline void fail(const std::string& where, const std::string& expected,
                              const std::string& got, const std::string& advice) {
  throw std::invalid_argument(where + ": expected " + expected + ", got " + got + ". " + advice);
}

inline std::string range(int64_t start, int64_t stop) {
  std::string text = "[";  // appended to: GCC 12 warns about a literal plus a string
  return text.append(std::to_string(start)).append(", ").append(std::to_string(stop)).append(")");
}

inline void check_table(const char* where, std::span<const Fragment> table, int64_t numel) {
  for (const Fragment& fragment : table) {
    if (fragment.start < 0 || fragment.start > fragment.stop || fragment.stop > numel) {
      fail(where, "fragments inside " + range(0, numel), range(fragment.start, fragment.stop),
           "Rebuild the table for this shard.");
    }
  }
}

inline void check_rows(const char* where, std::span<const Fragment> table, size_t rows) {
  for (const Fragment& fragment : table) {
    if (fragment.row < 0 || fragment.row >= static_cast<int64_t>(rows)) {
      fail(where, "rows below " + std::to_string(rows), std::to_string(fragment.row),
           "Rebuild the coefficients.");
    }
  }
}

inline void check_pointer(const char* where, const char* name, const void* data, int64_t numel) {
  if (data == nullptr && numel > 0) fail(where, name, "a null pointer", "Pass a CPU tensor.");
}

// The state and the gradients' dtype; the gradients themselves are the caller's.
inline void check_state(const char* where, const Shard& shard, DType grads) {
  check_pointer(where, "master", shard.master.data, shard.numel);
  check_pointer(where, "exp_avg", shard.exp_avg, shard.numel);
  check_pointer(where, "exp_avg_sq", shard.exp_avg_sq, shard.numel);
  const DType master = shard.master.dtype;
  if (master != DType::kFloat32 && master != DType::kFloat64) {
    fail(where, "a float32 or float64 master", "16 bits", "Keep a master copy.");
  }
  if (grads == DType::kFloat64 && master != DType::kFloat64) {
    fail(where, "gradients of at most float32", "float64", "Reduce in float32.");
  }
}

// Call f(start, stop) for each chunk of a range.
template <class F>
void for_each_chunk(int64_t start, int64_t stop, const F& f) {
  for (; start < stop; start += kChunkNumel) f(start, std::min(start + kChunkNumel, stop));
}

// The chunks of the fragments that take a step; adds their elements to `numel`.
inline std::vector<AdamPart> active_parts(std::span<const Fragment> table,
                                          std::span<const CoefRow> coefs, int64_t& numel) {
  std::vector<AdamPart> parts;
  for (const Fragment& fragment : table) {
    const CoefRow& coef = coefs[fragment.row];
    if (coef.active == 0) continue;
    for_each_chunk(fragment.start, fragment.stop,
                   [&](int64_t start, int64_t stop) { parts.push_back({start, stop, coef}); });
    numel += fragment.stop - fragment.start;
  }
  return parts;
}

// A chunk of a norm.
struct NormPart {
  int64_t start, stop;
  double sum = 0;
};

// Sum the parts' sums in order, and count what is not finite in those that are not.
std::pair<double, double> finish_norm(Buffer grads, std::span<const NormPart> parts);

}  // namespace fk::cpu
