// SPDX-License-Identifier: Apache-2.0
// A training loop in small: what the runtime asks of a communicator, in its order, with kernels on
// a compute stream that are simple enough to know the result.
//
// All numbers are whole and below 2^24, so that sums are exact in any order; a NaN, which is what
// memory holds too early and too late, stays one. Every wait in it is needed: the mutation test
// takes each away in turn and must see a difference.
#pragma once

#include <cmath>
#include <memory>
#include <vector>

#include "nccl/communicator.h"
#include "sim/device.h"

namespace fk::sim {

struct Shape {
  int world = 2, units = 4, steps = 2, micro_batches = 2;
  bool reductions = true;  // on a communicator of their own

  size_t ranks() const { return static_cast<size_t>(world); }
  // Elements of a rank's shard; two buckets a unit, of lengths of no particular kind.
  size_t shard(int unit, int bucket) const { return static_cast<size_t>(3 + unit + 2 * bucket); }
  size_t full(int unit, int bucket) const { return ranks() * shard(unit, bucket); }
};

using Values = std::vector<float>;

// What a rank ends with: its loss and its shards.
struct Outcome {
  float loss = 0;
  std::vector<Values> shards;
  bool operator==(const Outcome&) const = default;  // NaN equals nothing
};

namespace maths {

constexpr float kPrime = 1021, kSmall = 97;

inline float initial(int unit, int bucket, size_t i) {
  return std::fmod(static_cast<float>(31 * (unit + 1) + 7 * bucket) + static_cast<float>(i * i),
                   kPrime);
}
inline float input(int rank, int step, int micro) {
  return static_cast<float>(17 * rank + 5 * step + 3 * micro + 1);
}
inline float forward(float x, const float* full, size_t n) {
  float sum = 3 * x;
  for (size_t i = 0; i < n; ++i) sum += full[i] * static_cast<float>(i + 1);
  return std::fmod(sum, kPrime);
}
inline void backward(float x, const float* full, float* grads, size_t n) {
  for (size_t i = 0; i < n; ++i)
    grads[i] = std::fmod(x * static_cast<float>(i + 1) + full[i], kSmall);
}
inline float scale(float norm) { return std::fmod(norm, 5) + 1; }
inline float step(float shard, float grad, float scale) {
  return std::fmod(shard + grad * scale, kPrime);
}

}  // namespace maths

// The same on one thread, without communication.
std::vector<Outcome> oracle(const Shape& shape);

// One rank of it.
class Trainer {
 public:
  Trainer(const Shape& shape, int rank, nccl::Communicator& comm);
  ~Trainer();
  void run();  // leaves all its work on the streams

  // Which work a device may be through with before the rest, as far as it can.
  enum class First { kCompute, kGathers, kReductions };
  void finish(First first);  // everything is through
  Outcome outcome() const { return {loss_, shards_}; }

 private:
  using Ticket = std::shared_ptr<nccl::Ticket>;
  size_t at(int unit, int bucket) const { return static_cast<size_t>(2 * unit + bucket); }
  float* slot(int unit, int bucket) {
    return slots_[static_cast<size_t>(2 * (unit % 2) + bucket)].data();
  }
  float* grads(int unit, int bucket) {
    return grads_[static_cast<size_t>(2 * (unit % 2) + bucket)].data();
  }
  void kernel(std::function<void()> run) { device_.launch(compute_, std::move(run)); }
  cudaStream_t compute() const { return reinterpret_cast<cudaStream_t>(compute_); }
  void wait(Ticket& ticket);
  void gather(int unit);
  void reduce(int unit);
  void start();
  void micro_batch(int step, int micro);
  void forward(int unit);
  void backward(int unit);
  void accumulate(int unit);
  void update();

  const Shape shape_;
  const int rank_;
  nccl::Communicator& comm_;
  Device& device_;
  Stream *compute_, *side_;
  std::vector<Values> shards_, reduced_, totals_;  // by unit and bucket
  std::vector<Values> slots_, grads_;              // two of each bucket, in turns
  std::vector<Ticket> gathers_, reductions_;       // by unit, until they were waited on
  float x_ = 0, norm_ = 0, scale_ = 0, loss_ = 0;
};

}  // namespace fk::sim
