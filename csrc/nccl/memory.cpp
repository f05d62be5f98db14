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

Buffer::Buffer(std::shared_ptr<Graveyard> graveyard, void* data, size_t nbytes)
    : graveyard_(std::move(graveyard)), remains_{data, {}}, nbytes_(nbytes) {}

Buffer::~Buffer() { graveyard_->bury(std::move(remains_)); }

void Graveyard::bury(Remains remains) {
  if (context_->forked()) return;
  std::vector<Remains> late;
  {
    const std::lock_guard lock(mutex_);
    (closed_ ? late : buried_).push_back(std::move(remains));
    any_ = !buried_.empty();
  }
  free(std::move(late));
}

void Graveyard::clear() {
  if (!any_ || context_->forked()) return;
  std::vector<Remains> all;
  {
    const std::lock_guard lock(mutex_);
    all.swap(buried_);
    any_ = false;
  }
  free(std::move(all));
}

void Graveyard::close() {
  if (context_->forked()) return;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  clear();
}

void Graveyard::free(std::vector<Remains> all) {
  if (all.empty()) return;
  const Api& api = context_->api;
  int previous = -1;
  const bool switched = api.cudaGetDevice(&previous) == cudaSuccess && previous != context_->device;
  if (switched) api.cudaSetDevice(context_->device);
  // Kernels of any stream may still use them, and NCCL's free does not wait for those.
  api.cudaDeviceSynchronize();
  for (const Remains& one : all) {
    for (const auto& handle : one.handles) {
      if (handle->window != nullptr) handle->channel->remove_window(handle->window);
      if (handle->local != nullptr) handle->channel->remove(handle->local);
    }
    api.ncclMemFree(one.data);
  }
  if (switched) api.cudaSetDevice(previous);
}

void Memory::limit(Registration most) {
  const std::lock_guard lock(mutex_);
  wanted_ = std::min(wanted_, most);
}

Registration Memory::wanted() const {
  const std::lock_guard lock(mutex_);
  return wanted_;
}

std::string Memory::expected(const std::string& what) const {
  return cat("communicator '", context_->name, "': expected ", what);
}

std::shared_ptr<Buffer> Memory::allocate(size_t nbytes, bool collective, const Channels& channels) {
  graveyard_->clear();
  const std::shared_ptr<Buffer> buffer = take(nbytes);
  if (buffer == nullptr) return nullptr;
  buffer->registration_ = enroll(*buffer, collective, channels);
  proven_ = std::max(proven_, buffer->registration_);
  std::erase_if(buffers_, [](const auto& old) { return old.expired(); });
  buffers_.push_back(buffer);
  return buffer;
}

std::shared_ptr<Buffer> Memory::take(size_t nbytes) {
  const Api& api = context_->api;
  void* data = nullptr;
  const ncclResult_t result = api.ncclMemAlloc(&data, nbytes);
  if (result == ncclSuccess && data != nullptr) {
    gives_ = true;
    return std::make_shared<Buffer>(graveyard_, data, nbytes);
  }
  const std::string text =
      expected(cat("ncclMemAlloc to give ", nbytes, " bytes on device ", context_->device, ", got ",
                   result == ncclSuccess ? "null" : describe(api, result, nullptr), ". "));
  if (gives_) {
    throw OutOfMemory(text +
                      "Free device memory: torch.cuda.empty_cache() gives back what torch keeps "
                      "without using it.");
  }
  report("ncclMemAlloc", text + "Such buffers come from torch's allocator instead, unregistered.");
  return nullptr;
}

Registration Memory::enroll(Buffer& buffer, bool collective, const Channels& channels) {
  const Registration most = wanted();
  if (most == Registration::kSymmetric && collective && add_window(buffer, channels.front())) {
    return Registration::kSymmetric;
  }
  if (most == Registration::kNone) return Registration::kNone;
  for (const auto& channel : channels) {
    const std::optional<std::string> problem = add_local(buffer, channel);
    if (!problem) continue;
    const std::string text =
        expected(cat("ncclCommRegister to take ", buffer.nbytes_, " bytes, got ", *problem, ". "));
    if (proven_ >= Registration::kLocal) {
      throw std::runtime_error(
          text +
          "Other buffers are registered, on all ranks: free memory, or choose no "
          "registration (none) for all.");
    }
    limit(Registration::kNone);
    report("register", text + "Buffers are not registered; collectives copy through NCCL's own.");
    // It stays unregistered with those that took it, too; nothing has used it yet.
    for (const auto& handle : std::exchange(buffer.remains_.handles, {})) {
      handle->channel->remove(handle->local);
    }
    return Registration::kNone;
  }
  return Registration::kLocal;
}

void Memory::attach(const std::shared_ptr<Channel>& channel) {
  for (const auto& weak : buffers_) {
    const std::shared_ptr<Buffer> buffer = weak.lock();
    if (buffer == nullptr || buffer->registration_ != Registration::kLocal) continue;
    if (const auto problem = add_local(*buffer, channel)) {
      throw MemoryBroken(expected(cat(
          "ncclCommRegister to take ", buffer->nbytes_, " bytes for reductions too, got on rank ",
          context_->rank, ": ", *problem,
          ". Other ranks have theirs: restart, with no registration (none) if it fails again.")));
    }
  }
}

bool Memory::add_window(Buffer& buffer, const std::shared_ptr<Channel>& channel) {
  auto& handles = buffer.remains_.handles;
  Remains::Handle& handle =
      *handles.emplace_back(std::make_unique<Remains::Handle>(Remains::Handle{channel}));
  std::optional<std::string> problem =
      channel->add_window(buffer.data(), buffer.nbytes_, &handle.window);
  if (!problem && handle.window != nullptr) return true;
  if (!problem && proven_ == Registration::kSymmetric) problem = "no window";
  if (problem) {
    // The handle stays where it is: NCCL may write to it until the abort is through.
    channel->abort();
    throw MemoryBroken(context_->failed(cat("communicator '", context_->name, "'"),
                                        "ncclCommWindowRegister",
                                        cat(*problem, " (for ", buffer.nbytes_, " bytes)")));
  }
  handles.pop_back();
  limit(Registration::kLocal);
  report("window",
         expected("a symmetric window, got none: not all ranks reach each other's memory (or "
                  "NCCL_WIN_ENABLE=0). Buffers are registered by each rank alone."));
  return false;
}

std::optional<std::string> Memory::add_local(Buffer& buffer,
                                             const std::shared_ptr<Channel>& channel) {
  auto handle = std::make_unique<Remains::Handle>(Remains::Handle{channel});
  if (auto problem = channel->add(buffer.data(), buffer.nbytes_, &handle->local)) return problem;
  if (handle->local == nullptr) return "no handle";
  buffer.remains_.handles.push_back(std::move(handle));
  return std::nullopt;
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
