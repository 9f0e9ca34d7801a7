"""Slabs of a cache on a GPU: moved and digested there in one pass, and copied over the link to or from host memory.

Imported only where there is such a cache, since the kernels need Triton. What is read must have been written, and what
is written must not be read any more, for the stream that is current in the calling thread; each function returns when
its work has been done.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.kv_cache import KVCache
from kernels.block_digest import as_digest
from kernels.slabs import gather_slab, scatter_slab
from kv_transfer.digest import DigestKind, slab_digest


def fill_from_device(
    kv_cache: KVCache,
    group_row: npt.NDArray[np.int32],
    layer: int,
    start: int,
    host_slab: torch.Tensor,
    kind: DigestKind,
) -> int:
    """Gather a layer's tokens from `start` on into `host_slab [2, n, H, D]` and return its digest.

    Of the GPU's kind it is of what was read on the device, so that it also tells damage on the way to the host.
    """
    slab = torch.empty_like(host_slab, device=kv_cache.tensor.device)
    table = _table(kv_cache, group_row)
    digest = gather_slab(kv_cache.layer_rows(layer), kv_cache.layout.geometry, table, start, slab)
    host_slab.copy_(slab)
    return as_digest(digest) if kind == "row_sum_64" else slab_digest(_bytes_of(host_slab), kind)


def land_on_device(
    kv_cache: KVCache,
    group_row: npt.NDArray[np.int32],
    layer: int,
    start: int,
    host_slab: torch.Tensor,
    kind: DigestKind,
) -> int:
    """Scatter `host_slab [2, n, H, D]` to a layer's tokens from `start` on; the digest of what stands there then."""
    slab = host_slab.to(kv_cache.tensor.device)
    table, rows, geometry = _table(kv_cache, group_row), kv_cache.layer_rows(layer), kv_cache.layout.geometry
    digest = scatter_slab(slab, rows, geometry, table, start)
    if kind == "row_sum_64":
        return as_digest(digest)
    landed = torch.empty_like(slab)
    gather_slab(rows, geometry, table, start, landed)
    return slab_digest(_bytes_of(landed.cpu()), kind)


def _table(kv_cache: KVCache, group_row: npt.NDArray[np.int32]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(group_row)).to(kv_cache.tensor.device)


def _bytes_of(host_slab: torch.Tensor) -> memoryview:
    content: memoryview = host_slab.view(torch.uint8).numpy().data
    return content
