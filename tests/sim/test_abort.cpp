// SPDX-License-Identifier: Apache-2.0
// Aborts while work of one communicator is behind work of another, as in every backward: NCCL's
// abort waits for its own stream, and so for the other communicator.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include "sim/open.h"

using namespace fk::sim;
namespace nccl = fk::nccl;

namespace {

// What is written to stderr while this lives.
class Stderr {
 public:
  // A file without a name: memory of this process's, which nothing has to remove.
  Stderr() : saved_(dup(STDERR_FILENO)), file_(memfd_create("stderr", MFD_CLOEXEC)) {
    dup2(file_, STDERR_FILENO);
  }
  ~Stderr() {
    dup2(saved_, STDERR_FILENO);
    close(saved_);
    close(file_);
  }
  std::string text() const {
    std::string found;
    char part[512];
    for (ssize_t got; (got = pread(file_, part, sizeof(part), found.size())) > 0;)
      found.append(part, static_cast<size_t>(got));
    return found;
  }

 private:
  int saved_, file_;
};

// A compute stream, and memory for a collective of either kind on it.
class Work {
 public:
  using Ticket = nccl::Communicator::TicketPtr;
  Work() : device_(Process::get().device()), stream_(device_.make_stream(0)) {}
  ~Work() { device_.destroy_stream(stream_); }
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  cudaStream_t compute() const { return reinterpret_cast<cudaStream_t>(stream_); }
  void gather(nccl::Communicator& comm, const std::string& label) {
    comm.all_gather(label, full_, &own_, sizeof(float), compute())->wait(compute());
  }
  void reduce(nccl::Communicator& comm, const std::string& label) {
    comm.reduce_scatter(label, &shard_, grads_, 1, ncclFloat32, compute())->wait(compute());
  }
  void synchronize() { device_.synchronize(); }

 private:
  Device& device_;
  Stream* stream_;
  float shard_ = 1, own_ = 3, full_[2] = {}, grads_[2] = {1, 2};
};

struct Flag {
  std::atomic<bool> up{false};
  void wait() { up.wait(false); }
  void raise() {
    up = true;
    up.notify_all();
  }
};

nccl::Options quick(int rank, double timeout_s) {
  auto made = options(rank, 2);
  made.timeout_s = timeout_s;
  return made;
}

std::string await_failure(const nccl::Communicator& comm) {
  while (comm.failure().empty()) std::this_thread::yield();
  return timeless(comm.failure());
}

void await_nothing_alive() {
  while (Process::get().live() != Live{}) std::this_thread::yield();
}

std::string late(const std::string& label, const std::string& operation, const std::string& limit,
                 const std::string& behind = "") {
  return failed(label, operation, 0, 2,
                "no completion after T s (time limit " + limit + ")" + behind);
}

// The peer never issues what is first; what comes after is on the other communicator.
void one_behind_the_other(bool reduce_first, bool blocking) {
  const std::string id = fresh_id(), second = fresh_id();
  Flag over;
  run_ranks(2, [&](int rank) {
    auto chosen = quick(rank, 0.2);
    chosen.blocking = blocking;
    nccl::Communicator comm(api, chosen, id);
    comm.open_reductions(second);
    if (rank == 1) return over.wait();
    Work work;
    std::string text;
    if (reduce_first) {
      work.reduce(comm, "unit 2");
      work.gather(comm, "unit 1");
      text = late("unit 2", "reduce_scatter", "0.2 s", "; issued after it: unit 1 (all_gather)");
    } else {
      work.gather(comm, "unit 1");
      work.reduce(comm, "unit 2");
      text = late("unit 1", "all_gather", "0.2 s", "; issued after it: unit 2 (reduce_scatter)");
    }
    CHECK_EQUAL(await_failure(comm), text);
    work.synchronize();  // was aborted: nothing hangs
    comm.close();
    CHECK(comm.take_messages().empty());
    over.raise();
  });
}

void a_gather_behind_a_reduction_that_hangs() { one_behind_the_other(true, false); }
void a_reduction_behind_a_gather_that_hangs() { one_behind_the_other(false, false); }
void the_same_with_blocking_communicators() {
  one_behind_the_other(true, true);
  one_behind_the_other(false, true);
}

void an_abort_by_hand_and_one_by_going() {
  for (const bool by_hand : {true, false}) {
    const std::string id = fresh_id(), second = fresh_id();
    Flag over;
    run_ranks(2, [&](int rank) {
      Work work;
      {
        nccl::Communicator comm(api, options(rank, 2), id);
        comm.open_reductions(second);
        if (rank == 1) return over.wait();
        work.reduce(comm, "unit 2");
        work.gather(comm, "unit 1");
        if (by_hand) comm.abort("the test says so");
        if (by_hand) work.synchronize();
      }
      work.synchronize();
      over.raise();
    });
  }
}

// Two communicators of one process, the second's work behind the first's, which outlasts it: the
// second can be closed all the same, and goes when the first has ended.
void another_communicator_holds_the_stream() {
  const std::string ids[] = {fresh_id(), fresh_id()};
  Flag over;
  Stderr caught;
  run_ranks(2, [&](int rank) {
    auto patient = options(rank, 2);
    patient.name = "first";
    nccl::Communicator first(api, patient, ids[0]);
    auto second = std::make_unique<nccl::Communicator>(api, quick(rank, 0.2), ids[1]);
    if (rank == 1) return over.wait();
    Work work;
    work.gather(first, "unit 1");
    work.gather(*second, "unit 2");
    const std::string text = late("unit 2", "all_gather", "0.2 s");
    CHECK_EQUAL(await_failure(*second), text);
    second->close();
    const std::string stuck =
        "communicator 'test/gather': expected NCCL to let go of it within 0.2 s, got no answer on "
        "rank 0. A kernel or another communicator holds its stream: abort that one too. A thread "
        "is left behind, which waits for it.";
    const std::vector<std::string> messages = second->take_messages();
    CHECK_EQUAL(messages.size(), size_t{1});
    CHECK_EQUAL(messages.front(), stuck);
    CHECK_EQUAL(timeless(caught.text()),
                "fsdp_kernels: " + text + "\nfsdp_kernels: " + stuck + "\n");
    second = nullptr;
    first.abort("the test says so");
    work.synchronize();
    over.raise();
  });
  await_nothing_alive();  // what was left behind has ended
}

// The same, and both fail.
void both_communicators_of_a_process_fail() {
  const std::string ids[] = {fresh_id(), fresh_id()};
  Flag over;
  run_ranks(2, [&](int rank) {
    nccl::Communicator first(api, quick(rank, 0.5), ids[0]);
    nccl::Communicator second(api, quick(rank, 0.1), ids[1]);
    if (rank == 1) return over.wait();
    Work work;
    work.gather(first, "unit 1");
    work.gather(second, "unit 2");
    CHECK_EQUAL(await_failure(second), late("unit 2", "all_gather", "0.1 s"));
    CHECK_EQUAL(await_failure(first), late("unit 1", "all_gather", "0.5 s"));
    work.synchronize();
    over.raise();
  });
}

// -- a watchdog that is held in a call of CUDA ----------------------------------------------------

std::atomic<bool> held{false}, asked{false};

cudaError_t query_that_may_hang(cudaEvent_t event) {
  asked = true;
  asked.notify_all();
  held.wait(true);
  return api.cudaEventQuery(event);
}

void a_watchdog_that_hangs_is_left_behind() {
  static nccl::Api table = api;
  table.cudaEventQuery = query_that_may_hang;
  held = true;
  float shard = 3, full[1] = {};
  {
    auto chosen = options(0, 1);
    chosen.timeout_s = 0.3;
    Stderr caught;
    nccl::Communicator comm(table, chosen, fresh_id());
    comm.all_gather("unit 1", full, &shard, sizeof(float), nullptr);
    asked.wait(false);
    comm.abort("the test says so");
    comm.close();
    CHECK_EQUAL(caught.text(),
                "fsdp_kernels: communicator 'test': expected its watchdog to end within 0.3 s, got "
                "no answer on rank 0. A call of CUDA or NCCL holds it. A thread is left behind, "
                "which waits for it.\n");
  }
  held = false;
  held.notify_all();
  await_nothing_alive();  // it frees what it holds
}

}  // namespace

int main(int count, char** names) {
  return run_cases(
      {CASE(a_gather_behind_a_reduction_that_hangs), CASE(a_reduction_behind_a_gather_that_hangs),
       CASE(the_same_with_blocking_communicators), CASE(an_abort_by_hand_and_one_by_going),
       CASE(another_communicator_holds_the_stream), CASE(both_communicators_of_a_process_fail),
       CASE(a_watchdog_that_hangs_is_left_behind)},
      count - 1, names + 1);
}
