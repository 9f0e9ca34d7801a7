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

inline void store(bf16* to, __mmask16 lanes, __m512 wide) { _mm256_mask_storeu_epi16(to, lanes, to_bf16(wide)); }

inline void store(float* to, __mmask16 lanes, __m512 wide) { _mm512_mask_storeu_ps(to, lanes, wide); }

}  // namespace legato
