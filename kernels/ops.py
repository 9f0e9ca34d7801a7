"""Picks the kernels of a device, once."""

from __future__ import annotations

import torch

from kernels import cpu, reference
from kernels.interface import Kernels


def kernels_for(device: torch.device) -> Kernels:
    """The fastest kernels that exist for `device`; the plain-torch ones where no others do."""
    return cpu if device.type == "cpu" else reference
