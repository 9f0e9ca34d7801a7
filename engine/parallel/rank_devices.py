"""What ranks on GPUs do otherwise than ranks on CPUs: by NCCL, later than they ask for it, and without a deadline.

An act on a GPU returns when it is queued. Whoever waits for a rank that does not come waits on the device, until the
communicator is aborted; so a mark behind what a step has queued tells whether the ranks are still together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, cast

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store  # where they have types

from engine.model.shards import Shard

# Waiting is the stream's, not the thread's; and only the leader aborts, after it has said so to whoever reads results:
# torch's own watchdog would let a step go on, with whatever stands in memory, or end the process.
_NCCL_SETTINGS: Final = {
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


Mark = Callable[[], bool]
"""Of a place in what a device was given to do: whether the device has come to it."""


def require_devices(device: torch.device, degree: int) -> None:
    """Raises ValueError if there are not as many as ranks."""
    if device.type == "cuda" and (present := torch.cuda.device_count()) < (device.index or 0) + degree:
        raise ValueError(
            f"tensor_parallel is {degree}, but torch sees {present} GPUs here, and each rank has one of its own: give"
            f" the pool num_gpus: {degree}, on nodes that have as many, or set tensor_parallel lower"
        )


def rank_device(device: torch.device, rank: int) -> torch.device:
    """Rank 0's is `device`, the others' are those that follow it; all ranks compute on one CPU."""
    return device if device.type == "cpu" else torch.device(device.type, (device.index or 0) + rank)


def use_device(device: torch.device) -> None:
    """Make a device current in the process of a rank, before anything else: kernels run on the device that is
    current."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def add_device_backend(
    ranks: ProcessGroup, store: Store, shard: Shard, device: torch.device, timeout: timedelta
) -> Callable[[], None]:
    """Have `ranks` do by NCCL what it is asked to with tensors on GPUs. The result aborts that, from any thread."""
    if device.type == "cpu":
        return do_nothing
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    with _environment(_NCCL_SETTINGS):
        backend: Any = ProcessGroupNCCL(PrefixStore("nccl", store), shard.rank, shard.degree, options)
    ranks._register_backend(torch.device(device.type), ProcessGroup.BackendType.NCCL, backend)
    abort: Callable[[], None] = backend.abort  # the stub knows none of its methods
    return abort


def mark_on(device: torch.device) -> Mark | None:
    """Behind all that this thread has queued on the device; None where nothing is ever queued."""
    if device.type == "cpu":
        return None
    event: torch.cuda.Event = cast(Any, torch.cuda).Event()  # untyped there
    event.record(torch.cuda.current_stream(device))
    return event.query


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all that this process gave it: other processes' streams know nothing of ours."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def do_nothing() -> None:
    pass


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set variables for what reads its settings from there, once; other groups of this process have others."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
