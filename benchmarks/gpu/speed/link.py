"""`python -m benchmarks.gpu.speed.link`: slabs to and from pinned memory of the host, beside the link's own rate.

The whole way of a slab over shared memory as workers go it: gathered and digested on the GPU, copied to a segment that
is shared and pinned, waited for by the threads that workers have for it, so that a few are on their way at once. Beside
it stands the rate of one large copy between the same kinds of memory.
"""

from __future__ import annotations

import functools
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.figures import Figure, Report, run_step
from benchmarks.gpu.kernel_cases import LayerShape, filled_cache
from engine.memory.devices import pinning_for
from engine.memory.host import map_memory
from kv_transfer.handoff.gpu_slab_copy import DeviceCopies, copies_on
from kv_transfer.handoff.slab_copy import copying_threads

AIM = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """`slab_tokens`: of one layer; 2,048 tokens of Llama-3.1-8B are the 8 MiB that links have for a slab by default."""

    shape: LayerShape = LayerShape()  # noqa: RUF009 - frozen
    slab_tokens: tuple[int, ...] = (2048, 8192)
    num_slabs: int = 16
    link_bytes: int = 1 << 30
    repeats: int = 5


def measure(report: Report, device: torch.device, scale: Scale = Scale(), copies: DeviceCopies | None = None) -> None:
    """`copies` None: those of the device."""
    out_rate, in_rate = _link_rates(device, scale)
    report.add(Figure(name="link to the host, one large copy", value=out_rate / 1e9, unit="GB/s"))
    report.add(Figure(name="link from the host, one large copy", value=in_rate / 1e9, unit="GB/s"))
    copies = copies or copies_on(device)
    for num_tokens in scale.slab_tokens:
        out_s, in_s, num_bytes = _slab_seconds(device, scale, num_tokens, copies)
        name = f"slab of {num_bytes / 2**20:.3g} MiB"
        report.add(Figure(name=f"{name} to pinned host", value=num_bytes / out_s / 1e9, unit="GB/s"))
        share = num_bytes / out_s / out_rate
        report.add(Figure(name=f"{name} to pinned host, of the link", value=share, unit="share", at_least=AIM))
        share = num_bytes / in_s / in_rate
        report.add(Figure(name=f"{name} from pinned host, of the link", value=share, unit="share"))


def pinned_segment(num_bytes: int, device: torch.device) -> Tensor:
    """Bytes of a shared segment, as links have them: pinned for the device, unpinned with the last view."""
    descriptor = os.memfd_create("gpu-check-link")
    try:
        os.ftruncate(descriptor, num_bytes)
        view = map_memory(descriptor, num_bytes, pinning_for(device), flags=mmap.MAP_SHARED)
    finally:
        os.close(descriptor)
    return torch.frombuffer(view, dtype=torch.uint8)


def _link_rates(device: torch.device, scale: Scale) -> tuple[float, float]:
    """Bytes per second from the device to the host and back."""
    host = pinned_segment(scale.link_bytes, device)
    there = torch.ones_like(host, device=device)
    out_s = _seconds(lambda: host.copy_(there, non_blocking=True), device, scale.repeats)
    in_s = _seconds(lambda: there.copy_(host, non_blocking=True), device, scale.repeats)
    return scale.link_bytes / out_s, scale.link_bytes / in_s


def _slab_seconds(
    device: torch.device, scale: Scale, num_tokens: int, copies: DeviceCopies
) -> tuple[float, float, int]:
    """Seconds of one slab out and in, of many that follow each other, each in a place of its own; and its bytes."""
    shape = scale.shape
    cache, table = filled_cache(shape, device, 1, num_tokens)
    row = np.ascontiguousarray(table[0])
    num_bytes = 2 * num_tokens * shape.num_kv_heads * shape.head_dim * shape.itemsize
    segment = pinned_segment(scale.num_slabs * num_bytes, device).view(shape.dtype)
    slabs = segment.view(scale.num_slabs, 2, num_tokens, shape.num_kv_heads, shape.head_dim)

    threads = copying_threads("link")

    def all_slabs(copy: Callable[..., int]) -> None:
        jobs = [functools.partial(copy, cache, row, 0, 0, slab, "row_sum_64") for slab in slabs]
        for copied in [threads.submit(job) for job in jobs]:
            copied.result()

    out_s, in_s = (
        _seconds(functools.partial(all_slabs, copy), device, scale.repeats) / scale.num_slabs
        for copy in (copies.fill, copies.write)
    )
    threads.shutdown(wait=False)
    return out_s, in_s, num_bytes


def _seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median of the host's clock, until the device is done; the first is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        _synchronise(device)
        started = time.perf_counter()
        run()
        _synchronise(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(run_step("link", measure))
