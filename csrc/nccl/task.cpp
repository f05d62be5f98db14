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
  std::function<void()> call;
  std::mutex mutex;
  std::condition_variable ended;
  bool over = false;
};

void Task::run(const std::shared_ptr<State>& state) noexcept {
  state->call();
  state->call = nullptr;  // and what it owned
  const std::lock_guard lock(state->mutex);
  state->over = true;
  state->ended.notify_all();
}

Task Task::elsewhere(std::function<void()> call) {
  Task task;
  task.state_ = std::make_shared<State>();
  task.state_->call = std::move(call);
  std::thread([state = task.state_] { run(state); }).detach();
  return task;
}

Task::Task(std::function<void()> call) noexcept {
  try {
    *this = elsewhere(call);
  } catch (const std::system_error&) {
    call();
  }
}

bool Task::wait(double limit_s) const {
  if (state_ == nullptr) return true;
  std::unique_lock lock(state_->mutex);
  return state_->ended.wait_for(lock, std::chrono::duration<double>(limit_s),
                                [this] { return state_->over; });
}

}  // namespace fk::nccl
