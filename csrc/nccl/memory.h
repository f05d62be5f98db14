// SPDX-License-Identifier: Apache-2.0
// Memory from NCCL's allocator, registered with communicators so that they read and write it
// without a copy in between.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "nccl/channel.h"
#include "nccl/context.h"

namespace fk::nccl {

// The ranks' memory is not alike any more, or a collective call left a channel in error: there is
// no going on.
class MemoryBroken : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// NCCL gave memory before, and now there is none left. Nothing else has changed.
class OutOfMemory : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Registration { kNone = 0, kLocal = 1, kSymmetric = 2 };

const char* to_string(Registration registration);

// Throws std::invalid_argument unless it is one of none, local, symmetric.
Registration parse_registration(const std::string& name);

// What a buffer leaves behind.
struct Remains {
  // NCCL's word for a registration with a channel.
  struct Handle {
    std::shared_ptr<Channel> channel;
    void* local = nullptr;
    ncclWindow_t window = nullptr;
  };

  void* data;
  std::vector<std::unique_ptr<Handle>> handles;  // on the heap: NCCL may write one for long
};

// Where buffers go, by whatever thread drops them last, garbage collectors included: that thread
// must neither wait for the device, nor call NCCL beside a launch, nor either of them while a graph
// is captured. The communicator frees them at its next call.
class Graveyard {
 public:
  explicit Graveyard(std::shared_ptr<Context> context) : context_(std::move(context)) {}
  ~Graveyard() { close(); }

  void bury(Remains remains);

  // Waits for all that is on the device, then frees what was dropped before. For the communicator's
  // thread; on it nothing of NCCL's is in the background.
  void clear();

  // Clears; what comes later is freed as it comes.
  void close();

 private:
  void free(std::vector<Remains> all);

  const std::shared_ptr<Context> context_;
  std::mutex mutex_;  // never held across a call of CUDA or NCCL
  std::vector<Remains> buried_;
  std::atomic<bool> any_{false};
  bool closed_ = false;
};

// May outlive its communicator. It is filled by the communicator's thread, and then only read.
class Buffer {
 public:
  Buffer(std::shared_ptr<Graveyard> graveyard, void* data, size_t nbytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return remains_.data; }
  size_t nbytes() const { return nbytes_; }

  // What the registration came to, which may be less than what was asked for.
  Registration registration() const { return registration_; }

 private:
  friend class Memory;

  const std::shared_ptr<Graveyard> graveyard_;
  Remains remains_;
  const size_t nbytes_;
  Registration registration_ = Registration::kNone;
};

// The buffers of one communicator.
//
// NOTE: if one rank passes registered memory to a collective, all must. So what has not worked yet
// falls back, and callers agree with limit() on what all ranks have; what has worked once is an
// error when it fails.
class Memory {
 public:
  using Channels = std::vector<std::shared_ptr<Channel>>;

  Memory(std::shared_ptr<Context> context, Registration wanted)
      : context_(std::move(context)),
        graveyard_(std::make_shared<Graveyard>(context_)),
        wanted_(wanted) {}

  // From now on nothing more than this. Any thread.
  void limit(Registration most);

  // Null where NCCL gives no memory. A symmetric window is collective, and only `collective`
  // buffers get one, with the first channel: every other buffer is registered by its rank alone,
  // with all channels. Throws OutOfMemory, MemoryBroken, or std::runtime_error of this buffer only.
  std::shared_ptr<Buffer> allocate(size_t nbytes, bool collective, const Channels& channels);

  // Registers the buffers that are there with a channel that is new. Throws MemoryBroken.
  void attach(const std::shared_ptr<Channel>& channel);

  const std::shared_ptr<Graveyard>& graveyard() const { return graveyard_; }

  // Keeps the first text of a kind: the next buffer's would differ in its size only.
  void report(const std::string& kind, const std::string& text);
  std::vector<std::string> take_messages();

 private:
  Registration wanted() const;
  std::shared_ptr<Buffer> take(size_t nbytes);
  Registration enroll(Buffer& buffer, bool collective, const Channels& channels);
  bool add_window(Buffer& buffer, const std::shared_ptr<Channel>& channel);
  std::optional<std::string> add_local(Buffer& buffer, const std::shared_ptr<Channel>& channel);
  std::string expected(const std::string& what) const;

  const std::shared_ptr<Context> context_;
  const std::shared_ptr<Graveyard> graveyard_;
  bool gives_ = false;                          // some memory, some time
  Registration proven_ = Registration::kNone;   // the most that a buffer got
  std::vector<std::weak_ptr<Buffer>> buffers_;  // only the communicator's thread
  mutable std::mutex mutex_;                    // never held across a call of CUDA or NCCL
  Registration wanted_;
  std::set<std::string> reported_;
  std::vector<std::string> messages_;
};

}  // namespace fk::nccl
