// One layer's attention as a list of items that threads take one after the other.

#pragma once

#include <algorithm>
#include <vector>

#include "attention_rows.h"

namespace legato {

constexpr int64_t kSplitTokens = 256;
constexpr int64_t kItemRows = 192;  // whose sums stay in the cache while tiles of keys pass by
constexpr int64_t kItemsPerThread = 4;

struct Segment {
  int64_t first_row, num_queries, context_len;
  int64_t first_column;  // in the tables: where the sequence's column 0 is, or would be
};

// What is the same in all layers of a step.
struct Plan {
  const Segment* segments;
  const int32_t* tables;  // [layer groups, num_columns]
  int64_t num_segments, num_columns, block_size, block_stride, num_kv_heads, head_dim;
  int64_t value_dim, value_offset;  // of a value; numbers from a token's keys to its values, 0 where they begin alike
  int64_t window;                   // tokens that a query sees at most
};

template <typename T>
struct Layer {
  const Plan& plan;
  const int32_t* table;
  const T* cache;
  const T* queries;  // [rows, num_heads, head_dim], rows `row_stride` numbers apart
  int64_t row_stride, num_heads;
  Exponents exponents;
  const float* sinks;  // logits, [num_heads]; null: there are none
  T* out;

  int64_t heads_per_key_head() const { return num_heads / plan.num_kv_heads; }
  int64_t words() const { return plan.head_dim / Words<T>::kNumbers; }
  int64_t width() const { return (plan.value_dim + 15) / 16 * 16; }
  int64_t token_stride() const { return plan.num_kv_heads * plan.head_dim; }
  int64_t sums_stride() const { return sums_size(width()); }
  // What the sink of a row's head adds to the row's weights; `place` is the row's among [queries, num_heads].
  float sink_weight(int64_t place, const Sums& sums) const {
    return sinks ? std::exp2(sinks[place % num_heads] * kLog2E - sums.reference) : 0.0f;
  }
  int64_t first_seen(int64_t position) const { return std::max<int64_t>(0, position + 1 - plan.window); }
};

// Queries of one segment over its splits [first_split, stop_split), by some of the key heads.
struct Item {
  const Segment* segment;
  int64_t first_query, num_queries;
  int64_t first_token, stop_token;  // that any of the queries sees
  int64_t first_split, stop_split;
  int64_t first_key_head, num_key_heads;
  int64_t partial;  // where its sums go, in queries; negative: its results are final
  int64_t cost;

  int64_t first_row() const { return segment->first_row + first_query; }
  int64_t position(int64_t query) const { return segment->context_len - segment->num_queries + first_query + query; }
  int64_t first_tile(int64_t split) const {
    return std::max(split * kSplitTokens, first_token) / kTileKeys * kTileKeys;
  }
  int64_t stop(int64_t split) const { return std::min((split + 1) * kSplitTokens, stop_token); }
};

template <typename T>
Item tile_of_queries(const Layer<T>& layer, const Segment& segment, int64_t first_query, int64_t num_queries) {
  Item item{&segment, first_query, num_queries};
  item.first_token = layer.first_seen(item.position(0));
  item.stop_token = item.position(num_queries - 1) + 1;
  item.first_split = item.first_token / kSplitTokens;
  item.stop_split = (item.stop_token - 1) / kSplitTokens + 1;
  item.num_key_heads = layer.plan.num_kv_heads;
  item.partial = -1;
  item.cost = item.num_key_heads * (kTileKeys / 4 + num_queries * layer.heads_per_key_head()) *
              (item.stop_token - item.first_token);
  return item;
}

// Work for `num_threads`. What would keep one of them busy while the others have finished is cut.
class Work {
 public:
  std::vector<Item> items;
  std::vector<Item> cut;  // those of which each split is an item: their partial sums lie one after the other
  int64_t num_partial = 0;

  // Items of at most so many rows, or of one query's of a key head.
  template <typename T>
  Work(const Layer<T>& layer, int64_t num_threads, int64_t item_rows)
      : num_threads_(num_threads), item_rows_(item_rows), heads_(layer.heads_per_key_head()) {
    std::vector<Item> tiles;
    const int64_t queries_per_tile = std::max<int64_t>(1, item_rows_ / heads_);
    for (int64_t s = 0; s < layer.plan.num_segments; ++s) {
      const Segment& segment = layer.plan.segments[s];
      for (int64_t query = 0; query < segment.num_queries; query += queries_per_tile) {
        const int64_t count = std::min(queries_per_tile, segment.num_queries - query);
        tiles.push_back(tile_of_queries(layer, segment, query, count));
        cost_ += tiles.back().cost;
      }
    }
    for (const Item& tile : tiles) add(tile);
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
  }

 private:
  bool too_long(int64_t cost) const { return num_threads_ > 1 && cost * kItemsPerThread * num_threads_ > cost_; }

  bool too_wide(const Item& item) const { return item.num_key_heads * item.num_queries * heads_ > item_rows_; }

  void add(const Item& tile) {
    const int64_t num_parts = too_wide(tile) ? tile.num_key_heads : 1;
    if (tile.stop_split > tile.first_split + 1 && too_long(tile.cost / num_parts)) return add_splits(tile);
    add_heads(tile);
  }

  void add_splits(Item tile) {
    const int64_t num_splits = tile.stop_split - tile.first_split;
    tile.partial = num_partial;
    num_partial += tile.num_queries * num_splits;
    cut.push_back(tile);
    Item part = tile;
    part.cost /= num_splits;
    for (int64_t split = tile.first_split; split < tile.stop_split; ++split, part.partial += tile.num_queries) {
      part.first_split = split;
      part.stop_split = split + 1;
      add_heads(part);
    }
  }

  // Together if they may: a token's keys are one piece of memory, and so are its values.
  void add_heads(Item item) {
    if (!too_wide(item) && !too_long(item.cost)) return items.push_back(item);
    const int64_t num_heads = item.num_key_heads;
    item.cost /= num_heads;
    item.num_key_heads = 1;
    for (; item.first_key_head < num_heads; ++item.first_key_head) items.push_back(item);
  }

  int64_t num_threads_, item_rows_, heads_;  // those of a key head
  int64_t cost_ = 0;
};

}  // namespace legato
