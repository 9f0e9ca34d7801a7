// The functions of elementwise.h for each pair of types.

#include "elementwise.h"

using legato::bf16;

extern "C" {

#define LEGATO_NORMS(NAME, X, W)                                                                                    \
  void rms_norm_##NAME(const X* x, int64_t rows, int64_t row_stride, int64_t heads, int64_t width, const W* weight, \
                       float eps, X* out) {                                                                         \
    legato::rms_norm(x, rows, row_stride, heads, width, weight, eps, out);                                          \
  }                                                                                                                 \
  void add_rms_norm_##NAME(const X* residual, const X* y, int64_t rows, int64_t width, const W* weight, float eps,  \
                           X* normed, X* total) {                                                                   \
    legato::add_rms_norm(residual, y, rows, width, weight, eps, normed, total);                                     \
  }

LEGATO_NORMS(bf16_by_bf16, bf16, bf16)
LEGATO_NORMS(bf16_by_f32, bf16, float)
LEGATO_NORMS(f32_by_bf16, float, bf16)
LEGATO_NORMS(f32_by_f32, float, float)

// `head_dim` is even. `cos`, `signed_sin` are contiguous.
#define LEGATO_ROTATION(NAME, X)                                                                             \
  void rotate_and_store_##NAME(const X* qk, int64_t qk_stride, const X* v, int64_t v_stride, const X* cos,   \
                               const X* signed_sin, int64_t tokens, int64_t num_heads, int64_t num_kv_heads, \
                               int64_t head_dim, int64_t value_width, const int64_t* slots, X* q, X* k,      \
                               X* keys, X* values, int64_t slot_stride) {                                    \
    legato::rotate_and_store<X>({qk, v, cos, signed_sin, qk_stride, v_stride, num_heads, num_kv_heads,       \
                                 head_dim, value_width, slots, q, k, keys, values, slot_stride},             \
                                tokens);                                                                     \
  }

LEGATO_ROTATION(bf16, bf16)
LEGATO_ROTATION(f32, float)

#define LEGATO_GATES(NAME, X)                                                                                    \
  void gated_activation_##NAME(legato::Activation activation, const X* gate_up, int64_t rows, int64_t width, X* out) { \
    legato::gated_activation(activation, gate_up, rows, width, out);                                                   \
  }

LEGATO_GATES(bf16, bf16)
LEGATO_GATES(f32, float)

}  // extern "C"
