// SPDX-License-Identifier: Apache-2.0
// Communicators for tests, and the texts of their failures.
#pragma once

#include <string>

#include "nccl/communicator.h"
#include "nccl/library.h"
#include "sim/check.h"

namespace fk::sim {

inline const nccl::Api& api = nccl::default_api();

// Rank `rank` on the device of that number, as run_ranks makes it current. Limits are for what
// should succeed; a test of the limit sets a short one.
inline nccl::Options options(int rank, int world) {
  nccl::Options made;
  made.rank = made.device = rank;
  made.world = world;
  made.name = "test";
  made.timeout_s = made.init_timeout_s = 30;
  return made;
}

inline std::string fresh_id() { return nccl::unique_id(api); }

// "after 0.123 s" as "after T s", for no clock is exact.
inline std::string timeless(std::string text) {
  for (size_t at = 0; (at = text.find("after ", at)) != std::string::npos; ++at) {
    const size_t first = at + 6, end = text.find(" s", first);
    if (end != std::string::npos && text.find_first_not_of("0123456789.e-", first) == end)
      text.replace(first, end - first, "T");
  }
  return text;
}

// The whole text of a collective's failure.
inline std::string failed(const std::string& label, const std::string& operation, int rank,
                          int world, const std::string& what) {
  return label + ": expected " + operation + " to complete on all " + std::to_string(world) +
         " ranks (nccl), got on rank " + std::to_string(rank) + ": " + what +
         ". Another rank died or fell out of step: read the first error of the other ranks. What "
         "was computed since is undefined: restart from the last checkpoint.";
}

// The same, of an error that is CUDA's.
inline std::string failed_by_cuda(const std::string& label, const std::string& operation,
                                  const std::string& what) {
  return label + ": expected " + operation +
         " to complete on all 1 ranks (nccl), got on rank 0: " + what +
         ". Some kernel of this process failed, before or beside it: CUDA_LAUNCH_BLOCKING=1 finds "
         "it. What was computed since is undefined: restart from the last checkpoint.";
}

inline void inject(const Fault& fault) { Control::get().inject(fault); }

inline void check_message(nccl::Communicator& comm, const std::string& text) {
  const std::vector<std::string> messages = comm.take_messages();
  CHECK_EQUAL(messages.size(), size_t{1});
  CHECK_EQUAL(timeless(messages.front()), text);
  CHECK(comm.take_messages().empty());
}

inline void gather_works(nccl::Communicator& comm, int world) {
  const float shard = 3;
  std::vector<float> full(static_cast<size_t>(world));
  comm.all_gather("unit 1", full.data(), &shard, sizeof(float), nullptr)->wait(nullptr);
  for (const float each : full) CHECK_EQUAL(each, 3.0f);
}

}  // namespace fk::sim
