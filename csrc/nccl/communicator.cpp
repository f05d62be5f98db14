// SPDX-License-Identifier: Apache-2.0
#include "nccl/communicator.h"

#include <optional>
#include <stdexcept>
#include <utility>

#include "nccl/state.h"

namespace fk::nccl {

Communicator::Communicator(const Api& api, const Options& options, const std::string& unique_id) {
  check_options(options);
  check_unique_id(options, unique_id);
  check_version(api, options);
  state_ = std::make_unique<State>(api, options);
  state_->channels[State::kGather]->open(unique_id);
  state_->watchdog->start();
}

Communicator::~Communicator() {
  if (state_->context->forked()) {
    // Its threads, locks and handles are the parent's.
    static_cast<void>(state_.release());
  } else if (!state_->closed.exchange(true)) {
    state_->shut(std::nullopt);
  }
}

void Communicator::open_reductions(const std::string& unique_id) {
  const std::string& where = state_->where;
  state_->context->require_owner(where);
  const std::lock_guard lock(state_->mutex);
  state_->require_usable(where, "open_reductions");
  check_unique_id(state_->options, unique_id);
  const auto& channel = state_->channels[State::kReduce];
  if (channel->is_open()) {
    throw std::runtime_error(
        cat(where, ": expected open_reductions once, got a second call. Leave it out."));
  }
  channel->open(unique_id);
  const DeviceGuard guard(*state_->context, where);
  try {
    state_->memory.attach(channel);
  } catch (const MemoryBroken& broken) {
    state_->fail(broken.what());
    throw;
  }
}

bool Communicator::has_reductions() const { return state_->channels[State::kReduce]->is_open(); }

cudaStream_t Communicator::gather_stream() const {
  state_->require_open(state_->where);
  return state_->channels[State::kGather]->stream();
}

cudaStream_t Communicator::reduce_stream() const {
  state_->require_open(state_->where);
  return state_->channels[State::kReduce]->stream();
}

Communicator::TicketPtr Communicator::all_gather(const std::string& label, void* full,
                                                 const void* shard, size_t shard_nbytes,
                                                 cudaStream_t compute) {
  state_->context->require_owner(label);
  const std::lock_guard lock(state_->mutex);
  return state_->submit(label,
                        {.kind = Operation::Kind::kAllGather,
                         .channel = State::kGather,
                         .send = shard,
                         .recv = full,
                         .count = shard_nbytes,
                         .dtype = ncclUint8},
                        compute);
}

Communicator::TicketPtr Communicator::reduce_scatter(const std::string& label, void* shard,
                                                     const void* full, size_t shard_numel,
                                                     ncclDataType_t dtype, cudaStream_t compute) {
  state_->context->require_owner(label);
  const std::lock_guard lock(state_->mutex);
  return state_->submit(label,
                        {.kind = Operation::Kind::kReduceScatter,
                         .channel = state_->reductions(),
                         .send = full,
                         .recv = shard,
                         .count = shard_numel,
                         .dtype = dtype},
                        compute);
}

Communicator::TicketPtr Communicator::all_reduce(const std::string& label, void* data, size_t numel,
                                                 ncclDataType_t dtype, ncclRedOp_t op,
                                                 cudaStream_t compute) {
  state_->context->require_owner(label);
  const std::lock_guard lock(state_->mutex);
  return state_->submit(label,
                        {.kind = Operation::Kind::kAllReduce,
                         .channel = State::kGather,
                         .send = data,
                         .recv = data,
                         .count = numel,
                         .dtype = dtype,
                         .op = op},
                        compute);
}

Communicator::TicketPtr Communicator::broadcast(const std::string& label, void* data, size_t nbytes,
                                                int src, cudaStream_t compute) {
  state_->context->require_owner(label);
  const std::lock_guard lock(state_->mutex);
  return state_->submit(label,
                        {.kind = Operation::Kind::kBroadcast,
                         .channel = State::kGather,
                         .send = data,
                         .recv = data,
                         .count = nbytes,
                         .dtype = ncclUint8,
                         .root = src},
                        compute);
}

void Communicator::begin_group() {
  const std::string& where = state_->where;
  state_->context->require_owner(where);
  const std::lock_guard lock(state_->mutex);
  state_->require_usable(where, "begin_group");
  if (state_->grouping) {
    throw std::runtime_error(cat(where,
                                 ": expected end_group before another begin_group, got an "
                                 "open group. Groups do not nest: end it first."));
  }
  state_->grouping = true;
}

void Communicator::end_group(cudaStream_t compute) {
  const std::string& where = state_->where;
  state_->context->require_owner(where);
  const std::lock_guard lock(state_->mutex);
  try {
    state_->require_usable(where, "end_group");
  } catch (const std::exception&) {
    state_->drop_group();
    throw;
  }
  if (!state_->grouping) {
    throw std::runtime_error(
        cat(where, ": expected begin_group before end_group, got none. Call it first."));
  }
  state_->grouping = false;
  state_->issue(std::exchange(state_->queue, {}), compute);
}

void Communicator::cancel_group() noexcept {
  if (state_->context->forked()) return;
  const std::lock_guard lock(state_->mutex);
  state_->drop_group();
}

std::shared_ptr<Buffer> Communicator::allocate(size_t nbytes, bool collective) {
  const std::string& where = state_->where;
  state_->context->require_owner(where);
  const std::lock_guard lock(state_->mutex);
  state_->require_usable(where, "allocate");
  if (nbytes == 0) return nullptr;
  const DeviceGuard guard(*state_->context, where);
  try {
    return state_->memory.allocate(nbytes, collective, state_->open_channels());
  } catch (const MemoryBroken& broken) {
    state_->fail(broken.what());
    state_->context->failure.raise_if_set();
    throw;
  }
}

void Communicator::limit_registration(Registration most) { state_->memory.limit(most); }

std::vector<std::string> Communicator::take_messages() { return state_->memory.take_messages(); }

std::string Communicator::failure() const { return state_->context->failure.text(); }

void Communicator::abort(const std::string& why) noexcept {
  if (state_->context->forked() || !state_->is_alive()) return;
  state_->context->failure.set(
      cat(state_->where, ": expected no abort, got one on rank ", state_->options.rank, ": ", why,
          ". What was computed since is undefined: restart from the last checkpoint."));
  state_->abort_channels();
}

void Communicator::close(double within_s) noexcept {
  if (state_->context->forked()) {
    state_->closed = true;
    return;
  }
  if (state_->closed.exchange(true)) return;
  const std::lock_guard lock(state_->mutex);
  state_->shut(within_s);
}

}  // namespace fk::nccl
