// SPDX-License-Identifier: Apache-2.0
// Vectors of one instruction set. Included inside that set's namespace and target region, with
// FK_VECTOR_BYTES defined; so there is no include guard, and everything is inlined. The 512-bit
// intrinsics are the masked ones: GCC 12 warns about the undefined operand inside the others.

#define FK_INLINE inline __attribute__((always_inline))

template <class T, int N>
struct VecOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <class T, int N>
using Vec = typename VecOf<T, N>::type;

// Lanes of a vector that computes in T.
template <class T>
inline constexpr int kLanes = FK_VECTOR_BYTES / sizeof(T);

template <class V>
FK_INLINE V load_raw(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}

template <class V>
FK_INLINE void store_raw(void* to, const V& v) {
  __builtin_memcpy(to, &v, sizeof(V));
}

template <class To, class From>
FK_INLINE To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return reinterpret_cast<To>(from);
}

// Exact conversions to twice the width. GCC 12 splits the generic form of the 512-bit ones in two.
template <int N>
FK_INLINE Vec<uint32_t, N> widen(Vec<uint16_t, N> h) {
#if FK_VECTOR_BYTES == 64
  if constexpr (N == 16) {
    return bits<Vec<uint32_t, N>>(_mm512_maskz_cvtepu16_epi32(-1, bits<__m256i>(h)));
  }
#endif
  return __builtin_convertvector(h, Vec<uint32_t, N>);
}

template <int N>
FK_INLINE Vec<double, N> widen(Vec<float, N> f) {
#if FK_VECTOR_BYTES == 64
  if constexpr (N == 8) return bits<Vec<double, N>>(_mm512_maskz_cvtps_pd(-1, bits<__m256>(f)));
#elif FK_VECTOR_BYTES == 32
  if constexpr (N == 4) return bits<Vec<double, N>>(_mm256_cvtps_pd(bits<__m128>(f)));
#endif
  return __builtin_convertvector(f, Vec<double, N>);
}

// The lower or upper half of a float32 vector.
template <int kHalf, int N>
FK_INLINE Vec<float, N / 2> half_of(Vec<float, N> v) {
  Vec<float, N / 2> halves[2];
  __builtin_memcpy(halves, &v, sizeof(v));  // stays in registers
  return halves[kHalf];
}

// a * b + c, rounded once where the processor can.
template <class V>
FK_INLINE V multiply_add(V a, V b, V c) {
#if FK_VECTOR_BYTES == 64
  return bits<V>(_mm512_fmadd_pd(bits<__m512d>(a), bits<__m512d>(b), bits<__m512d>(c)));
#elif FK_VECTOR_BYTES == 32
  return bits<V>(_mm256_fmadd_pd(bits<__m256d>(a), bits<__m256d>(b), bits<__m256d>(c)));
#else
  return a * b + c;
#endif
}

// Convert float32 to the type that is computed in.
template <class T, int N>
FK_INLINE Vec<T, N> to_compute(Vec<float, N> f) {
  if constexpr (sizeof(T) == 8)
    return widen<N>(f);
  else
    return f;
}

// float16 -> float32 without hardware: the exponent is rebased by a multiplication, which also
// normalises subnormals.
template <int N>
FK_INLINE Vec<float, N> widen_half(Vec<uint16_t, N> h) {
#ifdef __F16C__
  if constexpr (N == 8) {
    return bits<Vec<float, N>>(_mm256_cvtph_ps(bits<__m128i>(h)));
  } else if constexpr (N == 4) {
    return bits<Vec<float, N>>(_mm_cvtph_ps(_mm_set_epi64x(0, bits<Vec<int64_t, 1>>(h)[0])));
  }
#endif
#ifdef __AVX512F__
  if constexpr (N == 16) return bits<Vec<float, N>>(_mm512_maskz_cvtph_ps(-1, bits<__m256i>(h)));
#endif
  using U = Vec<uint32_t, N>;
  const U wide = widen<N>(h);
  const U magnitude = (wide & 0x7fff) << 13;
  U out = bits<U>(bits<Vec<float, N>>(magnitude) * 0x1p112f);
  const U special = magnitude | 0x7f800000u;  // inf and nan
  const U quiet = (magnitude > 0x0f800000u) ? (special | 0x400000u) : special;
  out = (magnitude >= 0x0f800000u) ? quiet : out;
  return bits<Vec<float, N>>(out | ((wide & 0x8000) << 16));
}

// float32 -> float16, to nearest even.
template <int N>
FK_INLINE Vec<uint16_t, N> narrow_half(Vec<float, N> f) {
#ifdef __F16C__
  if constexpr (N == 8) {
    return bits<Vec<uint16_t, N>>(_mm256_cvtps_ph(bits<__m256>(f), _MM_FROUND_TO_NEAREST_INT));
  } else if constexpr (N == 4) {
    const __m128i h = _mm_cvtps_ph(bits<__m128>(f), _MM_FROUND_TO_NEAREST_INT);
    return bits<Vec<uint16_t, N>>(Vec<int64_t, 1>{_mm_cvtsi128_si64(h)});
  }
#endif
#ifdef __AVX512F__
  if constexpr (N == 16) {
    return bits<Vec<uint16_t, N>>(
        _mm512_maskz_cvtps_ph(-1, bits<__m512>(f), _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  using U = Vec<uint32_t, N>;
  const U all = bits<U>(f);
  const U sign = (all >> 16) & 0x8000;
  const U x = all & 0x7fffffff;
  // Normal: rebase the exponent and round; a carry into the exponent is right, up to infinity.
  const U normal = (x - 0x38000000u + 0xfff + ((x >> 13) & 1)) >> 13;
  // Subnormal: adding 0.5 aligns the mantissa so that the addition itself rounds.
  const U tiny = bits<U>(bits<Vec<float, N>>(x) + 0.5f) - 0x3f000000u;
  U out = (x < 0x38800000u) ? tiny : normal;
  out = (x >= 0x477ff000u) ? (U{} + 0x7c00u) : out;
  out = (x > 0x7f800000u) ? (0x7e00u | ((x >> 13) & 0x3ff)) : out;
  return __builtin_convertvector(out | sign, Vec<uint16_t, N>);
}

// float32 -> bfloat16, to nearest even; a NaN stays one, and becomes quiet.
template <int N>
FK_INLINE Vec<uint16_t, N> narrow_bfloat(Vec<float, N> f) {
  using U = Vec<uint32_t, N>;
  const U x = bits<U>(f);
  const U rounded = (x + 0x7fff + ((x >> 16) & 1)) >> 16;
  const U nan = (x >> 16) | 0x40;
  return __builtin_convertvector((f == f) ? rounded : nan, Vec<uint16_t, N>);
}

// Load elements i.. of memory of dtype D as a vector of T; low precision goes through float32.
template <class T, DType D>
FK_INLINE Vec<T, kLanes<T>> load(const void* base, int64_t i) {
  constexpr int N = kLanes<T>;
  if constexpr (D == DType::kFloat64) {
    const auto v = load_raw<Vec<double, N>>(static_cast<const double*>(base) + i);
    return __builtin_convertvector(v, Vec<T, N>);
  } else if constexpr (D == DType::kFloat32) {
    const auto v = load_raw<Vec<float, N>>(static_cast<const float*>(base) + i);
    return to_compute<T, N>(v);
  } else {
    const auto h = load_raw<Vec<uint16_t, N>>(static_cast<const uint16_t*>(base) + i);
    Vec<float, N> f;
    if constexpr (D == DType::kFloat16) {
      f = widen_half<N>(h);
    } else {
      f = bits<Vec<float, N>>(widen<N>(h) << 16);
    }
    return to_compute<T, N>(f);
  }
}

template <class T, DType D>
FK_INLINE void store(void* base, int64_t i, Vec<T, kLanes<T>> v) {
  constexpr int N = kLanes<T>;
  if constexpr (D == DType::kFloat64) {
    store_raw(static_cast<double*>(base) + i, __builtin_convertvector(v, Vec<double, N>));
  } else {
    const auto f = __builtin_convertvector(v, Vec<float, N>);
    if constexpr (D == DType::kFloat32) {
      store_raw(static_cast<float*>(base) + i, f);
    } else if constexpr (D == DType::kFloat16) {
      store_raw(static_cast<uint16_t*>(base) + i, narrow_half<N>(f));
    } else {
      store_raw(static_cast<uint16_t*>(base) + i, narrow_bfloat<N>(f));
    }
  }
}

template <class V>
FK_INLINE V square_root(V v) {
#if FK_VECTOR_BYTES == 64
  if constexpr (sizeof(v[0]) == 4)
    return bits<V>(_mm512_maskz_sqrt_ps(-1, bits<__m512>(v)));
  else
    return bits<V>(_mm512_maskz_sqrt_pd(-1, bits<__m512d>(v)));
#elif FK_VECTOR_BYTES == 32
  if constexpr (sizeof(v[0]) == 4)
    return bits<V>(_mm256_sqrt_ps(bits<__m256>(v)));
  else
    return bits<V>(_mm256_sqrt_pd(bits<__m256d>(v)));
#else
  for (unsigned i = 0; i < sizeof(V) / sizeof(v[0]); ++i) v[i] = std::sqrt(v[i]);
  return v;
#endif
}

// torch.maximum: a NaN on either side wins.
template <class V>
FK_INLINE V maximum(V a, V b) {
  return (a > b) ? a : ((a == a) ? b : a);
}
