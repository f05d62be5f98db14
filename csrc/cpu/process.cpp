// SPDX-License-Identifier: Apache-2.0
#include "cpu/process.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>
#include <utility>

namespace fk::shm {
namespace {

struct Stat {
  char state = 'X';    // dead, also where there is no such process
  uint64_t start = 0;  // field 22 of /proc/<pid>/stat
};

Stat read_stat(int32_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  // The name before the last bracket may hold anything, brackets and blanks too.
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream fields(line.substr(name_end + 1));
  Stat stat;
  fields >> stat.state;
  std::string skipped;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  fields >> stat.start;
  return stat;
}

bool lives(ProcessId process) {
  const Stat stat = read_stat(process.pid);
  return stat.start == process.start && stat.state != 'X' && stat.state != 'Z';
}

int open_descriptor([[maybe_unused]] int32_t pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#else
  return -1;
#endif
}

}  // namespace

ProcessId this_process() {
  const auto pid = static_cast<int32_t>(getpid());
  return {pid, read_stat(pid).start};
}

ProcessWatch::ProcessWatch(ProcessId process)
    : process_(process), descriptor_(open_descriptor(process.pid)) {
  // NOTE: only once the descriptor is bound does the start time prove whose it is.
  if (descriptor_ >= 0 && !lives(process)) {
    close(descriptor_);
    descriptor_ = -1;  // and has_ended() reads /proc, where another start time says so
  }
}

ProcessWatch::~ProcessWatch() {
  if (descriptor_ >= 0) close(descriptor_);
}

ProcessWatch::ProcessWatch(ProcessWatch&& other) noexcept
    : process_(other.process_), descriptor_(std::exchange(other.descriptor_, -1)) {}

bool ProcessWatch::has_ended() const {
  if (descriptor_ < 0) return !lives(process_);
  pollfd query{descriptor_, POLLIN, 0};
  return poll(&query, 1, 0) > 0;
}

}  // namespace fk::shm
