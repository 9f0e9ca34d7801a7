// Projections in bfloat16 whose result for a row does not depend on the other rows.
//
// Every output is one sum in float32 over pairs of inputs in rising order, whatever the number of rows and of threads:
// a row's result is the same to the bit alone, in any batch and in any chunk of a prompt.

#include <algorithm>

#include "bf16.h"

namespace {

using legato::bf16;

constexpr int64_t kPanel = 32;  // columns of a panel: two registers of sums
constexpr int kTile = 12;       // rows of a tile: 24 registers of sums, of 32

struct Linear {
  const bf16* x;         // [rows, inputs]
  const bf16* weight;    // [panels, pairs, kPanel, 2]: what `linear_pack_bf16` made
  const bf16* bias;      // [outputs] or null
  const bf16* residual;  // [rows, outputs] or null
  bf16* out;             // [rows, outputs]
  int64_t rows, inputs, outputs;
};

inline __m512bh pair_of(const bf16* x) {
  int32_t both;
  __builtin_memcpy(&both, x, sizeof both);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
}

inline __m512bh pairs_at(const bf16* panel) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(panel)); }

void finish(const Linear& job, int64_t row, int64_t column, __m512 sum) {
  if (column >= job.outputs) return;
  const __mmask16 lanes = legato::first_lanes(job.outputs - column);
  if (job.bias) sum = _mm512_add_ps(sum, legato::load(job.bias + column, lanes));
  const int64_t at = row * job.outputs + column;
  if (job.residual) sum = _mm512_add_ps(sum, legato::load(job.residual + at, lanes));
  legato::store(job.out + at, lanes, sum);
}

template <int kRows>
void compute_tile(const Linear& job, int64_t first_row, int64_t panel) {
  const int64_t pairs = (job.inputs + 1) / 2;
  const bf16* weight = job.weight + panel * pairs * kPanel * 2;
  const bf16* x = job.x + first_row * job.inputs;
  __m512 left[kRows], right[kRows];
  for (int row = 0; row < kRows; ++row) left[row] = right[row] = _mm512_setzero_ps();
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const __m512bh a = pairs_at(weight + pair * kPanel * 2), b = pairs_at(weight + pair * kPanel * 2 + kPanel);
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      const __m512bh both = pair_of(x + row * job.inputs + pair * 2);
      left[row] = _mm512_dpbf16_ps(left[row], a, both);
      right[row] = _mm512_dpbf16_ps(right[row], b, both);
    }
  }
  for (int row = 0; row < kRows; ++row) {
    finish(job, first_row + row, panel * kPanel, left[row]);
    finish(job, first_row + row, panel * kPanel + kPanel / 2, right[row]);
  }
}

template <int kRows>
void compute_rest(const Linear& job, int64_t first_row, int64_t panel, int64_t rows) {
  if (rows == kRows) return compute_tile<kRows>(job, first_row, panel);
  if constexpr (kRows > 1) compute_rest<kRows - 1>(job, first_row, panel, rows);
}

void compute_panel(const Linear& job, int64_t panel) {
  int64_t row = 0;
  for (; row + kTile <= job.rows; row += kTile) compute_tile<kTile>(job, row, panel);
  if (row < job.rows) compute_rest<kTile - 1>(job, row, panel, job.rows - row);
}

}  // namespace

extern "C" {

// How many numbers `linear_pack_bf16` writes.
int64_t linear_packed_size(int64_t inputs, int64_t outputs) {
  return (outputs + kPanel - 1) / kPanel * kPanel * ((inputs + 1) / 2) * 2;
}

// `weight [outputs, inputs]`, both sizes padded with zeros.
void linear_pack_bf16(const bf16* weight, int64_t inputs, int64_t outputs, bf16* packed) {
  const int64_t pairs = (inputs + 1) / 2;
#pragma omp parallel for
  for (int64_t panel = 0; panel < (outputs + kPanel - 1) / kPanel; ++panel) {
    bf16* into = packed + panel * pairs * kPanel * 2;
    for (int64_t input = 0; input < pairs * 2; ++input) {
      for (int64_t lane = 0; lane < kPanel; ++lane) {
        const int64_t output = panel * kPanel + lane;
        const bool inside = output < outputs && input < inputs;
        into[input / 2 * kPanel * 2 + lane * 2 + input % 2] = inside ? weight[output * inputs + input] : 0;
      }
    }
  }
}

// `inputs` is even. `out` may be `residual`.
void linear_bf16(const bf16* x, int64_t rows, int64_t inputs, const bf16* weight, int64_t outputs, const bf16* bias,
                 const bf16* residual, bf16* out) {
  const Linear job{x, weight, bias, residual, out, rows, inputs, outputs};
  const int64_t panels = (outputs + kPanel - 1) / kPanel;
#pragma omp parallel for schedule(dynamic, rows > kTile ? 1 : std::max<int64_t>(1, panels / 16))
  for (int64_t panel = 0; panel < panels; ++panel) compute_panel(job, panel);
}

}  // extern "C"
