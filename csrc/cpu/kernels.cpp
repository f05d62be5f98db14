// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernels.h"

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/level.h"
#include "cpu/parallel.h"

namespace fk::cpu {
namespace {

// What one thread takes at a time, in elements. Also the unit in which `norm` sums, so that its
// result does not depend on the number of threads.
constexpr int64_t kChunkNumel = int64_t{1} << 15;

[[noreturn]] void fail(const std::string& where, const std::string& expected,
                       const std::string& got, const std::string& advice) {
  throw std::invalid_argument(where + ": expected " + expected + ", got " + got + ". " + advice);
}

std::string range(int64_t start, int64_t stop) {
  std::string text = "[";  // appended to: GCC 12 warns about a literal plus a string
  return text.append(std::to_string(start)).append(", ").append(std::to_string(stop)).append(")");
}

void check_table(const char* where, std::span<const Fragment> table, int64_t numel) {
  for (const Fragment& fragment : table) {
    if (fragment.start < 0 || fragment.start > fragment.stop || fragment.stop > numel) {
      fail(where, "fragments inside " + range(0, numel), range(fragment.start, fragment.stop),
           "Rebuild the table for this shard.");
    }
  }
}

void check_pointer(const char* where, const char* name, const void* data, int64_t numel) {
  if (data == nullptr && numel > 0) fail(where, name, "a null pointer", "Pass a CPU tensor.");
}

int64_t total_numel(std::span<const Fragment> table) {
  int64_t total = 0;
  for (const Fragment& fragment : table) total += fragment.stop - fragment.start;
  return total;
}

// Call f(start, stop, fragment) for each chunk of the table.
template <class F>
void for_each_chunk(std::span<const Fragment> table, const F& f) {
  for (const Fragment& fragment : table) {
    for (int64_t start = fragment.start; start < fragment.stop; start += kChunkNumel) {
      f(start, std::min(start + kChunkNumel, fragment.stop), fragment);
    }
  }
}

}  // namespace

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
  check_pointer("adam", "master", shard.master.data, shard.numel);
  check_pointer("adam", "exp_avg", shard.exp_avg, shard.numel);
  check_pointer("adam", "exp_avg_sq", shard.exp_avg_sq, shard.numel);
  const DType master = shard.master.dtype;
  if (master != DType::kFloat32 && master != DType::kFloat64) {
    fail("adam", "a float32 or float64 master", "16 bits", "Keep a master copy.");
  }
  if (shard.grads.dtype == DType::kFloat64 && master != DType::kFloat64) {
    fail("adam", "gradients of at most float32", "float64", "Reduce in float32.");
  }
  const auto rows = static_cast<int64_t>(coefs.size());
  for (const Fragment& fragment : table) {
    if (fragment.row < 0 || fragment.row >= rows) {
      fail("adam", "rows below " + std::to_string(rows), std::to_string(fragment.row),
           "Rebuild the coefficients.");
    }
  }
  std::vector<AdamPart> parts;
  int64_t numel = 0;
  for_each_chunk(table, [&](int64_t start, int64_t stop, const Fragment& fragment) {
    const CoefRow& coef = coefs[fragment.row];
    if (coef.active == 0) return;
    parts.push_back({start, stop, coef});
    numel += stop - start;
  });
  const Level& loops = level();
  parallel_for(parts.size(), numel, threads, [&](int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) loops.adam(shard, parts[k], options);
  });
}

std::pair<double, double> norm(Buffer grads, int64_t numel, std::span<const Fragment> table,
                               int threads) {
  check_table("norm", table, numel);
  check_pointer("norm", "grads", grads.data, numel);
  struct Part {
    int64_t start, stop;
    double sum;
  };
  std::vector<Part> parts;
  for_each_chunk(table, [&](int64_t start, int64_t stop, const Fragment&) {
    parts.push_back({start, stop, 0});
  });
  const Level& loops = level();
  parallel_for(parts.size(), total_numel(table), threads, [&](int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
      parts[k].sum = loops.square_sum(grads, parts[k].start, parts[k].stop);
    }
  });
  double sum = 0, not_finite = 0;
  for (const Part& part : parts) {
    sum += part.sum;
    // A finite sum has finite terms only, so the elements are counted where it is not: rarely.
    if (std::isfinite(part.sum)) continue;
    const int64_t count = part.stop - part.start;
    std::vector<double> wide(count);
    loops.convert({wide.data(), DType::kFloat64}, 0, grads, part.start, count);
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
    for (int64_t at = start; at < stop; at += kChunkNumel) {
      parts.push_back({source, at, std::min(at + kChunkNumel, stop)});
    }
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
