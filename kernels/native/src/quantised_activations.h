// Activations as whole numbers of 8 or 16 bits, by groups of inputs that share a unit.
//
// With 8 bits, the largest of a group becomes 127 units. With 16, a unit is a power of two and the largest has 15 bits
// and a sign, so that a number of bfloat16 is exact unless it is less than 1/128 of the largest one, and then as close
// as that is to what bfloat16 rounded it from; the largest may lose one unit.

#pragma once

#include <vector>

#include "bf16.h"
#include "team.h"

namespace legato {

struct alignas(64) Line {
  int8_t bytes[64];
};

struct WholeActivations {
  int64_t groups, group;
  int64_t bytes;     // of a number: 1, or 2
  int64_t together;  // rows whose groups lie side by side: 1, or those of a tile
  std::vector<float> units;   // [rows / together, groups, together]
  std::vector<int32_t> sums;  // as units: of the values

  // [rows / together, groups, together, bytes, group]: 256 times the first of two bytes, and the second.
  int8_t* values() { return lines.data()->bytes; }
  const int8_t* values() const { return lines.data()->bytes; }

  int64_t at(int64_t row, int64_t of_group) const {
    return (row / together * groups + of_group) * together + row % together;
  }

  std::vector<Line> lines;
};

// The bits of the largest magnitude: they are in the order of the magnitudes.
inline int32_t largest_bits(const bf16* x, int64_t group) {
  __m512i largest = _mm512_setzero_si512();
  for (int64_t input = 0; input < group; input += 16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + input));
    largest = _mm512_max_epu32(largest, _mm512_cvtepu16_epi32(_mm256_and_si256(bits, _mm256_set1_epi16(0x7fff))));
  }
  return static_cast<int32_t>(_mm512_reduce_max_epu32(largest));
}

inline float float_of(int32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// 0 for a group of numbers so small that what is divided by their unit would have no end. NaN or infinity, and with it
// all that is computed from the group, where one of them is.
inline float unit_of(int32_t largest, int64_t bytes) {
  constexpr int32_t kInfinity = 0x7f80;
  if (bytes == 2 && largest < kInfinity) return float_of(std::max((largest >> 7) - 14, 0) << 23);
  const float unit = float_of(largest << 16) / 127;
  return unit < float_of(1 << 23) ? 0 : unit;
}

inline __m512i whole(const bf16* x, __m512 per_unit) {
  return _mm512_cvtps_epi32(_mm512_mul_ps(load(x, 0xffff), per_unit));
}

inline void store_bytes(int8_t* to, __m512i values) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(values));
}

// 16 numbers as two bytes each: the second has a sign, too.
inline __m512i store_both(int8_t* first, int8_t* second, __m512i values) {
  constexpr int32_t kLargest = 127 * 256 + 127;
  values = _mm512_min_epi32(values, _mm512_set1_epi32(kLargest));
  const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(values, _mm512_set1_epi32(128)), 8);
  store_bytes(first, high);
  store_bytes(second, _mm512_sub_epi32(values, _mm512_slli_epi32(high, 8)));
  return values;
}

inline void make_whole(const bf16* x, int64_t group, int64_t bytes, int8_t* values, float* unit, int32_t* sum) {
  *unit = unit_of(largest_bits(x, group), bytes);
  const __m512 per_unit = _mm512_set1_ps(*unit == 0 ? 0 : 1 / *unit);
  __m512i total = _mm512_setzero_si512();
  for (int64_t input = 0; input < group; input += 16) {
    __m512i numbers = whole(x + input, per_unit);
    if (bytes == 2) numbers = store_both(values + input, values + group + input, numbers);
    if (bytes == 1) store_bytes(values + input, numbers);
    total = _mm512_add_epi32(total, numbers);
  }
  *sum = _mm512_reduce_add_epi32(total);
}

// Of `x [rows, groups, group]`; each row comes to `place(row)`, which is less than `places`. Memory is kept from call
// to call: such sizes would come from the system, and go back, each time.
template <class Place>
const WholeActivations& whole_activations(const bf16* x, int64_t rows, int64_t groups, int64_t group, int64_t bytes,
                                          int64_t together, int64_t places, const Place& place) {
  static thread_local WholeActivations kept;
  WholeActivations& into = kept;  // the caller's, in every thread
  into.groups = groups, into.group = group, into.bytes = bytes, into.together = together;
  const int64_t size = (places + together - 1) / together * together * groups;
  into.lines.resize((size * bytes * group + 63) / 64);
  into.units.resize(size);
  into.sums.resize(size);
  share_evenly(rows * groups, rows > 16, [&](int64_t i) {
    const int64_t at = into.at(place(i / groups), i % groups);
    make_whole(x + i * group, group, bytes, into.values() + at * bytes * group, &into.units[at], &into.sums[at]);
  });
  return into;
}

}  // namespace legato
