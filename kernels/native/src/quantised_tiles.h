// Products of tiles of bytes, where a processor has them (AMX): 12 rows of up to 64 inputs by 16 outputs.
//
// They are the integers that quads give, and a row's groups are added up by the same operations in the same order: the
// same bits, so that the number of rows may choose. A tile's products take a sixth of the time; what is left is mostly
// to store and read its sums, and to scale them. So totals are in registers, and codes become bytes once for many rows.

#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "panels.h"
#include "quantised_activations.h"
#include "quantised_layout.h"
#include "tiles.h"

namespace legato {

// Rows whose groups lie together, so that a tile is one stretch of memory.
constexpr int64_t kByteTileRows = 12;  // with both halves of a panel 24 registers of totals

struct QuantisedRows {
  const WholeActivations& x;
  QuantisedLayout layout;
  const uint8_t* packed;  // [panels, groups] blocks: what `quantised_pack` made
  int64_t first, rows;    // of `x`
  Outputs<bf16> to;       // of the first of them on
};

// A panel's outputs of all rows. `next`: the panel that memory is asked for meanwhile.
template <class Codes, int kBytes>
void multiply_byte_tiles(const QuantisedRows& job, int64_t panel, int64_t next);

#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
constexpr bool kByteTileProducts = true;

// Of a group's inputs so many at once. They are a divisor of the group, and groups are multiples of 16.
inline int64_t tile_inputs(int64_t group) {
  int64_t inputs = 64;
  while (group % inputs) inputs -= 16;
  return inputs;
}

// Some groups of a panel as tiles take them: for each its left codes, its right ones, with their sign, and its factors
// in float32. They stay in the nearest cache while all rows meet them.
class DecodedGroups {
 public:
  explicit DecodedGroups(const QuantisedLayout& layout)
      : half_bytes_(layout.group * kHalf), bytes_(2 * half_bytes_ + 4 * sizeof(__m512)) {
    static thread_local std::vector<Line> kept;
    const size_t size = at_once(layout) * bytes_ / sizeof(Line);
    if (kept.size() < size) kept.resize(size);
    memory_ = kept.data()->bytes;
  }

  static int64_t at_once(const QuantisedLayout& layout) {
    const int64_t parts = (layout.inputs + kInputsAtOnce - 1) / kInputsAtOnce;
    return (layout.groups() + parts - 1) / parts;
  }

  template <class Codes>
  void decode(const QuantisedLayout& layout, const uint8_t* blocks, int64_t count) {
    const __m512i lowest = _mm512_set1_epi8(static_cast<char>(layout.lowest));
    for (int64_t at = 0; at < count; ++at, blocks += layout.block_bytes()) {
      int8_t* left = memory_ + at * bytes_;
      for (int64_t quad = 0; quad < layout.group / kQuad; ++quad) {
        const Quad codes = Codes::decode(blocks + quad * layout.quad_bytes());
        _mm512_store_si512(left + quad * 64, _mm512_add_epi8(codes.left, lowest));
        _mm512_store_si512(left + half_bytes_ + quad * 64, _mm512_add_epi8(codes.right, lowest));
      }
      auto* factors = reinterpret_cast<float*>(left + 2 * half_bytes_);
      const uint8_t* from = blocks + layout.code_bytes();
      for (int64_t i = 0; i < (layout.has_minimums ? 2 : 1); ++i, from += layout.factor_bytes()) {
        _mm512_store_ps(factors + i * kPanel, load_factors(layout, from, 0));
        _mm512_store_ps(factors + i * kPanel + kHalf, load_factors(layout, from, kHalf));
      }
    }
    asm volatile("" : : : "memory");
  }

  const int8_t* left(int64_t at) const { return memory_ + at * bytes_; }
  const int8_t* right(int64_t at) const { return left(at) + half_bytes_; }
  const float* factors(int64_t at) const { return reinterpret_cast<const float*>(left(at) + 2 * half_bytes_); }

 private:
  static constexpr int64_t kInputsAtOnce = 512;

  int64_t half_bytes_, bytes_;
  int8_t* memory_;
};

// What memory is asked for while tiles are multiplied, evenly.
struct CodesAhead {
  const uint8_t* at;
  int64_t lines;  // for each tile of a group

  void ask() {
    for (int64_t i = 0; i < lines; ++i, at += 64) _mm_prefetch(at, _MM_HINT_T1);
  }
};

using TileSums = int32_t[2][kByteTileRows * kHalf];

// The products of a group, whose sums are left in two tiles, of both halves: with one byte 0 and 1, or, of each second
// group, 2 and 3 (`kOdd`). With two bytes all four.
template <int kBytes, bool kOdd>
void multiply_group(const int8_t* x, int64_t group, int64_t inputs, const int8_t* left, const int8_t* right) {
  if constexpr (kBytes == 2 || !kOdd) _tile_zero(0);
  if constexpr (kBytes == 2 || !kOdd) _tile_zero(1);
  if constexpr (kBytes == 2 || kOdd) _tile_zero(2);
  if constexpr (kBytes == 2 || kOdd) _tile_zero(3);
  for (int64_t input = 0; input < group; input += inputs) {
    _tile_loadd(6, left + input * kHalf, 64);
    _tile_loadd(7, right + input * kHalf, 64);
    if constexpr (kBytes == 2 || !kOdd) {
      _tile_loadd(4, x + input, group * kBytes);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
    }
    if constexpr (kBytes == 2 || kOdd) {
      _tile_loadd(5, x + (kBytes == 2 ? group : 0) + input, group * kBytes);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
  }
}

template <int kBytes, bool kOdd>
void store_group(TileSums* sums) {
  if constexpr (kBytes == 2 || !kOdd) {
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(1, sums[0][1], 64);
  }
  if constexpr (kBytes == 2 || kOdd) {
    _tile_stored(2, sums[kBytes - 1][0], 64);
    _tile_stored(3, sums[kBytes - 1][1], 64);
  }
}

template <int kBytes>
inline __m512 load_sums(const TileSums* sums, int half, int row) {
  const __m512i first = _mm512_load_si512(sums[0][half] + row * kHalf);
  if constexpr (kBytes == 1) return _mm512_cvtepi32_ps(first);
  const __m512i second = _mm512_load_si512(sums[1][half] + row * kHalf);
  return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(first, 8), second));
}

template <int kRows>
struct TileTotals {
  __m512 left[kRows], right[kRows];
};

// A group's sums, scaled. Totals go in and out by value: by reference they would live in memory.
template <int kRows, int kBytes, bool kMinimums>
inline __attribute__((always_inline)) TileTotals<kRows> add_sums(TileTotals<kRows> totals, const TileSums* sums,
                                                                 const float* factors, const float* units,
                                                                 const int32_t* x_sums) {
  const __m512 left_scales = _mm512_load_ps(factors), right_scales = _mm512_load_ps(factors + kHalf);
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    const __m512 unit = _mm512_set1_ps(units[row]);
    const __m512 left = load_sums<kBytes>(sums, 0, row), right = load_sums<kBytes>(sums, 1, row);
    totals.left[row] = _mm512_fmadd_ps(_mm512_mul_ps(left_scales, unit), left, totals.left[row]);
    totals.right[row] = _mm512_fmadd_ps(_mm512_mul_ps(right_scales, unit), right, totals.right[row]);
  }
  if constexpr (kMinimums) {
    const __m512 left = _mm512_load_ps(factors + kPanel), right = _mm512_load_ps(factors + kPanel + kHalf);
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      const __m512 x_sum = _mm512_set1_ps(units[row] * static_cast<float>(x_sums[row]));
      totals.left[row] = _mm512_fmadd_ps(left, x_sum, totals.left[row]);
      totals.right[row] = _mm512_fmadd_ps(right, x_sum, totals.right[row]);
    }
  }
  return totals;
}

// A tile of rows by some groups, which are added to `totals`.
template <int kRows, int kBytes, bool kMinimums>
void add_groups(const QuantisedRows& job, int64_t first_row, int64_t first_group, int64_t count, int64_t inputs,
                const DecodedGroups& codes, CodesAhead ahead, float* totals) {
  alignas(64) TileSums sums[kBytes];
  constexpr int64_t kAhead = 3 << 10;  // bytes
  const int64_t group = job.layout.group, size = kByteTileRows * kBytes * group, at = job.x.at(first_row, first_group);
  const int8_t* x = job.x.values() + at * kBytes * group;
  const float* units = &job.x.units[at];
  const int32_t* x_sums = &job.x.sums[at];
  const auto multiply = [&](auto is_odd, int64_t i) {
    if (i == count) return;
    multiply_group<kBytes, is_odd.value>(x + i * size, group, inputs, codes.left(i), codes.right(i));
    const int8_t* soon = x + i * size + kAhead;  // for tiles, a processor doesn't see by itself what comes next
    for (int64_t line = 0; line < size; line += 64) _mm_prefetch(soon + line, _MM_HINT_T0);
    ahead.ask();
  };
  TileTotals<kRows> all;
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    all.left[row] = _mm512_load_ps(totals + row * kPanel);
    all.right[row] = _mm512_load_ps(totals + row * kPanel + kHalf);
  }
  // A group's sums are stored while the next one is multiplied, if there are tiles for both.
  constexpr bool kBoth = kBytes == 1;
  const std::false_type even;
  const std::true_type odd;
  multiply(even, 0);
  for (int64_t i = 0; i < count; ++i) {
    if (kBoth) multiply(odd, i + 1);
    store_group<kBytes, false>(sums);
    if (!kBoth) multiply(even, i + 1);
    all = add_sums<kRows, kBytes, kMinimums>(all, sums, codes.factors(i), units + i * kByteTileRows,
                                             x_sums + i * kByteTileRows);
    if (!kBoth || ++i == count) continue;
    multiply(even, i + 1);
    store_group<kBytes, true>(sums);
    all = add_sums<kRows, kBytes, kMinimums>(all, sums, codes.factors(i), units + i * kByteTileRows,
                                             x_sums + i * kByteTileRows);
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    _mm512_store_ps(totals + row * kPanel, all.left[row]);
    _mm512_store_ps(totals + row * kPanel + kHalf, all.right[row]);
  }
}

template <int kBytes, bool kMinimums, class... Arguments>
void add_groups_of(int64_t rows, const Arguments&... arguments) {
  if (rows > 8) return add_groups<12, kBytes, kMinimums>(arguments...);
  rows > 4 ? add_groups<8, kBytes, kMinimums>(arguments...) : add_groups<4, kBytes, kMinimums>(arguments...);
}

template <class Codes, int kBytes>
void multiply_byte_tiles(const QuantisedRows& job, int64_t panel, int64_t next) {
  const QuantisedLayout& layout = job.layout;
  const int64_t tiles = (job.rows + kByteTileRows - 1) / kByteTileRows, inputs = tile_inputs(layout.group);
  const int64_t at_once = DecodedGroups::at_once(layout);
  static thread_local std::vector<Line> kept;
  if (static_cast<int64_t>(kept.size()) < tiles * kByteTileRows * 2) kept.resize(tiles * kByteTileRows * 2);
  auto* totals = reinterpret_cast<float*>(kept.data()->bytes);
  std::fill_n(totals, tiles * kByteTileRows * kPanel, 0.0f);
  const Shapes<true> shapes(std::min((job.rows + 3) / 4 * 4, kByteTileRows), inputs);
  DecodedGroups codes(layout);
  for (int64_t group = 0; group < layout.groups(); group += at_once) {
    const int64_t count = std::min(at_once, layout.groups() - group);
    codes.decode<Codes>(layout, job.packed + layout.block(panel, group), count);
    const bool is_last = group + count == layout.groups();
    const uint8_t* soon = job.packed + (is_last ? layout.block(next, 0) : layout.block(panel, group + count));
    const int64_t lines = tiles > 1 ? (layout.block_bytes() + 64 * tiles - 1) / (64 * tiles) : 0;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t row = tile * kByteTileRows, rows = std::min(job.rows - row, kByteTileRows);
      const CodesAhead ahead{soon + tile * lines * count * 64, lines};
      float* to = totals + row * kPanel;
      layout.has_minimums
          ? add_groups_of<kBytes, true>(rows, job, job.first + row, group, count, inputs, codes, ahead, to)
          : add_groups_of<kBytes, false>(rows, job, job.first + row, group, count, inputs, codes, ahead, to);
    }
  }
  for (int64_t row = 0; row < job.rows; ++row) {
    const __m512 left = _mm512_load_ps(totals + row * kPanel), right = _mm512_load_ps(totals + row * kPanel + kHalf);
    finish_panel(job.to, row, panel * kPanel, left, right);
  }
}

#else
constexpr bool kByteTileProducts = false;
#endif

}  // namespace legato
