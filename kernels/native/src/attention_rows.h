// Some rows (queries of heads that share a key head) over one tile of keys: online softmax in float32.
//
// A row's sums depend on the tiles that it sees and on nothing else, to the bit: a tile that it does not see multiplies
// them by one and adds zeros. So rows may be computed together in any number.

#pragma once

#include <cmath>
#include <type_traits>

#include "attention_ahead.h"
#include "exp.h"

namespace legato {

constexpr int kBlockRows = 6;             // rows at a time: with kKeysAtOnce registers of sums each, 24 of 32
constexpr int64_t kKeysAtOnce = kRegisters == 32 ? kKeyVectors : 1;  // or 6 of 8
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kNothingSeen = -1e30f;    // below every score; not infinite, so that differences of it are numbers

// Registers of outputs that are summed at a time, for so many rows.
constexpr int width_vectors(int64_t num_rows) {
  if (kRegisters < 32) return 1;
  return num_rows > kBlockRows ? 2 : 4;
}

// The sums of a row: its weights' sum in 16 parts, and `width` weighted sums of values; weights are 2 to the power of
// their exponent less the reference.
struct Sums {
  float weights[16];
  float reference;
  float unused[15];
  float values[];
};

inline int64_t sums_size(int64_t width) { return static_cast<int64_t>(sizeof(Sums) / sizeof(float)) + width; }

struct Row {
  const void* query;     // [head_dim] of Words<T>::Number
  int64_t place;         // in [queries of the item, heads]
  int64_t first, stop;   // the tokens that it sees
  Sums* sums;

  // Those of a word.
  template <typename T>
  const typename Words<T>::Number* numbers(int64_t word) const {
    return static_cast<const typename Words<T>::Number*>(query) + word * Words<T>::kNumbers;
  }
};

// A tile of one key head.
struct PackedTile {
  int64_t first;          // token
  int64_t words, width;   // of a key; of the values' sums, a multiple of 16
  int64_t steps;          // words of a token's weight: those beyond are of dead slots
  int64_t key_vectors;    // registers of tokens: those beyond are of dead slots
  const int32_t* keys;    // see `pack_keys`
  const int32_t* values;  // see `pack_values`
};

// What becomes of a product of a query and a key: a score, of which `scale` times, which is positive, is an exponent of
// two.
struct Exponents {
  float inner, scale;
  bool capped;
  __m512 score(__m512 product) const {
    return capped ? tanh(_mm512_mul_ps(product, _mm512_set1_ps(inner))) : product;
  }
};

inline void start(Sums& sums, int64_t width) {
  std::fill_n(sums.weights, 16, 0.0f);
  std::fill_n(sums.values, width, 0.0f);
  sums.reference = kNothingSeen;
}

template <typename T, int kRows, int kVectors = kKeyVectors>
inline __attribute__((always_inline)) void multiply_keys(const PackedTile& tile, const Row* rows,
                                                         __m512 (&products)[kRows][kKeyVectors]) {
  if constexpr (kVectors > 1) {
    if (tile.key_vectors < kVectors) return multiply_keys<T, kRows, kVectors - 1>(tile, rows, products);
  }
  if constexpr (kKeysAtOnce == 1) {
    for (int64_t v = 0; v < kVectors; ++v) {
      __m512 sums[kRows];
      for (int row = 0; row < kRows; ++row) sums[row] = _mm512_setzero_ps();
      for (int64_t word = 0; word < tile.words; ++word) {
        const __m512i words = _mm512_loadu_si512(tile.keys + word * kTileKeys + v * 16);
#pragma GCC unroll 2
        for (int part = 0; part < Words<T>::kParts; ++part) {
          const auto keys = Words<T>::of_many(words, part);
#pragma GCC unroll 6
          for (int row = 0; row < kRows; ++row) {
            sums[row] = Words<T>::add(sums[row], keys, Words<T>::of_one(rows[row].template numbers<T>(word), part));
          }
        }
      }
      for (int row = 0; row < kRows; ++row) products[row][v] = sums[row];
    }
    return;
  }
  for (int64_t word = 0; word < tile.words; ++word) {
    __m512i keys[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) keys[v] = _mm512_loadu_si512(tile.keys + word * kTileKeys + v * 16);
#pragma GCC unroll 2
    for (int part = 0; part < Words<T>::kParts; ++part) {
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row) {
        const auto query = Words<T>::of_one(rows[row].template numbers<T>(word), part);
#pragma GCC unroll 4
        for (int64_t v = 0; v < kVectors; ++v) {
          products[row][v] = Words<T>::add(products[row][v], Words<T>::of_many(keys[v], part), query);
        }
      }
    }
  }
}

template <int kVectors>
inline __attribute__((always_inline)) void load_step(const PackedTile& tile, int64_t step, int64_t at,
                                                     __m512i (&values)[kVectors]) {
  for (int v = 0; v < kVectors; ++v) values[v] = _mm512_loadu_si512(tile.values + step * tile.width + at + 16 * v);
}

// One bit per token of the tile.
inline uint64_t tokens_seen(const Row& row, int64_t first_token) {
  const int64_t first = row.first - first_token, stop = row.stop - first_token;
  if (stop <= 0 || first >= kTileKeys) return 0;
  const uint64_t before_stop = stop >= kTileKeys ? ~0ull : (1ull << stop) - 1;
  return first <= 0 ? before_stop : before_stop & ~((1ull << first) - 1);
}

// Of values of type T, whose precision they get.
template <typename T>
void store_weights(float* into, const __m512 (&weights)[kKeyVectors]) {
  for (int64_t v = 0; v < kKeyVectors; ++v) {
    _mm512_storeu_ps(into + 16 * v, std::is_same_v<T, float> ? weights[v] : rounded(weights[v]));
  }
}

template <typename T>
void store_weights(bf16* into, const __m512 (&weights)[kKeyVectors]) {
  for (int64_t v = 0; v < kKeyVectors; v += 2) {
    _mm512_storeu_si512(into + 16 * v, as_words(_mm512_cvtne2ps_pbh(weights[v + 1], weights[v])));
  }
}

inline __m512 weight_of(__m512 exponent, const float*) { return exp2_of_finite(exponent); }

inline __m512 weight_of(__m512 exponent, const bf16*) { return rough_exp2_of_finite(exponent); }

// What exponents may be above their row's reference.
constexpr float kSlack = 8.0f;

// Moves the reference of a row's sums to the largest of the tile's exponents, if that is far above it: usually no
// exponent of a tile is, and to find its largest would take as long as everything else. Returns what the sums of
// values, which are relative to the earlier one, have to be multiplied by.
inline __attribute__((always_inline)) __m512 move_reference(Sums& sums, __m512 largest_of_lanes) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const float before = sums.reference;
  if (!_mm512_cmp_ps_mask(largest_of_lanes, _mm512_set1_ps(before + kSlack), _CMP_GT_OQ)) return one;
  sums.reference = _mm512_reduce_max_ps(largest_of_lanes);
  const __m512 factor = exp2(_mm512_set1_ps(before - sums.reference));
  _mm512_storeu_ps(sums.weights, _mm512_mul_ps(_mm512_loadu_ps(sums.weights), factor));
  return factor;
}

// Turns products into weights, relative to the row's reference. Returns what `move_reference` does.
template <typename T>
inline __attribute__((always_inline)) __m512 weigh(int64_t first_token, const Row& row,
                                                   const Exponents& exponents,
                                                   const __m512 (&products)[kKeyVectors],
                                                   typename Words<T>::Number* weights) {
  __m512 score[kKeyVectors], weight[kKeyVectors];
  const __m512 scale = _mm512_set1_ps(exponents.scale), nothing = _mm512_set1_ps(kNothing);
  const uint64_t seen = tokens_seen(row, first_token);
  for (int64_t v = 0; v < kKeyVectors; ++v) {
    score[v] = exponents.score(products[v]);
    if (seen != ~0ull) score[v] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen >> (16 * v), score[v]);
  }
  const __m512 larger = _mm512_max_ps(_mm512_max_ps(score[0], score[1]), _mm512_max_ps(score[2], score[3]));
  const __m512 factor = move_reference(*row.sums, _mm512_mul_ps(larger, scale));
  const __m512 reference = _mm512_set1_ps(row.sums->reference);
  for (int64_t v = 0; v < kKeyVectors; ++v) {
    __m512 exponent = _mm512_fmsub_ps(score[v], scale, reference);
    if (seen != ~0ull) exponent = _mm512_max_ps(nothing, exponent);  // in this order NaN stays NaN
    weight[v] = weight_of(exponent, static_cast<const T*>(nullptr));
  }
  store_weights<T>(weights, weight);
  const __m512 added = _mm512_add_ps(_mm512_add_ps(weight[0], weight[1]), _mm512_add_ps(weight[2], weight[3]));
  _mm512_storeu_ps(row.sums->weights, _mm512_add_ps(_mm512_loadu_ps(row.sums->weights), added));
  return factor;
}

template <typename T, int kRows, int kVectors, typename Tile>
inline void add_values(const Tile& tile, const Row* rows, const typename Words<T>::Number* weights,
                       const __m512* factors, int64_t at) {
  __m512 sums[kRows][kVectors];
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      sums[row][v] = _mm512_mul_ps(_mm512_loadu_ps(rows[row].sums->values + at + 16 * v), factors[row]);
    }
  }
  for (int64_t step = 0; step < tile.steps; ++step) {
    __m512i values[kVectors];
    load_step(tile, step, at, values);
#pragma GCC unroll 2
    for (int part = 0; part < Words<T>::kParts; ++part) {
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        const auto weight = Words<T>::of_one(weights + row * kTileKeys + step * Words<T>::kNumbers, part);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          sums[row][v] = Words<T>::add(sums[row][v], Words<T>::of_many(values[v], part), weight);
        }
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(rows[row].sums->values + at + 16 * v, sums[row][v]);
  }
}

template <typename T, int kRows, int kVectors, typename Tile>
inline void add_rest(const Tile& tile, const Row* rows, const typename Words<T>::Number* weights,
                     const __m512* factors, int64_t at) {
  if (tile.width - at == kVectors * 16) return add_values<T, kRows, kVectors>(tile, rows, weights, factors, at);
  if constexpr (kVectors > 1) add_rest<T, kRows, kVectors - 1>(tile, rows, weights, factors, at);
}

template <typename T, int kRows, typename Tile>
void attend_block(const Tile& tile, const Row* rows, const Exponents& exponents) {
  __m512 products[kRows][kKeyVectors], factors[kRows];
  alignas(64) typename Words<T>::Number weights[kRows][kTileKeys];
  for (int row = 0; row < kRows; ++row) {
    for (int64_t v = 0; v < kKeyVectors; ++v) products[row][v] = _mm512_setzero_ps();
  }
  multiply_keys<T, kRows>(tile, rows, products);
  for (int row = 0; row < kRows; ++row) {
    factors[row] = weigh<T>(tile.first, rows[row], exponents, products[row], weights[row]);
  }
  constexpr int kVectors = width_vectors(kRows);
  int64_t at = 0;
  for (; at + kVectors * 16 <= tile.width; at += kVectors * 16) {
    add_values<T, kRows, kVectors>(tile, rows, weights[0], factors, at);
  }
  if constexpr (kVectors > 1) {
    if (at < tile.width) add_rest<T, kRows, kVectors - 1>(tile, rows, weights[0], factors, at);
  }
}

template <typename T, int kRows, typename Tile>
void attend_rest(const Tile& tile, const Row* rows, const Exponents& exponents, int64_t count) {
  if (count == kRows) return attend_block<T, kRows>(tile, rows, exponents);
  if constexpr (kRows > 1) attend_rest<T, kRows - 1>(tile, rows, exponents, count);
}

// `rows` come by rising `stop` and `first`.
template <typename T>
void attend_tile(const PackedTile& tile, const Row* rows, int64_t num_rows, const Exponents& exponents, Ahead& ahead) {
  for (int64_t row = 0; row < num_rows; row += kBlockRows) {
    ahead.ask();
    const int64_t count = std::min<int64_t>(kBlockRows, num_rows - row);
    const int64_t num_seen = rows[row + count - 1].stop - tile.first;
    if (num_seen <= 0 || rows[row].first >= tile.first + kTileKeys) continue;
    PackedTile seen = tile;
    seen.steps = std::min(tile.steps, (num_seen + Words<T>::kNumbers - 1) / Words<T>::kNumbers);
    seen.key_vectors = std::min(kKeyVectors, (num_seen + 15) / 16);
    attend_rest<T, kBlockRows>(seen, rows + row, exponents, count);
  }
}

// Adds the sums of later tokens.
inline void merge(Sums& sums, const Sums& later, int64_t width) {
  const float reference = std::max(sums.reference, later.reference);
  const __m512 a = exp2(_mm512_set1_ps(sums.reference - reference));
  const __m512 b = exp2(_mm512_set1_ps(later.reference - reference));
  const auto add = [&](float* to, const float* from) {
    _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_loadu_ps(from), b, _mm512_mul_ps(_mm512_loadu_ps(to), a)));
  };
  add(sums.weights, later.weights);
  for (int64_t at = 0; at < width; at += 16) add(sums.values + at, later.values + at);
  sums.reference = reference;
}

// As `merge`, of rows whose earlier sums lie `to_earlier` numbers from where they point to: 16 at a time, since most of
// the work is to find by what to multiply.
inline void merge_rows(const Row* rows, int64_t count, int64_t to_earlier, int64_t width) {
  alignas(64) float earlier[16], later[16], all[16];
  const auto add = [](float* to, const float* from, __m512 a, __m512 b) {
    _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_loadu_ps(from), b, _mm512_mul_ps(_mm512_loadu_ps(to), a)));
  };
  for (; count > 0; count -= 16, rows += 16) {
    const int64_t some = std::min<int64_t>(count, 16);
    const auto earlier_of = [&](int64_t row) {
      return reinterpret_cast<Sums*>(reinterpret_cast<float*>(rows[row].sums) + to_earlier);
    };
    for (int64_t row = 0; row < 16; ++row) {
      earlier[row] = earlier_of(std::min(row, some - 1))->reference;
      later[row] = rows[std::min(row, some - 1)].sums->reference;
    }
    const __m512 a = _mm512_loadu_ps(earlier), b = _mm512_loadu_ps(later), reference = _mm512_max_ps(b, a);
    _mm512_storeu_ps(earlier, exp2(_mm512_sub_ps(a, reference)));
    _mm512_storeu_ps(later, exp2(_mm512_sub_ps(b, reference)));
    _mm512_storeu_ps(all, reference);
    for (int64_t row = 0; row < some; ++row) {
      Sums& to = *earlier_of(row);
      const Sums& from = *rows[row].sums;
      const __m512 by = _mm512_set1_ps(earlier[row]), by_later = _mm512_set1_ps(later[row]);
      add(to.weights, from.weights, by, by_later);
      for (int64_t at = 0; at < width; at += 16) add(to.values + at, from.values + at, by, by_later);
      to.reference = all[row];
    }
  }
}

// `more`: a weight of nothing. Returns whether all results are numbers. What is too small to be normal becomes 0, without
// a sign: a tile that a row does not see adds zeros of either sign to its sums, and some products take such a sum for 0.
template <typename T>
bool finish(const Sums& sums, float more, int64_t value_dim, T* out) {
  const __m512 total = _mm512_set1_ps(_mm512_reduce_add_ps(_mm512_loadu_ps(sums.weights)) + more);
  const __m512 least = _mm512_set1_ps(0x1p-126f);
  __mmask16 are_none = 0;
  for (int64_t at = 0; at < value_dim; at += 16) {
    const __mmask16 lanes = first_lanes(value_dim - at);
    const __m512 mean = _mm512_div_ps(_mm512_loadu_ps(sums.values + at), total);
    are_none |= _mm512_mask_cmp_ps_mask(lanes, mean, mean, _CMP_UNORD_Q);
    const __mmask16 are_normal = _mm512_cmp_ps_mask(_mm512_abs_ps(mean), least, _CMP_NLT_UQ);  // or NaN
    store(out + at, lanes, _mm512_mask_mov_ps(_mm512_setzero_ps(), are_normal, mean));
  }
  return !are_none;
}

}  // namespace legato
