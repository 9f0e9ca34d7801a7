"""Whole blocks from one cache to another, wherever either lies: the host's pinned memory is read and written in place.

Blocks of a sequence lie here and there in both caches, and a copy engine takes one command for each stretch. A kernel
takes one for all. It must leave the multiprocessors to what computes meanwhile, and few bytes under way fill the link:
a few programs take turns.

The plain twin is `kernels.reference.copy_blocks`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.shipped import Shipped

# Words under way: 16 programs of 16 KiB are 256 KiB, three times what a link of 55 GB/s moves in the 1.5 us that a read
# of the host's memory takes (PCIe 5.0 x16; to be measured).
_NUM_PROGRAMS = 16
_TILE_WORDS = 2048


@triton.jit(do_not_specialize=["num_blocks"])
def copy_blocks_kernel(source, target, sources, targets, num_blocks, block_words, TILE_WORDS: tl.constexpr):
    """Grid: (programs,), any number. `source`, `target [., block_words]` (int64), `sources`, `targets [num_blocks]`."""
    tiles = tl.cdiv(block_words, TILE_WORDS)
    for tile in range(tl.program_id(0), num_blocks * tiles, tl.num_programs(0)):
        pair = tile // tiles
        word = (tile % tiles) * TILE_WORDS + tl.arange(0, TILE_WORDS)
        live = word < block_words
        read = tl.load(sources + pair).to(tl.int64) * block_words
        written = tl.load(targets + pair).to(tl.int64) * block_words
        tl.store(target + written + word, tl.load(source + read + word, mask=live), mask=live)


def copy_blocks(source: Tensor, sources: Tensor, target: Tensor, targets: Tensor) -> None:
    """Copy blocks `sources [n]` of `source [., W]` to `targets [n]` of `target [., W]`, pairwise; W words (int64) each.

    `sources`, `targets` (int32) lie on the device whose stream is current. So does one of the caches; the other one may
    be the host's, if it is pinned. No block is both read and written, and none is written twice.
    """
    assert source.dtype == target.dtype == torch.int64 and source.shape[1] == target.shape[1]
    assert sources.dtype == targets.dtype == torch.int32 and sources.shape == targets.shape
    if len(sources):
        configuration().launch(
            (min(_NUM_PROGRAMS, len(sources) * triton.cdiv(source.shape[1], _TILE_WORDS)),),
            source=source,
            target=target,
            sources=sources,
            targets=targets,
            num_blocks=len(sources),
            block_words=source.shape[1],
        )


@functools.cache
def configuration() -> Shipped:
    pointers = {"source": "*i64", "target": "*i64", "sources": "*i32", "targets": "*i32"}
    return Shipped(
        name="copy_blocks",
        kernel=copy_blocks_kernel,
        types=pointers | {"num_blocks": "i32", "block_words": "i32"},
        constants={"TILE_WORDS": _TILE_WORDS},
        num_warps=4,
        num_stages=1,
        aligned=frozenset({"block_words"}),
    )


def shipped() -> list[Shipped]:
    return [configuration()]
