// Products of tiles of bfloat16, where a processor has them (AMX): 16 rows of 32 inputs by 16 outputs.
//
// To each sum the instruction adds the products of 32 inputs, the even and the odd ones summed apart, whatever the
// number of rows in the tile. So a row's result is the same to the bit in any company here, too, but another one than
// that of instructions of 16 numbers (linear.cpp). The weight lies as it does for these: a tile is half of 16 steps.

#pragma once

#include <algorithm>

#include "panels.h"

namespace legato {

// Rows of a projection, [rows, inputs].
struct TiledRows {
  const bf16* x;
  int64_t rows, inputs;
};

#ifdef __AMX_BF16__
constexpr bool kTileProducts = true;
#else
constexpr bool kTileProducts = false;
#endif

constexpr int64_t kTileInputs = 32, kTileRows = 16;

// All tiles have equally many rows, for which the last may begin with some that the one before it has.
inline int64_t rows_of_tile(int64_t rows) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  return (rows + tiles - 1) / tiles;
}

// Bytes of rows that every panel of a weight meets before the next ones do: what a core's own cache has room for.
constexpr int64_t kRowsAtOnce = 768 << 10;

constexpr int64_t kOwnAhead = 4 << 10;  // bytes by which a panel that is read once is asked for ahead

// The shapes of the thread's eight tiles, while this lives; none, if they are not `used`.
template <bool kUsed>
class Shapes {
 public:
  explicit Shapes(int64_t) {}
};

// A panel's outputs, 32 or 16, of all rows, while `Shapes` of `rows_of_tile` live. `ahead`: weights that memory is
// asked for meanwhile, as many as the panel's, or null.
template <bool kWhole>
void multiply_tiles(const TiledRows& rows, const bf16* panel, const Outputs<bf16>& to, int64_t first_output,
                    const char* ahead);

#ifdef __AMX_BF16__

// Sums 0 to 3, rows 4 and 5, of so many bytes each, and weights 6 and 7, whose words of 4 bytes meet one of a row.
template <>
class Shapes<true> {
 public:
  explicit Shapes(int64_t rows, int64_t row_bytes = 64) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } shapes;
    std::fill(shapes.rows, shapes.rows + 6, static_cast<uint8_t>(rows));
    shapes.row_bytes[4] = shapes.row_bytes[5] = static_cast<uint16_t>(row_bytes);
    shapes.rows[6] = shapes.rows[7] = static_cast<uint8_t>(row_bytes / 4);
    // That the intrinsic reads all of this, g++ does not know.
    asm volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
  }
  ~Shapes() { _tile_release(); }  // else the system would save the tiles whenever it takes the thread's core
  Shapes(const Shapes&) = delete;
};

// What rows are multiplied by: words of two numbers, which are multiplied at once, of 16 columns or 32 side by side.
struct Columns {
  const void* first;
  int64_t bytes;  // from word to word
};

// A macro, as the tile is a part of the instruction. `past`: past the first cache.
#define LEGATO_LOAD_TILE(past, tile, from, bytes) \
  if constexpr (past) {                           \
    _tile_stream_loadd(tile, from, bytes);        \
  } else {                                        \
    _tile_loadd(tile, from, bytes);               \
  }

// Leaves the sums of a tile of rows, or two (`kTwo`), in tiles 0 and 1, and 2 and 3: of 16 columns each, 32 if
// `kWhole`. `row_bytes`: from row to row. Of `ahead`, memory is asked for `ahead_bytes` at each step. What is read
// once is read past the first cache: rows, of which each panel reads all, or, where these are so few that a panel meets
// them at one go (`kAtOnce`), the panel.
template <bool kTwo, bool kWhole, bool kAtOnce = false>
void sum_tiles(const bf16* first, const bf16* second, int64_t row_bytes, int64_t inputs, const Columns& columns,
               const char* ahead, int64_t ahead_bytes) {
  const char* words = static_cast<const char*>(columns.first);
  const int64_t tile_bytes = kTileInputs / 2 * columns.bytes;
  asm volatile("" : : : "memory");  // g++ does not know that the intrinsics read rows and columns
  _tile_zero(0);
  if constexpr (kWhole) _tile_zero(1);
  if constexpr (kTwo) _tile_zero(2);
  if constexpr (kTwo && kWhole) _tile_zero(3);
  for (int64_t input = 0; input < inputs; input += kTileInputs, words += tile_bytes) {
    if (ahead) {
      for (const char* end = ahead + ahead_bytes; ahead < end; ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
    }
    LEGATO_LOAD_TILE(kAtOnce, 6, words, columns.bytes);
    LEGATO_LOAD_TILE(!kAtOnce, 4, first + input, row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kWhole) {
      LEGATO_LOAD_TILE(kAtOnce, 7, words + 64, columns.bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kTwo) {
      LEGATO_LOAD_TILE(!kAtOnce, 5, second + input, row_bytes);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (kTwo && kWhole) _tile_dpbf16ps(3, 5, 7);
  }
}

// As `finish`, of a panel's outputs: where all are there, they are a line of memory.
inline void finish_panel(const Outputs<bf16>& to, int64_t row, int64_t output, __m512 left, __m512 right) {
  if (output + kPanel > to.outputs) {
    finish(to, row, output, left);
    return finish(to, row, output + kHalf, right);
  }
  constexpr __mmask16 all = 0xffff;
  const int64_t at = to.at(row) + output;
  if (to.bias) {
    left = _mm512_add_ps(left, load(to.bias + output, all));
    right = _mm512_add_ps(right, load(to.bias + output + kHalf, all));
  }
  if (to.residual) {
    left = _mm512_add_ps(left, load(to.residual + at, all));
    right = _mm512_add_ps(right, load(to.residual + at + kHalf, all));
  }
  _mm512_storeu_si512(to.out + at, as_words(_mm512_cvtne2ps_pbh(right, left)));
}

// The sums of a panel's outputs, of each row: `finish_row(row, 16 of them, the other 16)`.
template <bool kWhole, class Finish>
void sum_panel(const TiledRows& rows, const bf16* panel, const char* ahead, const Finish& finish_row) {
  alignas(64) float sums[2][kTileRows * kHalf];
  const int64_t tiles = (rows.rows + kTileRows - 1) / kTileRows, size = rows_of_tile(rows.rows);
  const int64_t row_bytes = rows.inputs * 2;
  const Columns columns{panel, kWhole ? kPanel * 4 : kHalf * 4};
  const auto first_row = [&](int64_t tile) { return std::min(tile * size, rows.rows - size); };
  const auto at = [&](int64_t tile) { return rows.x + first_row(tile) * rows.inputs; };
  const auto finish_rows = [&](int64_t tile) {
    const int64_t first = first_row(tile);
    for (int64_t row = tile * size - first; row < size; ++row) {
      finish_row(first + row, _mm512_load_ps(sums[0] + row * kHalf), _mm512_load_ps(sums[1] + row * kHalf));
    }
  };
  // At one go the panel itself is read from memory; else the next one, in equal parts, while rows meet this one.
  const int64_t goes = (tiles + 1) / 2, step_bytes = kTileInputs / 2 * columns.bytes;
  const int64_t ahead_bytes = (step_bytes / 64 + goes - 1) / goes * 64;
  const char* stop = ahead ? ahead + rows.inputs / kTileInputs * step_bytes : nullptr;
  for (int64_t tile = 0; tile < tiles; tile += 2) {
    const bool is_pair = tile + 1 < tiles;
    const char* now = goes > 1 && ahead < stop ? ahead : nullptr;
    if (is_pair && goes == 1) {
      const char* own = reinterpret_cast<const char*>(panel) + kOwnAhead;
      sum_tiles<true, kWhole, true>(at(0), at(1), row_bytes, rows.inputs, columns, own, step_bytes);
    } else if (is_pair) {
      sum_tiles<true, kWhole>(at(tile), at(tile + 1), row_bytes, rows.inputs, columns, now, ahead_bytes);
    } else {
      sum_tiles<false, kWhole>(at(tile), nullptr, row_bytes, rows.inputs, columns, now, ahead_bytes);
    }
    ahead += now ? rows.inputs / kTileInputs * ahead_bytes : 0;
    _tile_stored(0, sums[0], 64);
    if constexpr (kWhole) _tile_stored(1, sums[1], 64);
    finish_rows(tile);
    if (!is_pair) break;
    _tile_stored(2, sums[0], 64);
    if constexpr (kWhole) _tile_stored(3, sums[1], 64);
    finish_rows(tile + 1);
  }
}

template <bool kWhole>
void multiply_tiles(const TiledRows& rows, const bf16* panel, const Outputs<bf16>& to, int64_t first_output,
                    const char* ahead) {
  sum_panel<kWhole>(rows, panel, ahead, [&](int64_t row, __m512 left, __m512 right) {
    kWhole ? finish_panel(to, row, first_output, left, right) : finish(to, row, first_output, left);
  });
}

// A panel of gates, into `gates [rows, kPanel]`, and one of what they let through, whose outputs `to` become both's.
template <__m512 (*kGated)(__m512, __m512)>
void multiply_gated_tiles(const TiledRows& rows, const bf16* const (&panels)[2], const bf16* const (&bias)[2],
                          bf16* gates, const Outputs<bf16>& to, int64_t first_output, const char* ahead) {
  const auto* up = reinterpret_cast<const char*>(panels[1]);
  multiply_tiles<true>(rows, panels[0], {bias[0], nullptr, gates, kPanel}, 0, up);
  sum_panel<true>(rows, panels[1], ahead, [&](int64_t row, __m512 left, __m512 right) {
    constexpr __mmask16 all = 0xffff;
    if (bias[1]) {
      left = _mm512_add_ps(left, load(bias[1], all));
      right = _mm512_add_ps(right, load(bias[1] + kHalf, all));
    }
    const bf16* own = gates + row * kPanel;
    left = kGated(load(own, all), rounded(left));
    right = kGated(load(own + kHalf, all), rounded(right));
    _mm512_storeu_si512(to.out + to.at(row) + first_output, as_words(_mm512_cvtne2ps_pbh(right, left)));
  });
}

#endif

}  // namespace legato
