// The logistic function of 16 numbers at a time, to 2 units in the last place.

#pragma once

#include "vectors.h"

namespace legato {

// e^x = 2^n e^r with n whole and |r| <= ln(2) / 2, where the polynomial of degree 6 is off by 3e-9. Infinities and NaN
// come out as they should.
inline __m512 accurate_exp(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-110.0f), _mm512_min_ps(_mm512_set1_ps(90.0f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  // ln(2) in two parts, of which the first times n is exact: x / ln(2) in one piece would lose bits before its point.
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
  __m512 series = _mm512_set1_ps(1.381461275741458e-3f);
  series = _mm512_fmadd_ps(series, r, _mm512_set1_ps(8.368710055947304e-3f));
  series = _mm512_fmadd_ps(series, r, _mm512_set1_ps(4.166838899254799e-2f));
  series = _mm512_fmadd_ps(series, r, _mm512_set1_ps(1.666652113199234e-1f));
  series = _mm512_fmadd_ps(series, r, _mm512_set1_ps(4.999999403953552e-1f));
  series = _mm512_fmadd_ps(_mm512_mul_ps(r, r), series, r);
  return _mm512_scalef_ps(_mm512_add_ps(series, _mm512_set1_ps(1.0f)), n);
}

// 1 / (1 + e^-x)
inline __m512 sigmoid(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(one, _mm512_add_ps(one, accurate_exp(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

}  // namespace legato
