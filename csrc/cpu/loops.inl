// SPDX-License-Identifier: Apache-2.0
// The loops of one instruction set, over cpu/vector.inl; ends in the table `kLevel`.

template <class T>
struct Coef {
  explicit Coef(const CoefRow& row, AdamOptions options)
      : scale(static_cast<T>(options.grad_scale)),
        decay(static_cast<T>(row.decay)),
        one_minus_beta1(static_cast<T>(row.one_minus_beta1)),
        beta2(static_cast<T>(row.beta2)),
        one_minus_beta2(static_cast<T>(row.one_minus_beta2)),
        step_size(static_cast<T>(row.step_size)),
        bias_correction2_sqrt(static_cast<T>(row.bias_correction2_sqrt)),
        eps(static_cast<T>(row.eps)),
        decoupled(options.decoupled) {}
  T scale, decay, one_minus_beta1, beta2, one_minus_beta2, step_size, bias_correction2_sqrt, eps;
  bool decoupled;
};

// The pointers that one vector of the update reads and writes at one element index.
template <class T>
struct Streams {
  const void* grads;
  T *master, *exp_avg, *exp_avg_sq, *max_exp_avg_sq;
  void* params;
};

template <class T, DType G, DType P>
FK_INLINE void adam_vector(const Streams<T>& at, int64_t i, const Coef<T>& c) {
  using V = Vec<T, kLanes<T>>;
  V g = load<T, G>(at.grads, i) * c.scale;
  V p = load_raw<V>(at.master + i);
  V m = load_raw<V>(at.exp_avg + i);
  V v = load_raw<V>(at.exp_avg_sq + i);
  if (c.decoupled) {
    p = p * c.decay;
  } else {
    g = g + p * c.decay;
  }
  m = m + (g - m) * c.one_minus_beta1;
  v = v * c.beta2 + (g * c.one_minus_beta2) * g;
  store_raw(at.exp_avg + i, m);
  store_raw(at.exp_avg_sq + i, v);
  if (at.max_exp_avg_sq != nullptr) {
    v = maximum(load_raw<V>(at.max_exp_avg_sq + i), v);
    store_raw(at.max_exp_avg_sq + i, v);
  }
  const V denom = square_root(v) / c.bias_correction2_sqrt + c.eps;
  p = p - (m * c.step_size) / denom;
  store_raw(at.master + i, p);
  if (at.params != nullptr) store<T, P>(at.params, i, p);
}

// The last elements, fewer than a vector: on copies, so that nothing past the end is touched.
template <class T, DType G, DType P>
void adam_rest(const Streams<T>& at, int64_t i, int64_t n, const Coef<T>& c) {
  constexpr int N = kLanes<T>;
  alignas(64) T master[N] = {}, exp_avg[N] = {}, exp_avg_sq[N] = {}, max_exp_avg_sq[N] = {};
  alignas(64) char grads[N * 8] = {}, params[N * 8];
  const int64_t grad_bytes = itemsize(G), param_bytes = itemsize(P);
  std::memcpy(grads, static_cast<const char*>(at.grads) + i * grad_bytes, n * grad_bytes);
  std::memcpy(master, at.master + i, n * sizeof(T));
  std::memcpy(exp_avg, at.exp_avg + i, n * sizeof(T));
  std::memcpy(exp_avg_sq, at.exp_avg_sq + i, n * sizeof(T));
  const bool amsgrad = at.max_exp_avg_sq != nullptr;
  if (amsgrad) std::memcpy(max_exp_avg_sq, at.max_exp_avg_sq + i, n * sizeof(T));
  const Streams<T> copy{grads,
                        master,
                        exp_avg,
                        exp_avg_sq,
                        amsgrad ? max_exp_avg_sq : nullptr,
                        at.params != nullptr ? params : nullptr};
  adam_vector<T, G, P>(copy, 0, c);
  std::memcpy(at.master + i, master, n * sizeof(T));
  std::memcpy(at.exp_avg + i, exp_avg, n * sizeof(T));
  std::memcpy(at.exp_avg_sq + i, exp_avg_sq, n * sizeof(T));
  if (amsgrad) std::memcpy(at.max_exp_avg_sq + i, max_exp_avg_sq, n * sizeof(T));
  if (at.params != nullptr) {
    std::memcpy(static_cast<char*>(at.params) + i * param_bytes, params, n * param_bytes);
  }
}

template <class T, DType G, DType P>
void adam_range(const Shard& shard, const AdamPart& part, AdamOptions options) {
  const Coef<T> c(part.coef, options);
  const Streams<T> at{shard.grads.data,
                      static_cast<T*>(shard.master.data),
                      static_cast<T*>(shard.exp_avg),
                      static_cast<T*>(shard.exp_avg_sq),
                      static_cast<T*>(shard.max_exp_avg_sq),
                      shard.params.data};
  constexpr int N = kLanes<T>;
  int64_t i = part.start;
  for (; i + N <= part.stop; i += N) adam_vector<T, G, P>(at, i, c);
  if (i < part.stop) adam_rest<T, G, P>(at, i, part.stop - i, c);
}

// Call f<D>() for the dtype that is known at run time.
template <class F>
FK_INLINE void with_dtype(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat32:
      return f.template operator()<DType::kFloat32>();
    case DType::kBFloat16:
      return f.template operator()<DType::kBFloat16>();
    case DType::kFloat16:
      return f.template operator()<DType::kFloat16>();
    case DType::kFloat64:
      return f.template operator()<DType::kFloat64>();
  }
}

void adam(const Shard& shard, const AdamPart& part, AdamOptions options) {
  with_dtype(shard.grads.dtype, [&]<DType G>() {
    with_dtype(shard.params.dtype, [&]<DType P>() {
      if (shard.master.dtype == DType::kFloat64) {
        adam_range<double, G, P>(shard, part, options);
      } else if constexpr (G != DType::kFloat64) {
        adam_range<float, G, P>(shard, part, options);
      }
    });
  });
}

// Add the squares of one vector of elements to `sums`, in float64, where that of any float32 is
// exact. A float32 vector fills two of float64.
template <DType D>
FK_INLINE void add_squares(const void* data, int64_t i, Vec<double, kLanes<double>> sums[2]) {
  if constexpr (D == DType::kFloat64) {
    for (int k = 0; k < 2; ++k) {
      const auto x = load<double, D>(data, i + k * kLanes<double>);
      sums[k] = multiply_add(x, x, sums[k]);
    }
  } else {
    const auto x = load<float, D>(data, i);
    constexpr int N = kLanes<float>;
    const auto low = widen<N / 2>(half_of<0, N>(x)), high = widen<N / 2>(half_of<1, N>(x));
    sums[0] = multiply_add(low, low, sums[0]);
    sums[1] = multiply_add(high, high, sums[1]);
  }
}

template <DType D>
double square_sum_of(const void* data, int64_t start, int64_t stop) {
  constexpr int N = kLanes<float>;
  Vec<double, kLanes<double>> sums[8] = {};  // as many as hide the latency of the addition
  int64_t i = start;
  for (; i + 4 * N <= stop; i += 4 * N) {
    for (int k = 0; k < 4; ++k) add_squares<D>(data, i + k * N, sums + 2 * k);
  }
  for (; i < stop; i += N) {
    alignas(64) char rest[N * 8] = {};
    const int64_t bytes = itemsize(D), n = stop - i < N ? stop - i : N;
    std::memcpy(rest, static_cast<const char*>(data) + i * bytes, n * bytes);
    add_squares<D>(rest, 0, sums);
  }
  for (int k = 4; k > 0; k /= 2) {
    for (int l = 0; l < k; ++l) sums[l] = sums[l] + sums[l + k];
  }
  double sum = 0;
  for (int k = 0; k < kLanes<double>; ++k) sum += sums[0][k];
  return sum;
}

double square_sum(Buffer grads, int64_t start, int64_t stop) {
  double sum = 0;
  with_dtype(grads.dtype, [&]<DType D>() { sum = square_sum_of<D>(grads.data, start, stop); });
  return sum;
}

// to = cast(from), or to = cast(to + from) with the sum in T.
template <class T, DType D, DType S, bool kAdd>
void cast_range(char* to, const char* from, int64_t numel) {
  constexpr int N = kLanes<T>;
  int64_t i = 0;
  for (; i + N <= numel; i += N) {
    auto x = load<T, S>(from, i);
    if constexpr (kAdd) x = load<T, D>(to, i) + x;
    store<T, D>(to, i, x);
  }
  if (i == numel) return;
  alignas(64) char source[N * 8] = {}, target[N * 8] = {};
  const int64_t n = numel - i, to_bytes = itemsize(D), from_bytes = itemsize(S);
  std::memcpy(source, from + i * from_bytes, n * from_bytes);
  std::memcpy(target, to + i * to_bytes, n * to_bytes);
  auto x = load<T, S>(source, 0);
  if constexpr (kAdd) x = load<T, D>(target, 0) + x;
  store<T, D>(target, 0, x);
  std::memcpy(to + i * to_bytes, target, n * to_bytes);
}

template <bool kAdd>
void cast(Buffer to, int64_t to_start, Buffer from, int64_t from_start, int64_t numel) {
  char* target = static_cast<char*>(to.data) + to_start * itemsize(to.dtype);
  const char* source = static_cast<const char*>(from.data) + from_start * itemsize(from.dtype);
  if (!kAdd && to.dtype == from.dtype) {
    std::memcpy(target, source, numel * itemsize(to.dtype));
    return;
  }
  with_dtype(to.dtype, [&]<DType D>() {
    with_dtype(from.dtype, [&]<DType S>() {
      constexpr bool wide = D == DType::kFloat64 || S == DType::kFloat64;
      cast_range<std::conditional_t<wide, double, float>, D, S, kAdd>(target, source, numel);
    });
  });
}
