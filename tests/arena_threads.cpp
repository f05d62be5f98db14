// SPDX-License-Identifier: Apache-2.0
// Ranks as threads over one block of memory run random legal schedules and check every number that
// they read; built with ThreadSanitizer, and with AddressSanitizer, by test_arena_threads.py.
//
// Threads see the block at one address, so a race between "processes" is one that the sanitizer
// knows. Arguments: seed, schedules, and optionally a rule to break, which must then be noticed.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/peers.h"
#include "cpu/process.h"
#include "cpu/protocol.h"

namespace shm = fk::shm;

namespace {

constexpr int kShard = 24;  // numbers of one shard
constexpr int kUnits = 3;
constexpr int kSlots = 2;
constexpr uint32_t kFirst = 0xFFFFFFFD;  // every number wraps around soon

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "wrong: %s\n", what.c_str());
  std::_Exit(1);
}

uint64_t value(int kind, int owner, uint64_t version, int index) {
  return ((version * 64 + static_cast<uint64_t>(owner)) * 8 + static_cast<uint64_t>(kind)) * 1024 +
         static_cast<uint64_t>(index);
}

// What the ranks share: epochs, control, messages, full parameters, gradient slots.
struct Block {
  explicit Block(int world) : world(world) {
    const size_t epochs = (kUnits + 1) * shm::ParamEpochs::epochs(world) * sizeof(shm::Epoch);
    const size_t control = shm::Peers::control_bytes(world);
    params_at = epochs + control + shm::Exchange::bytes(world);
    grads_at = params_at + kUnits * full_bytes();
    const size_t nbytes = grads_at + static_cast<size_t>(world * kSlots) * full_bytes();
    memory.reset(
        static_cast<std::byte*>(std::aligned_alloc(shm::kEpochBytes, (nbytes + 127) / 128 * 128)));
    std::memset(memory.get(), 0, nbytes);
    auto* first = reinterpret_cast<shm::Epoch*>(memory.get());
    for (size_t i = 0; i * sizeof(shm::Epoch) < epochs; ++i) first[i].value = kFirst;
    control_at = epochs;
    exchange_at = epochs + control;
  }

  size_t full_bytes() const { return static_cast<size_t>(world) * kShard * sizeof(uint64_t); }
  shm::Epoch* epochs(int unit) const {
    return reinterpret_cast<shm::Epoch*>(memory.get()) + unit * 2 * world;
  }
  uint64_t* params(int unit) const { return at(params_at + unit * full_bytes()); }
  uint64_t* grads(int slot, int rank) const {
    return at(grads_at + static_cast<size_t>(slot * world + rank) * full_bytes());
  }
  uint64_t* at(size_t offset) const { return reinterpret_cast<uint64_t*>(memory.get() + offset); }

  struct Free {
    void operator()(std::byte* bytes) const { std::free(bytes); }
  };
  int world;
  size_t control_at, exchange_at, params_at, grads_at;
  std::unique_ptr<std::byte, Free> memory;
};

// One rank: calls the protocol and knows what every number must be.
class Rank {
 public:
  Rank(const Block& block, int rank, const std::string& broken)
      : block_(block),
        rank_(rank),
        broken_(broken),
        peers_(block.memory.get() + block.control_at, std::vector(block.world, shm::this_process()),
               {rank, 30.0, {}}),
        // Broken: this many slots would be free, but there is memory for fewer.
        grads_(peers_, block.epochs(kUnits), broken == "begin" ? 4 * kSlots : kSlots),
        exchange_(peers_, block.memory.get() + block.exchange_at) {
    for (int unit = 0; unit < kUnits; ++unit) {
      params_.emplace_back(std::make_unique<shm::ParamEpochs>(peers_, block.epochs(unit)));
    }
  }

  void write(int unit) {
    if (broken_ != "wait_released") params_[unit]->wait_released("write");
    ++versions_[unit];
    fill_params(unit);
  }

  void gather(int unit, bool edited) {
    if (params_[unit]->is_held()) return;
    if (edited && broken_ != "publish") {
      write(unit);
    } else if (edited) {
      params_[unit]->gather("gather");
      ++versions_[unit];
      return fill_params(unit);
    }
    params_[unit]->gather("gather");
  }

  void read(int unit) {
    if (broken_ != "wait_ready") params_[unit]->wait_ready("gather");
    const uint64_t* full = block_.params(unit);
    for (int owner = 0; owner < block_.world; ++owner) {
      for (int i = 0; i < kShard; ++i) {
        const uint64_t found = full[owner * kShard + i];
        if (found != (versions_[unit] ? value(unit, owner, versions_[unit], i) : 0)) {
          fail("parameters of unit " + std::to_string(unit) + " on rank " + std::to_string(rank_));
        }
      }
    }
  }

  void free(int unit) { params_[unit]->release(); }

  void issue() {
    const int slot = grads_.begin("reduce") % kSlots;
    ++issued_;
    uint64_t* own = block_.grads(slot, rank_);
    for (int i = 0; i < block_.world * kShard; ++i) own[i] = value(6, rank_, issued_, i);
    grads_.post();
  }

  void finish() {
    const bool waits = broken_ != "wait_posted";
    const int slot = waits ? grads_.wait_posted("reduce") % kSlots : broken_slot_++ % kSlots;
    ++finished_;
    for (int writer = 0; writer < block_.world; ++writer) {
      const uint64_t* full = block_.grads(slot, writer);
      for (int i = rank_ * kShard; i < (rank_ + 1) * kShard; ++i) {
        if (full[i] != value(6, writer, finished_, i)) fail("gradients of " + std::to_string(i));
      }
    }
    grads_.consume();
  }

  uint64_t under_way() const { return issued_ - finished_; }

  void exchange(size_t count) {
    ++exchanges_;
    std::vector<uint64_t> in(count), out(count * static_cast<size_t>(block_.world));
    for (size_t i = 0; i < count; ++i) in[i] = value(7, rank_, exchanges_, static_cast<int>(i));
    exchange_.all_gather(std::as_bytes(std::span(in)), reinterpret_cast<std::byte*>(out.data()),
                         {"agree", "exchange"});
    for (size_t i = 0; i < out.size(); ++i) {
      const int from = static_cast<int>(i / count);
      if (out[i] != value(7, from, exchanges_, static_cast<int>(i % count))) fail("messages");
    }
  }

 private:
  void fill_params(int unit) {
    uint64_t* own = block_.params(unit) + rank_ * kShard;
    for (int i = 0; i < kShard; ++i) own[i] = value(unit, rank_, versions_[unit], i);
  }

  const Block& block_;
  int rank_;
  std::string broken_;
  shm::Peers peers_;
  std::vector<std::unique_ptr<shm::ParamEpochs>> params_;
  shm::GradEpochs grads_;
  shm::Exchange exchange_;
  uint64_t versions_[kUnits] = {};
  uint64_t issued_ = 0, finished_ = 0, exchanges_ = 0;
  int broken_slot_ = (kFirst + 1) % kSlots;
};

// What all ranks share of a schedule is drawn from `common`; what each does its own way from `own`.
void run(Rank& rank, uint32_t seed, int number) {
  std::mt19937 common(seed), own(seed * 31 + static_cast<uint32_t>(number) + 1);
  const auto chance = [](std::mt19937& draw, unsigned percent) { return draw() % 100 < percent; };
  const uint64_t most = chance(common, 50) ? 0 : 1;  // reductions under way beside a new one
  for (int step = 0; step < 3; ++step) {
    // Everybody edits in this model of the numbers: versions are equal on all ranks.
    bool edited = chance(common, 30);
    const bool backward = chance(common, 80);
    const unsigned length = 1 + common() % 5;
    for (unsigned visit = 0; visit < length; ++visit) {
      const int unit = static_cast<int>(common() % kUnits);
      const int next = static_cast<int>(common() % kUnits);
      rank.gather(unit, std::exchange(edited, false));
      if (chance(common, 50)) rank.gather(next, false);
      if (chance(own, 10)) std::this_thread::yield();
      rank.read(unit);
      const bool early = chance(own, 50);
      if (early) rank.free(unit);
      if (backward) {
        while (rank.under_way() > most) rank.finish();
        rank.issue();
      }
      rank.free(unit);
      // Prefetched: read now, or freed without a look.
      if (chance(own, 50) && next != unit) rank.free(next);
      rank.free(next);
    }
    while (rank.under_way() > 0) rank.finish();
    if (chance(common, 60)) rank.exchange(1 + common() % 700);
    for (int unit = 0; unit < kUnits; ++unit) {
      if (chance(common, 80)) rank.write(unit);
    }
  }
}

void run_all(uint32_t seed, int world, const std::string& broken) {
  const Block block(world);
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int i = 0; i < world; ++i) ranks.push_back(std::make_unique<Rank>(block, i, broken));
  std::vector<std::thread> threads;
  for (int i = 0; i < world; ++i) {
    threads.emplace_back([&ranks, seed, i] { run(*ranks[i], seed, i); });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) fail("expected a seed and a number of schedules");
  const auto seed = static_cast<uint32_t>(std::atoi(argv[1]));
  const int schedules = std::atoi(argv[2]);
  for (int i = 0; i < schedules; ++i) {
    run_all(seed + static_cast<uint32_t>(i), 1 + i % 4, argc > 3 ? argv[3] : "");
  }
  std::printf("ran %d schedules\n", schedules);
  return 0;
}
