// How weights of 4 or 8 bits lie in memory, and how they come to lie so.

#pragma once

#include <algorithm>

#include "panels.h"

namespace legato {

constexpr int64_t kQuad = 4;             // inputs that are multiplied at once
constexpr int64_t kLowestOfE2m1 = -12;  // of four bits: their codes are doubles of E2M1's numbers

// For each panel and group its codes, scales, and minimums. A code is stored without its sign: less `lowest`.
struct QuantisedLayout {
  int64_t inputs, outputs, group;
  int64_t bits, lowest;  // of a code; what the lowest one stands for
  bool wide_factors;     // scales and minimums are float32, else float16
  bool has_minimums;

  bool is_float() const { return bits == 4 && lowest == kLowestOfE2m1; }
  int64_t groups() const { return inputs / group; }
  int64_t panels() const { return num_panels(outputs); }
  int64_t quad_bytes() const { return kQuad * kPanel * bits / 8; }
  int64_t code_bytes() const { return group * kPanel * bits / 8; }
  int64_t factor_bytes() const { return kPanel * (wide_factors ? 4 : 2); }
  int64_t block_bytes() const { return code_bytes() + factor_bytes() * (has_minimums ? 2 : 1); }
  int64_t block(int64_t panel, int64_t at) const { return (panel * groups() + at) * block_bytes(); }
};

// Four inputs of 32 outputs, of 16 in either half; a byte each.
struct Quad {
  __m512i left, right;
};

// Byte b holds a code of either half, of output b / 4 and input b % 4; the lower one is that of the left half.
struct FourBits {
  static Quad decode(const uint8_t* at) {
    const __m512i both = _mm512_loadu_si512(at), mask = _mm512_set1_epi8(0x0f);
    return {_mm512_and_si512(both, mask), _mm512_and_si512(_mm512_srli_epi16(both, 4), mask)};
  }

  static void put(uint8_t* quad, int64_t lane, int64_t input, int64_t code) {
    quad[lane % 16 * kQuad + input] |= static_cast<uint8_t>(code << (lane / 16 * 4));
  }
};

// As `FourBits`, of E2M1's codes, which a table turns into numbers without their sign.
struct FourBitFloats {
  alignas(16) static constexpr int8_t kNumbers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

  static Quad decode(const uint8_t* at) {
    const __m512i numbers = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kNumbers)));
    const Quad codes = FourBits::decode(at);
    return {_mm512_shuffle_epi8(numbers, codes.left), _mm512_shuffle_epi8(numbers, codes.right)};
  }

  static void put(uint8_t* quad, int64_t lane, int64_t input, int64_t number) {
    FourBits::put(quad, lane, input, std::find(kNumbers, kNumbers + 16, number) - kNumbers);
  }
};

// Byte b holds the code of output b / 4 and input b % 4.
struct EightBits {
  static Quad decode(const uint8_t* at) { return {_mm512_loadu_si512(at), _mm512_loadu_si512(at + 64)}; }

  static void put(uint8_t* quad, int64_t lane, int64_t input, int64_t code) {
    quad[lane * kQuad + input] = static_cast<uint8_t>(code);
  }
};

inline void put_factors(bool wide, const float* from, int64_t stride, int64_t count, uint8_t* to) {
  for (int64_t lane = 0; lane < count; ++lane) {
    const float factor = from[lane * stride];
    const auto half = static_cast<uint16_t>(_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(factor), 0), 0));
    if (wide) __builtin_memcpy(to + 4 * lane, &factor, 4);
    if (!wide) __builtin_memcpy(to + 2 * lane, &half, 2);
  }
}

// Of half a panel.
inline __m512 load_factors(const QuantisedLayout& layout, const uint8_t* at, int64_t first) {
  if (layout.wide_factors) return _mm512_loadu_ps(at + 4 * first);
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 2 * first)));
}

// From the first of some outputs' codes, scales and minimums (or null) in a group.
inline void pack_block(const QuantisedLayout& layout, const int8_t* codes, const float* scales, const float* minimums,
                       int64_t lanes, uint8_t* block) {
  const auto put = layout.is_float() ? FourBitFloats::put : layout.bits == 4 ? FourBits::put : EightBits::put;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    for (int64_t input = 0; input < layout.group; ++input) {
      put(block + input / kQuad * layout.quad_bytes(), lane, input % kQuad,
          codes[lane * layout.inputs + input] - layout.lowest);
    }
  }
  uint8_t* factors = block + layout.code_bytes();
  put_factors(layout.wide_factors, scales, layout.groups(), lanes, factors);
  if (minimums) put_factors(layout.wide_factors, minimums, layout.groups(), lanes, factors + layout.factor_bytes());
}

}  // namespace legato
