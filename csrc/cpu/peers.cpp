// SPDX-License-Identifier: Apache-2.0
#include "cpu/peers.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>
#include <utility>

namespace fk::shm {
namespace {

using Clock = std::chrono::steady_clock;

// A peer that is about to arrive is cheaper to spin for than to sleep for: some microseconds.
constexpr int kSpins = 100;
// How long a sleeper does not look whether its peers still live.
constexpr int kSliceMilliseconds = 100;

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Text that others may read while it is written: they see old or new words, never a data race.
template <size_t N>
struct SharedText {
  uint64_t words[N];

  void write(std::string_view text) {
    text = text.substr(0, sizeof(words) - 1);
    for (size_t i = 0; i < N; ++i) {
      uint64_t word = 0;
      const size_t start = i * sizeof(word);
      if (start < text.size()) text.copy(reinterpret_cast<char*>(&word), sizeof(word), start);
      std::atomic_ref(words[i]).store(word, std::memory_order_relaxed);
      if (start >= text.size()) break;  // the zero ends it
    }
  }

  std::string read() const {
    std::string text;
    for (const uint64_t& word : words) {
      const uint64_t value =
          std::atomic_ref(const_cast<uint64_t&>(word)).load(std::memory_order_relaxed);
      text.append(reinterpret_cast<const char*>(&value), sizeof(value));
    }
    return text.substr(0, text.find('\0'));
  }
};

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", value);
  return text;
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

struct alignas(kEpochBytes) Peers::Member {
  uint32_t closed;
  uint32_t waits;  // counts the starts and the ends of waits that sleep: odd during one
  uint32_t looks;  // counts how often such a wait has found that what it waits for has not come
  SharedText<30> place;  // what the rank waits in; empty while it computes
};

struct alignas(kEpochBytes) Peers::Control {
  enum State : uint32_t { kGood = 0, kFailing = 1, kFailed = 2 };
  uint32_t state;
  uint32_t first;  // the rank that failed first
  SharedText<126> reason;
  // One Member for each rank follows.
};

size_t Peers::control_bytes(int world) {
  static_assert(sizeof(Control) % kEpochBytes == 0);
  return sizeof(Control) + static_cast<size_t>(world) * sizeof(Member);
}

Peers::Member& Peers::member(int rank) const {
  return reinterpret_cast<Member*>(control_ + 1)[rank];
}

Peers::Peers(void* control, std::vector<ProcessId> processes, PeersOptions options)
    : control_(static_cast<Control*>(control)),
      processes_(std::move(processes)),
      options_(std::move(options)) {
  if (options_.rank < 0 || options_.rank >= world()) {
    throw std::invalid_argument("Peers: expected a rank in [0, " + std::to_string(world()) +
                                "), got " + std::to_string(options_.rank) +
                                ". Pass one process for each rank.");
  }
  for (const ProcessId process : processes_) watches_.emplace_back(process);
}

Peers::~Peers() { close(); }

void Peers::wake_at_end(Epoch* own) { own_.push_back(own); }

void Peers::wake_all() {
  for (Epoch* epoch : own_) epoch->wake();
}

// -- waiting --------------------------------------------------------------------------------------

bool Peers::is_reached(const Epoch* epochs, uint32_t target) const {
  return std::all_of(epochs, epochs + world(),
                     [target](const Epoch& epoch) { return epoch.has_reached(target); });
}

void Peers::wait(const Epoch* epochs, uint32_t target, Operation operation) {
  check_usable(operation);
  if (is_reached(epochs, target)) return;
  // Sleepers are counted in the epochs that they read.
  auto* counted = const_cast<Epoch*>(epochs);
  if (options_.hooks.around) {
    options_.hooks.around([&] { wait_slowly(counted, target, operation); });
  } else {
    wait_slowly(counted, target, operation);
  }
}

void Peers::wait_slowly(Epoch* epochs, uint32_t target, Operation operation) {
  const Clock::time_point start = Clock::now();
  struct Stay {
    Member& own;
    Stay(Member& own, const std::string& place) : own(own) {
      own.place.write(place);
      std::atomic_ref(own.waits).fetch_add(1);
    }
    ~Stay() {
      std::atomic_ref(own.waits).fetch_add(1);
      own.place.write({});
    }
  } const stay(member(rank()), std::string(operation.name) + " of " + std::string(operation.label));
  Standstill standstill;
  for (Epoch* epoch = epochs; epoch != epochs + world(); ++epoch) {
    for (int i = 0; i < kSpins && !epoch->has_reached(target); ++i) pause_briefly();
    for (;;) {
      const uint32_t seen = epoch->get();
      if (static_cast<int32_t>(seen - target) >= 0) break;
      look_around(epochs, target, operation, seconds_since(start));
      if (is_standstill(standstill)) {
        fail(operation, "every rank waits for another one:" + places());
      }
      epoch->sleep(seen, kSliceMilliseconds);
    }
  }
}

// Fails if what is waited for cannot come, or has not come in time.
void Peers::look_around(const Epoch* epochs, uint32_t target, Operation operation,
                        double waited_s) {
  check_usable(operation);
  if (options_.hooks.poll) options_.hooks.poll();
  for (int peer = 0; peer < world(); ++peer) {
    const Member& found = member(peer);
    const bool closed = std::atomic_ref(const_cast<uint32_t&>(found.closed)).load() != 0;
    const bool ended = peer != rank() && !closed && watches_[peer].has_ended();
    // Looked at last: it may have done its part just before it went.
    if (epochs[peer].has_reached(target)) continue;
    const std::string name = "rank " + std::to_string(peer);
    if (ended) {
      fail(operation, name + " (process " + std::to_string(processes_[peer].pid) + ") has ended");
    }
    if (closed) fail(operation, name + " has closed its communicator");
    if (waited_s > options_.timeout_s) {
      const std::string place = found.place.read();
      const uint32_t there = epochs[peer].get();
      fail(operation, "no word from " + name + " after " + seconds(waited_s) + " (time limit " +
                          seconds(options_.timeout_s) + "): it is at number " +
                          std::to_string(there) + " of " + std::to_string(target) + ", and " +
                          (place.empty() ? "computes" : "waits in " + place));
    }
  }
}

// Whether no rank will ever move. Called when what this rank waits for has not come.
//
// NOTE: a rank counts a look after it has looked. All ranks were in these waits when `looks` was
// read at first; of two looks counted since, the second was made since; and all are in the same
// waits still. So nobody has set a number in between, and everybody has seen that it is not enough.
bool Peers::is_standstill(Standstill& since) {
  std::atomic_ref(member(rank()).looks).fetch_add(1);
  const auto read = [this](uint32_t Member::* counter) {
    std::vector<uint32_t> found;
    for (int peer = 0; peer < world(); ++peer) {
      found.push_back(std::atomic_ref(member(peer).*counter).load());
    }
    return found;
  };
  const std::vector<uint32_t> looks = read(&Member::looks);
  const std::vector<uint32_t> waits = read(&Member::waits);
  if (waits == since.waits) {
    bool all = true;
    for (int peer = 0; peer < world(); ++peer) all &= looks[peer] - since.looks[peer] >= 2;
    return all;
  }
  const bool everybody =
      std::all_of(waits.begin(), waits.end(), [](uint32_t count) { return count % 2 != 0; });
  since = everybody ? Standstill{waits, read(&Member::looks)} : Standstill{};
  return false;
}

std::string Peers::places() const {
  std::string text;
  for (int peer = 0; peer < world(); ++peer) {
    text += (peer == 0 ? " rank " : ", rank ") + std::to_string(peer) + " in " +
            member(peer).place.read();
  }
  return text;
}

// -- failure --------------------------------------------------------------------------------------

void Peers::fail(Operation operation, const std::string& what) {
  const std::string message =
      std::string(operation.label) + ": expected " + std::string(operation.name) +
      " to complete on all " + std::to_string(world()) + " ranks (shared_memory), got on rank " +
      std::to_string(rank()) + ": " + what +
      ". Another rank died or fell out of step: read the first error of the other "
      "ranks, and restart from the last checkpoint.";
  abort(message);
  throw Failure(message);
}

void Peers::check_usable(Operation operation) const {
  if (closed_) {
    throw Failure(std::string(operation.label) +
                  ": expected an open communicator, got one that was closed. Create a new one.");
  }
  if (const auto reason = failure()) {
    throw Failure(std::string(operation.label) + ": expected " + std::string(operation.name) +
                  " to complete on all " + std::to_string(world()) +
                  " ranks (shared_memory), got on rank " + std::to_string(rank()) + ": " + *reason);
  }
}

void Peers::abort(std::string_view reason) {
  uint32_t expected = Control::kGood;
  std::atomic_ref state(control_->state);
  if (!closed_ && state.compare_exchange_strong(expected, Control::kFailing)) {
    control_->first = static_cast<uint32_t>(rank());
    control_->reason.write(reason);
    state.store(Control::kFailed, std::memory_order_release);
  }
  wake_all();
}

std::optional<std::string> Peers::failure() const {
  if (std::atomic_ref(control_->state).load(std::memory_order_acquire) != Control::kFailed) {
    return std::nullopt;
  }
  return "rank " + std::to_string(control_->first) + " failed first: " + control_->reason.read();
}

void Peers::close() {
  if (closed_) return;
  closed_ = true;
  // A forked child that lets go of what it inherited must not speak for its parent.
  if (getpid() != processes_[rank()].pid) return;
  std::atomic_ref(member(rank()).closed).store(1);
  wake_all();
}

}  // namespace fk::shm
