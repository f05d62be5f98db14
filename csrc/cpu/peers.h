// SPDX-License-Identifier: Apache-2.0
// The ranks that share memory: waiting for one another, and knowing who died or gave up.
//
// docs/shared_memory.md describes the protocol.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/epoch.h"
#include "cpu/process.h"

namespace fk::shm {

// A peer died, gave up or never came: what the ranks shared is lost. The message says who and
// where.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What a wait is for; both appear in errors.
struct Operation {
  std::string_view label;  // such as fk.gather[layers.3/0]
  std::string_view name;   // such as gather
};

// What a wait needs from the language above; each may be empty.
struct Hooks {
  // Runs a wait that will sleep: Python lets its other threads run meanwhile.
  std::function<void(const std::function<void()>&)> around;
  // Called some times a second while a wait sleeps; throws to interrupt it.
  std::function<void()> poll;
};

struct PeersOptions {
  int rank;
  double timeout_s;  // of one wait
  Hooks hooks;
};

// One rank's view of all of them, over zeroed memory that they share.
//
// For one thread at a time. A wait that throws has failed for good, except one that the poll hook
// interrupted: it may be made again, since waiting changes nothing.
class Peers {
 public:
  // `control`: control_bytes(world) zeroed bytes, aligned to kEpochBytes. `processes`: by rank.
  Peers(void* control, std::vector<ProcessId> processes, PeersOptions options);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  static size_t control_bytes(int world);

  int rank() const { return options_.rank; }
  int world() const { return static_cast<int>(processes_.size()); }

  // Wakes those who sleep for these epochs of this rank when it gives up.
  void wake_at_end(Epoch* own);

  // Returns once each of `world` epochs has reached the target.
  void wait(const Epoch* epochs, uint32_t target, Operation operation);

  // Throws if the ranks have failed or this one has closed.
  void check_usable(Operation operation) const;

  // Lets every rank's next wait fail with this reason; of several, the first counts.
  void abort(std::string_view reason);

  // The first reason, and the rank that gave it.
  std::optional<std::string> failure() const;

  // Says that this rank is done: whoever waits for more from it fails at once. Again: does nothing.
  void close();

 private:
  struct Control;
  struct Member;
  // What a wait saw of all ranks when it found them all waiting; empty otherwise.
  struct Standstill {
    std::vector<uint32_t> waits;
    std::vector<uint32_t> looks;
  };

  Member& member(int rank) const;
  bool is_reached(const Epoch* epochs, uint32_t target) const;
  void wait_slowly(Epoch* epochs, uint32_t target, Operation operation);
  void look_around(const Epoch* epochs, uint32_t target, Operation operation, double waited_s);
  bool is_standstill(Standstill& since);
  std::string places() const;
  [[noreturn]] void fail(Operation operation, const std::string& what);
  void wake_all();

  Control* control_;
  std::vector<ProcessId> processes_;
  std::vector<ProcessWatch> watches_;
  PeersOptions options_;
  std::vector<Epoch*> own_;
  bool closed_ = false;
};

}  // namespace fk::shm
