// SPDX-License-Identifier: Apache-2.0
#include "nccl/errors.h"

#include <cstdio>
#include <stdexcept>

namespace fk::nccl {

std::string describe(const Api& api, cudaError_t error) {
  return cat('"', api.cudaGetErrorString(error), "\" from CUDA (code ", static_cast<int>(error),
             ')');
}

std::string describe(const Api& api, ncclResult_t result, ncclComm_t comm) {
  std::string text = cat('"', api.ncclGetErrorString(result), "\" from NCCL (code ",
                         static_cast<int>(result), ')');
  const char* detail = api.ncclGetLastError(comm);
  if (detail == nullptr || detail[0] == '\0') return text;
  std::string last = detail;
  while (!last.empty() && (last.back() == '\n' || last.back() == '.')) last.pop_back();
  return text + ": " + last;
}

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), value < 10 ? "%.3g s" : "%.1f s", value);
  return text;
}

void check(const Api& api, cudaError_t error, const std::string& where, const char* expected,
           const char* advice) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(
      cat(where, ": expected ", expected, ", got ", describe(api, error), ". ", advice));
}

bool Failure::set(const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (set_.load(std::memory_order_relaxed)) return false;
  text_ = text;
  set_.store(true, std::memory_order_release);
  return true;
}

std::string Failure::text() const {
  const std::lock_guard lock(mutex_);
  return text_;
}

void Failure::raise_if_set() const {
  if (is_set()) throw std::runtime_error(text());
}

}  // namespace fk::nccl
