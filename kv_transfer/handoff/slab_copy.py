"""Between KV blocks and slabs: gather and digest on the way out, scatter and digest on the way in.

A slab holds one layer's tokens as `[planes, num_tokens, num_kv_heads, head_dim]`, K before V, whatever blocks they
come from, so the two ends may differ in block size and in layers per group. Bytes are moved, never converted. Slabs and
blocks may be in memory of the host or on a GPU (`kv_transfer.handoff.gpu_slab_copy`). The drivers call both ways on the
KV loop, or, where a device has to be waited for, in `copying_threads`.

Shapes: p planes, n tokens, H = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engine.kv.cache import KVCache, SequenceKV
from engine.memory.streams import Event
from engine.parallel.kv import GroupKV
from kernels.cpu.thread_team import work_alone
from kv_transfer.digest import DigestKind, slab_digest
from kv_transfer.transports.base import SlabBytes

COPIES_AT_ONCE: Final = 2
"""Of one direction. While one crosses the link, the next is told to the device, gathered, and queued behind it."""


def fill_slab(
    kv_cache: SequenceKV,
    group_row: npt.NDArray[np.int32],
    layer: int,
    start: int,
    count: int,
    view: SlabBytes,
    kind: DigestKind = "xxh3_64",
    *,
    after: Event | None = None,
) -> int:
    """Gather tokens [start, start + count) of a layer into a slab and return the digest of the slab's bytes.

    `group_row` is the block-table row of the layer's group; `after`: a device has stored the tokens. Raises ValueError
    if the slab has another size.
    """
    slab_pnHD = _as_slab(kv_cache, count, view)
    if kv_cache.device.type != "cpu":
        from kv_transfer.handoff.gpu_slab_copy import copies_on

        assert isinstance(kv_cache, KVCache | GroupKV), f"{type(kv_cache).__name__} lies on no device"
        return copies_on(kv_cache.device).fill(kv_cache, group_row, layer, start, slab_pnHD, kind, after)
    if after is not None:
        after.wait()
    host_pnHD = slab_pnHD if slab_pnHD.device == kv_cache.device else torch.empty_like(slab_pnHD, device="cpu")
    kv_cache.read_layer(layer, group_row, start, count, host_pnHD)
    if host_pnHD is not slab_pnHD:
        slab_pnHD.copy_(host_pnHD)
    return slab_digest(bytes_of(host_pnHD), kind)


def write_slab(
    kv_cache: SequenceKV,
    group_row: npt.NDArray[np.int32],
    layer: int,
    start: int,
    count: int,
    payload: SlabBytes,
    kind: DigestKind = "xxh3_64",
    *,
    after: Event | None = None,
) -> int:
    """Copy a slab into the blocks of `group_row` and return the digest of what stands in those blocks afterwards.

    The digest is of bytes read back from the destination, so whatever went wrong on the way, a payload that changed
    while it was read included, shows. `after`: a device no longer uses the blocks for what was in them before.
    Raises ValueError, having written nothing, if the payload has another size.
    """
    slab_pnHD = _as_slab(kv_cache, count, payload)
    if kv_cache.device.type != "cpu":
        from kv_transfer.handoff.gpu_slab_copy import copies_on

        assert isinstance(kv_cache, KVCache | GroupKV), f"{type(kv_cache).__name__} lies on no device"
        return copies_on(kv_cache.device).write(kv_cache, group_row, layer, start, slab_pnHD, kind, after)
    if after is not None:
        after.wait()
    kv_cache.write_layer(layer, group_row, start, slab_pnHD.to(kv_cache.device))
    written_pnHD = torch.empty(kv_cache.layout.slab_shape(count), dtype=kv_cache.layout.dtype)
    kv_cache.read_layer(layer, group_row, start, count, written_pnHD)
    return slab_digest(bytes_of(written_pnHD), kind)


def bytes_of(host_pnHD: torch.Tensor) -> memoryview:
    """What a digest is taken of; also in `gpu_slab_copy`."""
    content: memoryview = host_pnHD.view(torch.uint8).numpy().data
    return content


def _as_slab(kv_cache: SequenceKV, count: int, view: SlabBytes) -> torch.Tensor:
    """The buffer as a [p, n, H, D] tensor, without a copy; the caller keeps `view` alive while it uses the tensor."""
    expected = count * kv_cache.layout.bytes_per_token_layer
    if view.nbytes != expected:
        raise ValueError(
            f"a slab of {count} tokens of one layer has {expected} bytes, but the buffer has {view.nbytes}:"
            " header and payload do not belong together"
        )
    if isinstance(view, torch.Tensor):
        return view.view(kv_cache.layout.dtype).view(kv_cache.layout.slab_shape(count))
    # By address, since torch has no read-only tensors and warns about each read-only buffer; a payload is only read.
    address = np.frombuffer(view, dtype=np.uint8).ctypes.data
    raw = (ctypes.c_uint8 * expected).from_address(address)
    return torch.frombuffer(raw, dtype=kv_cache.layout.dtype).view(kv_cache.layout.slab_shape(count))


def copying_threads(name: str) -> ThreadPoolExecutor:
    """Threads that wait for a device's copies, so that no event loop does: some of `KvSender`, some of `KvReceiver`.

    They begin jobs in the order they came, and run `COPIES_AT_ONCE` of them beside each other; each may end first.
    """
    return ThreadPoolExecutor(COPIES_AT_ONCE, name, initializer=work_alone)
