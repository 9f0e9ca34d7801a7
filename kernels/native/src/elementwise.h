// Norms, rotary embeddings and gated activations over the rows of a batch, by as many threads as are worth it.

#pragma once

#include <cstring>

#include "calls.h"
#include "elementwise_rows.h"
#include "team.h"

namespace legato {

// Below so many numbers, waking the other threads takes longer than they save.
constexpr int64_t kWorthThreads = 1 << 15;

constexpr int64_t kGateColumns = 1024;  // of one piece of work: a single row may be wide enough for all threads

// `x [rows, heads, width]`, rows `row_stride` apart; `weight [heads, width]`; `out` contiguous, and may be `x`.
template <typename X, typename W>
void rms_norm(const X* x, int64_t rows, int64_t row_stride, int64_t heads, int64_t width, const W* weight, float eps,
              X* out) {
  share_evenly(rows, rows * heads * width >= kWorthThreads, [&](int64_t row) {
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t at = head * width;
      rms_norm_row(x + row * row_stride + at, weight + at, width, eps, out + row * heads * width + at);
    }
  });
}

// All `[rows, width]`; the norm is that of the rounded sum. `total` may be `residual`.
template <typename X, typename W>
void add_rms_norm(const X* residual, const X* y, int64_t rows, int64_t width, const W* weight, float eps, X* normed,
                  X* total) {
  share_evenly(rows, rows * width >= kWorthThreads, [&](int64_t row) {
    const int64_t at = row * width;
    add_row(residual + at, y + at, width, total + at);
    rms_norm_row(total + at, weight, width, eps, normed + at);
  });
}

template <typename X>
struct Rotation {
  const X *qk, *v, *cos, *signed_sin;  // [T, Q + H, D], [T, value_width], [T, D], [T, D]
  int64_t qk_stride, v_stride;         // from token to token
  int64_t num_heads, num_kv_heads, head_dim, value_width;
  const int64_t* slots;    // [T]
  X *q, *k;                // [T, Q, D], [T, H, D]
  X *keys, *values;        // [slots, H, D], [slots, value_width]
  int64_t slot_stride;     // from slot to slot of either

  void rotate(int64_t token, int64_t head, X* out) const {
    const int64_t at = token * head_dim;
    rotate_head(qk + token * qk_stride + head * head_dim, cos + at, signed_sin + at, head_dim, out);
  }

  void take(int64_t token) const {
    for (int64_t head = 0; head < num_heads; ++head) rotate(token, head, q + (token * num_heads + head) * head_dim);
    const int64_t kv_width = num_kv_heads * head_dim;
    X* own = k + token * kv_width;
    for (int64_t head = 0; head < num_kv_heads; ++head) rotate(token, num_heads + head, own + head * head_dim);
    if (slots[token] < 0) return;  // nobody's row
    std::memcpy(keys + slots[token] * slot_stride, own, kv_width * sizeof(X));
    std::memcpy(values + slots[token] * slot_stride, v + token * v_stride, value_width * sizeof(X));
  }
};

template <typename X>
void rotate_and_store(const Rotation<X>& rotation, int64_t tokens) {
  const int64_t width = (rotation.num_heads + 2 * rotation.num_kv_heads) * rotation.head_dim;
  share_evenly(tokens, tokens * width >= kWorthThreads, [&](int64_t token) { rotation.take(token); });
}

template <__m512 (*kGated)(__m512, __m512), typename X>
void gate(const X* gate_up, int64_t rows, int64_t width, X* out) {
  const int64_t pieces = (width + kGateColumns - 1) / kGateColumns;
  share_evenly(rows * pieces, rows * width >= kWorthThreads, [&](int64_t piece) {
    const int64_t row = piece / pieces, column = piece % pieces * kGateColumns;
    const X* gates = gate_up + row * width * 2 + column;
    const int64_t count = width - column < kGateColumns ? width - column : kGateColumns;
    gate_row<kGated>(gates, gates + width, count, out + row * width + column);
  });
}

// `gate_up [rows, 2 * width]`, `out [rows, width]`.
template <typename X>
void gated_activation(Activation activation, const X* gate_up, int64_t rows, int64_t width, X* out) {
  switch (activation) {
    case Activation::kSilu:
      return gate<silu<X>>(gate_up, rows, width, out);
    case Activation::kGeluTanh:
      return gate<gelu_tanh>(gate_up, rows, width, out);
    case Activation::kSwigluoai:
      return gate<swigluoai>(gate_up, rows, width, out);
  }
}

}  // namespace legato
