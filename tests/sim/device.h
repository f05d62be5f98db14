// SPDX-License-Identifier: Apache-2.0
// Streams as queues. Nothing on them runs by itself: whoever needs an event runs what the event
// depends on, and nothing else, unless the policy says otherwise.
#pragma once

#include <cuda_runtime_api.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <variant>
#include <vector>

#include "sim/comm.h"
#include "sim/settings.h"

namespace fk::sim {

class Device;
struct Stream;

// One cudaEventRecord. A stream that waits for an event waits for the recording that was the
// event's last when it was told to wait.
struct Recording {
  uint64_t number;  // of its process, from 1
  Device* device;
  Stream* stream;  // while it is not done: where it is queued
  bool done = false;
  int polls = 0;
};
using Mark = std::shared_ptr<Recording>;

struct Record {
  Mark mark;
};
struct Wait {
  Mark mark;
};
struct Kernel {
  std::function<void()> run;
};
// What one collective, or one group of them, put on a stream: NCCL launches a group as a whole.
struct Launch {
  std::shared_ptr<Comm> comm;
  std::vector<Operation> operations;
  size_t next = 0;
};
using Item = std::variant<Record, Wait, Kernel, Launch>;

struct Stream {
  Device* device;
  int priority;
  std::deque<Item> items;
  bool destroyed = false;
  // Whose last call answered that it is in progress: until it is through, NCCL wants nothing else
  // on the stream.
  std::shared_ptr<Comm> unsettled = nullptr;
};

// On what progress depends that this rank cannot make: the ring of a communicator's bell.
struct Blocked {
  std::shared_ptr<Comm> comm;
  uint32_t seen;
};

class Device {
 public:
  explicit Device(int ordinal);

  int ordinal() const { return ordinal_; }

  Stream* make_stream(int priority);
  // False: there is no such stream.
  bool destroy_stream(Stream* stream);
  size_t streams();

  // `stream` null: the host's, on which everything is done when the call returns.
  Mark record(Stream* stream);
  void wait(Stream* stream, const Mark& mark);  // null stream: returns when it is done
  void launch(Stream* stream, std::function<void()> kernel);
  void launch(Stream* stream, const std::shared_ptr<Comm>& comm, std::vector<Operation> operations);

  bool query(const Mark& mark);
  void synchronize(const Mark& mark);
  void synchronize();

  // Makes the communicator's next operations happen, until `until` of them are through or have to
  // wait for the peers; returns on what they wait.
  std::optional<Blocked> work_for(Comm& comm, uint64_t until);
  size_t launched(Comm& comm);  // operations that are not through
  // Ends the communicator's operations; those that are queued will do nothing when they are due.
  void abort(Comm& comm);

 private:
  std::optional<Blocked> run(Recording& goal);
  std::optional<Blocked> advance(Stream& stream);
  std::optional<Blocked> advance(Stream& stream, Launch& launch);
  void pop(Stream& stream);
  void poison_early(Stream& stream);
  void disturb();
  void enqueue(Stream* stream, Item item);

  const int ordinal_;
  // Held while anything of this rank runs, kernels too; not while it waits for peers.
  std::mutex mutex_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::mt19937_64 random_;
  bool seeded_ = false;
};

}  // namespace fk::sim
