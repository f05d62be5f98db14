// SPDX-License-Identifier: Apache-2.0
// The kernels of the optimizer step for CPU memory: what the bindings call.
//
// What each computes, operation by operation, is spelled in triton_ops/reference.py; in float32 the
// results are the same bits. Every kernel makes one pass over memory. `threads` is an upper bound:
// small inputs stay on the calling thread. All of them throw std::invalid_argument.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace fk::cpu {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };

int64_t itemsize(DType dtype);

// Flat memory of one dtype; data may be null where a buffer is optional.
struct Buffer {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
};

// Elements [start, stop) of a shard, and the row of the coefficient table that is theirs.
// The memory layout of FragmentTable.host().
struct Fragment {
  int64_t start, stop, row;
};

// Columns of the coefficient table; the order of triton_ops/_common.py.
struct CoefRow {
  double active, beta1, one_minus_beta1, beta2, one_minus_beta2;
  double step_size, bias_correction2_sqrt, eps, decay;
};

struct HyperRow {
  double lr, beta1, beta2, eps, weight_decay;
};

// One rank's flat buffers of one bucket. Moments have master's dtype (float32 or float64).
struct Shard {
  Buffer grads, master;
  void *exp_avg, *exp_avg_sq, *max_exp_avg_sq;  // the last may be null
  Buffer params;                                // data may be null
  int64_t numel;
};

struct AdamOptions {
  double grad_scale;  // factor x scale, negated to maximize
  bool decoupled;
};

void adam(const Shard& shard, std::span<const Fragment> table, std::span<const CoefRow> coefs,
          AdamOptions options, int threads);

// Returns the sum of squares and the number of elements that are not finite. The same bits for
// any number of threads.
std::pair<double, double> norm(Buffer grads, int64_t numel, std::span<const Fragment> table,
                               int threads);

void adam_coefs(std::span<const HyperRow> hyper, float* step, const bool* used, bool skip,
                CoefRow* out, bool decoupled);

struct Source {
  Buffer grad;
  int64_t start, numel;  // its elements of the bucket
};

// Sources in ascending order of start; what none of them covers becomes 0, or is kept (accumulate).
void pack(std::span<const Source> sources, Buffer out, int64_t numel, bool accumulate, int threads);

// The same elements in the memory of several ranks, in rank order, each of one dtype.
struct Peers {
  std::span<void* const> data;
  DType dtype;
};

// out = round(p_0 + p_1 + ...), or round(out + sum) to accumulate; `out` may be one of the peers.
// Returns what `norm` gives for the table's elements of `out`; the sum covers all of them.
std::pair<double, double> reduce(const Peers& peers, Buffer out, int64_t numel,
                                 std::span<const Fragment> table, bool accumulate, int threads);

// `reduce` into float32 (float64 for float64 gradients) and `adam` on it, without storing the sum;
// the new parameters go to every one of `copies`. The shard's own grads and params are not used.
void reduce_adam(const Peers& peers, const Shard& shard, const Peers& copies,
                 std::span<const Fragment> table, std::span<const CoefRow> coefs,
                 AdamOptions options, int threads);

}  // namespace fk::cpu
