// SPDX-License-Identifier: Apache-2.0
// How a code of CUDA or NCCL becomes a sentence, and the one failure that ends a communicator.
#pragma once

#include <atomic>
#include <mutex>
#include <sstream>
#include <string>

#include "nccl/api.h"

namespace fk::nccl {

template <class... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// '"out of memory" from CUDA (code 2)'.
std::string describe(const Api& api, cudaError_t error);

// '"unhandled system error" from NCCL: <the last line that NCCL would have logged>'.
std::string describe(const Api& api, ncclResult_t result, ncclComm_t comm);

// "12.3 s".
std::string seconds(double value);

// Throws '<where>: expected <expected>, got <error>. <advice>'.
void check(const Api& api, cudaError_t error, const std::string& where, const char* expected,
           const char* advice);

// A line on stderr, for users whose program hears nothing.
void print(const std::string& text);

// What CUDA answers because of a graph's capture, of whatever stream and thread.
bool is_of_capture(cudaError_t error);

// Set once and never cleared: what is raised from then on is the first failure, not its
// consequences. Any thread.
class Failure {
 public:
  // Returns whether this text is the one that stays.
  bool set(const std::string& text);
  bool is_set() const { return set_.load(std::memory_order_acquire); }
  std::string text() const;  // empty: none
  void raise_if_set() const;

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> set_{false};
  std::string text_;
};

}  // namespace fk::nccl
