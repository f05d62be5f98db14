// SPDX-License-Identifier: Apache-2.0
// CUDA graphs: somebody captures a stream beside the communicator, or the one that it is given.
#include <atomic>

#include "sim/open.h"

using namespace fk::sim;
namespace nccl = fk::nccl;

namespace {

void capture(const void* stream, bool on) {
  Control::get().capture(reinterpret_cast<uintptr_t>(stream), on);
}

// The watchdog looks while a stream of nobody's is captured, which ends neither: a question of an
// event would end the capture, and CUDA's refusal of it is no failure of the collective.
void the_watchdog_beside_a_capture() {
  for (const bool refuses : {false, true}) {
    const std::string id = fresh_id();
    std::atomic<bool> over{false};
    run_ranks(2, [&](int rank) {
      auto quick = options(rank, 2);
      quick.timeout_s = 0.2;
      nccl::Communicator comm(api, quick, id);
      if (rank == 1) return over.wait(false);
      if (refuses) inject({"cudaEventQuery", cudaErrorStreamCaptureUnsupported, 1, 0});
      Stream* other = Process::get().device().make_stream(0);
      const float shard = 1;
      float full[2];
      capture(other, true);
      comm.all_gather("unit 1", full, &shard, sizeof(float), nullptr);
      while (comm.failure().empty()) std::this_thread::yield();
      capture(other, false);
      CHECK_EQUAL(timeless(comm.failure()), failed("unit 1", "all_gather", 0, 2,
                                                   "no completion after T s (time limit 0.2 s)"));
      Process::get().device().destroy_stream(other);
      over = true;
      over.notify_all();
    });
  }
}

void a_collective_in_a_capture_is_refused() {
  nccl::Communicator comm(api, options(0, 1), fresh_id());
  Stream* stream = Process::get().device().make_stream(0);
  const auto compute = reinterpret_cast<cudaStream_t>(stream);
  const float shard = 3;
  float full = 0;
  const auto gather = [&] { return comm.all_gather("unit 1", &full, &shard, 4, compute); };
  const std::string text =
      "unit 1: expected a stream that is not being captured, got one within a CUDA graph's "
      "capture. Leave what communicates out of the graph.";
  auto buffer = comm.allocate(10, false);
  capture(stream, true);
  buffer = nullptr;  // waits for no device now
  CHECK_EQUAL(thrown(gather), text);
  comm.begin_group();
  const auto grouped = gather();
  CHECK_EQUAL(thrown([&] { comm.end_group(compute); }), text);
  CHECK_EQUAL(thrown([&] { grouped->wait(nullptr); }),
              "unit 1: expected all_gather to be issued, got one that was dropped with its group. "
              "Read the error that ended the group.");
  capture(stream, false);
  CHECK(comm.failure().empty());
  gather()->wait(nullptr);
  CHECK_EQUAL(full, 3.0f);
  comm.close();
  Process::get().device().destroy_stream(stream);
}

}  // namespace

int main(int count, char** names) {
  return run_cases(
      {CASE(the_watchdog_beside_a_capture), CASE(a_collective_in_a_capture_is_refused)}, count - 1,
      names + 1);
}
