// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernels.h"

#include <cmath>
#include <cstring>

#include "cpu/chunks.h"
#include "cpu/level.h"
#include "cpu/parallel.h"

namespace fk::cpu {
int64_t itemsize(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kFloat32:
      return 4;
    default:
      return 2;
  }
}

void adam(const Shard& shard, std::span<const Fragment> table, std::span<const CoefRow> coefs,
          AdamOptions options, int threads) {
  check_table("adam", table, shard.numel);
  check_pointer("adam", "grads", shard.grads.data, shard.numel);
  check_state("adam", shard, shard.grads.dtype);
  check_rows("adam", table, coefs.size());
  int64_t numel = 0;
  const std::vector<AdamPart> parts = active_parts(table, coefs, numel);
  const Level& loops = level();
  parallel_for(parts.size(), numel, threads, [&](int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) loops.adam(shard, parts[k], options);
  });
}

std::pair<double, double> norm(Buffer grads, int64_t numel, std::span<const Fragment> table,
                               int threads) {
  check_table("norm", table, numel);
  check_pointer("norm", "grads", grads.data, numel);
  std::vector<NormPart> parts;
  int64_t work = 0;
  for (const Fragment& fragment : table) {
    for_each_chunk(fragment.start, fragment.stop,
                   [&](int64_t start, int64_t stop) { parts.push_back({start, stop}); });
    work += fragment.stop - fragment.start;
  }
  const Level& loops = level();
  parallel_for(parts.size(), work, threads, [&](int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
      parts[k].sum = loops.square_sum(grads, parts[k].start, parts[k].stop);
    }
  });
  return finish_norm(grads, parts);
}

std::pair<double, double> finish_norm(Buffer grads, std::span<const NormPart> parts) {
  double sum = 0, not_finite = 0;
  for (const NormPart& part : parts) {
    sum += part.sum;
    // A finite sum has finite terms only, so the elements are counted where it is not: rarely.
    if (std::isfinite(part.sum)) continue;
    const int64_t count = part.stop - part.start;
    std::vector<double> wide(count);
    level().convert({wide.data(), DType::kFloat64}, 0, grads, part.start, count);
    for (double x : wide) not_finite += std::isfinite(x) ? 0 : 1;
  }
  return {sum, not_finite};
}

void adam_coefs(std::span<const HyperRow> hyper, float* step, const bool* used, bool skip,
                CoefRow* out, bool decoupled) {
  for (size_t i = 0; i < hyper.size(); ++i) {
    const HyperRow& h = hyper[i];
    const bool active = used[i] && !skip;
    if (active) step[i] += 1;
    const double count = std::max(1.0, static_cast<double>(step[i]));
    out[i].active = active ? 1 : 0;
    out[i].beta1 = h.beta1;
    out[i].one_minus_beta1 = 1 - h.beta1;
    out[i].beta2 = h.beta2;
    out[i].one_minus_beta2 = 1 - h.beta2;
    out[i].step_size = h.lr / -std::expm1(count * std::log(h.beta1));
    out[i].bias_correction2_sqrt = std::sqrt(-std::expm1(count * std::log(h.beta2)));
    out[i].eps = h.eps;
    out[i].decay = decoupled ? 1 - h.lr * h.weight_decay : h.weight_decay;
  }
}

void pack(std::span<const Source> sources, Buffer out, int64_t numel, bool accumulate,
          int threads) {
  check_pointer("pack", "out", out.data, numel);
  struct Part {
    const Source* source;  // null: zeros
    int64_t start, stop;
  };
  std::vector<Part> parts;
  int64_t work = 0;
  const auto add = [&](const Source* source, int64_t start, int64_t stop) {
    for_each_chunk(start, stop,
                   [&](int64_t at, int64_t end) { parts.push_back({source, at, end}); });
    work += stop - start;
  };
  int64_t last = 0;
  for (const Source& source : sources) {
    const int64_t stop = source.start + source.numel;
    if (source.numel < 0 || source.start < last || stop > numel) {
      fail("pack", "a gradient inside " + range(last, numel), range(source.start, stop),
           "Pass gradients in segment order.");
    }
    check_pointer("pack", "a gradient", source.grad.data, source.numel);
    if (!accumulate) add(nullptr, last, source.start);
    add(&source, source.start, stop);
    last = stop;
  }
  if (!accumulate) add(nullptr, last, numel);
  const Level& loops = level();
  const int64_t bytes = itemsize(out.dtype);
  parallel_for(parts.size(), work, threads, [&](int64_t first, int64_t end) {
    for (int64_t k = first; k < end; ++k) {
      const auto& [source, start, stop] = parts[k];
      if (source == nullptr) {
        std::memset(static_cast<char*>(out.data) + start * bytes, 0, (stop - start) * bytes);
      } else {
        const auto loop = accumulate ? loops.add : loops.convert;
        loop(out, start, source->grad, start - source->start, stop - start);
      }
    }
  });
}

}  // namespace fk::cpu
