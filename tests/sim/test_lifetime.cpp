// SPDX-License-Identifier: Apache-2.0
// How a communicator begins and ends, and what it refuses.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "sim/open.h"

using namespace fk::sim;
namespace nccl = fk::nccl;

namespace {

std::string open_fails(const nccl::Options& options, const std::string& id) {
  return timeless(thrown([&] { const nccl::Communicator comm(api, options, id); }));
}

std::string not_joined(int rank, int world, const std::string& limit, const std::string& what) {
  return "communicator 'test/gather': expected all " + std::to_string(world) +
         " ranks to join within " + limit + ", got on rank " + std::to_string(rank) +
         " after T s: " + what +
         ". Check that all ranks run, that each has its own GPU, and that they reach each other "
         "(NCCL_SOCKET_IFNAME names the interface); read the first error of the other ranks.";
}

// -- the beginning --------------------------------------------------------------------------------

void options_reach_nccl() {
  auto chosen = options(0, 1);
  nccl::Communicator(api, chosen, fresh_id()).close();
  chosen.blocking = true;
  chosen.min_ctas = 2;
  chosen.max_ctas = 8;
  chosen.cta_policy = NCCL_CTA_POLICY_EFFICIENCY;
  nccl::Communicator comm(api, chosen, fresh_id());
  comm.open_reductions(fresh_id());
  gather_works(comm, 1);
  comm.close();
  const std::vector<std::string> configs = Control::get().configs();
  CHECK_EQUAL(
      configs.at(0),
      "test/gather 0/1: blocking 0, CTAs default to default, policy default, share default");
  CHECK_EQUAL(configs.at(1), "test/gather 0/1: blocking 1, CTAs 2 to 8, policy 1, share default");
  CHECK_EQUAL(configs.at(2),
              "test/reduce 0/1: blocking 1, CTAs 2 to 8, policy default, share default");
}

void options_are_checked() {
  const auto refused = [](void (*edit)(nccl::Options&)) {
    auto wrong = options(0, 1);
    edit(wrong);
    return open_fails(wrong, fresh_id());
  };
  const std::string start = "communicator 'test': expected ";
  CHECK_EQUAL(refused([](auto& o) { o.rank = 1; }),
              start + "a rank in [0, world), got 1 of 1. Pass the rank and the size of the group.");
  CHECK_EQUAL(refused([](auto& o) { o.device = -1; }),
              start + "a device from 0, got -1. Pass the index of this rank's GPU.");
  CHECK_EQUAL(refused([](auto& o) { o.timeout_s = 0; }),
              start + "finite time limits above 0, got 0 s. Pass seconds.");
  CHECK_EQUAL(refused([](auto& o) { o.min_ctas = 9, o.max_ctas = 8; }),
              start + "0 <= min_ctas <= max_ctas, got 9 and 8. Pass 0 for NCCL's own choice.");
  CHECK_EQUAL(refused([](auto& o) { o.cta_policy = 3; }),
              start + "a CTA policy in [-1, 2], got 3. Pass -1 for NCCL's own choice.");
  CHECK_EQUAL(
      open_fails(options(0, 1), "short"),
      start + "a unique id of 128 bytes, got 5 bytes. Pass what unique_id() gave on rank 0.");
}

void an_old_nccl_is_refused() {
  Settings settings;
  settings.version = 22603;
  Control::get().configure(settings);
  CHECK_EQUAL(open_fails(options(0, 1), fresh_id()),
              "communicator 'test': expected NCCL 2.27.0 or newer at run time, got 2.26.3. Install "
              "nvidia-nccl-cu13 of 2.27 to 2.30, or a torch with it.");
  settings.version = 22703;  // which knows only two of the policies
  Control::get().configure(settings);
  auto zero = options(0, 1);
  zero.cta_policy = 2;
  CHECK_EQUAL(open_fails(zero, fresh_id()),
              "communicator 'test': expected NCCL 2.28.0 or newer for the zero-CTA policy, got "
              "2.27.3. Choose another policy, or install nvidia-nccl-cu13 of 2.28 to 2.30.");
  CHECK(Control::get().configs().empty());
  zero.cta_policy = 1;
  nccl::Communicator(api, zero, fresh_id()).close();
  settings.version = 23102;  // NCCL keeps its ABI
  Control::get().configure(settings);
  nccl::Communicator(api, options(0, 1), fresh_id()).close();
}

void a_device_that_is_not_there() {
  auto far = options(0, 1);
  far.device = 64;
  CHECK_EQUAL(open_fails(far, fresh_id()),
              "communicator 'test/gather': expected CUDA device 64 to be usable, got \"invalid "
              "device ordinal\" from CUDA (code 101). Check the driver (nvidia-smi) and "
              "CUDA_VISIBLE_DEVICES; without a GPU, use gloo.");
  CHECK_EQUAL(Process::current_device(), 0);
}

void the_callers_device_stays_current() {
  auto other = options(0, 1);
  other.device = 3;
  nccl::Communicator comm(api, other, fresh_id());
  CHECK_EQUAL(Process::current_device(), 0);
  const float shard = 3;
  float full = 0;
  const auto ticket = comm.all_gather("unit 1", &full, &shard, sizeof(float), nullptr);
  ticket->wait(nullptr);
  CHECK_EQUAL(full, 3.0f);
  const auto buffer = comm.allocate(100, false);
  comm.close();
  CHECK_EQUAL(Process::current_device(), 0);
}

void a_rank_does_not_join() {
  auto quick = options(0, 2);
  quick.init_timeout_s = 0.1;
  CHECK_EQUAL(open_fails(quick, fresh_id()), not_joined(0, 2, "0.1 s", "still in progress"));
}

void nccl_cannot_begin() {
  inject({"ncclCommInitRankConfig", ncclUnhandledCudaError, 1, -1, 0, "driver too old"});
  CHECK_EQUAL(open_fails(options(0, 1), fresh_id()),
              not_joined(0, 1, "30 s", "\"unhandled cuda error\" from NCCL: driver too old"));
  inject({"async", ncclSystemError, 1, -1, 0, "no route"});  // while it begins in the background
  CHECK_EQUAL(open_fails(options(0, 1), fresh_id()),
              not_joined(0, 1, "30 s", "\"unhandled system error\" from NCCL: no route"));
  inject({"cudaStreamCreateWithPriority", cudaErrorMemoryAllocation, 2});  // the second stream
  CHECK_EQUAL(
      open_fails(options(0, 1), fresh_id()),
      "communicator 'test/reduce': expected a CUDA stream to be made, got \"out of memory\" "
      "from CUDA (code 2). Free device memory, and read the first CUDA error.");
}

// NCCL answers "in progress" at every place where it may, for a while.
void nccl_takes_its_time() {
  const std::string id = fresh_id(), second = fresh_id();
  run_ranks(2, [&](int rank) {
    for (const char* call : {"ncclCommInitRankConfig", "ncclAllGather", "ncclGroupEnd"})
      inject({call, ncclInProgress, 1, rank, 5});
    nccl::Communicator comm(api, options(rank, 2), id);
    comm.open_reductions(second);
    gather_works(comm, 2);
    comm.begin_group();
    const float shard = 4;
    float one[2], two[2];
    const auto ticket = comm.all_gather("unit 1", one, &shard, sizeof(float), nullptr);
    comm.all_gather("unit 2", two, &shard, sizeof(float), nullptr);
    comm.end_group(nullptr);
    ticket->wait(nullptr);
    CHECK_EQUAL(two[1 - rank], 4.0f);
    comm.close();
  });
}

void a_launch_stays_in_progress() {
  auto quick = options(0, 1);
  quick.timeout_s = 0.1;
  nccl::Communicator comm(api, quick, fresh_id());
  inject({"ncclAllGather", ncclInProgress, 1, -1, 1 << 30});
  const float shard = 3;
  float full = 0;
  CHECK_EQUAL(
      timeless(thrown([&] { comm.all_gather("unit 1", &full, &shard, 4, nullptr); })),
      failed("unit 1", "all_gather", 0, 1, "still in progress after T s (time limit 0.1 s)"));
}

// -- groups and arguments -------------------------------------------------------------------------

void groups_do_not_nest() {
  nccl::Communicator comm(api, options(0, 1), fresh_id());
  CHECK_EQUAL(
      thrown([&] { comm.end_group(nullptr); }),
      "communicator 'test': expected begin_group before end_group, got none. Call it first.");
  comm.begin_group();
  CHECK_EQUAL(thrown([&] { comm.begin_group(); }),
              "communicator 'test': expected end_group before another begin_group, got an open "
              "group. Groups do not nest: end it first.");
  const float shard = 3;
  float full = 0;
  const auto ticket = comm.all_gather("unit 1", &full, &shard, 4, nullptr);
  comm.cancel_group();
  CHECK_EQUAL(thrown([&] { ticket->wait(nullptr); }),
              "unit 1: expected all_gather to be issued, got one that was dropped with its group. "
              "Read the error that ended the group.");
  gather_works(comm, 1);
  comm.close();
}

void arguments_are_checked() {
  nccl::Communicator comm(api, options(0, 2 - 1), fresh_id());
  float memory[4] = {};
  CHECK_EQUAL(thrown([&] { comm.all_gather("unit 1", nullptr, memory, 4, nullptr); }),
              "unit 1: expected the addresses of 4 elements, got a null one. Pass allocated "
              "tensors.");
  CHECK_EQUAL(thrown([&] { comm.all_gather("unit 1", memory + 1, memory, 8, nullptr); }),
              "unit 1: expected a shard apart from the full buffer, or slot 0 of it, got one at "
              "byte -4 of slots of 8 bytes. Pass that slot.");
  CHECK_EQUAL(thrown([&] { comm.broadcast("unit 1", memory, 4, 1, nullptr); }),
              "unit 1: expected a source rank in [0, 1), got 1. Pass a rank of the group, not of "
              "the job.");
  CHECK(comm.failure().empty());  // the user's mistakes end nothing
  const auto empty = comm.all_gather("unit 1", nullptr, nullptr, 0, nullptr);
  empty->wait(nullptr);
  CHECK_EQUAL(empty->event_id(), uint64_t{0});
  comm.close();
}

// -- the end --------------------------------------------------------------------------------------

void closing_twice_and_use_after() {
  const float shard = 3;
  float full = 0;
  nccl::Communicator comm(api, options(0, 1), fresh_id());
  const auto ticket = comm.all_gather("unit 1", &full, &shard, 4, nullptr);
  comm.close();  // waits for what is in flight
  CHECK_EQUAL(full, 3.0f);
  comm.close();
  const auto closed = [](const std::string& label) {
    return label + ": expected an open communicator, got one that was closed. Make a new one.";
  };
  CHECK_EQUAL(thrown([&] { comm.all_gather("later", &full, &shard, 4, nullptr); }),
              closed("later"));
  CHECK_EQUAL(thrown([&] { comm.gather_stream(); }), closed("communicator 'test'"));
  CHECK_EQUAL(thrown([&] { comm.open_reductions(fresh_id()); }), closed("communicator 'test'"));
  CHECK_EQUAL(thrown([&] { comm.allocate(4, true); }), closed("communicator 'test'"));
  comm.abort("too late");
  CHECK(comm.failure().empty());
  ticket->wait(nullptr);  // the work is through
}

void a_peer_does_not_close() {
  const std::string id = fresh_id();
  std::atomic<bool> over{false};
  run_ranks(2, [&](int rank) {
    auto quick = options(rank, 2);
    quick.timeout_s = 0.2;
    nccl::Communicator comm(api, quick, id);
    if (rank == 1) return over.wait(false);
    comm.close();
    check_message(
        comm,
        "communicator 'test/gather': expected all ranks to close it, got on rank 0: still "
        "in progress after T s (time limit 0.2 s). It was aborted; close it on all ranks.");
    over = true;
    over.notify_all();
  });
}

void going_without_a_word() {
  const float shard = 3;
  float full[2];
  nccl::Communicator::TicketPtr ticket;
  {
    const std::string id = fresh_id();
    std::unique_ptr<nccl::Communicator> comms[2];
    run_ranks(2, [&](int rank) {
      comms[rank] = std::make_unique<nccl::Communicator>(api, options(rank, 2), id);
    });
    ticket = comms[0]->all_gather("unit 1", full, &shard, 4, nullptr);  // the peer never does
  }
  ticket->wait(nullptr);  // aborted: nothing hangs
}

void a_forked_child_touches_nothing() {
  const float shard = 3;
  float full = 0;
  nccl::Communicator comm(api, options(0, 1), fresh_id());
  auto ticket = comm.all_gather("unit 1", &full, &shard, 4, nullptr);
  const pid_t child = fork();
  if (child == 0) {
    const std::string text = thrown([&] { comm.all_gather("unit 2", &full, &shard, 4, nullptr); });
    const std::string start = "unit 2: expected the process that made communicator 'test'";
    comm.close();
    ticket = nullptr;
    _exit(text.substr(0, start.size()) == start && Control::get().violations().empty() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK_EQUAL(status, 0);
  ticket->wait(nullptr);
  comm.close();
}

}  // namespace

int main(int count, char** names) {
  return run_cases(
      {CASE(a_forked_child_touches_nothing), CASE(options_reach_nccl), CASE(options_are_checked),
       CASE(an_old_nccl_is_refused), CASE(a_device_that_is_not_there),
       CASE(the_callers_device_stays_current), CASE(a_rank_does_not_join), CASE(nccl_cannot_begin),
       CASE(nccl_takes_its_time), CASE(a_launch_stays_in_progress), CASE(groups_do_not_nest),
       CASE(arguments_are_checked), CASE(closing_twice_and_use_after), CASE(a_peer_does_not_close),
       CASE(going_without_a_word)},
      count - 1, names + 1);
}
