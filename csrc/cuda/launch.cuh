// SPDX-License-Identifier: Apache-2.0
// How a kernel is launched. Tests compile the kernels with g++ and bring their own `launch`, which
// runs the threads of a block as fibers: tests/cuda_host/cuda_on_host.h.
#pragma once

#ifdef __CUDACC__
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "cuda/index.cuh"

namespace fk::cuda {

inline const char* advice(cudaError_t code) {
  switch (code) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
      return "Use a device of compute capability 8.0 or later.";
    case cudaErrorInsufficientDriver:
    case cudaErrorNoDevice:
      return "Run on a CUDA device, with a driver that is as new as the toolkit of the build.";
    default:
      return "An earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1.";
  }
}

// Launches `blocks` blocks of kThreads threads on a stream of the current device. Throws
// std::runtime_error.
template <class... Parameters, class... Arguments>
void launch(const char* where, void (*kernel)(Parameters...), int64_t blocks, void* stream,
            const Arguments&... arguments) {
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      arguments...);
  const cudaError_t code = cudaGetLastError();
  if (code == cudaSuccess) return;
  throw std::runtime_error(std::string(where) + ": expected the kernel to launch, got \"" +
                           cudaGetErrorString(code) + "\" (code " +
                           std::to_string(static_cast<int>(code)) + "). " + advice(code));
}

}  // namespace fk::cuda
#endif
