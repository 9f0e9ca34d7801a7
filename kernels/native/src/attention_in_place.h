// A tile of one key head that is read where it lies: for rows so few that a copy in the order in which they read it
// would take longer than they do, such as those of a sequence and its drafts. The sums are those over a packed tile, to
// the bit.

#pragma once

#include <type_traits>

#include "attention_by_tiles.h"

namespace legato {

// Rows at a time. Keys are turned over once for all of them: 16 registers of keys and a sum of each row, 28 of 32.
// Where there are fewer, the keys lie in the first cache.
constexpr int kInPlaceRows = kRegisters == 32 ? 12 : 6;
constexpr int64_t kTokensPerAsk = 16;  // as many of this tile are read before the next one is asked for again

// Whether a tile is read in place for so many rows.
template <typename T>
bool is_in_place(const Layer<T>& layer, int64_t num_rows) {
  return std::is_same_v<T, bf16> && num_rows <= kInPlaceRows && layer.words() % 16 == 0 && layer.width() % 32 == 0;
}

// How often the next tile is asked for while rows of a key head attend to this one.
template <typename T>
int64_t asks_per_key_head(const Layer<T>& layer, int64_t num_rows) {
  if (by_tiles<T>()) return asks_by_tiles(layer, num_rows);
  if (!is_in_place(layer, num_rows)) return (num_rows + kBlockRows - 1) / kBlockRows;
  const int64_t numbers_at_a_time = width_vectors(num_rows) * 16;
  const int64_t num_passes = layer.words() / 16 + (layer.width() + numbers_at_a_time - 1) / numbers_at_a_time;
  return kTileKeys / kTokensPerAsk * num_passes;
}

// See `PackedTile`.
struct TileInPlace {
  int64_t first, words, width, steps;
  int64_t at;  // of the key head in a token
  const Tokens<bf16>& tokens;
  Ahead& ahead;
};

template <typename T, int kRows>
inline __attribute__((always_inline)) void multiply_keys(const TileInPlace& tile, const Row* rows,
                                                         __m512 (&products)[kRows][kKeyVectors]) {
  const int64_t first = tile.tokens.first / 16, stop = (tile.tokens.stop + 15) / 16;
  for (int64_t v = first; v < stop; ++v) {
    __m512 sums[kRows];
    for (int row = 0; row < kRows; ++row) sums[row] = _mm512_setzero_ps();
    for (int64_t word = 0; word < tile.words; word += 16) {
      __m512i keys[16];
      transpose(tile.tokens.key_words() + 16 * v, tile.at / Words<T>::kNumbers + word, 0xffff, keys);
      tile.ahead.ask();
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
#pragma GCC unroll 2
        for (int part = 0; part < Words<T>::kParts; ++part) {
#pragma GCC unroll 12
          for (int row = 0; row < kRows; ++row) {
            const auto query = Words<T>::of_one(rows[row].template numbers<T>(word + i), part);
            sums[row] = Words<T>::add(sums[row], Words<T>::of_many(keys[i], part), query);
          }
        }
      }
    }
    for (int row = 0; row < kRows; ++row) products[row][v] = sums[row];
  }
}

template <int kVectors>
inline __attribute__((always_inline)) void load_step(const TileInPlace& tile, int64_t step, int64_t at,
                                                     __m512i (&values)[kVectors]) {
  if (step % (kTokensPerAsk / 2) == 0) tile.ahead.ask();
  const bf16* const* from = tile.tokens.values() + 2 * step;
  if constexpr (kRegisters < 32 && kVectors == 1) {
    values[0] = alternate(from[0] + tile.at + at, from[1] + tile.at + at);
    return;
  }
  for (int v = 0; v < kVectors; v += 2) {
    const __m512i a = _mm512_loadu_si512(from[0] + tile.at + at + 16 * v);
    const __m512i b = _mm512_loadu_si512(from[1] + tile.at + at + 16 * v);
    values[v] = kLow.of(a, b);
    if (v + 1 < kVectors) values[v + 1] = kHigh.of(a, b);
  }
}

}  // namespace legato
