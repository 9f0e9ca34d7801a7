"""Where a model computes: a device is named by a setting, and is there or is not. Knows nothing of models."""

from __future__ import annotations

from typing import Any, cast

import torch

CPU = torch.device("cpu")


def require_device(name: str) -> torch.device:
    """The device of that name, `cpu` or `cuda:N`. Raises ValueError, with advice, where it cannot be computed on."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name!r} is no device; models run on cpu or on cuda:0, cuda:1, ...") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name!r} is no device that models run on; give cpu or cuda:0, cuda:1, ...")
    if device.type == "cuda":
        _require_gpu(device)
    return device


def _require_gpu(device: torch.device) -> None:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not num_gpus:
        raise ValueError(
            f"the model is to run on {device}, but torch {torch.__version__} sees no GPU on this machine: install a"
            " build of torch for CUDA with a driver to match, or set num_gpus to 0 to compute on the CPU"
        )
    if (device.index or 0) >= num_gpus:
        raise ValueError(f"the model is to run on {device}, but torch sees {num_gpus} GPUs here, cuda:0 to the last")


def pin(host: torch.Tensor, device: torch.device) -> None:
    """Keep memory of the host where it is, so that `device` copies from and to it by itself; does nothing for a CPU.

    Also for memory that other processes share. It stays pinned as long as this process has it mapped.
    """
    if device.type == "cuda":
        cuda = cast(Any, torch.cuda)  # untyped there
        cuda.check_error(int(cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)))
