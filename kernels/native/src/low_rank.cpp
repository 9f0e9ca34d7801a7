// What adapters add to a projection, each to its own rows.
//
// Rows are put in the order of their adapters, and all adapters' products share the threads as the panels of one
// projection do: two products, down to the ranks and up again, whatever the number of adapters. A row's sums are those
// of its own adapter in the order that they always have (linear.cpp), so its result is the same to the bit in any
// company.

#include <cstring>
#include <vector>

#include "calls.h"

namespace {

using namespace legato;

// Kept from call to call, and only grown: such sizes would come from the system, and go back, each time.
template <typename X>
struct Memory {
  std::vector<X> x, ranks, parts, out;  // sorted rows: what comes in, of all ranks, of each part's, what goes out
  std::vector<int64_t> order, starts;   // [sorted rows]; [adapters + 1]
  std::vector<Product> products;
};

template <typename X>
X* reserve(std::vector<X>& memory, int64_t numbers) {
  if (static_cast<int64_t>(memory.size()) < numbers) memory.resize(numbers);
  return memory.data();
}

// The rows that something is added to, by their adapters; how many these are.
template <typename X, class Of>
int64_t sort(const Adapters& adapters, const Of& of, int64_t rows, Memory<X>& memory) {
  memory.starts.assign(adapters.count + 1, 0);
  for (int64_t row = 0; row < rows; ++row) {
    if (const int64_t number = of(row); number >= 0) ++memory.starts[number + 1];
  }
  for (int64_t number = 0; number < adapters.count; ++number) memory.starts[number + 1] += memory.starts[number];
  int64_t* order = reserve(memory.order, memory.starts.back());
  std::vector<int64_t> next(memory.starts.begin(), memory.starts.end() - 1);
  for (int64_t row = 0; row < rows; ++row) {
    if (const int64_t number = of(row); number >= 0) order[next[number]++] = row;
  }
  return memory.starts.back();
}

template <typename X>
void add(const Adapters& adapters, int64_t layer, Place place, int64_t first_row, int64_t rows, const X* x, X* y,
         int64_t outputs) {
  static thread_local Memory<X> memory;
  const auto low_rank = [&](int64_t number) -> const LowRank& {
    return adapters.low_ranks[number][layer * kPlaces + place];
  };
  const auto of = [&](int64_t row) {
    const int64_t number = adapters.of_row[first_row + row];
    return number >= 0 && low_rank(number).num_ups ? number : -1;
  };
  const int64_t sorted = sort(adapters, of, rows, memory);
  if (!sorted) return;

  int64_t inputs = 0, num_ranks = 0, num_outputs = 0;
  for (int64_t number = 0; number < adapters.count; ++number) {
    const int64_t own = memory.starts[number + 1] - memory.starts[number];
    if (!own) continue;
    const LowRank& by = low_rank(number);
    inputs = by.down.inputs;
    num_ranks += own * by.down.outputs;
    for (const Up* up = by.ups; up < by.ups + by.num_ups; ++up) num_outputs += own * up->by.outputs;
  }
  X* in = reserve(memory.x, sorted * inputs);
  X* ranks = reserve(memory.ranks, num_ranks);
  X* parts = reserve(memory.parts, num_ranks);
  X* out = reserve(memory.out, num_outputs);
  for (int64_t at = 0; at < sorted; ++at) std::memcpy(in + at * inputs, x + memory.order[at] * inputs, inputs * sizeof(X));

  // `body(low rank, its first sorted row, how many, where its ranks are)`
  const auto each = [&](const auto& body) {
    for (int64_t number = 0, at = 0; number < adapters.count; ++number) {
      const int64_t first = memory.starts[number], own = memory.starts[number + 1] - first;
      if (!own) continue;
      body(low_rank(number), first, own, at);
      at += own * low_rank(number).down.outputs;
    }
  };
  memory.products.clear();
  each([&](const LowRank& by, int64_t first, int64_t own, int64_t at) {
    memory.products.push_back({&by.down, in + first * inputs, own, nullptr, ranks + at});
  });
  products(memory.products.data(), static_cast<int64_t>(memory.products.size()), X{});

  // Each part's ranks and outputs side by side; and back when they are summed.
  const auto copy_outputs = [&](bool back) {
    X* own_out = out;
    each([&](const LowRank& by, int64_t first, int64_t own, int64_t) {
      for (const Up* up = by.ups; up < by.ups + by.num_ups; ++up) {
        for (int64_t row = first; row < first + own; ++row, own_out += up->by.outputs) {
          X* there = y + memory.order[row] * outputs + up->first_output;
          std::memcpy(back ? there : own_out, back ? own_out : there, up->by.outputs * sizeof(X));
        }
      }
    });
  };
  memory.products.clear();
  X *own_part = parts, *own_out = out;
  each([&](const LowRank& by, int64_t, int64_t own, int64_t at) {
    for (const Up* up = by.ups; up < by.ups + by.num_ups; ++up) {
      memory.products.push_back({&up->by, own_part, own, own_out, own_out});
      own_out += own * up->by.outputs;
      for (int64_t row = 0; row < own; ++row, own_part += up->by.inputs) {
        std::memcpy(own_part, ranks + at + row * by.down.outputs + up->first_rank, up->by.inputs * sizeof(X));
      }
    }
  });
  copy_outputs(false);
  products(memory.products.data(), static_cast<int64_t>(memory.products.size()), X{});
  copy_outputs(true);
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
