// Consecutive layers of a transformer in one call: the projections, attention and what lies between them, one after the
// other as separate calls would do it, and so with the same bits.
//
// A step of few tokens spends more time between such calls than in some of them; and one of many asks for new memory
// after each, which the system has to fill with zeros first. Here all layers share one piece of it.

#include <algorithm>
#include <vector>

#include "calls.h"
#include "elementwise.h"
#include "team.h"
#include "tiles.h"

using legato::bf16;
using legato::Projection;

namespace {

// Norms that a family does not have are null.
struct Layer {
  const void *attention_norm, *qk_norm, *attention_output_norm, *mlp_norm, *mlp_output_norm;
  Projection qkv, output, gate_up, down;
  const float* sinks;              // [num_heads]; null: there are none
  const legato::Experts* experts;  // null: the MLP is `gate_up` and `down`
  int64_t rotation, attention;  // which of the step's
};

struct Shape {
  int64_t num_heads, num_kv_heads, head_dim;
  int64_t joint_qk_norm;  // not 0: the norm of queries is over all heads, and so is that of keys
  int64_t layers_per_group;
  int64_t layer_numbers;  // of the cache from the keys of one layer to those of the next; the values lie half way
  float eps, scale, softcap;
  legato::Activation activation;
};

struct Rotary {
  const void *cos, *signed_sin;  // [T, D]
};

struct Step {
  int64_t rows;
  const Rotary* rotations;
  const legato::Plan* const* attention_plans;
  const int64_t* slots;  // [layer groups, T]
  void* cache;
  void *x, *normed;  // [T, E]: the residual stream, and its norm by the first layer's weight or the following one's
  void* scratch;
  const legato::Adapters* adapters;  // null: no row has one
};

void project(const Projection& projection, const bf16* x, int64_t rows, const bf16* residual, bf16* out,
             const legato::Stretches* soon) {
  const auto* bias = static_cast<const bf16*>(projection.bias);
  if (soon && !projection.bits) return legato::linear({&projection, x, rows, residual, out}, *soon, bf16{});
  if (projection.bits) {
    return quantised_linear(x, rows, projection.inputs, static_cast<const uint8_t*>(projection.weight),
                            projection.outputs, projection.group, projection.bits, projection.lowest,
                            projection.wide_factors, projection.has_minimums, projection.x_bytes, bias, residual, out);
  }
  linear_bf16(x, rows, projection.inputs, static_cast<const bf16*>(projection.weight), projection.outputs, bias,
              residual, out);
}

void project(const Projection& projection, const float* x, int64_t rows, const float* residual, float* out,
             const legato::Stretches* soon) {
  if (soon) return legato::linear({&projection, x, rows, residual, out}, *soon, float{});
  linear_f32(x, rows, projection.inputs, static_cast<const float*>(projection.weight), projection.outputs,
              static_cast<const float*>(projection.bias), residual, out);
}

void mix(const legato::Experts* experts, const bf16* x, int64_t rows, bf16* residual) {
  experts_bf16(experts, x, rows, residual, residual);
}

void mix(const legato::Experts* experts, const float* x, int64_t rows, float* residual) {
  experts_f32(experts, x, rows, residual, residual);
}

void attend(const legato::Plan* plan, const bf16* q, const bf16* cache, int64_t group, const Shape& shape,
            const float* sinks, bf16* out) {
  attention_bf16(plan, q, shape.num_heads * shape.head_dim, shape.num_heads, cache, group, shape.scale, shape.softcap,
                 sinks, out);
}

void attend(const legato::Plan* plan, const float* q, const float* cache, int64_t group, const Shape& shape,
            const float* sinks, float* out) {
  attention_f32(plan, q, shape.num_heads * shape.head_dim, shape.num_heads, cache, group, shape.scale, shape.softcap,
                sinks, out);
}

// What a step needs between a layer's projections, in numbers per row: for all layers the same places, since one thread
// may have begun the next layer while another one finishes this one.
struct Widths {
  int64_t projected = 0, rotated = 0, attended = 0, activated = 0, normed = 0;
  Widths(const Shape& shape, const Layer* layers, int64_t num_layers) {
    rotated = (shape.num_heads + shape.num_kv_heads) * shape.head_dim;
    attended = shape.num_heads * shape.head_dim;
    for (const Layer* layer = layers; layer < layers + num_layers; ++layer) {
      projected = std::max({projected, layer->qkv.outputs, layer->gate_up.outputs});
      activated = std::max(activated, layer->down.inputs);
      normed = std::max({normed, rotated, layer->output.outputs});
    }
  }
  int64_t sum() const { return projected + rotated + attended + activated + normed; }
};

template <typename X>
struct Scratch {
  X *projected, *rotated, *attended, *activated, *normed;
  Scratch(const Widths& widths, int64_t rows, void* memory)
      : projected(static_cast<X*>(memory)),
        rotated(projected + rows * widths.projected),
        attended(rotated + rows * widths.rotated),
        activated(attended + rows * widths.attended),
        normed(activated + rows * widths.activated) {}
};

// Rows of a step; `at` is the first row of scratch memory for what is only theirs.
struct Part {
  int64_t first, rows, at;
};

// One step through one layer; `X` is the type of activations, `W` that of norms' weights.
template <typename X, typename W>
class Pass {
 public:
  Pass(const Shape& shape, const Widths& widths, const Step& step, const Layer& layer, int64_t index)
      : shape_(shape),
        widths_(widths),
        step_(step),
        layer_(layer),
        index_(index),
        group_(index / shape.layers_per_group),
        keys_(static_cast<X*>(step.cache) + index % shape.layers_per_group * shape.layer_numbers),
        scratch_(widths, step.rows, step.scratch) {}

  // Up to the keys and values in the cache.
  void begin(const Part& part) const {
    X* projected = scratch_.projected + part.at * widths_.projected;
    project(layer_.qkv, row(step_.normed, part), part.rows, nullptr, projected, soon(legato::kQkv));
    adapt(part, legato::kQkv, row(step_.normed, part), projected, layer_.qkv.outputs);
    rotate_and_store(part, projected);
  }

  // Where rows meet; they do in experts, too.
  void attend_all() const {
    attend(step_.attention_plans[layer_.attention], scratch_.rotated, keys_, group_, shape_, layer_.sinks,
           scratch_.attended);
  }

  void finish_attention(const Part& part) const {
    add(part, layer_.output, legato::kOutput, scratch_.attended + part.first * widths_.attended,
        layer_.attention_output_norm, static_cast<const W*>(layer_.mlp_norm));
  }

  // An expert's weights are read once for all rows.
  void mix_all() const {
    mix(layer_.experts, static_cast<const X*>(step_.normed), step_.rows, static_cast<X*>(step_.x));
  }

  // What experts leave of the layer.
  void finish_mixed(const Part& part, const W* following) const {
    const int64_t width = layer_.output.outputs;
    legato::rms_norm(row(step_.x, part), part.rows, width, 1, width, following, shape_.eps, row(step_.normed, part));
  }

  // What attention leaves of a layer without experts.
  void finish(const Part& part, const W* following) const {
    X* projected = scratch_.projected + part.at * widths_.projected;
    X* activated = scratch_.activated + part.at * widths_.activated;
    finish_attention(part);
    const X* normed = row(step_.normed, part);
    const int64_t all[] = {0, part.rows};
    if (step_.adapters || !legato::linear_gated({&layer_.gate_up, all, 1}, shape_.activation, normed, activated)) {
      project(layer_.gate_up, normed, part.rows, nullptr, projected, soon(legato::kGateUp));
      adapt(part, legato::kGateUp, normed, projected, layer_.gate_up.outputs);
      activate(projected, part.rows, activated);
    }
    add(part, layer_.down, legato::kDown, activated, layer_.mlp_output_norm, following);
  }

 private:
  // Of the residual stream or its norm.
  X* row(void* rows, const Part& part) const { return static_cast<X*>(rows) + part.first * layer_.output.outputs; }

  const legato::Stretches* soon(legato::Place place) const {
    return step_.adapters ? &legato::adapters_soon(*step_.adapters, index_, place) : nullptr;
  }

  // What the rows' adapters, if there are any, add to a projection of `x`.
  void adapt(const Part& part, legato::Place place, const X* x, X* y, int64_t outputs) const {
    if (step_.adapters) legato::add_adapters(*step_.adapters, index_, place, part.first, part.rows, x, y, outputs);
  }

  void rotate_and_store(const Part& part, const X* qkv) const {
    const int64_t rotated_heads = shape_.num_heads + shape_.num_kv_heads, stride = layer_.qkv.outputs;
    const int64_t heads_width = shape_.num_heads * shape_.head_dim, kv_width = shape_.num_kv_heads * shape_.head_dim;
    const X *qk = qkv, *v = qk + rotated_heads * shape_.head_dim;
    int64_t qk_stride = stride;
    if (layer_.qk_norm) {
      X* normed = scratch_.normed + part.at * widths_.normed;
      const auto* weight = static_cast<const W*>(layer_.qk_norm);
      if (shape_.joint_qk_norm) {
        const int64_t width = heads_width + kv_width;
        legato::share_evenly(part.rows, part.rows * width >= legato::kWorthThreads, [&](int64_t row) {
          const X* own = qk + row * stride;
          X* out = normed + row * width;
          legato::rms_norm_row(own, weight, heads_width, shape_.eps, out);
          legato::rms_norm_row(own + heads_width, weight + heads_width, kv_width, shape_.eps, out + heads_width);
        });
      } else {
        legato::rms_norm(qk, part.rows, stride, rotated_heads, shape_.head_dim, weight, shape_.eps, normed);
      }
      qk = normed;
      qk_stride = rotated_heads * shape_.head_dim;
    }
    const Rotary& rotary = step_.rotations[layer_.rotation];
    const int64_t turned = part.first * shape_.head_dim;
    X *q = scratch_.rotated, *k = q + step_.rows * heads_width;
    legato::rotate_and_store<X>(
        {qk, v, static_cast<const X*>(rotary.cos) + turned, static_cast<const X*>(rotary.signed_sin) + turned,
         qk_stride, stride, shape_.num_heads, shape_.num_kv_heads, shape_.head_dim, kv_width,
         step_.slots + group_ * step_.rows + part.first, q + part.first * heads_width, k + part.first * kv_width, keys_,
         keys_ + shape_.layer_numbers / 2, kv_width},
        part.rows);
  }

  void activate(const X* gate_up, int64_t rows, X* out) const {
    legato::gated_activation(shape_.activation, gate_up, rows, layer_.down.inputs, out);
  }

  // To the residual stream the projection of `y`, which has its own norm in some families; then the stream's norm, or,
  // where nothing is normalised there, what it is.
  void add(const Part& part, const Projection& projection, legato::Place place, const X* y, const void* norm,
           const W* following) const {
    const int64_t width = projection.outputs;
    X *x = row(step_.x, part), *normed = row(step_.normed, part);
    if (!norm) {
      project(projection, y, part.rows, x, x, soon(place));
      adapt(part, place, y, x, width);
      return legato::rms_norm(x, part.rows, width, 1, width, following, shape_.eps, normed);
    }
    X* own = scratch_.normed + part.at * widths_.normed;
    project(projection, y, part.rows, nullptr, own, soon(place));
    adapt(part, place, y, own, width);
    legato::rms_norm(own, part.rows, width, 1, width, static_cast<const W*>(norm), shape_.eps, own);
    if (!following) {
      return legato::share_evenly(part.rows, part.rows * width >= legato::kWorthThreads, [&](int64_t row) {
        const int64_t at = row * width;
        legato::add_row(x + at, own + at, width, x + at);
        std::copy_n(x + at, width, normed + at);
      });
    }
    legato::add_rms_norm(x, own, part.rows, width, following, shape_.eps, normed, x);
  }

  const Shape& shape_;
  const Widths& widths_;
  const Step& step_;
  const Layer& layer_;
  int64_t index_, group_;
  X* keys_;
  Scratch<X> scratch_;
};

// Between two attentions no row needs another one. So with many rows each thread takes some of them all the way,
// through all projections, and they wait for each other twice in a layer, not nine times: where others need the cores
// as well, each wait costs what a thread was kept from its core. Of few rows, the threads share each projection.
class Parts {
 public:
  // `number_bytes`: of an activation; `has_adapters`: whose weights every part would read, too.
  Parts(int64_t rows, int64_t number_bytes, bool has_adapters, bool by_tiles) : rows_(rows) {
    const int64_t threads = legato::team_size(), largest = kRowsPerThread * threads;
    const int64_t fewest = has_adapters ? 2 * largest : fewest_rows(number_bytes) * threads;
    if (threads == 1 || rows < fewest * threads) return;  // nobody to wait for, or too few
    for (int64_t first = 0; first < rows;) {
      const int64_t fair = (rows - first + threads - 1) / threads;
      const int64_t size = by_tiles ? of_tiles(fair) : falling(fair, largest);
      for (int64_t thread = 0; thread < threads && first < rows; ++thread, first += parts_.back().rows) {
        parts_.push_back({first, std::min(size, rows - first), 0});
      }
    }
    // A thread's own places, where those of the largest part for each thread are no more than there are.
    own_ = static_cast<int64_t>(parts_.size()) > threads ? parts_.front().rows : 0;
  }

  template <class Body>
  void each(const Body& body) const {
    if (parts_.empty()) return body(Part{0, rows_, 0});
    legato::share(static_cast<int64_t>(parts_.size()), 1, [&](int64_t index) {
      Part part = parts_[index];
      part.at = own_ ? omp_get_thread_num() * own_ : part.first;
      body(part);
    });
  }

 private:
  // Every part reads all weights of a layer, which may come from memory. Asked of all threads together, it gives no
  // more of them in a second than one thread alone would ask for with so many rows.
  static constexpr int64_t kRowsPerThread = 48;
  static constexpr int64_t kMultiple = 12;  // rows of a projection's tile, or of two
  static constexpr int64_t kRowsByTiles = 256;

  // Smaller ones come last, and as many of each size as there are threads, so that all end together. What is left
  // behind half of a share is no more than that: a thread's own places are as many as the first part has rows.
  static int64_t falling(int64_t fair, int64_t largest) {
    const int64_t half = (fair - fair / 2 + kMultiple - 1) / kMultiple * kMultiple;
    return fair - half <= kMultiple ? fair : std::min(half, largest);
  }

  // Tiles multiply so fast that memory has no weights in time for small parts: as few as leave a part's rows in a
  // core's own cache, where the next product finds them.
  static int64_t of_tiles(int64_t fair) {
    const int64_t passes = (fair + kRowsByTiles - 1) / kRowsByTiles;
    return ((fair + passes - 1) / passes + legato::kTileRows - 1) / legato::kTileRows * legato::kTileRows;
  }

  // Of a thread's share, for each thread. With registers of AVX2 a row takes 2.3 times as long, so that memory has the
  // weights in time for far fewer: six rows of bfloat16 ask for 16 GB a second.
  static constexpr int64_t fewest_rows(int64_t number_bytes) {
    return legato::kRegisters == 32 ? 2 * kRowsPerThread : 3 * number_bytes;
  }

  int64_t rows_, own_ = 0;  // rows of scratch memory that a thread has for all of its parts; 0: each part has its own
  std::vector<Part> parts_;
};

template <typename X, typename W>
void run(const Shape& shape, const Step& step, const Layer* layers, int64_t first, int64_t stop) {
  if (first == stop) return;
  const Widths widths(shape, layers, stop);
  const bool by_tiles = legato::kTileProducts && std::is_same_v<X, bf16> && !layers[first].qkv.bits;
  const Parts parts(step.rows, sizeof(X), step.adapters, by_tiles);
  const auto pass = [&](int64_t index) { return Pass<X, W>(shape, widths, step, layers[index], index); };
  parts.each([&](const Part& part) { pass(first).begin(part); });
  for (int64_t index = first; index < stop; ++index) {
    const auto* following = static_cast<const W*>(layers[index + 1].attention_norm);
    const bool has_experts = layers[index].experts;
    pass(index).attend_all();
    if (has_experts) {
      parts.each([&](const Part& part) { pass(index).finish_attention(part); });
      pass(index).mix_all();
    }
    parts.each([&](const Part& part) {
      has_experts ? pass(index).finish_mixed(part, following) : pass(index).finish(part, following);
      if (index + 1 < stop) pass(index + 1).begin(part);
    });
  }
}

}  // namespace

extern "C" {

// Numbers of scratch memory that layers take for each row of a step.
int64_t layers_scratch(const Shape* shape, const Layer* layers, int64_t num_layers) {
  return Widths(*shape, layers, num_layers).sum();
}

// Layers [first, stop) of `layers`, which has one more: what follows the last has a norm, too.
void layers_run_bf16_by_bf16(const Shape* shape, const Step* step, const Layer* layers, int64_t first, int64_t stop) {
  run<bf16, bf16>(*shape, *step, layers, first, stop);
}

void layers_run_bf16_by_f32(const Shape* shape, const Step* step, const Layer* layers, int64_t first, int64_t stop) {
  run<bf16, float>(*shape, *step, layers, first, stop);
}

void layers_run_f32_by_f32(const Shape* shape, const Step* step, const Layer* layers, int64_t first, int64_t stop) {
  run<float, float>(*shape, *step, layers, first, stop);
}

}  // extern "C"
