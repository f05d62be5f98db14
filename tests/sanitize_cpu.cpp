// SPDX-License-Identifier: Apache-2.0
// Drives the CPU kernels over heap blocks of exactly the right length, at every ragged end, with
// every dtype and instruction set; built with sanitizers by test_cpp_kernels.py.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/level.h"

namespace cpu = fk::cpu;
using cpu::DType;

namespace {

int checked = 0;

// Exactly numel elements at the end of a heap block, so that one past it is poisoned.
struct Memory {
  Memory(int64_t numel, DType dtype)
      : bytes(static_cast<char*>(std::calloc(1, numel * cpu::itemsize(dtype) + 1)), std::free),
        buffer{bytes.get(), dtype} {
    // The extra byte keeps calloc(0) valid; poison is one byte further for empty blocks only.
    if (numel > 0) {
      bytes.reset(static_cast<char*>(std::calloc(numel, cpu::itemsize(dtype))));
      buffer.data = bytes.get();
    }
  }
  std::unique_ptr<char, void (*)(void*)> bytes;
  cpu::Buffer buffer;
};

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};

void check_adam(int64_t numel, DType grads, DType params, DType master, int threads) {
  Memory g(numel, grads), p(numel, master), m(numel, master), v(numel, master), x(numel, master),
      out(numel, params);
  const std::vector<cpu::HyperRow> hyper(2, {1e-3, 0.9, 0.999, 1e-8, 0.1});
  std::vector<cpu::CoefRow> coefs(2);
  float step[2] = {0, 3};
  const bool used[2] = {true, false};
  cpu::adam_coefs(hyper, step, used, false, coefs.data(), true);
  const int64_t middle = numel / 3;
  const std::vector<cpu::Fragment> table{{0, middle, 1}, {middle, numel, 0}};
  for (const bool amsgrad : {false, true}) {
    const cpu::Shard shard{
        g.buffer,   p.buffer, m.buffer.data, v.buffer.data, amsgrad ? x.buffer.data : nullptr,
        out.buffer, numel};
    cpu::adam(shard, table, coefs, {1.0, !amsgrad}, threads);
    ++checked;
  }
  const auto [sum, not_finite] = cpu::norm(g.buffer, numel, table, threads);
  if (sum != 0 || not_finite != 0) std::abort();
}

void check_reduce(int64_t numel, DType peers, DType out, DType master, size_t ranks, int threads) {
  std::vector<Memory> memory, targets;
  std::vector<void*> addresses, copies;
  for (size_t k = 0; k < ranks; ++k) {
    addresses.push_back(memory.emplace_back(numel, peers).buffer.data);
    copies.push_back(targets.emplace_back(numel, out).buffer.data);
  }
  Memory sum(numel, out), p(numel, master), m(numel, master), v(numel, master), x(numel, master);
  const int64_t middle = numel / 3, gap = std::min<int64_t>(2, numel - middle);
  const std::vector<cpu::Fragment> table{{0, middle, 0}, {middle + gap, numel, 0}};
  for (const bool accumulate : {false, true}) {
    const auto [squares, not_finite] =
        cpu::reduce({addresses, peers}, sum.buffer, numel, table, accumulate, threads);
    if (squares != 0 || not_finite != 0) std::abort();
    ++checked;
  }
  const cpu::CoefRow coef{1, 0.9, 0.1, 0.999, 0.001, 1e-3, 1, 1e-8, 0.1};
  for (const bool amsgrad : {false, true}) {
    const cpu::Shard shard{
        {}, p.buffer, m.buffer.data, v.buffer.data, amsgrad ? x.buffer.data : nullptr, {}, numel};
    cpu::reduce_adam({addresses, peers}, shard, {copies, out}, table, std::span(&coef, 1),
                     {1.0, !amsgrad}, threads);
    ++checked;
  }
}

void check_pack(int64_t numel, DType from, DType to) {
  Memory first(numel, from), second(1, from), out(2 * numel + 3, to);
  const std::vector<cpu::Source> sources{{first.buffer, 0, numel}, {second.buffer, numel + 1, 1}};
  for (const bool accumulate : {false, true}) {
    cpu::pack(sources, out.buffer, 2 * numel + 3, accumulate, 2);
    ++checked;
  }
}

}  // namespace

int main() {
  for (const std::string& name : cpu::levels()) {
    cpu::set_level(name);
    for (const DType first : kDTypes) {
      for (const DType second : kDTypes) {
        for (int64_t numel = 0; numel < 70; ++numel) check_pack(numel, first, second);
        for (int64_t numel = 0; numel < 70; ++numel) {
          check_adam(numel, first, second, DType::kFloat64, 2);
          check_reduce(numel, first, second, DType::kFloat64, 1 + numel % 3, 2);
          if (first == DType::kFloat64) continue;
          check_adam(numel, first, second, DType::kFloat32, 2);
          check_reduce(numel, first, second, DType::kFloat32, 1 + numel % 3, 2);
        }
      }
    }
    check_adam(300'001, DType::kBFloat16, DType::kBFloat16, DType::kFloat32, 3);
    check_reduce(300'001, DType::kBFloat16, DType::kBFloat16, DType::kFloat32, 3, 3);
  }
  std::printf("checked %d\n", checked);
  return 0;
}
