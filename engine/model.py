"""The transformer, for every supported family: one pass over a packed batch, layer by layer.

Knows neither sequences nor sampling; everything about where KV lies comes with the batch.

Shape legend: T packed tokens, E hidden size, Q query heads, H key/value heads, D head size, R output rows,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import Batch
from engine.kv_cache import KVCache
from engine.model_config import ModelConfig
from engine.rope import RopeConfig, RotaryEmbedding
from engine.weights import Weights
from kernels.interface import Kernels, Linear, PagedAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's weights, fused and packed. Norms that a family does not have are None."""

    attention_norm: Tensor  # [E]
    qkv: Linear  # E -> (Q + 2H) * D
    qk_norm: Tensor | None  # [Q + H, D]
    output: Linear  # Q * D -> E
    attention_output_norm: Tensor | None  # [E]
    mlp_norm: Tensor  # [E]
    gate_up: Linear  # E -> 2 * intermediate
    down: Linear  # intermediate -> E
    mlp_output_norm: Tensor | None  # [E]


@dataclass(frozen=True, slots=True)
class _Step:
    """What the layers of one forward pass share, by what they differ in."""

    batch: Batch
    kv_cache: KVCache
    rotations: dict[RopeConfig, tuple[Tensor, Tensor]]
    attentions: dict[int | None, PagedAttention]  # by window


class LayerHooks(Protocol):
    """What else happens in a forward pass, in the thread that computes it."""

    def before_store(self, layer: int) -> None:
        """The layer's KV of earlier tokens must be in the cache when this returns; that of the batch's comes next."""
        ...

    def stored(self, layer: int) -> None:
        """The layer's KV of the batch's tokens is in the cache."""
        ...

    def attended(self, layer: int) -> None:
        """Nothing of the layer's KV is read any more in this pass."""
        ...


class Model:
    """Built from `weights`, which it empties: packed tensors replace them one by one."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        self.config = config
        self._kernels = kernels
        self._embedding = weights.pop("model.embed_tokens.weight")
        self.dtype = self._embedding.dtype
        self.device = self._embedding.device
        self._final_norm = self._norm(weights, "model.norm")
        head = self._embedding if config.tied_embeddings else weights.pop("lm_head.weight")
        self._head = kernels.pack_linear(head, None)
        self._layers = [self._layer(weights, f"model.layers.{index}.") for index in range(config.num_layers)]
        assert not weights, f"no layer took {sorted(weights)[:5]}"
        ropes = {layer.rope for layer in config.layers}
        self._rotary = {rope: RotaryEmbedding(rope, config.head_dim, self.device) for rope in ropes}
        self._windows = {layer.window for layer in config.layers}
        # As a tensor of the model's type, so that it is rounded like the weights.
        scale = config.embedding_scale
        self._embedding_scale = None if scale is None else torch.tensor(scale, dtype=self.dtype, device=self.device)

    def forward(self, batch: Batch, kv_cache: KVCache, hooks: LayerHooks | None = None) -> Tensor:
        """Final hidden states of `batch.output_rows`, `[R, E]`."""
        step = self._begin(batch, kv_cache)
        x = functional.embedding(batch.token_ids, self._embedding)
        if self._embedding_scale is not None:
            x *= self._embedding_scale
        last = self.config.num_layers - 1
        for index, layer in enumerate(self._layers):
            q, k, v = self._project(x, layer, step, index)
            if hooks is not None:
                hooks.before_store(index)
            group = index // kv_cache.layout.layers_per_group
            kv_cache.store(index, batch.slot_mapping[group], k, v)
            if hooks is not None:
                hooks.stored(index)
            if index == last and not len(batch.output_rows):
                return x[:0]
            attended = self._attend(q, k, v, step, index)
            if hooks is not None:
                hooks.attended(index)
            if index == last:  # nothing after this point mixes rows
                x, attended = x[batch.output_rows], attended[batch.output_rows]
            x = self._mix(x, attended, layer)
        return self._rms_norm(x, self._final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[R, E] -> [R, V]` float32."""
        logits = self._head(hidden).float()
        cap = self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _begin(self, batch: Batch, kv_cache: KVCache) -> _Step:
        geometry = kv_cache.layout.geometry
        longest = max(segment.context_len for segment in batch.segments)
        attentions: dict[int | None, PagedAttention] = {}
        for window in self._windows:
            effective = None if window is None or window >= longest else window
            if effective not in attentions:
                attentions[effective] = self._kernels.plan_attention(
                    batch.segments, geometry, window=effective, dtype=self.dtype
                )
            attentions[window] = attentions[effective]
        rotations = {rope: rotary(batch.positions, self.dtype) for rope, rotary in self._rotary.items()}
        return _Step(batch, kv_cache, rotations, attentions)

    def _project(self, x: Tensor, layer: Layer, step: _Step, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[T, Q, D]`, keys and values `[T, H, D]`."""
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        qkv = layer.qkv(self._rms_norm(x, layer.attention_norm)).view(len(x), -1, config.head_dim)
        qk, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if layer.qk_norm is not None:
            qk = self._rms_norm(qk, layer.qk_norm)
        qk = self._kernels.rotate(qk, *step.rotations[config.layers[index].rope])
        q, k = qk[:, : config.num_heads], qk[:, config.num_heads :]
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, step: _Step, index: int) -> Tensor:
        """`[T, Q * D]`"""
        attended = step.attentions[self.config.layers[index].window].attend(
            q,
            k,
            v,
            step.kv_cache.layer_rows(index),
            group=index // step.kv_cache.layout.layers_per_group,
            scale=self.config.attention_scale,
            softcap=self.config.attention_softcap,
        )
        return attended.flatten(1)

    def _mix(self, x: Tensor, attended: Tensor, layer: Layer) -> Tensor:
        """The residual stream after attention's output and the MLP."""
        x = self._add(x, layer.output, attended, layer.attention_output_norm)
        gate_up = layer.gate_up(self._rms_norm(x, layer.mlp_norm))
        activated = self._kernels.gated_activation(gate_up, self.config.activation)
        return self._add(x, layer.down, activated, layer.mlp_output_norm)

    def _add(self, x: Tensor, linear: Linear, y: Tensor, norm: Tensor | None) -> Tensor:
        return linear.add_to(x, y) if norm is None else x + self._rms_norm(linear(y), norm)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, weight, self.config.rms_norm_eps)

    def _layer(self, weights: Weights, prefix: str) -> Layer:
        sandwich = self.config.sandwich_norms
        mlp_norm = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        return Layer(
            attention_norm=self._norm(weights, prefix + "input_layernorm"),
            qkv=self._linear(weights, *(f"{prefix}self_attn.{name}_proj" for name in "qkv")),
            qk_norm=self._qk_norm(weights, prefix) if self.config.qk_norm else None,
            output=self._linear(weights, prefix + "self_attn.o_proj"),
            attention_output_norm=self._norm(weights, prefix + "post_attention_layernorm") if sandwich else None,
            mlp_norm=self._norm(weights, prefix + mlp_norm),
            gate_up=self._linear(weights, prefix + "mlp.gate_proj", prefix + "mlp.up_proj"),
            down=self._linear(weights, prefix + "mlp.down_proj"),
            mlp_output_norm=self._norm(weights, prefix + "post_feedforward_layernorm") if sandwich else None,
        )

    def _linear(self, weights: Weights, *names: str) -> Linear:
        """The projections of one input as one, their outputs side by side."""
        weight = torch.cat([weights.pop(f"{name}.weight") for name in names])
        biases = [weights.pop(f"{name}.bias") for name in names if f"{name}.bias" in weights]
        return self._kernels.pack_linear(weight, torch.cat(biases) if biases else None)

    def _norm(self, weights: Weights, name: str) -> Tensor:
        weight = weights.pop(f"{name}.weight")
        offset = self.config.norm_weight_offset
        return weight if offset == 0.0 else weight.float() + offset  # 1 + w would lose bits of w in bfloat16

    def _qk_norm(self, weights: Weights, prefix: str) -> Tensor:
        """The queries' weight for each query head, then the keys' for each key head."""
        q_norm, k_norm = (self._norm(weights, f"{prefix}self_attn.{name}_norm") for name in "qk")
        return torch.cat((q_norm.expand(self.config.num_heads, -1), k_norm.expand(self.config.num_kv_heads, -1)))
