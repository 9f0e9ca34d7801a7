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

// Of the queries with all keys of the tile, `into [kKeyVectors, kTileRows, 16]`.
inline void multiply_keys_by_tiles(const PackedTile& tile, const bf16* queries, int64_t query_width, float* into) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const int32_t* keys = tile.keys;
  for (int64_t at = 0; at < query_width; at += kTileInputs, keys += kTileInputs / 2 * kTileKeys) {
    _tile_loadd(4, queries + at, query_width * 2);
    _tile_loadd(6, keys, kTileKeys * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, keys + 16, kTileKeys * 4);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, keys + 32, kTileKeys * 4);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, keys + 48, kTileKeys * 4);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, into, 64);
  _tile_stored(1, into + kTileRows * 16, 64);
  _tile_stored(2, into + 2 * kTileRows * 16, 64);
  _tile_stored(3, into + 3 * kTileRows * 16, 64);
}

// Of weights in tiles 4 and 5 with 16 numbers of the values, or with those and the 16 after them (`kTwo`),
// `into [.., kTileRows, 16]`.
template <bool kTwo>
void multiply_values_by_tiles(const PackedTile& tile, int64_t at, float* into) {
  const int32_t *values = tile.values + at, *later = values + kTileInputs / 2 * tile.width;
  const int64_t stride = tile.width * 4;
  _tile_zero(0);
  _tile_loadd(6, values, stride);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kTwo) {
    _tile_zero(1);
    _tile_loadd(7, values + 16, stride);
    _tile_dpbf16ps(1, 4, 7);
  }
  if (tile.steps > kTileInputs / 2) {
    _tile_loadd(6, later, stride);
    _tile_dpbf16ps(0, 5, 6);
    if constexpr (kTwo) {
      _tile_loadd(7, later + 16, stride);
      _tile_dpbf16ps(1, 5, 7);
    }
  }
  _tile_stored(0, into, 64);
  if constexpr (kTwo) _tile_stored(1, into + kTileRows * 16, 64);
}

// As many blocks of rows as fit in the first cache beside the tile go through each of the three parts together: a part's
// results have left for memory before the next one reads them.
constexpr int64_t kBlocksAtOnce = 4;

inline void attend_by_tiles(const PackedTile& tile, const Row* rows, int64_t num_rows, int64_t query_width,
                            const Exponents& exponents, Ahead& ahead) {
  constexpr int64_t kBlock = kKeyVectors * kTileRows * 16, kRowsAtOnce = kBlocksAtOnce * kTileRows;
  alignas(64) float products[kBlocksAtOnce * kBlock];
  alignas(64) bf16 weights[kRowsAtOnce * kTileKeys];
  alignas(64) float factors[kRowsAtOnce];
  const auto is_seen = [&](const Row* block, int64_t count) {
    return block[count - 1].stop > tile.first && block->first < tile.first + kTileKeys;
  };
  for (int64_t first = 0; first < num_rows; first += kRowsAtOnce) {
    const Row* own = rows + first;
    const int64_t count = std::min(kRowsAtOnce, num_rows - first);
    if (!is_seen(own, count)) continue;
    for (int64_t row = 0; row < count; row += kTileRows) {
      multiply_keys_by_tiles(tile, static_cast<const bf16*>(own[row].query), query_width,
                             products + row * kKeyVectors * 16);
    }
    for (int64_t row = 0; row < count; ++row) {
      if (row % kTileRows == 0) ahead.ask();
      const float* from = products + row / kTileRows * kBlock + row % kTileRows * 16;
      __m512 of_row[kKeyVectors];
      for (int64_t v = 0; v < kKeyVectors; ++v) of_row[v] = _mm512_load_ps(from + v * kTileRows * 16);
      factors[row] = _mm512_cvtss_f32(weigh<bf16>(tile.first, own[row], exponents, of_row, weights + row * kTileKeys));
    }
    asm volatile("" : : "r"(weights) : "memory");  // g++ does not know that the intrinsics read them
    for (int64_t at = 0; at < tile.width; at += 32) {
      const bool both = at + 16 < tile.width;
      for (int64_t row = 0; row < count; row += kTileRows) {
        _tile_loadd(4, weights + row * kTileKeys, kTileKeys * 2);
        _tile_loadd(5, weights + row * kTileKeys + kTileInputs, kTileKeys * 2);
        float* into = products + row * 32;
        both ? multiply_values_by_tiles<true>(tile, at, into) : multiply_values_by_tiles<false>(tile, at, into);
      }
      for (int64_t row = 0; row < count; ++row) {
        const __m512 factor = _mm512_set1_ps(factors[row]);
        const float* from = products + row / kTileRows * kTileRows * 32 + row % kTileRows * 16;
        float* to = own[row].sums->values + at;
        _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_loadu_ps(to), factor, _mm512_load_ps(from)));
        if (!both) continue;
        _mm512_storeu_ps(to + 16, _mm512_fmadd_ps(_mm512_loadu_ps(to + 16), factor, _mm512_load_ps(from + kTileRows * 16)));
      }
    }
  }
}

#endif

}  // namespace legato
