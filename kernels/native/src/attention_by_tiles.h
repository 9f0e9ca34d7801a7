// Rows of one key head over a tile of its keys and values, 32 at a time by products of tiles (tiles.h).
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
  const int64_t of_packing = kKeyVectors * ((layer.words() + 15) / 16) + kTileKeys / 2 / kStepsPerAsk;
  return of_packing + (num_rows + kTileRows - 1) / kTileRows;
}

// Rows for whose sums there is room, of so many of a key head: tiles of sums are whole where there is more than one.
inline int64_t rows_of_tiles(int64_t num_rows) {
  return num_rows <= kTileRows ? num_rows : (num_rows + kTileRows - 1) / kTileRows * kTileRows;
}

// Of the two tokens that a step of values is of, which follow each other. Steps come in the order that packing two
// registers' words into one leaves them in, four of either (see `weigh_by_parts`).
inline int64_t first_token_of(int64_t step) {
  return step / 16 * 32 + step % 16 / 4 * 4 + step % 2 * 2 + step / 2 % 2 * 16;
}

// `rows` come by rising `stop` and `first`, and their sums lie one after the other, `sums_stride` numbers apart.
inline void attend_by_tiles(const PackedTile& tile, const Row* rows, int64_t num_rows, int64_t query_width,
                            int64_t sums_stride, const Exponents& exponents, Ahead& ahead);

#ifdef __AMX_BF16__

constexpr int64_t kPairRows = 2 * kTileRows;

// A tile of rows, or two, by 16 columns, or 32, of which each row's products are added to its `sums`, or become them.
struct TileProducts {
  const bf16* rows;
  int64_t row_width, inputs;
  Columns columns;
  float* sums;
  int64_t sums_stride;
  bool is_pair, is_whole, adds;
};

// Of the inputs from one on to another, multiples of 32.
template <bool kTwo, bool kWhole>
inline __attribute__((always_inline)) void multiply_inputs(const TileProducts& by, int64_t input, int64_t stop) {
  const int64_t row_bytes = by.row_width * 2, sums_bytes = by.sums_stride * 4;
  float *first = by.sums, *second = first + kTileRows * by.sums_stride;
  asm volatile("" : : : "memory");  // g++ does not know that the intrinsics read memory
  if (input == 0 && by.adds) {
    _tile_loadd(0, first, sums_bytes);
    if constexpr (kWhole) _tile_loadd(1, first + 16, sums_bytes);
    if constexpr (kTwo) _tile_loadd(2, second, sums_bytes);
    if constexpr (kTwo && kWhole) _tile_loadd(3, second + 16, sums_bytes);
  } else if (input == 0) {
    _tile_zero(0);
    if constexpr (kWhole) _tile_zero(1);
    if constexpr (kTwo) _tile_zero(2);
    if constexpr (kTwo && kWhole) _tile_zero(3);
  }
  for (; input < stop; input += kTileInputs) {
    const bf16* rows = by.rows + input;
    const char* words = static_cast<const char*>(by.columns.first) + input / 2 * by.columns.bytes;
    _tile_loadd(6, words, by.columns.bytes);
    _tile_loadd(4, rows, row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kWhole) {
      _tile_loadd(7, words + 64, by.columns.bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kTwo) {
      _tile_loadd(5, rows + kTileRows * by.row_width, row_bytes);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (kTwo && kWhole) _tile_dpbf16ps(3, 5, 7);
  }
  if (stop < by.inputs) return;
  _tile_stored(0, first, sums_bytes);
  if constexpr (kWhole) _tile_stored(1, first + 16, sums_bytes);
  if constexpr (kTwo) _tile_stored(2, second, sums_bytes);
  if constexpr (kTwo && kWhole) _tile_stored(3, second + 16, sums_bytes);
}

inline void multiply_inputs(const TileProducts& by, int64_t input, int64_t stop) {
  if (by.is_pair) {
    return by.is_whole ? multiply_inputs<true, true>(by, input, stop) : multiply_inputs<true, false>(by, input, stop);
  }
  by.is_whole ? multiply_inputs<false, true>(by, input, stop) : multiply_inputs<false, false>(by, input, stop);
}

// 32 rows, or the last of them, and what becomes of them over a tile.
struct PairOfTiles {
  const Row* rows;
  int64_t count;
  bool sees_all;    // of the tile, each row
  float* products;  // with keys, [kPairRows, kTileKeys]
  bf16* weights;    // likewise
};

// The products that are due while the weights of some rows are computed, 32 inputs at a time: of the weights `before`
// with values, and of the `next` rows with keys. Either may be null.
class DueProducts {
 public:
  DueProducts(const PackedTile& tile, const PairOfTiles* before, const PairOfTiles* next, int64_t query_width,
              int64_t sums_stride)
      : tile_(tile), before_(before), next_(next), query_width_(query_width), sums_stride_(sums_stride) {
    if (before) left_ += (tile.width + 31) / 32 * (tile.steps * 2 / kTileInputs);
    if (next) left_ += kTileKeys / 32 * (query_width / kTileInputs);
    if (left_) choose();
  }

  int64_t left() const { return left_; }

  // Until no more than so many are left.
  void multiply(int64_t left) {
    while (left_ > left) {
      const int64_t stop = std::min(products_.inputs, input_ + (left_ - left) * kTileInputs);
      multiply_inputs(products_, input_, stop);
      left_ -= (stop - input_) / kTileInputs;
      input_ = stop;
      if (input_ < products_.inputs) continue;
      column_ += 32;
      if (left_) choose();
    }
  }

 private:
  void choose() {
    input_ = 0;
    if (before_ && column_ >= tile_.width) {
      before_ = nullptr;
      column_ = 0;
    }
    if (before_) {
      products_ = {before_->weights, kTileKeys, tile_.steps * 2, {tile_.values + column_, tile_.width * 4},
                   before_->rows->sums->values + column_, sums_stride_, before_->count > kTileRows,
                   tile_.width - column_ > 16, true};
    } else {
      products_ = {static_cast<const bf16*>(next_->rows->query), query_width_, query_width_,
                   {tile_.keys + column_, kTileKeys * 4}, next_->products + column_, kTileKeys,
                   next_->count > kTileRows, true, false};
    }
  }

  const PackedTile& tile_;
  const PairOfTiles *before_, *next_;
  int64_t query_width_, sums_stride_, left_ = 0, column_ = 0, input_ = 0;
  TileProducts products_;
};

// Of parts of a doubling, by how many two to the power of them is below a straight line from 1 to 2.
struct BelowLine {
  alignas(64) uint8_t of[128] = {};
  constexpr BelowLine() {
    double power = 1;
    for (int part = 0; part < 128; ++part, power *= 1.0054299011128028227) {  // two to the power of 1/128
      of[part] = static_cast<uint8_t>(part - static_cast<int>(128 * (power - 1) + 0.5));
    }
  }
};
constexpr BelowLine kBelowLine;

// Of a row over a tile; -infinity of tokens that it does not see.
inline __attribute__((always_inline)) void score_by_tiles(const PackedTile& tile, const Row& row, bool sees_all,
                                                          const Exponents& exponents, const float* products,
                                                          __m512 (&score)[kKeyVectors]) {
  for (int64_t v = 0; v < kKeyVectors; ++v) score[v] = exponents.score(_mm512_load_ps(products + 16 * v));
  if (sees_all) return;
  const uint64_t seen = tokens_seen(row, tile.first);
  for (int64_t v = 0; v < kKeyVectors; ++v) {
    score[v] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen >> (16 * v), score[v]);
  }
}

// Moves the reference to the largest exponent, rounded up, if that is far above it, and the row's sums with it.
inline __attribute__((noinline)) void move_by_tiles(const PackedTile& tile, __m512 largest_of_lanes, float scale,
                                                    Sums& sums) {
  const float before = sums.reference, largest = _mm512_reduce_max_ps(largest_of_lanes) * scale;
  if (!(largest > before + kSlack)) return;
  sums.reference = std::ceil(largest);
  if (before == kNothingSeen) return;  // all sums are zeros
  const __m512 factor = exp2(_mm512_set1_ps(before - sums.reference));
  _mm512_store_ps(sums.weights, _mm512_mul_ps(_mm512_load_ps(sums.weights), factor));
  for (int64_t at = 0; at < tile.width; at += 16) {
    _mm512_store_ps(sums.values + at, _mm512_mul_ps(_mm512_load_ps(sums.values + at), factor));
  }
}

// The weights of scores, and in `sums` their sum. False: one is too large, or there is NaN, and nothing was written.
//
// Bit by bit, a number of bfloat16 is its logarithm in 128ths, but for `BelowLine`. So weights of whole 128ths, which
// are off by 0.16 % typically, take half of the instructions of exponentials in float32. What is summed is what values
// are multiplied by, so that only what differs from weight to weight is left of that.
inline __attribute__((always_inline)) bool weigh_by_parts(const __m512 (&score)[kKeyVectors], float scale, Sums& sums,
                                                          bf16* weights) {
  constexpr float kParts = 128, kOne = 127;  // of a doubling; the exponent of 1 as bfloat16 has it
  const __m512 by = _mm512_set1_ps(scale * kParts), most = _mm512_set1_ps((kOne + kSlack) * kParts);
  const __m512 first = _mm512_set1_ps((kOne - sums.reference) * kParts);  // exact: references are whole numbers
  __m512 parts[kKeyVectors];
  __mmask16 fit = 0xffff;
  for (int64_t v = 0; v < kKeyVectors; ++v) {
    parts[v] = _mm512_fmadd_ps(score[v], by, first);
    fit = _mm512_mask_cmp_ps_mask(fit, parts[v], most, _CMP_LE_OQ);
  }
  if (__builtin_expect(fit != 0xffff, 0)) return false;
  const __m512i low = _mm512_load_si512(kBelowLine.of), high = _mm512_load_si512(kBelowLine.of + 64);
  __m512 sum = _mm512_load_ps(sums.weights);
  for (int64_t v = 0; v < kKeyVectors; v += 2) {
    // Logarithms below the smallest become 0. Numbers that are smaller than normal ones are 0 to all products.
    const __m512i words = _mm512_packus_epi32(_mm512_cvtps_epi32(parts[v]), _mm512_cvtps_epi32(parts[v + 1]));
    const __m512i below = _mm512_maskz_permutex2var_epi8(0x5555555555555555, low, words, high);  // by 7 bits of a byte
    const __m512i weight = _mm512_sub_epi16(words, below);
    _mm512_store_si512(weights + 16 * v, weight);
    sum = _mm512_dpbf16_ps(sum, as_pairs(weight), as_pairs(_mm512_set1_epi16(0x3f80)));
  }
  _mm512_store_ps(sums.weights, sum);
  return true;
}

// As `weigh_by_parts`, of a tile with what is infinite or no number, in the same order of tokens.
inline __attribute__((noinline)) void weigh_any(const PackedTile& tile, const Row& row, const Exponents& exponents,
                                                const float* products, bf16* weights) {
  Sums& sums = *row.sums;
  __m512 weight[kKeyVectors];
  score_by_tiles(tile, row, false, exponents, products, weight);
  const __m512 scale = _mm512_set1_ps(exponents.scale), reference = _mm512_set1_ps(sums.reference);
  for (__m512& own : weight) {
    const __m512 exponent = _mm512_fmsub_ps(own, scale, reference);
    own = rough_exp2_of_finite(_mm512_max_ps(_mm512_set1_ps(kNothing), exponent));  // in this order NaN stays NaN
    _mm512_store_ps(sums.weights, _mm512_add_ps(_mm512_load_ps(sums.weights), own));
  }
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  for (int64_t v = 0; v < kKeyVectors; v += 2) {
    const __m512i words = as_words(_mm512_cvtne2ps_pbh(weight[v + 1], weight[v]));
    _mm512_store_si512(weights + 16 * v, _mm512_permutexvar_epi64(order, words));
  }
}

// As `weigh`, but that the reference, a whole number, moves where a weight is too large: to find the largest exponent
// first would take a tenth of the time. The row's sums of values move with it.
inline __attribute__((always_inline)) void weigh_by_tiles(const PackedTile& tile, const Row& row, bool sees_all,
                                                          const Exponents& exponents, const float* products,
                                                          bf16* weights) {
  Sums& sums = *row.sums;
  __m512 score[kKeyVectors];
  score_by_tiles(tile, row, sees_all, exponents, products, score);
  const auto move = [&] {
    const __m512 larger = _mm512_max_ps(_mm512_max_ps(score[0], score[1]), _mm512_max_ps(score[2], score[3]));
    move_by_tiles(tile, larger, exponents.scale, sums);
  };
  if (sums.reference == kNothingSeen) move();
  if (__builtin_expect(weigh_by_parts(score, exponents.scale, sums, weights), 1)) return;
  move();
  if (!weigh_by_parts(score, exponents.scale, sums, weights)) weigh_any(tile, row, exponents, products, weights);
}

// Three parts, of which the first and the third, of other rows, are computed by the processor's tiles while the second
// one's numbers go through its registers.
inline void attend_by_tiles(const PackedTile& tile, const Row* rows, int64_t num_rows, int64_t query_width,
                            int64_t sums_stride, const Exponents& exponents, Ahead& ahead) {
  constexpr int64_t kRowsBetween = 4;  // weighed from some products to the next ones
  alignas(64) float products[2][kPairRows * kTileKeys];
  alignas(64) bf16 weights[2][kPairRows * kTileKeys];
  const auto sees = [&](int64_t first) {
    const int64_t last = std::min(first + kPairRows, num_rows) - 1;
    return rows[last].stop > tile.first && rows[first].first < tile.first + kTileKeys;
  };
  int64_t first = 0, stop = num_rows;
  while (first < stop && !sees(first)) first += kPairRows;
  const auto pair_at = [&](int64_t row) {
    const int64_t slot = row / kPairRows % 2, count = std::min(kPairRows, num_rows - row);
    const bool sees_all = rows[row].stop >= tile.first + kTileKeys && rows[row + count - 1].first <= tile.first;
    return PairOfTiles{rows + row, count, sees_all, products[slot], weights[slot]};
  };
  PairOfTiles before, now, next;
  bool has_before = false, has_now = false;
  for (int64_t row = first;; row += kPairRows) {
    const bool has_next = row < stop && sees(row);
    if (!has_next && !has_now && !has_before) return;
    if (has_next) next = pair_at(row);
    DueProducts due(tile, has_before ? &before : nullptr, has_next ? &next : nullptr, query_width, sums_stride);
    if (has_now) {
      const int64_t all = due.left();
      for (int64_t own = 0; own < now.count; ++own) {
        if (own % kTileRows == 0) ahead.ask();
        if (own % kRowsBetween == 0) due.multiply(all * (kPairRows - own - kRowsBetween) / kPairRows);
        const int64_t at = own * kTileKeys;
        weigh_by_tiles(tile, now.rows[own], now.sees_all, exponents, now.products + at, now.weights + at);
      }
    }
    due.multiply(0);
    before = now;
    now = next;
    has_before = has_now;
    has_now = has_next;
  }
}

#endif

}  // namespace legato
