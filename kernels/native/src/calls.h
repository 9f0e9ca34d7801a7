// What layers.cpp and experts.cpp call of the other files; they include this, too, so that a compiler sees both sides.

#pragma once

#include "bf16.h"

namespace legato {

struct Plan;  // of attention_work.h

// This and the following: those of kernels/native/linear.py and experts.py, field by field.
struct Projection {
  const void *weight, *bias;  // packed; null where there is none
  int64_t inputs, outputs;
  int64_t bits, group, lowest;  // of a quantised weight; no bits: it is none
  bool wide_factors, has_minimums;
  int64_t x_bytes;
};

// Projections of equal sizes.
struct Experts {
  Projection router;
  const Projection *gate_up, *down;  // [count]; if quantised, by groups of one size
  int64_t count, per_row, groups, groups_per_row;
  const float* correction;  // [count] or null
  float scale;
  bool normalised, gelu_tanh;
};

// Rows that lie side by side, `starts[i]` to `starts[i + 1]` of them for the projection i of `count`.
struct RowGroups {
  const Projection* projections;
  const int64_t* starts;
  int64_t count;
};

// Each group's rows of `x [rows, inputs]` by its projection.
void linear_groups(const RowGroups& groups, const bf16* x, bf16* out);
void linear_groups(const RowGroups& groups, const float* x, float* out);
void quantised_groups(const RowGroups& groups, const bf16* x, bf16* out);

inline void project(const RowGroups& groups, const bf16* x, bf16* out) {
  groups.projections->bits ? quantised_groups(groups, x, out) : linear_groups(groups, x, out);
}

inline void project(const RowGroups& groups, const float* x, float* out) { linear_groups(groups, x, out); }

}  // namespace legato

extern "C" {

// In bfloat16, `inputs` is even. `weight` is what `linear_pack_*` made; `bias`, `residual` may be null, and `out` may be
// `residual`.
void linear_bf16(const legato::bf16* x, int64_t rows, int64_t inputs, const legato::bf16* weight, int64_t outputs,
                 const legato::bf16* bias, const legato::bf16* residual, legato::bf16* out);
void linear_f32(const float* x, int64_t rows, int64_t inputs, const float* weight, int64_t outputs, const float* bias,
                const float* residual, float* out);

// `packed` is what `quantised_pack` made with the same form; activations are rounded to 1 or 2 `x_bytes`; the rest as
// above.
void quantised_linear(const legato::bf16* x, int64_t rows, int64_t inputs, const uint8_t* packed, int64_t outputs,
                      int64_t group, int64_t bits, int64_t lowest, bool wide_factors, bool has_minimums, int64_t x_bytes,
                      const legato::bf16* bias, const legato::bf16* residual, legato::bf16* out);

// A mixture of `x [rows, E]`, and of `residual`, if there is one; `out` may be `residual`.
void experts_bf16(const legato::Experts* experts, const legato::bf16* x, int64_t rows, const legato::bf16* residual,
                  legato::bf16* out);
void experts_f32(const legato::Experts* experts, const float* x, int64_t rows, const float* residual, float* out);

// `softcap` is 0 where there is none; `out [rows, num_heads, head_dim]`, contiguous. In bfloat16 head_dim is even.
void attention_bf16(const legato::Plan* plan, const legato::bf16* queries, int64_t row_stride, int64_t num_heads,
                    const legato::bf16* cache, int64_t group, float scale, float softcap, legato::bf16* out);
void attention_f32(const legato::Plan* plan, const float* queries, int64_t row_stride, int64_t num_heads,
                   const float* cache, int64_t group, float scale, float softcap, float* out);

}  // extern "C"
