// What a thread needs while it computes an item: its rows and the tile at hand.

#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "attention_by_tiles.h"

namespace legato {

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
  static constexpr bool kQueriesAsTheyAre = std::is_same_v<T, typename Words<T>::Number> && !by_tiles<T>();

  // Numbers of a query in `queries`: zeros fill tiles up.
  static int64_t query_width(const Layer<T>& layer) {
    const int64_t multiple = by_tiles<T>() ? kTileInputs : 1;
    return (layer.plan.head_dim + multiple - 1) / multiple * multiple;
  }

  std::vector<Row> rows;
  const T* zeros;  // of a token
  typename Words<T>::Number* queries;  // [rows, query_width], where they are not multiplied as they are and lie
  int32_t* keys;
  int32_t* values;
  float* split_sums;
  float* sums;

  Buffers(const Layer<T>& layer, int64_t num_rows) : rows(num_rows) {
    static thread_local Scratch scratch;
    const int64_t key_words = (layer.words() + 15) / 16 * 16 * kTileKeys, value_words = kTileKeys * layer.width();
    const int64_t sums_words = (by_tiles<T>() ? 2 * num_rows : num_rows) * layer.sums_stride();  // see `rows_of_tiles`
    const int64_t num_words = key_words + value_words + 2 * sums_words;
    // A tile of the last rows may have some more.
    const int64_t query_rows = kQueriesAsTheyAre ? 0 : num_rows + (by_tiles<T>() ? kTileRows : 0);
    const int64_t zero_words = (layer.token_stride() + 15) / 16 * 16;
    const int64_t all_words = num_words + zero_words + query_rows * query_width(layer);
    keys = reinterpret_cast<int32_t*>(scratch.reserve(sizeof(int32_t) * all_words));
    values = keys + key_words;
    split_sums = reinterpret_cast<float*>(values + value_words);
    sums = split_sums + sums_words;
    std::fill_n(sums + sums_words, zero_words, 0.0f);
    zeros = reinterpret_cast<const T*>(sums + sums_words);
    queries = reinterpret_cast<typename Words<T>::Number*>(sums + sums_words + zero_words);
  }
};

template <typename T>
Tokens<T> locate(const Layer<T>& layer, const Item& item, int64_t tile, const T* zeros) {
  const Plan& plan = layer.plan;
  Tokens<T> tokens;
  tokens.first = std::max<int64_t>(0, item.first_token - tile);
  tokens.stop = std::min(kTileKeys, item.stop_token - tile);
  for (const T** rows : {tokens.rows, tokens.rows + kTileKeys}) {
    std::fill_n(rows, tokens.first, zeros);
    std::fill(rows + tokens.stop, rows + kTileKeys, zeros);
  }
  int64_t column = (tile + tokens.first) / plan.block_size, slot = (tile + tokens.first) % plan.block_size;
  for (int64_t at = tokens.first; at < tokens.stop; ++column, slot = 0) {
    const int64_t block = layer.table[item.segment->first_column + column];
    const T* token = layer.cache + (block * plan.block_stride * plan.block_size + slot) * layer.token_stride();
    const int64_t block_stop = std::min(tokens.stop, at + plan.block_size - slot);
    for (; at < block_stop; ++at, token += layer.token_stride()) {
      tokens.rows[at] = token;
      tokens.rows[kTileKeys + at] = token + plan.value_offset;
    }
  }
  return tokens;
}

}  // namespace legato
