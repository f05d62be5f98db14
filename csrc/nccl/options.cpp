// SPDX-License-Identifier: Apache-2.0
#include "nccl/options.h"

#include <cmath>
#include <stdexcept>
#include <tuple>

#include "nccl/errors.h"
#include "nccl/library.h"

namespace fk::nccl {
namespace {

constexpr int kZeroPolicy = 2;  // NCCL_CTA_POLICY_ZERO, which headers name from 2.28
constexpr int kOldest = 22700;  // has symmetric windows and CTA policies
constexpr int kOldestWithZero = 22800;

void require(bool condition, const Options& options, const std::string& expected,
             const std::string& got, const char* advice) {
  if (condition) return;
  throw std::invalid_argument(
      cat("communicator '", options.name, "': expected ", expected, ", got ", got, ". ", advice));
}

}  // namespace

void check_options(const Options& options) {
  const auto [rank, world, min, max] =
      std::tuple(options.rank, options.world, options.min_ctas, options.max_ctas);
  require(world > 0 && rank >= 0 && rank < world, options, "a rank in [0, world)",
          cat(rank, " of ", world), "Pass the rank and the size of the group.");
  require(options.device >= 0, options, "a device from 0", cat(options.device),
          "Pass the index of this rank's GPU.");
  for (const double limit : {options.timeout_s, options.init_timeout_s}) {
    require(std::isfinite(limit) && limit > 0, options, "finite time limits above 0",
            seconds(limit), "Pass seconds.");
  }
  require(min >= 0 && max >= 0 && (max == 0 || min <= max), options, "0 <= min_ctas <= max_ctas",
          cat(min, " and ", max), "Pass 0 for NCCL's own choice.");
  require(options.cta_policy >= -1 && options.cta_policy <= kZeroPolicy, options,
          "a CTA policy in [-1, 2]", cat(options.cta_policy), "Pass -1 for NCCL's own choice.");
}

void check_unique_id(const Options& options, const std::string& unique_id) {
  require(unique_id.size() == NCCL_UNIQUE_ID_BYTES, options,
          cat("a unique id of ", NCCL_UNIQUE_ID_BYTES, " bytes"), cat(unique_id.size(), " bytes"),
          "Pass what unique_id() gave on rank 0.");
}

void check_version(const Api& api, const Options& options) {
  const int version = runtime_version(api);
  const bool zero = options.cta_policy == kZeroPolicy;
  const int oldest = zero ? kOldestWithZero : kOldest;
  if (version >= oldest) return;
  throw std::runtime_error(
      cat("communicator '", options.name, "': expected NCCL ", version_text(oldest), " or newer ",
          zero ? "for the zero-CTA policy" : "at run time", ", got ", version_text(version),
          zero ? ". Choose another policy, or install nvidia-nccl-cu13 of 2.28 to 2.30."
               : ". Install nvidia-nccl-cu13 of 2.27 to 2.30, or a torch with it."));
}

}  // namespace fk::nccl
