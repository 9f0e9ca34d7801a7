"""The digest that `kernels.cpu.block_digest` defines, on a GPU: of bytes while they are moved, or of those that lie
there.

A program digests whole rows of 1024 words, so what it adds to the digest is a sum that needs no order.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cpu import block_digest as host_digest
from kernels.cpu.block_digest import KEYS, length_term
from kernels.triton.shipped import Shipped

ROW_WORDS = host_digest.ROW_WORDS
WORD_BYTES = 8
_SHIFT = tl.constexpr(host_digest.SHIFT)
_GAMMA = tl.constexpr(host_digest.GAMMA)
_MIX_1 = tl.constexpr(host_digest.MIX_1)
_MIX_2 = tl.constexpr(host_digest.MIX_2)


@triton.jit
def mixed(word):
    """SplitMix64's finaliser of uint64."""
    word = (word ^ (word >> 30)) * _MIX_1
    word = (word ^ (word >> 27)) * _MIX_2
    return word ^ (word >> 31)


@triton.jit
def add_row(digest, words, row, keys, ROW_WORDS: tl.constexpr):
    """Add row `row` (int64) to the digest: `words [ROW_WORDS]` (int64), zero where there are none."""
    key = tl.load(keys + tl.arange(0, ROW_WORDS)).to(tl.uint64, bitcast=True)
    word = words.to(tl.uint64, bitcast=True)
    total = tl.sum((word ^ (word >> _SHIFT)) * key)
    term = mixed(total + (row + 1).to(tl.uint64) * _GAMMA)
    tl.atomic_add(digest, term.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def block_digest_kernel(content, keys, digest, num_words, ROW_WORDS: tl.constexpr):
    """Grid: (row,). `content [num_words]`, `keys [ROW_WORDS]`, `digest [1]`: all int64."""
    row = tl.program_id(0).to(tl.int64)
    index = row * ROW_WORDS + tl.arange(0, ROW_WORDS)
    words = tl.load(content + index, mask=index < num_words, other=0)
    add_row(digest, words, row, keys, ROW_WORDS)


def block_digest(content: Tensor, digest: Tensor | None = None) -> Tensor:
    """The digest of contiguous `content`, whole 64-bit words of any type, where it lies; `[1]` int64, see `as_digest`.
    `digest`: one that has begun."""
    words = as_words(content)
    digest = begun_digest(words.numel() * WORD_BYTES, content.device) if digest is None else digest
    if words.numel():
        grid = (triton.cdiv(words.numel(), ROW_WORDS),)
        configuration().launch(
            grid, content=words, keys=keys_on(content.device), digest=digest, num_words=words.numel()
        )
    return digest


def as_words(content: Tensor) -> Tensor:
    """The content's memory as int64, flat. Raises ValueError if it is not whole words side by side."""
    if content.numel() * content.element_size() % WORD_BYTES or not content.is_contiguous():
        raise ValueError(
            f"a tensor {tuple(content.shape)} of {content.dtype}, strides {content.stride()}, is not a number of 64-bit"
            " words side by side: make it contiguous, and heads a multiple of 8 bytes"
        )
    return content.view(-1).view(torch.int64)


def begun_digest(num_bytes: int, device: torch.device) -> Tensor:
    """`[1]` int64, for kernels to add their rows to."""
    return torch.full((1,), digest_start(num_bytes), dtype=torch.int64, device=device)


@functools.cache  # of the few sizes that slabs have
def digest_start(num_bytes: int) -> int:
    """What a digest of so many bytes is before any row was added, as an int64."""
    return _signed(length_term(num_bytes))


def as_digest(digest: Tensor) -> int:
    """The digest in [0, 2^64), as `row_sum_digest` has it. Waits for the device."""
    return int(digest.item()) % 2**64


@functools.cache
def keys_on(device: torch.device) -> Tensor:
    return torch.from_numpy(KEYS.view("int64")).to(device)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


@functools.cache
def configuration() -> Shipped:
    return Shipped(
        name="block_digest",
        kernel=block_digest_kernel,
        types={"content": "*i64", "keys": "*i64", "digest": "*i64", "num_words": "i64"},
        constants={"ROW_WORDS": ROW_WORDS},
        num_warps=4,
        num_stages=1,
        aligned=frozenset({"num_words"}),
    )


def shipped() -> list[Shipped]:
    return [configuration()]
