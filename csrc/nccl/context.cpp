// SPDX-License-Identifier: Apache-2.0
#include "nccl/context.h"

#include <unistd.h>

#include <stdexcept>
#include <utility>

namespace fk::nccl {

Context::Context(const Api& table, int which_device, int which_rank, int ranks, std::string label)
    : api(table),
      device(which_device),
      rank(which_rank),
      world(ranks),
      name(std::move(label)),
      owner(getpid()) {}

bool Context::forked() const { return getpid() != owner; }

void Context::require_owner(const std::string& where) const {
  if (!forked()) return;
  throw std::runtime_error(cat(where, ": expected the process that made communicator '", name,
                               "' (", owner, "), got its forked child ", getpid(),
                               ". Make a communicator after the fork."));
}

std::string Context::failed(const std::string& label, const std::string& operation,
                            const std::string& what) const {
  return cat(label, ": expected ", operation, " to complete on all ", world,
             " ranks (nccl), got on rank ", rank, ": ", what,
             ". Another rank died or fell out of step: read the first error of the other ranks. "
             "What was computed since is undefined: restart from the last checkpoint.");
}

std::string Context::failed(const std::string& label, const std::string& operation,
                            cudaError_t error) const {
  return cat(label, ": expected ", operation, " to complete on all ", world,
             " ranks (nccl), got on rank ", rank, ": ", describe(api, error),
             ". Some kernel of this process failed, before or beside it: CUDA_LAUNCH_BLOCKING=1 "
             "finds it. What was computed since is undefined: restart from the last checkpoint.");
}

DeviceGuard::DeviceGuard(const Context& context, const std::string& where) : api_(context.api) {
  constexpr const char* kAdvice =
      "Check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES; without a GPU, use gloo.";
  const auto expected = [&] { return cat("CUDA device ", context.device, " to be usable"); };
  int current = -1;
  if (const cudaError_t error = api_.cudaGetDevice(&current); error != cudaSuccess) {
    check(api_, error, where, expected().c_str(), kAdvice);
  }
  if (current == context.device) return;
  if (const cudaError_t error = api_.cudaSetDevice(context.device); error != cudaSuccess) {
    check(api_, error, where, expected().c_str(), kAdvice);
  }
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) api_.cudaSetDevice(previous_);
}

}  // namespace fk::nccl
