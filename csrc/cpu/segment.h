// SPDX-License-Identifier: Apache-2.0
// POSIX shared memory that leaves nothing behind.
//
// A segment is a file in /dev/shm that gets its name when it is complete, locked by its creator,
// and loses it as soon as every rank has mapped it. If all of them die in between, the lock dies
// with the creator, and the next program that makes a segment removes the file (`sweep`).
#pragma once

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>

namespace fk::shm {

// There is too little memory for a segment: no fault, a reason to communicate in another way.
struct NoSpace : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Pages of a file in this process's address space.
class Mapping {
 public:
  Mapping(int file, size_t offset, size_t nbytes, int flags);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return begin_ + before_; }
  size_t nbytes() const { return nbytes_ - before_; }

  // Forgets what was written to a private mapping: it shows the file again.
  void revert();

  // Whether anything was written to a private mapping since it was made or reverted. Asks Linux
  // which pages are copies, which costs much less than to revert at random and take every page
  // anew. Without an answer, something was.
  bool is_written() const;

 private:
  std::byte* begin_ = nullptr;
  size_t before_ = 0;  // bytes between the start of the first page and what was asked for
  size_t nbytes_ = 0;
};

class Segment {
 public:
  // Makes a file of `nbytes` zeros that only this user may open, with its memory reserved: a later
  // write cannot fail for lack of it.
  static std::shared_ptr<Segment> create(const std::string& path, size_t nbytes);

  // Opens what another process of this user created.
  static std::shared_ptr<Segment> open(const std::string& path, size_t nbytes);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return mapping_->data(); }
  size_t nbytes() const { return mapping_->nbytes(); }

  // Maps a range once more, copy on write: it costs no memory until it is written, shows what peers
  // write to the pages that it has not written, and what it writes no peer sees.
  std::shared_ptr<Mapping> private_view(size_t offset, size_t nbytes) const;

 private:
  Segment(int file, size_t nbytes);

  int file_;
  std::unique_ptr<Mapping> mapping_;
};

// Throws NoSpace if a directory's file system has less than `nbytes` left.
void check_space(const std::string& directory, size_t nbytes);

// Takes a segment's name away, if it has one. Mappings stay.
void unlink(const std::string& path);

// Removes this user's files of a name's beginning whose creators died; returns how many.
int sweep(const std::string& directory, const std::string& prefix);

}  // namespace fk::shm
