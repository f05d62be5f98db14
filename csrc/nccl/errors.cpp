// SPDX-License-Identifier: Apache-2.0
#include "nccl/errors.h"

#include <cmath>
#include <cstdio>
#include <stdexcept>

namespace fk::nccl {

std::string describe(const Api& api, cudaError_t error) {
  return cat('"', api.cudaGetErrorString(error), "\" from CUDA (code ", static_cast<int>(error),
             ')');
}

std::string describe(const Api& api, ncclResult_t result, ncclComm_t comm) {
  std::string name = api.ncclGetErrorString(result);
  // What follows is advice on NCCL's log, whose last line comes anyway.
  name = name.substr(0, name.find(" (run with NCCL_DEBUG"));
  const char* detail = api.ncclGetLastError(comm);
  std::string last = detail == nullptr ? "" : detail;
  while (!last.empty() && (last.back() == '\n' || last.back() == '.')) last.pop_back();
  return cat('"', name, "\" from NCCL", last.empty() ? "" : ": ", last);
}

std::string seconds(double value) {
  const double unit = value < 1 ? 1000 : 10;  // to milliseconds, or tenths
  char text[32];
  std::snprintf(text, sizeof(text), "%.10g s", std::round(value * unit) / unit);
  return text;
}

void check(const Api& api, cudaError_t error, const std::string& where, const char* expected,
           const char* advice) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(
      cat(where, ": expected ", expected, ", got ", describe(api, error), ". ", advice));
}

void print(const std::string& text) { std::fprintf(stderr, "fsdp_kernels: %s\n", text.c_str()); }

bool is_of_capture(cudaError_t error) {
  return error >= cudaErrorStreamCaptureUnsupported && error <= cudaErrorStreamCaptureWrongThread;
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
