// SPDX-License-Identifier: Apache-2.0
// Waiting for what only answers when asked, with a limit.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace fk::nccl {

using Clock = std::chrono::steady_clock;  // a step of the wall clock is no time-out

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  Clock::time_point start_ = Clock::now();
};

// Pauses between two questions: at first only long enough for another thread, because a
// non-blocking launch is through within some ten microseconds; then up to a millisecond.
class Backoff {
 public:
  void pause() {
    if (++count_ <= kYields) {
      std::this_thread::yield();
      return;
    }
    std::this_thread::sleep_for(sleep_);
    sleep_ = std::min(2 * sleep_, kLongest);
  }

 private:
  static constexpr int kYields = 64;
  static constexpr std::chrono::microseconds kLongest{1000};
  int count_ = 0;
  std::chrono::microseconds sleep_{16};
};

}  // namespace fk::nccl
