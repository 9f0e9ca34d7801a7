"""Which part of a model each rank of a tensor-parallel group has. Pure arithmetic.

Cut as in Megatron-LM (arXiv 1909.08053, section 3): attention by heads and the MLP, or each of its experts, by its
width, so that a layer takes two sums over the ranks, after attention's output projection and after the MLP's. The head
is cut by the vocabulary; embedding, norms and the experts' router are whole on every rank. Where there are more ranks
than key/value heads, ranks side by side have the same one. Heads that are normalised together are told to all ranks
before that norm. A latent is one key for all heads: every rank makes all of it, by the same product of the same
numbers, so to the same bits, and has its query heads' part of what is projected to and from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.model.config import LayerConfig, ModelConfig

Part = tuple[slice, ...]
"""Of a tensor, by its leading dimensions; () is all of it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` in a group of `degree`. The group's degree has been checked against the model."""

    rank: int
    degree: int

    @property
    def is_whole(self) -> bool:
        return self.degree == 1

    def config(self, config: ModelConfig) -> ModelConfig:
        """A model of this rank's heads and its part of each MLP's width; all else is as it was."""
        heads, kv_heads = self.query_heads(config), self.kv_heads(config.num_kv_heads)
        return replace(
            config,
            num_heads=heads.stop - heads.start,
            num_kv_heads=kv_heads.stop - kv_heads.start,
            intermediate_size=config.intermediate_size // self.degree,
            layers=tuple(map(self._layer, config.layers)),
        )

    def _layer(self, layer: LayerConfig) -> LayerConfig:
        experts = layer.experts
        if experts is None:
            return layer
        width, shared_width = experts.width // self.degree, experts.shared_width // self.degree
        return replace(layer, experts=replace(experts, width=width, shared_width=shared_width))

    def query_heads(self, config: ModelConfig) -> slice:
        return self._equal(config.num_heads)

    def kv_heads(self, num_kv_heads: int) -> slice:
        """More ranks than heads: several ranks have the same one."""
        if num_kv_heads % self.degree == 0:
            return self._equal(num_kv_heads)
        head = self.rank * num_kv_heads // self.degree
        return slice(head, head + 1)

    def kv_holders(self, num_kv_heads: int) -> int:
        """How many ranks side by side have the same key/value heads."""
        return max(1, self.degree // num_kv_heads)

    def vocabulary(self, vocab_size: int) -> slice:
        """The rows of the vocabulary that this rank has: shares as equal as can be."""
        start, stop = (vocab_size * rank // self.degree for rank in (self.rank, self.rank + 1))
        return slice(start, stop)

    def part(self, name: str, shape: tuple[int, ...], config: ModelConfig) -> Part | None:
        """What this rank has of a tensor of the checkpoint; None: nothing."""
        if self.is_whole:
            return ()
        if name == "lm_head.weight":
            return (self.vocabulary(config.vocab_size),)
        module, kind = name.split(".")[-2:]
        match module:
            case "q_proj" | "q_b_proj":
                return (_rows(self.query_heads(config), config.query_dim),)
            case "k_proj" | "v_proj":
                return (_rows(self.kv_heads(config.num_kv_heads), config.head_dim),)
            case "kv_b_proj":
                assert config.latent is not None
                return (_rows(self.query_heads(config), config.latent.plain_dim + config.latent.value_dim),)
            case "gate_proj" | "up_proj":
                return (self._equal(shape[0]),)
            case "self_attn" if kind == "sinks":
                return (self.query_heads(config),)
            case "o_proj" | "down_proj" if kind == "bias":
                return () if self.rank == 0 else None  # what is summed over the ranks has it once
            case "o_proj":
                return slice(None), _rows(self.query_heads(config), config.value_dim)
            case "down_proj":
                return slice(None), self._equal(shape[1])
            case _:
                return ()

    def _equal(self, count: int) -> slice:
        size = count // self.degree
        return slice(self.rank * size, (self.rank + 1) * size)


WHOLE = Shard(0, 1)


def check_degree(config: ModelConfig, degree: int) -> None:
    """Raises ValueError if the model cannot be divided among so many ranks."""
    if degree not in (possible := possible_degrees(config)):
        widths = " and ".join(map(str, sorted(config.mlp_widths)))
        cached = "one latent" if config.latent is not None else f"{config.num_kv_heads} key/value heads"
        raise ValueError(
            f"tensor_parallel is {degree}, but a model of {config.num_heads} query heads, {cached} and an MLP of"
            f" {widths} can be divided equally only among {', '.join(map(str, possible))}; use one of these"
        )


def possible_degrees(config: ModelConfig) -> list[int]:
    """Equal parts only: the slowest rank sets the pace."""
    return [degree for degree in range(1, config.num_heads + 1) if _divides(config, degree)]


def _divides(config: ModelConfig, degree: int) -> bool:
    kv_heads = config.num_kv_heads
    return (
        config.num_heads % degree == 0
        and (kv_heads % degree == 0 or degree % kv_heads == 0)
        and all(width % degree == 0 for width in config.mlp_widths)
    )


def _rows(heads: slice, head_dim: int) -> slice:
    return slice(heads.start * head_dim, heads.stop * head_dim)
