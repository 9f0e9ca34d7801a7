// Projections of bfloat16 activations by weights of 4 or 8 bits whose result for a row does not depend on the other rows.
//
// A weight is `scale * code + minimum`, the last two shared by a group of inputs. The activations of a group become
// fixed-point numbers of 16 bits: each is exact unless it is less than 1/128 of the largest one of its group, and then
// as close as those are to what bfloat16 rounded them from. So a group's products are integers, and their sum is exact
// in any order. Groups are added up in float32 in rising order, whatever the number of rows and of threads.

#include <vector>

#include "calls.h"
#include "panels.h"

namespace {

using namespace legato;

constexpr int64_t kQuad = 4;    // inputs that are decoded at once
constexpr int kTile = 6;        // rows of a tile: sums of a group and of all groups in 24 registers, of 32

// Rows in fixed point, by groups of inputs.
struct Activations {
  std::vector<int16_t> values;  // [rows, inputs]
  std::vector<float> units;     // [rows, groups]: what 1 stands for
  std::vector<float> sums;      // [rows, groups]: of what the values stand for
};

struct Job {
  const int16_t* x;       // [rows, inputs]
  const float* x_units;   // [rows, groups]
  const float* x_sums;    // [rows, groups]
  const uint8_t* packed;  // [panels, groups] blocks: what `quantised_pack` made
  int64_t rows;
  Outputs<bf16> to;
};

// How weights lie: for each panel and group its codes, scales, and minimums.
struct Layout {
  int64_t inputs, outputs, group;
  int64_t bits, lowest;  // of a code; the value of the lowest one
  bool wide_factors;     // scales and minimums are float32, else float16
  bool has_minimums;

  int64_t groups() const { return inputs / group; }
  int64_t panels() const { return num_panels(outputs); }
  int64_t quad_bytes() const { return kQuad * kPanel * bits / 8; }
  int64_t code_bytes() const { return group * kPanel * bits / 8; }
  int64_t factor_bytes() const { return kPanel * (wide_factors ? 4 : 2); }
  int64_t block_bytes() const { return code_bytes() + factor_bytes() * (has_minimums ? 2 : 1); }
  int64_t block(int64_t panel, int64_t at) const { return (panel * groups() + at) * block_bytes(); }
};

// Four inputs of 32 outputs, as pairs of 16-bit numbers.
struct Quad {
  __m512i left[2], right[2];
};

// Word w of 32 holds four codes, of output w / 2, or 16 + w / 2, and input w % 2, or 2 + w % 2.
class FourBits {
 public:
  explicit FourBits(const Layout& layout) {
    alignas(64) int16_t values[32];
    for (int code = 0; code < 32; ++code) values[code] = static_cast<int16_t>(layout.lowest + code % 16);
    values_ = _mm512_load_si512(values);
  }

  Quad decode(const uint8_t* at) const {
    const __m512i words = _mm512_loadu_si512(at);
    return {{value(words), value(_mm512_srli_epi16(words, 8))},
            {value(_mm512_srli_epi16(words, 4)), value(_mm512_srli_epi16(words, 12))}};
  }

 private:
  // Looks at the lowest five bits of each word, of which the fifth changes nothing.
  __m512i value(__m512i words) const { return _mm512_permutexvar_epi16(words, values_); }

  __m512i values_;
};

class EightBits {
 public:
  explicit EightBits(const Layout&) {}

  Quad decode(const uint8_t* at) const { return {{widened(at), widened(at + 64)}, {widened(at + 32), widened(at + 96)}}; }

 private:
  static __m512i widened(const uint8_t* at) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  }
};

// Where a code of a quad goes, and how the classes above read it.
void put_code(const Layout& layout, uint8_t* quad, int64_t lane, int64_t input, int64_t code) {
  const int64_t word = lane % 16 * 2 + input % 2, half = lane / 16, pair = input / 2;
  if (layout.bits == 4) {
    const int64_t nibble = pair * 2 + half;
    quad[word * 2 + nibble / 2] |= static_cast<uint8_t>((code - layout.lowest) << (nibble % 2 * 4));
  } else {
    quad[pair * 64 + half * 32 + word] = static_cast<uint8_t>(code);
  }
}

void put_factors(bool wide, const float* from, int64_t stride, int64_t count, uint8_t* to) {
  for (int64_t lane = 0; lane < count; ++lane) {
    const float factor = from[lane * stride];
    const auto half = static_cast<uint16_t>(_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(factor), 0), 0));
    if (wide) __builtin_memcpy(to + 4 * lane, &factor, 4);
    if (!wide) __builtin_memcpy(to + 2 * lane, &half, 2);
  }
}

// Of half a panel.
inline __m512 load_factors(const Layout& layout, const uint8_t* at, int64_t first) {
  if (layout.wide_factors) return _mm512_loadu_ps(at + 4 * first);
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 2 * first)));
}

inline __m512i pair_of(const int16_t* x) {
  int32_t both;
  __builtin_memcpy(&both, x, sizeof both);
  return _mm512_set1_epi32(both);
}

// `sums` and the products of pairs. As an intrinsic, it makes g++ copy every sum twice each time, and run out of registers.
inline __m512i add_pairs(__m512i sums, __m512i weights, __m512i x) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(x));
  return sums;
}

template <int kRows>
struct Sums {
  __m512 left[kRows], right[kRows];
};

template <int kRows>
struct Products {
  __m512i left[kRows], right[kRows];
};

template <int kRows, class Codes>
inline __attribute__((always_inline)) Products<kRows> products_of(const Layout& layout, const Codes& codes,
                                                                  const uint8_t* block, const int16_t* x) {
  Products<kRows> sums;
  for (int row = 0; row < kRows; ++row) sums.left[row] = sums.right[row] = _mm512_setzero_si512();
  for (int64_t quad = 0; quad < layout.group / kQuad; ++quad) {
    const Quad weights = codes.decode(block + quad * layout.quad_bytes());
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row) {
        const __m512i both = pair_of(x + row * layout.inputs + quad * kQuad + pair * 2);
        sums.left[row] = add_pairs(sums.left[row], weights.left[pair], both);
        sums.right[row] = add_pairs(sums.right[row], weights.right[pair], both);
      }
    }
  }
  return sums;
}

template <int kRows>
inline __attribute__((always_inline)) void add_scaled(const Layout& layout, const uint8_t* scales,
                                                      const Products<kRows>& products, const float* x_units,
                                                      Sums<kRows>& totals) {
  const __m512 left = load_factors(layout, scales, 0), right = load_factors(layout, scales, kPanel / 2);
  for (int row = 0; row < kRows; ++row) {
    const __m512 unit = _mm512_set1_ps(x_units[row * layout.groups()]);
    totals.left[row] =
        _mm512_fmadd_ps(_mm512_mul_ps(left, unit), _mm512_cvtepi32_ps(products.left[row]), totals.left[row]);
    totals.right[row] =
        _mm512_fmadd_ps(_mm512_mul_ps(right, unit), _mm512_cvtepi32_ps(products.right[row]), totals.right[row]);
  }
}

template <int kRows>
inline __attribute__((always_inline)) void add_minimums(const Layout& layout, const uint8_t* minimums,
                                                        const float* x_sums, Sums<kRows>& totals) {
  const __m512 left = load_factors(layout, minimums, 0), right = load_factors(layout, minimums, kPanel / 2);
  for (int row = 0; row < kRows; ++row) {
    const __m512 sum = _mm512_set1_ps(x_sums[row * layout.groups()]);
    totals.left[row] = _mm512_fmadd_ps(left, sum, totals.left[row]);
    totals.right[row] = _mm512_fmadd_ps(right, sum, totals.right[row]);
  }
}

template <int kRows, class Codes>
void compute_tile(const Layout& layout, const Job& job, const Codes& codes, int64_t panel, int64_t first_row) {
  Sums<kRows> totals;
  for (int row = 0; row < kRows; ++row) totals.left[row] = totals.right[row] = _mm512_setzero_ps();
  for (int64_t at = 0; at < layout.groups(); ++at) {
    const uint8_t* block = job.packed + layout.block(panel, at);
    const int64_t first = first_row * layout.groups() + at;
    const int16_t* x = job.x + first_row * layout.inputs + at * layout.group;
    const Products<kRows> products = products_of<kRows>(layout, codes, block, x);
    const uint8_t* factors = block + layout.code_bytes();
    add_scaled<kRows>(layout, factors, products, job.x_units + first, totals);
    if (layout.has_minimums) add_minimums<kRows>(layout, factors + layout.factor_bytes(), job.x_sums + first, totals);
  }
  for (int row = 0; row < kRows; ++row) {
    finish(job.to, first_row + row, panel * kPanel, totals.left[row]);
    finish(job.to, first_row + row, panel * kPanel + kPanel / 2, totals.right[row]);
  }
}

template <int kRows, class Codes>
void compute_rest(const Layout& layout, const Job& job, const Codes& codes, int64_t panel, int64_t first_row) {
  if (job.rows - first_row == kRows) return compute_tile<kRows>(layout, job, codes, panel, first_row);
  if constexpr (kRows > 1) compute_rest<kRows - 1>(layout, job, codes, panel, first_row);
}

template <class Codes>
void compute(const Layout& layout, const Job& job) {
  const Codes codes(layout);
#pragma omp parallel for schedule(dynamic, panels_at_once(layout.panels(), job.rows <= kTile))
  for (int64_t panel = 0; panel < layout.panels(); ++panel) {
    int64_t row = 0;
    for (; row + kTile <= job.rows; row += kTile) compute_tile<kTile>(layout, job, codes, panel, row);
    if (row < job.rows) compute_rest<kTile - 1>(layout, job, codes, panel, row);
  }
}

// The power of two that, times 2^15, is just above the largest of a group; a group of zeros has units of 0.
float unit_of(const bf16* x, int64_t group) {
  __m512i largest = _mm512_setzero_si512();  // bits of magnitudes are in the order of the magnitudes
  for (int64_t input = 0; input < group; input += 16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + input));
    largest = _mm512_max_epu32(largest, _mm512_cvtepu16_epi32(_mm256_and_si256(bits, _mm256_set1_epi16(0x7fff))));
  }
  const int32_t exponent = (_mm512_reduce_max_epu32(largest) >> 7) - 14;  // biased
  const int32_t unit_bits = std::max(exponent, 0) << 23;
  float unit;
  __builtin_memcpy(&unit, &unit_bits, sizeof unit);
  return unit;
}

void fix_group(const bf16* x, int64_t group, int16_t* values, float* unit, float* sum) {
  *unit = unit_of(x, group);
  const __m512 per_unit = _mm512_set1_ps(*unit == 0 ? 0 : 1 / *unit);
  __m512i total = _mm512_setzero_si512();
  for (int64_t input = 0; input < group; input += 16) {
    const __m512i fixed = _mm512_cvtps_epi32(_mm512_mul_ps(load(x + input, 0xffff), per_unit));
    total = _mm512_add_epi32(total, fixed);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + input), _mm512_cvtsepi32_epi16(fixed));
  }
  *sum = *unit * static_cast<float>(_mm512_reduce_add_epi32(total));
}

// Kept from call to call: memory of this size would come from the system, and go back, each time.
const Activations& fixed(const Layout& layout, const bf16* x, int64_t rows) {
  static thread_local Activations fixed;
  fixed.values.resize(rows * layout.inputs);
  fixed.units.resize(rows * layout.groups());
  fixed.sums.resize(rows * layout.groups());
  Activations& into = fixed;  // the caller's, in every thread
#pragma omp parallel for if (rows > 16)
  for (int64_t at = 0; at < rows * layout.groups(); ++at) {
    const int64_t first = at * layout.group;
    fix_group(x + first, layout.group, into.values.data() + first, &into.units[at], &into.sums[at]);
  }
  return into;
}

void pack_block(const Layout& layout, const int8_t* codes, const float* scales, const float* minimums, int64_t lanes,
                uint8_t* block) {
  for (int64_t lane = 0; lane < lanes; ++lane) {
    for (int64_t input = 0; input < layout.group; ++input) {
      uint8_t* quad = block + input / kQuad * layout.quad_bytes();
      put_code(layout, quad, lane, input % kQuad, codes[lane * layout.inputs + input]);
    }
  }
  uint8_t* factors = block + layout.code_bytes();
  put_factors(layout.wide_factors, scales, layout.groups(), lanes, factors);
  if (layout.has_minimums) {
    put_factors(layout.wide_factors, minimums, layout.groups(), lanes, factors + layout.factor_bytes());
  }
}

}  // namespace

extern "C" {

// Bytes of what `quantised_pack` writes.
int64_t quantised_packed_bytes(int64_t inputs, int64_t outputs, int64_t group, int64_t bits, bool wide_factors,
                               bool has_minimums) {
  const Layout layout{inputs, outputs, group, bits, 0, wide_factors, has_minimums};
  return layout.panels() * layout.groups() * layout.block_bytes();
}

// From `codes [outputs, inputs]`, `scales` and `minimums` (or null) `[outputs, groups]`; `packed` holds zeros. A group has
// a multiple of 16 inputs, and at most 256: sums of products of 16 and 8 bits fit into 32.
void quantised_pack(const int8_t* codes, const float* scales, const float* minimums, int64_t inputs, int64_t outputs,
                    int64_t group, int64_t bits, int64_t lowest, bool wide_factors, uint8_t* packed) {
  const Layout layout{inputs, outputs, group, bits, lowest, wide_factors, minimums != nullptr};
#pragma omp parallel for
  for (int64_t panel = 0; panel < layout.panels(); ++panel) {
    const int64_t lanes = std::min(kPanel, outputs - panel * kPanel);
    for (int64_t at = 0; at < layout.groups(); ++at) {
      const int64_t first = panel * kPanel * layout.groups() + at;
      pack_block(layout, codes + panel * kPanel * inputs + at * group, scales + first,
                 minimums ? minimums + first : nullptr, lanes, packed + layout.block(panel, at));
    }
  }
}

void quantised_linear(const bf16* x, int64_t rows, int64_t inputs, const uint8_t* packed, int64_t outputs, int64_t group,
                      int64_t bits, int64_t lowest, bool wide_factors, bool has_minimums, const bf16* bias,
                      const bf16* residual, bf16* out) {
  const Layout layout{inputs, outputs, group, bits, lowest, wide_factors, has_minimums};
  const Activations& fixed_x = fixed(layout, x, rows);
  const Job job{fixed_x.values.data(), fixed_x.units.data(), fixed_x.sums.data(), packed, rows,
                {bias, residual, out, outputs}};
  if (bits == 4) return compute<FourBits>(layout, job);
  compute<EightBits>(layout, job);
}

}  // extern "C"
