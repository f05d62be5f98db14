// SPDX-License-Identifier: Apache-2.0
// What is behind a Communicator.
//
// Locks, in the order in which they may be taken: the caller's (State::mutex), then one of the
// leaves, none of which is held across a call that waits: the channel's (one call of NCCL, but none
// that ends it), the watchdog's, the event pool's, the memory's, the failure's. A launch may hold
// the first for long, so neither the watchdog nor abort() takes it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "nccl/channel.h"
#include "nccl/communicator.h"
#include "nccl/events.h"
#include "nccl/memory.h"
#include "nccl/operation.h"
#include "nccl/watchdog.h"

namespace fk::nccl {

struct Communicator::State {
  static constexpr size_t kGather = 0, kReduce = 1, kChannels = 2;

  State(const Api& api, const Options& options);

  // Throws unless a call of `label` may go on. This is where an error of NCCL surfaces.
  void require_usable(const std::string& label, const char* operation);
  void require_open(const std::string& label) const;

  // Under the mutex.
  TicketPtr submit(const std::string& label, Operation operation, cudaStream_t compute);
  void issue(const std::vector<Operation>& operations, cudaStream_t compute);
  void drop_group() noexcept;

  // Any thread.
  void fail(const std::string& text);
  void abort_channels() noexcept;

  // Ends everything; waits for what is in flight and for the peers first, if told for how long.
  void shut(std::optional<double> within_s) noexcept;
  void finish(double within_s) noexcept;

  bool is_alive() const;  // some communicator of NCCL is there, joined or not
  Memory::Channels open_channels() const;
  size_t reductions() const { return channels[kReduce]->is_open() ? kReduce : kGather; }

  const Options options;
  const std::string where;  // in messages
  const std::shared_ptr<Context> context;
  const std::shared_ptr<EventPool> events;
  const Memory::Channels channels;
  Memory memory;
  const std::shared_ptr<Watchdog> watchdog;

  std::atomic<bool> closed{false};
  std::mutex mutex;  // guards what follows, and makes the callers take turns
  bool grouping = false;
  std::vector<Operation> queue;

 private:
  void refuse_capture(const std::string& label, cudaStream_t compute) const;
  void let_go() noexcept;
  double let_go_limit() const;
  void report_late(const std::string& text) noexcept;
  void issue_on(size_t channel, const std::vector<const Operation*>& operations,
                const EventPtr& started);
};

}  // namespace fk::nccl
