// SPDX-License-Identifier: Apache-2.0
#include "sim/meeting.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <random>
#include <stdexcept>

namespace fk::sim {
namespace {

constexpr size_t kHeaderBytes = 8192;

size_t file_bytes(int world) { return kHeaderBytes + static_cast<size_t>(world) * kAreaBytes; }

[[noreturn]] void fail(const std::string& name, const char* call) {
  throw std::runtime_error("meeting " + name + ": " + call + ": " + std::strerror(errno));
}

}  // namespace

std::string Meeting::fresh_name() {
  static std::atomic<uint64_t> counter{0};
  std::random_device device;
  return "/fk-sim-" + std::to_string(getpid()) + "-" + std::to_string(counter++) + "-" +
         std::to_string(device());
}

Meeting::Meeting(const std::string& name, int world, int rank)
    : name_(name), world_(world), rank_(rank), owner_(getpid()) {
  static_assert(sizeof(File) <= kHeaderBytes);
  static_assert(std::atomic<uint64_t>::is_always_lock_free);
  const int handle = shm_open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (handle < 0) fail(name, "shm_open");
  // Every rank sets the same size and a fresh file is zero, so that whoever comes first is ready.
  const bool sized = ftruncate(handle, static_cast<off_t>(file_bytes(world))) == 0;
  void* memory =
      sized ? mmap(nullptr, file_bytes(world), PROT_READ | PROT_WRITE, MAP_SHARED, handle, 0)
            : MAP_FAILED;
  const int error = errno;
  close(handle);
  errno = error;
  if (memory == MAP_FAILED) fail(name, "mmap");
  file_ = static_cast<File*>(memory);
  areas_ = static_cast<char*>(memory) + kHeaderBytes;
  int64_t nobody = 0;
  if (!mine().pid.compare_exchange_strong(nobody, owner_)) {
    munmap(memory, file_bytes(world));
    throw std::runtime_error("meeting " + name + ": rank " + std::to_string(rank) + " came twice");
  }
  ring();
  all_here();
}

Meeting::~Meeting() {
  if (getpid() == owner_) unlink();
  munmap(file_, file_bytes(world_));
}

bool Meeting::all_here() {
  for (int r = 0; r < world_; ++r)
    if (slot(r).pid.load() == 0) return false;
  unlink();  // nobody else will look for it
  return true;
}

void Meeting::unlink() {
  if (!unlinked_.exchange(true)) shm_unlink(name_.c_str());
}

void Meeting::ring() {
  file_->bell.fetch_add(1);
  syscall(SYS_futex, &file_->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Meeting::wait(uint32_t seen, std::chrono::milliseconds limit) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  timespec span{};
  span.tv_sec = seconds.count();
  span.tv_nsec = std::chrono::nanoseconds(limit - seconds).count();
  syscall(SYS_futex, &file_->bell, FUTEX_WAIT, seen, &span, nullptr, 0);
}

}  // namespace fk::sim
