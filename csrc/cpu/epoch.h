// SPDX-License-Identifier: Apache-2.0
// A number in memory that processes share: one of them advances it, the others wait for it.
#pragma once

#include <atomic>
#include <cstdint>

namespace fk::shm {

// Two cache lines, since processors fetch them in pairs: a neighbour's write must not slow a wait.
inline constexpr size_t kEpochBytes = 128;

// Zeroed memory is a valid epoch. What was written before set(n) is visible to whoever has seen n.
struct alignas(kEpochBytes) Epoch {
  uint32_t value;
  uint32_t sleepers;  // so that set() makes a system call only if somebody sleeps

  uint32_t get() const {
    return std::atomic_ref(const_cast<uint32_t&>(value)).load(std::memory_order_acquire);
  }

  // Numbers wrap around; the distance of two that are compared stays far below 2^31.
  bool has_reached(uint32_t target) const { return static_cast<int32_t>(get() - target) >= 0; }

  void set(uint32_t number);

  // Wakes all who sleep, without a new number.
  void wake();

  // Sleeps until woken, if the number still is `seen`; a few milliseconds too long at most.
  void sleep(uint32_t seen, int milliseconds);
};

static_assert(sizeof(Epoch) == kEpochBytes);
static_assert(std::atomic_ref<uint32_t>::is_always_lock_free, "locks are not shared by processes");

}  // namespace fk::shm
