// Projections of bfloat16 activations by weights of 4 or 8 bits. A row's result does not depend on the other rows.
//
// A weight is `scale * code + minimum`, the last two shared by a group of inputs. The activations of a group become
// whole numbers, of 8 or 16 bits. So a group's products are integers, and their sum is exact in any order. Groups are
// added up in float32 in rising order, whatever the number of rows and of threads.
//
// The instruction multiplies unsigned bytes, the stored codes, and signed ones, the activations: what each code is too
// high goes into a sum's first value. Activations of 16 bits are multiplied byte by byte. Many rows go by tiles, where
// there are some (quantised_tiles.h), with the same bits.

#include <vector>

#include "calls.h"
#include "panels.h"
#include "quantised_activations.h"
#include "quantised_layout.h"
#include "quantised_tiles.h"

namespace {

using namespace legato;
using Layout = QuantisedLayout;
using Job = QuantisedRows;

// Rows of a tile: sums of a group and of all groups in 24 registers, of 32.
constexpr int kTile = kRegisters == 32 ? 6 : 2;

inline __m512i four_of(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, sizeof four);
  return _mm512_set1_epi32(four);
}

template <int kRows>
struct Totals {
  __m512 left[kRows], right[kRows];
};

template <int kRows>
struct Sums {
  __m512i left[kRows], right[kRows];
};

// Sums go in and out by value: by reference they would live in memory.
template <int kRows, class Codes>
inline __attribute__((always_inline)) Sums<kRows> add_group(Sums<kRows> sums, const Layout& layout,
                                                            const uint8_t* block, const int8_t* x, int64_t stride) {
  for (int64_t quad = 0; quad < layout.group / kQuad; ++quad) {
    const Quad codes = Codes::decode(block + quad * layout.quad_bytes());
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      const __m512i four = four_of(x + row * stride + quad * kQuad);
      sums.left[row] = add_products(sums.left[row], codes.left, four);
      sums.right[row] = add_products(sums.right[row], codes.right, four);
    }
  }
  return sums;
}

template <int kRows>
inline __attribute__((always_inline)) Sums<kRows> first_sums(const Layout& layout, const int32_t* x_sums) {
  Sums<kRows> sums;
  for (int row = 0; row < kRows; ++row) {
    const int64_t sum = x_sums[row * layout.groups()];
    sums.left[row] = sums.right[row] = _mm512_set1_epi32(static_cast<int32_t>(layout.lowest * sum));
  }
  return sums;
}

template <int kRows, class Codes, int kBytes>
inline __attribute__((always_inline)) Sums<kRows> sums_of(const Layout& layout, const uint8_t* block, const int8_t* x,
                                                          const int32_t* x_sums) {
  const Sums<kRows> first = first_sums<kRows>(layout, x_sums);
  const int64_t stride = layout.inputs * kBytes;
  if constexpr (kBytes == 1) return add_group<kRows, Codes>(first, layout, block, x, stride);
  Sums<kRows> sums;
  for (int row = 0; row < kRows; ++row) sums.left[row] = sums.right[row] = _mm512_setzero_si512();
  sums = add_group<kRows, Codes>(sums, layout, block, x, stride);
  for (int row = 0; row < kRows; ++row) {
    sums.left[row] = _mm512_add_epi32(_mm512_slli_epi32(sums.left[row], 8), first.left[row]);
    sums.right[row] = _mm512_add_epi32(_mm512_slli_epi32(sums.right[row], 8), first.right[row]);
  }
  return add_group<kRows, Codes>(sums, layout, block, x + layout.group, stride);
}

template <int kRows>
inline __attribute__((always_inline)) void add_scaled(const Layout& layout, const uint8_t* scales,
                                                      const Sums<kRows>& sums, const float* x_units,
                                                      Totals<kRows>& totals) {
  const __m512 left = load_factors(layout, scales, 0), right = load_factors(layout, scales, kPanel / 2);
  for (int row = 0; row < kRows; ++row) {
    const __m512 unit = _mm512_set1_ps(x_units[row * layout.groups()]);
    totals.left[row] =
        _mm512_fmadd_ps(_mm512_mul_ps(left, unit), _mm512_cvtepi32_ps(sums.left[row]), totals.left[row]);
    totals.right[row] =
        _mm512_fmadd_ps(_mm512_mul_ps(right, unit), _mm512_cvtepi32_ps(sums.right[row]), totals.right[row]);
  }
}

template <int kRows>
inline __attribute__((always_inline)) void add_minimums(const Layout& layout, const uint8_t* minimums,
                                                        const float* x_units, const int32_t* x_sums,
                                                        Totals<kRows>& totals) {
  const __m512 left = load_factors(layout, minimums, 0), right = load_factors(layout, minimums, kPanel / 2);
  for (int row = 0; row < kRows; ++row) {
    const int64_t at = row * layout.groups();
    const __m512 sum = _mm512_set1_ps(x_units[at] * static_cast<float>(x_sums[at]));
    totals.left[row] = _mm512_fmadd_ps(left, sum, totals.left[row]);
    totals.right[row] = _mm512_fmadd_ps(right, sum, totals.right[row]);
  }
}

template <int kRows, class Codes, int kBytes>
void compute_tile(const Job& job, int64_t panel, int64_t first_row) {
  const Layout& layout = job.layout;
  Totals<kRows> totals;
  for (int row = 0; row < kRows; ++row) totals.left[row] = totals.right[row] = _mm512_setzero_ps();
  for (int64_t at = 0; at < layout.groups(); ++at) {
    const uint8_t* block = job.packed + layout.block(panel, at);
    const int64_t first = job.x.at(job.first + first_row, at);
    const float* x_units = &job.x.units[first];
    const int32_t* x_sums = &job.x.sums[first];
    const int8_t* x = job.x.values() + first * kBytes * layout.group;
    const Sums<kRows> sums = sums_of<kRows, Codes, kBytes>(layout, block, x, x_sums);
    const uint8_t* factors = block + layout.code_bytes();
    add_scaled<kRows>(layout, factors, sums, x_units, totals);
    if (layout.has_minimums) add_minimums<kRows>(layout, factors + layout.factor_bytes(), x_units, x_sums, totals);
  }
  for (int row = 0; row < kRows; ++row) {
    finish(job.to, first_row + row, panel * kPanel, totals.left[row]);
    finish(job.to, first_row + row, panel * kPanel + kPanel / 2, totals.right[row]);
  }
}

template <int kRows, class Codes, int kBytes>
void compute_rest(const Job& job, int64_t panel, int64_t first_row) {
  if (job.rows - first_row == kRows) return compute_tile<kRows, Codes, kBytes>(job, panel, first_row);
  if constexpr (kRows > 1) compute_rest<kRows - 1, Codes, kBytes>(job, panel, first_row);
}

template <class Codes, int kBytes>
void compute_panel(const Job& job, int64_t panel, int64_t next) {
  if constexpr (kByteTileProducts) {
    if (job.x.together > 1) return multiply_byte_tiles<Codes, kBytes>(job, panel, next);
  }
  int64_t row = 0;
  for (; row + kTile <= job.rows; row += kTile) compute_tile<kTile, Codes, kBytes>(job, panel, row);
  if (row < job.rows) compute_rest<kTile - 1, Codes, kBytes>(job, panel, row);
}

template <class Codes>
void compute_panel(const Job& job, int64_t panel, int64_t next) {
  job.x.bytes == 2 ? compute_panel<Codes, 2>(job, panel, next) : compute_panel<Codes, 1>(job, panel, next);
}

// By tiles, a job in parts of so many rows that a core's own cache keeps them while all panels meet them.
void add_parts(const Job& job, std::vector<Job>& parts) {
  const int64_t tile = job.x.together, row_bytes = job.layout.inputs * job.x.bytes;
  const int64_t tiles = (job.rows + tile - 1) / tile, most = std::max<int64_t>(4, kRowsAtOnce / (row_bytes * tile));
  const int64_t count = tile > 1 ? (tiles + most - 1) / most : 1;
  for (int64_t part = 0, row = 0; part < count; ++part) {
    const int64_t rows = std::min(job.rows - row, (part + 1) * tiles / count * tile - row);
    parts.push_back({job.x, job.layout, job.packed, job.first + row, rows, job.to.from(row)});
    row += rows;
  }
}

// One projection, or several of equal sizes.
void compute(const Job* first, int64_t num_whole) {
  static thread_local std::vector<Job> kept;
  std::vector<Job>& jobs = kept;  // the caller's, in every thread
  jobs.clear();
  for (int64_t i = 0; i < num_whole; ++i) add_parts(first[i], jobs);
  const auto count = static_cast<int64_t>(jobs.size());
  const int64_t panels = jobs.front().layout.panels(), threads = team_size();
  const bool few_rows = std::all_of(jobs.begin(), jobs.end(), [](const Job& job) { return job.rows <= kTile; });
  share(count * panels, panels_at_once(count * panels, few_rows), [&](int64_t at) {
    const Job& job = jobs[at / panels];
    const int64_t panel = at % panels, next = std::min(panel + threads, panels - 1);
    if (job.layout.is_float()) return compute_panel<FourBitFloats>(job, panel, next);
    job.layout.bits == 4 ? compute_panel<FourBits>(job, panel, next) : compute_panel<EightBits>(job, panel, next);
  });
}

// How many rows lie together, for so many by each of `weights` on average: those of a tile, where tiles take less time.
int64_t rows_together(int64_t rows, int64_t weights, int64_t group) {
  constexpr int64_t kSmallestGroup = 32;  // that of 16 fills a quarter of a tile
  return kByteTileProducts && group >= kSmallestGroup && rows >= kByteTileRows * weights ? kByteTileRows : 1;
}

}  // namespace

namespace legato {

void quantised_groups(const RowGroups& groups, const bf16* x, bf16* out) {
  const Projection& any = *groups.projections;
  const auto has_rows = [&](int64_t i) { return groups.starts[i] < groups.starts[i + 1]; };
  int64_t used = 0;
  for (int64_t i = 0; i < groups.count; ++i) used += has_rows(i);
  if (!used) return;
  const int64_t rows = groups.starts[groups.count], together = rows_together(rows, used, any.group);
  std::vector<int64_t> places(rows), firsts(groups.count);
  int64_t end = 0;
  for (int64_t i = 0; i < groups.count; ++i) {
    firsts[i] = end;
    for (int64_t row = groups.starts[i]; row < groups.starts[i + 1]; ++row) places[row] = end++;
    end = (end + together - 1) / together * together;
  }
  const WholeActivations& whole =
      whole_activations(x, rows, any.inputs / any.group, any.group, any.x_bytes, together, end,
                        [&](int64_t row) { return places[row]; });
  std::vector<Job> jobs;
  for (int64_t i = 0; i < groups.count; ++i) {
    if (!has_rows(i)) continue;
    const Projection& by = groups.projections[i];
    jobs.push_back({whole,
                    {by.inputs, by.outputs, by.group, by.bits, by.lowest, by.wide_factors, by.has_minimums},
                    static_cast<const uint8_t*>(by.weight),
                    firsts[i],
                    groups.starts[i + 1] - groups.starts[i],
                    {static_cast<const bf16*>(by.bias), nullptr, out + groups.starts[i] * by.outputs, by.outputs}});
  }
  compute(jobs.data(), static_cast<int64_t>(jobs.size()));
}

}  // namespace legato

extern "C" {

// Bytes of what `quantised_pack` writes.
int64_t quantised_packed_bytes(int64_t inputs, int64_t outputs, int64_t group, int64_t bits, bool wide_factors,
                               bool has_minimums) {
  const Layout layout{inputs, outputs, group, bits, 0, wide_factors, has_minimums};
  return layout.panels() * layout.groups() * layout.block_bytes();
}

// From `codes [outputs, inputs]`, `scales` and `minimums` (or null) `[outputs, groups]`; `packed` holds zeros. A group
// has a multiple of 16 inputs, and at most 256: sums of products of 16 and 8 bits fit into 32.
void quantised_pack(const int8_t* codes, const float* scales, const float* minimums, int64_t inputs, int64_t outputs,
                    int64_t group, int64_t bits, int64_t lowest, bool wide_factors, uint8_t* packed) {
  const Layout layout{inputs, outputs, group, bits, lowest, wide_factors, minimums != nullptr};
#pragma omp parallel for
  for (int64_t panel = 0; panel < layout.panels(); ++panel) {
    const int64_t lanes = std::min(kPanel, outputs - panel * kPanel);
    for (int64_t at = 0; at < layout.groups(); ++at) {
      const int64_t first = panel * kPanel * layout.groups() + at;
      pack_block(layout, codes + panel * kPanel * inputs + at * group, scales + first,
                 minimums ? minimums + first : nullptr, lanes, packed + layout.block(panel, at));
    }
  }
}

void quantised_linear(const bf16* x, int64_t rows, int64_t inputs, const uint8_t* packed, int64_t outputs,
                      int64_t group, int64_t bits, int64_t lowest, bool wide_factors, bool has_minimums,
                      int64_t x_bytes, const bf16* bias, const bf16* residual, bf16* out) {
  const Layout layout{inputs, outputs, group, bits, lowest, wide_factors, has_minimums};
  const int64_t together = rows_together(rows, 1, group);
  const WholeActivations& whole = whole_activations(x, rows, layout.groups(), group, x_bytes, together, rows,
                                                    [](int64_t row) { return row; });
  const Job job{whole, layout, packed, 0, rows, {bias, residual, out, outputs}};
  compute(&job, 1);
}

}  // extern "C"
