// What is done to a row of activations between projections and attention. A row is computed by one thread, in float32,
// and rounded once.

#pragma once

#include <cmath>
#include <type_traits>

#include "bf16.h"
#include "exp.h"
#include "sigmoid.h"

namespace legato {

template <typename X>
float sum_of_squares(const X* x, int64_t width) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < width; i += 16) {
    const __m512 value = load(x + i, first_lanes(width - i));
    sum = _mm512_fmadd_ps(value, value, sum);
  }
  return _mm512_reduce_add_ps(sum);
}

// `out` may be `x`.
template <typename X, typename W>
void rms_norm_row(const X* x, const W* weight, int64_t width, float eps, X* out) {
  const float mean = sum_of_squares(x, width) / static_cast<float>(width);
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < width; i += 16) {
    const __mmask16 lanes = first_lanes(width - i);
    store(out + i, lanes, _mm512_mul_ps(_mm512_mul_ps(load(x + i, lanes), scale), load(weight + i, lanes)));
  }
}

template <typename X>
void add_row(const X* left, const X* right, int64_t width, X* out) {
  for (int64_t i = 0; i < width; i += 16) {
    const __mmask16 lanes = first_lanes(width - i);
    store(out + i, lanes, _mm512_add_ps(load(left + i, lanes), load(right + i, lanes)));
  }
}

// A half of a head turns with the other one; all point to `half` numbers.
template <typename X>
void rotate_half(const X* x, const X* other, const X* cos, const X* signed_sin, int64_t half, X* out) {
  for (int64_t i = 0; i < half; i += 16) {
    const __mmask16 lanes = first_lanes(half - i);
    const __m512 turned = _mm512_mul_ps(load(other + i, lanes), load(signed_sin + i, lanes));
    store(out + i, lanes, _mm512_fmadd_ps(load(x + i, lanes), load(cos + i, lanes), turned));
  }
}

// All point to `head_dim` numbers; `out` is not `x`.
template <typename X>
void rotate_head(const X* x, const X* cos, const X* signed_sin, int64_t head_dim, X* out) {
  const int64_t half = head_dim / 2;
  rotate_half(x, x + half, cos, signed_sin, half, out);
  rotate_half(x + half, x, cos + half, signed_sin + half, half, out + half);
}

// Of gates of type X. In bfloat16 to 1.7e-4 where tiles multiply: an exponential and a division in full, of which
// rounding leaves nothing, would take a tenth of the time that a prompt's products take.
template <typename X>
__m512 silu(__m512 gate, __m512 up) {
#ifdef __AMX_BF16__
  if constexpr (std::is_same_v<X, bf16>) {
    const __m512 power = rough_exp2_of_finite(_mm512_mul_ps(gate, _mm512_set1_ps(-1.44269504f)));
    const __m512 share = _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1.0f), power));
    return _mm512_mul_ps(_mm512_mul_ps(gate, share), up);
  }
#endif
  return _mm512_mul_ps(_mm512_mul_ps(gate, sigmoid(gate)), up);
}

// 0.5 (1 + tanh(u)) is sigmoid(2u), with u = sqrt(2 / pi) (x + 0.044715 x³) (arXiv:1606.08415).
inline __m512 gelu_tanh(__m512 x, __m512 up) {
  const __m512 square = _mm512_mul_ps(x, x);
  const __m512 cubic = _mm512_fmadd_ps(square, _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
  const __m512 inner = _mm512_mul_ps(_mm512_set1_ps(1.5957691216057308f), _mm512_mul_ps(x, cubic));
  return _mm512_mul_ps(_mm512_mul_ps(x, sigmoid(inner)), up);
}

// gpt-oss's; NaN stays NaN.
inline __m512 swigluoai(__m512 gate, __m512 up) {
  const __m512 limit = _mm512_set1_ps(7.0f);
  gate = _mm512_min_ps(limit, gate);
  up = _mm512_max_ps(_mm512_set1_ps(-7.0f), _mm512_min_ps(limit, up));
  const __m512 activated = _mm512_mul_ps(gate, sigmoid(_mm512_mul_ps(_mm512_set1_ps(1.702f), gate)));
  return _mm512_mul_ps(activated, _mm512_add_ps(up, _mm512_set1_ps(1.0f)));
}

template <__m512 (*kGated)(__m512, __m512), typename X>
void gate_row(const X* gate, const X* up, int64_t width, X* out) {
  for (int64_t i = 0; i < width; i += 16) {
    const __mmask16 lanes = first_lanes(width - i);
    store(out + i, lanes, kGated(load(gate + i, lanes), load(up + i, lanes)));
  }
}

}  // namespace legato
