// SPDX-License-Identifier: Apache-2.0
#include "cpu/epoch.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace fk::shm {
namespace {

// Not FUTEX_PRIVATE_FLAG: the sleeper may be another process.
void futex(uint32_t* word, int operation, uint32_t argument, const timespec* timeout) {
  syscall(SYS_futex, word, operation, argument, timeout, nullptr, 0);
}

}  // namespace

// NOTE: both sides write their own word and then read the other's, all sequentially consistent. So
// either set() sees the sleeper, or the sleeper sees the new number: the kernel compares it again.
void Epoch::set(uint32_t number) {
  std::atomic_ref(value).store(number, std::memory_order_seq_cst);
  if (std::atomic_ref(sleepers).load(std::memory_order_seq_cst) != 0) wake();
}

void Epoch::wake() { futex(&value, FUTEX_WAKE, INT_MAX, nullptr); }

void Epoch::sleep(uint32_t seen, int milliseconds) {
  const timespec timeout{milliseconds / 1000, milliseconds % 1000 * 1'000'000L};
  std::atomic_ref(sleepers).fetch_add(1, std::memory_order_seq_cst);
  if (std::atomic_ref(value).load(std::memory_order_seq_cst) == seen) {
    futex(&value, FUTEX_WAIT, seen, &timeout);
  }
  // A sleeper that is killed here stays counted: later calls of set() are then a little slower.
  std::atomic_ref(sleepers).fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace fk::shm
