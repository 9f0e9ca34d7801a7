// Which tokens of a row of logits can win a draw, so that exact noise is needed of these alone; and what truncates a
// draw needs: the likely tokens, the mass of all, and the random words of those that are left. And the best tokens.
//
// Allowed: bit i % 16 of word i / 16 is set if token i is; null, if all are.
//
// A draw takes the token with the largest sum of logit and Gumbel noise, -log(-log(u)); see engine/sampling/philox.py.
// That is the token with the least time E = -log(u) / exp(logit). Since -log(u) >= 1 - u, a token whose 1 - u is above
// exp(logit) times somebody's E has lost: two logarithms less for all but a handful of a vocabulary.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "bf16.h"
#include "sigmoid.h"
#include "team.h"

using legato::accurate_exp;
using legato::bf16;

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

// Logits as they are, of type T.
template <typename T>
struct Row {
  const T* logits;
  int64_t tokens;
  float best, temperature;
  const uint16_t* allowed;

  // 16 logits; minus infinity where none is `present`. What is loaded are the first ones, as some machines need it.
  __m512 values(int64_t first, __mmask16 present) const {
    const __m512 loaded = legato::load(logits + first, within(first));
    return _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), present, loaded);
  }

  // Of 16 tokens; of those that are not present as if they were impossible.
  __m512 relative(int64_t first, __mmask16 present) const {
    const __m512 below = _mm512_sub_ps(values(first, present), _mm512_set1_ps(best));
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

// The first token of the largest logit among those that are allowed, and that logit; -1 if none is above minus infinity.
struct Best {
  int64_t token = -1;
  float logit = -INFINITY;
};

// `largest` becomes that of all logits, NaN if one is. Four vectors at a time, none of which waits for another.
template <typename T>
Best best_of(const Row<T>& row, float* largest) {
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
      take(at, part, legato::load(row.logits + at, 0xffff), row.allowed ? row.allowed[at / 16] : 0xffff);
    }
  }
  for (; first < row.tokens; first += 16) {
    take(first, 0, row.values(first, row.within(first)), row.present(first));
  }
  Best found;
  for (int part = 0; part < kParts; ++part) {
    all[0] = _mm512_max_ps(all[0], all[part]);
    alignas(64) float value[16];
    alignas(64) int32_t start[16];
    _mm512_store_ps(value, best[part]);
    _mm512_store_si512(start, where[part]);
    for (int64_t lane = 0; lane < 16; ++lane) {
      const int64_t token = start[lane] + lane;
      if (value[lane] == -INFINITY || value[lane] < found.logit) continue;
      if (value[lane] == found.logit && token > found.token) continue;
      found = {token, value[lane]};
    }
  }
  *largest = unordered ? NAN : _mm512_reduce_max_ps(all[0]);
  return found;
}

// Likely tokens of a row, of which there is room for `capacity` and 16 more, and the mass of the row.
struct Likely {
  int32_t* ids;
  float* relative;
  int64_t capacity;
  double mass = 0;

  // Of those at least `least`, rising. How many they are; -1 if there is no room.
  template <typename T>
  int64_t find(const Row<T>& row, float least) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512d low = _mm512_setzero_pd(), high = low;
    int64_t count = 0;
    for (int64_t first = 0; first < row.tokens; first += 16) {
      const __mmask16 present = row.present(first);
      const __m512 values = row.relative(first, present);
      const __m512 masses = accurate_exp(values);
      low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(masses)));
      high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(masses, 1)));
      const __mmask16 near = _mm512_mask_cmp_ps_mask(present, values, _mm512_set1_ps(least), _CMP_GE_OQ);
      if (!near) continue;
      const __m512i tokens = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first)), lanes);
      _mm512_storeu_si512(ids + count, _mm512_maskz_compress_epi32(near, tokens));
      _mm512_storeu_ps(relative + count, _mm512_maskz_compress_ps(near, values));
      count += __builtin_popcount(near);
      if (count > capacity) return -1;
    }
    mass = _mm512_reduce_add_pd(low) + _mm512_reduce_add_pd(high);
    return count;
  }
};

// What is found of each row. Field by field as in kernels/native/sampling.py.
struct Found {
  int64_t* best;       // the first token of the largest logit that is allowed; -1 if all of them are impossible
  float* best_logits;  // their logits
  float* largest;      // of all logits of the row, NaN if one is
  int64_t capacity;    // for likely tokens of each row, and there is room for 16 more
  int32_t* ids;        // [rows, capacity + 16], rising
  float* relative;     // likewise: their logits less the best one's, by the temperature
  int64_t* counts;     // how many they are; -1: more than there is room for, or nobody asked
  double* masses;      // the sum of e^relative of all that are allowed, to one part in a million
};

template <typename T>
void look(const T* logits, int64_t rows, int64_t tokens, const uint16_t* const* allowed, const float* temperatures,
          float radius, const Found& found) {
  const auto look_at = [&](int64_t at) {
    Row<T> row{logits + at * tokens, tokens, 0.0f, temperatures[at], allowed[at]};
    const Best best = best_of(row, found.largest + at);
    found.best[at] = best.token;
    found.best_logits[at] = row.best = best.logit;
    found.counts[at] = -1;
    if (!(row.temperature > 0.0f) || best.token < 0 || !std::isfinite(found.largest[at])) return;
    const int64_t room = found.capacity + 16;
    Likely likely{found.ids + at * room, found.relative + at * room, found.capacity};
    found.counts[at] = likely.find(row, -radius);
    found.masses[at] = likely.mass;
  };
  if (rows == 1) return look_at(0);  // no work for another thread
  legato::share(rows, 1, look_at);
}

}  // namespace

extern "C" {

// Looks for the best token of each row of `logits [rows, tokens]`, and, where its temperature is not 0, for those whose
// logits, by the temperature, are within a `radius` of it.
void sampling_look_f32(const float* logits, int64_t rows, int64_t tokens, const uint16_t* const* allowed,
                       const float* temperatures, float radius, const Found* found) {
  look(logits, rows, tokens, allowed, temperatures, radius, *found);
}

void sampling_look_bf16(const bf16* logits, int64_t rows, int64_t tokens, const uint16_t* const* allowed,
                        const float* temperatures, float radius, const Found* found) {
  look(logits, rows, tokens, allowed, temperatures, radius, *found);
}

// Writes the ids of all tokens that may have the largest score, rising, and of some that have not, with the words that
// are drawn for them, and returns how many; -1 if they are more than `capacity`. `best` is the largest of those of
// `logits [tokens]` that are allowed. None is NaN.
int64_t sampling_contenders(const float* logits, int64_t tokens, const uint16_t* allowed, float best, float temperature,
                            uint64_t seed, uint32_t position, int64_t capacity, int64_t* ids, uint32_t* words) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const Row<float> row{logits, tokens, best, temperature, allowed};
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

}  // extern "C"
