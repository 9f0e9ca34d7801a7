// Causal attention over keys and values where they lie, in the blocks of a paged cache.
//
// The context is cut into tiles of 64 tokens and splits of 256, both at absolute positions; a row (a query of one head)
// sums each split by itself and then adds up the splits in rising order. Whether one item of work does that for all
// splits or several items do, with how many other rows, and on which thread: the row's result is the same to the bit.

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "attention_rows.h"

namespace {

using namespace legato;

constexpr int64_t kSplitTokens = 256;
constexpr int64_t kItemRows = 96;  // whose sums stay in the cache while tiles of keys pass by
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

// Memory of a thread, which it keeps.
class Scratch {
 public:
  // At a multiple of 64 bytes, and valid until the next call.
  char* reserve(size_t bytes) {
    if (bytes > size_) {
      memory_.reset(static_cast<char*>(std::aligned_alloc(64, size_ = (bytes + 4095) / 4096 * 4096)));
      if (!memory_) std::abort();
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_;
  size_t size_ = 0;
};

template <typename T>
struct Buffers {
  std::vector<Row> rows;
  const T* tokens[kTileKeys];
  const T* nothing;  // a token of zeros
  int32_t* keys;
  int32_t* values;
  float* split_sums;
  float* sums;

  Buffers(const Layer<T>& layer, int64_t num_rows) : rows(num_rows) {
    static thread_local Scratch scratch;
    const int64_t key_words = (layer.words() + 15) / 16 * 16 * kTileKeys;
    const int64_t value_words = kTileKeys * layer.width(), row_words = num_rows * layer.sums_stride();
    const int64_t token_words = layer.width();
    auto* memory = reinterpret_cast<int32_t*>(
        scratch.reserve(sizeof(int32_t) * (key_words + value_words + 2 * row_words + token_words)));
    keys = memory;
    values = keys + key_words;
    split_sums = reinterpret_cast<float*>(values + value_words);
    sums = split_sums + row_words;
    std::fill_n(sums + row_words, token_words, 0.0f);
    nothing = reinterpret_cast<const T*>(sums + row_words);
  }
};

inline Sums& sums_at(float* memory, int64_t index, int64_t stride) {
  return *reinterpret_cast<Sums*>(memory + index * stride);
}

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

// Tokens [first, stop) of a tile that begins with token `tile`; the others become `nothing`.
template <typename T>
void locate(const Layer<T>& layer, const Segment& segment, int64_t kv_head, int64_t tile, int64_t first, int64_t stop,
            Buffers<T>& buffers) {
  const Plan& plan = layer.plan;
  std::fill_n(buffers.tokens, first, buffers.nothing);
  std::fill(buffers.tokens + stop, buffers.tokens + kTileKeys, buffers.nothing);
  int64_t column = (tile + first) / plan.block_size, slot = (tile + first) % plan.block_size;
  for (int64_t at = first; at < stop; ++column, slot = 0) {
    const int64_t block = layer.table[segment.first_column + column];
    const T* token = layer.cache + (block * plan.block_stride * plan.block_size + slot) * layer.token_stride() +
                     kv_head * plan.head_dim;
    const int64_t block_stop = std::min(stop, at + plan.block_size - slot);
    for (; at < block_stop; ++at, token += layer.token_stride()) buffers.tokens[at] = token;
  }
}

// Copies what any row sees of a tile.
template <typename T>
Tile pack(const Layer<T>& layer, const Segment& segment, int64_t kv_head, int64_t tile, Buffers<T>& buffers) {
  const int64_t first = std::max<int64_t>(0, buffers.rows.front().first - tile);
  const int64_t stop = std::min(kTileKeys, buffers.rows.back().stop - tile);
  locate(layer, segment, kv_head, tile, first, stop, buffers);
  pack_keys(reinterpret_cast<const int32_t* const*>(buffers.tokens), first, stop, layer.words(), buffers.keys);
  const int64_t to_values = layer.plan.block_size * layer.token_stride();
  for (int64_t at = first; at < stop; ++at) buffers.tokens[at] += to_values;
  const int64_t steps = (stop + Words<T>::kNumbers - 1) / Words<T>::kNumbers;
  pack_values(buffers.tokens, steps, layer.plan.head_dim, layer.width(), buffers.values);
  return {tile, layer.words(), layer.width(), steps, buffers.keys, buffers.values};
}

// The item's rows of one key head: query by query, head by head.
template <typename T>
void list_rows(const Layer<T>& layer, const Item& item, int64_t kv_head, std::vector<Row>& rows) {
  const int64_t heads = layer.heads_per_key_head();
  rows.resize(item.num_queries * heads);
  for (int64_t query = 0; query < item.num_queries; ++query) {
    const T* first = layer.queries + (item.segment->first_row + item.first_query + query) * layer.row_stride +
                     kv_head * heads * layer.plan.head_dim;
    const int64_t position = item.position(query);
    for (int64_t head = 0; head < heads; ++head) {
      const auto* words = reinterpret_cast<const int32_t*>(first + head * layer.plan.head_dim);
      rows[query * heads + head] = {words, layer.first_seen(position), position + 1, nullptr};
    }
  }
}

template <typename T>
void sum_split(const Layer<T>& layer, const Item& item, int64_t kv_head, int64_t split, Buffers<T>& buffers) {
  for (const Row& row : buffers.rows) start(*row.sums, layer.width());
  const int64_t begin = std::max(split * kSplitTokens, buffers.rows.front().first / kTileKeys * kTileKeys);
  const int64_t stop = std::min((split + 1) * kSplitTokens, buffers.rows.back().stop);
  for (int64_t first = begin; first < stop; first += kTileKeys) {
    const Tile tile = pack(layer, *item.segment, kv_head, first, buffers);
    attend_tile<T>(tile, buffers.rows.data(), static_cast<int64_t>(buffers.rows.size()), layer.exponents);
  }
}

template <typename T>
T* result_of(const Layer<T>& layer, const Item& item, int64_t kv_head, int64_t row) {
  const int64_t heads = layer.heads_per_key_head();
  const int64_t query = item.segment->first_row + item.first_query + row / heads;
  return layer.out + (query * layer.num_heads + kv_head * heads + row % heads) * layer.plan.head_dim;
}

// Where the partial sums of an item of one split lie: [queries, num_heads].
template <typename T>
Sums& partial_sums(const Layer<T>& layer, const Item& item, int64_t kv_head, int64_t row, float* partials) {
  const int64_t heads = layer.heads_per_key_head();
  const int64_t index = (item.partial + row / heads) * layer.num_heads + kv_head * heads + row % heads;
  return sums_at(partials, index, layer.sums_stride());
}

template <typename T>
void finish_rows(const Layer<T>& layer, const Item& item, int64_t kv_head, float* sums) {
  const int64_t num_rows = item.num_queries * layer.heads_per_key_head();
  for (int64_t row = 0; row < num_rows; ++row) {
    finish(sums_at(sums, row, layer.sums_stride()), layer.plan.head_dim, result_of(layer, item, kv_head, row));
  }
}

template <typename T>
void compute_whole(const Layer<T>& layer, const Item& item, int64_t kv_head, Buffers<T>& buffers) {
  const auto num_rows = static_cast<int64_t>(buffers.rows.size());
  const int64_t stride = layer.sums_stride();
  for (int64_t split = item.first_split; split < item.stop_split; ++split) {
    float* into = split == item.first_split ? buffers.sums : buffers.split_sums;
    for (int64_t row = 0; row < num_rows; ++row) buffers.rows[row].sums = &sums_at(into, row, stride);
    sum_split(layer, item, kv_head, split, buffers);
    if (split == item.first_split) continue;
    for (int64_t row = 0; row < num_rows; ++row) {
      merge(sums_at(buffers.sums, row, stride), *buffers.rows[row].sums, layer.width());
    }
  }
  finish_rows(layer, item, kv_head, buffers.sums);
}

template <typename T>
void compute_item(const Layer<T>& layer, const Item& item, int64_t kv_head, Buffers<T>& buffers, float* partials) {
  list_rows(layer, item, kv_head, buffers.rows);
  if (item.partial < 0) return compute_whole(layer, item, kv_head, buffers);
  for (size_t row = 0; row < buffers.rows.size(); ++row) {
    buffers.rows[row].sums = &partial_sums(layer, item, kv_head, static_cast<int64_t>(row), partials);
  }
  sum_split(layer, item, kv_head, item.first_split, buffers);
}

// Adds up the splits of one row.
template <typename T>
void join_splits(const Layer<T>& layer, Item item, int64_t kv_head, int64_t row, float* partials) {
  const int64_t num_splits = item.stop_split - item.first_split;
  Sums& sums = partial_sums(layer, item, kv_head, row, partials);
  for (int64_t split = 1; split < num_splits; ++split) {
    item.partial += item.num_queries;
    merge(sums, partial_sums(layer, item, kv_head, row, partials), layer.width());
  }
  finish(sums, layer.plan.head_dim, result_of(layer, item, kv_head, row));
}

template <typename T>
void attend(const Layer<T>& layer) {
  static thread_local Scratch scratch;
  const Work work = divide(layer, omp_get_max_threads());
  auto* partials = reinterpret_cast<float*>(
      scratch.reserve(sizeof(float) * work.num_partial * layer.num_heads * layer.sums_stride()));
  const int64_t heads = layer.heads_per_key_head(), kv_heads = layer.plan.num_kv_heads;
  const int64_t num_items = static_cast<int64_t>(work.items.size()) * kv_heads;
  const int64_t num_cut = static_cast<int64_t>(work.cut.size()) * kv_heads;
#pragma omp parallel if (num_items > 1)
  {
    Buffers<T> buffers(layer, std::max(kItemRows, heads));
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < num_items; ++i) {
      compute_item(layer, work.items[i / kv_heads], i % kv_heads, buffers, partials);
    }
    if (num_cut) {
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < num_cut; ++i) {
        const Item& item = work.cut[i / kv_heads];
        for (int64_t row = 0; row < item.num_queries * heads; ++row) {
          join_splits(layer, item, i % kv_heads, row, partials);
        }
      }
    }
  }
}

template <typename T>
void attend(const Plan* plan, const T* queries, int64_t row_stride, int64_t num_heads, const T* cache, int64_t group,
            float scale, float softcap, T* out) {
  constexpr float kLog2E = 1.44269504088896340736f;
  const bool capped = softcap > 0;
  const Exponents exponents{capped ? scale / softcap : 1.0f, (capped ? softcap : scale) * kLog2E, capped};
  const int32_t* table = plan->tables + group * plan->num_columns;
  attend(Layer<T>{*plan, table, cache, queries, row_stride, num_heads, exponents, out});
}

}  // namespace

extern "C" {

// `softcap` is 0 where there is none; `out [rows, num_heads, head_dim]`, contiguous. In bfloat16 head_dim is even.
void attention_bf16(const Plan* plan, const bf16* queries, int64_t row_stride, int64_t num_heads, const bf16* cache,
                    int64_t group, float scale, float softcap, bf16* out) {
  attend(plan, queries, row_stride, num_heads, cache, group, scale, softcap, out);
}

void attention_f32(const Plan* plan, const float* queries, int64_t row_stride, int64_t num_heads, const float* cache,
                   int64_t group, float scale, float softcap, float* out) {
  attend(plan, queries, row_stride, num_heads, cache, group, scale, softcap, out);
}

}  // extern "C"
