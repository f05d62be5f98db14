// SPDX-License-Identifier: Apache-2.0
#include "nccl/task.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace fk::nccl {

struct Task::State {
  std::mutex mutex;
  std::condition_variable ended;
  bool over = false;
};

Task::Task(std::function<void()> call) noexcept {
  const auto state = std::make_shared<State>();
  const auto work = std::make_shared<std::function<void()>>(std::move(call));
  const auto run = [state, work] {
    (*work)();
    *work = nullptr;  // and what it owned
    const std::lock_guard lock(state->mutex);
    state->over = true;
    state->ended.notify_all();
  };
  state_ = state;
  try {
    std::thread(run).detach();
  } catch (const std::system_error&) {
    run();
  }
}

bool Task::wait(double limit_s) const {
  if (state_ == nullptr) return true;
  std::unique_lock lock(state_->mutex);
  return state_->ended.wait_for(lock, std::chrono::duration<double>(limit_s),
                                [this] { return state_->over; });
}

}  // namespace fk::nccl
