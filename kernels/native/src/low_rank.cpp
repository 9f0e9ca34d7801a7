// What adapters add to a projection, each to its own rows.
//
// Rows are put in the order of their adapters, of which each has two products, down to the ranks and up again, to the
// rows where they lie. Of many adapters with few rows each, a thread takes one at a time, with both products: it waits
// for nobody in between. Otherwise all adapters' products share the threads as the panels of one projection do. A row's
// sums are those of its own adapter in the order that they always have (linear.cpp), so its result is the same to the
// bit in any company.

#include <algorithm>
#include <cstring>
#include <vector>

#include "calls.h"
#include "team.h"

namespace {

using namespace legato;

constexpr int64_t kFewRows = 32;

// An adapter's rows among those of `x` and `y`.
struct Own {
  const LowRank* by;
  const int64_t* places;
  int64_t rows;
};

// This and the following are kept from call to call, and only grown: such sizes would come from the system, and go
// back, each time.
struct Sorted {
  std::vector<int64_t> order, starts;  // [sorted rows]; [adapters + 1]
  std::vector<Own> owns;
};

template <typename X>
struct Memory {
  std::vector<X> x, ranks, parts;  // rows that lie apart, side by side; of all ranks; of each part's
  std::vector<Product> products;
};

template <typename X>
X* reserve(std::vector<X>& memory, int64_t numbers) {
  if (static_cast<int64_t>(memory.size()) < numbers) memory.resize(numbers);
  return memory.data();
}

// The rows that something is added to, by their adapters.
template <class Of, class LowRankOf>
void sort(int64_t count, int64_t rows, const Of& of, const LowRankOf& low_rank, Sorted& sorted) {
  auto& [order, starts, owns] = sorted;
  starts.assign(count + 1, 0);
  for (int64_t row = 0; row < rows; ++row) {
    if (const int64_t number = of(row); number >= 0) ++starts[number + 1];
  }
  for (int64_t number = 0; number < count; ++number) starts[number + 1] += starts[number];
  reserve(order, starts.back());
  owns.clear();
  for (int64_t number = 0; number < count; ++number) {
    const int64_t own = starts[number + 1] - starts[number];
    if (own) owns.push_back({&low_rank(number), order.data() + starts[number], own});
  }
  for (int64_t row = 0; row < rows; ++row) {
    if (const int64_t number = of(row); number >= 0) order[starts[number]++] = row;
  }
}

// What some adapters add, all of them together.
template <typename X>
void add_of(const Own* first, int64_t count, const X* x, X* y, int64_t outputs) {
  static thread_local Memory<X> memory;
  const Own* end = first + count;
  int64_t num_in = 0, num_ranks = 0;
  for (const Own* own = first; own < end; ++own) {
    num_in += own->rows * own->by->down.inputs;
    num_ranks += own->rows * own->by->down.outputs;
  }
  X* in = reserve(memory.x, num_in);
  X* const ranks = reserve(memory.ranks, num_ranks);
  X* part = reserve(memory.parts, num_ranks);

  memory.products.clear();
  X* own_ranks = ranks;
  for (const Own* own = first; own < end; ++own) {
    const Projection& down = own->by->down;
    const X* rows = x + own->places[0] * down.inputs;
    if (own->places[own->rows - 1] - own->places[0] >= own->rows) {
      rows = in;
      for (int64_t row = 0; row < own->rows; ++row, in += down.inputs) {
        std::memcpy(in, x + own->places[row] * down.inputs, down.inputs * sizeof(X));
      }
    }
    memory.products.push_back({&down, rows, own->rows, nullptr, own_ranks});
    own_ranks += own->rows * down.outputs;
  }
  products(memory.products.data(), count, X{});

  memory.products.clear();
  own_ranks = ranks;
  for (const Own* own = first; own < end; ++own) {
    const int64_t all = own->by->down.outputs;
    for (const Up* up = own->by->ups; up < own->by->ups + own->by->num_ups; ++up) {
      const int64_t wanted = up->by.inputs;
      const X* from = own_ranks;
      if (wanted < all) {  // each part's side by side
        from = part;
        for (int64_t row = 0; row < own->rows; ++row, part += wanted) {
          std::memcpy(part, own_ranks + row * all + up->first_rank, wanted * sizeof(X));
        }
      }
      X* to = y + up->first_output;
      memory.products.push_back({&up->by, from, own->rows, to, to, own->places, outputs});
    }
    own_ranks += own->rows * all;
  }
  products(memory.products.data(), static_cast<int64_t>(memory.products.size()), X{});
}

template <typename X>
void add(const Adapters& adapters, int64_t layer, Place place, int64_t first_row, int64_t rows, const X* x, X* y,
         int64_t outputs) {
  static thread_local Sorted sorted;
  const auto low_rank = [&](int64_t number) -> const LowRank& {
    return adapters.low_ranks[number][layer * kPlaces + place];
  };
  const auto of = [&](int64_t row) {
    const int64_t number = adapters.of_row[first_row + row];
    return number >= 0 && low_rank(number).num_ups ? number : -1;
  };
  sort(adapters.count, rows, of, low_rank, sorted);
  const std::vector<Own>& owns = sorted.owns;  // the caller's, in every thread
  const auto count = static_cast<int64_t>(owns.size());
  if (!count) return;
  const bool few_rows = std::all_of(owns.begin(), owns.end(), [](const Own& own) { return own.rows <= kFewRows; });
  if (!few_rows || count < 2 * team_size()) return add_of(owns.data(), count, x, y, outputs);
  share(count, 1, [&](int64_t i) { add_of(&owns[i], 1, x, y, outputs); });
}

}  // namespace

namespace legato {

const Stretches& adapters_soon(const Adapters& adapters, int64_t layer, Place place) {
  static thread_local Stretches soon;
  soon.clear();
  for (int64_t number = 0; number < adapters.count; ++number) {
    const LowRank& by = adapters.low_ranks[number][layer * kPlaces + place];
    if (by.num_ups) soon.push_back(by.weights);
  }
  return soon;
}

void add_adapters(const Adapters& adapters, int64_t layer, Place place, int64_t first_row, int64_t rows, const bf16* x,
                  bf16* y, int64_t outputs) {
  add(adapters, layer, place, first_row, rows, x, y, outputs);
}

void add_adapters(const Adapters& adapters, int64_t layer, Place place, int64_t first_row, int64_t rows, const float* x,
                  float* y, int64_t outputs) {
  add(adapters, layer, place, first_row, rows, x, y, outputs);
}

}  // namespace legato
