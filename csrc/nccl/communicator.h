// SPDX-License-Identifier: Apache-2.0
// Two NCCL communicators of the same ranks, each on a stream of its own: one for gathers, one for
// reductions, because one communicator runs its work in order whatever the streams are.
#pragma once

#include <cstddef>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "nccl/api.h"
#include "nccl/memory.h"
#include "nccl/options.h"
#include "nccl/ticket.h"

namespace fk::nccl {

// Threads take turns; abort(), failure() and take_messages() need not wait for theirs. All ranks
// make the same calls in the same order.
//
// Errors are std::runtime_error, wrong arguments std::invalid_argument. The first failure ends the
// communicator: what is on the device is aborted, and every later call throws the same text.
class Communicator {
 public:
  using TicketPtr = std::shared_ptr<Ticket>;

  // Returns when all ranks have joined; throws after init_timeout_s.
  Communicator(const Api& api, const Options& options, const std::string& unique_id);
  ~Communicator();  // aborts what is open
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Makes the second communicator, once. Until then reductions run on the first, and its stream.
  void open_reductions(const std::string& unique_id);
  bool has_reductions() const;

  cudaStream_t gather_stream() const;
  cudaStream_t reduce_stream() const;

  // Each runs after what is on the `compute` stream now. The memory must stay as it is until the
  // ticket was waited on. In place where NCCL calls it so: `shard` is this rank's slot of `full`.
  TicketPtr all_gather(const std::string& label, void* full, const void* shard, size_t shard_nbytes,
                       cudaStream_t compute);
  TicketPtr reduce_scatter(const std::string& label, void* shard, const void* full,
                           size_t shard_numel, ncclDataType_t dtype, cudaStream_t compute);
  // These two always run with the gathers: after a backward that failed on some rank, reductions
  // may be unmatched, and what ranks agree with must not pair up with them.
  TicketPtr all_reduce(const std::string& label, void* data, size_t numel, ncclDataType_t dtype,
                       ncclRedOp_t op, cudaStream_t compute);
  TicketPtr broadcast(const std::string& label, void* data, size_t nbytes, int src,
                      cudaStream_t compute);

  // Collectives called in between are issued together by end_group, after what is on its `compute`
  // stream then; in the order of the calls, gathers before reductions.
  void begin_group();
  void end_group(cudaStream_t compute);
  void cancel_group() noexcept;  // what was queued is dropped: its tickets throw

  // Null where NCCL's allocator has given none so far, which a message explains; later,
  // OutOfMemory. `collective`: every rank allocates the same at this point, which symmetric
  // registration needs (else it is local). Buffers that were dropped are freed first, and before a
  // collective.
  std::shared_ptr<Buffer> allocate(size_t nbytes, bool collective);

  // Registers later buffers no further than this: what all ranks agreed that they have.
  void limit_registration(Registration most);

  // What was done otherwise than asked for, each once, since the last call.
  std::vector<std::string> take_messages();

  std::string failure() const;  // empty: none

  // Ends what is on the device, and does not wait for it. Later calls throw a text with `why`.
  void abort(const std::string& why) noexcept;

  // Waits for the work in flight and for the peers, for so long in all and within limits of their
  // own, also where what ends a communicator is held up by another: messages say so. A second call
  // does nothing.
  void close(double within_s = std::numeric_limits<double>::infinity()) noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fk::nccl
