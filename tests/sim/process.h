// SPDX-License-Identifier: Apache-2.0
// What this process has: its devices, and the live handles of everything that was made. A forked
// child starts with nothing, as a process without a CUDA context does.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "sim/comm.h"
#include "sim/device.h"

namespace fk::sim {

struct Event {
  Mark last;
};

struct Live {
  size_t streams = 0, events = 0, comms = 0, memory = 0, registrations = 0;
  bool operator==(const Live&) const = default;
};

class Process {
 public:
  static Process& get();

  static int current_device();
  static void set_current_device(int ordinal);
  Device& device();  // the current one
  Device& device(int ordinal);

  Event* make_event();
  Event* find(cudaEvent_t event);  // null: no such
  bool destroy_event(cudaEvent_t event);

  ncclComm_t add(std::shared_ptr<Comm> comm);
  std::shared_ptr<Comm> find(ncclComm_t comm);  // null: no such
  void remove(ncclComm_t comm);

  void* allocate(size_t nbytes);
  bool release(void* data);
  bool owns(const void* data, size_t nbytes);
  void* add_registration(ncclComm_t comm);
  bool remove_registration(ncclComm_t comm, const void* handle);

  Live live();

 private:
  std::mutex mutex_;
  std::map<int, std::unique_ptr<Device>> devices_;
  std::map<Event*, std::unique_ptr<Event>> events_;
  std::map<ncclComm_t, std::shared_ptr<Comm>> comms_;
  std::map<uintptr_t, size_t> memory_;
  std::map<uintptr_t, ncclComm_t> registrations_;
  uintptr_t next_registration_ = 1;
};

}  // namespace fk::sim
