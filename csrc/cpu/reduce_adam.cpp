// SPDX-License-Identifier: Apache-2.0
// The kernels over several ranks' memory, in one pass over it: a block is summed over the ranks,
// and what follows reads the sum from cache. Storing past the caches was tried, and gained nothing.
#include <cstring>

#include "cpu/chunks.h"
#include "cpu/kernels.h"
#include "cpu/level.h"
#include "cpu/parallel.h"

namespace fk::cpu {
namespace {

// Elements that are summed before Adam reads the sum. Long, so that the processor's prefetching
// follows one rank's memory at a time (with 8 ranks and 8 copies 16384 is 1.3 times as fast as
// 2048); and still the sum stays in the second cache.
constexpr int64_t kBlockNumel = int64_t{1} << 14;

void check_peers(const char* where, const char* name, const Peers& peers, int64_t numel) {
  for (const void* data : peers.data) check_pointer(where, name, data, numel);
}

void check_some(const char* where, const Peers& peers) {
  if (peers.data.empty()) {
    fail(where, "the memory of at least one rank", "none", "Pass this rank's own too.");
  }
}

void* at(void* data, DType dtype, int64_t index) {
  return data == nullptr ? nullptr : static_cast<char*>(data) + index * itemsize(dtype);
}

// The shard from one element on.
Shard from(const Shard& shard, int64_t index) {
  const DType state = shard.master.dtype;
  return {shard.grads,
          {at(shard.master.data, state, index), state},
          at(shard.exp_avg, state, index),
          at(shard.exp_avg_sq, state, index),
          at(shard.max_exp_avg_sq, state, index),
          {at(shard.params.data, shard.params.dtype, index), shard.params.dtype},
          shard.numel - index};
}

}  // namespace

std::pair<double, double> reduce(const Peers& peers, Buffer out, int64_t numel,
                                 std::span<const Fragment> table, bool accumulate, int threads) {
  check_some("reduce", peers);
  check_peers("reduce", "peers", peers, numel);
  check_pointer("reduce", "out", out.data, numel);
  check_table("reduce", table, numel);
  // The chunks that `norm` takes, then what lies between the fragments.
  std::vector<NormPart> parts;
  const auto add = [&](int64_t first, int64_t last) {
    for_each_chunk(first, last,
                   [&](int64_t start, int64_t stop) { parts.push_back({start, stop}); });
  };
  std::vector<Fragment> sorted(table.begin(), table.end());
  for (const Fragment& fragment : sorted) add(fragment.start, fragment.stop);
  const auto normed = static_cast<int64_t>(parts.size());
  std::sort(sorted.begin(), sorted.end(),
            [](const Fragment& a, const Fragment& b) { return a.start < b.start; });
  int64_t last = 0;
  for (const Fragment& fragment : sorted) {
    add(last, fragment.start);
    last = std::max(last, fragment.stop);
  }
  add(last, numel);
  const Level& loops = level();
  const auto sum = accumulate ? loops.add_sum : loops.sum;
  parallel_for(parts.size(), numel, threads, [&](int64_t first, int64_t end) {
    for (int64_t k = first; k < end; ++k) {
      NormPart& part = parts[k];
      sum(out, part.start, peers, part.start, part.stop - part.start);
      // From cache, as a whole: the order of addition, and so the bits, of `norm`.
      if (k < normed) part.sum = loops.square_sum(out, part.start, part.stop);
    }
  });
  return finish_norm(out, std::span(parts).first(normed));
}

void reduce_adam(const Peers& peers, const Shard& shard, const Peers& copies,
                 std::span<const Fragment> table, std::span<const CoefRow> coefs,
                 AdamOptions options, int threads) {
  check_table("reduce_adam", table, shard.numel);
  check_some("reduce_adam", peers);
  check_peers("reduce_adam", "peers", peers, shard.numel);
  check_peers("reduce_adam", "copies", copies, shard.numel);
  check_state("reduce_adam", shard, peers.dtype);
  check_rows("reduce_adam", table, coefs.size());
  int64_t numel = 0;
  const std::vector<AdamPart> parts = active_parts(table, coefs, numel);
  const Level& loops = level();
  Shard whole = shard;
  whole.params = {copies.data.empty() ? nullptr : copies.data[0], copies.dtype};
  const auto step = [&](int64_t start, int64_t count, const CoefRow& coef) {
    alignas(64) char sums[kBlockNumel * 8];
    Shard block = from(whole, start);
    block.grads = {sums, peers.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32};
    loops.sum(block.grads, 0, peers, start, count);
    loops.adam(block, {0, count, coef}, options);
    for (size_t k = 1; k < copies.data.size(); ++k) {
      std::memcpy(at(copies.data[k], copies.dtype, start), block.params.data,
                  count * itemsize(copies.dtype));
    }
  };
  parallel_for(parts.size(), numel, threads, [&](int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
      const AdamPart& part = parts[k];
      for (int64_t start = part.start; start < part.stop; start += kBlockNumel) {
        step(start, std::min(kBlockNumel, part.stop - start), part.coef);
      }
    }
  });
}

}  // namespace fk::cpu
