"""Quantised blocks of GGUF files, taken apart: codes, scales and minimums as they are stored.

Knows the layouts that ggml's `ggml-common.h` defines; no tensors' names and no files. A row of a weight is a sequence
of blocks, each of a fixed number of inputs.

Shape legend: R rows, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind

from kernels.quantised_weight import CodeFormat, QuantisedWeight

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.int8]
Factors = npt.NDArray[np.float32]

Parts = tuple[Codes, Factors, Factors | None]
"""Codes `[R, B, inputs of a block]`, scales and minimums `[R, B, groups of a block]`."""


@dataclass(frozen=True, slots=True)
class _Format:
    block_bytes: int
    bits: int
    lowest: int
    take_apart: Callable[[Bytes], Parts]  # from [R, B, block_bytes]


def quantised_weight(data: Bytes, kind: Kind) -> QuantisedWeight | None:
    """The quantised weight in `[R, bytes of a row]`. None for a kind that has no such form: who wants its values
    dequantises it."""
    layout = _FORMATS.get(kind)
    if layout is None:
        return None
    rows = len(data)
    codes, scales, minimums = layout.take_apart(data.reshape(rows, -1, layout.block_bytes))
    return QuantisedWeight(
        codes=torch.from_numpy(codes.reshape(rows, -1)),
        scales=torch.from_numpy(scales.reshape(rows, -1)),
        minimums=None if minimums is None else torch.from_numpy(minimums.reshape(rows, -1)),
        bits=layout.bits,
        lowest=layout.lowest,
    )


def form_of(kind: Kind) -> CodeFormat | None:
    """How a weight in such blocks has its codes. None: as `quantised_weight`."""
    layout = _FORMATS.get(kind)
    if layout is None:
        return None
    weight = quantised_weight(np.zeros((1, layout.block_bytes), dtype=np.uint8), kind)
    assert weight is not None
    return weight.form


def _halves(blocks: Bytes, first: int) -> Factors:
    """The float16 that begins at this byte of each block, `[R, B, 1]`."""
    return np.ascontiguousarray(blocks[..., first : first + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """The lower halves of all bytes, then the upper ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _fifth_bits(blocks: Bytes, first: int) -> Bytes:
    """32 bits, the lowest first, each where the fifth bit of a code is."""
    bits = np.unpackbits(blocks[..., first : first + 4], axis=-1, bitorder="little")
    return bits * np.uint8(16)


def _signed(codes: Bytes, zero: int) -> Codes:
    return (codes.astype(np.int16) - zero).astype(np.int8)


def _q4_0(blocks: Bytes) -> Parts:
    return _signed(_nibbles(blocks[..., 2:18]), 8), _halves(blocks, 0), None


def _q4_1(blocks: Bytes) -> Parts:
    return _signed(_nibbles(blocks[..., 4:20]), 0), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: Bytes) -> Parts:
    return _signed(_nibbles(blocks[..., 6:22]) | _fifth_bits(blocks, 2), 16), _halves(blocks, 0), None


def _q5_1(blocks: Bytes) -> Parts:
    codes = _signed(_nibbles(blocks[..., 8:24]) | _fifth_bits(blocks, 4), 0)
    return codes, _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: Bytes) -> Parts:
    return np.ascontiguousarray(blocks[..., 2:34]).view(np.int8), _halves(blocks, 0), None


def _q4_k(blocks: Bytes) -> Parts:
    """Eight groups of 32, whose scales and minimums are six bits each, times one float16 for all."""
    scales, minimums = _six_bits(blocks[..., 4:16])
    codes = _nibbles(blocks[..., 16:144].reshape(*blocks.shape[:2], 4, 32)).reshape(*blocks.shape[:2], 256)
    return _signed(codes, 0), _halves(blocks, 0) * scales, -(_halves(blocks, 2) * minimums)


def _six_bits(packed: Bytes) -> tuple[Factors, Factors]:
    """Twelve bytes hold eight scales and eight minimums.

    Four scales and four minimums are the lower six bits of the first eight bytes. Of the others, the lower four bits
    are in the last four bytes, a scale's and a minimum's in each, and the upper two are those left over before.
    """
    first, second, last = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate((first & 63, last & 15 | first >> 6 << 4), axis=-1)
    minimums = np.concatenate((second & 63, last >> 4 | second >> 6 << 4), axis=-1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _q6_k(blocks: Bytes) -> Parts:
    """Sixteen groups of 16, whose scales are signed bytes, times one float16 for all.

    Each half of a block has four rows of 32 codes: their lower four bits in two rows of bytes, whose upper halves are
    the last two rows; their upper two bits in one row of bytes.
    """
    shape = blocks.shape[:2]
    lower = _nibbles(blocks[..., 0:128].reshape(*shape, 2, 64)).reshape(*shape, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(4, 1)
    upper = np.right_shift(blocks[..., 128:192].reshape(*shape, 2, 1, 32), shifts) & np.uint8(3)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    return _signed((lower | upper * np.uint8(16)).reshape(*shape, 256), 32), _halves(blocks, 208) * scales, None


_FORMATS = {
    Kind.Q4_0: _Format(18, 4, -8, _q4_0),
    Kind.Q4_1: _Format(20, 4, 0, _q4_1),
    Kind.Q5_0: _Format(22, 8, -128, _q5_0),
    Kind.Q5_1: _Format(24, 8, -128, _q5_1),
    Kind.Q8_0: _Format(34, 8, -128, _q8_0),
    Kind.Q4_K: _Format(144, 4, 0, _q4_k),
    Kind.Q6_K: _Format(210, 8, -128, _q6_k),
}
