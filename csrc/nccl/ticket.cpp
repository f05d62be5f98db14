// SPDX-License-Identifier: Apache-2.0
#include "nccl/ticket.h"

#include <stdexcept>
#include <utility>

namespace fk::nccl {

Ticket::Ticket(std::shared_ptr<Context> context, std::string label, const char* operation)
    : context_(std::move(context)), label_(std::move(label)), operation_(operation) {}

void Ticket::issued(EventPtr started, EventPtr done, cudaStream_t stream) {
  started_ = std::move(started);
  done_ = std::move(done);
  stream_ = stream;
  state_.store(State::kIssued, std::memory_order_release);
}

void Ticket::dropped() {
  State queued = State::kQueued;
  state_.compare_exchange_strong(queued, State::kDropped);
}

bool Ticket::has_event() const {
  context_->require_owner(label_);
  switch (state_.load(std::memory_order_acquire)) {
    case State::kIssued:
      return true;
    case State::kEmpty:
      context_->failure.raise_if_set();
      return false;
    case State::kQueued:
      throw std::runtime_error(cat(label_, ": expected ", operation_,
                                   " to be issued before wait, "
                                   "got one that is queued in a group. End the group first."));
    case State::kDropped:
      break;
  }
  context_->failure.raise_if_set();
  throw std::runtime_error(cat(label_, ": expected ", operation_,
                               " to be issued, got one that was dropped with its group. Read the "
                               "error that ended the group."));
}

void Ticket::wait(cudaStream_t stream) const {
  if (!has_event()) return;
  cudaError_t error;
  {
    // Handle 0 means the current device's default stream.
    const DeviceGuard guard(*context_, label_);
    error = context_->api.cudaStreamWaitEvent(stream, done_->handle, 0);
  }
  // Also after a failure the stream waits: memory is then not reused under a kernel that is ending.
  context_->failure.raise_if_set();
  check(context_->api, error, label_, "a stream to wait for an event",
        "Read the first CUDA error of this process.");
}

uint64_t Ticket::event_id() const { return is_issued() ? done_->id : 0; }

uint64_t Ticket::started_id() const { return is_issued() ? started_->id : 0; }

cudaStream_t Ticket::stream() const { return is_issued() ? stream_ : nullptr; }

}  // namespace fk::nccl
