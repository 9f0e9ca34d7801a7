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
  static __m512 add_product(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
};

template <>
struct Words<bf16> {
  static constexpr int64_t kNumbers = 2;
  static __m512 add_product(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

// Transposes 16 rows of 16 words; `from[i]` is row i, of which `lanes` are there. Row i of the result goes to
// `into + i * stride`.
inline void transpose(const int32_t* const* from, int64_t word, __mmask16 lanes, int32_t* into, int64_t stride) {
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
    _mm512_storeu_si512(into + i * stride, _mm512_shuffle_i32x4(low, low2, 0x88));
    _mm512_storeu_si512(into + (4 + i) * stride, _mm512_shuffle_i32x4(low, low2, 0xdd));
    _mm512_storeu_si512(into + (8 + i) * stride, _mm512_shuffle_i32x4(high, high2, 0x88));
    _mm512_storeu_si512(into + (12 + i) * stride, _mm512_shuffle_i32x4(high, high2, 0xdd));
  }
}

// Asks for what is copied next while this is copied: blocks lie anywhere, so that no processor foresees it. Into the
// second cache: two tiles of keys and values and their copies are more than the first one holds.
inline void prefetch(const void* row, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch(static_cast<const char*>(row) + at, _MM_HINT_T1);
}

// `into [words rounded up to 16, kTileKeys]`, of tokens [first, stop) and what shares a register with them.
inline void pack_keys(const int32_t* const* tokens, const int32_t* const* next, int64_t first, int64_t stop,
                      int64_t words, int32_t* into) {
  for (int64_t token = first / 16 * 16; token < stop; token += 16) {
    for (int64_t i = 0; i < 16; ++i) prefetch(next[token + i], words * 4);
    for (int64_t word = 0; word < words; word += 16) {
      transpose(tokens + token, word, first_lanes(words - word), into + word * kTileKeys + token, kTileKeys);
    }
  }
}

// `into [steps, width]`: word i of step s is number i of the tokens that step s multiplies.
inline void pack_values(const float* const* tokens, const float* const* next, int64_t steps, int64_t head_dim,
                        int64_t width, int32_t* into) {
  for (int64_t step = 0; step < steps; ++step) {
    prefetch(next[step], head_dim * 4);
    for (int64_t at = 0; at < head_dim; at += 16) {
      const __m512 value = load(tokens[step] + at, first_lanes(head_dim - at));
      _mm512_storeu_ps(into + step * width + at, value);
    }
  }
}

inline __m512i interleaved(int first) {
  alignas(64) uint16_t picked[32];
  for (int i = 0; i < 16; ++i) {
    picked[2 * i] = static_cast<uint16_t>(first + i);
    picked[2 * i + 1] = static_cast<uint16_t>(first + i + 32);
  }
  return _mm512_load_si512(picked);
}

inline void pack_values(const bf16* const* tokens, const bf16* const* next, int64_t steps, int64_t head_dim,
                        int64_t width, int32_t* into) {
  const __m512i low = interleaved(0), high = interleaved(16);
  for (int64_t step = 0; step < steps; ++step) {
    prefetch(next[2 * step], head_dim * 2);
    prefetch(next[2 * step + 1], head_dim * 2);
    for (int64_t at = 0; at < head_dim; at += 32) {
      const int64_t count = head_dim - at;
      const __mmask32 lanes = count >= 32 ? ~0u : (1u << count) - 1u;
      const __m512i a = _mm512_maskz_loadu_epi16(lanes, tokens[2 * step] + at);
      const __m512i b = _mm512_maskz_loadu_epi16(lanes, tokens[2 * step + 1] + at);
      int32_t* words = into + step * width + at;
      _mm512_storeu_si512(words, _mm512_permutex2var_epi16(a, low, b));
      if (at + 16 < width) _mm512_storeu_si512(words + 16, _mm512_permutex2var_epi16(a, high, b));
    }
  }
}

}  // namespace legato
