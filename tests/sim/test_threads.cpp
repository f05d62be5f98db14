// SPDX-License-Identifier: Apache-2.0
// Several host threads in one communicator, beside its watchdog; for a thread sanitizer, and for
// the table, which notices two threads in one of NCCL's communicators.
#include <array>
#include <atomic>
#include <deque>
#include <mutex>

#include "sim/open.h"

using namespace fk::sim;
namespace nccl = fk::nccl;

namespace {

constexpr int kRounds = 500;

// Tickets on their way from the thread that issues to the thread that waits.
class Queue {
 public:
  using Ticket = nccl::Communicator::TicketPtr;
  void put(Ticket ticket) {
    const std::lock_guard lock(mutex_);
    tickets_.push_back(std::move(ticket));
    ++count_;
    count_.notify_one();
  }
  Ticket get(int index) {
    for (int count = count_; count <= index; count = count_) count_.wait(count);
    const std::lock_guard lock(mutex_);
    Ticket ticket = std::move(tickets_.front());
    tickets_.pop_front();
    return ticket;
  }

 private:
  std::mutex mutex_;
  std::deque<Ticket> tickets_;
  std::atomic<int> count_{0};
};

struct Ids {
  std::string gathers = fresh_id(), reductions = fresh_id();
};

// Backward has its own host thread; tickets are waited on by another; memory goes by whoever drops
// it last.
void threads_take_turns() {
  const Ids ids;
  run_ranks(2, [&](int rank) {
    nccl::Communicator comm(api, options(rank, 2), ids.gathers);
    comm.open_reductions(ids.reductions);
    std::vector<std::shared_ptr<nccl::Buffer>> buffers;
    for (int i = 0; i < kRounds; ++i) buffers.push_back(comm.allocate(64, true));
    std::vector<std::array<float, 2>> full(kRounds);
    const float shard = static_cast<float>(rank + 1);
    Queue queue;
    std::thread frees([&] {
      Process::set_current_device(rank);
      for (auto& buffer : buffers) buffer = nullptr;
    });
    std::thread waits([&] {
      for (int i = 0; i < kRounds; ++i) {
        const auto ticket = queue.get(i);
        ticket->wait(nullptr);
        CHECK_EQUAL(full[static_cast<size_t>(i)][1], 2.0f);
        CHECK(comm.failure().empty());
        CHECK(comm.take_messages().empty());
      }
    });
    for (auto& each : full)
      queue.put(comm.all_gather("unit", each.data(), &shard, sizeof(float), nullptr));
    frees.join();
    waits.join();
    comm.close();
  });
}

// While two threads issue and wait, a third aborts: everyone gets the one text, and nobody hangs.
void an_abort_meets_whatever_is_going_on() {
  for (int round = 0; round < 10; ++round) {
    const Ids ids;
    std::atomic<int> ready{0};
    run_ranks(2, [&](int rank) {
      nccl::Communicator comm(api, options(rank, 2), ids.gathers);
      std::vector<std::array<float, 2>> full(kRounds);
      const float shard = 1;
      std::thread aborts([&] {
        for (int seen = ready; seen <= 5 * round; seen = ready) ready.wait(seen);
        comm.abort("the test says so");
      });
      const std::string text = thrown([&] {
        for (size_t i = 0;; i = (i + 1) % full.size()) {
          comm.all_gather("unit", full[i].data(), &shard, sizeof(float), nullptr)->wait(nullptr);
          ++ready;
          ready.notify_all();
        }
      });
      aborts.join();
      CHECK(text.find(": the test says so. What was computed") != std::string::npos);
      CHECK_EQUAL(text, comm.failure());
      comm.close();  // an abort waits for nobody; after this the memory is the caller's again
    });
  }
}

}  // namespace

int main(int count, char** names) {
  return run_cases({CASE(threads_take_turns), CASE(an_abort_meets_whatever_is_going_on)}, count - 1,
                   names + 1);
}
