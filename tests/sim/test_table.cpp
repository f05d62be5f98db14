// SPDX-License-Identifier: Apache-2.0
// The simulation itself, below the communicator: what it moves, when it runs, and that it sees what
// a missing wait does. A simulation that forgave everything would make the other tests worthless.
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>

#include "nccl/api.h"
#include "sim/check.h"
#include "sim/reduce.h"

using namespace fk::sim;

namespace {

const fk::nccl::Api& api = fk::nccl::default_api();

ncclUniqueId fresh_id() {
  ncclUniqueId id;
  CHECK_EQUAL(api.ncclGetUniqueId(&id), ncclSuccess);
  return id;
}

// One rank's communicator, stream and event, non-blocking as ours are.
struct Rank {
  Rank(const ncclUniqueId& id, int world, int rank_) : rank(rank_) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    CHECK_EQUAL(api.ncclCommInitRankConfig(&comm, world, id, rank, &config), ncclInProgress);
    CHECK_EQUAL(settle(), ncclSuccess);
    stream = make_stream();
    CHECK_EQUAL(api.cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  }
  ~Rank() {
    api.cudaEventDestroy(event);
    api.cudaStreamDestroy(stream);
    if (comm != nullptr) api.ncclCommAbort(comm);
  }
  static cudaStream_t make_stream() {
    cudaStream_t made;
    CHECK_EQUAL(api.cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, -5), cudaSuccess);
    return made;
  }
  ncclResult_t settle() {
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress)
      CHECK_EQUAL(api.ncclCommGetAsyncError(comm, &state), ncclSuccess);
    return state;
  }
  void close() {
    CHECK_EQUAL(api.ncclCommFinalize(comm), ncclInProgress);
    CHECK_EQUAL(settle(), ncclSuccess);
    CHECK_EQUAL(api.ncclCommDestroy(std::exchange(comm, nullptr)), ncclSuccess);
  }
  // The host waits for what is on the stream.
  void finish() {
    CHECK_EQUAL(api.cudaEventRecord(event, stream), cudaSuccess);
    CHECK_EQUAL(api.cudaStreamWaitEvent(nullptr, event, 0), cudaSuccess);
  }
  int rank;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
};

bool poisoned(float value) { return std::isnan(value); }

void moves_data(int world, int rank, const ncclUniqueId& id) {
  Rank mine(id, world, rank);
  constexpr size_t kCount = 37;
  const auto ranks = static_cast<size_t>(world), me = static_cast<size_t>(rank);
  std::vector<float> full(ranks * kCount), shard(kCount), sum(kCount), word(1), all(kCount);
  const auto value = [](size_t r, size_t i) { return static_cast<float>(r * 1000 + i + 1); };
  for (size_t i = 0; i < kCount; ++i) shard[i] = full[me * kCount + i] = value(me, i);
  const auto gather = [&](const float* from) {
    api.ncclAllGather(from, full.data(), kCount, ncclFloat32, mine.comm, mine.stream);
    mine.finish();
    for (size_t r = 0; r < ranks; ++r)
      for (size_t i = 0; i < kCount; ++i) CHECK_EQUAL(full[r * kCount + i], value(r, i));
  };
  gather(shard.data());
  gather(full.data() + me * kCount);  // in place

  const auto total = [&](size_t i) {
    float expected = 0;
    for (size_t r = 0; r < ranks; ++r) expected += value(r, i) * static_cast<float>(r + 1);
    return expected;
  };
  for (size_t r = 0; r < ranks; ++r)
    for (size_t i = 0; i < kCount; ++i)
      full[r * kCount + i] = value(me, i + r) * static_cast<float>(rank + 1);
  all.assign(full.begin(), full.begin() + kCount);
  api.ncclReduceScatter(full.data(), sum.data(), kCount, ncclFloat32, ncclSum, mine.comm,
                        mine.stream);
  api.ncclAllReduce(all.data(), all.data(), kCount, ncclFloat32, ncclSum, mine.comm, mine.stream);
  if (world == 1) CHECK(poisoned(sum[0]));  // nobody has waited, no peer either
  mine.finish();
  for (size_t i = 0; i < kCount; ++i) CHECK_EQUAL(sum[i], total(i + me));
  for (size_t i = 0; i < kCount; ++i) CHECK_EQUAL(all[i], total(i));

  word[0] = static_cast<float>(rank + 5);
  const int root = world - 1;
  api.ncclGroupStart();
  api.ncclBroadcast(word.data(), word.data(), 1, ncclFloat32, root, mine.comm, mine.stream);
  api.ncclAllReduce(shard.data(), sum.data(), kCount, ncclFloat32, ncclMax, mine.comm, mine.stream);
  CHECK_EQUAL(api.ncclGroupEnd(), ncclSuccess);
  mine.finish();
  CHECK_EQUAL(word[0], static_cast<float>(root + 5));
  CHECK_EQUAL(sum[3], value(ranks - 1, 3));
  mine.close();
}

void ranks_are_threads() {
  for (const size_t chunk : {size_t{16}, size_t{1000}, size_t{1} << 20})
    for (const Policy policy :
         {Policy::kLazy, Policy::kEager, Policy::kRandom, Policy::kRoundRobin}) {
      Settings settings;
      settings.policy = policy;
      settings.chunk_bytes = chunk;
      Control::get().configure(settings);
      for (int world = 1; world <= 4; ++world) {
        const ncclUniqueId id = fresh_id();
        run_ranks(world, [&](int rank) {
          if (policy == Policy::kLazy) return moves_data(world, rank, id);
          // Other policies may have written before anybody waits.
          Rank mine(id, world, rank);
          const float one = 1;
          std::vector<float> full(static_cast<size_t>(world));
          api.ncclAllGather(&one, full.data(), 1, ncclFloat32, mine.comm, mine.stream);
          mine.finish();
          for (const float each : full) CHECK_EQUAL(each, 1.0f);
          mine.close();
        });
      }
    }
}

void ranks_are_processes() {
  const ncclUniqueId id = fresh_id();
  pid_t children[3];
  for (int rank = 0; rank < 3; ++rank) {
    children[rank] = fork();
    if (children[rank] != 0) continue;
    int code = 0;
    try {
      moves_data(3, rank, id);
    } catch (const std::exception& error) {
      std::printf("rank %d: %s\n", rank, error.what());
      code = 1;
    }
    std::fflush(stdout);
    _exit(code);
  }
  for (const pid_t child : children) {
    int status = -1;
    waitpid(child, &status, 0);
    CHECK_EQUAL(status, 0);
  }
}

void reductions_round_once() {
  const auto bf16 = [](float value) { return __float2bfloat16_rn(value); };
  // 256 + 1 + 1 is 258 at once, but 256 if each sum were rounded to bf16.
  const std::vector<__nv_bfloat16> a{bf16(256)}, b{bf16(1)}, c{bf16(1)};
  __nv_bfloat16 result;
  CHECK(reduce({a.data(), b.data(), c.data()}, &result, 1, ncclBfloat16, ncclSum));
  CHECK_EQUAL(__bfloat162float(result), 258.0f);
  const int64_t x = int64_t{1} << 60, y = 3;
  int64_t sum;
  CHECK(reduce({&x, &y}, &sum, 1, ncclInt64, ncclSum));
  CHECK_EQUAL(sum, x + y);
  CHECK(!reduce({&x, &y}, &sum, 1, ncclInt64, ncclProd));
}

// A compute stream, a kernel on it before or after a collective, and no wait in between.
void a_missing_wait_is_seen() {
  const ncclUniqueId id = fresh_id();
  std::atomic<int> seen{0};
  run_ranks(2, [&](int rank) {
    Rank mine(id, 2, rank);
    Stream* compute = reinterpret_cast<Stream*>(Rank::make_stream());
    Device& device = Process::get().device();
    float shard = 1, read = 0, kept = 0;
    std::vector<float> full(2, 7);
    device.launch(compute, [&] { shard = 2; });
    device.launch(compute, [&] { kept = full[0]; });  // then the collective may overwrite it
    api.ncclAllGather(&shard, full.data(), 1, ncclFloat32, mine.comm, mine.stream);
    device.launch(compute, [&] { read = full[1]; });
    mine.finish();
    CHECK_EQUAL(full[0], 1.0f);  // too early for the kernel's 2
    device.synchronize();
    CHECK(poisoned(kept) || kept == 1.0f);
    full = {7, 7};
    api.ncclAllGather(&shard, full.data(), 1, ncclFloat32, mine.comm, mine.stream);
    device.launch(compute, [&] { read = full[1]; });
    device.synchronize(device.record(compute));
    seen += poisoned(read);
    mine.finish();
    CHECK_EQUAL(full[1], 2.0f);
    api.cudaStreamDestroy(reinterpret_cast<cudaStream_t>(compute));
    mine.close();
  });
  CHECK(seen >= 1);  // by the rank that came first: nobody had asked for the collective
}

// Rank 1's host is away while rank 0 needs the collective, as a real device would go on.
void work_is_done_for_peers() {
  const ncclUniqueId id = fresh_id();
  std::atomic<bool> through{false};
  run_ranks(2, [&](int rank) {
    Rank mine(id, 2, rank);
    const float one = 1;
    std::vector<float> full(2);
    api.ncclAllGather(&one, full.data(), 1, ncclFloat32, mine.comm, mine.stream);
    if (rank == 0) {
      mine.finish();
      through = true;
      through.notify_all();
    } else {
      through.wait(false);
    }
    mine.finish();
    mine.close();
  });
}

void polling_an_event_makes_it_happen() {
  const ncclUniqueId id = fresh_id();
  run_ranks(2, [&](int rank) {
    Rank mine(id, 2, rank);
    const float one = 1;
    std::vector<float> full(2);
    api.ncclAllGather(&one, full.data(), 1, ncclFloat32, mine.comm, mine.stream);
    api.cudaEventRecord(mine.event, mine.stream);
    CHECK_EQUAL(api.cudaEventQuery(mine.event), cudaErrorNotReady);
    while (api.cudaEventQuery(mine.event) == cudaErrorNotReady) std::this_thread::yield();
    CHECK_EQUAL(full[1 - static_cast<size_t>(rank)], 1.0f);
    mine.close();
  });
}

void different_collectives_are_an_error_on_both() {
  const ncclUniqueId id = fresh_id();
  run_ranks(2, [&](int rank) {
    Rank mine(id, 2, rank);
    std::vector<float> from(4), to(4);
    api.ncclAllReduce(from.data(), to.data(), rank == 0 ? 4 : 3, ncclFloat32, ncclSum, mine.comm,
                      mine.stream);
    api.cudaEventRecord(mine.event, mine.stream);
    ncclResult_t state = ncclSuccess;
    while (state == ncclSuccess) {
      api.cudaEventQuery(mine.event);
      api.ncclCommGetAsyncError(mine.comm, &state);
    }
    CHECK_EQUAL(state, ncclInvalidUsage);
    const std::string text = api.ncclGetLastError(mine.comm);
    CHECK(text.find("has ncclAllReduce of 4") != std::string::npos);
    CHECK(text.find("has ncclAllReduce of 3") != std::string::npos);
    api.ncclCommAbort(std::exchange(mine.comm, nullptr));
  });
}

void an_abort_lets_go() {
  const ncclUniqueId id = fresh_id();
  run_ranks(2, [&](int rank) {
    Rank mine(id, 2, rank);
    if (rank == 1) return;  // never issues it
    const float one = 1;
    std::vector<float> full(2);
    api.ncclAllGather(&one, full.data(), 1, ncclFloat32, mine.comm, mine.stream);
    std::thread other([&] {
      Process::set_current_device(rank);
      CHECK_EQUAL(api.ncclCommAbort(std::exchange(mine.comm, nullptr)), ncclSuccess);
    });
    mine.finish();
    other.join();
    CHECK(poisoned(full[1]));
  });
}

void a_dead_process_holds_nobody() {
  const ncclUniqueId id = fresh_id();
  const pid_t child = fork();
  if (child == 0) {
    Rank mine(id, 2, 1);
    _exit(0);  // as a killed process: without a word
  }
  run_ranks(1, [&](int) {
    Rank mine(id, 2, 0);
    waitpid(child, nullptr, 0);
    const float one = 1;
    std::vector<float> full(2);
    api.ncclAllGather(&one, full.data(), 1, ncclFloat32, mine.comm, mine.stream);
    std::thread other([&] {
      Process::set_current_device(0);
      api.ncclCommAbort(std::exchange(mine.comm, nullptr));
    });
    mine.finish();
    other.join();
  });
}

void what_nccl_forbids_is_noticed() {
  const ncclUniqueId id = fresh_id();
  run_ranks(1, [&](int) {
    Rank mine(id, 1, 0);
    std::vector<float> memory(8);
    const auto gather = [&](const float* from, float* to, cudaStream_t stream) {
      return api.ncclAllGather(from, to, 4, ncclFloat32, mine.comm, stream);
    };
    CHECK_EQUAL(gather(memory.data() + 2, memory.data(), mine.stream), ncclInvalidArgument);
    CHECK_EQUAL(gather(memory.data(), memory.data() + 4, nullptr), ncclInvalidArgument);
    CHECK_EQUAL(gather(nullptr, memory.data(), mine.stream), ncclInvalidArgument);
    Control::get().inject({"ncclAllGather", ncclInProgress, 1, -1, 2, ""});
    CHECK_EQUAL(gather(memory.data(), memory.data() + 4, mine.stream), ncclInProgress);
    api.cudaEventRecord(mine.event, mine.stream);  // before it is through
    CHECK_EQUAL(mine.settle(), ncclSuccess);
    mine.close();
    CHECK_EQUAL(api.ncclCommAbort(reinterpret_cast<ncclComm_t>(&memory)), ncclInvalidArgument);
    CHECK_EQUAL(Control::get().violations().size(), size_t{5});
  });
  Control::get().reset();
}

}  // namespace

int main(int count, char** names) {
  return run_cases(
      {CASE(ranks_are_processes), CASE(a_dead_process_holds_nobody), CASE(ranks_are_threads),
       CASE(reductions_round_once), CASE(a_missing_wait_is_seen), CASE(work_is_done_for_peers),
       CASE(polling_an_event_makes_it_happen), CASE(different_collectives_are_an_error_on_both),
       CASE(an_abort_lets_go), CASE(what_nccl_forbids_is_noticed)},
      count - 1, names + 1);
}
