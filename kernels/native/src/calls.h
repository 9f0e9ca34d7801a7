// What layers.cpp and experts.cpp call of the other files; they include this, too, so that a compiler sees both sides.

#pragma once

#include <vector>

#include "bf16.h"

namespace legato {

struct Plan;  // of attention_work.h

// Those of kernels.interface, in their order.
enum class Activation : int64_t { kSilu, kGeluTanh, kSwigluoai };

// This and the following: those of kernels/native/linear.py and experts.py, field by field.
struct Projection {
  const void *weight, *bias;  // packed; null where there is none
  int64_t inputs, outputs;
  int64_t bits, group, lowest;  // of a quantised weight; no bits: it is none
  bool wide_factors, has_minimums;
  int64_t x_bytes;
};

// Projections of equal sizes. Of all `count` experts, `held` are here, from `first` on: what the others would make of a
// row is left out.
struct Experts {
  Projection router;
  const Projection *gate_up, *down;  // [held]; if quantised, by groups of one size
  int64_t count, first, held, per_row, groups, groups_per_row;
  Activation activation;
  const float* correction;  // [count] or null
  float scale;
  bool normalised;
  bool wide_router;  // in float32, beside experts in bfloat16
};

// Rows that lie side by side, `starts[i]` to `starts[i + 1]` of them for the projection i of `count`.
struct RowGroups {
  const Projection* projections;
  const int64_t* starts;
  int64_t count;
};

// Rows of `x [rows, inputs]` by a projection, and to them `residual`, if there is one, which `out` may be. Both are
// [rows, outputs], or, with `places`, rows of `stride` numbers, of which these are the ones that ours come to.
struct Product {
  const Projection* by;
  const void* x;
  int64_t rows;
  const void* residual;
  void* out;
  const int64_t* places = nullptr;
  int64_t stride = 0;
};

// Any number of them, of any sizes, that do not depend on each other; the last argument names their type.
void products(const Product* products, int64_t count, bf16);
void products(const Product* products, int64_t count, float);

// Of memory that is read soon: a projection of many rows asks for it while it computes, since adapters of few rows each
// take as long as reading their weights does.
struct Stretch {
  const void* first;
  int64_t lines;  // of 64 bytes
};
using Stretches = std::vector<Stretch>;

// This and the following: those of kernels/native/adapters.py, field by field. What an adapter adds to a projection, or
// to several side by side: to the outputs from `first_output` on what is made of the ranks from `first_rank` on.
struct Up {
  Projection by;
  int64_t first_rank, first_output;
};

struct LowRank {
  Projection down;
  Stretch weights;  // all of them, side by side
  const Up* ups;  // [num_ups], none where the adapter leaves the projection alone
  int64_t num_ups;
};

// The projections of a layer that adapters add to.
enum Place : int64_t { kQkv, kOutput, kGateUp, kDown, kPlaces };

// Which adapter each row of a step has; -1: none.
struct Adapters {
  const int64_t* of_row;
  const LowRank* const* low_ranks;  // of each adapter, [layers, kPlaces]
  int64_t count;
};

// The weights that `add_adapters` reads at that place; good until the thread asks again.
const Stretches& adapters_soon(const Adapters& adapters, int64_t layer, Place place);

// To `y [rows, outputs]`, in place, what the adapters of the step's rows from `first_row` on make of `x [rows, ..]`.
void add_adapters(const Adapters& adapters, int64_t layer, Place place, int64_t first_row, int64_t rows, const bf16* x,
                  bf16* y, int64_t outputs);
void add_adapters(const Adapters& adapters, int64_t layer, Place place, int64_t first_row, int64_t rows, const float* x,
                  float* y, int64_t outputs);

// As `linear_bf16` and `linear_f32` below; memory is asked for what is read `soon`.
void linear(const Product& product, const Stretches& soon, bf16);
void linear(const Product& product, const Stretches& soon, float);

// Each group's rows of `x [rows, inputs]` by its projection to gates and, after all of them, to what these let through,
// and the activation of both, `out [rows, outputs / 2]`: with the bits of one after the other. False: not of this here.
bool linear_gated(const RowGroups& groups, Activation activation, const bf16* x, bf16* out);
inline bool linear_gated(const RowGroups&, Activation, const float*, float*) { return false; }

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

// In bfloat16, `inputs` is even. `weight` is what `linear_pack_*` made; `bias`, `residual` may be null, and `out` may
// be `residual`.
void linear_bf16(const legato::bf16* x, int64_t rows, int64_t inputs, const legato::bf16* weight, int64_t outputs,
                 const legato::bf16* bias, const legato::bf16* residual, legato::bf16* out);
void linear_f32(const float* x, int64_t rows, int64_t inputs, const float* weight, int64_t outputs, const float* bias,
                const float* residual, float* out);

// `packed` is what `quantised_pack` made with the same form; activations are rounded to 1 or 2 `x_bytes`; the rest as
// above.
void quantised_linear(const legato::bf16* x, int64_t rows, int64_t inputs, const uint8_t* packed, int64_t outputs,
                      int64_t group, int64_t bits, int64_t lowest, bool wide_factors, bool has_minimums,
                      int64_t x_bytes, const legato::bf16* bias, const legato::bf16* residual, legato::bf16* out);

// A mixture of `x [rows, E]`, and of `residual`, if there is one; `out` may be `residual`.
void experts_bf16(const legato::Experts* experts, const legato::bf16* x, int64_t rows, const legato::bf16* residual,
                  legato::bf16* out);
void experts_f32(const legato::Experts* experts, const float* x, int64_t rows, const float* residual, float* out);

// `softcap` is 0 where there is none, `sinks [num_heads]` may be null; `out [rows, num_heads, head_dim]`, contiguous.
// In bfloat16 head_dim is even.
void attention_bf16(const legato::Plan* plan, const legato::bf16* queries, int64_t row_stride, int64_t num_heads,
                    const legato::bf16* cache, int64_t group, float scale, float softcap, const float* sinks,
                    legato::bf16* out);
void attention_f32(const legato::Plan* plan, const float* queries, int64_t row_stride, int64_t num_heads,
                   const float* cache, int64_t group, float scale, float softcap, const float* sinks, float* out);

}  // extern "C"
