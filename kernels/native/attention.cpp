// Causal attention over keys and values where they lie, in the blocks of a paged cache.
//
// The context is cut into tiles of 64 tokens and splits of 256, both at absolute positions; a row (a query of one head)
// sums each split by itself and then adds up the splits in rising order. Whether one item of work does that for all
// splits or several items do, with how many other rows, and on which thread: the row's result is the same to the bit.

#include <omp.h>

#include "attention_buffers.h"
#include "calls.h"

namespace {

using namespace legato;

inline Sums& sums_at(float* memory, int64_t index, int64_t stride) {
  return *reinterpret_cast<Sums*>(memory + index * stride);
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

// The tile of the item that holds a token, or the first one that any of its rows sees.
template <typename T>
int64_t tile_from(const Buffers<T>& buffers, int64_t token) {
  return std::max(token, buffers.rows.front().first) / kTileKeys * kTileKeys;
}

// Looks up the tile after this one: of the same head or of the next one, which is probably computed next.
template <typename T>
void look_ahead(const Layer<T>& layer, const Item& item, int64_t kv_head, int64_t tile, Buffers<T>& buffers) {
  const int64_t stop = std::min(item.stop_split * kSplitTokens, buffers.rows.back().stop);
  int64_t next = tile + kTileKeys;
  if (next >= stop) {
    next = tile_from(buffers, item.first_split * kSplitTokens);
    kv_head = std::min(kv_head + 1, layer.plan.num_kv_heads - 1);
  }
  buffers.next = locate(layer, *item.segment, kv_head, next, buffers);
}

template <typename T>
void sum_split(const Layer<T>& layer, const Item& item, int64_t kv_head, int64_t split, Buffers<T>& buffers) {
  for (const Row& row : buffers.rows) start(*row.sums, layer.width());
  const int64_t stop = std::min((split + 1) * kSplitTokens, buffers.rows.back().stop);
  int64_t first = tile_from(buffers, split * kSplitTokens);
  Tokens<T> tokens = locate(layer, *item.segment, kv_head, first, buffers);
  for (; first < stop; first += kTileKeys) {
    look_ahead(layer, item, kv_head, first, buffers);
    const Tile tile = pack(layer, first, tokens, buffers);
    attend_tile<T>(tile, buffers.rows.data(), static_cast<int64_t>(buffers.rows.size()), layer.exponents);
    tokens = buffers.next;
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
  const int64_t heads_together = num_items >= kItemsPerThread * kv_heads * omp_get_max_threads() ? kv_heads : 1;
  const int64_t num_cut = static_cast<int64_t>(work.cut.size()) * kv_heads;
#pragma omp parallel if (num_items > 1)
  {
    Buffers<T> buffers(layer, std::max(kItemRows, heads));
#pragma omp for schedule(dynamic, heads_together)
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

void attention_bf16(const Plan* plan, const bf16* queries, int64_t row_stride, int64_t num_heads, const bf16* cache,
                    int64_t group, float scale, float softcap, bf16* out) {
  attend(plan, queries, row_stride, num_heads, cache, group, scale, softcap, out);
}

void attention_f32(const Plan* plan, const float* queries, int64_t row_stride, int64_t num_heads, const float* cache,
                   int64_t group, float scale, float softcap, float* out) {
  attend(plan, queries, row_stride, num_heads, cache, group, scale, softcap, out);
}

}  // extern "C"
