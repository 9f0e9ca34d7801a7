"""Between paged blocks and slabs of one layer, on a GPU: moved and digested in one pass, whatever is at the other end.
The digest is the one that `kernels.cpu.block_digest` defines; bytes that only lie there can be digested, too.

A slab is `[planes, n, H, D]`, K before V, of all of the cache's heads. Bytes are moved as 64-bit words and never
converted, so the two ends may differ in block size and layers per group, but not in type.

A program moves one row of the digest, 8 KiB of the slab, so that every slab is cut alike, whatever its blocks. It
digests whole rows of 1024 words, so what it adds to the digest is a sum that needs no order.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cpu.block_digest import GAMMA, KEYS, MIX_1, MIX_2, ROW_WORDS, SHIFT, length_term
from kernels.interface import CacheGeometry
from kernels.triton.shipped import Shipped

WORD_BYTES = 8
_SHIFT = tl.constexpr(SHIFT)
_GAMMA = tl.constexpr(GAMMA)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)


@triton.jit
def cache_addresses(
    index, table, start, plane_words, block_stride,
    BLOCK_SIZE: tl.constexpr, TOKEN_WORDS: tl.constexpr, SIDE_BY_SIDE: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Where words `index` (int64) of a slab lie in the layer's rows, and whether the slab has as many words."""
    live = index < PLANES * plane_words
    plane = (index >= plane_words).to(tl.int64) if PLANES == 2 else index * 0
    of_plane = (index - plane * plane_words).to(tl.int32)
    position = start + of_plane // TOKEN_WORDS
    block = tl.load(table + position // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    row = block * block_stride + plane
    slot = (position % BLOCK_SIZE) * TOKEN_WORDS + of_plane % TOKEN_WORDS
    address = row * (BLOCK_SIZE * TOKEN_WORDS) + slot
    # What the compiler does not see through the division: that many words lie side by side.
    return tl.max_contiguous(tl.multiple_of(address, SIDE_BY_SIDE), SIDE_BY_SIDE), live


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


@triton.jit(do_not_specialize=["start"])  # else compiled anew where it is 1, or a multiple of 16
def slab_kernel(
    cache, table, slab, keys, digest, start, plane_words, block_stride,
    BLOCK_SIZE: tl.constexpr, TOKEN_WORDS: tl.constexpr, SIDE_BY_SIDE: tl.constexpr, PLANES: tl.constexpr,
    ROW_WORDS: tl.constexpr, TO_CACHE: tl.constexpr,
):  # fmt: skip
    """Grid: (row of the digest,). `cache` and `slab [PLANES * plane_words]` (int64), `table` (int32), `digest [1]`.

    From cache to slab, or the other way: then the digest is of what stands in the cache afterwards.
    """
    row = tl.program_id(0).to(tl.int64)
    index = row * ROW_WORDS + tl.arange(0, ROW_WORDS)
    address, live = cache_addresses(
        index, table, start, plane_words, block_stride, BLOCK_SIZE, TOKEN_WORDS, SIDE_BY_SIDE, PLANES
    )
    if TO_CACHE:
        tl.store(cache + address, tl.load(slab + index, mask=live, other=0), mask=live)
        tl.debug_barrier()  # whichever thread reads a word, it was written before
        # Volatile: read from memory (the second cache holds it still), not from the register that was written.
        words = tl.load(cache + address, mask=live, other=0, volatile=True)
    else:
        words = tl.load(cache + address, mask=live, other=0)
        tl.store(slab + index, words, mask=live)
    add_row(digest, words, row, keys, ROW_WORDS)


def block_digest(content: Tensor, digest: Tensor | None = None) -> Tensor:
    """The digest of contiguous `content`, whole 64-bit words of any type, where it lies; `[1]` int64, see `as_digest`.
    `digest`: one that has begun."""
    words = as_words(content)
    digest = begun_digest(words.numel() * WORD_BYTES, content.device) if digest is None else digest
    if words.numel():
        grid = (triton.cdiv(words.numel(), ROW_WORDS),)
        _digesting().launch(grid, content=words, keys=keys_on(content.device), digest=digest, num_words=words.numel())
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


def gather_slab(
    cache_rows: Tensor, geometry: CacheGeometry, table: Tensor, start: int, out: Tensor, *, digest: Tensor | None = None
) -> Tensor:
    """Fill `out [planes, n, H, D]`, contiguous, with tokens [start, start + n), and digest it.

    `cache_rows` is a layer as `CacheGeometry` describes it, `table [columns]` (int32) the blocks of its group, all on
    one device. Returns the digest, `[1]` int64, for `as_digest` to wait for: `digest`, where one is given that has
    begun for so many bytes, which saves a launch.
    """
    return _move(cache_rows, geometry, table, start, out, digest, to_cache=False)


def scatter_slab(
    slab: Tensor, cache_rows: Tensor, geometry: CacheGeometry, table: Tensor, start: int,
    *, digest: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write `slab [planes, n, H, D]`, contiguous, to tokens [start, start + n), as `gather_slab` would read it.

    Returns the digest of what then stands in the blocks, in `digest` where one is given.
    """
    return _move(cache_rows, geometry, table, start, slab, digest, to_cache=True)


def _move(
    cache_rows: Tensor, geometry: CacheGeometry, table: Tensor, start: int, slab: Tensor, digest: Tensor | None,
    *, to_cache: bool,
) -> Tensor:  # fmt: skip
    _check(cache_rows, geometry, table, start, slab)
    words = as_words(slab)
    digest = begun_digest(words.numel() * WORD_BYTES, slab.device) if digest is None else digest
    if words.numel():
        head_words = slab.shape[-1] * slab.element_size() // WORD_BYTES
        _moving(to_cache, geometry.block_size, geometry.num_kv_heads, head_words, geometry.num_planes).launch(
            (triton.cdiv(words.numel(), ROW_WORDS),),
            cache=as_words(cache_rows),
            table=table,
            slab=words,
            keys=keys_on(slab.device),
            digest=digest,
            start=start,
            plane_words=words.numel() // geometry.num_planes,
            block_stride=geometry.block_stride,
        )
    return digest


def _check(cache_rows: Tensor, geometry: CacheGeometry, table: Tensor, start: int, slab: Tensor) -> None:
    shape = (geometry.num_planes, slab.shape[1], geometry.num_kv_heads, geometry.head_dim)
    assert slab.shape == shape, f"a slab of this cache has the shape {shape}, not {tuple(slab.shape)}"
    assert slab.dtype == cache_rows.dtype, f"the cache holds {cache_rows.dtype}, the slab {slab.dtype}"
    assert start >= 0 and start + slab.shape[1] <= table.numel() * geometry.block_size, "tokens beyond the block table"
    assert table.dtype == torch.int32 and table.is_contiguous()
    if geometry.head_dim * slab.element_size() % WORD_BYTES:
        raise ValueError(
            f"a head of {geometry.head_dim} times {slab.dtype} is not a number of 64-bit words: KV of such heads cannot"
            " be moved by the GPU's kernels"
        )


@functools.cache
def _digesting() -> Shipped:
    return Shipped(
        name="block_digest",
        kernel=block_digest_kernel,
        types={"content": "*i64", "keys": "*i64", "digest": "*i64", "num_words": "i64"},
        constants={"ROW_WORDS": ROW_WORDS},
        num_warps=4,
        num_stages=1,
        aligned=frozenset({"num_words"}),
    )


@functools.cache
def _moving(to_cache: bool, block_size: int, num_heads: int, head_words: int, num_planes: int = 2) -> Shipped:
    token_words = num_heads * head_words
    constants = {
        "BLOCK_SIZE": block_size,
        "TOKEN_WORDS": token_words,
        "SIDE_BY_SIDE": 2 - head_words % 2,  # 16 bytes is the most that a thread loads at once
        "PLANES": num_planes,
        "ROW_WORDS": ROW_WORDS,
        "TO_CACHE": to_cache,
    }
    pointers = {"cache": "*i64", "table": "*i32", "slab": "*i64", "keys": "*i64", "digest": "*i64"}
    name = f"{'scatter' if to_cache else 'gather'}_slab-{block_size}x{num_heads}x{head_words * WORD_BYTES}B"
    return Shipped(
        name=name + ("" if num_planes == 2 else "-latent"),
        kernel=slab_kernel,
        types=pointers | {"start": "i32", "plane_words": "i64", "block_stride": "i32"},
        constants=constants,
        num_warps=4,
        num_stages=1,
        aligned=frozenset({"plane_words"} if token_words % 16 == 0 else ()),
    )


def shipped() -> list[Shipped]:
    """The digest alone, and the kernels for 8 heads of 64, 80, 96, 128 and 256 numbers in 16 bits; in 32 bits; and
    DeepSeek's latent."""
    moving = [
        _moving(to_cache, 16, 8, head_dim * itemsize // WORD_BYTES)
        for to_cache in (False, True)
        for head_dim, itemsize in (*((head_dim, 2) for head_dim in (64, 80, 96, 128, 256)), (256, 4))
    ]
    latent = [_moving(to_cache, 16, 1, 576 * 2 // WORD_BYTES, 1) for to_cache in (False, True)]
    return [_digesting(), *moving, *latent]
