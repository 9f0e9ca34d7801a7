"""The transformer, for every supported family: one pass over a packed batch, layer by layer.

The runner calls it; everything about where KV lies comes with the batch.

Shape legend: T packed tokens, E hidden size, Q query heads, H key/value heads, D head size, R output rows,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.checkpoint.adapters import SIDE_BY_SIDE, AdapterLayout, product_shapes, tensors_in
from engine.checkpoint.weights import Weights, expected_shapes
from engine.kv.cache import KVCache
from engine.model.batch import Batch
from engine.model.config import ExpertsConfig, LayerConfig, ModelConfig
from engine.model.latent import (
    LatentOutput,
    first_projection_rows,
    pack_keys_and_values,
    project,
    query_rows,
)
from engine.model.rope import RopeConfig, RotaryEmbedding
from engine.model.shards import WHOLE, Shard
from kernels.adapters import Adapter, AdapterLayer, StoredLayer, StoredLowRank
from kernels.cpu.huge_pages import memory_apart
from kernels.interface import (
    ExpertChoice,
    GatedMlp,
    InFloat32,
    Kernels,
    LatentProjections,
    Layer,
    LayersForm,
    Linear,
    PagedAttention,
    Segment,
)
from kernels.native.attention import NativeAttention
from kernels.native.kernels import NativeCpuKernels
from kernels.native.layers import NativeLayers
from kernels.quantised_weight import QuantisedWeight, side_by_side


def pack_projections(
    kernels: Kernels,
    weights: Sequence[Tensor | QuantisedWeight],
    bias: Tensor | None,
    dtype: torch.dtype,
    rows: Tensor | None = None,
    *,
    is_output_layer: bool = False,
) -> Linear:
    """Their outputs side by side, or in the order of `rows`, of activations of `dtype`. Where only some are quantised,
    none is any more."""
    quantised = [weight for weight in weights if isinstance(weight, QuantisedWeight)]
    if rows is not None and bias is not None:
        bias = bias[rows.to(bias.device)]
    if len(quantised) == len(weights):
        whole = side_by_side(quantised)
        ordered = whole if rows is None else whole.rows(rows)
        return kernels.pack_quantised(ordered, bias, dtype, is_output_layer=is_output_layer)
    device = next((weight.device for weight in weights if isinstance(weight, Tensor)), None)
    tensors = [
        weight.dequantise(dtype).to(device) if isinstance(weight, QuantisedWeight) else weight for weight in weights
    ]
    # An output layer may lie where the embedding lies: no copy of a single one.
    joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    return kernels.pack_linear(joined if rows is None else joined[rows.to(joined.device)], bias)


@dataclass(frozen=True, slots=True)
class _Step:
    """What the layers of one forward pass share, by what they differ in."""

    batch: Batch
    kv_cache: KVCache
    rotations: dict[RopeConfig, tuple[Tensor, Tensor]]
    attentions: Mapping[int | None, PagedAttention]  # by window


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


class Ranks(Protocol):
    """The ranks of a tensor-parallel group, each of which computes its part of every layer: see `RankGroup`."""

    @property
    def shard(self) -> Shard: ...

    def sum(self, partial_TE: Tensor) -> Tensor:
        """Over the ranks."""
        ...

    def join(self, part: Tensor, width: int) -> Tensor:
        """All ranks' parts of each row side by side, `[R, width]`: what a rank has of it, `Shard.vocabulary` says."""
        ...


class _Summed:
    """A projection of which each rank has some of the inputs."""

    def __init__(self, partial: Linear, ranks: Ranks) -> None:
        self._partial = partial
        self._ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.sum(self._partial(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)


@dataclass(frozen=True, slots=True)
class _WithShared:
    """A mixture, and beside it an MLP that is every row's."""

    routed: Linear
    shared: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.routed.add_to(self.shared(x), x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self.routed.add_to(self.shared.add_to(residual, x), x)


class Model:
    """Built from `weights`, which it empties: packed tensors replace them one by one.

    With `ranks` it is one rank's part of the model: `weights` are what its shard has of them, and every rank must make
    the same calls.
    """

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels, ranks: Ranks | None = None) -> None:
        self.config = config if ranks is None else ranks.shard.config(config)
        config = self.config
        self._kernels = kernels
        self._ranks = ranks
        self._embedding = _tensor(weights, "model.embed_tokens.weight")
        self.dtype = self._embedding.dtype
        self.device = self._embedding.device
        self._final_norm = self._norm(weights, "model.norm")
        self._head = pack_projections(kernels, [self._head_weight(weights)], None, self.dtype, is_output_layer=True)
        self._layers = [
            self._layer(weights, f"model.layers.{index}.", layer) for index, layer in enumerate(config.layers)
        ]
        assert not weights, f"no layer took {sorted(weights)[:5]}"
        ropes = dict.fromkeys(layer.rope for layer in config.layers)
        self._rotary = {rope: RotaryEmbedding(rope, config.rotary_dim, self.device) for rope in ropes}
        self.windows = frozenset(layer.window for layer in config.layers)
        self.fused = self._fuse()
        # As a tensor of the model's type, so that it is rounded like the weights.
        scale = config.embedding_scale
        self._embedding_scale = None if scale is None else torch.tensor(scale, dtype=self.dtype, device=self.device)

    def forward(
        self,
        batch: Batch,
        kv_cache: KVCache,
        hooks: LayerHooks | None = None,
        attentions: Mapping[int | None, PagedAttention] | None = None,
    ) -> Tensor:
        """Final hidden states of `batch.output_rows`, `[R, E]`.

        `attentions`: one for each of `windows`, and the batch says nothing of segments; None: those of its segments.
        """
        if attentions is None:
            attentions = self._plan_attentions(batch.segments, kv_cache, self.windows)
        rotations = {rope: rotary(batch.positions, self.dtype) for rope, rotary in self._rotary.items()}
        step = _Step(batch, kv_cache, rotations, attentions)
        x = functional.embedding(batch.token_ids, self._embedding)
        if self._embedding_scale is not None:
            x *= self._embedding_scale
        last = self.config.num_layers - 1
        norm = self._layers[0].attention_norm
        normed = x.clone() if norm is None else self._rms_norm(x, norm)
        first = 0 if hooks is not None else self._run_fused(x, normed, step)
        if first > last:
            return normed
        adapters = batch.adapters
        for index, layer in enumerate(self._layers[first:], first):
            if adapters is not None:
                layer = adapters.adapted(layer, index)
            plain, qk, v = self._project(normed, layer)
            if hooks is not None:
                hooks.before_store(index)
            q, k = self._rotate_and_store(qk, v, step, index)
            if plain is not None:
                q, k = torch.cat((plain, q), -1), torch.cat((v, k), -1)
            if hooks is not None:
                hooks.stored(index)
            if index == last and not len(batch.output_rows):
                return x[:0]
            if index == last and not batch.everyone_samples:
                step = self._of_outputs(step)
            attended = self._attend(q, k, v, step, index)
            if hooks is not None:
                hooks.attended(index)
            if index == last:  # nothing after this point mixes rows
                x, attended = x[batch.output_rows], attended[batch.output_rows]
                if adapters is not None:
                    layer = adapters.of_outputs.adapted(self._layers[index], index)
            following = self._final_norm if index == last else self._layers[index + 1].attention_norm
            x, normed = self._mix(x, attended, layer, following)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """`[R, E] -> [R, V]`, of the model's type, or float32 where they are capped: samplers widen what they read."""
        logits: Tensor = self._head(hidden)
        if self._ranks is not None:
            logits = self._ranks.join(logits, self.config.vocab_size)
        cap = self.config.logit_softcap
        return logits if cap is None else logits.float().div_(cap).tanh_().mul_(cap)

    def adapter_packer(self, layout: AdapterLayout) -> Callable[[memoryview], Adapter]:
        """What packs adapters that lie in their files like this: of each it is given the file from the first tensor on.
        Each has memory of its own that goes with it. For a model without ranks."""
        assert self._ranks is None, "an adapter's weights would have to be cut as the model's are"
        kernels, stored = self._kernels, self._stored_layers(layout)
        if isinstance(kernels, NativeCpuKernels) and (form := kernels.adapter_form(stored, self.dtype)) is not None:
            return form.pack
        ranks = {name: low_rank.down.num_rows for name, low_rank in layout.projections.items()}
        num_bytes = kernels.packed_bytes(product_shapes(self.config, ranks), self.dtype)

        def pack(tensors: memoryview) -> Adapter:
            own, tensor = kernels, tensors_in(tensors, self.dtype)
            if isinstance(kernels, NativeCpuKernels):
                own = kernels.packing_into(memory_apart(num_bytes))
            layers = [AdapterLayer.packed(own, layer, tensor, self.device) for layer in stored]
            return Adapter(layers.__getitem__, num_bytes)

        return pack

    def _stored_layers(self, layout: AdapterLayout) -> list[StoredLayer]:
        shapes = expected_shapes(self.config)
        layers: list[StoredLayer] = []
        for index, layer in enumerate(self.config.layers):
            stored: dict[str, list[tuple[StoredLowRank, int]]] = {}
            for place, projections in SIDE_BY_SIDE.items():
                first_output = 0
                for projection in projections:
                    name = f"model.layers.{index}.{projection}_proj"
                    num_outputs, *_ = shapes.get(f"{name}.weight", (0,))
                    if (low_rank := layout.projections.get(name)) is not None:
                        if layer.rope.reorders_heads and name.endswith(("q_proj", "k_proj")):
                            order = self._in_head_order(torch.arange(num_outputs), layer.rope)
                            low_rank = replace(low_rank, up=replace(low_rank.up, order=order))
                        stored.setdefault(place, []).append((low_rank, first_output))
                    first_output += num_outputs
            layers.append(stored)
        return layers

    def _run_fused(self, x: Tensor, normed: Tensor, step: _Step) -> int:
        """Run as many of the first layers as one call takes, and return how many these are: `x`, `normed` become
        theirs."""
        attentions = [step.attentions[window] for window in self.windows]
        if self.fused is None or not self.fused.takes(attentions, step.batch.adapters):
            return 0
        num_layers = self.config.num_layers - (0 if step.batch.everyone_samples else 1)
        self.fused.run(
            x,
            normed,
            cache=step.kv_cache.tensor,
            slots=step.batch.slot_mapping,
            rotations=[step.rotations[rope] for rope in self._rotary],
            attentions=attentions,
            num_layers=num_layers,
            adapters=step.batch.adapters,
        )
        return num_layers

    def _of_outputs(self, step: _Step) -> _Step:
        """With attention of the output rows alone, where no row's bits depend on the others: most rows of a prompt have
        no part in what comes after the last layer's."""
        window = self.config.layers[-1].window
        if not isinstance(step.attentions[window], NativeAttention):
            return step
        segments = step.batch.output_segments()
        return replace(step, attentions=self._plan_attentions(segments, step.kv_cache, [window]))

    def _plan_attentions(
        self, segments: Sequence[Segment], kv_cache: KVCache, windows: Iterable[int | None]
    ) -> Mapping[int | None, PagedAttention]:
        geometry = kv_cache.layout.geometry
        longest = max(segment.context_len for segment in segments)
        attentions: dict[int | None, PagedAttention] = {}
        for window in windows:
            effective = None if window is None or window >= longest else window
            if effective not in attentions:
                attentions[effective] = self._kernels.plan_attention(
                    segments, geometry, window=effective, dtype=self.dtype
                )
            attentions[window] = attentions[effective]
        return attentions

    def _project(self, normed: Tensor, layer: Layer) -> tuple[Tensor | None, Tensor, Tensor]:
        """Queries and keys `[T, Q + H, D]`, not yet rotated, and values `[T, H, D]`. With a latent, which is the value
        then, first that part of queries which will not be, and then the part that will."""
        config = self.config
        if config.latent is not None:
            return project(normed, layer, config.latent, config.num_heads, self._kernels)
        qkv = layer.qkv(normed).view(len(normed), -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        qk, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
        return None, qk if layer.qk_norm is None else self._norm_heads(qk, layer.qk_norm), v

    def _norm_heads(self, qk: Tensor, weight: Tensor) -> Tensor:
        """Queries and keys `[T, Q + H, D]`, by `weight [Q + H, D]`, or where they are normalised over all heads by
        that of all ranks' heads."""
        if self.config.qk_norm == "each head":
            return self._rms_norm(qk, weight)
        shard, of_ranks = WHOLE, qk.unsqueeze(1)
        if self._ranks is not None:  # all that one process normalises, so that no bit can differ
            shard, own = self._ranks.shard, qk.flatten(1)
            of_ranks = self._ranks.join(own, shard.degree * own.shape[1]).view(len(qk), shard.degree, *qk.shape[1:])
        num_heads = self.config.num_heads
        q_weight, k_weight = weight[: shard.degree * num_heads], weight[shard.degree * num_heads :]
        holders = shard.kv_holders(len(k_weight))
        kinds = (
            (of_ranks[:, :, :num_heads], q_weight, shard.rank),
            (of_ranks[:, ::holders, num_heads:], k_weight, shard.rank // holders),
        )
        normed = [
            self._rms_norm(heads.flatten(1).unsqueeze(1), by.view(1, -1)).view(heads.shape)[:, place]
            for heads, by, place in kinds
        ]
        return torch.cat(normed, 1)

    def _rotate_and_store(self, qk: Tensor, v: Tensor, step: _Step, index: int) -> tuple[Tensor, Tensor]:
        """Queries `[T, Q, D]` and keys `[T, H, D]`; the keys and `v` stand in the cache."""
        slots = step.batch.slot_mapping[index // step.kv_cache.layout.layers_per_group]
        into = step.kv_cache.slots(index, slots)
        return self._kernels.rotate_and_store(qk, v, *step.rotations[self.config.layers[index].rope], into)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, step: _Step, index: int) -> Tensor:
        """`[T, Q * Dv]`"""
        attended = step.attentions[self.config.layers[index].window].attend(
            q,
            k,
            v,
            step.kv_cache.layer_rows(index),
            group=index // step.kv_cache.layout.layers_per_group,
            scale=self.config.attention_scale,
            softcap=self.config.attention_softcap,
            sinks=self._layers[index].sinks,
        )
        return attended.flatten(1)

    def _mix(self, x: Tensor, attended: Tensor, layer: Layer, following: Tensor | None) -> tuple[Tensor, Tensor]:
        """The residual stream after attention's output and the MLP, and its norm by the `following` weight."""
        x, normed = self._add(x, layer.output, attended, layer.attention_output_norm, layer.mlp_norm)
        return self._add(x, layer.mlp, normed, layer.mlp_output_norm, following)

    def _add(
        self, x: Tensor, linear: Linear, y: Tensor, norm: Tensor | None, following: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`x` and what `linear` makes of `y`, which has its own norm in some families; then the norm of that sum, which
        is itself in some that have the other one."""
        if norm is None:
            x = linear.add_to(x, y)
            assert following is not None
            return x, self._rms_norm(x, following)
        if following is None:
            x = x + self._rms_norm(linear(y), norm)
            return x, x
        normed, x = self._kernels.add_rms_norm(x, self._rms_norm(linear(y), norm), following, self.config.rms_norm_eps)
        return x, normed

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, weight, self.config.rms_norm_eps)

    def _fuse(self) -> NativeLayers | None:
        if not isinstance(self._kernels, NativeCpuKernels) or self.config.latent is not None:
            return None
        config, ropes, windows = self.config, list(self._rotary), list(self.windows)
        form = LayersForm(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            joint_qk_norm=config.qk_norm == "all heads",
            eps=config.rms_norm_eps,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            activation=config.activation,
            rotations=[ropes.index(layer.rope) for layer in config.layers],
            attentions=[windows.index(layer.window) for layer in config.layers],
        )
        return self._kernels.fuse_layers(self._layers, self._final_norm, form)

    def _layer(self, weights: Weights, prefix: str, config: LayerConfig) -> Layer:
        def norm(name: str | None) -> Tensor | None:
            return None if name is None else self._norm(weights, prefix + name)

        norms = self.config.norms
        qkv, latent, output = self._attention(weights, prefix + "self_attn.", config.rope)
        return Layer(
            attention_norm=norm(norms.attention),
            qkv=qkv,
            qk_norm=None if self.config.qk_norm is None else self._qk_norm(weights, prefix, config.rope),
            sinks=_tensor(weights, prefix + "self_attn.sinks").float() if self.config.attention_sinks else None,
            latent=latent,
            output=self._summed(output),
            attention_output_norm=norm(norms.attention_output),
            mlp_norm=norm(norms.mlp),
            mlp=self._summed(self._mlp_or_experts(weights, prefix + "mlp", config.experts)),
            mlp_output_norm=norm(norms.mlp_output),
        )

    def _attention(
        self, weights: Weights, prefix: str, rope: RopeConfig
    ) -> tuple[Linear, LatentProjections | None, Linear]:
        """The projections before it, and the one after it."""
        config, latent = self.config, self.config.latent
        if latent is None:
            rows = None
            if rope.reorders_heads:
                rotated, all_heads = (config.num_heads + n * config.num_kv_heads for n in (1, 2))
                rows = torch.arange(all_heads * config.head_dim)
                rows[: rotated * config.head_dim] = self._in_head_order(rows[: rotated * config.head_dim], rope)
            qkv = self._linear(weights, *(f"{prefix}{name}_proj" for name in "qkv"), rows=rows)
            return qkv, None, self._linear(weights, prefix + "o_proj")
        query_norm, query, first = None, None, "q_proj"
        if latent.query_rank is not None:
            query_norm, first = self._norm(weights, prefix + "q_a_layernorm").unsqueeze(0), "q_a_proj"
            query = self._linear(weights, prefix + "q_b_proj", rows=query_rows(latent, config.num_heads))
        names = prefix + first, prefix + "kv_a_proj_with_mqa"
        qkv = self._linear(weights, *names, rows=first_projection_rows(latent, config.num_heads))
        keys, values = pack_keys_and_values(
            _tensor(weights, prefix + "kv_b_proj.weight"), latent, config.num_heads, self._kernels
        )
        latent_norm = self._norm(weights, prefix + "kv_a_layernorm").unsqueeze(0)
        return (
            qkv,
            LatentProjections(query_norm=query_norm, query=query, latent_norm=latent_norm, keys=keys),
            LatentOutput(values, self._linear(weights, prefix + "o_proj"), latent.rank),
        )

    def _mlp_or_experts(self, weights: Weights, name: str, experts: ExpertsConfig | None) -> Linear:
        if experts is None:
            return self._mlp(weights, name)
        choice = ExpertChoice(
            per_row=experts.per_token,
            normalised=experts.normalised,
            scale=experts.scale,
            groups=experts.groups,
            groups_per_row=experts.groups_per_token,
            correction=_tensor(weights, f"{name}.gate.e_score_correction_bias") if experts.corrected else None,
        )
        shard = WHOLE if self._ranks is None else self._ranks.shard
        own = shard.experts(experts.num_experts)
        routed = self._kernels.pack_experts(
            self._router(weights, f"{name}.gate", experts),
            [
                self._mlp(weights, f"{name}.experts.{number}") if number in own else None
                for number in range(experts.num_experts)
            ],
            choice,
        )
        if not experts.shared_width:
            return routed
        shared = self._mlp(weights, f"{name}.shared_experts")
        return _WithShared(routed, self._gated(weights, name, shared) if experts.shared_gate else shared)

    def _gated(self, weights: Weights, name: str, shared: GatedMlp) -> Linear:
        """The mixture of one expert that counts by the sigmoid of its logit."""
        gate = self._linear(weights, f"{name}.shared_experts_gate")
        by_sigmoid = ExpertChoice(per_row=1, normalised=False, correction=torch.zeros(1, device=self.device))
        return self._kernels.pack_experts(gate, [shared], by_sigmoid)

    def _router(self, weights: Weights, name: str, experts: ExpertsConfig) -> Linear:
        if not experts.router_in_float32:
            return self._linear(weights, name)
        return InFloat32(self._kernels.pack_linear(_tensor(weights, f"{name}.weight").float(), None))

    def _mlp(self, weights: Weights, name: str) -> GatedMlp:
        return GatedMlp(
            gate_up=self._linear(weights, f"{name}.gate_proj", f"{name}.up_proj"),
            down=self._linear(weights, f"{name}.down_proj"),
            activation=self.config.activation,
            activate=self._kernels.gated_activation,
        )

    def _head_weight(self, weights: Weights) -> Tensor | QuantisedWeight:
        """`[V, E]`, or a rank's rows of it."""
        if "lm_head.weight" in weights:
            return weights.pop("lm_head.weight")
        if self._ranks is None:
            return self._embedding
        return self._embedding[self._ranks.shard.vocabulary(self.config.vocab_size)]

    def _summed(self, linear: Linear) -> Linear:
        return linear if self._ranks is None else _Summed(linear, self._ranks)

    def _linear(self, weights: Weights, *names: str, rows: Tensor | None = None) -> Linear:
        """The projections of one input as one, their outputs side by side, or in the order of `rows`."""
        parts = [weights.pop(f"{name}.weight") for name in names]
        bias = None
        if any(f"{name}.bias" in weights for name in names):  # who has none beside one that has, adds nothing
            zeros = (torch.zeros(part.shape[0], dtype=self.dtype, device=self.device) for part in parts)
            named = zip(names, zeros, strict=True)
            bias = torch.cat([_tensor(weights, f"{name}.bias", nothing) for name, nothing in named])
        return pack_projections(self._kernels, parts, bias, self.dtype, rows)

    def _norm(self, weights: Weights, name: str) -> Tensor:
        weight = _tensor(weights, f"{name}.weight")
        offset = self.config.norm_weight_offset
        return weight if offset == 0.0 else weight.float() + offset  # 1 + w would lose bits of w in bfloat16

    def _qk_norm(self, weights: Weights, prefix: str, rope: RopeConfig) -> Tensor:
        """The queries' weight for each query head, then the keys' for each key head: all ranks' heads where these are
        normalised together."""
        config = self.config
        q_norm, k_norm = (
            self._norm(weights, f"{prefix}self_attn.{name}_norm").view(-1, config.head_dim) for name in "qk"
        )
        if config.qk_norm == "each head":
            q_norm, k_norm = q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)
        norms = torch.cat((q_norm, k_norm))
        return self._in_head_order(norms.flatten(), rope).view(norms.shape) if rope.reorders_heads else norms

    def _in_head_order(self, heads: Tensor, rope: RopeConfig) -> Tensor:
        """Of queries' and keys' heads, one after the other in the first dimension, numbers in the order that kernels
        want."""
        by_head = torch.unflatten(heads, 0, (-1, self.config.head_dim))
        return by_head[:, rope.head_order(self.config.head_dim)].flatten(0, 1)


def _tensor(weights: Weights, name: str, *default: Tensor) -> Tensor:
    weight = weights.pop(name, *default)
    assert isinstance(weight, Tensor), f"{name} is no projection"
    return weight
