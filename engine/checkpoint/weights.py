"""A model's tensors, read from safetensors and checked against its config. Nothing else is ever opened.

Knows the names and shapes of checkpoints; not what is computed with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.memory.devices import CPU
from engine.model.config import ModelConfig
from engine.model.shards import WHOLE, Part, Shard
from kernels.quantised_weight import QuantisedWeight

Weights = dict[str, Tensor]
"""By their names in the checkpoint. Who builds a model takes the tensors out, so that none is held twice."""

MixedWeights = dict[str, Tensor | QuantisedWeight]
"""The same where projections may be quantised. A quantised `lm_head.weight` is there even if it is the embedding."""

AnyWeights = Weights | MixedWeights

LOADABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_DERIVED = ".rotary_emb.inv_freq"  # a buffer that some old checkpoints saved


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    shard: Shard = WHOLE,
    device: torch.device = CPU,
) -> Weights:
    """Every tensor of the model, or what a shard has of it, as `dtype`; nothing else is read from the files.

    They go to `device` one by one, straight from the file: host memory never holds more than one of them beside those
    that belong there. Raises ValueError if one lacks, has a wrong shape, or is unknown.
    """
    require_loadable(dtype)
    tensors = stored_tensors(Path(folder), config, shard=shard, device=device)
    return {name: tensor.to(dtype).contiguous() for name, tensor in tensors}  # some columns are not, as they are read


def require_loadable(dtype: torch.dtype) -> None:
    """Raises ValueError."""
    if dtype not in LOADABLE_DTYPES:
        raise ValueError(f"weights can be loaded as float32, bfloat16 or float16, not as {dtype}")


def stored_tensors(
    folder: Path, config: ModelConfig, *, shard: Shard = WHOLE, device: torch.device = CPU
) -> Iterator[tuple[str, Tensor]]:
    """What a shard has of every tensor of the model, as it is stored, one by one. Raises ValueError: see above."""
    expected = expected_shapes(config)
    optional = {"lm_head.weight"} if config.tied_embeddings else set()
    found: set[str] = set()
    unknown: list[str] = []
    for path in weight_files(folder):
        for name, tensor in _tensors(path, device):
            if name in expected:
                found.add(name)
                tensor.require(expected[name])
                part = shard.part(name, config)
                if part is not None:
                    yield name, tensor.read(part)
            elif name not in optional and not name.endswith(_DERIVED):
                unknown.append(name)
    complain(folder, "lacks", sorted(expected.keys() - found))
    complain(folder, "has unknown", unknown)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor that a checkpoint of this model must hold."""
    embedding = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = embedding
    layer = dict(_layer_shapes(config))
    for index in range(config.num_layers):
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = (
        ("self_attn.q_proj", q_size, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_size, config.output_bias),
        ("mlp.gate_proj", width, hidden, config.mlp_bias),
        ("mlp.up_proj", width, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, width, config.mlp_bias),
    )
    for name, rows, columns, has_bias in projections:
        yield f"{name}.weight", (rows, columns)
        if has_bias:
            yield f"{name}.bias", (rows,)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.sandwich_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for name in norms:
        yield f"{name}.weight", (hidden,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)


def weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if single.exists():
            return [single]
        raise ValueError(f"{folder} holds neither model.safetensors nor {index.name}; no other format is loaded")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors files ({error!r}); fetch it again") from error
    for name in names:
        if Path(name).name != name or not (folder / name).exists():
            raise ValueError(f"{index} names the file {name!r}, which is not in {folder}; fetch the model again")
    return [folder / name for name in names]


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A tensor of an open file, of which nothing has been read yet."""

    name: str
    path: Path
    file: Any  # safetensors' handle

    def require(self, shape: tuple[int, ...]) -> None:
        """Raises ValueError if it is not of this shape."""
        found = tuple(self.file.get_slice(self.name).get_shape())
        if found != shape:
            raise ValueError(f"{self.name} in {self.path} has the shape {found}; the model's config asks for {shape}")

    def read(self, part: Part) -> Tensor:
        """Of the file, which is mapped, only this part is read. Raises ValueError for a type that is not loadable."""
        tensor: Tensor = self.file.get_slice(self.name)[part] if part else self.file.get_tensor(self.name)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise ValueError(
                f"{self.name} in {self.path} is {tensor.dtype}; only float32, bfloat16 and float16 can be loaded"
            )
        return tensor


def _tensors(path: Path, device: torch.device) -> Iterator[tuple[str, _StoredTensor]]:
    """While the iterator lasts, so does the open file."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict: it has no iterator
                yield name, _StoredTensor(name, path, file)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); fetch it again") from error


def complain(folder: Path, what: str, names: list[str]) -> None:
    """Raises ValueError if there are any."""
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise ValueError(
            f"the checkpoint in {folder} {what} tensors: {shown}; config and weights are not the same model's"
        )
