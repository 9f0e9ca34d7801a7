"""A checkpoint of a given shape with random weights: what is timed where no real one of that size is at hand.

It is written once, to memory if that has room, and read by every engine that is compared: the same weights for all.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoint.weights import expected_shapes
from engine.cost_model.roofline import LLAMA_3_1_8B, ModelShape
from engine.model.config import ModelConfig
from engine.steps.loading import DtypeName, EngineConfig

_FILE_BYTES = 4 << 30  # of one file; host memory holds the tensors of one at a time
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModel:
    """`spread`: the weights' standard deviation, such that hidden states neither vanish nor explode."""

    shape: ModelShape
    max_tokens: int = 131_072
    spread: float = 0.02
    dtype: torch.dtype = torch.bfloat16

    @property
    def dtype_name(self) -> DtypeName:
        return "float32" if self.dtype == torch.float32 else "bfloat16"


LLAMA_8B = RandomModel(shape=LLAMA_3_1_8B)


def small_model(
    name: str,
    *,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    vocab_size: int,
    tied_embeddings: bool = True,
    max_tokens: int = 8192,
    spread: float = 0.05,
) -> RandomModel:
    """A model in float32, for checks of what is computed. A hidden state is as wide as the heads together."""
    shape = ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=num_heads * head_dim,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        tied_embeddings=tied_embeddings,
        bytes_per_value=4,
    )
    return RandomModel(shape=shape, max_tokens=max_tokens, spread=spread, dtype=torch.float32)


def engine_config(model: RandomModel, device: torch.device) -> EngineConfig:
    """What loads it, its checkpoint made if there is none. How large its KV is, `dataclasses.replace` adds."""
    return EngineConfig(
        model_ref=str(checkpoint(model, device)),
        model_name=model.shape.name,
        dtype=model.dtype_name,
        device=str(device),
    )


def checkpoint(model: RandomModel, device: torch.device) -> Path:
    """The model's folder, made if there is none. Two that make it at once both succeed."""
    kept = kept_checkpoint(model)
    if kept is not None:
        return kept
    folder = _folder_of(model)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=folder.parent))
    try:
        write_checkpoint(part, model, device)
        part.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def kept_checkpoint(model: RandomModel) -> Path | None:
    """The model's folder, if there is one."""
    folder = _folder_of(model)
    return folder if folder.exists() else None


def forget_checkpoints() -> None:
    """Remove the folders of all models, with the memory or disk space that they take."""
    for folder in {_folder_in(_MEMORY), _folder_in(Path(tempfile.gettempdir()))}:
        shutil.rmtree(folder, ignore_errors=True)


def write_checkpoint(folder: Path, model: RandomModel, device: torch.device) -> None:
    """Write a checkpoint whose weights are drawn on `device`, and whose norms are ones."""
    (folder / "config.json").write_text(json.dumps(_hugging_face_config(model), indent=1))
    (folder / "tokenizer.json").write_text("{}")  # a checkpoint must have one; nothing here is text
    names: dict[str, str] = {}
    for number, tensors in enumerate(_files(folder, model, device), start=1):
        name = f"model-{number:05}.safetensors"
        save_file(tensors, folder / name)
        names |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def _files(folder: Path, model: RandomModel, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """The tensors of one file after the other."""
    generator = torch.Generator(device).manual_seed(0)
    config = ModelConfig.from_folder(folder)
    tensors: dict[str, Tensor] = {}
    num_bytes = 0
    for name, sizes in expected_shapes(config).items():
        size = math.prod(sizes) * model.dtype.itemsize
        if tensors and num_bytes + size > _FILE_BYTES:
            yield tensors
            tensors, num_bytes = {}, 0
        weight = torch.ones(sizes, dtype=model.dtype, device=device)
        if len(sizes) > 1:
            weight.normal_(0.0, model.spread, generator=generator)
        tensors[name] = weight.cpu()
        num_bytes += size
    yield tensors


def _hugging_face_config(model: RandomModel) -> dict[str, object]:
    shape = model.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": model.dtype_name,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": model.max_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied_embeddings,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }


def _folder_of(model: RandomModel) -> Path:
    return _place(model.shape.weight_bytes) / model.shape.name


def _place(num_bytes: int) -> Path:
    """Where to keep a checkpoint: in memory if it takes at most half of what is free there."""
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= 2 * num_bytes:
        return _folder_in(_MEMORY)
    return _folder_in(Path(tempfile.gettempdir()))


def _folder_in(parent: Path) -> Path:
    return parent / f"gpu-check-models-{os.getuid()}"
