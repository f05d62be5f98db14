// SPDX-License-Identifier: Apache-2.0
#include "sim/device.h"

#include <algorithm>
#include <atomic>
#include <chrono>

namespace fk::sim {
namespace {

using std::chrono::milliseconds;

std::atomic<uint64_t> recordings{0};

bool overlap(Span a, Span b) { return a.data < b.data + b.nbytes && b.data < a.data + a.nbytes; }

bool has_launch(const Stream& stream) {
  return std::ranges::any_of(stream.items,
                             [](const Item& item) { return std::holds_alternative<Launch>(item); });
}

void wait_for(const Blocked& blocked) {
  // The bell wakes us; the limit is there so that a lost ring cannot hang a test.
  blocked.comm->meeting().wait(blocked.seen, milliseconds(500));
}

}  // namespace

Device::Device(int ordinal) : ordinal_(ordinal) {}

Stream* Device::make_stream(int priority) {
  const std::lock_guard lock(mutex_);
  streams_.push_back(std::make_unique<Stream>(Stream{this, priority, {}}));
  return streams_.back().get();
}

bool Device::destroy_stream(Stream* stream) {
  const std::lock_guard lock(mutex_);
  const auto found =
      std::ranges::find_if(streams_, [&](auto& each) { return each.get() == stream; });
  if (found == streams_.end() || stream->destroyed) return false;
  stream->destroyed = true;  // its work still runs
  if (stream->items.empty()) streams_.erase(found);
  return true;
}

size_t Device::streams() {
  const std::lock_guard lock(mutex_);
  return static_cast<size_t>(
      std::ranges::count_if(streams_, [](auto& each) { return !each->destroyed; }));
}

Mark Device::record(Stream* stream) {
  auto mark = std::make_shared<Recording>(Recording{++recordings, this, stream});
  const std::lock_guard lock(mutex_);
  if (stream == nullptr)
    mark->done = true;
  else
    enqueue(stream, Record{mark});
  return mark;
}

void Device::wait(Stream* stream, const Mark& mark) {
  if (mark == nullptr) return;  // never recorded: nothing to wait for
  if (stream == nullptr) return mark->device->synchronize(mark);
  if (mark->device != this) return Control::get().violation("a stream waits for another device");
  const std::lock_guard lock(mutex_);
  enqueue(stream, Wait{mark});
}

void Device::launch(Stream* stream, std::function<void()> kernel) {
  const std::lock_guard lock(mutex_);
  enqueue(stream, Kernel{std::move(kernel)});
}

void Device::launch(Stream* stream, const std::shared_ptr<Comm>& comm,
                    std::vector<Operation> operations) {
  const std::lock_guard lock(mutex_);
  for (Operation& operation : operations) operation.number = comm->add(stream);
  enqueue(stream, Launch{comm, std::move(operations)});
}

void Device::enqueue(Stream* stream, Item item) {
  if (stream->unsettled != nullptr && stream->unsettled->in_progress())
    Control::get().violation("device " + std::to_string(ordinal_) +
                             ": work on a stream whose last NCCL call is in progress");
  stream->items.push_back(std::move(item));
  poison_early(*stream);
  disturb();
}

bool Device::query(const Mark& mark) {
  const std::lock_guard lock(mutex_);
  if (mark == nullptr) return true;
  if (++mark->polls > Control::get().settings().poll_patience) run(*mark);
  return mark->done;
}

void Device::synchronize(const Mark& mark) {
  if (mark == nullptr) return;
  for (;;) {
    std::unique_lock lock(mutex_);
    const auto blocked = run(*mark);
    lock.unlock();
    if (!blocked) return;
    wait_for(*blocked);
  }
}

void Device::synchronize() {
  std::vector<Mark> ends;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& stream : streams_) {
      if (stream->items.empty()) continue;
      ends.push_back(std::make_shared<Recording>(Recording{0, this, stream.get()}));
      stream->items.push_back(Record{ends.back()});
    }
  }
  for (const Mark& end : ends) synchronize(end);
}

std::optional<Blocked> Device::work_for(Comm& comm, uint64_t until) {
  const std::lock_guard lock(mutex_);
  while (comm.completed() < until && comm.has_next())
    if (auto blocked = advance(*comm.stream_of_next())) return blocked;
  return {};
}

size_t Device::launched(Comm& comm) {
  const std::lock_guard lock(mutex_);
  return comm.queued();
}

void Device::abort(Comm& comm) {
  const std::lock_guard lock(mutex_);
  comm.abort();
  for (const auto& stream : streams_)
    for (Item& item : stream->items)
      if (auto* launch = std::get_if<Launch>(&item); launch && launch->comm.get() == &comm)
        for (size_t i = launch->next; i < launch->operations.size(); ++i)
          comm.abandon(launch->operations[i]);
}

std::optional<Blocked> Device::run(Recording& goal) {
  while (!goal.done)
    if (auto blocked = advance(*goal.stream)) return blocked;
  return {};
}

// One step of the stream, or of what its first item waits for.
std::optional<Blocked> Device::advance(Stream& stream) {
  if (stream.items.empty()) return {};
  Item& item = stream.items.front();
  if (auto* launch = std::get_if<Launch>(&item)) return advance(stream, *launch);
  if (auto* wait = std::get_if<Wait>(&item)) {
    if (!wait->mark->done) return advance(*wait->mark->stream);
  } else if (auto* record = std::get_if<Record>(&item)) {
    record->mark->done = true;
  } else {
    std::get<Kernel>(item).run();
  }
  pop(stream);
  return {};
}

std::optional<Blocked> Device::advance(Stream& stream, Launch& launch) {
  const std::shared_ptr<Comm> comm = launch.comm;
  Operation& operation = launch.operations[launch.next];
  // One communicator is one order, whatever streams its operations are on.
  if (operation.number != comm->completed()) return advance(*comm->stream_of_next());
  const uint32_t seen = comm->meeting().bell();
  const Step step = comm->step(operation);
  if (step == Step::kBlocked) return Blocked{comm, seen};
  if (step == Step::kDone && ++launch.next == launch.operations.size()) pop(stream);
  return {};
}

void Device::pop(Stream& stream) {
  stream.items.pop_front();
  if (stream.destroyed && stream.items.empty())
    std::erase_if(streams_, [&](auto& each) { return each.get() == &stream; });
  for (const auto& each : streams_) poison_early(*each);
}

// Writes NaN where a collective will write, as soon as it might have started: what is read too
// early, or still used, is then seen. An earlier collective of the same stream holds it up only
// where the two share memory, for a device might have been through with it at once.
void Device::poison_early(Stream& stream) {
  std::vector<Span> busy;
  for (Item& item : stream.items) {
    if (std::holds_alternative<Kernel>(item)) return;
    if (auto* wait = std::get_if<Wait>(&item); wait != nullptr && !wait->mark->done) return;
    auto* launch = std::get_if<Launch>(&item);
    if (launch == nullptr) continue;
    for (size_t i = launch->next; i < launch->operations.size(); ++i) {
      Operation& operation = launch->operations[i];
      const Span target = launch->comm->write_span(operation);
      if (std::ranges::none_of(busy, [&](Span each) { return overlap(each, target); }))
        launch->comm->poison(operation);
      busy.push_back(target);
      busy.push_back(launch->comm->read_span(operation));
    }
  }
}

// What a device may do on its own while the host enqueues.
void Device::disturb() {
  const Settings settings = Control::get().settings();
  if (settings.policy == Policy::kLazy) return;
  if (!seeded_) random_.seed(settings.seed * 1000 + static_cast<uint64_t>(ordinal_));
  seeded_ = true;
  std::vector<Stream*> all;
  for (const auto& stream : streams_) all.push_back(stream.get());
  const auto alive = [&](Stream* stream) {
    return std::ranges::any_of(streams_, [&](auto& each) { return each.get() == stream; });
  };
  if (settings.policy == Policy::kEager) {
    for (Stream* stream : all)
      while (alive(stream) && has_launch(*stream))
        if (advance(*stream)) break;
  } else if (settings.policy == Policy::kRoundRobin) {
    for (Stream* stream : all)
      if (alive(stream)) advance(*stream);
  } else if (random_() % 2 == 0) {
    Stream* stream = all[random_() % all.size()];
    for (uint64_t steps = random_() % 8; steps > 0 && alive(stream); --steps)
      if (advance(*stream)) break;
  }
}

}  // namespace fk::sim
