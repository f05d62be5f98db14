// SPDX-License-Identifier: Apache-2.0
// The thread that notices what no caller waits for: a collective over its time, an error of NCCL.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "nccl/channel.h"
#include "nccl/context.h"
#include "nccl/events.h"
#include "nccl/poll.h"
#include "nccl/task.h"

namespace fk::nccl {

// A collective, or a group of them, on its way.
struct InFlight {
  std::string label, operation;
  EventPtr done;    // null: NCCL has not returned from the launch
  Stopwatch since;  // its issue
};

// Its thread owns it too: a call of CUDA may hold the thread for longer than anybody waits.
class Watchdog : public std::enable_shared_from_this<Watchdog> {
 public:
  Watchdog(std::shared_ptr<Context> context, std::vector<std::shared_ptr<Channel>> channels,
           double limit_s);

  void start();

  // Ends the thread; whether it has ended within that time. Not to be called in a forked child: it
  // has no such thread.
  bool stop(double limit_s);

  void watch(size_t channel, InFlight one);
  // The launch that is watched last on this channel has an end now.
  void launched(size_t channel, const EventPtr& done);

  // The oldest collective of a channel that is not known to be through.
  std::optional<InFlight> oldest(size_t channel) const;

  // Looks once, on the calling thread; whether something is still in flight.
  bool look();

 private:
  struct Lane {
    std::shared_ptr<Channel> channel;
    std::deque<InFlight> in_flight;  // in the order of the channel's stream
  };

  void run();
  bool idle() const;
  // Takes off what is through; what is first then. Nothing also after a failure.
  std::optional<InFlight> first_unfinished(size_t channel);
  // Tells the user, then ends what is on the device.
  void fail(const std::string& text);

  const std::shared_ptr<Context> context_;
  const double limit_s_;
  mutable std::mutex mutex_;  // never held across a call of CUDA or NCCL
  std::condition_variable wake_;
  std::vector<Lane> lanes_;
  bool stopping_ = false;
  Task thread_;
};

}  // namespace fk::nccl
