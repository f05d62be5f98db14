// SPDX-License-Identifier: Apache-2.0
#include "nccl/events.h"

#include <atomic>

namespace fk::nccl {
namespace {

std::atomic<uint64_t> recordings{0};

}  // namespace

EventPtr EventPool::record(cudaStream_t stream, const std::string& where) {
  const cudaEvent_t handle = take(where);
  // From here on the event goes back whatever happens.
  const auto back = [pool = shared_from_this()](const Event* event) {
    pool->give_back(event->handle);
    delete event;
  };
  const EventPtr event(new Event{handle, ++recordings}, back);
  check(context_->api, context_->api.cudaEventRecord(handle, stream), where,
        "an event to be recorded", "Read the first CUDA error of this process.");
  return event;
}

cudaEvent_t EventPool::take(const std::string& where) {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      const cudaEvent_t handle = free_.back();
      free_.pop_back();
      return handle;
    }
  }
  cudaEvent_t handle = nullptr;
  check(context_->api, context_->api.cudaEventCreateWithFlags(&handle, cudaEventDisableTiming),
        where, "a CUDA event to be made", "Read the first CUDA error of this process.");
  const std::lock_guard lock(mutex_);
  ++size_;
  free_.reserve(size_);  // so that giving back never allocates
  return handle;
}

void EventPool::give_back(cudaEvent_t handle) noexcept {
  if (context_->forked()) return;
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      free_.push_back(handle);
      return;
    }
    --size_;
  }
  context_->api.cudaEventDestroy(handle);
}

void EventPool::close() noexcept {
  if (context_->forked()) return;
  std::vector<cudaEvent_t> unused;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    unused.swap(free_);
    size_ -= unused.size();
  }
  for (const cudaEvent_t handle : unused) context_->api.cudaEventDestroy(handle);
}

}  // namespace fk::nccl
