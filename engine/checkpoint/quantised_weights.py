"""A model's weights with its projections in 4 or 8 bits: rounded as they are loaded, or stored so.

Knows which tensors are projections, and which kinds of checkpoints there are; not how each of them stores blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from engine.checkpoint.gguf.store import GGUF_NAME
from engine.checkpoint.packing import WeightPacking
from engine.checkpoint.quantisation import Quantisation
from engine.checkpoint.weights import (
    AnyWeights,
    MixedWeights,
    complain,
    expected_shapes,
    load_weights,
    require_loadable,
    stored_tensors,
    weight_files,
)
from engine.memory.devices import CPU
from engine.model.config import ModelConfig
from engine.model.shards import WHOLE, Part, Shard
from kernels.quantised_weight import QuantisedWeight

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_PARTS = ("qweight", "qzeros", "scales", "g_idx")


def load_mixed_weights(
    folder: Path,
    config: ModelConfig,
    quantisation: Quantisation | None,
    *,
    dtype: torch.dtype,
    shard: Shard = WHOLE,
    device: torch.device = CPU,
) -> AnyWeights:
    """Every tensor of the model, or what a shard has of it: the values that it has in the whole.

    Raises ValueError: see `load_weights` and `Quantisation.quantise`.
    """
    stored = _stored(folder, config, quantisation, shard)
    if stored is None:
        return load_weights(folder, config, dtype=dtype, shard=shard, device=device)
    require_loadable(dtype)
    weights: MixedWeights = {}
    for name, weight in stored:
        if isinstance(weight, QuantisedWeight) and not is_projection(name):
            weight = weight.dequantise(dtype)
        weights[name] = weight.to(device, dtype).contiguous() if isinstance(weight, Tensor) else weight
    return weights


def _stored(
    folder: Path, config: ModelConfig, quantisation: Quantisation | None, shard: Shard
) -> Iterator[tuple[str, Tensor | QuantisedWeight]] | None:
    """What a shard has of every tensor as it is, or is to be, quantised. None: none is."""
    if (folder / GGUF_NAME).exists():
        _require_unrounded(folder, quantisation)
        return _cut(checked_gguf_tensors(folder / GGUF_NAME, config), config, shard)
    if config.packing is not None:
        _require_unrounded(folder, quantisation)
        return _cut(checked_packed_tensors(folder, config, config.packing), config, shard)
    return None if quantisation is None else _rounded(folder, config, quantisation, shard)


def _rounded(
    folder: Path, config: ModelConfig, quantisation: Quantisation, shard: Shard
) -> Iterator[tuple[str, Tensor | QuantisedWeight]]:
    for name, tensor in stored_tensors(folder, config):
        for target, part in _targets(name, config, shard, is_head=name == _EMBEDDING):
            if is_projection(target):
                rounding = quantisation.of_the_head if target == _HEAD else quantisation
                yield target, rounding.quantise_part(tensor, *_rows_and_columns(part))
            else:
                yield target, _part_of(tensor, part)


def _cut(
    stored: Iterator[tuple[str, Tensor | QuantisedWeight]], config: ModelConfig, shard: Shard
) -> Iterator[tuple[str, Tensor | QuantisedWeight]]:
    for name, weight in stored:
        is_head = name == _EMBEDDING and isinstance(weight, QuantisedWeight)
        for target, part in _targets(name, config, shard, is_head=is_head):
            yield target, _part_of(weight, part)


def _targets(name: str, config: ModelConfig, shard: Shard, *, is_head: bool) -> Iterator[tuple[str, Part]]:
    """As what a stored tensor is loaded, and which part of it each time: with tied embeddings one may be two.

    `is_head`: so it is with this one.
    """
    names = [name, _HEAD] if is_head and config.tied_embeddings else [name]
    for target in names:
        part = shard.part(target, config)
        if part is not None:
            yield target, part


def _part_of(weight: Tensor | QuantisedWeight, part: Part) -> Tensor | QuantisedWeight:
    """The whole is not kept for a part of it."""
    if not part:
        return weight
    return weight.part(*_rows_and_columns(part)) if isinstance(weight, QuantisedWeight) else weight[part].clone()


def _rows_and_columns(part: Part) -> tuple[slice, slice]:
    rows, columns = (*part, slice(None), slice(None))[:2]
    return rows, columns


def checked_gguf_tensors(gguf_file: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor | QuantisedWeight]]:
    """Raises ValueError if one lacks, has a wrong shape, or is unknown."""
    from engine.checkpoint.gguf.checkpoint import (
        stored_gguf_tensors,  # takes seconds to import: only who reads such a file pays
    )

    return _checked(gguf_file.resolve(), config, stored_gguf_tensors(gguf_file))


def checked_packed_tensors(
    folder: Path, config: ModelConfig, packing: WeightPacking
) -> Iterator[tuple[str, Tensor | QuantisedWeight]]:
    """Raises ValueError: see above."""
    return _checked(folder, config, _unpacked(weight_files(folder), packing))


def _checked(
    where: Path, config: ModelConfig, stored: Iterator[tuple[str, Tensor | QuantisedWeight]]
) -> Iterator[tuple[str, Tensor | QuantisedWeight]]:
    expected = expected_shapes(config)
    optional = {_HEAD} if config.tied_embeddings else set()
    for name, weight in stored:
        if name in optional:
            continue
        if tuple(weight.shape) != expected.pop(name, None):
            raise ValueError(
                f"{name} in {where} has the shape {tuple(weight.shape)}, which is not what the model's config asks for;"
                " fetch it again"
            )
        yield name, weight
    complain(where, "lacks", sorted(expected))


def _unpacked(files: list[Path], packing: WeightPacking) -> Iterator[tuple[str, Tensor | QuantisedWeight]]:
    """The parts of a projection become one; they may lie in different files."""
    with ExitStack() as opened:
        handles = [opened.enter_context(safe_open(path, framework="pt")) for path in files]
        parts = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118 - not a dict
        for name, handle in parts.items():
            stem, _, kind = name.rpartition(".")
            if kind == "qweight":
                mine = {part: parts[f"{stem}.{part}"] for part in _PARTS if f"{stem}.{part}" in parts}
                complain(files[0].parent, "lacks", [f"{stem}.{part}" for part in _PARTS[:3] if part not in mine])
                tensors = {part: source.get_tensor(f"{stem}.{part}") for part, source in mine.items()}
                yield f"{stem}.weight", packing.unpack(tensors, f"{stem} in {files[0].parent}")
            elif kind not in _PARTS:
                yield name, handle.get_tensor(name)


def _require_unrounded(folder: Path, quantisation: Quantisation | None) -> None:
    """Raises ValueError."""
    if quantisation is not None:
        raise ValueError(
            f"the model in {folder} is quantised already, so model.quantization: {quantisation.name} would round it"
            " twice; leave it out"
        )


def is_projection(name: str) -> bool:
    """Whether a tensor of this name is multiplied with activations, and so may be quantised."""
    return name.endswith("_proj.weight") or name == "lm_head.weight"
