"""Digests of KV bytes, 64 bits wide and of two kinds.

`xxh3_64` is the fastest on a CPU: it runs at memory speed. It chains its blocks, so a GPU, which computes thousands of
them at once, has a digest of its own, `row_sum_64` (see `kernels.cpu.block_digest`), of which a CPU does several
gigabytes a second. The two ends of a hand-off agree on one.

They catch accidents (a slab reused too early, a block overwritten, a wrong offset), not forgers: peers are
authenticated before any byte arrives, and whoever could forge a digest could as well forge the KV. What names a prefix
is no digest but a hash (`engine.kv.prefix`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, get_args

import xxhash

from kernels.cpu.block_digest import row_sum_digest

DigestKind = Literal["xxh3_64", "row_sum_64"]

DIGEST_KINDS: Final[tuple[DigestKind, ...]] = get_args(DigestKind)
_MODULUS: Final = 2**64

ByteView = memoryview | bytes | bytearray
"""C-contiguous bytes."""


def agreed_kind(ours: DigestKind, theirs: DigestKind) -> DigestKind:
    """What both ends use: the GPU's digest as soon as one of them is on a GPU."""
    return "row_sum_64" if "row_sum_64" in (ours, theirs) else "xxh3_64"


def slab_digest(view: ByteView, kind: DigestKind = "xxh3_64") -> int:
    """The digest of a slab's bytes, in [0, 2^64)."""
    if kind == "row_sum_64":
        return row_sum_digest(view)
    digest: int = xxhash.xxh3_64_intdigest(view)
    return digest


def combine(digests: Iterable[int]) -> int:
    """The digest of a set of slabs, whatever order they arrived in: the sum modulo 2^64.

    A sum, not an exclusive-or, because equal slabs must not cancel each other out.
    """
    return sum(digests) % _MODULUS
