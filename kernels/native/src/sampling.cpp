// Which tokens of a row of logits can win a draw, so that exact noise is needed of these alone; and what truncates a
// draw needs: the likely tokens, the mass of all, and the random words of those that are left. And the best tokens of
// all rows.
//
// Allowed: bit i % 16 of word i / 16 is set if token i is; null, if all are.
//
// A draw takes the token with the largest sum of logit and Gumbel noise, -log(-log(u)); see engine/sampling/philox.py.
// That is the token with the least time E = -log(u) / exp(logit). Since -log(u) >= 1 - u, a token whose 1 - u is above
// exp(logit) times somebody's E has lost: two logarithms less for all but a handful of a vocabulary.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "sigmoid.h"
#include "team.h"

using legato::accurate_exp;

namespace {

constexpr int64_t kCounters = 16, kTokens = 4 * kCounters;  // of a block: a counter gives the words of four tokens
constexpr double kLatest = 23.0;                            // above -log(2^-33), which the best token's E cannot exceed
constexpr float kSlack = 1.001f;                            // for what exponentials and roundings are off by

struct Words {
  __m512i of[4];
};

struct Product {
  __m512i low, high;
};

inline Product multiply(__m512i x, uint32_t factor) {
  const __m512i wide = _mm512_set1_epi64(factor);
  const __m512i even = _mm512_mul_epu32(x, wide), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), wide);
  return {_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32)),
          _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd)};
}

// Philox4x32-10 of 16 counters (counter, position, 0, 0).
inline Words philox(__m512i counters, uint32_t position, uint64_t seed) {
  __m512i a = counters, b = _mm512_set1_epi32(static_cast<int>(position)), c = _mm512_setzero_si512(), d = c;
  auto left = static_cast<uint32_t>(seed), right = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const Product first = multiply(a, 0xD2511F53u), second = multiply(c, 0xCD9E8D57u);
    a = _mm512_xor_si512(_mm512_xor_si512(second.high, b), _mm512_set1_epi32(static_cast<int>(left)));
    c = _mm512_xor_si512(_mm512_xor_si512(first.high, d), _mm512_set1_epi32(static_cast<int>(right)));
    b = second.low;
    d = first.low;
    left += 0x9E3779B9u;
    right += 0xBB67AE85u;
  }
  return {{a, b, c, d}};
}

// From the words of counters to those of 64 tokens in order, if lane i has counter i / 4 + i % 4 * 4.
inline Words by_token(const Words& words) {
  const __m512i low = _mm512_unpacklo_epi32(words.of[0], words.of[1]);
  const __m512i high = _mm512_unpackhi_epi32(words.of[0], words.of[1]);
  const __m512i low_end = _mm512_unpacklo_epi32(words.of[2], words.of[3]);
  const __m512i high_end = _mm512_unpackhi_epi32(words.of[2], words.of[3]);
  return {{_mm512_unpacklo_epi64(low, low_end), _mm512_unpackhi_epi64(low, low_end),
           _mm512_unpacklo_epi64(high, high_end), _mm512_unpackhi_epi64(high, high_end)}};
}

inline double time_of(uint32_t word, float relative) {
  const double u = (static_cast<double>(word) + 0.5) * 0x1p-32;
  return -std::log(u) * std::exp(-static_cast<double>(relative));
}

struct Row {
  const float* logits;
  int64_t tokens;
  float best, temperature;
  const uint16_t* allowed;

  // Of 16 tokens; of those beyond the vocabulary as if they were impossible.
  __m512 relative(int64_t first, __mmask16 present) const {
    const __m512 values = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), present, logits + first);
    const __m512 below = _mm512_sub_ps(values, _mm512_set1_ps(best));
    return temperature == 1.0f ? below : _mm512_div_ps(below, _mm512_set1_ps(temperature));
  }

  // Those of 16 tokens that there are.
  __mmask16 within(int64_t first) const {
    const int64_t left = tokens - first;
    return static_cast<__mmask16>(left >= 16 ? 0xffff : left <= 0 ? 0 : (1 << left) - 1);
  }

  // Those of 16 tokens that can be taken.
  __mmask16 present(int64_t first) const {
    const __mmask16 some = within(first);
    return allowed && some ? static_cast<__mmask16>(some & allowed[first / 16]) : some;
  }
};

// Those found so far, and the least time of any of them.
struct Contenders {
  int64_t* ids;
  uint32_t* words;
  int64_t capacity, count;
  double earliest;

  // Of 16 tokens from `first` on. False if there is no room.
  bool add(int64_t first, __mmask16 present, __m512 relative, __m512i drawn) {
    const __m512i missing = _mm512_xor_si512(drawn, _mm512_set1_epi32(-1));  // (1 - u) * 2^32, rounded down
    const __m512 limit = _mm512_set1_ps(static_cast<float>(earliest * 0x1p32) * kSlack);
    __mmask16 left = _mm512_mask_cmp_ps_mask(present, _mm512_cvtepu32_ps(missing),
                                             _mm512_mul_ps(accurate_exp(relative), limit), _CMP_LE_OQ);
    if (!left) return true;
    alignas(64) uint32_t word[16];
    alignas(64) float logit[16];
    _mm512_store_si512(word, drawn);
    _mm512_store_ps(logit, relative);
    for (; left; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      if (count == capacity) return false;
      ids[count] = first + lane;
      words[count++] = word[lane];
      earliest = std::min(earliest, time_of(word[lane], logit[lane]));
    }
    return true;
  }
};

// See sampling_best. Four vectors at a time, none of which waits for another.
inline int64_t best_of(const Row& row, float* largest) {
  constexpr int kParts = 4;
  __m512 all[kParts], best[kParts];
  __m512i where[kParts];  // the first token of the 16 that each lane's best is of
  __mmask16 unordered = 0;
  for (int part = 0; part < kParts; ++part) {
    all[part] = best[part] = _mm512_set1_ps(-INFINITY);
    where[part] = _mm512_setzero_si512();
  }
  const auto take = [&](int64_t first, int part, __m512 values, __mmask16 present) {
    unordered |= _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    all[part] = _mm512_max_ps(all[part], values);
    const __mmask16 better = _mm512_mask_cmp_ps_mask(present, values, best[part], _CMP_GT_OQ);
    best[part] = _mm512_mask_mov_ps(best[part], better, values);
    where[part] = _mm512_mask_mov_epi32(where[part], better, _mm512_set1_epi32(static_cast<int>(first)));
  };
  int64_t first = 0;
  for (; first + 16 * kParts <= row.tokens; first += 16 * kParts) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const int64_t at = first + 16 * part;
      take(at, part, _mm512_loadu_ps(row.logits + at), row.allowed ? row.allowed[at / 16] : 0xffff);
    }
  }
  for (; first < row.tokens; first += 16) {
    const __m512 values = _mm512_mask_loadu_ps(all[0], row.within(first), row.logits + first);
    take(first, 0, values, row.present(first));
  }
  int64_t found = -1;
  float winner = -INFINITY;
  for (int part = 0; part < kParts; ++part) {
    all[0] = _mm512_max_ps(all[0], all[part]);
    alignas(64) float value[16];
    alignas(64) int32_t start[16];
    _mm512_store_ps(value, best[part]);
    _mm512_store_si512(start, where[part]);
    for (int64_t lane = 0; lane < 16; ++lane) {
      const int64_t token = start[lane] + lane;
      if (value[lane] == -INFINITY || value[lane] < winner || (value[lane] == winner && token > found)) continue;
      winner = value[lane];
      found = token;
    }
  }
  *largest = unordered ? NAN : _mm512_reduce_max_ps(all[0]);
  return found;
}

}  // namespace

extern "C" {

// Of each row of `logits [rows, tokens]`: the token of the largest that is `allowed[row]`, the first one among equals,
// -1 if none is or all of them are impossible; and the largest of all its logits, NaN if one is.
void sampling_best(const float* logits, int64_t rows, int64_t tokens, const uint16_t* const* allowed, int64_t* best,
                   float* largest) {
  legato::share_evenly(rows, rows > 1, [&](int64_t row) {
    best[row] = best_of({logits + row * tokens, tokens, 0.0f, 1.0f, allowed[row]}, largest + row);
  });
}

// Writes the ids of all tokens that may have the largest score, rising, and of some that have not, with the words that
// are drawn for them, and returns how many; -1 if they are more than `capacity`. `best` is the largest of those of
// `logits [tokens]` that are allowed. None is NaN.
int64_t sampling_contenders(const float* logits, int64_t tokens, const uint16_t* allowed, float best, float temperature,
                            uint64_t seed, uint32_t position, int64_t capacity, int64_t* ids, uint32_t* words) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const Row row{logits, tokens, best, temperature, allowed};
  Contenders contenders{ids, words, capacity, 0, kLatest};
  for (int64_t block = 0; block < tokens; block += kTokens) {
    if (!(row.present(block) | row.present(block + 16) | row.present(block + 32) | row.present(block + 48))) continue;
    const __m512i counters = _mm512_add_epi32(order, _mm512_set1_epi32(static_cast<int>(block / 4)));
    const Words drawn = by_token(philox(counters, position, seed));
    for (int64_t part = 0; part < 4; ++part) {
      const int64_t first = block + 16 * part;
      const __mmask16 present = row.present(first);
      if (!contenders.add(first, present, row.relative(first, present), drawn.of[part])) return -1;
    }
  }
  return contenders.count;
}

// Writes the words that are drawn for the tokens of the `ids [count]`, none of them negative, in their order.
void sampling_words(const int64_t* ids, int64_t count, uint64_t seed, uint32_t position, uint32_t* words) {
  for (int64_t first = 0; first < count; first += 16) {
    const int64_t size = std::min<int64_t>(16, count - first);
    alignas(64) uint32_t counters[16] = {}, drawn[4][16];
    for (int64_t i = 0; i < size; ++i) counters[i] = static_cast<uint32_t>(ids[first + i] / 4);
    const Words all = philox(_mm512_load_si512(counters), position, seed);
    for (int word = 0; word < 4; ++word) _mm512_store_si512(drawn[word], all.of[word]);
    for (int64_t i = 0; i < size; ++i) words[first + i] = drawn[ids[first + i] % 4][i];
  }
}

// Writes the ids of the tokens whose logits, less `best` and by the temperature, are at least `least`, rising, and these
// values, and returns how many; -1 if they are more than `capacity`. There is room for 16 more than that. `mass` becomes
// the sum of e^value of the whole row, to one part in a million. `best` is the largest of those that are allowed.
int64_t sampling_likely(const float* logits, int64_t tokens, const uint16_t* allowed, float best, float temperature,
                        float least, int64_t capacity, int32_t* ids, float* likely, double* mass) {
  const Row row{logits, tokens, best, temperature, allowed};
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512d low = _mm512_setzero_pd(), high = low;
  int64_t count = 0;
  for (int64_t first = 0; first < tokens; first += 16) {
    const __mmask16 present = row.present(first);
    const __m512 values = row.relative(first, present);
    const __m512 masses = accurate_exp(values);
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(masses)));
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(masses, 1)));
    const __mmask16 near = _mm512_mask_cmp_ps_mask(present, values, _mm512_set1_ps(least), _CMP_GE_OQ);
    if (!near) continue;
    _mm512_storeu_ps(likely + count, _mm512_maskz_compress_ps(near, values));
    const __m512i tokens_of_lanes = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first)), lanes);
    _mm512_storeu_si512(ids + count, _mm512_maskz_compress_epi32(near, tokens_of_lanes));
    count += __builtin_popcount(near);
    if (count > capacity) return -1;
  }
  *mass = _mm512_reduce_add_pd(low) + _mm512_reduce_add_pd(high);
  return count;
}

}  // extern "C"
