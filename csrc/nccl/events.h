// SPDX-License-Identifier: Apache-2.0
// Events without timing, reused: making one costs more than recording one.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nccl/context.h"

namespace fk::nccl {

// One recording. `id` is not the handle's: it counts the recordings of this process, from 1, so
// that a trace can tell them apart.
struct Event {
  cudaEvent_t handle;
  uint64_t id;
};

using EventPtr = std::shared_ptr<const Event>;

// Any thread. An event goes back when nothing holds the recording any more. A stream that was told
// to wait for the old recording is not disturbed by a new one: the wait took it at the call.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(std::shared_ptr<const Context> context) : context_(std::move(context)) {}
  ~EventPool() { close(); }

  // Records on `stream`. Throws std::runtime_error that starts with `where`.
  EventPtr record(cudaStream_t stream, const std::string& where);

  // Destroys what is unused now, and the rest when it comes back.
  void close() noexcept;

 private:
  cudaEvent_t take(const std::string& where);
  void give_back(cudaEvent_t handle) noexcept;

  const std::shared_ptr<const Context> context_;
  mutable std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
  size_t size_ = 0;
  bool closed_ = false;
};

}  // namespace fk::nccl
