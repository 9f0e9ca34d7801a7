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

// 2^x to 2.2e-4, exactly 1 at 0, with fewer instructions than `rough_exp2_of_finite`: by the part above a whole number.
inline __attribute__((always_inline)) __m512 weight_by_tiles(__m512 x) {
  constexpr float kCoefficients[] = {0x1.3ead94p-4f, 0x1.ce9496p-3f, 0x1.648526p-1f, 1.0f};
  const __m512 part = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);  // see `times_two_to`
  return _mm512_maskz_scalef_ps(normal, polynomial(kCoefficients, part), x);
}

// As `weigh`, but that the reference moves where the weights of four tokens, which have to be summed, are too large
// together: to find the largest exponent first would take a tenth of the time. The row's sums of values move with it.
inline __attribute__((always_inline)) void weigh_by_tiles(const PackedTile& tile, const Row& row,
                                                          const Exponents& exponents, const float* products,
                                                          bf16* weights) {
  Sums& sums = *row.sums;
  __m512 score[kKeyVectors], weight[kKeyVectors];
  const __m512 scale = _mm512_set1_ps(exponents.scale);
  const uint64_t seen = tokens_seen(row, tile.first);
  for (int64_t v = 0; v < kKeyVectors; ++v) {
    score[v] = exponents.score(_mm512_load_ps(products + 16 * v));
    if (seen != ~0ull) score[v] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen >> (16 * v), score[v]);
  }
  const auto move = [&] {
    const bool is_first = sums.reference == kNothingSeen;
    const __m512 larger = _mm512_max_ps(_mm512_max_ps(score[0], score[1]), _mm512_max_ps(score[2], score[3]));
    const __m512 factor = move_reference(sums, _mm512_mul_ps(larger, scale));
    if (is_first) return;  // all sums are zeros
    for (int64_t at = 0; at < tile.width; at += 16) {
      _mm512_store_ps(sums.values + at, _mm512_mul_ps(_mm512_load_ps(sums.values + at), factor));
    }
  };
  const auto weigh_all = [&] {
    const __m512 reference = _mm512_set1_ps(sums.reference);
    for (int64_t v = 0; v < kKeyVectors; ++v) {
      __m512 exponent = _mm512_fmsub_ps(score[v], scale, reference);
      if (seen != ~0ull) exponent = _mm512_max_ps(_mm512_set1_ps(kNothing), exponent);  // in this order NaN stays NaN
      weight[v] = weight_by_tiles(exponent);
    }
    return _mm512_add_ps(_mm512_add_ps(weight[0], weight[1]), _mm512_add_ps(weight[2], weight[3]));
  };
  if (sums.reference == kNothingSeen) move();
  __m512 added = weigh_all();
  if (__builtin_expect(_mm512_cmp_ps_mask(added, _mm512_set1_ps(kLargeWeights), _CMP_GT_OQ), 0)) {
    move();
    added = weigh_all();
  }
  store_weights<bf16>(weights, weight);
  _mm512_store_ps(sums.weights, _mm512_add_ps(_mm512_load_ps(sums.weights), added));
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
    const int64_t slot = row / kPairRows % 2;
    return PairOfTiles{rows + row, std::min(kPairRows, num_rows - row), products[slot], weights[slot]};
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
        weigh_by_tiles(tile, now.rows[own], exponents, now.products + at, now.weights + at);
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
