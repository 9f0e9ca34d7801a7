// Exponentials of 16 numbers at a time, by the same code for every lane: a result never depends on the other lanes.

#pragma once

#include "vectors.h"

namespace legato {

constexpr float kNothing = -160.0f;  // two to the power of it, or of anything below -126, is 0

// A polynomial in x, from the highest coefficient on.
template <size_t kCount>
inline __attribute__((always_inline)) __m512 polynomial(const float (&coefficients)[kCount], __m512 x) {
  __m512 value = _mm512_set1_ps(coefficients[0]);
#pragma GCC unroll 8
  for (size_t i = 1; i < kCount; ++i) value = _mm512_fmadd_ps(value, x, _mm512_set1_ps(coefficients[i]));
  return value;
}

// 2^x, exactly 1 at 0. The coefficients are those for [-1/2, 1/2] with the least relative error.
template <size_t kCount>
inline __attribute__((always_inline)) __m512 exp2_of_finite(__m512 x, const float (&coefficients)[kCount]) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return times_two_to(polynomial(coefficients, _mm512_sub_ps(x, whole)), whole);
}

// To 2 ulp: the polynomial is exact to 1.9e-9.
inline __m512 exp2_of_finite(__m512 x) {
  constexpr float kCoefficients[] = {0x1.41d334p-13f, 0x1.5f456ap-10f, 0x1.3b2dbcp-7f, 0x1.c6aed4p-5f,
                                     0x1.ebfbdap-3f,  0x1.62e430p-1f,  1.0f};
  return exp2_of_finite(x, kCoefficients);
}

// To 1.1e-4, for what is rounded to bfloat16 (2e-3).
inline __m512 rough_exp2_of_finite(__m512 x) {
  constexpr float kCoefficients[] = {0x1.c2a218p-5f, 0x1.f00c4ep-3f, 0x1.62f5fap-1f, 1.0f};
  return exp2_of_finite(x, kCoefficients);
}

// Also of -infinity.
inline __m512 exp2(__m512 x) { return exp2_of_finite(_mm512_max_ps(_mm512_set1_ps(kNothing), x)); }

// (1 - e) / (1 + e) with e = exp(-2 |x|), which cannot overflow: to 1e-7 absolute, not relative.
inline __m512 tanh(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 e = exp2(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2.8853900817779268f)));
  const __m512 size = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
  const __m512 sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0f));
  return _mm512_or_ps(size, sign);
}

}  // namespace legato
