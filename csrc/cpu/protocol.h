// SPDX-License-Identifier: Apache-2.0
// Who may read and write what, when: the rules of docs/shared_memory.md as three small objects.
//
// tests/arena_model.py searches every interleaving of the same methods under the same names.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "cpu/epoch.h"
#include "cpu/peers.h"

namespace fk::shm {

// The full parameters of one bucket: one memory for all ranks, of which each writes its shard.
class ParamEpochs {
 public:
  static size_t epochs(int world) { return 2 * static_cast<size_t>(world); }

  // `epochs`: the same on every rank; the numbers start at what they hold.
  ParamEpochs(Peers& peers, Epoch* epochs);

  // Says that this rank's shard is in place for its next gather.
  void gather(std::string_view label);

  // Waits until every shard of this gather is in place; they may be read until release().
  void wait_ready(std::string_view label);

  // Says that this rank does not read this gather any more. Again, or without wait: as well.
  void release();

  // Waits until nobody reads the last gather; this rank may then write its shard until the next.
  void wait_released(std::string_view label);

  // Whether this rank may read, or wait to.
  bool is_held() const { return number_ != released_; }

  uint32_t number() const { return number_; }

 private:
  Peers& peers_;
  Epoch *ready_, *released_all_;
  uint32_t number_, released_;  // of this rank
};

// Every rank's full gradients of one unit after the other, in a few slots that are used in turn.
class GradEpochs {
 public:
  static size_t epochs(int world) { return 2 * static_cast<size_t>(world); }

  GradEpochs(Peers& peers, Epoch* epochs, int slots);

  // Waits until the next reduction's slot has been read by all; this rank may then write its own.
  // Returns the slot's index. Again before post(): the same slot, for whoever failed to fill it.
  int begin(std::string_view label);

  // Says that this rank's gradients of the reduction that was begun are complete.
  void post();

  // Waits until every rank's gradients of the oldest reduction that was posted and not yet consumed
  // are complete; they may be read until consume(). Returns the slot's index.
  int wait_posted(std::string_view label);

  // Says that this rank has read what it wants of that reduction; without wait: nothing.
  void consume();

  // Takes part in the next reduction without writing or reading. All ranks must drop its result.
  void skip(std::string_view label);

  int outstanding() const { return static_cast<int>(posted_ - consumed_); }

 private:
  int slot_of(uint32_t number) const;

  Peers& peers_;
  Epoch *grads_, *consumed_all_;
  uint32_t slots_;
  uint32_t begun_, posted_, consumed_;  // of this rank
};

// Small messages of every rank to every rank, in two slots.
//
// No epoch says that a message was read: whoever posts number q has seen every rank's q - 1, and
// each of those was posted after its rank had read all of q - 2, which lay in the same slot.
class Exchange {
 public:
  static constexpr size_t kMessageBytes = 4096;
  static size_t bytes(int world);

  Exchange(Peers& peers, void* memory);

  // Fills `out`, world x in.size() bytes, with every rank's `in`, in rank order.
  void all_gather(std::span<const std::byte> in, std::byte* out, Operation operation);

 private:
  struct Message;

  Message& message(uint32_t number, int rank) const;
  void wait_for_all(Operation operation);
  void check_same(const Message& found, int peer, Operation operation, uint64_t nbytes) const;

  Peers& peers_;
  Epoch* posted_;
  Message* messages_;
  uint32_t number_;
};

}  // namespace fk::shm
