// SPDX-License-Identifier: Apache-2.0
// Other processes of this host: who they are, and whether they still live.
#pragma once

#include <cstdint>

namespace fk::shm {

// Numbers of processes are reused; together with the start time they are not.
struct ProcessId {
  int32_t pid = 0;
  uint64_t start = 0;  // clock ticks after boot

  bool operator==(const ProcessId&) const = default;
};

ProcessId this_process();

// Tells whether a process has ended, also while its parent has not asked for its exit status.
//
// Holds a process descriptor, which stays bound to the one process; where the kernel has none
// (before 5.3, or forbidden in a sandbox), /proc is read each time.
class ProcessWatch {
 public:
  explicit ProcessWatch(ProcessId process);
  ~ProcessWatch();
  ProcessWatch(ProcessWatch&& other) noexcept;
  ProcessWatch& operator=(ProcessWatch&&) = delete;

  bool has_ended() const;

 private:
  ProcessId process_;
  int descriptor_ = -1;
};

}  // namespace fk::shm
