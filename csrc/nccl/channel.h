// SPDX-License-Identifier: Apache-2.0
// One NCCL communicator and the stream that its collectives run on.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "nccl/context.h"
#include "nccl/operation.h"
#include "nccl/task.h"

namespace fk::nccl {

// How NCCL is asked to make a communicator; see Options.
struct ChannelConfig {
  double timeout_s, init_timeout_s;
  bool blocking;
  int min_ctas, max_ctas, cta_policy;
};

// NCCL allows one thread at a time in a communicator, so every call of it is made under a lock
// that is held for that call only. Polling asks anew each time, and gives up when the context has
// failed: whoever aborts never waits for whoever polls.
class Channel : public std::enable_shared_from_this<Channel> {
 public:
  // Makes the stream. `role` tells the two apart in messages and in NCCL's log.
  Channel(std::shared_ptr<Context> context, const ChannelConfig& config, const char* role);
  ~Channel() { destroy(); }
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // Joins the other ranks. Throws std::runtime_error, and leaves nothing behind.
  void open(const std::string& unique_id);
  bool is_open() const { return joined_.load(std::memory_order_acquire); }

  bool is_alive() const { return comm_.load(std::memory_order_acquire) != nullptr; }

  cudaStream_t stream() const { return stream_.load(std::memory_order_acquire); }

  // Issues the operations as one group, and returns when NCCL has put them on the stream; what
  // went wrong otherwise.
  std::optional<std::string> launch(const std::vector<const Operation*>& operations);

  // What NCCL found wrong in the meantime. Nothing while another thread is in a call.
  std::optional<std::string> async_error();

  // Local registration; null if NCCL registers nothing here. What went wrong otherwise.
  std::optional<std::string> add(void* data, size_t nbytes, void** handle);
  void remove(void* handle) noexcept;
  // Collective registration; null if there is no symmetric memory here.
  std::optional<std::string> add_window(void* data, size_t nbytes, ncclWindow_t* window);
  void remove_window(ncclWindow_t window) noexcept;

  // Ends what is on the device and frees the communicator. Any thread, at any time, repeatedly.
  //
  // NOTE: NCCL's call returns when the communicator's stream has come to its end, and that may be
  // behind a collective of another communicator, which may need its own abort first. So it is made
  // on a thread of its own, and this does not wait for it.
  void abort() noexcept;

  // Waits for the other ranks and frees the communicator; aborts after `limit_s`, and says so.
  std::optional<std::string> finalize(double limit_s) noexcept;

  // After one of these two: what is wrong if NCCL has not let go of it within `limit_s`.
  std::optional<std::string> await_end(double limit_s) const;

  // Aborts what is open, and destroys the stream. In a forked child, nothing.
  void destroy() noexcept;

 private:
  std::string where() const;
  ncclConfig_t nccl_config() const;
  ncclResult_t enqueue(const std::vector<const Operation*>& operations);
  // Waits while NCCL works in the background on what returned `result`. Still ncclInProgress: the
  // limit has passed, or somebody aborted.
  ncclResult_t poll(ncclResult_t result, double limit_s);
  std::string explain(ncclResult_t result);
  ncclResult_t begin_finalize(double limit_s) noexcept;
  // Makes NCCL's last call of it, which frees it, in the background.
  void end(ncclResult_t (*call)(ncclComm_t), ncclComm_t comm) noexcept;
  // The same in words; nothing if it went well.
  std::optional<std::string> settle(ncclResult_t result, double limit_s);
  ncclResult_t state_of(ncclComm_t comm);

  // Calls with the communicator, under the lock; ncclInProgress if it is gone.
  template <class Call>
  ncclResult_t locked(const Call& call);

  const std::shared_ptr<Context> context_;
  const ChannelConfig config_;
  const std::string name_;
  std::atomic<cudaStream_t> stream_{nullptr};
  std::mutex mutex_;
  ncclComm_t made_ = nullptr;              // NCCL's, which may write it in the background
  std::atomic<ncclComm_t> comm_{nullptr};  // changed under the lock; abort() may go without
  std::atomic<bool> joined_{false};
  mutable std::mutex end_mutex_;
  Task end_;
};

}  // namespace fk::nccl
