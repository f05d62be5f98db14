// SPDX-License-Identifier: Apache-2.0
// What becomes of a communicator when NCCL, CUDA or another rank fails, text for text.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>

#include "sim/open.h"

using namespace fk::sim;
namespace nccl = fk::nccl;

namespace {

void inject(const std::string& call, int code, const std::string& text = "", int nth = 1,
            int device = -1) {
  Control::get().inject({call, code, nth, device, 0, text});
}

// One shard of one float and the full buffer of it.
struct Memory {
  explicit Memory(int world) : full(static_cast<size_t>(world), 7) {}
  float shard = 1;
  std::vector<float> full;
  nccl::Communicator::TicketPtr gather(nccl::Communicator& comm, const std::string& label) {
    return comm.all_gather(label, full.data(), &shard, sizeof(float), nullptr);
  }
  nccl::Communicator::TicketPtr reduce(nccl::Communicator& comm, const std::string& label) {
    return comm.reduce_scatter(label, &shard, full.data(), 1, ncclFloat32, nullptr);
  }
};

// A failed communicator raises the first failure, whatever is called.
void stays_failed(nccl::Communicator& comm, const std::string& text) {
  Memory memory(4);
  CHECK_EQUAL(comm.failure(), text);
  CHECK_EQUAL(thrown([&] { memory.gather(comm, "later"); }), text);
  CHECK_EQUAL(thrown([&] { memory.reduce(comm, "later"); }), text);
  CHECK_EQUAL(thrown([&] { comm.begin_group(); }), text);
  CHECK_EQUAL(thrown([&] { comm.allocate(4, true); }), text);
  comm.abort("a second reason");
  CHECK_EQUAL(comm.failure(), text);
}

void nccl_fails_at_the_launch() {
  Memory memory(1);
  nccl::Communicator comm(api, options(0, 1), fresh_id());
  inject("ncclAllGather", ncclSystemError, "socket closed by peer", 2);
  const auto first = memory.gather(comm, "unit 1");
  const std::string text = failed("unit 2", "all_gather", 0, 1,
                                  "\"unhandled system error\" from NCCL: socket closed by peer");
  CHECK_EQUAL(thrown([&] { memory.gather(comm, "unit 2"); }), text);
  stays_failed(comm, text);
  CHECK_EQUAL(thrown([&] { first->wait(nullptr); }), text);
}

void nccl_fails_at_the_end_of_a_group() {
  Memory memory(1), other(1);
  nccl::Communicator comm(api, options(0, 1), fresh_id());
  inject("ncclGroupEnd", ncclInternalError);
  comm.begin_group();
  const auto ticket = memory.gather(comm, "unit 1");
  other.gather(comm, "unit 2");
  CHECK_EQUAL(thrown([&] { ticket->wait(nullptr); }),
              "unit 1: expected all_gather to be issued before wait, got one that is queued in a "
              "group. End the group first.");
  const std::string text =
      failed("unit 1", "all_gather (first of a group of 2)", 0, 1,
             "\"internal error - please report this issue to the NCCL developers\" from NCCL");
  CHECK_EQUAL(thrown([&] { comm.end_group(nullptr); }), text);
  CHECK_EQUAL(thrown([&] { ticket->wait(nullptr); }), text);
  stays_failed(comm, text);
}

void nccl_fails_within_a_group() {
  Memory memory(1), other(1);
  nccl::Communicator comm(api, options(0, 1), fresh_id());
  inject("ncclAllGather", ncclInvalidUsage, "a bad second one", 2);
  comm.begin_group();
  memory.gather(comm, "unit 1");
  other.gather(comm, "unit 2");
  CHECK_EQUAL(thrown([&] { comm.end_group(nullptr); }),
              failed("unit 1", "all_gather (first of a group of 2)", 0, 1,
                     "\"invalid usage\" from NCCL: a bad second one"));
  // The group of this thread was ended all the same: the next communicator starts afresh.
  nccl::Communicator next(api, options(0, 1), fresh_id());
  memory.gather(next, "unit 1")->wait(nullptr);
  CHECK_EQUAL(memory.full[0], 1.0f);
  next.close();
}

// In the background: the next call finds it, though it is about another collective.
void nccl_fails_later_and_a_call_finds_it() {
  Memory memory(1), other(1);
  auto slow = options(0, 1);
  slow.timeout_s = 1e6;  // and the watchdog looks once a second
  nccl::Communicator comm(api, slow, fresh_id());
  const auto ticket = memory.gather(comm, "unit 1");
  inject("async", ncclRemoteError, "lost rank 3");
  const std::string text =
      failed("unit 1", "all_gather", 0, 1,
             "\"remote process exited or there was a network error\" from NCCL: lost rank 3");
  CHECK_EQUAL(thrown([&] { other.gather(comm, "unit 2"); }), text);
  stays_failed(comm, text);
}

// The same while the host waits for the collective: the watchdog finds it, and sets the host free.
void nccl_fails_later_and_the_watchdog_finds_it() {
  const std::string id = fresh_id();
  std::atomic<bool> over{false};
  run_ranks(2, [&](int rank) {
    Memory memory(2);
    auto quick = options(rank, 2);
    quick.timeout_s = 1;
    nccl::Communicator comm(api, rank == 0 ? quick : options(rank, 2), id);
    if (rank == 1) return over.wait(false);  // never issues it
    inject("async", ncclSystemError, "", 2, 0);
    const auto ticket = memory.gather(comm, "unit 1");
    const std::string text =
        failed("unit 1", "all_gather", 0, 2, "\"unhandled system error\" from NCCL");
    CHECK_EQUAL(thrown([&] { ticket->wait(nullptr); }), text);
    CHECK(std::isnan(memory.full[1]));
    stays_failed(comm, text);
    over = true;
    over.notify_all();
  });
}

// The peer never issues it.
void a_rank_never_comes() {
  const std::string id = fresh_id();
  std::atomic<int> waiting{2};
  run_ranks(3, [&](int rank) {
    Memory memory(3);
    auto quick = options(rank, 3);
    quick.timeout_s = 0.2;
    nccl::Communicator comm(api, quick, id);
    if (rank == 2) {
      for (int left = waiting; left > 0; left = waiting) waiting.wait(left);
      return;
    }
    const auto ticket = memory.gather(comm, "unit 1");
    const std::string text =
        failed("unit 1", "all_gather", rank, 3, "no completion after T s (time limit 0.2 s)");
    CHECK_EQUAL(timeless(thrown([&] { ticket->wait(nullptr); })), text);
    stays_failed(comm, comm.failure());
    --waiting;
    waiting.notify_all();
  });
}

// A host that waits for nothing of it hears from the watchdog's line on stderr, and at its next
// call.
void nobody_waits_for_a_collective_that_hangs() {
  const std::string id = fresh_id();
  std::atomic<bool> over{false};
  run_ranks(2, [&](int rank) {
    Memory memory(2);
    auto quick = options(rank, 2);
    quick.timeout_s = 0.1;
    nccl::Communicator comm(api, quick, id);
    if (rank == 1) return over.wait(false);
    memory.gather(comm, "unit 1");
    while (comm.failure().empty()) std::this_thread::yield();
    Process::get().device().synchronize();  // was aborted: nothing hangs
    CHECK_EQUAL(timeless(comm.failure()),
                failed("unit 1", "all_gather", 0, 2, "no completion after T s (time limit 0.1 s)"));
    over = true;
    over.notify_all();
  });
}

void a_rank_is_late_but_comes() {
  const std::string id = fresh_id();
  std::atomic<bool> asked{false};
  run_ranks(2, [&](int rank) {
    Memory memory(2);
    nccl::Communicator comm(api, options(rank, 2), id);
    if (rank == 1) asked.wait(false);
    const auto ticket = memory.gather(comm, "unit 1");
    if (rank == 0) {
      asked = true;
      asked.notify_all();
    }
    ticket->wait(nullptr);
    CHECK_EQUAL(memory.full[1 - static_cast<size_t>(rank)], 1.0f);
    comm.close();
  });
}

void ranks_fall_out_of_step() {
  const std::string id = fresh_id();
  run_ranks(2, [&](int rank) {
    Memory memory(2);
    auto quick = options(rank, 2);
    quick.timeout_s = 5;
    nccl::Communicator comm(api, quick, id);
    const auto ticket = rank == 0 ? memory.gather(comm, "unit 1") : memory.reduce(comm, "unit 2");
    const std::string text = thrown([&] { ticket->wait(nullptr); });
    const std::string start = rank == 0 ? "unit 1: expected all_gather to complete on all 2 ranks"
                                        : "unit 2: expected reduce_scatter to complete on all 2";
    CHECK_EQUAL(text.substr(0, start.size()), start);
    CHECK(text.find("\"invalid usage\" from NCCL: collective 0: rank ") != std::string::npos);
  });
}

void a_rank_is_killed() {
  const std::string id = fresh_id();
  int ready[2];
  CHECK_EQUAL(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    Memory memory(2);
    Process::set_current_device(1);
    nccl::Communicator comm(api, options(1, 2), id);
    memory.gather(comm, "unit 1")->wait(nullptr);
    CHECK_EQUAL(write(ready[1], "x", 1), 1);
    for (;;) pause();
  }
  Memory memory(2);
  auto quick = options(0, 2);
  quick.timeout_s = 0.3;
  nccl::Communicator comm(api, quick, id);
  memory.gather(comm, "unit 1")->wait(nullptr);
  char byte;
  CHECK_EQUAL(read(ready[0], &byte, 1), 1);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  const auto ticket = memory.gather(comm, "unit 2");
  CHECK_EQUAL(timeless(thrown([&] { ticket->wait(nullptr); })),
              failed("unit 2", "all_gather", 0, 2, "no completion after T s (time limit 0.3 s)"));
  comm.close();
}

void cuda_fails() {
  constexpr const char* kMemory =
      "\"an illegal memory access was encountered\" from CUDA (code 700)";
  const std::string advice = ". Read the first CUDA error of this process.";
  const struct {
    const char* call;
    int nth;
    std::string text;
  } kCases[] = {
      {"cudaEventRecord", 1, "unit 1: expected an event to be recorded, got "},
      {"cudaEventRecord", 2, "unit 1: expected an event to be recorded, got "},
      {"cudaStreamWaitEvent", 1, "unit 1: expected a stream to wait for an event, got "},
      {"cudaEventCreateWithFlags", 1, "unit 1: expected a CUDA event to be made, got "},
  };
  for (const auto& each : kCases) {
    Memory memory(1);
    nccl::Communicator comm(api, options(0, 1), fresh_id());
    inject(each.call, cudaErrorIllegalAddress, "", each.nth);
    const std::string text = each.text + kMemory + advice;
    CHECK_EQUAL(thrown([&] { memory.gather(comm, "unit 1"); }), text);
    stays_failed(comm, text);
  }
  Memory memory(1);
  auto quick = options(0, 1);
  quick.timeout_s = 0.5;
  nccl::Communicator comm(api, quick, fresh_id());
  inject("cudaEventQuery", cudaErrorIllegalAddress);  // which the watchdog asks
  memory.gather(comm, "unit 1");
  while (comm.failure().empty()) std::this_thread::yield();
  CHECK_EQUAL(comm.failure(), failed_by_cuda("unit 1", "all_gather", kMemory));
}

void abort_sets_free_who_waits() {
  const std::string id = fresh_id();
  std::atomic<bool> over{false};
  run_ranks(2, [&](int rank) {
    Memory memory(2);
    nccl::Communicator comm(api, options(rank, 2), id);
    if (rank == 1) return over.wait(false);
    const auto ticket = memory.gather(comm, "unit 1");
    std::thread other([&] { comm.abort("the test says so"); });
    const std::string text = thrown([&] { ticket->wait(nullptr); });
    other.join();
    CHECK_EQUAL(text,
                "communicator 'test': expected no abort, got one on rank 0: the test says so. What "
                "was computed since is undefined: restart from the last checkpoint.");
    CHECK(std::isnan(memory.full[1]));
    stays_failed(comm, text);
    over = true;
    over.notify_all();
  });
}

}  // namespace

int main(int count, char** names) {
  return run_cases(
      {
          CASE(a_rank_is_killed),  // forks: before there are threads
          CASE(nccl_fails_at_the_launch),
          CASE(nccl_fails_at_the_end_of_a_group),
          CASE(nccl_fails_within_a_group),
          CASE(nccl_fails_later_and_a_call_finds_it),
          CASE(nccl_fails_later_and_the_watchdog_finds_it),
          CASE(a_rank_never_comes),
          CASE(nobody_waits_for_a_collective_that_hangs),
          CASE(a_rank_is_late_but_comes),
          CASE(ranks_fall_out_of_step),
          CASE(cuda_fails),
          CASE(abort_sets_free_who_waits),
      },
      count - 1, names + 1);
}
