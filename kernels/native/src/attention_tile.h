// A tile of a sequence's keys and values, copied from its blocks into the order in which attention reads them.
//
// Everything is laid out in words of 32 bits: a float, or two bfloat16 that are multiplied and summed together.

#pragma once

#include <algorithm>

#include "bf16.h"

namespace legato {

constexpr int64_t kTileKeys = 64;                  // tokens of a tile, which begins at a multiple of it
constexpr int64_t kKeyVectors = kTileKeys / 16;    // registers that hold one number per token

// How numbers of a type fill words, and how words are multiplied.
template <typename T>
struct Words;

template <>
struct Words<float> {
  static constexpr int64_t kNumbers = 1;
  static constexpr int kParts = 1;
  using Number = float;  // of queries and weights
  using Lanes = __m512;
  static Lanes of_many(__m512i words, int) { return _mm512_castsi512_ps(words); }
  static Lanes of_one(const float* word, int) {
    int32_t bits;
    __builtin_memcpy(&bits, word, sizeof bits);
    return _mm512_castsi512_ps(_mm512_set1_epi32(bits));
  }
  static __m512 add(__m512 sum, Lanes many, Lanes one) { return _mm512_fmadd_ps(many, one, sum); }
};

template <>
struct Words<bf16> : Pairs<> {
  static constexpr int64_t kNumbers = 2;
};

// Transposes 16 rows of 16 words; `from[i] + word` is row i, of which `lanes` are there.
inline __attribute__((always_inline)) void transpose(const int32_t* const* from, int64_t word, __mmask16 lanes,
                                                     __m512i (&into)[16]) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int row = 0; row < 16; ++row) a[row] = _mm512_maskz_loadu_epi32(lanes, from[row] + word);
#pragma GCC unroll 8
  for (int row = 0; row < 16; row += 2) {
    b[row] = _mm512_unpacklo_epi32(a[row], a[row + 1]);
    b[row + 1] = _mm512_unpackhi_epi32(a[row], a[row + 1]);
  }
#pragma GCC unroll 4
  for (int row = 0; row < 16; row += 4) {  // a[4 j + i]: words 4 k + i of rows 4 j .. 4 j + 3, for each k
    a[row] = _mm512_unpacklo_epi64(b[row], b[row + 2]);
    a[row + 1] = _mm512_unpackhi_epi64(b[row], b[row + 2]);
    a[row + 2] = _mm512_unpacklo_epi64(b[row + 1], b[row + 3]);
    a[row + 3] = _mm512_unpackhi_epi64(b[row + 1], b[row + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i low = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x44), high = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xee);
    const __m512i low2 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x44);
    const __m512i high2 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xee);
    into[i] = _mm512_shuffle_i32x4(low, low2, 0x88);
    into[4 + i] = _mm512_shuffle_i32x4(low, low2, 0xdd);
    into[8 + i] = _mm512_shuffle_i32x4(high, high2, 0x88);
    into[12 + i] = _mm512_shuffle_i32x4(high, high2, 0xdd);
  }
}

// Where the keys and values of a tile's tokens lie, from the first key head on; of those that no row sees: zeros.
template <typename T>
struct Tokens {
  int64_t first, stop;  // those that any row sees
  const T* rows[2 * kTileKeys];

  const int32_t* const* key_words() const { return reinterpret_cast<const int32_t* const*>(rows); }
  const T* const* values() const { return rows + kTileKeys; }
};

// `into [words rounded up to 16, kTileKeys]`, of tokens [first, stop) and what shares a register with them. After each
// 16 words of 16 tokens comes `ask`.
template <typename T, typename Ask>
void pack_keys(const Tokens<T>& tokens, int64_t at, int64_t words, int32_t* into, const Ask& ask) {
  for (int64_t token = tokens.first / 16 * 16; token < tokens.stop; token += 16) {
    for (int64_t word = 0; word < words; word += 16) {
      __m512i rows[16];
      transpose(tokens.key_words() + token, at / Words<T>::kNumbers + word, first_lanes(words - word), rows);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(into + (word + i) * kTileKeys + token, rows[i]);
      ask();
    }
  }
}

constexpr int64_t kStepsPerAsk = 2;

// `into [steps, width]`: word i of step s is number i of the tokens that step s multiplies, which are those from
// `token_of(s)` on.
template <typename Ask, typename Order>
void pack_values(const Tokens<float>& tokens, int64_t first, int64_t steps, int64_t value_dim, int64_t width,
                 int32_t* into, const Ask&, const Order& token_of) {
  for (int64_t step = 0; step < steps; ++step) {
    for (int64_t at = 0; at < value_dim; at += 16) {
      const __m512 value = load(tokens.values()[token_of(step)] + first + at, first_lanes(value_dim - at));
      _mm512_storeu_ps(into + step * width + at, value);
    }
  }
}

template <typename Ask, typename Order>
void pack_values(const Tokens<bf16>& tokens, int64_t first, int64_t steps, int64_t value_dim, int64_t width,
                 int32_t* into, const Ask& ask, const Order& token_of) {
  for (int64_t step = 0; step < steps; ++step) {
    const bf16* const* rows = tokens.values() + token_of(step);
    if (step % kStepsPerAsk == 0) ask();
    for (int64_t at = 0; at < value_dim; at += 32) {
      const int64_t count = value_dim - at;
      const __mmask32 lanes = count >= 32 ? ~0u : (1u << count) - 1u;
      const __m512i a = _mm512_maskz_loadu_epi16(lanes, rows[0] + first + at);
      const __m512i b = _mm512_maskz_loadu_epi16(lanes, rows[1] + first + at);
      int32_t* words = into + step * width + at;
      _mm512_storeu_si512(words, kLow.of(a, b));
      if (at + 16 < width) _mm512_storeu_si512(words + 16, kHigh.of(a, b));
    }
  }
}

}  // namespace legato
