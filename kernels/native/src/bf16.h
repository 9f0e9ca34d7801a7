// Conversions between bfloat16, which lies in memory as its upper half, and float32.

#pragma once

#include "vectors.h"

namespace legato {

using bf16 = uint16_t;

// Lanes [0, count) of 16; all of them from 16 on.
inline __mmask16 first_lanes(int64_t count) {
  return count >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << count) - 1u);
}

inline __m512 widen(__m256i narrow) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

inline __m512 load(const bf16* from, __mmask16 lanes) { return widen(_mm256_maskz_loadu_epi16(lanes, from)); }

inline __m512 load(const float* from, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, from); }

inline __m512 rounded(__m512 wide) { return widen(to_bf16(wide)); }

inline void store(bf16* to, __mmask16 lanes, __m512 wide) { _mm256_mask_storeu_epi16(to, lanes, to_bf16(wide)); }

inline void store(float* to, __mmask16 lanes, __m512 wide) { _mm512_mask_storeu_ps(to, lanes, wide); }

inline void widen(const bf16* from, int64_t count, float* into) {
  for (int64_t at = 0; at < count; at += 16) {
    const __mmask16 lanes = first_lanes(count - at);
    store(into + at, lanes, load(from + at, lanes));
  }
}

// Words of two numbers, of 16 weights, keys or whatever there are many of, times two of one row, which many of them
// meet: added to 16 sums by an instruction.
template <bool kInstruction = kPairProducts>
struct Pairs {
  static constexpr int kParts = 1;
  using Number = bf16;  // of the row
  using Lanes = __m512bh;
  static Lanes of_many(__m512i words, int) { return as_pairs(words); }
  static Lanes of_one(const bf16* row, int) {
    int32_t both;
    __builtin_memcpy(&both, row, sizeof both);
    return as_pairs(_mm512_set1_epi32(both));
  }
  static __m512 add(__m512 sum, Lanes many, Lanes one) { return _mm512_dpbf16_ps(sum, many, one); }
};

// Or without: in two parts, the upper numbers first, as the instruction does. The first part of all rows comes before
// the second, so that sums stay in registers; and rows are float32 from the start, since each number is read often.
template <>
struct Pairs<false> {
  static constexpr int kParts = 2;
  using Number = float;
  using Lanes = __m512;
  static Lanes of_many(__m512i words, int part) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
    return _mm512_castsi512_ps(part ? _mm512_slli_epi32(words, 16) : _mm512_and_si512(words, upper));
  }
  static Lanes of_one(const float* row, int part) { return _mm512_set1_ps(row[1 - part]); }
  static __m512 add(__m512 sum, Lanes many, Lanes one) { return _mm512_fmadd_ps(many, one, sum); }
};

}  // namespace legato
