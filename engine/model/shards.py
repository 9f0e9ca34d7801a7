"""Which part of a model each rank of a tensor-parallel group has. Pure arithmetic.

Cut as in Megatron-LM (arXiv 1909.08053, section 3): attention by heads and the MLP, or each of its experts, by its
width, so that a layer takes two sums over the ranks, after attention's output projection and after the MLP's. With
expert parallelism ranks have whole experts instead, and the second sum adds up what each rank's made of a row
(decision 0041). The head is cut by the vocabulary; embedding, norms and the experts' router are whole on every rank.
Where there are more ranks than key/value heads, ranks side by side have the same one. Heads that are normalised
together are told to all ranks before that norm. A latent is one key for all heads: every rank makes all of it, by the
same product of the same numbers, so to the same bits, and has its query heads' part of what is projected to and from
it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kernels.quantised_weight import GROUP_MULTIPLE

if TYPE_CHECKING:
    from engine.checkpoint.quantisation import Quantisation
    from engine.model.config import LayerConfig, ModelConfig

Part = tuple[slice, ...]
"""Of a tensor, by its leading dimensions; () is all of it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` in a group of `degree`, which have been checked against the model: see `shards_of`."""

    rank: int
    degree: int
    expert_parallel: bool = False  # of a mixture whole experts, not a part of each

    @property
    def is_whole(self) -> bool:
        return self.degree == 1

    def config(self, config: ModelConfig) -> ModelConfig:
        """A model of this rank's heads and its part of each MLP's width; all else is as it was, the number of experts
        too."""
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
        width = experts.width if self.expert_parallel else experts.width // self.degree
        shared_width = experts.shared_width // self.degree
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

    def experts(self, num_experts: int) -> range:
        """Those of which this rank has something: all, or its own whole ones, shares as equal as can be."""
        return range(num_experts)[self._share(num_experts)] if self.expert_parallel else range(num_experts)

    def vocabulary(self, vocab_size: int) -> slice:
        """The rows of the vocabulary that this rank has: shares as equal as can be."""
        return self._share(vocab_size)

    def part(self, name: str, shape: tuple[int, ...], config: ModelConfig) -> Part | None:
        """What this rank has of a tensor of the checkpoint; None: nothing."""
        if self.is_whole:
            return ()
        if name == "lm_head.weight":
            return (self.vocabulary(config.vocab_size),)
        if self.expert_parallel and ".experts." in name:
            return self._part_of_expert(name, config)
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

    def _part_of_expert(self, name: str, config: ModelConfig) -> Part | None:
        """Of `model.layers.L.mlp.experts.N.` all or nothing."""
        words = name.split(".")
        experts = config.layers[int(words[2])].experts
        assert experts is not None
        return () if int(words[5]) in self.experts(experts.num_experts) else None

    def _equal(self, count: int) -> slice:
        size = count // self.degree
        return slice(self.rank * size, (self.rank + 1) * size)

    def _share(self, count: int) -> slice:
        start, stop = (count * rank // self.degree for rank in (self.rank, self.rank + 1))
        return slice(start, stop)


WHOLE = Shard(0, 1)


def shards_of(
    config: ModelConfig,
    degree: int,
    *,
    expert_parallel: bool | None = None,
    quantisation: Quantisation | None = None,
) -> list[Shard]:
    """The shards of a group, rank by rank, of a model that is rounded by `quantisation` as it is loaded.

    `expert_parallel` None: a rank has a part of each expert, as wide as the others', so that no router can make it wait
    for them; whole ones only where such parts would not be equal, or would cut groups of codes so small that these
    would not stay codes. Raises ValueError if the model cannot be divided so.
    """
    check_degree(config, degree, expert_parallel)
    if expert_parallel is None:
        expert_parallel = degree > 1 and not _cuts_experts_well(config, degree, quantisation)
    return [Shard(rank, degree, expert_parallel) for rank in range(degree)]


def check_degree(config: ModelConfig, degree: int, expert_parallel: bool | None = None) -> None:
    """Raises ValueError if the model cannot be divided among so many ranks: as `shards_of`."""
    num_experts = _num_experts(config)
    if expert_parallel and not num_experts:
        raise ValueError("expert_parallel is on, but the model has no mixture of experts to divide; leave it out")
    if degree in (possible := possible_degrees(config, expert_parallel)):
        return
    cached = "one latent" if config.latent is not None else f"{config.num_kv_heads} key/value heads"
    sizes = [f"{config.num_heads} query heads", cached]
    if expert_parallel:
        sizes.append(f"{min(num_experts)} experts")
    if widths := _widths(config) | (frozenset() if expert_parallel else _expert_widths(config)):
        sizes.append(f"an MLP of {' and '.join(map(str, sorted(widths)))}")
    raise ValueError(
        f"tensor_parallel is {degree}, but a model of {', '.join(sizes[:-1])} and {sizes[-1]} can be divided equally"
        f" only among {', '.join(map(str, possible))}; use one of these"
    )


def possible_degrees(config: ModelConfig, expert_parallel: bool | None = None) -> list[int]:
    """Equal parts only, since the slowest rank sets the pace; but of whole experts a rank may have one more than
    another, and none has none. None: with whole experts or parts of them."""
    return [degree for degree in range(1, config.num_heads + 1) if _divides(config, degree, expert_parallel)]


def _divides(config: ModelConfig, degree: int, expert_parallel: bool | None) -> bool:
    kv_heads = config.num_kv_heads
    by_number = all(degree <= number for number in _num_experts(config))
    by_width = all(width % degree == 0 for width in _expert_widths(config))
    return (
        config.num_heads % degree == 0
        and (kv_heads % degree == 0 or degree % kv_heads == 0)
        and all(width % degree == 0 for width in _widths(config))
        and (by_number or by_width if expert_parallel is None else by_number if expert_parallel else by_width)
    )


def _cuts_experts_well(config: ModelConfig, degree: int, quantisation: Quantisation | None) -> bool:
    has_codes = quantisation is not None or (config.packing is not None and config.packing.stays_packed)
    at_once = degree * (GROUP_MULTIPLE if has_codes else 1)
    return all(width % at_once == 0 for width in _expert_widths(config)) or not _divides(config, degree, True)


def _num_experts(config: ModelConfig) -> frozenset[int]:
    """Of each mixture in the model."""
    return frozenset(layer.experts.num_experts for layer in config.layers if layer.experts is not None)


def _expert_widths(config: ModelConfig) -> frozenset[int]:
    return frozenset(layer.experts.width for layer in config.layers if layer.experts is not None)


def _widths(config: ModelConfig) -> frozenset[int]:
    """Of all MLPs that are every row's: dense ones, and those beside experts."""
    all_layers = {layer.experts.shared_width if layer.experts else config.intermediate_size for layer in config.layers}
    return frozenset(all_layers - {0})


def _rows(heads: slice, head_dim: int) -> slice:
    return slice(heads.start * head_dim, heads.stop * head_dim)
