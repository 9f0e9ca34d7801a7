// A layer's mixture of experts: each row goes through the few gated MLPs that a router chooses for it.
//
// Rows are put in the order of their experts, so that each expert's weights are read once for many of its rows. A thread
// takes rows of one expert all the way, where that gives all threads as much to do: they wait for each other once, and
// what is between two projections stays in a core's own cache. Elsewhere they share each projection, panel by panel.
// What an expert makes of a row depends on no other row (linear.cpp, quantised.cpp), and a row's experts are summed by
// their rank: its result is the same to the bit in any company. A process that holds some of the experts computes and
// sums these alone.

#include <algorithm>
#include <cstring>
#include <vector>

#include "calls.h"
#include "elementwise.h"
#include "team.h"

namespace {

using namespace legato;

// Rows of an expert, of those that are sorted.
struct Block {
  int64_t expert, first, rows;
};

// What experts make of sorted rows, on the way: [rows, ...].
template <typename X>
struct Between {
  std::vector<X> x, gate_up, activated;
};

// Kept from call to call: such sizes would come from the system, and go back, each time.
template <typename X>
struct Memory {
  std::vector<X> logits, out;              // [rows, experts]; [pairs that are here, inputs], sorted
  std::vector<float> wide_x, wide_logits;  // what a router in float32 has: [rows, inputs]; [rows, experts]
  std::vector<float> shares;               // [rows, per_row]: how much an expert counts
  std::vector<int64_t> numbers, places;    // [rows, per_row]: of a row's experts; where it is sorted to, or kElsewhere
  std::vector<int64_t> sources;            // [pairs that are here]: the row
  std::vector<int64_t> starts;             // [held + 1]: where an expert's rows begin
  std::vector<Block> blocks;
  std::vector<int64_t> loads;  // of each thread
  Between<X> between;
};

constexpr int64_t kElsewhere = -1;

// Leaves the best groups' values, and no others: those of the largest value, or, with a correction, of the largest two.
void leave_best_groups(const Experts& experts, float* values) {
  static thread_local std::vector<float> scores;
  static thread_local std::vector<bool> kept;
  scores.resize(experts.groups);
  kept.assign(experts.groups, false);
  const int64_t size = experts.count / experts.groups;
  for (int64_t group = 0; group < experts.groups; ++group) {
    const float *first = values + group * size, *best = std::max_element(first, first + size);
    scores[group] = *best;
    if (!experts.correction) continue;
    float second = -INFINITY;
    for (const float* value = first; value < first + size; ++value) {
      if (value != best) second = std::max(second, *value);
    }
    scores[group] += second;
  }
  for (int64_t rank = 0; rank < experts.groups_per_row; ++rank) {
    const auto best = std::max_element(scores.begin(), scores.end());
    kept[best - scores.begin()] = true;
    *best = -INFINITY;
  }
  for (int64_t group = 0; group < experts.groups; ++group) {
    if (!kept[group]) std::fill_n(values + group * size, size, -INFINITY);
  }
}

// The largest logits of a row, of equal ones the first, and their softmax; see `kernels.interface.ExpertChoice`.
template <typename X>
void choose(const Experts& experts, const X* logits, int64_t* numbers, float* shares) {
  static thread_local std::vector<float> kept;
  kept.resize((experts.count + 15) / 16 * 32);
  float *values = kept.data(), *powers = values + kept.size() / 2;
  for (int64_t at = 0; at < experts.count; at += 16) {
    const __mmask16 lanes = first_lanes(experts.count - at);
    _mm512_storeu_ps(values + at, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), lanes, load(logits + at, lanes)));
  }
  const __m512 largest = _mm512_set1_ps(*std::max_element(values, values + experts.count));
  float total = experts.correction ? 1 : 0;
  for (int64_t at = 0; at < experts.count; at += 16) {
    const __mmask16 lanes = first_lanes(experts.count - at);
    const __m512 value = _mm512_loadu_ps(values + at);
    if (experts.correction) {
      const __m512 score = sigmoid(value);
      _mm512_storeu_ps(powers + at, score);
      _mm512_storeu_ps(values + at, _mm512_add_ps(score, load(experts.correction + at, lanes)));
    } else {
      const __m512 power = accurate_exp(_mm512_sub_ps(value, largest));
      _mm512_storeu_ps(powers + at, power);
      total += _mm512_mask_reduce_add_ps(lanes, power);
    }
  }
  if (experts.groups > 1) leave_best_groups(experts, values);
  float chosen = 0;
  for (int64_t rank = 0; rank < experts.per_row; ++rank) {
    const int64_t number = std::max_element(values, values + experts.count) - values;
    numbers[rank] = number;
    shares[rank] = powers[number];
    chosen += powers[number];
    values[number] = -INFINITY;
  }
  for (int64_t rank = 0; rank < experts.per_row; ++rank) {
    shares[rank] = shares[rank] / (experts.normalised ? chosen : total) * experts.scale;
  }
}

// The experts of all rows, and how much each counts.
template <typename X>
void route(const Experts& experts, const X* x, int64_t rows, bool is_worth, Memory<X>& memory) {
  const int64_t all[] = {0, rows}, numbers = rows * experts.router.inputs;
  const auto choose_all = [&](const auto& logits) {
    share_evenly(rows, is_worth, [&](int64_t row) {
      const int64_t at = row * experts.per_row;
      choose(experts, &logits[row * experts.count], &memory.numbers[at], &memory.shares[at]);
    });
  };
  if (!experts.wide_router) {
    memory.logits.resize(rows * experts.count);
    project({&experts.router, all, 1}, x, memory.logits.data());
    return choose_all(memory.logits);
  }
  memory.wide_x.resize(numbers);
  memory.wide_logits.resize(rows * experts.count);
  for (int64_t at = 0; at < numbers; at += 16) {
    const __mmask16 lanes = first_lanes(numbers - at);
    store(&memory.wide_x[at], lanes, load(x + at, lanes));
  }
  linear_groups({&experts.router, all, 1}, memory.wide_x.data(), memory.wide_logits.data());
  choose_all(memory.wide_logits);
}

// How many of the pairs of a row and an expert are here.
template <typename X>
int64_t sort(const Experts& experts, int64_t assigned, Memory<X>& memory) {
  memory.places.resize(assigned);
  memory.sources.resize(assigned);
  memory.starts.assign(experts.held + 1, 0);
  const auto is_here = [&](int64_t number) { return number >= 0 && number < experts.held; };
  for (int64_t at = 0; at < assigned; ++at) {
    const int64_t number = memory.numbers[at] -= experts.first;
    if (is_here(number)) ++memory.starts[number + 1];
  }
  for (int64_t number = 0; number < experts.held; ++number) memory.starts[number + 1] += memory.starts[number];
  std::vector<int64_t> next(memory.starts.begin(), memory.starts.end() - 1);
  for (int64_t at = 0; at < assigned; ++at) {
    const int64_t number = memory.numbers[at];
    memory.places[at] = is_here(number) ? next[number]++ : kElsewhere;
    if (is_here(number)) memory.sources[memory.places[at]] = at / experts.per_row;
  }
  return memory.starts.back();
}

// Whether threads that take blocks, the largest first, end together, as far as their rows tell; `memory.blocks`.
template <typename X>
bool divide(Memory<X>& memory, int64_t held) {
  constexpr int64_t kRows = 256;    // of which a core's own cache has room for what is between
  constexpr int64_t kReading = 32;  // rows that take as long as reading the weights does
  std::vector<Block>& blocks = memory.blocks;
  blocks.clear();
  for (int64_t expert = 0; expert < held; ++expert) {
    const int64_t start = memory.starts[expert], rows = memory.starts[expert + 1] - start;
    const int64_t count = (rows + kRows - 1) / kRows;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t first = rows * i / count;
      blocks.push_back({expert, start + first, rows * (i + 1) / count - first});
    }
  }
  std::stable_sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) { return a.rows > b.rows; });
  memory.loads.assign(team_size(), 0);
  int64_t total = 0;
  for (const Block& block : blocks) {
    total += block.rows + kReading;
    *std::min_element(memory.loads.begin(), memory.loads.end()) += block.rows + kReading;
  }
  const int64_t longest = *std::max_element(memory.loads.begin(), memory.loads.end());
  return 12 * longest * team_size() <= 13 * total;
}

// What experts make of their rows, which lie side by side: of `x [rows, inputs]`, in `starts`.
template <typename X>
void apply(const Experts& experts, const RowGroups& gates, const X* x, const int64_t* sources, Between<X>& between,
           X* out) {
  const int64_t width = experts.router.inputs, inner = experts.down->inputs, rows = gates.starts[gates.count];
  between.x.resize(rows * width);
  between.activated.resize(rows * inner);
  share_evenly(rows, rows * width >= kWorthThreads, [&](int64_t at) {
    std::memcpy(&between.x[at * width], x + sources[at] * width, width * sizeof(X));
  });
  if (!linear_gated(gates, experts.activation, between.x.data(), between.activated.data())) {
    between.gate_up.resize(rows * inner * 2);
    project(gates, between.x.data(), between.gate_up.data());
    gated_activation(experts.activation, between.gate_up.data(), rows, inner, between.activated.data());
  }
  const Projection* down = experts.down + (gates.projections - experts.gate_up);
  project({down, gates.starts, gates.count}, between.activated.data(), out);
}

// To `residual`, if there is one, a row's experts that are here, in float32, rounded once.
template <typename X>
void sum_row(const X* outputs, const int64_t* places, const float* shares, int64_t per_row, int64_t width,
             const X* residual, X* out) {
  for (int64_t i = 0; i < width; i += 16) {
    const __mmask16 lanes = first_lanes(width - i);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t rank = 0; rank < per_row; ++rank) {
      if (places[rank] == kElsewhere) continue;
      sum = _mm512_fmadd_ps(_mm512_set1_ps(shares[rank]), load(outputs + places[rank] * width + i, lanes), sum);
    }
    if (residual) sum = _mm512_add_ps(sum, load(residual + i, lanes));
    store(out + i, lanes, sum);
  }
}

template <typename X>
void run(const Experts& experts, const X* x, int64_t rows, const X* residual, X* out) {
  static thread_local Memory<X> kept;
  Memory<X>& memory = kept;  // the caller's, in every thread
  const int64_t width = experts.router.inputs, per_row = experts.per_row, assigned = rows * per_row;
  const bool is_worth = assigned * width >= kWorthThreads;

  memory.numbers.resize(assigned);
  memory.shares.resize(assigned);
  route(experts, x, rows, is_worth, memory);
  memory.out.resize(sort(experts, assigned, memory) * width);
  if (divide(memory, experts.held)) {
    share(static_cast<int64_t>(memory.blocks.size()), 1, [&](int64_t index) {
      static thread_local Between<X> own;
      const Block& block = memory.blocks[index];
      const int64_t all[] = {0, block.rows};
      apply(experts, {experts.gate_up + block.expert, all, 1}, x, &memory.sources[block.first], own,
            &memory.out[block.first * width]);
    });
  } else {
    apply(experts, {experts.gate_up, memory.starts.data(), experts.held}, x, memory.sources.data(), memory.between,
          memory.out.data());
  }
  share_evenly(rows, is_worth, [&](int64_t row) {
    sum_row(memory.out.data(), &memory.places[row * per_row], &memory.shares[row * per_row], per_row, width,
            residual ? residual + row * width : nullptr, out + row * width);
  });
}

}  // namespace

extern "C" {

void experts_bf16(const Experts* experts, const bf16* x, int64_t rows, const bf16* residual, bf16* out) {
  run(*experts, x, rows, residual, out);
}

void experts_f32(const Experts* experts, const float* x, int64_t rows, const float* residual, float* out) {
  run(*experts, x, rows, residual, out);
}

}  // extern "C"
