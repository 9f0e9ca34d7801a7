// Exponentials of 16 numbers at a time; the same code for every lane, so that a lane's result never depends on the others.

#pragma once

#include <immintrin.h>

namespace legato {

constexpr float kNothing = -160.0f;  // two to the power of it or of less is 0

// 2^x to 2 ulp, exactly 1 at 0. The polynomial is the one of degree 6 whose largest relative error over [-1/2, 1/2] is
// least (1.9e-9).
inline __m512 exp2_of_finite(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_sub_ps(x, whole);
  __m512 value = _mm512_set1_ps(0x1.41d334p-13f);
  value = _mm512_fmadd_ps(value, part, _mm512_set1_ps(0x1.5f456ap-10f));
  value = _mm512_fmadd_ps(value, part, _mm512_set1_ps(0x1.3b2dbcp-7f));
  value = _mm512_fmadd_ps(value, part, _mm512_set1_ps(0x1.c6aed4p-5f));
  value = _mm512_fmadd_ps(value, part, _mm512_set1_ps(0x1.ebfbdap-3f));
  value = _mm512_fmadd_ps(value, part, _mm512_set1_ps(0x1.62e430p-1f));
  value = _mm512_fmadd_ps(value, part, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(value, whole);
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
