// What layers.cpp calls of the other files; they include this, too, so that a compiler sees both sides.

#pragma once

#include "bf16.h"

namespace legato {
struct Plan;  // of attention_work.h
}

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

// `softcap` is 0 where there is none; `out [rows, num_heads, head_dim]`, contiguous. In bfloat16 head_dim is even.
void attention_bf16(const legato::Plan* plan, const legato::bf16* queries, int64_t row_stride, int64_t num_heads,
                    const legato::bf16* cache, int64_t group, float scale, float softcap, legato::bf16* out);
void attention_f32(const legato::Plan* plan, const float* queries, int64_t row_stride, int64_t num_heads,
                   const float* cache, int64_t group, float scale, float softcap, float* out);

}  // extern "C"
