// What a thread needs while it computes an item: its rows, the tile at hand, and where the next one lies.

#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "attention_work.h"

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

// Where the keys and values of a tile's tokens lie; of those that no row sees: zeros.
template <typename T>
struct Tokens {
  const T* keys[kTileKeys];
  const T* values[kTileKeys];
};

template <typename T>
struct Buffers {
  std::vector<Row> rows;
  Tokens<T> next;  // what is prefetched
  const T* zeros;
  int32_t* keys;
  int32_t* values;
  float* split_sums;
  float* sums;

  Buffers(const Layer<T>& layer, int64_t num_rows) : rows(num_rows) {
    static thread_local Scratch scratch;
    const int64_t key_words = (layer.words() + 15) / 16 * 16 * kTileKeys, value_words = kTileKeys * layer.width();
    const int64_t sums_words = num_rows * layer.sums_stride(), num_words = key_words + value_words + 2 * sums_words;
    keys = reinterpret_cast<int32_t*>(scratch.reserve(sizeof(int32_t) * (num_words + layer.width())));
    values = keys + key_words;
    split_sums = reinterpret_cast<float*>(values + value_words);
    sums = split_sums + sums_words;
    std::fill_n(sums + sums_words, layer.width(), 0.0f);
    zeros = reinterpret_cast<const T*>(sums + sums_words);
  }

  // The tokens of a tile that any row sees.
  int64_t first_live(int64_t tile) const { return std::max<int64_t>(0, rows.front().first - tile); }
  int64_t stop_live(int64_t tile) const { return std::min(kTileKeys, rows.back().stop - tile); }
};

template <typename T>
Tokens<T> locate(const Layer<T>& layer, const Segment& segment, int64_t kv_head, int64_t tile,
                 const Buffers<T>& buffers) {
  const Plan& plan = layer.plan;
  const int64_t first = buffers.first_live(tile), stop = buffers.stop_live(tile);
  Tokens<T> tokens;
  for (const T** rows : {tokens.keys, tokens.values}) {
    std::fill_n(rows, first, buffers.zeros);
    std::fill(rows + stop, rows + kTileKeys, buffers.zeros);
  }
  int64_t column = (tile + first) / plan.block_size, slot = (tile + first) % plan.block_size;
  for (int64_t at = first; at < stop; ++column, slot = 0) {
    const int64_t block = layer.table[segment.first_column + column];
    const T* token = layer.cache + (block * plan.block_stride * plan.block_size + slot) * layer.token_stride() +
                     kv_head * plan.head_dim;
    const int64_t block_stop = std::min(stop, at + plan.block_size - slot);
    for (; at < block_stop; ++at, token += layer.token_stride()) {
      tokens.keys[at] = token;
      tokens.values[at] = token + plan.block_size * layer.token_stride();
    }
  }
  return tokens;
}

template <typename T>
Tile pack(const Layer<T>& layer, int64_t tile, const Tokens<T>& tokens, const Buffers<T>& buffers) {
  const auto words_of = [](const T* const* rows) { return reinterpret_cast<const int32_t* const*>(rows); };
  const int64_t first = buffers.first_live(tile), stop = buffers.stop_live(tile);
  const int64_t steps = (stop + Words<T>::kNumbers - 1) / Words<T>::kNumbers;
  pack_keys(words_of(tokens.keys), words_of(buffers.next.keys), first, stop, layer.words(), buffers.keys);
  pack_values(tokens.values, buffers.next.values, steps, layer.plan.head_dim, layer.width(), buffers.values);
  return {tile, layer.words(), layer.width(), steps, buffers.keys, buffers.values};
}

}  // namespace legato
