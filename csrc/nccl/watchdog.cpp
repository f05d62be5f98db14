// SPDX-License-Identifier: Apache-2.0
#include "nccl/watchdog.h"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace fk::nccl {
namespace {

// So many recordings on one channel hold as many events: then it is time to look.
constexpr size_t kMany = 64;

std::chrono::duration<double> interval(double limit_s) {
  return std::chrono::duration<double>(std::clamp(limit_s / 10, 0.01, 1.0));
}

}  // namespace

Watchdog::Watchdog(std::shared_ptr<Context> context, std::vector<std::shared_ptr<Channel>> channels,
                   double limit_s, Fail fail)
    : context_(std::move(context)), limit_s_(limit_s), fail_(std::move(fail)) {
  for (auto& channel : channels) lanes_.push_back({std::move(channel), {}});
}

void Watchdog::start() {
  thread_ = std::make_unique<std::thread>([this] { run(); });
}

void Watchdog::stop() {
  if (thread_ == nullptr) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_->join();
  thread_ = nullptr;
}

void Watchdog::watch(size_t channel, InFlight one) {
  bool worth_waking;
  {
    const std::lock_guard lock(mutex_);
    worth_waking = idle();
    auto& in_flight = lanes_[channel].in_flight;
    in_flight.push_back(std::move(one));
    worth_waking = worth_waking || in_flight.size() % kMany == 0;
  }
  if (worth_waking) wake_.notify_all();
}

void Watchdog::launched(size_t channel, const EventPtr& done) {
  const std::lock_guard lock(mutex_);
  auto& in_flight = lanes_[channel].in_flight;
  if (!in_flight.empty()) in_flight.back().done = done;
}

std::optional<InFlight> Watchdog::oldest(size_t channel) const {
  const std::lock_guard lock(mutex_);
  const auto& in_flight = lanes_[channel].in_flight;
  return in_flight.empty() ? std::nullopt : std::optional(in_flight.front());
}

bool Watchdog::idle() const {
  return std::ranges::all_of(lanes_, [](const Lane& lane) { return lane.in_flight.empty(); });
}

void Watchdog::run() {
  context_->api.cudaSetDevice(context_->device);  // this thread's own: nothing to restore
  std::unique_lock lock(mutex_);
  while (!stopping_ && !context_->failure.is_set()) {
    if (idle()) {
      wake_.wait(lock, [&] { return stopping_ || !idle(); });
      if (stopping_) break;
    }
    wake_.wait_for(lock, interval(limit_s_));
    if (stopping_) break;
    lock.unlock();
    look();
    lock.lock();
  }
}

bool Watchdog::look() {
  for (size_t channel = 0; channel < lanes_.size(); ++channel) {
    if (!look_at(channel)) break;
  }
  const std::lock_guard lock(mutex_);
  return !idle();
}

bool Watchdog::look_at(size_t channel) {
  while (const std::optional<InFlight> front = oldest(channel)) {
    const auto& [label, operation, done, since] = *front;
    const cudaError_t state =
        done == nullptr ? cudaErrorNotReady : context_->api.cudaEventQuery(done->handle);
    if (state == cudaErrorNotReady) {
      const double elapsed = since.seconds();
      // An error first: it explains better than the time does.
      std::optional<std::string> what = lanes_[channel].channel->async_error();
      if (!what && elapsed > limit_s_) {
        what =
            cat("no completion after ", seconds(elapsed), " (time limit ", seconds(limit_s_), ')');
      }
      return !what || fail(context_->failed(label, operation, *what));
    }
    if (state != cudaSuccess) return fail(context_->failed(label, operation, state));
    const std::lock_guard lock(mutex_);
    auto& in_flight = lanes_[channel].in_flight;
    // Another thread may have looked meanwhile.
    if (!in_flight.empty() && in_flight.front().done == done) in_flight.pop_front();
  }
  return true;
}

bool Watchdog::fail(const std::string& text) {
  if (fail_(text)) {
    // Whoever should read the exception may hang in a synchronisation of the device.
    std::fprintf(stderr, "fsdp_kernels: %s\n", text.c_str());
  }
  std::vector<std::deque<InFlight>> given_up(lanes_.size());  // freed when nothing is locked
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < lanes_.size(); ++i) given_up[i].swap(lanes_[i].in_flight);
  return false;
}

}  // namespace fk::nccl
