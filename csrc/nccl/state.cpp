// SPDX-License-Identifier: Apache-2.0
#include "nccl/state.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <utility>

#include "nccl/poll.h"

namespace fk::nccl {
namespace {

// How late the peers may be at close: the data is through by then, only they are waited for.
constexpr double kCloseLimit = 30;

// How long NCCL, CUDA and the watchdog may take to let go in the end. What another communicator
// holds up they never do.
constexpr double kLetGoLimit = 5;

Memory::Channels make_channels(const std::shared_ptr<Context>& context, const Options& options) {
  const ChannelConfig gathers{options.timeout_s, options.init_timeout_s, options.blocking,
                              options.min_ctas,  options.max_ctas,       options.cta_policy};
  ChannelConfig reductions = gathers;
  reductions.cta_policy = -1;
  return {std::make_shared<Channel>(context, gathers, "gather"),
          std::make_shared<Channel>(context, reductions, "reduce")};
}

}  // namespace

Communicator::State::State(const Api& api, const Options& from)
    : options(from),
      where(cat("communicator '", from.name, "'")),
      context(std::make_shared<Context>(api, from.device, from.rank, from.world, from.name)),
      events(std::make_shared<EventPool>(context)),
      channels(make_channels(context, from)),
      memory(context, from.registration),
      watchdog(std::make_shared<Watchdog>(context, channels, from.timeout_s)) {}

bool Communicator::State::is_alive() const {
  return std::ranges::any_of(channels, [](const auto& channel) { return channel->is_alive(); });
}

Memory::Channels Communicator::State::open_channels() const {
  Memory::Channels open;
  std::ranges::copy_if(channels, std::back_inserter(open),
                       [](const auto& channel) { return channel->is_open(); });
  return open;
}

void Communicator::State::require_open(const std::string& label) const {
  context->require_owner(label);
  if (!closed) return;
  const std::string before = context->failure.text();
  throw std::runtime_error(
      cat(label, ": expected an open communicator, got one that was closed. Make a new one.",
          before.empty() ? "" : " It had failed: ", before));
}

void Communicator::State::require_usable(const std::string& label, const char* operation) {
  require_open(label);
  for (size_t i = 0; i < kChannels && !context->failure.is_set(); ++i) {
    const std::optional<std::string> error = channels[i]->async_error();
    if (!error) continue;
    // It is of something that was issued before, not of what is about to be.
    const std::optional<InFlight> oldest = watchdog->oldest(i);
    fail(oldest ? context->failed(oldest->label, oldest->operation, *error)
                : context->failed(label, operation, *error));
  }
  context->failure.raise_if_set();
}

Communicator::TicketPtr Communicator::State::submit(const std::string& label, Operation operation,
                                                    cudaStream_t compute) {
  const char* name = to_string(operation.kind);
  require_usable(label, name);
  operation.check(label, options.rank, options.world);
  const auto ticket = std::make_shared<Ticket>(context, label, name);
  operation.ticket = ticket;
  if (operation.count == 0) {
    ticket->nothing_to_do();
  } else if (grouping) {
    queue.push_back(std::move(operation));
  } else {
    issue({std::move(operation)}, compute);
  }
  return ticket;
}

// Our streams, and the watchdog's questions, are no part of a graph. Nothing has been issued yet,
// so that the communicator stays as it was.
void Communicator::State::refuse_capture(const std::string& label, cudaStream_t compute) const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = context->api.cudaStreamIsCapturing(compute, &status);
  if (error == cudaSuccess && status == cudaStreamCaptureStatusNone) return;
  if (error != cudaSuccess && !is_of_capture(error)) return;  // the next call says it better
  throw std::runtime_error(
      cat(label,
          ": expected a stream that is not being captured, got one within a CUDA graph's "
          "capture. Leave what communicates out of the graph."));
}

void Communicator::State::issue(const std::vector<Operation>& operations, cudaStream_t compute) {
  if (operations.empty()) return;
  const std::string& label = operations.front().ticket->label();
  try {
    refuse_capture(label, compute);
  } catch (const std::exception&) {
    for (const Operation& one : operations) one.ticket->dropped();
    throw;
  }
  memory.graveyard()->clear();
  try {
    const DeviceGuard guard(*context, label);
    const EventPtr started = events->record(compute, label);
    // Gathers first: the same order of launches on every rank.
    for (size_t channel = 0; channel < kChannels; ++channel) {
      std::vector<const Operation*> own;
      for (const Operation& one : operations) {
        if (one.channel == channel) own.push_back(&one);
      }
      if (!own.empty()) issue_on(channel, own, started);
    }
  } catch (const std::exception& error) {
    // The other ranks have issued it, or will: there is no going on from here.
    context->failure.set(error.what());
    abort_channels();
    for (const Operation& one : operations) one.ticket->dropped();
    context->failure.raise_if_set();
  }
}

void Communicator::State::issue_on(size_t channel, const std::vector<const Operation*>& operations,
                                   const EventPtr& started) {
  const Operation& first = *operations.front();
  const std::string& label = first.ticket->label();
  std::string operation = to_string(first.kind);
  if (operations.size() > 1) operation += cat(" (first of a group of ", operations.size(), ')');
  const cudaStream_t stream = channels[channel]->stream();
  const Stopwatch since;
  check(context->api, context->api.cudaStreamWaitEvent(stream, started->handle, 0), label,
        "a stream to wait for an event", "Read the first CUDA error of this process.");
  // A blocking launch may hang in NCCL; what else it polls, it limits itself.
  if (options.blocking) watchdog->watch(channel, {label, operation, nullptr, since});
  const std::optional<std::string> problem = channels[channel]->launch(operations);
  if (problem) {
    fail(context->failed(label, operation, *problem));
    // NCCL may be putting it on the stream still, and not before what follows.
    if (const auto late = channels[channel]->await_end(let_go_limit())) report_late(*late);
  }
  // Also of a launch that failed half-way: whoever waits then reuses no memory that it still uses.
  const EventPtr done = events->record(stream, label);
  for (const Operation* one : operations) one->ticket->issued(started, done, stream);
  context->failure.raise_if_set();
  if (options.blocking) {
    watchdog->launched(channel, done);
  } else {
    watchdog->watch(channel, {label, operation, done, since});
  }
}

void Communicator::State::drop_group() noexcept {
  grouping = false;
  for (const Operation& one : queue) one.ticket->dropped();
  queue.clear();
}

void Communicator::State::fail(const std::string& text) {
  context->failure.set(text);
  abort_channels();
}

void Communicator::State::abort_channels() noexcept {
  for (const auto& channel : channels) channel->abort();
}

double Communicator::State::let_go_limit() const {
  return std::min(options.timeout_s, kLetGoLimit);
}

void Communicator::State::report_late(const std::string& text) noexcept {
  print(text);
  memory.report("late", text);
}

void Communicator::State::finish(double within_s) noexcept {
  const Stopwatch watch;
  for (Backoff backoff; !context->failure.is_set() && watchdog->look(); backoff.pause()) {
    if (watch.seconds() < within_s) continue;
    memory.report("close", cat(where, ": expected what is under way to complete within ",
                               seconds(within_s), ", got more on rank ", options.rank,
                               ". It was aborted; wait for it before the program ends."));
    return;
  }
  for (const auto& channel : channels) {
    if (context->failure.is_set()) return;
    const double left = std::max(within_s - watch.seconds(), 0.0);
    const auto late = channel->finalize(std::min({options.timeout_s, kCloseLimit, left}));
    if (late) memory.report("close", *late);
  }
}

void Communicator::State::shut(std::optional<double> within_s) noexcept {
  std::optional<DeviceGuard> guard;
  try {
    guard.emplace(*context, where);
  } catch (const std::exception&) {
    within_s.reset();  // CUDA answers no more; what can be freed is freed
  }
  const RelaxedCapture relaxed(context->api);
  const double limit = let_go_limit();
  drop_group();
  if (!watchdog->stop(limit)) {
    report_late(cat(where, ": expected its watchdog to end within ", seconds(limit),
                    ", got no answer on rank ", options.rank,
                    ". A call of CUDA or NCCL holds it. A thread is left behind, which waits for "
                    "it."));
  }
  if (within_s) finish(*within_s);
  let_go();
}

void Communicator::State::let_go() noexcept {
  abort_channels();  // all of them, before any is waited for
  const double limit = let_go_limit();
  const Stopwatch watch;
  const auto left = [&] { return std::max(limit - watch.seconds(), 0.0); };
  bool gone = true;
  for (const auto& channel : channels) {
    const auto late = channel->await_end(left());
    if (late && gone) report_late(*late);  // the other's would say the same
    gone = gone && !late;
    channel->destroy();
  }
  // It waits for the device, which whatever held NCCL up may hold up as well.
  const Task clearing([graveyard = memory.graveyard()] { graveyard->close(); });
  if (!clearing.wait(left()) && gone) {
    report_late(cat(where, ": expected the device to come to its end within ", seconds(limit),
                    ", got no answer on rank ", options.rank,
                    ". A kernel or another communicator holds it. A thread is left behind, which "
                    "frees memory then."));
  }
  events->close();
}

}  // namespace fk::nccl
