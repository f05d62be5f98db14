// SPDX-License-Identifier: Apache-2.0
// A call that may not return, on a thread of its own: others wait for it with a limit.
#pragma once

#include <functional>
#include <memory>

namespace fk::nccl {

class Task {
 public:
  Task() = default;  // nothing to wait for

  // `call` must share the ownership of all that it touches: it may outlast everyone. Its captures
  // are gone when the task has ended. Runs here, at once, where the process can have no more
  // threads.
  explicit Task(std::function<void()> call) noexcept;

  // The same, but never here: throws std::system_error.
  static Task elsewhere(std::function<void()> call);

  // Whether the call has returned by then. Any thread.
  bool wait(double limit_s) const;

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state) noexcept;

  std::shared_ptr<State> state_;
};

}  // namespace fk::nccl
