// SPDX-License-Identifier: Apache-2.0
// Where the ranks of one simulated communicator meet: a POSIX shared-memory file that is named by
// the communicator's id. Ranks may be threads or processes.
//
// NOTE: there is no lock in the file. Each rank writes its own slot only, and every change rings a
// bell (a futex word): a rank that is killed at any point leaves nothing behind that could hold the
// others, which a process-shared mutex or condition variable would.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

namespace fk::sim {

inline constexpr int kMaxWorld = 16;
inline constexpr size_t kAreaBytes = 256 << 10;

// What a rank believes that the current round belongs to; all ranks must offer the same.
struct Offer {
  uint64_t operation = 0;  // number of the collective within the communicator
  uint64_t round = 0;
  uint64_t count = 0;
  int32_t kind = 0, dtype = 0, op = 0, root = 0;
  bool operator==(const Offer&) const = default;
};

// The words of one rank. All zero, as a fresh file is, means that it has not come.
struct alignas(64) Slot {
  std::atomic<int64_t> pid;
  std::atomic<uint64_t> posted;  // rounds whose data this rank has laid into its area
  std::atomic<uint64_t> taken;   // rounds that this rank has read from all areas
  std::atomic<uint64_t> wanted;  // operations that something on this rank waits for
  std::atomic<uint64_t> windows;
  std::atomic<uint32_t> finalized;
  std::atomic<uint32_t> aborted;
  Offer offer;  // of the round that was posted last; stable until all ranks have taken it
};

class Meeting {
 public:
  // Opens the file, or makes it, and takes the rank's slot. Throws std::runtime_error, also where
  // another has taken the slot.
  Meeting(const std::string& name, int world, int rank);
  ~Meeting();
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  static std::string fresh_name();

  int world() const { return world_; }
  int rank() const { return rank_; }
  Slot& mine() { return slot(rank_); }
  Slot& slot(int rank) { return file_->slots[rank]; }
  char* area(int rank) { return areas_ + static_cast<size_t>(rank) * kAreaBytes; }

  bool all_here();
  // The least value of one word over all ranks, and the greatest over the others.
  template <class Word>
  auto least(std::atomic<Word> Slot::* word) {
    Word found = ~Word{0};
    for (int r = 0; r < world_; ++r) found = std::min(found, (slot(r).*word).load());
    return found;
  }
  template <class Word>
  auto others_most(std::atomic<Word> Slot::* word) {
    Word found = 0;
    for (int r = 0; r < world_; ++r)
      if (r != rank_) found = std::max(found, (slot(r).*word).load());
    return found;
  }

  // Read the bell, look at the state, then wait for the bell to differ: no change is missed.
  uint32_t bell() const { return file_->bell.load(); }
  void ring();
  void wait(uint32_t seen, std::chrono::milliseconds limit);

 private:
  struct File {
    std::atomic<uint32_t> bell;
    Slot slots[kMaxWorld];
  };
  void unlink();

  std::string name_;
  int world_, rank_;
  pid_t owner_;
  std::atomic<bool> unlinked_{false};
  File* file_ = nullptr;
  char* areas_ = nullptr;
};

}  // namespace fk::sim
