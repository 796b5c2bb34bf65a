// Eight float lanes, once with AVX2 and once in plain C++, with the same bits from both: every
// operation is exact or correctly rounded lane by lane, and sums across lanes have one fixed order.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef EAGLEJAX_AVX2
#include <immintrin.h>
#endif

namespace eaglejax::EAGLEJAX_ISA {

#ifdef EAGLEJAX_AVX2

struct F8 {
  __m256 v;
};
inline F8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, F8 a) { _mm256_storeu_ps(p, a.v); }
inline F8 set1(float x) { return {_mm256_set1_ps(x)}; }
inline F8 operator+(F8 a, F8 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F8 operator-(F8 a, F8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F8 operator*(F8 a, F8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F8 operator/(F8 a, F8 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F8 fma(F8 a, F8 b, F8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
// The second operand where either is not a number.
inline F8 max(F8 a, F8 b) { return {_mm256_max_ps(a.v, b.v)}; }
// The larger magnitude; not-a-number counts as the largest, so that it is never lost.
inline F8 max_magnitude(F8 a, F8 b) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  return {_mm256_castsi256_ps(_mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(a.v), mask),
                                               _mm256_and_si256(_mm256_castps_si256(b.v), mask)))};
}
inline F8 round_even(F8 a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline bool any_greater(F8 a, F8 b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ)) != 0;
}
// c where a > b, else 0.
inline F8 where_greater(F8 a, F8 b, F8 c) {
  return {_mm256_and_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ), c.v)};
}
// 2**n for whole n in [-126, 127]; some number where n is none.
inline F8 exp2_int(F8 n) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(biased, 23))};
}
// Rounds 32 floats to 8-bit levels, not-a-number to 0; returns the sum of the levels.
inline int32_t round_levels(const F8* x, int8_t* levels) {
  const auto whole = [](F8 q) {
    const __m256 number = _mm256_cmp_ps(q.v, q.v, _CMP_ORD_Q);
    return _mm256_and_si256(_mm256_cvtps_epi32(q.v), _mm256_castps_si256(number));
  };
  const __m256i words = _mm256_packs_epi16(_mm256_packs_epi32(whole(x[0]), whole(x[1])),
                                           _mm256_packs_epi32(whole(x[2]), whole(x[3])));
  // Packing works in halves of a vector: put the groups of four back in order.
  const __m256i bytes =
      _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(levels), bytes);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
  const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  __m128i total = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
  total = _mm_add_epi32(total, _mm_shuffle_epi32(total, 0x4e));
  total = _mm_add_epi32(total, _mm_shuffle_epi32(total, 0xb1));
  return _mm_cvtsi128_si32(total);
}
inline F8 load_half(const uint8_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}

#else

struct F8 {
  float v[8];
};
template <typename Op>
inline F8 each(Op op) {
  F8 r;
  for (int i = 0; i < 8; ++i) r.v[i] = op(i);
  return r;
}
inline F8 load(const float* p) {
  return each([&](int i) { return p[i]; });
}
inline void store(float* p, F8 a) {
  for (int i = 0; i < 8; ++i) p[i] = a.v[i];
}
inline F8 set1(float x) {
  return each([&](int) { return x; });
}
inline F8 operator+(F8 a, F8 b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline F8 operator-(F8 a, F8 b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline F8 operator*(F8 a, F8 b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline F8 operator/(F8 a, F8 b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline F8 fma(F8 a, F8 b, F8 c) {
  return each([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
inline F8 max(F8 a, F8 b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline bool any_greater(F8 a, F8 b) {
  bool any = false;
  for (int i = 0; i < 8; ++i) any = any || a.v[i] > b.v[i];
  return any;
}
inline F8 where_greater(F8 a, F8 b, F8 c) {
  return each([&](int i) { return a.v[i] > b.v[i] ? c.v[i] : 0.0f; });
}
inline int32_t magnitude_bits(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x7fffffff;
}
inline F8 max_magnitude(F8 a, F8 b) {
  return each([&](int i) {
    return std::fabs(magnitude_bits(a.v[i]) > magnitude_bits(b.v[i]) ? a.v[i] : b.v[i]);
  });
}
inline F8 round_even(F8 a) {
  return each([&](int i) { return std::nearbyint(a.v[i]); });
}
inline F8 exp2_int(F8 n) {
  return each([&](int i) {
    const int32_t whole = n.v[i] == n.v[i] ? static_cast<int32_t>(n.v[i]) : 0;
    const uint32_t bits = static_cast<uint32_t>(whole + 127) << 23;
    float r;
    std::memcpy(&r, &bits, 4);
    return r;
  });
}
inline int32_t round_levels(const F8* x, int8_t* levels) {
  int32_t total = 0;
  for (int i = 0; i < 32; ++i) {
    const float q = std::nearbyint(x[i / 8].v[i % 8]);
    const int32_t level = q == q ? static_cast<int32_t>(q) : 0;
    levels[i] = static_cast<int8_t>(level);
    total += level;
  }
  return total;
}
inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 0) {  // zero and subnormals: mantissa * 2**-24
    const float r = std::ldexp(static_cast<float>(mantissa), -24);
    return sign ? -r : r;
  }
  const uint32_t bits =
      sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (mantissa << 13);
  float r;
  std::memcpy(&r, &bits, 4);
  return r;
}
inline F8 load_half(const uint8_t* p) {
  return each([&](int i) {
    uint16_t h;
    std::memcpy(&h, p + 2 * i, 2);
    return half_to_float(h);
  });
}

#endif

// ((0+4)+(2+6)) + ((1+5)+(3+7)), whatever the instruction set.
inline float sum(F8 a) {
  float v[8];
  store(v, a);
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}
// The sums of four vectors, each in that order, times a factor.
inline void sum4(F8 a, F8 b, F8 c, F8 d, float factor, float* out) {
#ifdef EAGLEJAX_AVX2
  const auto halves = [](F8 x, F8 y) {  // x0+x4 .. x3+x7 | y0+y4 .. y3+y7
    return _mm256_add_ps(_mm256_permute2f128_ps(x.v, y.v, 0x20),
                         _mm256_permute2f128_ps(x.v, y.v, 0x31));
  };
  const __m256 p = halves(a, c), q = halves(b, d);
  const __m256 pairs = _mm256_add_ps(_mm256_shuffle_ps(p, q, 0x44), _mm256_shuffle_ps(p, q, 0xee));
  const __m256 all = _mm256_add_ps(pairs, _mm256_movehdup_ps(pairs));
  // Sums of a and b are in the even lanes of the lower half, of c and d in those of the upper one.
  const __m128 sums =
      _mm_shuffle_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1), 0x88);
  _mm_storeu_ps(out, _mm_mul_ps(sums, _mm_set1_ps(factor)));
#else
  out[0] = sum(a) * factor, out[1] = sum(b) * factor;
  out[2] = sum(c) * factor, out[3] = sum(d) * factor;
#endif
}
// The largest magnitude of all lanes, not-a-number if one is.
inline float largest_magnitude(F8 a) {
  float v[8];
  store(v, a);
  uint32_t most = 0;
  for (int i = 0; i < 8; ++i) {
    uint32_t bits;
    std::memcpy(&bits, v + i, 4);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  float m;
  std::memcpy(&m, &most, 4);
  return m;
}

// exp(x) for x <= 88, relative error about 2e-7; x below -87 counts as -87, not-a-number stays.
// Cody-Waite reduction by ln 2, then a degree-6 polynomial on [-ln2/2, ln2/2] (Cephes' expf).
inline F8 exp(F8 x) {
  const F8 clamped = max(set1(-87.0f), x);
  const F8 n = round_even(clamped * set1(1.44269504088896341f));
  F8 r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  F8 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r) + set1(1.0f);
  return p * exp2_int(n);
}

}  // namespace eaglejax::EAGLEJAX_ISA
