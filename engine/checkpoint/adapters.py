"""LoRA adapters as PEFT saves them: a folder with `adapter_config.json` and `adapter_model.safetensors`.

Read, checked against the model that they are for, and named by a digest of what they hold. What cannot be computed
exactly is refused in a sentence. Nothing but safetensors is ever opened.

An adapter adds `scale * B(A(x))` to projections of `x`: `A [rank, in]`, `B [out, rank]` (arXiv:2106.09685, section
4.1).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from engine.checkpoint.stacked_tensors import fused_parts
from engine.checkpoint.weights import LOADABLE_DTYPES, expected_shapes
from engine.model.config import ModelConfig

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"
_PICKLE_NAME: Final = "adapter_model.bin"
_LOADABLE: Final = ("F32", "BF16", "F16")  # `LOADABLE_DTYPES`, as files call them

# Says nothing of what the adapter computes, or is looked at below; of any other field only what is false, or nothing.
_HARMLESS: Final = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
# Ways to begin that leave the model's own weights as they are.
_BEGINNINGS: Final = (True, False, None, "gaussian", "eva", "orthogonal")

_TENSOR: Final = re.compile(r"base_model\.model\.(model\.layers\.\d+\.\w+\.\w+)\.lora_([AB])\.weight")
_ADAPTED: Final = re.compile(r"model\.layers\.\d+\.\w+\.\w+_proj\.weight")
_PROJECTIONS: Final = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj"


@dataclass(frozen=True, slots=True)
class LowRankWeights:
    """What an adapter adds to one projection: `up @ (down @ x)`."""

    down: Tensor  # [rank, in]
    up: Tensor  # [out, rank], with the scale


AdapterWeights = Mapping[str, LowRankWeights]
"""By the projections' names in the model, such as `model.layers.0.self_attn.q_proj`."""


def adapter_digest(folder: Path) -> str:
    """SHA-256 of the adapter's two files: equal for equal adapters, and for no others. Raises ValueError where the
    folder holds no adapter."""
    digest = hashlib.sha256()
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        path = _file(folder, name)
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def check_adapter(folder: Path, model: ModelConfig, max_rank: int) -> None:
    """Raises ValueError as `read_adapter` does, for what can be told without reading the weights."""
    _config(folder, model)
    path = _file(folder, WEIGHTS_NAME)
    with _in_words(path), safe_open(path, framework="pt") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict: it has no iterator
        stored = {name: _Stored(part.get_dtype() in _LOADABLE, part.get_shape()) for name, part in parts.items()}
    _modules(folder, stored, model, max_rank)


def read_adapter(folder: Path, model: ModelConfig, max_rank: int, dtype: torch.dtype) -> AdapterWeights:
    """All weights of an adapter for this model, in its type. Raises ValueError where the folder holds none, or one that
    cannot be computed exactly."""
    config, path = _config(folder, model), _file(folder, WEIGHTS_NAME)
    with _in_words(path):
        tensors = load(path.read_bytes())  # not mapped: whoever writes over the file would write into what is loaded
    stored = {name: _Stored(one.dtype in LOADABLE_DTYPES, list(one.shape)) for name, one in tensors.items()}
    found: dict[str, LowRankWeights] = {}
    shapes = expected_shapes(model)
    for module in _modules(folder, stored, model, max_rank):
        down, up = (tensors[_tensor_name(module, part)] for part in "AB")
        scaled = (up if up.dtype == dtype else up.float()) * _scale(config, module, rank=len(down))
        for part, rows in fused_parts(f"{module}.weight", shapes).items():
            found[part.removesuffix(".weight")] = LowRankWeights(down.to(dtype), scaled[rows].to(dtype))
    return found


def largest_adapter_bytes(model: ModelConfig, max_rank: int, dtype: torch.dtype) -> int:
    """The most memory that an adapter may take: one of the largest rank, for all projections that there are adapters
    for."""
    adapted = (shape for name, shape in expected_shapes(model).items() if _ADAPTED.fullmatch(name))
    return sum(map(sum, adapted)) * max_rank * dtype.itemsize


class _Stored(NamedTuple):
    """What a file says of a tensor."""

    is_loadable: bool  # of a type that can be loaded
    shape: list[int]


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    """Raises ValueError in place of what reading the weights may raise."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); fetch it again") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _file(folder: Path, name: str) -> Path:
    path = folder / name
    if path.is_file():
        return path
    if name == WEIGHTS_NAME and (folder / _PICKLE_NAME).exists():
        raise ValueError(
            f"the adapter in {folder} is a pickle, {_PICKLE_NAME}, which is never opened; save it as {WEIGHTS_NAME}"
        )
    raise ValueError(f"{folder} holds no {name}; an adapter is a folder with {CONFIG_NAME} and {WEIGHTS_NAME}")


def _config(folder: Path, model: ModelConfig) -> Mapping[str, Any]:
    if model.latent is not None:
        raise ValueError(
            f"the adapter in {folder} is for a model whose attention is by a latent, {model.architecture}, for which"
            " adapters are not computed"
        )
    path = _file(folder, CONFIG_NAME)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}); fetch it again") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise ValueError(f"the adapter in {folder} is of the kind {kind!r}; only LORA is computed")
    if config.get("bias", "none") != "none":
        raise ValueError(f"the adapter in {folder} has biases (bias: {config['bias']!r}), which are not computed")
    if config.get("init_lora_weights", True) not in _BEGINNINGS:
        raise ValueError(
            f"the adapter in {folder} was begun by {config['init_lora_weights']!r}, which changes the model's own"
            " weights; save it converted to a plain LoRA (PEFT's path_initial_model_for_weight_conversion)"
        )
    if unknown := sorted(name for name, value in config.items() if value and name not in _HARMLESS):
        raise ValueError(
            f"the adapter in {folder} sets {unknown[0]}, which is not computed; train a plain LoRA without it"
        )
    _check_scales(folder, config)
    return config


def _check_scales(folder: Path, config: Mapping[str, Any]) -> None:
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or not all(re.fullmatch(r"[\w.]+", key) for key in patterns):
        raise ValueError(
            f"the adapter in {folder} has an alpha_pattern that is not by modules' names, such as q_proj; write it so"
        )
    for alpha in (config.get("lora_alpha"), *patterns.values()):
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= sys.float_info.max:
            raise ValueError(
                f"the adapter in {folder} has the lora_alpha {alpha!r}, which is no number; fetch it again"
            )


def _modules(folder: Path, stored: Mapping[str, _Stored], model: ModelConfig, max_rank: int) -> list[str]:
    """The projections that a file's tensors are for, each with both of its parts. Raises ValueError for what is not for
    this model."""
    modules: dict[str, None] = {}
    for name, tensor in stored.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ValueError(
                f"the adapter in {folder} has the tensor {name[:200]}, which is of no projection that adapters are"
                f" computed for: {_PROJECTIONS} of a model's layers"
            )
        if not tensor.is_loadable:
            raise ValueError(
                f"the adapter in {folder} has another type than float32, bfloat16 and float16 for {match[1]}; only"
                " these can be loaded"
            )
        modules[match[1]] = None
    lacking = {_tensor_name(module, part) for module in modules for part in "AB"} - stored.keys()
    if lacking or not modules:
        raise ValueError(f"the adapter in {folder} lacks {min(lacking, default='any tensor')}; fetch it again")
    shapes = expected_shapes(model)
    for module in modules:
        down, up = (stored[_tensor_name(module, part)].shape for part in "AB")
        parts = [shapes[part] for part in fused_parts(f"{module}.weight", shapes) if part in shapes]
        projection = (sum(rows for rows, *_ in parts), parts[0][-1]) if parts else None
        _check_shapes(folder, module, down, up, projection, max_rank)
    return list(modules)


def _tensor_name(module: str, part: str) -> str:
    return f"base_model.model.{module}.lora_{part}.weight"


def _check_shapes(
    folder: Path,
    module: str,
    down: list[int],
    up: list[int],
    projection: tuple[int, ...] | None,
    max_rank: int,
) -> None:
    if projection is None or not module.endswith("_proj"):
        raise ValueError(
            f"the adapter in {folder} is for {module}, which the model does not have or which adapters are not computed"
            f" for: they are for {_PROJECTIONS}"
        )
    rank = down[0] if down else 0
    if rank < 1 or down != [rank, projection[1]] or up != [projection[0], rank]:
        raise ValueError(
            f"the adapter in {folder} has the shapes {down} and {up} for {module}, which is {list(projection)} in this"
            " model; it is for another one"
        )
    if rank > max_rank:
        raise ValueError(
            f"the adapter in {folder} has the rank {rank}, more than the {max_rank} of adapters.max_rank; raise that"
        )


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """The scale of one projection, as PEFT has it: a pattern names modules by the end of their names, and the first one
    counts."""
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    matching = (alpha for key, alpha in patterns.items() if f".{module}".endswith(f".{key}"))
    alpha = next(matching, config["lora_alpha"])
    return float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)
