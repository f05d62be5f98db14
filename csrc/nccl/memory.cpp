// SPDX-License-Identifier: Apache-2.0
#include "nccl/memory.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace fk::nccl {

const char* to_string(Registration registration) {
  switch (registration) {
    case Registration::kNone:
      return "none";
    case Registration::kLocal:
      return "local";
    case Registration::kSymmetric:
      return "symmetric";
  }
  return "none";
}

Registration parse_registration(const std::string& name) {
  for (const auto one : {Registration::kNone, Registration::kLocal, Registration::kSymmetric}) {
    if (name == to_string(one)) return one;
  }
  throw std::invalid_argument(
      cat("registration: expected none, local or symmetric, got '", name, "'. Pass one of them."));
}

Buffer::Buffer(std::shared_ptr<Context> context, void* data, size_t nbytes)
    : context_(std::move(context)), data_(data), nbytes_(nbytes) {}

Buffer::~Buffer() {
  if (context_->forked()) return;
  const Api& api = context_->api;
  int previous = -1;
  const bool switched = api.cudaGetDevice(&previous) == cudaSuccess && previous != context_->device;
  if (switched) api.cudaSetDevice(context_->device);
  // Kernels of any stream may still use it, and NCCL's free does not wait for them.
  api.cudaDeviceSynchronize();
  deregister();
  api.ncclMemFree(data_);
  if (switched) api.cudaSetDevice(previous);
}

void Buffer::deregister() {
  for (const auto& handle : handles_) {
    if (handle->window != nullptr) handle->channel->remove_window(handle->window);
    if (handle->local != nullptr) handle->channel->remove(handle->local);
  }
  handles_.clear();
}

void Memory::limit(Registration most) {
  const std::lock_guard lock(mutex_);
  wanted_ = std::min(wanted_, most);
}

Registration Memory::wanted() const {
  const std::lock_guard lock(mutex_);
  return wanted_;
}

std::shared_ptr<Buffer> Memory::allocate(size_t nbytes, bool collective, const Channels& channels) {
  const Api& api = context_->api;
  void* data = nullptr;
  const ncclResult_t result = api.ncclMemAlloc(&data, nbytes);
  if (result != ncclSuccess || data == nullptr) {
    const std::string got = result == ncclSuccess ? "null" : describe(api, result, nullptr);
    report("ncclMemAlloc",
           cat("communicator '", context_->name, "': expected ncclMemAlloc to give ", nbytes,
               " bytes on device ", context_->device, ", got ", got,
               ". Such buffers come from torch's allocator instead, unregistered."));
    return nullptr;
  }
  const auto buffer = std::make_shared<Buffer>(context_, data, nbytes);
  const Registration most = wanted();
  if (most == Registration::kSymmetric && collective && add_window(*buffer, channels.front())) {
    buffer->registration_ = Registration::kSymmetric;
  } else if (most != Registration::kNone) {
    const auto add = [&](const auto& channel) { return add_local(*buffer, channel); };
    if (std::ranges::all_of(channels, add)) {
      buffer->registration_ = Registration::kLocal;
    } else {
      buffer->deregister();
    }
  }
  std::erase_if(buffers_, [](const auto& old) { return old.expired(); });
  buffers_.push_back(buffer);
  return buffer;
}

void Memory::attach(const std::shared_ptr<Channel>& channel) {
  for (const auto& weak : buffers_) {
    const std::shared_ptr<Buffer> buffer = weak.lock();
    if (buffer == nullptr || buffer->registration_ != Registration::kLocal) continue;
    add_local(*buffer, channel);
  }
}

bool Memory::add_window(Buffer& buffer, const std::shared_ptr<Channel>& channel) {
  // On the heap: NCCL may write it from another thread, until it is through or aborted.
  Buffer::Handle& handle =
      *buffer.handles_.emplace_back(std::make_unique<Buffer::Handle>(Buffer::Handle{channel}));
  if (const auto problem = channel->add_window(buffer.data_, buffer.nbytes_, &handle.window)) {
    channel->abort();
    handle.window = nullptr;
    throw ChannelBroken(cat(*problem, " (for ", buffer.nbytes_, " bytes)"));
  }
  if (handle.window != nullptr) return true;
  limit(Registration::kLocal);
  report("window", cat("communicator '", context_->name,
                       "': expected a symmetric window, got none: not all ranks reach each "
                       "other's memory (or NCCL_WIN_ENABLE=0). Buffers are registered by each rank "
                       "alone."));
  return false;
}

bool Memory::add_local(Buffer& buffer, const std::shared_ptr<Channel>& channel) {
  auto handle = std::make_unique<Buffer::Handle>(Buffer::Handle{channel});
  const auto problem = channel->add(buffer.data_, buffer.nbytes_, &handle->local);
  const bool added = !problem && handle->local != nullptr;
  if (added) {
    buffer.handles_.push_back(std::move(handle));
    return true;
  }
  limit(Registration::kNone);
  report("register", cat("communicator '", context_->name, "': expected ncclCommRegister to take ",
                         buffer.nbytes_, " bytes, got ", problem.value_or("no handle"),
                         ". Buffers are not registered; collectives copy through NCCL's own."));
  return false;
}

void Memory::report(const std::string& kind, const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (reported_.insert(kind).second) messages_.push_back(text);
}

std::vector<std::string> Memory::take_messages() {
  const std::lock_guard lock(mutex_);
  return std::exchange(messages_, {});
}

}  // namespace fk::nccl
