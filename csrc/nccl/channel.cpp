// SPDX-License-Identifier: Apache-2.0
#include "nccl/channel.h"

#include <cstring>
#include <stdexcept>
#include <utility>

#include "nccl/poll.h"

namespace fk::nccl {
namespace {

// For how long abort() lets another thread finish the call that it is in. Only a blocking
// communicator has calls that do not return at once; those end when NCCL's abort flag is up.
constexpr double kAbortPatience = 1.0;

// For how long a communicator that could not be made may take to go.
constexpr double kGoingPatience = 5.0;

}  // namespace

Channel::Channel(std::shared_ptr<Context> context, const ChannelConfig& config, const char* role)
    : context_(std::move(context)), config_(config), name_(cat(context_->name, '/', role)) {
  const Api& api = context_->api;
  const DeviceGuard guard(*context_, where());
  constexpr const char* kAdvice = "Free device memory, and read the first CUDA error.";
  int least = 0, greatest = 0;
  check(api, api.cudaDeviceGetStreamPriorityRange(&least, &greatest), where(),
        "the range of stream priorities", kAdvice);
  // Highest priority: a collective's few blocks get in between those of a large kernel.
  cudaStream_t stream = nullptr;
  check(api, api.cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest), where(),
        "a CUDA stream to be made", kAdvice);
  stream_.store(stream);
}

void Channel::destroy() noexcept {
  if (context_->forked()) return;
  abort();
  const cudaStream_t stream = stream_.exchange(nullptr);
  if (stream != nullptr) context_->api.cudaStreamDestroy(stream);
}

std::string Channel::where() const { return cat("communicator '", name_, "'"); }

ncclConfig_t Channel::nccl_config() const {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = config_.blocking ? 1 : 0;
  config.commName = name_.c_str();
  if (config_.min_ctas > 0) config.minCTAs = config_.min_ctas;
  if (config_.max_ctas > 0) config.maxCTAs = config_.max_ctas;
  if (config_.cta_policy >= 0) config.CTAPolicy = config_.cta_policy;
  return config;
}

template <class Call>
ncclResult_t Channel::locked(const Call& call) {
  const std::lock_guard lock(mutex_);
  const ncclComm_t comm = comm_.load();
  return comm == nullptr ? ncclInProgress : call(comm);
}

void Channel::open(const std::string& unique_id) {
  const DeviceGuard guard(*context_, where());
  const Stopwatch watch;
  ncclUniqueId id;
  std::memcpy(id.internal, unique_id.data(), sizeof(id.internal));
  ncclConfig_t config = nccl_config();
  ncclResult_t result;
  {
    const std::lock_guard lock(mutex_);
    result =
        context_->api.ncclCommInitRankConfig(&made_, context_->world, id, context_->rank, &config);
    comm_.store(made_);
  }
  result = poll(result, config_.init_timeout_s);
  if (result == ncclSuccess) {
    joined_.store(true, std::memory_order_release);
    return;
  }
  const std::string problem = explain(result);
  abort();
  if (const auto late = await_end(kGoingPatience)) print(*late);
  context_->failure.raise_if_set();
  throw std::runtime_error(cat(where(), ": expected all ", context_->world,
                               " ranks to join within ", seconds(config_.init_timeout_s),
                               ", got on rank ", context_->rank, " after ",
                               seconds(watch.seconds()), ": ", problem,
                               ". Check that all ranks run, that each has its own GPU, and that "
                               "they reach each other (NCCL_SOCKET_IFNAME names the interface); "
                               "read the first error of the other ranks."));
}

ncclResult_t Channel::enqueue(const std::vector<const Operation*>& operations) {
  const Api& api = context_->api;
  return locked([&](ncclComm_t comm) {
    if (operations.size() == 1) return operations.front()->enqueue(api, comm, stream());
    ncclResult_t result = api.ncclGroupStart();
    if (result != ncclSuccess) return result;
    for (const Operation* operation : operations) {
      result = operation->enqueue(api, comm, stream());
      if (result != ncclSuccess && result != ncclInProgress) break;
    }
    // Also after an error: the group is the thread's, and would swallow whatever comes next.
    const ncclResult_t end = api.ncclGroupEnd();
    return result != ncclSuccess && result != ncclInProgress ? result : end;
  });
}

std::optional<std::string> Channel::launch(const std::vector<const Operation*>& operations) {
  // NOTE: nothing may be put on the stream before a launch in the background is through.
  return settle(enqueue(operations), config_.timeout_s);
}

ncclResult_t Channel::state_of(ncclComm_t comm) {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t result = context_->api.ncclCommGetAsyncError(comm, &state);
  return result == ncclSuccess ? state : result;
}

ncclResult_t Channel::poll(ncclResult_t result, double limit_s) {
  const Stopwatch watch;
  for (Backoff backoff; result == ncclInProgress; backoff.pause()) {
    result = locked([&](ncclComm_t comm) { return state_of(comm); });
    if (context_->failure.is_set() || !is_alive() || watch.seconds() > limit_s) break;
  }
  return result;
}

std::string Channel::explain(ncclResult_t result) {
  if (result == ncclInProgress) return is_alive() ? "still in progress" : "aborted meanwhile";
  const std::lock_guard lock(mutex_);
  return describe(context_->api, result, comm_.load());
}

std::optional<std::string> Channel::settle(ncclResult_t result, double limit_s) {
  const Stopwatch watch;
  result = poll(result, limit_s);
  if (result == ncclSuccess) return std::nullopt;
  const std::string problem = explain(result);
  if (result != ncclInProgress) return problem;
  return cat(problem, " after ", seconds(watch.seconds()), " (time limit ", seconds(limit_s), ')');
}

std::optional<std::string> Channel::async_error() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  const ncclComm_t comm = lock.owns_lock() ? comm_.load() : nullptr;
  if (comm == nullptr) return std::nullopt;
  const ncclResult_t state = state_of(comm);
  if (state == ncclSuccess || state == ncclInProgress) return std::nullopt;
  return describe(context_->api, state, comm);
}

std::optional<std::string> Channel::add(void* data, size_t nbytes, void** handle) {
  const ncclResult_t result = locked(
      [&](ncclComm_t comm) { return context_->api.ncclCommRegister(comm, data, nbytes, handle); });
  return settle(result, config_.timeout_s);
}

void Channel::remove(void* handle) noexcept {
  locked([&](ncclComm_t comm) { return context_->api.ncclCommDeregister(comm, handle); });
}

std::optional<std::string> Channel::add_window(void* data, size_t nbytes, ncclWindow_t* window) {
  const ncclResult_t result = locked([&](ncclComm_t comm) {
    return context_->api.ncclCommWindowRegister(comm, data, nbytes, window,
                                                NCCL_WIN_COLL_SYMMETRIC);
  });
  return settle(result, config_.timeout_s);
}

void Channel::remove_window(ncclWindow_t window) noexcept {
  locked([&](ncclComm_t comm) { return context_->api.ncclCommWindowDeregister(comm, window); });
}

void Channel::abort() noexcept {
  std::unique_lock lock(mutex_, std::try_to_lock);
  const Stopwatch watch;
  for (Backoff backoff; !lock.owns_lock() && watch.seconds() < kAbortPatience; backoff.pause()) {
    (void)lock.try_lock();
  }
  joined_.store(false, std::memory_order_release);
  const ncclComm_t comm = comm_.exchange(nullptr);
  if (lock.owns_lock()) lock.unlock();  // nobody else has it now, and nobody is kept waiting
  if (comm != nullptr) end(context_->api.ncclCommAbort, comm);
}

void Channel::end(ncclResult_t (*call)(ncclComm_t), ncclComm_t comm) noexcept {
  // Itself too: NCCL may write to made_ until it is through. (Null where nobody owns it any more.)
  const auto run = [self = weak_from_this().lock(), context = context_, call, comm] {
    context->api.cudaSetDevice(context->device);  // a thread's own: nothing to restore
    const RelaxedCapture relaxed(context->api);
    call(comm);
  };
  const std::lock_guard lock(end_mutex_);
  end_ = Task(run);
}

std::optional<std::string> Channel::await_end(double limit_s) const {
  Task task;
  {
    const std::lock_guard lock(end_mutex_);
    task = end_;
  }
  if (task.wait(limit_s)) return std::nullopt;
  return cat(where(), ": expected NCCL to let go of it within ", seconds(limit_s),
             ", got no answer on rank ", context_->rank,
             ". A kernel or another communicator holds its stream: abort that one too. A thread is "
             "left behind, which waits for it.");
}

ncclResult_t Channel::begin_finalize(double limit_s) noexcept {
  if (!config_.blocking) {
    return locked([&](ncclComm_t comm) { return context_->api.ncclCommFinalize(comm); });
  }
  // It returns when all ranks have called it, or when it is aborted: not on this thread.
  const auto result = std::make_shared<std::atomic<ncclResult_t>>(ncclInProgress);
  const Task task([self = shared_from_this(), result] {
    *result =
        self->locked([&](ncclComm_t comm) { return self->context_->api.ncclCommFinalize(comm); });
  });
  const Stopwatch watch;
  for (Backoff backoff; *result == ncclInProgress; backoff.pause()) {
    if (context_->failure.is_set() || watch.seconds() > limit_s) break;
  }
  if (*result != ncclInProgress) return *result;
  abort();
  task.wait(kAbortPatience);
  return ncclInProgress;
}

std::optional<std::string> Channel::finalize(double limit_s) noexcept {
  if (!is_open()) return std::nullopt;
  const ncclResult_t result = begin_finalize(limit_s);
  if (const auto problem = settle(result, limit_s)) {
    abort();
    return cat(where(), ": expected all ranks to close it, got on rank ", context_->rank, ": ",
               *problem, ". It was aborted; close it on all ranks.");
  }
  joined_.store(false, std::memory_order_release);
  std::unique_lock lock(mutex_);
  const ncclComm_t comm = comm_.exchange(nullptr);
  lock.unlock();
  if (comm != nullptr) end(context_->api.ncclCommDestroy, comm);
  return std::nullopt;
}

}  // namespace fk::nccl
