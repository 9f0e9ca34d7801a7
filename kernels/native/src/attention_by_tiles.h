// Rows of one key head over a tile of its keys and values, 16 at a time by products of tiles (tiles.h).
//
// All rows of bfloat16 go this way, where there is one, however few: so a row's sums are the same to the bit in any
// company here, too.

#pragma once

#include "attention_work.h"
#include "tiles.h"

namespace legato {

template <typename T>
constexpr bool by_tiles() {
  return kTileProducts && std::is_same_v<T, bf16>;
}

// How often the next tile is asked for while rows of a key head attend to this one: while its keys are packed, too.
template <typename T>
int64_t asks_by_tiles(const Layer<T>& layer, int64_t num_rows) {
  return (num_rows + kTileRows - 1) / kTileRows + kKeyVectors * ((layer.words() + 15) / 16) + kTileKeys / 2 / kStepsPerAsk;
}

inline void attend_by_tiles(const PackedTile& tile, const Row* rows, int64_t num_rows, int64_t query_width,
                            const Exponents& exponents, Ahead& ahead);

#ifdef __AMX_BF16__

constexpr int64_t kTileNumbers = kTileRows * 16;  // of a tile of sums

// `num_rows` rows by 16 columns, or 32 (`kWhole`): of each 16 rows a tile of sums, and if `kWhole`, another.
template <bool kWhole>
void multiply_rows(const bf16* rows, int64_t row_width, int64_t num_rows, int64_t inputs, const Columns& columns,
                   float* into) {
  constexpr int64_t kTiles = kWhole ? 2 : 1;
  for (int64_t row = 0; row < num_rows; row += 2 * kTileRows, into += 2 * kTiles * kTileNumbers) {
    const bf16 *first = rows + row * row_width, *second = first + kTileRows * row_width;
    const bool is_pair = row + kTileRows < num_rows;
    is_pair ? sum_tiles<true, kWhole>(first, second, row_width * 2, inputs, columns, nullptr)
            : sum_tiles<false, kWhole>(first, nullptr, row_width * 2, inputs, columns, nullptr);
    _tile_stored(0, into, 64);
    if constexpr (kWhole) _tile_stored(1, into + kTileNumbers, 64);
    if (!is_pair) return;
    _tile_stored(2, into + kTiles * kTileNumbers, 64);
    if constexpr (kWhole) _tile_stored(3, into + 3 * kTileNumbers, 64);
  }
}

// To the sums of rows 16 numbers of each, which lie in tiles `stride` numbers apart.
inline void add_products(const Row* rows, int64_t count, const float* factors, int64_t at, const float* from,
                         int64_t stride) {
  for (int64_t row = 0; row < count; ++row) {
    const __m512 product = _mm512_load_ps(from + row / kTileRows * stride + row % kTileRows * 16);
    float* to = rows[row].sums->values + at;
    _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_loadu_ps(to), _mm512_set1_ps(factors[row]), product));
  }
}

// As many rows as fit in the first cache beside the tile go through each of three parts together: a part's results have
// left for memory before the next one reads them.
inline void attend_by_tiles(const PackedTile& tile, const Row* rows, int64_t num_rows, int64_t query_width,
                            const Exponents& exponents, Ahead& ahead) {
  constexpr int64_t kRowsAtOnce = 4 * kTileRows;
  alignas(64) float products[2][kRowsAtOnce * 32];
  alignas(64) bf16 weights[kRowsAtOnce * kTileKeys];
  float factors[kRowsAtOnce];
  for (int64_t first = 0; first < num_rows; first += kRowsAtOnce) {
    const Row* own = rows + first;
    const int64_t count = std::min(kRowsAtOnce, num_rows - first);
    if (own[count - 1].stop <= tile.first || own->first >= tile.first + kTileKeys) continue;
    for (int64_t half = 0; half < 2; ++half) {
      multiply_rows<true>(static_cast<const bf16*>(own->query), query_width, count, query_width,
                          {tile.keys + half * 32, kTileKeys * 4}, products[half]);
    }
    for (int64_t row = 0; row < count; ++row) {
      if (row % kTileRows == 0) ahead.ask();
      const int64_t at = row / kTileRows * 2 * kTileNumbers + row % kTileRows * 16;
      __m512 of_row[kKeyVectors];
      for (int64_t v = 0; v < kKeyVectors; ++v) of_row[v] = _mm512_load_ps(products[v / 2] + at + v % 2 * kTileNumbers);
      factors[row] = _mm512_cvtss_f32(weigh<bf16>(tile.first, own[row], exponents, of_row, weights + row * kTileKeys));
    }
    const int64_t tokens = tile.steps * 2;
    for (int64_t at = 0; at < tile.width; at += 32) {
      const Columns values{tile.values + at, tile.width * 4};
      const bool is_whole = at + 16 < tile.width;
      is_whole ? multiply_rows<true>(weights, kTileKeys, count, tokens, values, products[0])
               : multiply_rows<false>(weights, kTileKeys, count, tokens, values, products[0]);
      add_products(own, count, factors, at, products[0], (is_whole ? 2 : 1) * kTileNumbers);
      if (is_whole) add_products(own, count, factors, at + 16, products[0] + kTileNumbers, 2 * kTileNumbers);
    }
  }
}

#endif

}  // namespace legato
