// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/norm.cuh"

namespace fk::cuda {
namespace {

[[noreturn]] void fail(const std::string& expected, const std::string& advice) {
  throw std::invalid_argument("norm: expected " + expected + ", got a null pointer. " + advice);
}

template <class T>
void run(const NormInput& input, double* partials, double* out, void* stream) {
  const int64_t blocks = norm_partials(input.chunk_count) / 2;
  launch("norm", &norm_blocks<T>, blocks, stream, static_cast<const T*>(input.grads), input.chunks,
         input.chunk_count, partials);
  launch("norm", &norm_total, 1, stream, partials, static_cast<int>(blocks), out);
}

}  // namespace

int64_t norm_chunk_numel() { return kChunkNumel; }

int64_t norm_partials(int64_t chunk_count) {
  return 2 * std::clamp<int64_t>(chunk_count, 1, kNormBlocks);
}

void norm(const NormInput& input, double* partials, double* out, void* stream) {
  if (input.chunk_count > 0) {
    if (input.grads == nullptr) fail("gradients", "Pass a CUDA tensor.");
    if (input.chunks == nullptr) fail("a table of chunks", "Put it on the device.");
  }
  if (partials == nullptr) fail("room for partial results", "Allocate norm_partials() of them.");
  if (out == nullptr) fail("room for two results", "Allocate it.");
  switch (input.dtype) {
    case DType::kFloat32:
      return run<float>(input, partials, out, stream);
    case DType::kBFloat16:
      return run<BFloat16>(input, partials, out, stream);
    case DType::kFloat16:
      return run<Float16>(input, partials, out, stream);
  }
}

#ifdef __CUDACC__
int cuda_version() { return CUDART_VERSION; }

std::vector<std::string> architectures() {
  std::vector<std::string> names;
  const int listed[] = {__CUDA_ARCH_LIST__};  // 800 is sm_80
  for (int arch : listed) names.push_back("sm_" + std::to_string(arch / 10));
  names.push_back("compute_" + std::to_string(*std::rbegin(listed) / 10));
  return names;
}
#else
int cuda_version() { return 0; }

std::vector<std::string> architectures() { return {}; }
#endif

}  // namespace fk::cuda
