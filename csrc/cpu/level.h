// SPDX-License-Identifier: Apache-2.0
// The inner loops, compiled once for each instruction set; which one runs is chosen at run time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace fk::cpu {

// Elements [start, stop) with one row of coefficients.
struct AdamPart {
  int64_t start, stop;
  CoefRow coef;
};

// One instruction set's loops. Plain functions of contiguous ranges: no threads, no checks.
struct Level {
  const char* name;
  void (*adam)(const Shard& shard, const AdamPart& part, AdamOptions options);
  double (*square_sum)(Buffer grads, int64_t start, int64_t stop);
  void (*convert)(Buffer to, int64_t to_start, Buffer from, int64_t from_start, int64_t numel);
  void (*add)(Buffer to, int64_t to_start, Buffer from, int64_t from_start, int64_t numel);
  // to = cast(from[0] + from[1] + ...), or cast(to + sum), of elements [start, start + numel).
  void (*sum)(Buffer to, int64_t to_start, const Peers& from, int64_t start, int64_t numel);
  void (*add_sum)(Buffer to, int64_t to_start, const Peers& from, int64_t start, int64_t numel);
};

// The best that this processor has, unless `set_level` chose another.
const Level& level();

// The names of the levels that this processor can run, worst first.
std::vector<std::string> levels();

// Throws std::invalid_argument if the processor or the build lacks it. For tests and benches.
void set_level(const std::string& name);

}  // namespace fk::cpu
