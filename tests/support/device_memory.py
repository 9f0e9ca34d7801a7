"""Memory that processes map of one another: of the GPU where there is one, else of the host."""

from __future__ import annotations

import torch

from kv_transfer.transports.cuda_ipc import DeviceMemory, SealedMemory


def device_memory() -> DeviceMemory:
    if not torch.cuda.is_available():
        return SealedMemory()
    from kv_transfer.transports.cuda_ipc import CudaMemory

    return CudaMemory(torch.device("cuda", 0))
