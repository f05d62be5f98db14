// SPDX-License-Identifier: Apache-2.0
// The sum over ranks of one instruction set, over cpu/vector.inl and the helpers of cpu/loops.inl.

// Vectors that are summed side by side, so that a rank's memory is read a few lines at a time.
inline constexpr int kSummed = 4;

// Add up K vectors from element i on, in rank order; `at` gives a rank's memory.
template <class T, DType S, int K, class At>
FK_INLINE void add_up(Vec<T, kLanes<T>> (&sums)[K], int64_t ranks, int64_t i, const At& at) {
  for (int k = 0; k < K; ++k) sums[k] = load<T, S>(at(0), i + k * kLanes<T>);
  for (int64_t rank = 1; rank < ranks; ++rank) {
    const void* data = at(rank);
    for (int k = 0; k < K; ++k) sums[k] = sums[k] + load<T, S>(data, i + k * kLanes<T>);
  }
}

template <class T, DType D, DType S, bool kAdd, int K, class At>
FK_INLINE void sum_vectors(void* to, int64_t ranks, int64_t i, const At& at) {
  Vec<T, kLanes<T>> sums[K];
  add_up<T, S, K>(sums, ranks, i, at);
  for (int k = 0; k < K; ++k) {
    const int64_t j = i + k * kLanes<T>;
    if constexpr (kAdd) sums[k] = load<T, D>(to, j) + sums[k];
    store<T, D>(to, j, sums[k]);
  }
}

template <class T, DType D, DType S, bool kAdd>
void sum_range(char* to, const Peers& from, int64_t start, int64_t numel) {
  constexpr int N = kLanes<T>;
  const int64_t ranks = static_cast<int64_t>(from.data.size());
  const int64_t first = start * itemsize(S);
  const auto at = [&](int64_t rank) { return static_cast<const char*>(from.data[rank]) + first; };
  int64_t i = 0;
  for (; i + kSummed * N <= numel; i += kSummed * N) {
    sum_vectors<T, D, S, kAdd, kSummed>(to, ranks, i, at);
  }
  for (; i + N <= numel; i += N) sum_vectors<T, D, S, kAdd, 1>(to, ranks, i, at);
  if (i == numel) return;
  // The last elements, fewer than a vector: on copies, so that nothing past the end is touched.
  alignas(64) char source[N * 8] = {}, target[N * 8] = {};
  const int64_t n = numel - i, to_bytes = itemsize(D), from_bytes = itemsize(S);
  const auto copied = [&](int64_t rank) {
    std::memcpy(source, at(rank) + i * from_bytes, n * from_bytes);
    return static_cast<const void*>(source);
  };
  std::memcpy(target, to + i * to_bytes, n * to_bytes);
  sum_vectors<T, D, S, kAdd, 1>(target, ranks, 0, copied);
  std::memcpy(to + i * to_bytes, target, n * to_bytes);
}

template <bool kAdd>
void sum(Buffer to, int64_t to_start, const Peers& from, int64_t start, int64_t numel) {
  char* target = static_cast<char*>(to.data) + to_start * itemsize(to.dtype);
  with_dtype(to.dtype, [&]<DType D>() {
    with_dtype(from.dtype, [&]<DType S>() {
      constexpr bool wide = D == DType::kFloat64 || S == DType::kFloat64;
      sum_range<std::conditional_t<wide, double, float>, D, S, kAdd>(target, from, start, numel);
    });
  });
}
