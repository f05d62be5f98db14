// SPDX-License-Identifier: Apache-2.0
// Splitting work over threads that live for one call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace fk::cpu {

// Below this many elements a thread costs more (about 20 us) than it saves.
inline constexpr int64_t kNumelPerThread = int64_t{1} << 17;

// Call f(first, last) on disjoint ranges that cover [0, items), the calling thread taking one.
//
// Threads are made for the call: they are cheap beside the work (see kNumelPerThread), and a pool
// would not survive a fork, which data loaders and tests do. `f` must not throw.
template <class F>
void parallel_for(int64_t items, int64_t numel, int threads, const F& f) {
  const int64_t most = std::min<int64_t>({threads, items, numel / kNumelPerThread});
  if (most <= 1) {
    if (items > 0) f(int64_t{0}, items);
    return;
  }
  std::vector<std::thread> helpers;
  helpers.reserve(most - 1);
  int64_t next = 0;
  for (int64_t k = 0; k + 1 < most; ++k) {
    const int64_t last = items * (k + 1) / most;
    try {
      helpers.emplace_back(f, next, last);
    } catch (const std::system_error&) {
      break;  // no thread to be had: the calling one does the rest
    }
    next = last;
  }
  f(next, items);
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace fk::cpu
