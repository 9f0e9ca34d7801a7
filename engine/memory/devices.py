"""Where a model computes: a device is named by a setting, and is there or is not."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Final, cast

import numpy as np
import torch

CPU = torch.device("cpu")

Unpin = Callable[[], None]
Pin = Callable[[memoryview], Unpin]
"""Keep mapped memory where it is until `Unpin` is called, once. Raises RuntimeError where that cannot be."""

# cudaHostRegisterReadOnly of the CUDA runtime, since 11.1: what is mapped read-only can be registered in no other way,
# and with it only where the device's attribute HostRegisterReadOnlySupported is 1.
_REGISTER_READ_ONLY: Final = 0x08
_OLDEST_MAJOR: Final = 8  # of compute capabilities: the first with bfloat16 and copies to shared memory


def require_device(name: str) -> torch.device:
    """The device of that name, `cpu` or `cuda:0`. Raises ValueError, with advice, where it cannot be computed on."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name!r} is no device; models run on cpu or on cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name!r} is no device that models run on; give cpu or cuda:0")
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
    if device.index:  # kernels are launched on the device that is current, which is the first one in every thread
        raise ValueError(f"the model is to run on {device}: make it this process's first GPU by CUDA_VISIBLE_DEVICES")
    major, minor = torch.cuda.get_device_capability(device)
    if major < _OLDEST_MAJOR:
        raise ValueError(
            f"the model is to run on {device}, a GPU of compute capability {major}.{minor}: there are kernels for"
            f" {_OLDEST_MAJOR}.0 (A100) and later; set num_gpus to 0 to compute on the CPU"
        )


def pinning_for(device: torch.device) -> Pin | None:
    """How mappings are pinned that `device` copies from or to; None where there is nothing to pin them for."""
    return functools.partial(_pin_view, device) if device.type == "cuda" else None


def _pin_view(device: torch.device, view: memoryview) -> Unpin:
    """The result holds the address alone, or the mapping would never end."""
    address = int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
    try:
        _register(address, view.nbytes, _REGISTER_READ_ONLY if view.readonly else 0)
    except RuntimeError:
        # The runtime remembers its last error in this thread, and the next launch here would be blamed for it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)
        raise
    return functools.partial(_unregister, address)


def _register(address: int, num_bytes: int, flags: int) -> None:
    cuda = cast(Any, torch.cuda)  # untyped there
    cuda.check_error(int(cuda.cudart().cudaHostRegister(address, num_bytes, flags)))


def _unregister(address: int) -> None:
    cuda = cast(Any, torch.cuda)
    cuda.check_error(int(cuda.cudart().cudaHostUnregister(address)))
