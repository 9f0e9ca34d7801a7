"""Slabs in memory of a GPU that a peer on the same one maps: `engine.memory.gpu`, as links need it."""

from __future__ import annotations

import os
import secrets

import torch
from torch import Tensor

from engine.memory.gpu import GpuMemory, GpuMemoryError
from kv_transfer.messages import SegmentOffer
from kv_transfer.transports.shared_memory.segment import SegmentError


class CudaAllocation:
    """Memory of this process; freed with the last mapping of it, here or there."""

    def __init__(self, view: Tensor, file: int) -> None:
        self.view = view
        self.name = f"legato-{secrets.token_hex(16)}"
        self.file = file

    def close_file(self) -> None:
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def close(self) -> None:
        self.close_file()
        self.view = self.view[:0].clone()


class CudaMemory:
    """Of one GPU, which another process can map if it uses the same one."""

    def __init__(self, device: torch.device) -> None:
        self.place = f"cuda {torch.cuda.get_device_properties(device).uuid}"
        self._memory = GpuMemory(device)

    def allocate(self, num_bytes: int) -> CudaAllocation:
        try:
            return CudaAllocation(*self._memory.allocate(num_bytes))
        except GpuMemoryError as error:
            raise SegmentError(str(error)) from error

    def map(self, file: int, offer: SegmentOffer) -> Tensor:
        try:
            return self._memory.map(file, offer.num_bytes)
        except GpuMemoryError as error:
            raise SegmentError(str(error)) from error
