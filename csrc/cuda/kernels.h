// SPDX-License-Identifier: Apache-2.0
// The kernels for CUDA memory: what the bindings call. No CUDA type, so that g++ reads it alone.
//
// What each computes is spelled in triton_ops/reference.py. `stream` is a cudaStream_t of the
// current device; nothing waits for it, and nothing is allocated or copied. All of them throw
// std::invalid_argument for wrong arguments and std::runtime_error where a launch fails.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace fk::cuda {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// One gradient, and its elements [start, start + numel) of the bucket.
struct Source {
  const void* data;
  DType dtype;
  int64_t start, numel;
  // In elements, of a gradient that is not contiguous; both empty: contiguous. After dimensions
  // that lie side by side have been merged there are at most 8.
  std::vector<int64_t> sizes, strides;
};

// A flat bucket.
struct Bucket {
  void* data;
  DType dtype;
  int64_t numel;
};

// Sources in ascending order of start; what none of them covers becomes 0, or is kept (accumulate).
void pack(std::span<const Source> sources, Bucket out, bool accumulate, void* stream);

struct NormInput {
  const void* grads;
  DType dtype;
  const int64_t* chunks;  // on the device: FragmentTable.chunks(), rows of start, stop, row
  int64_t chunk_count;
};

// Doubles that `norm` needs for its partial results: (sum of squares, non-finite count) a block.
int64_t norm_partials(int64_t chunk_count);

// Writes the sum of squares and the number of elements that are not finite to out[0] and out[1],
// on the device. Always in the same order, so that equal input gives equal bits.
void norm(const NormInput& input, double* partials, double* out, void* stream);

// The elements that a chunk of `norm` should have, and may have at most.
int64_t norm_chunk_numel();

// The toolkit that the kernels were compiled with (13000 is 13.0), and for what: "sm_80", ...; of
// the last one also PTX, "compute_100". On a host build: 0 and none.
int cuda_version();
std::vector<std::string> architectures();

}  // namespace fk::cuda
