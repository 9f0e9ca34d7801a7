"""Memory for slabs that only this process uses, on whichever device they are to lie, and slabs as tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from kv_transfer.transports.base import SlabBytes
from kv_transfer.transports.slab_pool import SlabConfig, private_arena


def arena_on(device: torch.device, config: SlabConfig) -> SlabBytes:
    """Freed with the last view of it."""
    if device.type == "cpu":
        return private_arena(config)
    return torch.empty(config.arena_bytes, dtype=torch.uint8, device=device)


def as_tensor(view: SlabBytes) -> Tensor:
    """Its bytes `[num_bytes]`, uint8, without a copy; the memory lives as long as the tensor."""
    return view if isinstance(view, Tensor) else torch.frombuffer(view, dtype=torch.uint8)
