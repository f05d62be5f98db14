// SPDX-License-Identifier: Apache-2.0
#include "cpu/protocol.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace fk::shm {
namespace {

[[noreturn]] void refuse(std::string_view label, const std::string& rest) {
  throw std::logic_error(std::string(label) + ": expected " + rest);
}

}  // namespace

// -- parameters -----------------------------------------------------------------------------------

ParamEpochs::ParamEpochs(Peers& peers, Epoch* epochs)
    : peers_(peers), ready_(epochs), released_all_(epochs + peers.world()) {
  number_ = released_ = released_all_[peers.rank()].get();
  peers.wake_at_end(&ready_[peers.rank()]);
  peers.wake_at_end(&released_all_[peers.rank()]);
}

void ParamEpochs::gather(std::string_view label) {
  if (is_held()) {
    refuse(label, "the last gather to be freed before the next, got two. Free the unit first.");
  }
  ready_[peers_.rank()].set(++number_);
}

void ParamEpochs::wait_ready(std::string_view label) {
  if (!is_held()) refuse(label, "a gather to wait for, got none. Gather the unit first.");
  peers_.wait(ready_, number_, {label, "all_gather"});
}

void ParamEpochs::release() {
  if (!is_held()) return;
  released_ = number_;
  released_all_[peers_.rank()].set(released_);
}

void ParamEpochs::wait_released(std::string_view label) {
  // Others would wait for this rank while it waits for itself.
  if (is_held()) refuse(label, "this rank's own gather to be freed, got it held. Free it first.");
  peers_.wait(released_all_, number_, {label, "free"});
}

// -- gradients ------------------------------------------------------------------------------------

GradEpochs::GradEpochs(Peers& peers, Epoch* epochs, int slots)
    : peers_(peers),
      grads_(epochs),
      consumed_all_(epochs + peers.world()),
      slots_(static_cast<uint32_t>(slots)) {
  // A power of two, so that slots follow one another where numbers wrap around too.
  if (slots < 1 || (slots & (slots - 1)) != 0) {
    throw std::invalid_argument("GradEpochs: expected 1, 2, 4 ... slots, got " +
                                std::to_string(slots) + ". Use 2.");
  }
  begun_ = posted_ = consumed_ = consumed_all_[peers.rank()].get();
  peers.wake_at_end(&grads_[peers.rank()]);
  peers.wake_at_end(&consumed_all_[peers.rank()]);
}

int GradEpochs::slot_of(uint32_t number) const { return static_cast<int>(number % slots_); }

int GradEpochs::begin(std::string_view label) {
  if (begun_ != posted_) return slot_of(begun_);
  if (static_cast<uint32_t>(outstanding()) == slots_) {
    refuse(label, "a slot that this rank has consumed, got all " + std::to_string(slots_) +
                      " in use. Finish an earlier reduction first.");
  }
  peers_.wait(consumed_all_, begun_ + 1 - slots_, {label, "reduce_scatter"});
  return slot_of(++begun_);
}

void GradEpochs::post() {
  posted_ = begun_;
  grads_[peers_.rank()].set(posted_);
}

int GradEpochs::wait_posted(std::string_view label) {
  if (outstanding() == 0) refuse(label, "a reduction to wait for, got none. Post one first.");
  peers_.wait(grads_, consumed_ + 1, {label, "reduce_scatter"});
  return slot_of(consumed_ + 1);
}

void GradEpochs::consume() {
  if (outstanding() == 0) return;
  consumed_all_[peers_.rank()].set(++consumed_);
}

void GradEpochs::skip(std::string_view label) {
  if (outstanding() != 0) {
    refuse(label, "earlier reductions to be consumed before one is skipped, got one under way.");
  }
  begun_ = posted_ = ++consumed_;
  // NOTE: not waited for: nobody writes or reads this rank's slot. Consumed first, though the order
  // does not matter: who waits for either takes nothing from the slot.
  consumed_all_[peers_.rank()].set(consumed_);
  grads_[peers_.rank()].set(posted_);
}

// -- messages -------------------------------------------------------------------------------------

struct alignas(kEpochBytes) Exchange::Message {
  uint64_t nbytes;  // of the whole message, which may travel in several parts
  uint64_t hash;    // of the label: ranks that are out of step must not read one another's numbers
  std::byte data[kMessageBytes];
};

size_t Exchange::bytes(int world) {
  return static_cast<size_t>(world) * (sizeof(Epoch) + 2 * sizeof(Message));
}

Exchange::Exchange(Peers& peers, void* memory)
    : peers_(peers),
      posted_(static_cast<Epoch*>(memory)),
      messages_(reinterpret_cast<Message*>(posted_ + peers.world())),
      number_(posted_[peers.rank()].get()) {
  peers.wake_at_end(&posted_[peers.rank()]);
}

Exchange::Message& Exchange::message(uint32_t number, int rank) const {
  return messages_[number % 2 * static_cast<uint32_t>(peers_.world()) +
                   static_cast<uint32_t>(rank)];
}

void Exchange::all_gather(std::span<const std::byte> in, std::byte* out, Operation operation) {
  const uint64_t hash = std::hash<std::string_view>{}(operation.label);
  size_t sent = 0;
  do {
    const size_t part = std::min(in.size() - sent, kMessageBytes);
    Message& own = message(++number_, peers_.rank());
    own.nbytes = in.size();
    own.hash = hash;
    if (part > 0) std::memcpy(own.data, in.data() + sent, part);
    posted_[peers_.rank()].set(number_);
    wait_for_all(operation);
    for (int peer = 0; peer < peers_.world(); ++peer) {
      const Message& found = message(number_, peer);
      if (found.nbytes != own.nbytes || found.hash != hash) {
        check_same(found, peer, operation, own.nbytes);
      }
      if (part > 0) std::memcpy(out + peer * in.size() + sent, found.data, part);
    }
    sent += part;
  } while (sent < in.size());
}

void Exchange::wait_for_all(Operation operation) {
  try {
    peers_.wait(posted_, number_, operation);
  } catch (const Failure&) {
    throw;
  } catch (...) {
    // The message is posted: made again, this would be another one.
    peers_.abort(std::string(operation.label) + ": expected " + std::string(operation.name) +
                 " to complete, got it interrupted");
    throw;
  }
}

void Exchange::check_same(const Message& found, int peer, Operation operation,
                          uint64_t nbytes) const {
  const std::string other = found.nbytes == nbytes
                                ? "another operation"
                                : "one of " + std::to_string(found.nbytes) + " bytes";
  const std::string message = std::string(operation.label) + ": expected the same " +
                              std::string(operation.name) + " of " + std::to_string(nbytes) +
                              " bytes on every rank, got on rank " + std::to_string(peer) + " " +
                              other + ". Call the same operations in the same order on every rank.";
  peers_.abort(message);
  throw Failure(message);
}

}  // namespace fk::shm
