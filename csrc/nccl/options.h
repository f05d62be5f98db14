// SPDX-License-Identifier: Apache-2.0
// What a communicator is made of.
#pragma once

#include <string>

#include "nccl/api.h"
#include "nccl/memory.h"

namespace fk::nccl {

struct Options {
  int rank = 0, world = 1, device = 0;
  std::string name = "nccl";  // in messages, and in NCCL's own log
  double timeout_s = 600;     // from the issue of a collective to its completion
  double init_timeout_s = 600;
  bool blocking = false;           // no limit then holds for joining, and abort is less safe
  int min_ctas = 0, max_ctas = 0;  // 0: NCCL's default
  int cta_policy = -1;             // of gathers: NCCL_CTA_POLICY_*; -1: NCCL's default
  Registration registration = Registration::kLocal;
};

// Throws std::invalid_argument.
void check_options(const Options& options);
void check_unique_id(const Options& options, const std::string& unique_id);

// Throws std::runtime_error where the library that is loaded is too old for these options.
void check_version(const Api& api, const Options& options);

}  // namespace fk::nccl
