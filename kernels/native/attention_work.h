// One layer's attention as a list of items that threads take one after the other.

#pragma once

#include <algorithm>
#include <vector>

#include "attention_rows.h"

namespace legato {

constexpr int64_t kSplitTokens = 256;
constexpr int64_t kItemRows = 192;  // whose sums stay in the cache while tiles of keys pass by
constexpr int64_t kItemsPerThread = 8;

struct Segment {
  int64_t first_row, num_queries, context_len;
  int64_t first_column;  // in the tables: where the sequence's column 0 is, or would be
};

// What is the same in all layers of a step.
struct Plan {
  const Segment* segments;
  const int32_t* tables;  // [layer groups, num_columns]
  int64_t num_segments, num_columns, block_size, block_stride, num_kv_heads, head_dim;
  int64_t window;  // tokens that a query sees at most
};

template <typename T>
struct Layer {
  const Plan& plan;
  const int32_t* table;
  const T* cache;
  const T* queries;  // [rows, num_heads, head_dim], rows `row_stride` numbers apart
  int64_t row_stride, num_heads;
  Exponents exponents;
  T* out;

  int64_t heads_per_key_head() const { return num_heads / plan.num_kv_heads; }
  int64_t words() const { return plan.head_dim / Words<T>::kNumbers; }
  int64_t width() const { return (plan.head_dim + 15) / 16 * 16; }
  int64_t token_stride() const { return plan.num_kv_heads * plan.head_dim; }
  int64_t sums_stride() const { return sums_size(width()); }
  int64_t first_seen(int64_t position) const { return std::max<int64_t>(0, position + 1 - plan.window); }
};

// Queries of one segment over its splits [first_split, stop_split).
struct Item {
  const Segment* segment;
  int64_t first_query, num_queries, first_split, stop_split;
  int64_t partial;  // where its sums go, in queries; negative: its results are final
  int64_t cost;     // of each key head

  int64_t position(int64_t query) const { return segment->context_len - segment->num_queries + first_query + query; }
};

struct Work {
  std::vector<Item> items;
  std::vector<Item> cut;  // those of which each split is an item: their partial sums lie one after the other
  int64_t num_partial = 0;
};

template <typename T>
Item tile_of_queries(const Layer<T>& layer, const Segment& segment, int64_t first_query, int64_t num_queries) {
  Item item{&segment, first_query, num_queries, 0, 0, -1, 0};
  const int64_t first = layer.first_seen(item.position(0)), last = item.position(num_queries - 1);
  item.first_split = first / kSplitTokens;
  item.stop_split = last / kSplitTokens + 1;
  item.cost = (kTileKeys / 4 + num_queries * layer.heads_per_key_head()) * (last + 1 - first);
  return item;
}

void cut_into_splits(Work& work, Item item) {
  item.partial = work.num_partial;
  work.num_partial += item.num_queries * (item.stop_split - item.first_split);
  work.cut.push_back(item);
  Item part = item;
  part.cost /= item.stop_split - item.first_split;
  for (int64_t split = item.first_split; split < item.stop_split; ++split) {
    part.first_split = split;
    part.stop_split = split + 1;
    work.items.push_back(part);
    part.partial += item.num_queries;
  }
}

// Longest first. What would keep one thread at work while the others have finished is cut.
template <typename T>
Work divide(const Layer<T>& layer, int num_threads) {
  std::vector<Item> tiles;
  const int64_t queries_per_tile = std::max<int64_t>(1, kItemRows / layer.heads_per_key_head());
  int64_t cost = 0;
  for (int64_t s = 0; s < layer.plan.num_segments; ++s) {
    const Segment& segment = layer.plan.segments[s];
    for (int64_t query = 0; query < segment.num_queries; query += queries_per_tile) {
      const int64_t count = std::min(queries_per_tile, segment.num_queries - query);
      tiles.push_back(tile_of_queries(layer, segment, query, count));
      cost += tiles.back().cost * layer.plan.num_kv_heads;
    }
  }
  Work work;
  for (const Item& tile : tiles) {
    const bool too_long = num_threads > 1 && tile.cost * kItemsPerThread * num_threads > cost;
    if (too_long && tile.stop_split > tile.first_split + 1) {
      cut_into_splits(work, tile);
    } else {
      work.items.push_back(tile);
    }
  }
  std::sort(work.items.begin(), work.items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
  return work;
}

}  // namespace legato
