// 16 numbers at a time, by the names of AVX-512's intrinsics. Where a processor has AVX-512 with bfloat16, they are
// those; where it has AVX2, half as wide, each is two of that (vectors_avx2.h). And the few operations that are spelled
// in a way of their own on either.

#pragma once

#include <immintrin.h>

#include <cstdint>

#ifdef __AVX512BF16__

// Before a function that registers are given to by value.
#define LEGATO_OF_LANES inline

namespace legato {

// Registers of 16 numbers that a loop may keep its sums in.
constexpr int kRegisters = 32;

// Whether an instruction multiplies and adds pairs of bfloat16.
constexpr bool kPairProducts = true;

// Two bfloat16 in each of 16 words, as what is multiplied and added in pairs.
inline __m512bh as_pairs(__m512i words) { return reinterpret_cast<__m512bh>(words); }

inline __m512i as_words(__m512bh pairs) { return reinterpret_cast<__m512i>(pairs); }

// To the nearest, ties to even.
inline __m256i to_bf16(__m512 wide) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(wide)); }

// `a`, which is around 1, times two to the power of n, a whole number; 0 where that may be too small to be normal, for
// which a processor would take a hundred times as long. NaN stays NaN.
inline __m512 times_two_to(__m512 a, __m512 n) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, _mm512_set1_ps(-126.0f), _CMP_NLE_UQ), a, n);
}

// To each of 16 sums four products of a code, which is unsigned, and of a number.
inline __m512i add_products(__m512i sums, __m512i codes, __m512i x) {
  // As an intrinsic, it makes g++ copy every sum twice each time, and run out of registers.
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(x));
  return sums;
}

// The order of numbers in which two tokens' numbers from `first` on alternate.
struct Interleaved {
  alignas(64) uint16_t numbers[32];
  constexpr explicit Interleaved(int first) : numbers{} {
    for (int i = 0; i < 16; ++i) {
      numbers[2 * i] = static_cast<uint16_t>(first + i);
      numbers[2 * i + 1] = static_cast<uint16_t>(first + i + 32);
    }
  }
  __m512i of(__m512i a, __m512i b) const { return _mm512_permutex2var_epi16(a, _mm512_load_si512(numbers), b); }
};

constexpr Interleaved kLow(0), kHigh(16);

// 16 of either, which alternate.
inline __m512i alternate(const uint16_t* a, const uint16_t* b) {
  const auto wide = [](const uint16_t* from) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  };
  return _mm512_or_si512(wide(a), _mm512_slli_epi32(wide(b), 16));
}

}  // namespace legato

#else

#include "vectors_avx2.h"

#endif
