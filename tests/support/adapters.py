"""Random LoRA adapters as PEFT saves them, and what Hugging Face generates with one merged into the model."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.checkpoint.adapters import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    AdapterFiles,
    AdapterLayout,
    AdapterReader,
    adapter_digest,
    tensors_in,
)
from engine.checkpoint.weights import expected_shapes
from engine.model.config import ModelConfig
from tests.support.decoders import greedy_tokens, logits_behind

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FUSED = ("qkv_proj", "gate_up_proj")  # as some families have them
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj", *_FUSED)


def write_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int,
    rank: int = 4,
    targets: Sequence[str] = ALL,
    layers: Sequence[int] | None = None,
    size: float = 0.4,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """For the model in a folder; `config` changes fields of the adapter's. Large enough to change what is generated."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in _shapes(model).items():
        module = name.removesuffix(".weight")
        is_wanted = module.rpartition(".")[2] in targets and ".experts." not in module
        if is_wanted and (layers is None or int(module.split(".")[2]) in layers):
            for part, part_shape in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                values = torch.randn(part_shape, generator=generator) * size / math.sqrt(part_shape[1])
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = values.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_NAME, {"format": "pt"})
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    (folder / CONFIG_NAME).write_text(json.dumps(told | config))
    return folder


class LowRankWeights(NamedTuple):
    """What an adapter adds to one projection: `up @ (down @ x)`."""

    down: torch.Tensor  # [rank, in]
    up: torch.Tensor  # [out, rank], with the scale


def weights_in(files: AdapterFiles, layout: AdapterLayout, dtype: torch.dtype) -> dict[str, LowRankWeights]:
    """By the projections' names in the model."""
    tensor = tensors_in(files.tensors[layout.start :], dtype)
    return {name: LowRankWeights(tensor(one.down), tensor(one.up)) for name, one in layout.projections.items()}


def adapter_files(folder: Path) -> AdapterFiles:
    with ThreadPoolExecutor(1) as beside:
        return AdapterFiles.read(folder, beside)


def read_adapter(folder: Path, model: ModelConfig, max_rank: int, dtype: torch.dtype) -> dict[str, LowRankWeights]:
    """All weights of an adapter for this model, in its type."""
    files = adapter_files(folder)
    return weights_in(files, AdapterReader(model, max_rank).layout(files), dtype)


@functools.cache
def _shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """Of the tensors of a model, its projections as transformers has them."""
    expected = expected_shapes(ModelConfig.from_folder(model))
    stored = load_file(model / "model.safetensors")
    fused = {name: tuple(weight.shape) for name, weight in stored.items() if name.split(".")[-2] in _FUSED}
    return {name: shape for name, shape in expected.items() if not fused or name in stored} | fused


_said: dict[tuple[Path, Path | None, str | None, tuple[int, ...], int], list[int]] = {}


def merged_tokens(
    model: Path, adapter: Path | None, prompt: list[int], num_tokens: int, guess: Sequence[int] = ()
) -> list[int]:
    """Greedy, of the merged model; None: of the model alone. Once for each content of the adapter's folder; soonest
    where the guess is right (`greedy_tokens`)."""
    digest = None if adapter is None else adapter_digest(adapter)
    key = model, adapter, digest, tuple(prompt), num_tokens
    if key not in _said:
        _said[key] = greedy_tokens(_merged(model, adapter, digest), prompt, num_tokens, guess)
    return list(_said[key])


def is_what_the_model_says(model: Path, prompt: list[int], tokens: list[int]) -> bool:
    """Greedily, and without any adapter."""
    return logits_behind(_merged(model, None, None), prompt, tokens).argmax(-1).tolist() == tokens


@functools.lru_cache(maxsize=8)
def _merged(model: Path, adapter: Path | None, digest: str | None) -> Any:
    """Hugging Face's model in float32 with `W + scale * B A` in place of each W, as PEFT merges."""
    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made.generation_config.eos_token_id = None
    if adapter is None:
        return made
    tensors, config = load_file(adapter / WEIGHTS_NAME), json.loads((adapter / CONFIG_NAME).read_text())
    for name, down in tensors.items():
        if ".lora_A." not in name:
            continue
        up = tensors[name.replace(".lora_A.", ".lora_B.")]
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        alphas = config.get("alpha_pattern", {})
        alpha = next((alphas[key] for key in alphas if module.endswith(f".{key}")), config["lora_alpha"])
        scale = alpha / (math.sqrt(len(down)) if config.get("use_rslora") else len(down))
        with torch.no_grad():
            made.get_submodule(module).weight += scale * up.float() @ down.float()
    return made
