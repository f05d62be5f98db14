// SPDX-License-Identifier: Apache-2.0
// What a communicator shares with the tickets and the buffers that may outlive it.
#pragma once

#include <sys/types.h>

#include <string>

#include "nccl/api.h"
#include "nccl/errors.h"

namespace fk::nccl {

struct Context {
  Context(const Api& table, int which_device, int which_rank, int ranks, std::string label);

  // A forked child has neither the watchdog's thread nor a usable CUDA context, and its copies of
  // the mutexes may be locked for ever: it must touch nothing, and free nothing.
  bool forked() const;
  void require_owner(const std::string& where) const;  // throws std::runtime_error if forked

  // The text of a collective that failed on this rank; by NCCL's word or the clock, and by CUDA's.
  std::string failed(const std::string& label, const std::string& operation,
                     const std::string& what) const;
  std::string failed(const std::string& label, const std::string& operation,
                     cudaError_t error) const;

  const Api& api;
  const int device, rank, world;
  const std::string name;
  const pid_t owner;
  Failure failure;
};

// Makes the device current, and afterwards the one that was current before.
// NOTE: restoring a device on which this process has no context makes one there, several hundred
// MB. Callers make their rank's device the current one, so that nothing is switched.
class DeviceGuard {
 public:
  DeviceGuard(const Context& context, const std::string& where);  // throws std::runtime_error
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  const Api& api_;
  int previous_ = -1;  // -1: nothing to restore
};

// Lets this thread ask CUDA what a capture in another thread forbids by default, where the question
// would also end the capture.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Api& api) : api_(api) { exchange(); }
  ~RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void exchange() { api_.cudaThreadExchangeStreamCaptureMode(&mode_); }

  const Api& api_;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace fk::nccl
