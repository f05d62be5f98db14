// SPDX-License-Identifier: Apache-2.0
#include "cpu/segment.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <system_error>

namespace fk::shm {
namespace {

constexpr mode_t kOnlyThisUser = 0600;

[[noreturn]] void fail(const std::string& where, const std::string& expected, int error) {
  throw std::runtime_error("shared memory " + where + ": expected " + expected + ", got '" +
                           std::strerror(error) + "'. Use comm='process_group'.");
}

std::string mebibytes(double bytes) {
  const auto tenths = static_cast<long long>(bytes / (1 << 20) * 10 + 0.5);
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " MiB";
}

std::string directory_of(const std::string& path) { return path.substr(0, path.rfind('/')); }

[[noreturn]] void fail_for_space(const std::string& directory, size_t nbytes, int error) {
  struct statvfs system{};
  const bool known = statvfs(directory.c_str(), &system) == 0 && system.f_blocks != 0;
  const double unit = static_cast<double>(system.f_frsize);
  std::string there = std::strerror(error);
  if (known && error == ENOSPC) {
    there = mebibytes(unit * static_cast<double>(system.f_bavail)) + " of " +
            mebibytes(unit * static_cast<double>(system.f_blocks));
  }
  throw NoSpace("shared memory: expected " + mebibytes(static_cast<double>(nbytes)) + " free in " +
                directory + ", got " + there +
                ". Make it larger (docker run --shm-size), or use "
                "comm='process_group'.");
}

}  // namespace

void check_space(const std::string& directory, size_t nbytes) {
  struct statvfs system{};
  if (statvfs(directory.c_str(), &system) != 0) fail(directory, "a file system", errno);
  // A file system without a limit of its own reports no blocks at all.
  const bool limited = system.f_blocks != 0;
  if (limited && nbytes / system.f_frsize >= system.f_bavail) {
    fail_for_space(directory, nbytes, ENOSPC);
  }
}

namespace {

void reserve(int file, const std::string& directory, size_t nbytes) {
  // Not ftruncate: a page that the system cannot give would then kill whoever touches it.
  while (fallocate(file, 0, 0, static_cast<off_t>(nbytes)) != 0) {
    if (errno == EINTR) continue;
    if (errno == ENOSPC || errno == ENOMEM || errno == EFBIG) {
      fail_for_space(directory, nbytes, errno);
    }
    fail(directory, "to reserve memory for a segment", errno);
  }
}

size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

// -- Mapping --------------------------------------------------------------------------------------

Mapping::Mapping(int file, size_t offset, size_t nbytes, int flags) {
  before_ = offset % page_bytes();
  nbytes_ = nbytes + before_;
  void* begin = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, flags, file,
                     static_cast<off_t>(offset - before_));
  if (begin == MAP_FAILED) fail("mapping", "address space for " + std::to_string(nbytes_), errno);
  begin_ = static_cast<std::byte*>(begin);
}

Mapping::~Mapping() { munmap(begin_, nbytes_); }

void Mapping::revert() { madvise(begin_, nbytes_, MADV_DONTNEED); }

bool Mapping::is_written() const {
  // Of each page 64 bits: 63 and 62 say that it is in memory or in swap, 61 that it is the file's.
  constexpr uint64_t kThere = uint64_t{3} << 62, kOfFile = uint64_t{1} << 61;
  // Not kept open: in a forked child it would go on to show the parent.
  const int file = ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (file < 0) return true;
  std::array<uint64_t, 512> pages;
  const size_t first = reinterpret_cast<uintptr_t>(begin_) / page_bytes();
  const size_t count = (nbytes_ + page_bytes() - 1) / page_bytes();
  bool written = false;
  for (size_t done = 0; done < count && !written;) {
    const size_t wanted = std::min(count - done, pages.size()) * sizeof(uint64_t);
    const auto offset = static_cast<off_t>((first + done) * sizeof(uint64_t));
    const ssize_t read = pread(file, pages.data(), wanted, offset);
    if (read < 0 && errno == EINTR) continue;
    const size_t found = read < 0 ? 0 : static_cast<size_t>(read) / sizeof(uint64_t);
    written = found == 0 || std::any_of(pages.begin(), pages.begin() + found, [](uint64_t page) {
                return (page & kThere) != 0 && (page & kOfFile) == 0;
              });
    done += found;
  }
  close(file);
  return written;
}

// -- Segment --------------------------------------------------------------------------------------

// Populated: a page fault in the first step would cost more than it does here.
Segment::Segment(int file, size_t nbytes) : file_(file) {
  try {
    mapping_ = std::make_unique<Mapping>(file, 0, nbytes, MAP_SHARED | MAP_POPULATE);
  } catch (...) {
    close(file);
    throw;
  }
}

Segment::~Segment() { close(file_); }

std::shared_ptr<Segment> Segment::create(const std::string& path, size_t nbytes) {
  const std::string directory = directory_of(path);
  check_space(directory, nbytes);
  const int file = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, kOnlyThisUser);
  if (file < 0) fail(directory, "to make a file", errno);
  std::shared_ptr<Segment> segment;
  try {
    // Exactly, whatever the umask is.
    if (fchmod(file, kOnlyThisUser) != 0) fail(path, "mode 0600", errno);
    reserve(file, directory, nbytes);
    if (flock(file, LOCK_EX | LOCK_NB) != 0) fail(path, "to lock a new file", errno);
  } catch (...) {
    close(file);
    throw;
  }
  segment.reset(new Segment(file, nbytes));
  const std::string nameless = "/proc/self/fd/" + std::to_string(file);
  if (linkat(AT_FDCWD, nameless.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) != 0) {
    fail(path, "a name that is not taken", errno);
  }
  return segment;
}

std::shared_ptr<Segment> Segment::open(const std::string& path, size_t nbytes) {
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (file < 0) fail(path, "the segment that rank 0 made", errno);
  struct stat found{};
  const bool read = fstat(file, &found) == 0;
  if (!read || !S_ISREG(found.st_mode) || found.st_uid != geteuid() ||
      (found.st_mode & 07777) != kOnlyThisUser || found.st_size != static_cast<off_t>(nbytes)) {
    close(file);
    throw std::runtime_error("shared memory " + path + ": expected a file of mode 0600 with " +
                             std::to_string(nbytes) + " bytes of this user, got one of " +
                             std::to_string(found.st_size) + " bytes. Use comm='process_group'.");
  }
  return std::shared_ptr<Segment>(new Segment(file, nbytes));
}

std::shared_ptr<Mapping> Segment::private_view(size_t offset, size_t nbytes) const {
  if (offset > this->nbytes() || nbytes > this->nbytes() - offset || nbytes == 0) {
    throw std::invalid_argument(
        "private_view: expected bytes inside [0, " + std::to_string(this->nbytes()) + "), got " +
        std::to_string(nbytes) + " from " + std::to_string(offset) + ". Pass a part of one area.");
  }
  return std::make_shared<Mapping>(file_, offset, nbytes, MAP_PRIVATE);
}

void unlink(const std::string& path) { ::unlink(path.c_str()); }

int sweep(const std::string& directory, const std::string& prefix) {
  int removed = 0;
  std::error_code ignored;  // files may vanish meanwhile, and need not be ours
  for (const auto& entry : std::filesystem::directory_iterator(directory, ignored)) {
    if (!entry.path().filename().string().starts_with(prefix)) continue;
    const int file = ::open(entry.path().c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (file < 0) continue;
    struct stat found{};
    const bool ours = fstat(file, &found) == 0 && S_ISREG(found.st_mode) &&
                      found.st_uid == geteuid() && found.st_nlink == 1;
    // The creator holds the lock from before the file has a name until it dies or closes it.
    if (ours && flock(file, LOCK_EX | LOCK_NB) == 0 && ::unlink(entry.path().c_str()) == 0) {
      ++removed;
    }
    close(file);
  }
  return removed;
}

}  // namespace fk::shm
