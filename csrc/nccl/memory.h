// SPDX-License-Identifier: Apache-2.0
// Memory from NCCL's allocator, registered with communicators so that they read and write it
// without a copy.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nccl/channel.h"
#include "nccl/context.h"

namespace fk::nccl {

enum class Registration { kNone, kLocal, kSymmetric };

const char* to_string(Registration registration);

// Throws std::invalid_argument unless it is one of none, local, symmetric.
Registration parse_registration(const std::string& name);

class Memory;

// Frees itself, after everything on the device is through. May outlive its communicator.
class Buffer {
 public:
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }

  // What its registration came to, which may be less than what was asked for.
  Registration registration() const;

 private:
  friend class Memory;
  struct Handle {
    Channel* channel = nullptr;
    void* local = nullptr;
    ncclWindow_t window = nullptr;
  };

  Buffer(std::shared_ptr<Memory> memory, void* data, size_t nbytes, Registration wanted)
      : memory_(std::move(memory)), data_(data), nbytes_(nbytes), wanted_(wanted) {}

  const std::shared_ptr<Memory> memory_;
  void* const data_;
  const size_t nbytes_;
  const Registration wanted_;
  std::vector<std::unique_ptr<Handle>> handles_;  // guarded by the memory's mutex
};

}  // namespace fk::nccl
