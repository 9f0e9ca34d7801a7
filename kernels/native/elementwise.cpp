// Norms, rotary embeddings and gated activations over the rows of a batch.

#include "elementwise.h"

#include <cstring>

namespace {

using legato::bf16;
using legato::kWorthThreads;

constexpr int64_t kGateColumns = 1024;  // of one piece of work: a single row may be wide enough for all threads

// `x [rows, heads, width]`, rows `row_stride` apart; `weight [heads, width]`; `out` contiguous.
template <typename X, typename W>
void rms_norm(const X* x, int64_t rows, int64_t row_stride, int64_t heads, int64_t width, const W* weight, float eps,
              X* out) {
#pragma omp parallel for if (rows * heads * width >= kWorthThreads)
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t at = head * width;
      legato::rms_norm_row(x + row * row_stride + at, weight + at, width, eps, out + row * heads * width + at);
    }
  }
}

// All `[rows, width]`; the norm is that of the rounded sum.
template <typename X, typename W>
void add_rms_norm(const X* residual, const X* y, int64_t rows, int64_t width, const W* weight, float eps, X* normed,
                  X* total) {
#pragma omp parallel for if (rows * width >= kWorthThreads)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = row * width;
    legato::add_row(residual + at, y + at, width, total + at);
    legato::rms_norm_row(total + at, weight, width, eps, normed + at);
  }
}

template <typename X>
struct Rotation {
  const X *qk, *v, *cos, *signed_sin;  // [T, Q + H, D], [T, H, D], [T, D], [T, D]
  int64_t qk_stride, v_stride;         // from token to token
  int64_t num_heads, num_kv_heads, head_dim;
  const int64_t* slots;  // [T]
  X *q, *k;              // [T, Q, D], [T, H, D]
  X *keys, *values;      // [slots, H, D]

  void rotate(int64_t token, int64_t head, X* out) const {
    const int64_t at = token * head_dim;
    legato::rotate_head(qk + token * qk_stride + head * head_dim, cos + at, signed_sin + at, head_dim, out);
  }

  void take(int64_t token) const {
    for (int64_t head = 0; head < num_heads; ++head) rotate(token, head, q + (token * num_heads + head) * head_dim);
    const int64_t kv_width = num_kv_heads * head_dim;
    X* own = k + token * kv_width;
    for (int64_t head = 0; head < num_kv_heads; ++head) rotate(token, num_heads + head, own + head * head_dim);
    if (slots[token] < 0) return;  // nobody's row
    std::memcpy(keys + slots[token] * kv_width, own, kv_width * sizeof(X));
    std::memcpy(values + slots[token] * kv_width, v + token * v_stride, kv_width * sizeof(X));
  }
};

template <typename X>
void rotate_and_store(const Rotation<X>& rotation, int64_t tokens) {
  const int64_t width = (rotation.num_heads + 2 * rotation.num_kv_heads) * rotation.head_dim;
#pragma omp parallel for if (tokens * width >= kWorthThreads)
  for (int64_t token = 0; token < tokens; ++token) rotation.take(token);
}

// `gate_up [rows, 2 * width]`, `out [rows, width]`.
template <__m512 (*kActivation)(__m512), typename X>
void gated_activation(const X* gate_up, int64_t rows, int64_t width, X* out) {
#pragma omp parallel for collapse(2) if (rows * width >= kWorthThreads)
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < width; column += kGateColumns) {
      const X* gate = gate_up + row * width * 2 + column;
      const int64_t count = width - column < kGateColumns ? width - column : kGateColumns;
      legato::gate_row<kActivation>(gate, gate + width, count, out + row * width + column);
    }
  }
}

}  // namespace

extern "C" {

#define LEGATO_NORMS(NAME, X, W)                                                                                    \
  void rms_norm_##NAME(const X* x, int64_t rows, int64_t row_stride, int64_t heads, int64_t width, const W* weight, \
                       float eps, X* out) {                                                                         \
    rms_norm(x, rows, row_stride, heads, width, weight, eps, out);                                                  \
  }                                                                                                                 \
  void add_rms_norm_##NAME(const X* residual, const X* y, int64_t rows, int64_t width, const W* weight, float eps,  \
                           X* normed, X* total) {                                                                   \
    add_rms_norm(residual, y, rows, width, weight, eps, normed, total);                                             \
  }

LEGATO_NORMS(bf16_by_bf16, bf16, bf16)
LEGATO_NORMS(bf16_by_f32, bf16, float)
LEGATO_NORMS(f32_by_bf16, float, bf16)
LEGATO_NORMS(f32_by_f32, float, float)

// `head_dim` is even. `cos`, `signed_sin` are contiguous.
#define LEGATO_ROTATION(NAME, X)                                                                                      \
  void rotate_and_store_##NAME(const X* qk, int64_t qk_stride, const X* v, int64_t v_stride, const X* cos,           \
                               const X* signed_sin, int64_t tokens, int64_t num_heads, int64_t num_kv_heads,         \
                               int64_t head_dim, const int64_t* slots, X* q, X* k, X* keys, X* values) {             \
    rotate_and_store(Rotation<X>{qk, v, cos, signed_sin, qk_stride, v_stride, num_heads, num_kv_heads, head_dim,     \
                                 slots, q, k, keys, values},                                                         \
                     tokens);                                                                                        \
  }

LEGATO_ROTATION(bf16, bf16)
LEGATO_ROTATION(f32, float)

#define LEGATO_GATES(NAME, X)                                                               \
  void gated_silu_##NAME(const X* gate_up, int64_t rows, int64_t width, X* out) {           \
    gated_activation<legato::silu>(gate_up, rows, width, out);                              \
  }                                                                                         \
  void gated_gelu_tanh_##NAME(const X* gate_up, int64_t rows, int64_t width, X* out) {      \
    gated_activation<legato::gelu_tanh>(gate_up, rows, width, out);                         \
  }

LEGATO_GATES(bf16, bf16)
LEGATO_GATES(f32, float)

}  // extern "C"
