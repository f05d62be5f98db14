// SPDX-License-Identifier: Apache-2.0
// Runs the CUDA kernels of csrc/cuda on the host: included before them (-include) by g++.
//
// Each thread of a block is a fiber. A fiber runs until it waits at a barrier or a shuffle, or
// ends; then another one runs, in an order that changes with every round, so that a missing barrier
// shows as a wrong result. Blocks run one after the other. A barrier that some threads never reach
// is an error, not a hang. What this cannot show: atomics between blocks, memory order, PTX.
#pragma once

// CUDA's own headers: their host paths round and convert as the device does.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <ucontext.h>
#include <vector_types.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

#undef __device__
#undef __global__
#undef __grid_constant__
#undef __launch_bounds__
#undef __shared__
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace fk::host {

constexpr int kWarpSize = 32;
constexpr size_t kStackBytes = size_t{1} << 17;

enum class State { kReady, kAtBarrier, kAtWarp, kDone };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};  // not cleared: the pages stay untouched
  State state = State::kDone;
  unsigned mask = 0;      // of the warp operation at which it waits
  uint64_t exchange = 0;  // what it offers to the other lanes
  void* fake_stack = nullptr;
};

// The block that runs now, with its scheduler on the caller's stack.
class Block {
 public:
  static Block& current() {
    static Block block;
    return block;
  }

  void run(int threads, const std::function<void()>& body) {
    body_ = &body;
    threads_ = threads;
    while (fibers_.size() < static_cast<size_t>(threads)) fibers_.emplace_back();
    for (int thread = 0; thread < threads; ++thread) start(thread);
    std::vector<int> order(threads);
    std::iota(order.begin(), order.end(), 0);
    do {
      std::shuffle(order.begin(), order.end(), random_);
      for (int thread : order) {
        if (fibers_[thread].state == State::kReady) resume(thread);
      }
    } while (release());
  }

  // Called on a fiber: gives the others their turn until what it waits for has come.
  void wait(State state, unsigned mask = 0) {
    Fiber& fiber = fibers_[running_];
    fiber.state = state;
    fiber.mask = mask;
    leave(&fiber.fake_stack);
    swapcontext(&fiber.context, &scheduler_);
    arrive(fibers_[running_].fake_stack);
  }

  template <class T>
  T shuffle_down(unsigned mask, T value, unsigned delta) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    const int self = running_, lane = self % kWarpSize;
    std::memcpy(&fibers_[self].exchange, &value, sizeof(T));
    wait(State::kAtWarp, mask);
    const unsigned from = lane + delta;
    if (from < kWarpSize) std::memcpy(&value, &fibers_[self + delta].exchange, sizeof(T));
    wait(State::kAtWarp, mask);  // nobody offers something else before all have read
    return value;
  }

 private:
  void start(int thread) {
    Fiber& fiber = fibers_[thread];
    fiber.state = State::kReady;
    fiber.fake_stack = nullptr;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &scheduler_;
    makecontext(&fiber.context, &Block::entry, 0);
  }

  static void entry() {
    Block& block = current();
    block.arrive(nullptr);
    (*block.body_)();
    block.fibers_[block.running_].state = State::kDone;
    block.leave(nullptr);
  }

  void resume(int thread) {
    running_ = thread;
    threadIdx = {static_cast<unsigned>(thread), 0, 0};
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&scheduler_fake_stack_, fibers_[thread].stack.get(),
                                   kStackBytes);
#endif
    swapcontext(&scheduler_, &fibers_[thread].context);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(scheduler_fake_stack_, nullptr, nullptr);
#endif
  }

  // AddressSanitizer has to know which stack is in use.
  void leave([[maybe_unused]] void** fake_stack) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(fake_stack, scheduler_stack_, scheduler_stack_bytes_);
#endif
  }

  void arrive([[maybe_unused]] void* fake_stack) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake_stack, &scheduler_stack_, &scheduler_stack_bytes_);
#endif
  }

  // Lets go whom nothing holds any longer. Returns false when all threads have ended.
  bool release() {
    const auto count = [&](State state) {
      return std::count_if(fibers_.begin(), fibers_.begin() + threads_,
                           [&](const Fiber& fiber) { return fiber.state == state; });
    };
    if (count(State::kDone) == threads_) return false;
    bool released = false;
    if (count(State::kAtBarrier) == threads_) {
      for (int thread = 0; thread < threads_; ++thread) fibers_[thread].state = State::kReady;
      released = true;
    }
    for (int warp = 0; warp < threads_; warp += kWarpSize) released |= release_warp(warp);
    if (released) return true;
    throw std::logic_error("host: expected all threads at the barrier or shuffle, got " +
                           std::to_string(count(State::kAtBarrier) + count(State::kAtWarp)) +
                           " of " + std::to_string(threads_) + " there, " +
                           std::to_string(count(State::kDone)) +
                           " ended. Move it out of the branch.");
  }

  bool release_warp(int first) {
    const int lanes = std::min(kWarpSize, threads_ - first);
    unsigned waiting = 0, mask = 0;
    for (int lane = 0; lane < lanes; ++lane) {
      const Fiber& fiber = fibers_[first + lane];
      if (fiber.state != State::kAtWarp) continue;
      waiting |= 1u << lane;
      mask |= fiber.mask;
    }
    if (waiting == 0 || waiting != mask) return false;
    for (int lane = 0; lane < lanes; ++lane) {
      if (waiting >> lane & 1) fibers_[first + lane].state = State::kReady;
    }
    return true;
  }

  std::vector<Fiber> fibers_;
  ucontext_t scheduler_;
  const std::function<void()>* body_ = nullptr;
  int threads_ = 0, running_ = 0;
  std::mt19937 random_{12345};
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_bytes_ = 0;
  void* scheduler_fake_stack_ = nullptr;
};

// Runs kernel(arguments...) on `blocks` blocks of `threads` threads.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads,
            const Arguments&... arguments) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  if (blocks < 1 || blocks > INT32_MAX) {
    throw std::logic_error("host: expected 1 to 2^31 - 1 blocks, got " + std::to_string(blocks) +
                           ". Launch nothing for nothing.");
  }
  gridDim = {static_cast<unsigned>(blocks), 1, 1};
  blockDim = {static_cast<unsigned>(threads), 1, 1};
  for (int64_t block = 0; block < blocks; ++block) {
    blockIdx = {static_cast<unsigned>(block), 0, 0};
    Block::current().run(threads, [&] { kernel(arguments...); });
  }
}

}  // namespace fk::host

inline void __syncthreads() { fk::host::Block::current().wait(fk::host::State::kAtBarrier); }

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  fk::host::Block::current().wait(fk::host::State::kAtWarp, mask);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  return fk::host::Block::current().shuffle_down(mask, value, delta);
}

namespace fk::cuda {

// Stands for the one in cuda/launch.cuh.
template <class... Parameters, class... Arguments>
void launch(const char*, void (*kernel)(Parameters...), int64_t blocks, void*,
            const Arguments&... arguments) {
  host::launch(kernel, blocks, 256, arguments...);
}

}  // namespace fk::cuda
