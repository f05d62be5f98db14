// SPDX-License-Identifier: Apache-2.0
#include "nccl/watchdog.h"

#include <algorithm>
#include <utility>

namespace fk::nccl {
namespace {

// So many recordings on one channel hold as many events: then it is time to look.
constexpr size_t kMany = 64;

std::chrono::duration<double> interval(double limit_s) {
  return std::chrono::duration<double>(std::clamp(limit_s / 10, 0.01, 1.0));
}

std::string late(const InFlight& culprit, const std::vector<InFlight>& others, double limit_s) {
  std::string text = cat("no completion after ", seconds(culprit.since.seconds()), " (time limit ",
                         seconds(limit_s), ')');
  for (const InFlight& one : others) {
    text += cat("; issued after it: ", one.label, " (", one.operation, ')');
  }
  return text;
}

}  // namespace

Watchdog::Watchdog(std::shared_ptr<Context> context, std::vector<std::shared_ptr<Channel>> channels,
                   double limit_s)
    : context_(std::move(context)), limit_s_(limit_s) {
  for (auto& channel : channels) lanes_.push_back({std::move(channel), {}});
}

void Watchdog::start() {
  thread_ = Task::elsewhere([self = shared_from_this()] { self->run(); });
}

bool Watchdog::stop(double limit_s) {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  return thread_.wait(limit_s);
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
  const RelaxedCapture relaxed(context_->api);
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
  std::vector<InFlight> fronts;
  for (size_t channel = 0; channel < lanes_.size(); ++channel) {
    std::optional<InFlight> front = first_unfinished(channel);
    if (context_->failure.is_set()) return false;
    if (!front) continue;
    // An error first: it explains better than the time does.
    if (const auto error = lanes_[channel].channel->async_error()) {
      fail(context_->failed(front->label, front->operation, *error));
      return false;
    }
    fronts.push_back(*std::move(front));
  }
  if (!fronts.empty()) {
    // What was issued first is to blame: the others may only wait behind it.
    std::ranges::sort(fronts, {}, [](const InFlight& one) { return one.since.start(); });
    const InFlight culprit = std::move(fronts.front());
    fronts.erase(fronts.begin());
    if (culprit.since.seconds() > limit_s_) {
      fail(context_->failed(culprit.label, culprit.operation, late(culprit, fronts, limit_s_)));
      return false;
    }
  }
  const std::lock_guard lock(mutex_);
  return !idle();
}

std::optional<InFlight> Watchdog::first_unfinished(size_t channel) {
  while (std::optional<InFlight> front = oldest(channel)) {
    const cudaError_t state = front->done == nullptr
                                  ? cudaErrorNotReady
                                  : context_->api.cudaEventQuery(front->done->handle);
    // While somebody captures a graph, CUDA may refuse to say.
    if (state == cudaErrorNotReady || is_of_capture(state)) return front;
    if (state != cudaSuccess) {
      fail(context_->failed(front->label, front->operation, state));
      break;
    }
    const std::lock_guard lock(mutex_);
    auto& in_flight = lanes_[channel].in_flight;
    // Another thread may have looked meanwhile.
    if (!in_flight.empty() && in_flight.front().done == front->done) in_flight.pop_front();
  }
  return std::nullopt;
}

void Watchdog::fail(const std::string& text) {
  // First of all: whoever should read the exception may hang in a synchronisation of the device.
  if (context_->failure.set(text)) print(text);
  for (const Lane& lane : lanes_) lane.channel->abort();
  std::vector<std::deque<InFlight>> given_up(lanes_.size());  // freed when nothing is locked
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < lanes_.size(); ++i) given_up[i].swap(lanes_[i].in_flight);
}

}  // namespace fk::nccl
