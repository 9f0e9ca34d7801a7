// Causal attention over keys and values where they lie, in the blocks of a paged cache.
//
// The context is cut into tiles of 64 tokens and splits of 256, both at absolute positions; a row (a query of one head)
// sums each split by itself and then adds up the splits in rising order. Whether one item of work does that for all
// splits or several items do, with how many other rows, and on which thread: the row's result is the same to the bit.

#include <omp.h>

#include "attention_buffers.h"
#include "attention_in_place.h"
#include "calls.h"

namespace {

using namespace legato;

constexpr int64_t kPartsToJoin = 4;  // of a cut item's rows, which threads share

inline Sums& sums_at(float* memory, int64_t index, int64_t stride) {
  return *reinterpret_cast<Sums*>(memory + index * stride);
}

// The item's rows: key head by key head, query by query, head by head.
template <typename T>
void list_rows(const Layer<T>& layer, const Item& item, Buffers<T>& buffers) {
  const int64_t heads = layer.heads_per_key_head(), width = layer.plan.head_dim;
  const int64_t own_width = buffers.query_width(layer);
  std::vector<Row>& rows = buffers.rows;
  rows.resize(item.num_key_heads * item.num_queries * heads);
  Row* row = rows.data();
  for (int64_t key_head = item.first_key_head; key_head < item.first_key_head + item.num_key_heads; ++key_head) {
    for (int64_t query = 0; query < item.num_queries; ++query) {
      const T* numbers = layer.queries + (item.first_row() + query) * layer.row_stride;
      const int64_t position = item.position(query);
      for (int64_t head = key_head * heads; head < (key_head + 1) * heads; ++head) {
        const T* numbers_of_head = numbers + head * width;
        const void* own = numbers_of_head;
        if constexpr (!Buffers<T>::kQueriesAsTheyAre) {
          auto* copy = buffers.queries + (row - rows.data()) * own_width;
          if constexpr (by_tiles<T>()) {
            std::fill(std::copy_n(numbers_of_head, width, copy), copy + own_width, T{});
          } else {
            widen(numbers_of_head, width, copy);
          }
          own = copy;
        }
        *row++ = {own, query * layer.num_heads + head, layer.first_seen(position), position + 1, nullptr};
      }
    }
  }
}

// Of one key head, whose rows these are.
template <typename T>
void attend_key_head(const Layer<T>& layer, int64_t key_head, int64_t tile, const Tokens<T>& tokens, const Row* rows,
                     int64_t num_rows, const Buffers<T>& buffers, Ahead& ahead) {
  const int64_t at = key_head * layer.plan.head_dim;
  const int64_t steps = (tokens.stop + Words<T>::kNumbers - 1) / Words<T>::kNumbers;
  if constexpr (by_tiles<T>()) {
    const auto ask = [&] { ahead.ask(); };
    const int64_t filled = (steps + kTileInputs / 2 - 1) / (kTileInputs / 2) * (kTileInputs / 2);
    pack_keys(tokens, at, layer.words(), buffers.keys, ask);
    pack_values(tokens, at, filled, layer.plan.value_dim, layer.width(), buffers.values, ask, first_token_of);
    const PackedTile packed{tile, layer.words(), layer.width(), filled, kKeyVectors, buffers.keys, buffers.values};
    return attend_by_tiles(packed, rows, num_rows, buffers.query_width(layer), layer.sums_stride(), layer.exponents,
                           ahead);
  }
  if constexpr (std::is_same_v<T, bf16>) {
    const TileInPlace in_place{tile, layer.words(), layer.width(), steps, at, tokens, ahead};
    if (is_in_place(layer, num_rows)) return attend_rest<T, kInPlaceRows>(in_place, rows, layer.exponents, num_rows);
  }
  pack_keys(tokens, at, layer.words(), buffers.keys, [] {});
  const auto token_of = [](int64_t step) { return step * Words<T>::kNumbers; };
  pack_values(tokens, at, steps, layer.plan.value_dim, layer.width(), buffers.values, [] {}, token_of);
  const PackedTile packed{tile, layer.words(), layer.width(), steps, kKeyVectors, buffers.keys, buffers.values};
  attend_tile<T>(packed, rows, num_rows, layer.exponents, ahead);
}

bool is_last(const Item& item, int64_t tile) { return tile + kTileKeys >= item.stop(item.stop_split - 1); }

// What follows on an item's tile: another one of it, or the first one of what is probably computed next.
template <typename T>
Tokens<T> look_ahead(const Layer<T>& layer, const Item& item, const Item& next, int64_t tile, const T* zeros) {
  if (is_last(item, tile)) return locate(layer, next, next.first_tile(next.first_split), zeros);
  return locate(layer, item, tile + kTileKeys, zeros);
}

template <typename T>
void sum_split(const Layer<T>& layer, const Item& item, const Item& next, int64_t split, const Buffers<T>& buffers) {
  for (const Row& row : buffers.rows) start(*row.sums, layer.width());
  const int64_t num_rows = item.num_queries * layer.heads_per_key_head();
  const int64_t num_asks = item.num_key_heads * asks_per_key_head(layer, num_rows);
  Tokens<T> tokens = locate(layer, item, item.first_tile(split), buffers.zeros);
  for (int64_t tile = item.first_tile(split); tile < item.stop(split); tile += kTileKeys) {
    const Tokens<T> later = look_ahead(layer, item, next, tile, buffers.zeros);
    const Item& asked = is_last(item, tile) ? next : item;
    const int64_t first_number = asked.first_key_head * layer.plan.head_dim;
    Ahead ahead(later, first_number, asked.num_key_heads * layer.plan.head_dim, layer.plan.value_offset != 0, num_asks);
    for (int64_t head = 0; head < item.num_key_heads; ++head) {
      const Row* rows = buffers.rows.data() + head * num_rows;
      attend_key_head(layer, item.first_key_head + head, tile, tokens, rows, num_rows, buffers, ahead);
    }
    tokens = later;
  }
}

template <typename T>
T* result_of(const Layer<T>& layer, const Item& item, int64_t place) {
  return layer.out + (item.first_row() * layer.num_heads + place) * layer.plan.value_dim;
}

// Where the partial sums of an item of one split lie: [queries, heads].
template <typename T>
Sums& partial_sums(const Layer<T>& layer, const Item& item, int64_t place, float* partials) {
  return sums_at(partials, item.partial * layer.num_heads + place, layer.sums_stride());
}

// The item's sums in the thread's memory: by tiles, each key head's fill these.
template <typename T>
void place_sums(const Layer<T>& layer, const Item& item, float* memory, Buffers<T>& buffers) {
  const int64_t rows = item.num_queries * layer.heads_per_key_head();
  const int64_t room = by_tiles<T>() ? rows_of_tiles(rows) : rows;
  for (int64_t head = 0; head < item.num_key_heads; ++head) {
    for (int64_t row = 0; row < rows; ++row) {
      buffers.rows[head * rows + row].sums = &sums_at(memory, head * room + row, layer.sums_stride());
    }
  }
}

template <typename T>
bool compute_whole(const Layer<T>& layer, const Item& item, const Item& next, Buffers<T>& buffers) {
  for (int64_t split = item.first_split; split < item.stop_split; ++split) {
    const bool is_first = split == item.first_split;
    place_sums(layer, item, is_first ? buffers.sums : buffers.split_sums, buffers);
    sum_split(layer, item, next, split, buffers);
    if (is_first) continue;
    merge_rows(buffers.rows.data(), static_cast<int64_t>(buffers.rows.size()), buffers.sums - buffers.split_sums,
               layer.width());
  }
  place_sums(layer, item, buffers.sums, buffers);
  bool are_numbers = true;
  for (const Row& row : buffers.rows) {
    const float sink = layer.sink_weight(row.place, *row.sums);
    are_numbers &= finish(*row.sums, sink, layer.plan.value_dim, result_of(layer, item, row.place));
  }
  return are_numbers;
}

// Returns whether all results are numbers, as far as it has any.
template <typename T>
bool compute_item(const Layer<T>& layer, const Item& item, const Item& next, Buffers<T>& buffers, float* partials) {
  list_rows(layer, item, buffers);
  const int64_t rows = item.num_queries * layer.heads_per_key_head();
  const Shapes<by_tiles<T>()> shapes(std::min(kTileRows, rows));
  if (item.partial < 0) return compute_whole(layer, item, next, buffers);
  const auto partial = [&](const Row& row) -> Sums& { return partial_sums(layer, item, row.place, partials); };
  if constexpr (by_tiles<T>()) {
    place_sums(layer, item, buffers.sums, buffers);
    sum_split(layer, item, next, item.first_split, buffers);
    for (const Row& row : buffers.rows) {
      const auto* sums = reinterpret_cast<const float*>(row.sums);
      std::copy_n(sums, layer.sums_stride(), reinterpret_cast<float*>(&partial(row)));
    }
  } else {
    for (Row& row : buffers.rows) row.sums = &partial(row);
    sum_split(layer, item, next, item.first_split, buffers);
  }
  return true;
}

// Adds up the splits of one row. Returns whether all results are numbers.
template <typename T>
bool join_splits(const Layer<T>& layer, Item item, int64_t place, float* partials) {
  const int64_t num_splits = item.stop_split - item.first_split;
  Sums& sums = partial_sums(layer, item, place, partials);
  for (int64_t split = 1; split < num_splits; ++split) {
    item.partial += item.num_queries;
    merge(sums, partial_sums(layer, item, place, partials), layer.width());
  }
  return finish(sums, layer.sink_weight(place, sums), layer.plan.value_dim, result_of(layer, item, place));
}

template <typename T>
bool are_numbers(const T* values, int64_t count) {
  for (int64_t at = 0; at < count; at += 16) {
    const __m512 some = load(values + at, first_lanes(count - at));
    if (_mm512_cmp_ps_mask(some, some, _CMP_UNORD_Q)) return false;
  }
  return true;
}

// Computes again, by itself, each query whose results are not all numbers. The weight of a token that a row does not
// see is 0, and 0 times infinity is NaN: so what is not finite in a token reaches the rows before it that are computed
// with one that sees it. Alone a query's rows meet no other tokens than those that they see. After the first one that
// brings no numbers all the same, it is tokens before them that have broken the rows that follow; but those beyond a
// window do not see these any more. A query that holds no numbers itself brings none.
template <typename T>
void mend_earlier_rows(const Layer<T>& layer) {
  const Plan& plan = layer.plan;
  const int64_t width = layer.num_heads * plan.value_dim;
  Buffers<T> buffers(layer, std::max(kItemRows, layer.heads_per_key_head()));
  const auto mend = [&](Item item) {
    bool is_mended = true;
    item.num_key_heads = 1;
    for (; item.first_key_head < plan.num_kv_heads; ++item.first_key_head) {
      is_mended &= compute_item(layer, item, item, buffers, static_cast<float*>(nullptr));
    }
    return is_mended;
  };
  for (int64_t s = 0; s < plan.num_segments; ++s) {
    const Segment& segment = plan.segments[s];
    for (int64_t query = 0; query < segment.num_queries && segment.num_queries > 1; ++query) {
      const int64_t row = segment.first_row + query;
      if (are_numbers(layer.out + row * width, width)) continue;
      if (!are_numbers(layer.queries + row * layer.row_stride, layer.num_heads * plan.head_dim)) continue;
      if (!mend(tile_of_queries(layer, segment, query, 1)) && plan.window >= segment.context_len) break;
    }
  }
}

// Where tiles multiply, packing keys and values for an item takes as long as two dozen of its rows, whose sums come from
// the second cache anyhow. So an item has more rows, as long as all threads have enough items.
template <typename T>
int64_t rows_of_items(const Layer<T>& layer, int64_t num_threads) {
  int64_t all = 0, rows = kItemRows;
  for (int64_t i = 0; i < layer.plan.num_segments; ++i) all += layer.plan.segments[i].num_queries * layer.num_heads;
  if (!by_tiles<T>()) return rows;
  while (rows < 4 * kItemRows && all >= 2 * rows * 2 * kItemsPerThread * num_threads) rows *= 2;
  return rows;
}

template <typename T>
void attend(const Layer<T>& layer) {
  static thread_local Scratch scratch;
  const int64_t num_threads = omp_get_max_threads(), item_rows = rows_of_items(layer, num_threads);
  const Work work(layer, num_threads, item_rows);
  auto* partials = reinterpret_cast<float*>(
      scratch.reserve(sizeof(float) * work.num_partial * layer.num_heads * layer.sums_stride()));
  const auto num_items = static_cast<int64_t>(work.items.size()), num_cut = static_cast<int64_t>(work.cut.size());
  bool are_all_numbers = true;
#pragma omp parallel if (num_items > 1) reduction(&& : are_all_numbers)
  {
    Buffers<T> buffers(layer, std::max(item_rows, layer.heads_per_key_head()));
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < num_items; ++i) {
      const Item& next = work.items[std::min(i + omp_get_num_threads(), num_items - 1)];
      are_all_numbers &= compute_item(layer, work.items[i], next, buffers, partials);
    }
    if (num_cut) {
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < num_cut * kPartsToJoin; ++i) {
        const Item& item = work.cut[i / kPartsToJoin];
        const int64_t num_places = item.num_queries * layer.num_heads;
        for (int64_t place = i % kPartsToJoin; place < num_places; place += kPartsToJoin) {
          are_all_numbers &= join_splits(layer, item, place, partials);
        }
      }
    }
  }
  if (!are_all_numbers) mend_earlier_rows(layer);
}

template <typename T>
void attend(const Plan* plan, const T* queries, int64_t row_stride, int64_t num_heads, const T* cache, int64_t group,
            float scale, float softcap, const float* sinks, T* out) {
  const bool capped = softcap > 0;
  const Exponents exponents{capped ? scale / softcap : 1.0f, (capped ? softcap : scale) * kLog2E, capped};
  const int32_t* table = plan->tables + group * plan->num_columns;
  attend(Layer<T>{*plan, table, cache, queries, row_stride, num_heads, exponents, sinks, out});
}

}  // namespace

extern "C" {

void attention_bf16(const Plan* plan, const bf16* queries, int64_t row_stride, int64_t num_heads, const bf16* cache,
                    int64_t group, float scale, float softcap, const float* sinks, bf16* out) {
  attend(plan, queries, row_stride, num_heads, cache, group, scale, softcap, sinks, out);
}

void attention_f32(const Plan* plan, const float* queries, int64_t row_stride, int64_t num_heads, const float* cache,
                   int64_t group, float scale, float softcap, const float* sinks, float* out) {
  attend(plan, queries, row_stride, num_heads, cache, group, scale, softcap, sinks, out);
}

}  // extern "C"
