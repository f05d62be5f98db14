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
  Clock::time_point start() const { return start_; }

 private:
  Clock::time_point start_ = Clock::now();
};

// Pauses between two questions. A launch on a non-blocking communicator is through when a thread
// that NCCL starts for it has ended: usually well below kSpin. A sleep takes at least the kernel's
// timer slack of 50 us, so that until then others are only let in between.
class Backoff {
 public:
  void pause() {
    if (Clock::now() < spin_until_) {
      std::this_thread::yield();
      return;
    }
    std::this_thread::sleep_for(sleep_);
    sleep_ = std::min(2 * sleep_, kLongest);
  }

 private:
  static constexpr std::chrono::microseconds kSpin{200}, kLongest{1000};
  Clock::time_point spin_until_ = Clock::now() + kSpin;
  std::chrono::microseconds sleep_{50};
};

}  // namespace fk::nccl
