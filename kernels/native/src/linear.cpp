// Projections whose result for a row does not depend on the other rows.
//
// Every output is one sum in float32 over the inputs in rising order, whatever the number of rows and of threads: a
// row's result is the same to the bit alone, in any batch and in any chunk of a prompt. Whether that is one by tiles
// (tiles.h) depends on the weight alone.

#include <cstring>
#include <numeric>
#include <type_traits>
#include <vector>

#include "calls.h"
#include "elementwise_rows.h"
#include "panels.h"
#include "tiles.h"

namespace {

using namespace legato;

// Rows of a tile: with both halves of a panel 24 registers of sums, of 32. Where there are fewer, a tile of more rows
// than kWholeRows passes by one half after the other (`kSplit`): 6 of 8.
constexpr int kTile = kRegisters == 32 ? 12 : 6;
constexpr int kWholeRows = kRegisters == 32 ? 12 : 2;
constexpr bool kSplit = kWholeRows < kTile;
constexpr int64_t kWorthThreads = 1 << 18;  // numbers, from which on other threads are called to pack or widen them

// Numbers of a packed weight: outputs are filled up to half a panel or a whole one.
int64_t packed_size(int64_t inputs, int64_t outputs) { return (outputs + kHalf - 1) / kHalf * kHalf * inputs; }

// One input of 16 outputs, or, in bfloat16, two: see `Pairs`.
template <typename T>
struct Inputs;

template <>
struct Inputs<float> {
  static constexpr int64_t kTogether = 1;
  static constexpr int kParts = 1;
  using Number = float;
  using Lanes = __m512;
  static Lanes of_weight(const float* panel, int) { return _mm512_loadu_ps(panel); }
  static Lanes of_one(const float* x, int) { return _mm512_set1_ps(*x); }
  static __m512 add(__m512 sum, Lanes weight, Lanes x) { return _mm512_fmadd_ps(weight, x, sum); }
};

template <>
struct Inputs<bf16> : Pairs<> {
  static constexpr int64_t kTogether = 2;
  static Lanes of_weight(const bf16* panel, int part) { return of_many(_mm512_loadu_si512(panel), part); }
};

// The rows of one call's jobs as they are multiplied; where that is not what they are, in the calling thread's memory,
// and good until it calls again.
template <typename T>
class Rows {
 public:
  using Number = typename Inputs<T>::Number;

  // Of all jobs together.
  explicit Rows(int64_t numbers) {
    if constexpr (!std::is_same_v<T, Number>) {
      static thread_local std::vector<Number> memory;
      if (static_cast<int64_t>(memory.size()) < numbers) memory.resize(numbers);
      next_ = memory.data();
    }
  }

  const Number* of(const T* x, int64_t numbers) {
    if constexpr (std::is_same_v<T, Number>) {
      return x;
    } else {
      Number* into = next_;
      next_ += numbers;
      const int64_t pieces = (numbers + kPiece - 1) / kPiece;
      share_evenly(pieces, numbers >= kWorthThreads, [&](int64_t piece) {
        const int64_t first = piece * kPiece;
        widen(x + first, std::min(kPiece, numbers - first), into + first);
      });
      return into;
    }
  }

 private:
  static constexpr int64_t kPiece = 1 << 12;  // numbers of one piece of work

  Number* next_ = nullptr;
};

// Whether a weight with so many inputs is multiplied by tiles: by whole ones, or by one that is as wide as they are.
template <typename T>
constexpr bool fills_tiles(int64_t inputs) {
  return kTileProducts && std::is_same_v<T, bf16> && inputs > 0 && (inputs % kTileInputs == 0 || inputs < kTileInputs);
}

// Whether its panels are so small that setting the shapes of tiles would take longer than one of them.
template <typename T>
constexpr bool is_thin(int64_t inputs) {
  return fills_tiles<T>(inputs) && inputs <= kTileInputs;
}
constexpr int64_t kThinTogether = 8;  // such panels that a thread takes together

template <typename T>
struct Linear {
  const typename Inputs<T>::Number* x;  // [rows, inputs]
  const T* weight;                      // [panels, inputs / kTogether, width of the panel, kTogether]: what `pack` made
  int64_t rows, inputs;
  Outputs<T> to;
  const Stretches* soon = nullptr;  // what is read after the weight, if that is known
};

// Where a panel begins to ask for what is read soon, if each asks for so many lines; null: nothing is left for it.
const char* soon_from(const Stretches* soon, int64_t panel, int64_t lines) {
  if (!soon) return nullptr;
  int64_t line = panel * lines;
  for (const Stretch& stretch : *soon) {
    if (line < stretch.lines) return static_cast<const char*>(stretch.first) + line * 64;
    line -= stretch.lines;
  }
  return nullptr;
}

// A panel's outputs. The last one is half as wide where no more are left, as those of most adapters' ranks are: what is
// read from memory takes longest there.
int64_t width_of(int64_t outputs, int64_t panel) { return outputs - panel * kPanel > kHalf ? kPanel : kHalf; }

// Of a panel's outputs from `kFirst` on 16, or all 32 (`kBoth`).
// `ahead`: weights that memory is asked for meanwhile, a line of 64 bytes for each step, which is half of a panel.
template <typename T, int kRows, bool kAhead, bool kWhole, bool kBoth = kWhole, int64_t kFirst = 0>
void compute_tile(const Linear<T>& job, int64_t first_row, int64_t panel, const char* ahead) {
  using In = Inputs<T>;
  constexpr int64_t width = kWhole ? kPanel : kHalf;
  const T* weight = job.weight + panel * job.inputs * kPanel + kFirst * In::kTogether;
  const auto* x = job.x + first_row * job.inputs;
  __m512 left[kRows], right[kRows];
  for (int row = 0; row < kRows; ++row) left[row] = right[row] = _mm512_setzero_ps();
  for (int64_t input = 0; input < job.inputs; input += In::kTogether, ahead += 64) {
    if constexpr (kAhead) _mm_prefetch(ahead, _MM_HINT_T1);
#pragma GCC unroll 2
    for (int part = 0; part < In::kParts; ++part) {
      const auto a = In::of_weight(weight + input * width, part);
      const auto b = kBoth ? In::of_weight(weight + input * width + kHalf * In::kTogether, part) : a;
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        const auto own = In::of_one(x + row * job.inputs + input, part);
        left[row] = In::add(left[row], a, own);
        if constexpr (kBoth) right[row] = In::add(right[row], b, own);
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    finish(job.to, first_row + row, panel * kPanel + kFirst, left[row]);
    if constexpr (kBoth) finish(job.to, first_row + row, panel * kPanel + kHalf, right[row]);
  }
}

template <typename T, int kRows, bool kAhead, bool kWhole>
void compute_rows(const Linear<T>& job, int64_t first_row, int64_t rows, int64_t panel, const char* ahead) {
  if (rows == kRows) {
    if constexpr (!kWhole || kRows <= kWholeRows) {
      return compute_tile<T, kRows, kAhead, kWhole>(job, first_row, panel, ahead);
    } else {
      compute_tile<T, kRows, kAhead, kWhole, false>(job, first_row, panel, ahead);
      const int64_t half = job.inputs * kHalf * static_cast<int64_t>(sizeof(T));
      if constexpr (kAhead) ahead += half;
      return compute_tile<T, kRows, kAhead, kWhole, false, kHalf>(job, first_row, panel, ahead);
    }
  }
  if constexpr (kRows > 1) compute_rows<T, kRows - 1, kAhead, kWhole>(job, first_row, rows, panel, ahead);
}

// In tiles that are as equal as may be: few rows left over would take longer than their share. While the second and the
// third tile compute, memory has time for the thread's next panel, which there is none of behind half a panel. So the
// first tile, which would read the panel from memory, has time to ask for what comes after the weight. Where tiles are
// split, the second one's two passes ask, and an only one's. Tiles of AMX leave memory no time for what comes after.
template <typename T, bool kWhole>
void compute_panel(const Linear<T>& job, int64_t panel, int64_t next) {
  const auto* ahead = reinterpret_cast<const char*>(job.weight + next * job.inputs * kPanel);
  if constexpr (fills_tiles<T>(kTileInputs)) {
    if (fills_tiles<T>(job.inputs)) {
      return multiply_tiles<kWhole>({job.x, job.rows, job.inputs}, job.weight + panel * job.inputs * kPanel, job.to,
                                    panel * kPanel, kWhole ? ahead : nullptr);
    }
  }
  const int64_t half = job.inputs * kHalf * static_cast<int64_t>(sizeof(T));
  const int64_t tiles = (job.rows + kTile - 1) / kTile;
  const int64_t lines = job.inputs / Inputs<T>::kTogether * (kSplit ? 2 : 1);
  const char* soon = tiles > 1 ? soon_from(job.soon, panel, lines) : nullptr;
  for (int64_t tile = 0, row = 0; tile < tiles; ++tile) {
    const int64_t rows = (job.rows - row) / (tiles - tile);
    if (kWhole && tile == 0 && soon) {
      compute_rows<T, kTile, kWhole, kWhole>(job, row, rows, panel, soon);
    } else if (kWhole && (kSplit ? tile == std::min<int64_t>(1, tiles - 1) : tile == 1 || tile == 2)) {
      compute_rows<T, kTile, kWhole, kWhole>(job, row, rows, panel, ahead);
      ahead += half;
    } else {
      compute_rows<T, kTile, false, kWhole>(job, row, rows, panel, nullptr);
    }
    row += rows;
  }
}

// A thread's next `count` panels.
template <typename T>
void compute_panels(const Linear<T>& job, int64_t first, int64_t count, int64_t stride) {
  const int64_t panels = num_panels(job.to.outputs), stop = std::min(first + count, panels);
  const auto each = [&] {
    for (int64_t panel = first; panel < stop; ++panel) {
      const int64_t next = std::min(panel + stride, panels - 1);
      width_of(job.to.outputs, panel) == kPanel ? compute_panel<T, true>(job, panel, next)
                                                : compute_panel<T, false>(job, panel, next);
    }
  };
  if constexpr (fills_tiles<T>(kTileInputs)) {
    if (fills_tiles<T>(job.inputs)) {
      const Shapes<true> shapes(rows_of_tile(job.rows), 2 * std::min(job.inputs, kTileInputs));
      return each();
    }
  }
  each();
}

// A job in parts of so many rows that a core's own cache keeps them while all panels meet them: none, if it has no
// rows. Of a weight with few inputs or outputs, of which no panel takes long, parts are small: all threads have some.
template <typename T>
void add_parts(const Linear<T>& job, std::vector<Linear<T>>& parts) {
  if (!fills_tiles<T>(job.inputs)) return parts.push_back(job);
  const bool is_small = is_thin<T>(job.inputs) || job.to.outputs <= 2 * kPanel;
  const int64_t fit = is_small ? 0 : kRowsAtOnce / static_cast<int64_t>(job.inputs * sizeof(T));
  const int64_t most = std::max(4 * kTileRows, fit);
  const int64_t count = (job.rows + most - 1) / most;
  for (int64_t part = 0, row = 0; part < count; ++part) {
    const int64_t rows = (job.rows - row) / (count - part);
    parts.push_back({job.x + row * job.inputs, job.weight, rows, job.inputs, job.to.from(row), job.soon});
    row += rows;
  }
}

// Pieces of work of several jobs, `ends[i]` of which are of the job i and those before it, shared by the threads as if
// they were one job's: `body(job, piece)`.
template <class Body>
void share_pieces(const std::vector<int64_t>& ends, int64_t at_once, const Body& body) {
  share(ends.back(), at_once, [&](int64_t at) {
    const int64_t job = std::upper_bound(ends.begin(), ends.end(), at) - ends.begin();
    body(job, at - (job ? ends[job - 1] : 0));
  });
}

// One projection, or several, whose panels the threads share as if they were one's.
template <typename T>
void compute(const Linear<T>* first, int64_t count) {
  static thread_local std::vector<Linear<T>> kept_jobs;
  static thread_local std::vector<int64_t> kept_ends;
  std::vector<Linear<T>>& jobs = kept_jobs;  // the caller's, in every thread
  std::vector<int64_t>& ends = kept_ends;    // of each job's pieces of work among all
  jobs.clear();
  ends.clear();
  for (int64_t i = 0; i < count; ++i) add_parts(first[i], jobs);
  if (jobs.empty()) return;
  const auto together = [](const Linear<T>& job) { return is_thin<T>(job.inputs) ? kThinTogether : 1; };
  const auto pieces = [&](const Linear<T>& job) {
    return (num_panels(job.to.outputs) + together(job) - 1) / together(job);
  };
  for (const Linear<T>& job : jobs) ends.push_back((ends.empty() ? 0 : ends.back()) + pieces(job));
  const int64_t threads = team_size();
  const bool few_rows =
      std::all_of(jobs.begin(), jobs.end(), [](const Linear<T>& job) { return job.rows <= kTile; });
  const int64_t at_once = panels_at_once(ends.back(), few_rows);
  const int64_t stride = kSplit && at_once > 1 ? 1 : threads;  // to the panel that the same thread probably takes next
  share_pieces(ends, at_once, [&](int64_t i, int64_t piece) {
    compute_panels(jobs[i], piece * together(jobs[i]), together(jobs[i]), stride);
  });
}

constexpr int64_t kGatedRows = 256;  // of whose gates a panel fits into the first cache
alignas(64) thread_local bf16 kept_gates[kTileProducts ? kGatedRows * kPanel : 1];

// Projections to gates and to what they let through, as many of either, and what becomes of both, by tiles.
template <__m512 (*kGated)(__m512, __m512)>
void compute_gated(const RowGroups& groups, const bf16* x, bf16* out) {
#ifdef __AMX_BF16__
  static thread_local std::vector<int64_t> kept;
  std::vector<int64_t>& ends = kept;  // the caller's, in every thread: of each group's pieces of work among all
  const int64_t inputs = groups.projections->inputs, width = groups.projections->outputs / 2, panels = width / kPanel;
  const int64_t threads = team_size(), *starts = groups.starts;
  const auto parts_of = [&](int64_t i) { return (starts[i + 1] - starts[i] + kGatedRows - 1) / kGatedRows; };
  bool few_rows = true;
  ends.clear();
  for (int64_t i = 0; i < groups.count; ++i) {
    ends.push_back((ends.empty() ? 0 : ends.back()) + parts_of(i) * panels);
    few_rows &= starts[i + 1] - starts[i] <= kTile;
  }
  share_pieces(ends, panels_at_once(ends.back(), few_rows), [&](int64_t i, int64_t piece) {
    const int64_t panel = piece % panels, part = piece / panels;
    const int64_t rows = starts[i + 1] - starts[i], parts = parts_of(i), output = panel * kPanel;
    const int64_t first = starts[i] + rows * part / parts, stop = starts[i] + rows * (part + 1) / parts;
    const Projection& by = groups.projections[i];
    const auto *weight = static_cast<const bf16*>(by.weight), *bias = static_cast<const bf16*>(by.bias);
    const auto panel_at = [&](int64_t panel) { return weight + std::min(panel, 2 * panels - 1) * inputs * kPanel; };
    const Shapes<true> shapes(rows_of_tile(stop - first));
    const Outputs<bf16> to{nullptr, nullptr, out + first * width, width};
    const TiledRows own{x + first * inputs, stop - first, inputs};
    multiply_gated_tiles<kGated>(own, {panel_at(panel), panel_at(panels + panel)},
                                 {bias ? bias + output : nullptr, bias ? bias + width + output : nullptr}, kept_gates,
                                 to, output, reinterpret_cast<const char*>(panel_at(panel + threads)));
  });
#endif
}

template <typename T>
void compute_groups(const RowGroups& groups, const T* x, T* out) {
  static thread_local std::vector<Linear<T>> kept;
  kept.clear();
  const int64_t numbers = groups.starts[groups.count] * groups.projections->inputs;
  const auto* all = Rows<T>(numbers).of(x, numbers);
  for (int64_t i = 0; i < groups.count; ++i) {
    const Projection& by = groups.projections[i];
    const int64_t first = groups.starts[i], rows = groups.starts[i + 1] - first;
    if (!rows) continue;
    const Outputs<T> to{static_cast<const T*>(by.bias), nullptr, out + first * by.outputs, by.outputs};
    kept.push_back({all + first * by.inputs, static_cast<const T*>(by.weight), rows, by.inputs, to});
  }
  if (!kept.empty()) compute(kept.data(), static_cast<int64_t>(kept.size()));
}

template <typename T>
void compute_products(const Product* products, int64_t count) {
  static thread_local std::vector<Linear<T>> kept;
  kept.clear();
  const auto* end = products + count;
  Rows<T> all(std::accumulate(products, end, int64_t{0}, [](int64_t sum, const Product& product) {
    return sum + product.rows * product.by->inputs;
  }));
  for (const Product* product = products; product < end; ++product) {
    const Projection& by = *product->by;
    Outputs<T> to{static_cast<const T*>(by.bias), static_cast<const T*>(product->residual),
                  static_cast<T*>(product->out), by.outputs};
    if (product->places) to.stride = product->stride, to.places = product->places;
    const auto* x = all.of(static_cast<const T*>(product->x), product->rows * by.inputs);
    kept.push_back({x, static_cast<const T*>(by.weight), product->rows, by.inputs, to});
  }
  if (!kept.empty()) compute(kept.data(), static_cast<int64_t>(kept.size()));
}

template <typename T>
void compute_one(const Product& product, const Stretches& soon) {
  const Projection& by = *product.by;
  const int64_t numbers = product.rows * by.inputs;
  const auto* x = Rows<T>(numbers).of(static_cast<const T*>(product.x), numbers);
  const Outputs<T> to{static_cast<const T*>(by.bias), static_cast<const T*>(product.residual),
                      static_cast<T*>(product.out), by.outputs};
  const Linear<T> job{x, static_cast<const T*>(by.weight), product.rows, by.inputs, to, &soon};
  compute(&job, 1);
}

template <typename T>
void compute_heads(const T* x, int64_t heads, int64_t rows, int64_t inputs, const T* weights, int64_t outputs, T* out) {
  static thread_local std::vector<Linear<T>> kept;
  kept.clear();
  const auto* all = Rows<T>(heads * rows * inputs).of(x, heads * rows * inputs);
  for (int64_t head = 0; head < heads; ++head) {
    const Outputs<T> to{nullptr, nullptr, out + head * rows * outputs, outputs};
    kept.push_back({all + head * rows * inputs, weights + head * packed_size(inputs, outputs), rows, inputs, to});
  }
  compute(kept.data(), heads);
}

template <typename T>
void pack(const T* weight, int64_t inputs, int64_t outputs, T* packed) {
  constexpr int64_t together = Inputs<T>::kTogether;
#pragma omp parallel for if (outputs * inputs >= kWorthThreads)
  for (int64_t panel = 0; panel < num_panels(outputs); ++panel) {
    T* into = packed + panel * inputs * kPanel;
    const int64_t first = panel * kPanel, width = width_of(outputs, panel);
    for (int64_t input = 0; input < inputs; input += together) {
      for (int64_t output = first; output < first + width; ++output) {
        for (int64_t i = 0; i < together; ++i) *into++ = output < outputs ? weight[output * inputs + input + i] : 0;
      }
    }
  }
}

// Of the numbers in a file: those of kernels/native/adapters.py, in their order.
enum Stored : int64_t { kF32, kBf16, kF16 };

// Rows in a file, which become outputs of a packed weight, from `first_output` on. Where a row has fewer `numbers` than
// the weight has inputs, zeros follow. Field by field as in kernels/native/adapters.py.
struct Piece {
  int64_t begin;         // in bytes
  Stored type;           // of the numbers there
  const int64_t* order;  // [rows], which row of the file comes where; null: as they lie
  int64_t rows, numbers;
  float scale;
  int64_t into;  // where the weight begins, in numbers
  int64_t inputs, outputs, first_output;
};

inline __m512 load_stored(const char* from, Stored type, int64_t at, __mmask16 lanes) {
  const auto* narrow = reinterpret_cast<const bf16*>(from) + at;
  switch (type) {
    case kF32: return load(reinterpret_cast<const float*>(from) + at, lanes);
    case kBf16: return load(narrow, lanes);
    default: return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, narrow));
  }
}

// 8 rows of 8 words each become 8 rows of what stood one below the other; so many words from row to row.
inline void turn(const char* from, int64_t from_words, uint32_t* to, int64_t to_words) {
  __m256 rows[8], pairs[8], fours[8];
  for (int i = 0; i < 8; ++i) rows[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(from + i * from_words * 4));
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    fours[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    fours[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    fours[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    fours[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(reinterpret_cast<float*>(to + i * to_words), _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
    _mm256_storeu_ps(reinterpret_cast<float*>(to + (i + 4) * to_words),
                     _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
  }
}

// Rows of words become columns of a panel that is `width` words wide.
void turn_rows(const char* from, int64_t rows, int64_t words, uint32_t* to, int64_t width) {
  for (int64_t row = 0; row < rows; row += 8) {
    const int64_t whole = rows - row < 8 ? 0 : words / 8 * 8;
    for (int64_t word = 0; word < whole; word += 8) {
      turn(from + (row * words + word) * 4, words, to + word * width + row, width);
    }
    for (int64_t left = row; left < std::min(row + 8, rows); ++left) {
      for (int64_t word = whole; word < words; ++word) {
        std::memcpy(to + word * width + left, from + (left * words + word) * 4, 4);
      }
    }
  }
}

// The row `at` of a piece, as the weight has it: scaled, and as long as the weight has inputs.
template <typename T>
void convert(const Piece& piece, const char* file, int64_t at, __m512 scale, T* into) {
  const int64_t numbers = piece.numbers, row_bytes = numbers * (piece.type == kF32 ? 4 : 2);
  const char* from = file + piece.begin + (piece.order ? piece.order[at] : at) * row_bytes;
  for (int64_t number = 0; number < numbers; number += 16) {
    const __mmask16 lanes = first_lanes(numbers - number);
    store(into + number, lanes, _mm512_mul_ps(load_stored(from, piece.type, number, lanes), scale));
  }
  std::fill(into + numbers, into + piece.inputs, T{});
}

template <typename T>
void pack_piece(const Piece& piece, const char* file, T* memory) {
  static thread_local std::vector<T> kept;  // rows of a panel
  if (static_cast<int64_t>(kept.size()) < kPanel * piece.inputs) kept.resize(kPanel * piece.inputs);
  const bool as_they_lie = piece.type == (std::is_same_v<T, float> ? kF32 : kBf16) && piece.scale == 1 &&
                           !piece.order && piece.numbers == piece.inputs;
  const __m512 scale = _mm512_set1_ps(piece.scale);
  const int64_t row_bytes = piece.inputs * sizeof(T), end = piece.first_output + piece.rows;
  for (int64_t panel = piece.first_output / kPanel; panel * kPanel < end; ++panel) {
    const int64_t first = std::max(panel * kPanel, piece.first_output), width = width_of(piece.outputs, panel);
    const int64_t rows = std::min(panel * kPanel + width, end) - first, at = first - piece.first_output;
    const char* from = file + piece.begin + at * row_bytes;
    if (!as_they_lie) {
      for (int64_t row = 0; row < rows; ++row) {
        convert(piece, file, at + row, scale, kept.data() + row * piece.inputs);
      }
      from = reinterpret_cast<const char*>(kept.data());
    }
    auto* into = reinterpret_cast<uint32_t*>(memory + piece.into + panel * kPanel * piece.inputs);
    turn_rows(from, rows, row_bytes / 4, into + first - panel * kPanel, width);
  }
}

// In the calling thread alone: a digest is taken beside.
template <typename T>
void pack_pieces(const Piece* pieces, int64_t count, const char* file, T* memory) {
  for (int64_t i = 0; i < count; ++i) pack_piece(pieces[i], file, memory);
}

}  // namespace

namespace legato {

void linear_groups(const RowGroups& groups, const bf16* x, bf16* out) { compute_groups(groups, x, out); }

void linear_groups(const RowGroups& groups, const float* x, float* out) { compute_groups(groups, x, out); }

void linear(const Product& product, const Stretches& soon, bf16) { compute_one<bf16>(product, soon); }

void linear(const Product& product, const Stretches& soon, float) { compute_one<float>(product, soon); }

bool linear_gated(const RowGroups& groups, Activation activation, const bf16* x, bf16* out) {
  const Projection& by = *groups.projections;
  const bool by_tiles = fills_tiles<bf16>(by.inputs) && !is_thin<bf16>(by.inputs);
  if (!by_tiles || by.bits || by.outputs % (2 * kPanel)) return false;
  switch (activation) {
    case Activation::kSilu: compute_gated<silu<bf16>>(groups, x, out); break;
    case Activation::kGeluTanh: compute_gated<gelu_tanh>(groups, x, out); break;
    case Activation::kSwigluoai: compute_gated<swigluoai>(groups, x, out); break;
  }
  return true;
}

void products(const Product* products, int64_t count, bf16) { compute_products<bf16>(products, count); }

void products(const Product* products, int64_t count, float) { compute_products<float>(products, count); }

}  // namespace legato

extern "C" {

// How many numbers packing writes.
int64_t linear_packed_size(int64_t inputs, int64_t outputs) { return packed_size(inputs, outputs); }

// From `weight [outputs, inputs]`. In bfloat16, `inputs` is even.
void linear_pack_bf16(const bf16* weight, int64_t inputs, int64_t outputs, bf16* packed) {
  pack(weight, inputs, outputs, packed);
}

void linear_pack_f32(const float* weight, int64_t inputs, int64_t outputs, float* packed) {
  pack(weight, inputs, outputs, packed);
}

// Many weights from a file, into memory that is zeros: outputs of no piece stay these.
void linear_pack_pieces_bf16(const Piece* pieces, int64_t count, const char* file, bf16* memory) {
  pack_pieces(pieces, count, file, memory);
}

void linear_pack_pieces_f32(const Piece* pieces, int64_t count, const char* file, float* memory) {
  pack_pieces(pieces, count, file, memory);
}

void linear_bf16(const bf16* x, int64_t rows, int64_t inputs, const bf16* weight, int64_t outputs, const bf16* bias,
                 const bf16* residual, bf16* out) {
  const auto* own = Rows<bf16>(rows * inputs).of(x, rows * inputs);
  const Linear<bf16> job{own, weight, rows, inputs, {bias, residual, out, outputs}};
  compute(&job, 1);
}

void linear_f32(const float* x, int64_t rows, int64_t inputs, const float* weight, int64_t outputs, const float* bias,
                const float* residual, float* out) {
  const auto* own = Rows<float>(rows * inputs).of(x, rows * inputs);
  const Linear<float> job{own, weight, rows, inputs, {bias, residual, out, outputs}};
  compute(&job, 1);
}

// `x [heads, rows, inputs]` by a weight of each head, which are packed one after the other, to
// `out [heads, rows, outputs]`.
void heads_bf16(const bf16* x, int64_t heads, int64_t rows, int64_t inputs, const bf16* weights, int64_t outputs,
                bf16* out) {
  compute_heads(x, heads, rows, inputs, weights, outputs, out);
}

void heads_f32(const float* x, int64_t heads, int64_t rows, int64_t inputs, const float* weights, int64_t outputs,
               float* out) {
  compute_heads(x, heads, rows, inputs, weights, outputs, out);
}

}  // extern "C"
