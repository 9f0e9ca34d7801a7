"""From the weights of a checkpoint to the projections of a model: those of one input are packed as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.interface import Kernels, Linear
from kernels.quantised_weight import QuantisedWeight, side_by_side


def pack_projections(
    kernels: Kernels, weights: Sequence[Tensor | QuantisedWeight], bias: Tensor | None, dtype: torch.dtype
) -> Linear:
    """Their outputs side by side, of activations of `dtype`. Where only some are quantised, none is any more."""
    quantised = [weight for weight in weights if isinstance(weight, QuantisedWeight)]
    if len(quantised) == len(weights):
        return kernels.pack_quantised(side_by_side(quantised), bias, dtype)
    device = next((weight.device for weight in weights if isinstance(weight, Tensor)), None)
    tensors = [
        weight.dequantise(dtype).to(device) if isinstance(weight, QuantisedWeight) else weight for weight in weights
    ]
    # An output layer may lie where the embedding lies: no copy of a single one.
    return kernels.pack_linear(tensors[0] if len(tensors) == 1 else torch.cat(tensors), bias)
