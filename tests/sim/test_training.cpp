// SPDX-License-Identifier: Apache-2.0
// The real communicator under the training loop of training.h, ranks as threads.
#include <algorithm>
#include <atomic>

#include "nccl/library.h"
#include "sim/check.h"
#include "sim/training.h"

using namespace fk::sim;
namespace nccl = fk::nccl;

namespace {

const nccl::Api& api = nccl::default_api();

// When work happens. Led: the last rank finishes before the others begin to, so that all is done
// for its sake, in one order; otherwise the ranks race.
struct When {
  const char* name;
  bool led;
  Policy policy;
  Trainer::First first;
  uint64_t seed;
};

using First = Trainer::First;
const std::vector<When> kWhen = {
    {"compute first", true, Policy::kLazy, First::kCompute, 0},
    {"gathers first", true, Policy::kLazy, First::kGathers, 0},
    {"reductions first", true, Policy::kLazy, First::kReductions, 0},
    {"eager", false, Policy::kEager, First::kCompute, 0},
    {"random 1", false, Policy::kRandom, First::kCompute, 1},
    {"random 2", false, Policy::kRandom, First::kReductions, 2},
    {"round robin", false, Policy::kRoundRobin, First::kGathers, 0},
};

struct Result {
  std::vector<Outcome> outcomes;
  int waits = 0;  // of a rank: cudaStreamWaitEvent calls
};

Result train(const Shape& shape, const When& when, int drop) {
  Control& control = Control::get();
  control.reset();
  Settings settings;
  settings.policy = when.policy;
  settings.seed = when.seed;
  settings.chunk_bytes = 64;         // several rounds for most buckets
  settings.poll_patience = 1 << 30;  // the watchdog's looks change nothing
  control.configure(settings);
  control.drop_wait(drop);
  const std::string gathers = nccl::unique_id(api), reductions = nccl::unique_id(api);
  std::atomic<bool> led{false};
  Result result;
  result.outcomes.resize(shape.ranks());
  run_ranks(shape.world, [&](int rank) {
    nccl::Options options;
    options.rank = options.device = rank;
    options.world = shape.world;
    nccl::Communicator comm(api, options, gathers);
    if (shape.reductions) comm.open_reductions(reductions);
    Trainer trainer(shape, rank, comm);
    trainer.run();
    const bool leads = !when.led || rank == shape.world - 1;
    if (!leads) led.wait(false);
    trainer.finish(when.first);
    if (leads) led = true, led.notify_all();
    result.outcomes[static_cast<size_t>(rank)] = trainer.outcome();
    comm.close();
  });
  result.waits = control.waits(0);
  for (int rank = 1; rank < shape.world; ++rank) CHECK_EQUAL(control.waits(rank), result.waits);
  for (const std::string& violation : control.violations()) fail("train", 0, violation);
  return result;
}

void results_are_the_oracles() {
  for (const bool reductions : {true, false})
    for (int world = 1; world <= 4; ++world) {
      Shape shape;
      shape.world = world;
      shape.reductions = reductions;
      const std::vector<Outcome> expected = oracle(shape);
      for (const When& when : kWhen) {
        const Result result = train(shape, when, 0);
        if (result.outcomes != expected)
          fail(__FILE__, __LINE__,
               "the oracle's numbers in world " + std::to_string(world) + ", " + when.name);
      }
    }
}

// Every cudaStreamWaitEvent of a rank is dropped in turn, on all ranks alike: whichever rank comes
// there first runs too early, for no other has asked for the work. (With reductions on the stream
// of the gathers, the order of that stream makes some of them superfluous.)
void every_wait_is_needed() {
  const Shape shape;
  const std::vector<Outcome> expected = oracle(shape);
  const int waits = train(shape, kWhen[0], 0).waits;
  CHECK(waits > 50);
  std::string survivors;
  for (int drop = 1; drop <= waits; ++drop) {
    const bool found = std::ranges::any_of(
        kWhen, [&](const When& when) { return train(shape, when, drop).outcomes != expected; });
    if (!found) survivors += " " + std::to_string(drop);
  }
  CHECK_EQUAL(survivors, "");
}

}  // namespace

int main(int count, char** names) {
  return run_cases({CASE(results_are_the_oracles), CASE(every_wait_is_needed)}, count - 1,
                   names + 1);
}
