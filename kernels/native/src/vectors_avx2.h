// What the kernels use of AVX-512, for processors that have AVX2, FMA and F16C: a register of 16 numbers is two of 8.
// Lane by lane the results are those of the instructions whose names the functions bear, but that numbers too small to
// be normal stay what they are.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

// Two registers for one would go by memory, in pieces that come back slowly.
#define LEGATO_OF_LANES inline __attribute__((always_inline))

namespace legato {

constexpr int kRegisters = 8;  // of 16 numbers
constexpr bool kPairProducts = false;

struct Floats16 {
  __m256 low, high;
};

struct Words16 {
  __m256i low, high;
};

struct Doubles16 {
  __m256d low, high;
};

#define LEGATO_ALWAYS inline __attribute__((always_inline))

// A function of registers, which does the same to either half.
#define LEGATO_HALVES_1(TYPE, NAME, FROM, HALF) \
  LEGATO_ALWAYS TYPE NAME(FROM a) { return {HALF(a.low), HALF(a.high)}; }
#define LEGATO_HALVES_2(TYPE, NAME, HALF) \
  LEGATO_ALWAYS TYPE NAME(TYPE a, TYPE b) { return {HALF(a.low, b.low), HALF(a.high, b.high)}; }
#define LEGATO_HALVES_3(TYPE, NAME, HALF) \
  LEGATO_ALWAYS TYPE NAME(TYPE a, TYPE b, TYPE c) { return {HALF(a.low, b.low, c.low), HALF(a.high, b.high, c.high)}; }
#define LEGATO_SHIFTED(NAME, HALF) \
  LEGATO_ALWAYS Words16 NAME(Words16 a, int count) { return {HALF(a.low, count), HALF(a.high, count)}; }

namespace halves {

// --- lanes ---

// All bits of a lane for each bit of eight.
LEGATO_ALWAYS __m256i spread(uint32_t bits) {
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), each), each);
}

LEGATO_ALWAYS Words16 spread_lanes(__mmask16 lanes) { return {spread(lanes & 0xffu), spread(lanes >> 8)}; }

LEGATO_ALWAYS __mmask16 lanes_of(__m256 low, __m256 high) {
  return static_cast<__mmask16>(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8);
}

LEGATO_ALWAYS Words16 words_of(Floats16 a) { return {_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)}; }

LEGATO_ALWAYS Floats16 floats_of(Words16 a) { return {_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high)}; }

// --- memory ---

LEGATO_ALWAYS Floats16 loadu_ps(const void* from) {
  const auto* at = static_cast<const float*>(from);
  return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)};
}

LEGATO_ALWAYS void storeu_ps(void* to, Floats16 a) {
  auto* at = static_cast<float*>(to);
  _mm256_storeu_ps(at, a.low);
  _mm256_storeu_ps(at + 8, a.high);
}

LEGATO_ALWAYS Words16 loadu_words(const void* from) {
  const auto* at = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}

LEGATO_ALWAYS void storeu_words(void* to, Words16 a) {
  auto* at = static_cast<__m256i*>(to);
  _mm256_storeu_si256(at, a.low);
  _mm256_storeu_si256(at + 1, a.high);
}

LEGATO_ALWAYS Words16 maskz_loadu_words(__mmask16 lanes, const void* from) {
  if (lanes == 0xffff) return loadu_words(from);
  const auto* at = static_cast<const int*>(from);
  const Words16 there = spread_lanes(lanes);
  return {_mm256_maskload_epi32(at, there.low), _mm256_maskload_epi32(at + 8, there.high)};
}

LEGATO_ALWAYS Floats16 maskz_loadu_ps(__mmask16 lanes, const void* from) {
  return floats_of(maskz_loadu_words(lanes, from));
}

LEGATO_ALWAYS void mask_storeu_ps(void* to, __mmask16 lanes, Floats16 a) {
  if (lanes == 0xffff) return storeu_ps(to, a);
  auto* at = static_cast<float*>(to);
  const Words16 there = spread_lanes(lanes);
  _mm256_maskstore_ps(at, there.low, a.low);
  _mm256_maskstore_ps(at + 8, there.high, a.high);
}

// Of 16 bits each; `lanes` are the first ones.
LEGATO_ALWAYS __m256i maskz_loadu_epi16(uint32_t lanes, const void* from) {
  if (lanes == 0xffff) return _mm256_loadu_si256(static_cast<const __m256i*>(from));
  alignas(32) uint16_t there[16] = {};
  std::memcpy(there, from, sizeof(uint16_t) * static_cast<size_t>(__builtin_popcount(lanes)));
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(there));
}

LEGATO_ALWAYS void mask_storeu_epi16(void* to, uint32_t lanes, __m256i a) {
  if (lanes == 0xffff) return _mm256_storeu_si256(static_cast<__m256i*>(to), a);
  alignas(32) uint16_t there[16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(there), a);
  std::memcpy(to, there, sizeof(uint16_t) * static_cast<size_t>(__builtin_popcount(lanes)));
}

LEGATO_ALWAYS Words16 maskz_loadu_epi16_wide(uint32_t lanes, const void* from) {
  const auto* at = static_cast<const uint16_t*>(from);
  return {maskz_loadu_epi16(lanes & 0xffffu, at), lanes >> 16 ? maskz_loadu_epi16(lanes >> 16, at + 16) : __m256i{}};
}

// --- constants ---

LEGATO_ALWAYS Floats16 set1_ps(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }

LEGATO_ALWAYS Words16 set1_epi32(int a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }

LEGATO_ALWAYS Words16 set1_epi8(char a) { return {_mm256_set1_epi8(a), _mm256_set1_epi8(a)}; }

LEGATO_ALWAYS Words16 set1_epi64(long long a) { return {_mm256_set1_epi64x(a), _mm256_set1_epi64x(a)}; }

LEGATO_ALWAYS Words16 setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h, int i, int j, int k, int l, int m,
                               int n, int o, int p) {
  return {_mm256_setr_epi32(a, b, c, d, e, f, g, h), _mm256_setr_epi32(i, j, k, l, m, n, o, p)};
}

LEGATO_ALWAYS Words16 broadcast_i32x4(__m128i a) { return {_mm256_broadcastsi128_si256(a), _mm256_broadcastsi128_si256(a)}; }

// --- arithmetic ---

LEGATO_HALVES_2(Floats16, add_ps, _mm256_add_ps)
LEGATO_HALVES_2(Floats16, sub_ps, _mm256_sub_ps)
LEGATO_HALVES_2(Floats16, mul_ps, _mm256_mul_ps)
LEGATO_HALVES_2(Floats16, div_ps, _mm256_div_ps)
LEGATO_HALVES_2(Floats16, max_ps, _mm256_max_ps)
LEGATO_HALVES_2(Floats16, min_ps, _mm256_min_ps)
LEGATO_HALVES_2(Floats16, and_ps, _mm256_and_ps)
LEGATO_HALVES_2(Floats16, or_ps, _mm256_or_ps)
LEGATO_HALVES_3(Floats16, fmadd_ps, _mm256_fmadd_ps)
LEGATO_HALVES_3(Floats16, fmsub_ps, _mm256_fmsub_ps)
LEGATO_HALVES_3(Floats16, fnmadd_ps, _mm256_fnmadd_ps)
LEGATO_HALVES_2(Doubles16, add_pd, _mm256_add_pd)
LEGATO_HALVES_2(Words16, add_epi32, _mm256_add_epi32)
LEGATO_HALVES_2(Words16, sub_epi32, _mm256_sub_epi32)
LEGATO_HALVES_2(Words16, min_epi32, _mm256_min_epi32)
LEGATO_HALVES_2(Words16, max_epu32, _mm256_max_epu32)
LEGATO_HALVES_2(Words16, mul_epu32, _mm256_mul_epu32)
LEGATO_HALVES_2(Words16, and_words, _mm256_and_si256)
LEGATO_HALVES_2(Words16, xor_words, _mm256_xor_si256)
LEGATO_HALVES_2(Words16, shuffle_epi8, _mm256_shuffle_epi8)
LEGATO_HALVES_2(Words16, unpacklo_epi32, _mm256_unpacklo_epi32)
LEGATO_HALVES_2(Words16, unpackhi_epi32, _mm256_unpackhi_epi32)
LEGATO_HALVES_2(Words16, unpacklo_epi64, _mm256_unpacklo_epi64)
LEGATO_HALVES_2(Words16, unpackhi_epi64, _mm256_unpackhi_epi64)
LEGATO_SHIFTED(slli_epi32, _mm256_slli_epi32)
LEGATO_SHIFTED(srai_epi32, _mm256_srai_epi32)
LEGATO_SHIFTED(slli_epi64, _mm256_slli_epi64)
LEGATO_SHIFTED(srli_epi64, _mm256_srli_epi64)
LEGATO_SHIFTED(srli_epi16, _mm256_srli_epi16)

LEGATO_ALWAYS Floats16 abs_ps(Floats16 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}

template <int kHow>
LEGATO_ALWAYS Floats16 roundscale_ps(Floats16 a) {
  return {_mm256_round_ps(a.low, kHow), _mm256_round_ps(a.high, kHow)};
}

// a times two to the power of n, a whole number, at most 254.
LEGATO_ALWAYS __m256 scaled(__m256 a, __m256 n) {
  const __m256i power = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_set1_ps(-252.0f), n)), first = _mm256_srai_epi32(power, 1), bias = _mm256_set1_epi32(127);
  const auto two_to = [&](__m256i of) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(of, bias), 23)); };
  return _mm256_mul_ps(_mm256_mul_ps(a, two_to(first)), two_to(_mm256_sub_epi32(power, first)));
}

LEGATO_HALVES_2(Floats16, scalef_ps, scaled)

// --- conversions ---

LEGATO_HALVES_1(Floats16, cvtepi32_ps, Words16, _mm256_cvtepi32_ps)
LEGATO_HALVES_1(Words16, cvtps_epi32, Floats16, _mm256_cvtps_epi32)

// Rounded once: the upper 16 bits are exact, and so is their product.
LEGATO_ALWAYS __m256 of_unsigned(__m256i a) {
  const __m256 upper = _mm256_cvtepi32_ps(_mm256_srli_epi32(a, 16));
  const __m256 lower = _mm256_cvtepi32_ps(_mm256_and_si256(a, _mm256_set1_epi32(0xffff)));
  return _mm256_fmadd_ps(upper, _mm256_set1_ps(65536.0f), lower);
}

LEGATO_HALVES_1(Floats16, cvtepu32_ps, Words16, of_unsigned)

LEGATO_ALWAYS Words16 cvtepu16_epi32(__m256i a) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1))};
}

LEGATO_ALWAYS Floats16 cvtph_ps(__m256i a) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))};
}

LEGATO_ALWAYS Doubles16 cvtps_pd(__m256 a) {
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(a)), _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1))};
}

LEGATO_ALWAYS __m128i cvtsepi32_epi8(Words16 a) {
  const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.low, a.high), 0xd8);
  return _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
}

// --- comparisons ---

template <int kHow>
LEGATO_ALWAYS __mmask16 cmp_ps_mask(Floats16 a, Floats16 b) {
  return lanes_of(_mm256_cmp_ps(a.low, b.low, kHow), _mm256_cmp_ps(a.high, b.high, kHow));
}

LEGATO_ALWAYS Floats16 mask_mov_ps(Floats16 a, __mmask16 lanes, Floats16 b) {
  const Floats16 there = floats_of(spread_lanes(lanes));
  return {_mm256_blendv_ps(a.low, b.low, there.low), _mm256_blendv_ps(a.high, b.high, there.high)};
}

LEGATO_ALWAYS Words16 mask_mov_epi32(Words16 a, __mmask16 lanes, Words16 b) {
  return words_of(mask_mov_ps(floats_of(a), lanes, floats_of(b)));
}

// --- lanes that change their places ---

template <int kLanes>
LEGATO_ALWAYS Words16 mask_blend_epi32(Words16 a, Words16 b) {
  return {_mm256_blend_epi32(a.low, b.low, kLanes & 0xff), _mm256_blend_epi32(a.high, b.high, kLanes >> 8)};
}

// Of a's and of b's four quarters those two that the bits of `kWhich` name: of those that occur here.
template <int kWhich>
LEGATO_ALWAYS Words16 shuffle_i32x4(Words16 a, Words16 b) {
  static_assert(kWhich == 0x44 || kWhich == 0xee || kWhich == 0x88 || kWhich == 0xdd);
  if constexpr (kWhich == 0x44) return {a.low, b.low};
  if constexpr (kWhich == 0xee) return {a.high, b.high};
  constexpr int kHalf = kWhich == 0x88 ? 0x20 : 0x31;
  return {_mm256_permute2x128_si256(a.low, a.high, kHalf), _mm256_permute2x128_si256(b.low, b.high, kHalf)};
}

LEGATO_ALWAYS Floats16 maskz_compress_ps(__mmask16 lanes, Floats16 a) {
  float all[16], kept[16] = {};
  storeu_ps(all, a);
  for (float* next = kept; lanes; lanes &= static_cast<__mmask16>(lanes - 1)) *next++ = all[__builtin_ctz(lanes)];
  return loadu_ps(kept);
}

LEGATO_ALWAYS Words16 maskz_compress_epi32(__mmask16 lanes, Words16 a) {
  return words_of(maskz_compress_ps(lanes, floats_of(a)));
}

// --- sums of lanes, in the order of AVX-512's ---

LEGATO_ALWAYS float reduce_add_ps(Floats16 a) {
  const __m256 eight = _mm256_add_ps(a.high, a.low);
  const __m128 four = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(two) + _mm_cvtss_f32(_mm_movehdup_ps(two));
}

LEGATO_ALWAYS float mask_reduce_add_ps(__mmask16 lanes, Floats16 a) {
  return reduce_add_ps(mask_mov_ps(set1_ps(0.0f), lanes, a));
}

LEGATO_ALWAYS float reduce_max_ps(Floats16 a) {
  const __m256 eight = _mm256_max_ps(a.high, a.low);
  const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

LEGATO_ALWAYS double reduce_add_pd(Doubles16 a) {
  const __m256d four = _mm256_add_pd(a.high, a.low);
  const __m128d two = _mm_add_pd(_mm256_extractf128_pd(four, 1), _mm256_castpd256_pd128(four));
  return _mm_cvtsd_f64(two) + _mm_cvtsd_f64(_mm_unpackhi_pd(two, two));
}

LEGATO_ALWAYS int reduce_add_epi32(Words16 a) {
  int32_t all[16], sum = 0;
  storeu_words(all, a);
  for (const int32_t one : all) sum += one;
  return sum;
}

LEGATO_ALWAYS uint32_t reduce_max_epu32(Words16 a) {
  uint32_t all[16], largest = 0;
  storeu_words(all, a);
  for (const uint32_t one : all) largest = one > largest ? one : largest;
  return largest;
}

// --- pairs of bfloat16 ---

// In the order of AVX-512's: first the upper ones. A product of two is exact in float32.
LEGATO_ALWAYS __m256 add_pairs(__m256 sum, __m256i a, __m256i b) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const auto part = [](__m256i bits) { return _mm256_castsi256_ps(bits); };
  sum = _mm256_fmadd_ps(part(_mm256_and_si256(a, upper)), part(_mm256_and_si256(b, upper)), sum);
  return _mm256_fmadd_ps(part(_mm256_slli_epi32(a, 16)), part(_mm256_slli_epi32(b, 16)), sum);
}

LEGATO_ALWAYS Floats16 dpbf16_ps(Floats16 sum, Words16 a, Words16 b) {
  return {add_pairs(sum.low, a.low, b.low), add_pairs(sum.high, a.high, b.high)};
}

// The upper half of each, rounded to the nearest, ties to even, in the lower half; NaN stays NaN.
LEGATO_ALWAYS __m256i rounded(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a), upper = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
  const __m256i near = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(near, quiet, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
}

}  // namespace halves

LEGATO_ALWAYS __m256i to_bf16(Floats16 a) {
  const __m256i mixed = _mm256_packus_epi32(halves::rounded(a.low), halves::rounded(a.high));
  return _mm256_permute4x64_epi64(mixed, 0xd8);
}

LEGATO_ALWAYS Words16 as_pairs(Words16 words) { return words; }

LEGATO_ALWAYS Words16 as_words(Words16 pairs) { return pairs; }

// See vectors.h.
LEGATO_ALWAYS __m256 times_two_to(__m256 a, __m256 n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  const __m256 product = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  return _mm256_and_ps(product, _mm256_cmp_ps(n, _mm256_set1_ps(-126.0f), _CMP_NLE_UQ));
}

LEGATO_ALWAYS Floats16 times_two_to(Floats16 a, Floats16 n) {
  return {times_two_to(a.low, n.low), times_two_to(a.high, n.high)};
}

// To each of 16 sums four products of a code, which is unsigned, and of a number: exact, where the instruction for
// bytes would saturate.
LEGATO_ALWAYS __m256i add_products(__m256i sums, __m256i codes, __m256i x) {
  const __m256i even = _mm256_and_si256(codes, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(codes, 8);
  const __m256i even_x = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), odd_x = _mm256_srai_epi16(x, 8);
  return _mm256_add_epi32(sums, _mm256_add_epi32(_mm256_madd_epi16(even, even_x), _mm256_madd_epi16(odd, odd_x)));
}

LEGATO_ALWAYS Words16 add_products(Words16 sums, Words16 codes, Words16 x) {
  return {add_products(sums.low, codes.low, x.low), add_products(sums.high, codes.high, x.high)};
}

// Of two tokens' 32 numbers the first 16 or the last 16 of either, which alternate.
struct Interleaved {
  bool upper;
  LEGATO_ALWAYS Words16 of(Words16 a, Words16 b) const {
    const __m256i own = upper ? a.high : a.low, other = upper ? b.high : b.low;
    const __m256i first = _mm256_unpacklo_epi16(own, other), second = _mm256_unpackhi_epi16(own, other);
    return {_mm256_permute2x128_si256(first, second, 0x20), _mm256_permute2x128_si256(first, second, 0x31)};
  }
};

// 16 of either, which alternate.
LEGATO_ALWAYS Words16 alternate(const uint16_t* a, const uint16_t* b) {
  const __m256i own = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
  const __m256i other = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
  return Interleaved{false}.of({own, own}, {other, other});
}

constexpr Interleaved kLow{false}, kHigh{true};

}  // namespace legato

#undef LEGATO_HALVES_1
#undef LEGATO_HALVES_2
#undef LEGATO_HALVES_3
#undef LEGATO_SHIFTED
#undef LEGATO_ALWAYS

// The names; some compilers have macros by these.
#undef _mm512_roundscale_ps
#undef _mm512_cmp_ps_mask
#undef _mm512_mask_cmp_ps_mask
#undef _mm512_mask_blend_epi32
#undef _mm512_shuffle_i32x4
#undef _mm512_extractf32x8_ps
#undef _mm512_cvtph_ps
#undef _mm512_setr_epi32

#define __m512 legato::Floats16
#define __m512i legato::Words16
#define __m512bh legato::Words16
#define __m512d legato::Doubles16

#define _mm256_mask_storeu_epi16 legato::halves::mask_storeu_epi16
#define _mm256_maskz_loadu_epi16 legato::halves::maskz_loadu_epi16
#define _mm512_abs_ps legato::halves::abs_ps
#define _mm512_add_epi32 legato::halves::add_epi32
#define _mm512_add_pd legato::halves::add_pd
#define _mm512_add_ps legato::halves::add_ps
#define _mm512_and_ps legato::halves::and_ps
#define _mm512_and_si512 legato::halves::and_words
#define _mm512_broadcast_i32x4 legato::halves::broadcast_i32x4
#define _mm512_castps512_ps256(a) ((a).low)
#define _mm512_castsi512_ps legato::halves::floats_of
#define _mm512_cmp_ps_mask(a, b, how) legato::halves::cmp_ps_mask<how>(a, b)
#define _mm512_cvtepi32_ps legato::halves::cvtepi32_ps
#define _mm512_cvtepu16_epi32 legato::halves::cvtepu16_epi32
#define _mm512_cvtepu32_ps legato::halves::cvtepu32_ps
#define _mm512_cvtne2ps_pbh(a, b) legato::Words16{legato::to_bf16(b), legato::to_bf16(a)}
#define _mm512_cvtph_ps legato::halves::cvtph_ps
#define _mm512_cvtps_epi32 legato::halves::cvtps_epi32
#define _mm512_cvtps_pd legato::halves::cvtps_pd
#define _mm512_cvtsepi32_epi8 legato::halves::cvtsepi32_epi8
#define _mm512_div_ps legato::halves::div_ps
#define _mm512_dpbf16_ps legato::halves::dpbf16_ps
#define _mm512_extractf32x8_ps(a, which) ((which) ? (a).high : (a).low)
#define _mm512_fmadd_ps legato::halves::fmadd_ps
#define _mm512_fmsub_ps legato::halves::fmsub_ps
#define _mm512_fnmadd_ps legato::halves::fnmadd_ps
#define _mm512_load_si512 legato::halves::loadu_words
#define _mm512_loadu_ps legato::halves::loadu_ps
#define _mm512_loadu_si512 legato::halves::loadu_words
#define _mm512_mask_blend_epi32(lanes, a, b) legato::halves::mask_blend_epi32<lanes>(a, b)
#define _mm512_mask_cmp_ps_mask(lanes, a, b, how) \
  static_cast<__mmask16>((lanes) & legato::halves::cmp_ps_mask<how>(a, b))
#define _mm512_mask_mov_epi32 legato::halves::mask_mov_epi32
#define _mm512_mask_mov_ps legato::halves::mask_mov_ps
#define _mm512_mask_reduce_add_ps legato::halves::mask_reduce_add_ps
#define _mm512_mask_storeu_ps legato::halves::mask_storeu_ps
#define _mm512_maskz_compress_epi32 legato::halves::maskz_compress_epi32
#define _mm512_maskz_compress_ps legato::halves::maskz_compress_ps
#define _mm512_maskz_loadu_epi16 legato::halves::maskz_loadu_epi16_wide
#define _mm512_maskz_loadu_epi32 legato::halves::maskz_loadu_words
#define _mm512_maskz_loadu_ps legato::halves::maskz_loadu_ps
#define _mm512_max_epu32 legato::halves::max_epu32
#define _mm512_max_ps legato::halves::max_ps
#define _mm512_min_epi32 legato::halves::min_epi32
#define _mm512_min_ps legato::halves::min_ps
#define _mm512_mul_epu32 legato::halves::mul_epu32
#define _mm512_mul_ps legato::halves::mul_ps
#define _mm512_or_ps legato::halves::or_ps
#define _mm512_reduce_add_epi32 legato::halves::reduce_add_epi32
#define _mm512_reduce_add_pd legato::halves::reduce_add_pd
#define _mm512_reduce_add_ps legato::halves::reduce_add_ps
#define _mm512_reduce_max_epu32 legato::halves::reduce_max_epu32
#define _mm512_reduce_max_ps legato::halves::reduce_max_ps
#define _mm512_roundscale_ps(a, how) legato::halves::roundscale_ps<how>(a)
#define _mm512_scalef_ps legato::halves::scalef_ps
#define _mm512_set1_epi32 legato::halves::set1_epi32
#define _mm512_set1_epi64 legato::halves::set1_epi64
#define _mm512_set1_epi8 legato::halves::set1_epi8
#define _mm512_set1_ps legato::halves::set1_ps
#define _mm512_setr_epi32 legato::halves::setr_epi32
#define _mm512_setzero_pd() legato::Doubles16{_mm256_setzero_pd(), _mm256_setzero_pd()}
#define _mm512_setzero_ps() legato::halves::set1_ps(0.0f)
#define _mm512_setzero_si512() legato::halves::set1_epi32(0)
#define _mm512_shuffle_epi8 legato::halves::shuffle_epi8
#define _mm512_shuffle_i32x4(a, b, which) legato::halves::shuffle_i32x4<which>(a, b)
#define _mm512_slli_epi32 legato::halves::slli_epi32
#define _mm512_slli_epi64 legato::halves::slli_epi64
#define _mm512_srai_epi32 legato::halves::srai_epi32
#define _mm512_srli_epi16 legato::halves::srli_epi16
#define _mm512_srli_epi64 legato::halves::srli_epi64
#define _mm512_store_ps legato::halves::storeu_ps
#define _mm512_store_si512 legato::halves::storeu_words
#define _mm512_storeu_ps legato::halves::storeu_ps
#define _mm512_storeu_si512 legato::halves::storeu_words
#define _mm512_sub_epi32 legato::halves::sub_epi32
#define _mm512_sub_ps legato::halves::sub_ps
#define _mm512_unpackhi_epi32 legato::halves::unpackhi_epi32
#define _mm512_unpackhi_epi64 legato::halves::unpackhi_epi64
#define _mm512_unpacklo_epi32 legato::halves::unpacklo_epi32
#define _mm512_unpacklo_epi64 legato::halves::unpacklo_epi64
#define _mm512_xor_si512 legato::halves::xor_words
