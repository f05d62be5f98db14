// SPDX-License-Identifier: Apache-2.0
// Memory from NCCL's allocator, registered with communicators so that they read and write it
// without a copy in between.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "nccl/channel.h"
#include "nccl/context.h"

namespace fk::nccl {

// A channel that a collective call left in error; it was aborted.
class ChannelBroken : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Registration { kNone = 0, kLocal = 1, kSymmetric = 2 };

const char* to_string(Registration registration);

// Throws std::invalid_argument unless it is one of none, local, symmetric.
Registration parse_registration(const std::string& name);

// Frees itself, after everything on the device is through. May outlive its communicator. It is
// filled by the communicator's thread, and then only read.
class Buffer {
 public:
  Buffer(std::shared_ptr<Context> context, void* data, size_t nbytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }

  // What the registration came to, which may be less than what was asked for.
  Registration registration() const { return registration_; }

 private:
  friend class Memory;
  struct Handle {
    std::shared_ptr<Channel> channel;
    void* local = nullptr;
    ncclWindow_t window = nullptr;
  };

  void deregister();

  const std::shared_ptr<Context> context_;
  void* const data_;
  const size_t nbytes_;
  Registration registration_ = Registration::kNone;
  std::vector<std::unique_ptr<Handle>> handles_;
};

// The buffers of one communicator.
//
// NOTE: if one rank passes registered memory to a collective, all must. What this falls back to is
// decided on each rank alone; callers agree with limit() on what all of them have.
class Memory {
 public:
  using Channels = std::vector<std::shared_ptr<Channel>>;

  Memory(std::shared_ptr<Context> context, Registration wanted)
      : context_(std::move(context)), wanted_(wanted) {}

  // From now on nothing more than this. Any thread.
  void limit(Registration most);

  // Null where NCCL gives no memory. A symmetric window is collective, and only `collective`
  // buffers get one, with the first channel: every other buffer is registered by its rank alone,
  // with all channels. Throws ChannelBroken.
  std::shared_ptr<Buffer> allocate(size_t nbytes, bool collective, const Channels& channels);

  // Registers the buffers that are there with a channel that is new.
  void attach(const std::shared_ptr<Channel>& channel);

  // Keeps the first text of a kind: the next buffer's would differ in its size only.
  void report(const std::string& kind, const std::string& text);
  std::vector<std::string> take_messages();

 private:
  Registration wanted() const;
  bool add_window(Buffer& buffer, const std::shared_ptr<Channel>& channel);
  bool add_local(Buffer& buffer, const std::shared_ptr<Channel>& channel);

  const std::shared_ptr<Context> context_;
  std::vector<std::weak_ptr<Buffer>> buffers_;  // only the communicator's thread
  mutable std::mutex mutex_;                    // never held across a call of CUDA or NCCL
  Registration wanted_;
  std::set<std::string> reported_;
  std::vector<std::string> messages_;
};

}  // namespace fk::nccl
