"""A model's weights with its projections in 4 or 8 bits: rounded as they are loaded, or stored so.

Knows which tensors are projections, and which kinds of checkpoints there are; not how each of them stores blocks.
"""

from __future__ import annotations

from pathlib import Path

import torch

from engine.devices import CPU
from engine.model_config import ModelConfig
from engine.quantisation import Quantisation
from engine.weights import AnyWeights, MixedWeights, load_weights, require_loadable, stored_tensors


def load_mixed_weights(
    folder: Path,
    config: ModelConfig,
    quantisation: Quantisation | None,
    *,
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> AnyWeights:
    """Every tensor of the model. Raises ValueError: see `load_weights` and `Quantisation.quantise`."""
    if quantisation is None:
        return load_weights(folder, config, dtype=dtype, device=device)
    require_loadable(dtype)
    weights: MixedWeights = {}
    for name, tensor in stored_tensors(folder, config, device=CPU):
        if is_projection(name):
            weights[name] = quantisation.quantise(tensor)
        else:
            weights[name] = tensor.to(device, dtype).contiguous()
        if config.tied_embeddings and name == "model.embed_tokens.weight":
            weights["lm_head.weight"] = quantisation.quantise(tensor)
    return weights


def is_projection(name: str) -> bool:
    """Whether a tensor of this name is multiplied with activations, and so may be quantised."""
    return name.endswith("_proj.weight") or name == "lm_head.weight"


def require_whole(folder: Path, quantisation: Quantisation | None) -> None:
    """Raises ValueError where the model is quantised, for who would divide it."""
    if quantisation is not None:
        raise ValueError(
            f"a model in {quantisation.name} cannot be divided among processes yet: set tensor_parallel to 1, or leave"
            " model.quantization out"
        )
