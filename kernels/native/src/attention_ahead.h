// Asking memory for the next tile while this one is computed.

#pragma once

#include "attention_tile.h"

namespace legato {

// Blocks lie anywhere, so that no processor foresees the next one. What is asked for goes into the second cache (the
// first one does not hold two tiles), a few lines at a time and evenly: more at once fill the queue in which the reads
// of this tile stand, too. The key heads of a token are one piece of memory, which comes faster than one head after the
// other.
class Ahead {
 public:
  // Of each token numbers [at, at + count) of the keys, and if they lie elsewhere, of the values, in `num_asks` parts.
  template <typename T>
  Ahead(const Tokens<T>& next, int64_t at, int64_t count, bool values_too, int64_t num_asks)
      : row_(reinterpret_cast<const char* const*>(next.rows)),
        first_byte_(at * sizeof(T)),
        num_asks_(num_asks),
        rows_left_(values_too ? 2 * kTileKeys : kTileKeys) {
    const int64_t num_lines = (count * sizeof(T) + 63) / 64, pieces_per_row = (num_lines + 3) / 4;
    byte_ = first_byte_;
    stop_byte_ = first_byte_ + num_lines * 64;
    piece_bytes_ = (num_lines + pieces_per_row - 1) / pieces_per_row * 64;
    num_pieces_ = rows_left_ * pieces_per_row;
  }

  void ask() {
    for (due_ += num_pieces_; due_ > 0 && rows_left_ > 0; due_ -= num_asks_) {
      const char* piece = *row_ + byte_;
      for (int64_t byte = 0; byte < piece_bytes_; byte += 64) _mm_prefetch(piece + byte, _MM_HINT_T1);
      if ((byte_ += piece_bytes_) < stop_byte_) continue;
      byte_ = first_byte_;
      ++row_;
      --rows_left_;
    }
  }

 private:
  const char* const* row_;
  int64_t first_byte_, stop_byte_, byte_, piece_bytes_;
  int64_t num_pieces_, num_asks_, rows_left_;
  int64_t due_ = 0;  // pieces times `num_asks_`
};

}  // namespace legato
