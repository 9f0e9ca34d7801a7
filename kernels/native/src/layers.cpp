// Consecutive layers of a transformer in one call: the projections, attention and what lies between them, one after the
// other as separate calls would do it, and so with the same bits.
//
// A step of few tokens spends more time between such calls than in some of them; and one of many asks for new memory
// after each, which the system has to fill with zeros first. Here all layers share one piece of it.

#include <algorithm>

#include "calls.h"
#include "elementwise.h"

using legato::bf16;

namespace {

struct Projection {
  const void *weight, *bias;  // packed; null where there is none
  int64_t inputs, outputs;
  int64_t bits, group, lowest;  // of a quantised weight; no bits: it is none
  bool wide_factors, has_minimums;
  int64_t x_bytes;
};

// Norms that a family does not have are null.
struct Layer {
  const void *attention_norm, *qk_norm, *attention_output_norm, *mlp_norm, *mlp_output_norm;
  Projection qkv, output, gate_up, down;
  int64_t rotation, attention;  // which of the step's
};

struct Shape {
  int64_t num_heads, num_kv_heads, head_dim;
  int64_t layers_per_group;
  int64_t layer_numbers;  // of the cache from the keys of one layer to those of the next; the values lie half way
  float eps, scale, softcap;
  bool gelu_tanh;
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
};

void project(const Projection& projection, const bf16* x, int64_t rows, const bf16* residual, bf16* out) {
  const auto* bias = static_cast<const bf16*>(projection.bias);
  if (projection.bits) {
    return quantised_linear(x, rows, projection.inputs, static_cast<const uint8_t*>(projection.weight),
                            projection.outputs, projection.group, projection.bits, projection.lowest,
                            projection.wide_factors, projection.has_minimums, projection.x_bytes, bias, residual, out);
  }
  linear_bf16(x, rows, projection.inputs, static_cast<const bf16*>(projection.weight), projection.outputs, bias,
              residual, out);
}

void project(const Projection& projection, const float* x, int64_t rows, const float* residual, float* out) {
  linear_f32(x, rows, projection.inputs, static_cast<const float*>(projection.weight), projection.outputs,
              static_cast<const float*>(projection.bias), residual, out);
}

void attend(const legato::Plan* plan, const bf16* q, const bf16* cache, int64_t group, const Shape& shape, bf16* out) {
  attention_bf16(plan, q, shape.num_heads * shape.head_dim, shape.num_heads, cache, group, shape.scale, shape.softcap,
                 out);
}

void attend(const legato::Plan* plan, const float* q, const float* cache, int64_t group, const Shape& shape, float* out) {
  attention_f32(plan, q, shape.num_heads * shape.head_dim, shape.num_heads, cache, group, shape.scale, shape.softcap,
                out);
}

// What a step needs between a layer's projections, in numbers per row.
struct Widths {
  int64_t projected, rotated, attended, activated, normed;
  Widths(const Shape& shape, const Layer& layer)
      : projected(std::max(layer.qkv.outputs, layer.gate_up.outputs)),
        rotated((shape.num_heads + shape.num_kv_heads) * shape.head_dim),
        attended(shape.num_heads * shape.head_dim),
        activated(layer.down.inputs),
        normed(std::max(rotated, layer.output.outputs)) {}
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

// One step through one layer; `X` is the type of activations, `W` that of norms' weights.
template <typename X, typename W>
class Pass {
 public:
  Pass(const Shape& shape, const Step& step, const Layer& layer, int64_t index)
      : shape_(shape),
        step_(step),
        layer_(layer),
        group_(index / shape.layers_per_group),
        keys_(static_cast<X*>(step.cache) + index % shape.layers_per_group * shape.layer_numbers),
        x_(static_cast<X*>(step.x)),
        normed_(static_cast<X*>(step.normed)),
        scratch_(Widths(shape, layer), step.rows, step.scratch) {}

  void run(const W* following) const {
    project(layer_.qkv, normed_, step_.rows, nullptr, scratch_.projected);
    rotate_and_store();
    attend(step_.attention_plans[layer_.attention], scratch_.rotated, keys_, group_, shape_, scratch_.attended);
    add(layer_.output, scratch_.attended, layer_.attention_output_norm, static_cast<const W*>(layer_.mlp_norm));
    project(layer_.gate_up, normed_, step_.rows, nullptr, scratch_.projected);
    activate();
    add(layer_.down, scratch_.activated, layer_.mlp_output_norm, following);
  }

 private:
  void rotate_and_store() const {
    const int64_t rotated_heads = shape_.num_heads + shape_.num_kv_heads, stride = layer_.qkv.outputs;
    const X *qk = scratch_.projected, *v = qk + rotated_heads * shape_.head_dim;
    int64_t qk_stride = stride;
    if (layer_.qk_norm) {
      legato::rms_norm(qk, step_.rows, stride, rotated_heads, shape_.head_dim, static_cast<const W*>(layer_.qk_norm),
                       shape_.eps, scratch_.normed);
      qk = scratch_.normed;
      qk_stride = rotated_heads * shape_.head_dim;
    }
    const Rotary& rotary = step_.rotations[layer_.rotation];
    X* q = scratch_.rotated;
    legato::rotate_and_store<X>(
        {qk, v, static_cast<const X*>(rotary.cos), static_cast<const X*>(rotary.signed_sin), qk_stride, stride,
         shape_.num_heads, shape_.num_kv_heads, shape_.head_dim, step_.slots + group_ * step_.rows, q,
         q + step_.rows * shape_.num_heads * shape_.head_dim, keys_, keys_ + shape_.layer_numbers / 2},
        step_.rows);
  }

  void activate() const {
    const auto gate = shape_.gelu_tanh ? legato::gated_activation<legato::gelu_tanh, X>
                                       : legato::gated_activation<legato::silu, X>;
    gate(scratch_.projected, step_.rows, layer_.down.inputs, scratch_.activated);
  }

  // To the residual stream the projection of `y`, which has its own norm in some families; then the stream's norm.
  void add(const Projection& projection, const X* y, const void* norm, const W* following) const {
    const int64_t rows = step_.rows, width = projection.outputs;
    if (!norm) {
      project(projection, y, rows, x_, x_);
      return legato::rms_norm(x_, rows, width, 1, width, following, shape_.eps, normed_);
    }
    X* own = scratch_.normed;
    project(projection, y, rows, nullptr, own);
    legato::rms_norm(own, rows, width, 1, width, static_cast<const W*>(norm), shape_.eps, own);
    legato::add_rms_norm(x_, own, rows, width, following, shape_.eps, normed_, x_);
  }

  const Shape& shape_;
  const Step& step_;
  const Layer& layer_;
  int64_t group_;
  X *keys_, *x_, *normed_;
  Scratch<X> scratch_;
};

template <typename X, typename W>
void run(const Shape& shape, const Step& step, const Layer* layers, int64_t first, int64_t stop) {
  for (int64_t index = first; index < stop; ++index) {
    Pass<X, W>(shape, step, layers[index], index).run(static_cast<const W*>(layers[index + 1].attention_norm));
  }
}

}  // namespace

extern "C" {

// Numbers of scratch memory that a layer takes for each row of a step.
int64_t layers_scratch(const Shape* shape, const Layer* layer) { return Widths(*shape, *layer).sum(); }

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
