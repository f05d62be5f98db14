// SPDX-License-Identifier: Apache-2.0
// The handle of one collective that was issued, or is queued in a group.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "nccl/context.h"
#include "nccl/events.h"

namespace fk::nccl {

// Outlives its communicator. Any thread.
//
// To wait throws std::runtime_error when the communicator has failed, also if this collective was
// through before: what the ranks computed from there on does not agree.
class Ticket {
 public:
  Ticket(std::shared_ptr<Context> context, std::string label, const char* operation);

  // What is enqueued on `stream` from here on runs after the collective. The host does not wait.
  void wait(cudaStream_t stream) const;

  const std::string& label() const { return label_; }

  // For traces: the recording behind the collective, the one on the compute stream that it waited
  // for, and the stream that it ran on. 0 where nothing was enqueued: 0 bytes, queued, dropped.
  uint64_t event_id() const;
  uint64_t started_id() const;
  cudaStream_t stream() const;

  // For the communicator, once.
  void issued(EventPtr started, EventPtr done, cudaStream_t stream);
  void nothing_to_do() { state_.store(State::kEmpty, std::memory_order_release); }
  void dropped();  // unless it was issued

 private:
  enum class State { kQueued, kIssued, kEmpty, kDropped };

  bool is_issued() const { return state_.load(std::memory_order_acquire) == State::kIssued; }
  bool has_event() const;  // throws where there is nothing to wait for yet

  const std::shared_ptr<Context> context_;
  const std::string label_;
  const char* const operation_;
  // Written before the state becomes kIssued, never after.
  EventPtr started_, done_;
  cudaStream_t stream_ = nullptr;
  std::atomic<State> state_{State::kQueued};
};

}  // namespace fk::nccl
