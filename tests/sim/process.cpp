// SPDX-License-Identifier: Apache-2.0
#include "sim/process.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace fk::sim {
namespace {

thread_local int current = 0;

constexpr size_t kPage = 4096;

}  // namespace

Process& Process::get() {
  // Never destroyed: threads of a program that ends may still be in it. After a fork the parent's
  // is left alone, for its mutexes may be locked for ever.
  static std::mutex mutex;
  static Process* process = nullptr;
  static pid_t owner = 0;
  const std::lock_guard lock(mutex);
  if (owner != getpid()) process = new Process();
  owner = getpid();
  return *process;
}

int Process::current_device() { return current; }
void Process::set_current_device(int ordinal) { current = ordinal; }

Device& Process::device() { return device(current); }

Device& Process::device(int ordinal) {
  const std::lock_guard lock(mutex_);
  auto& found = devices_[ordinal];
  if (found == nullptr) found = std::make_unique<Device>(ordinal);
  return *found;
}

Event* Process::make_event() {
  auto event = std::make_unique<Event>();
  Event* handle = event.get();
  const std::lock_guard lock(mutex_);
  events_[handle] = std::move(event);
  return handle;
}

Event* Process::find(cudaEvent_t event) {
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(reinterpret_cast<Event*>(event));
  return found == events_.end() ? nullptr : found->first;
}

bool Process::destroy_event(cudaEvent_t event) {
  const std::lock_guard lock(mutex_);
  return events_.erase(reinterpret_cast<Event*>(event)) == 1;
}

ncclComm_t Process::add(std::shared_ptr<Comm> comm) {
  const auto handle = reinterpret_cast<ncclComm_t>(comm.get());
  const std::lock_guard lock(mutex_);
  comms_[handle] = std::move(comm);
  return handle;
}

std::shared_ptr<Comm> Process::find(ncclComm_t comm) {
  const std::lock_guard lock(mutex_);
  const auto found = comms_.find(comm);
  return found == comms_.end() ? nullptr : found->second;
}

void Process::remove(ncclComm_t comm) {
  const std::lock_guard lock(mutex_);
  comms_.erase(comm);
  std::erase_if(registrations_, [&](auto& each) { return each.second == comm; });
}

void* Process::allocate(size_t nbytes) {
  // Up to whole pages, as real allocations are, and poisoned.
  const size_t rounded = (nbytes + kPage - 1) / kPage * kPage;
  void* data = std::aligned_alloc(kPage, rounded);
  if (data == nullptr) return nullptr;
  std::memset(data, 0xFF, rounded);
  const std::lock_guard lock(mutex_);
  memory_[reinterpret_cast<uintptr_t>(data)] = rounded;
  return data;
}

bool Process::release(void* data) {
  {
    const std::lock_guard lock(mutex_);
    if (memory_.erase(reinterpret_cast<uintptr_t>(data)) == 0) return false;
  }
  std::free(data);
  return true;
}

bool Process::owns(const void* data, size_t nbytes) {
  const std::lock_guard lock(mutex_);
  const auto start = reinterpret_cast<uintptr_t>(data);
  auto after = memory_.upper_bound(start);
  if (after == memory_.begin()) return false;
  --after;
  return start + nbytes <= after->first + after->second;
}

void* Process::add_registration(ncclComm_t comm) {
  const std::lock_guard lock(mutex_);
  registrations_[next_registration_] = comm;
  return reinterpret_cast<void*>(next_registration_++);
}

bool Process::remove_registration(ncclComm_t comm, const void* handle) {
  const std::lock_guard lock(mutex_);
  const auto found = registrations_.find(reinterpret_cast<uintptr_t>(handle));
  if (found == registrations_.end() || found->second != comm) return false;
  registrations_.erase(found);
  return true;
}

Live Process::live() {
  const std::lock_guard lock(mutex_);
  Live live{0, events_.size(), comms_.size(), memory_.size(), registrations_.size()};
  for (const auto& [ordinal, device] : devices_) live.streams += device->streams();
  return live;
}

}  // namespace fk::sim
