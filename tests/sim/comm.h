// SPDX-License-Identifier: Apache-2.0
// One rank's end of a simulated communicator: its operations in their order, moved in rounds
// through the meeting's areas.
#pragma once

#include <nccl.h>

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <thread>

#include "sim/meeting.h"
#include "sim/settings.h"

namespace fk::sim {

class Device;
struct Stream;

enum class Kind : int32_t { kAllGather, kReduceScatter, kAllReduce, kBroadcast };

const char* to_string(Kind kind);

struct Operation {
  Kind kind;
  const void* source;
  void* target;
  size_t count;  // as NCCL counts: of a shard for kAllGather and kReduceScatter
  ncclDataType_t dtype;
  ncclRedOp_t op = ncclSum;
  int root = 0;

  uint64_t number = 0;  // within the communicator, given at the launch
  uint64_t round = 0;
  bool posted = false, poisoned = false;
};

enum class Step { kDone, kProgress, kBlocked };

class Comm {
 public:
  // Joins the meeting. Throws std::runtime_error.
  Comm(Device& device, const std::string& name, int world, int rank, const ncclConfig_t& config);
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  const std::string& label() const { return label_; }
  bool blocking() const { return blocking_; }
  Device& device() { return device_; }
  Meeting& meeting() { return meeting_; }

  // Serves the peers: works for what they wait for, though nothing on this rank does.
  void start_service();

  // Everything but the counters below is guarded by the device's mutex.
  uint64_t add(Stream* stream);  // gives an operation its number; in the order of the launches
  Stream* stream_of_next() const { return queue_.front(); }
  bool has_next() const { return !queue_.empty(); }
  size_t queued() const { return queue_.size(); }
  uint64_t completed() const { return completed_; }
  Span read_span(const Operation& operation) const;
  Span write_span(const Operation& operation) const;
  // Fills what the operation will write with NaN, but not what it reads.
  void poison(Operation& operation);
  Step step(Operation& operation);

  // Success, in progress while not all ranks have come, or what fail() was told.
  ncclResult_t state();
  // How often ncclCommGetAsyncError will say that a call is in progress which is not.
  void answer_in_progress(int polls) { polls_ = polls; }
  bool in_progress() const { return polls_ > 0 && !aborted_; }
  bool count_poll() { return polls_ > 0 && polls_-- > 0; }
  void fail(ncclResult_t code, const std::string& text);
  std::string last_error() const;
  void finalize() { finalizing_ = true; }
  bool finalizing() const { return finalizing_; }
  bool aborted() const { return aborted_; }
  void abort();  // lets go of everything that waits; dead peers do not matter
  // Leaves NaN where an operation had begun to write.
  void abandon(Operation& operation);
  void stop_service();  // joins the thread

  // Marks the communicator as used by this thread: NCCL allows one at a time.
  class Use {
   public:
    Use(Comm& comm, const char* call);
    ~Use() { --comm_.users_; }

   private:
    Comm& comm_;
  };

 private:
  void post(Operation& operation, size_t offset, size_t nbytes);
  void take(Operation& operation, size_t offset, size_t nbytes);
  bool offers_agree(const Operation& operation);
  Offer offer(const Operation& operation) const;
  void complete();
  void serve();

  Device& device_;
  Meeting meeting_;
  const std::string label_;
  const bool blocking_;
  const size_t chunk_;

  std::deque<Stream*> queue_;  // of the operations from completed_ on
  uint64_t launched_ = 0, completed_ = 0, rounds_ = 0;

  std::atomic<bool> aborted_{false}, stopping_{false}, finalizing_{false};
  std::atomic<int> polls_{0}, users_{0};
  long touched_ = 0;  // plain on purpose: a thread sanitizer sees two users that nothing orders
  mutable std::mutex error_mutex_;
  ncclResult_t error_ = ncclSuccess;
  std::string error_text_;
  std::thread service_;
};

}  // namespace fk::sim
