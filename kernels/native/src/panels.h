// What projections have in common: weights lie in panels of outputs, and a sum in float32 becomes an output.

#pragma once

#include <algorithm>

#include "bf16.h"
#include "team.h"

namespace legato {

constexpr int64_t kHalf = 16, kPanel = 2 * kHalf;  // outputs of a register of sums, and of a panel

inline int64_t num_panels(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }

// Panels that a thread takes at a time: with few rows each is short work.
inline int64_t panels_at_once(int64_t panels, bool few_rows) {
  return few_rows ? std::max<int64_t>(1, panels / 16) : 1;
}

template <typename T>
struct Outputs {
  const T* bias;      // [outputs] or null
  const T* residual;  // [rows, outputs] or null
  T* out;             // [rows, outputs]; may be `residual`
  int64_t outputs;
  int64_t stride = outputs;         // numbers from one row to the next, of `out` and `residual`
  const int64_t* places = nullptr;  // which of their rows each row is; null: they are as many, in the same order

  int64_t at(int64_t row) const { return (places ? places[row] : row) * stride; }

  // Those of the rows from this one on.
  Outputs from(int64_t row) const {
    if (places) return {bias, residual, out, outputs, stride, places + row};
    return {bias, residual ? residual + row * stride : nullptr, out + row * stride, outputs, stride};
  }
};

// 16 sums of a row become outputs from `output` on.
template <typename T>
LEGATO_OF_LANES void finish(const Outputs<T>& to, int64_t row, int64_t output, __m512 sum) {
  if (output >= to.outputs) return;
  const __mmask16 lanes = first_lanes(to.outputs - output);
  if (to.bias) sum = _mm512_add_ps(sum, load(to.bias + output, lanes));
  const int64_t at = to.at(row) + output;
  if (to.residual) sum = _mm512_add_ps(sum, load(to.residual + at, lanes));
  store(to.out + at, lanes, sum);
}

}  // namespace legato
