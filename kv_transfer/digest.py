"""Digests of KV bytes: 64-bit XXH3, which runs at memory speed.

They catch accidents (a slab reused too early, a block overwritten, a wrong offset), not forgers: peers are
authenticated before any byte arrives, and whoever could forge a digest could as well forge the KV. Knows nothing of
layers or tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import xxhash

DIGEST_NAME: Final = "xxh3_64"
_MODULUS: Final = 2**64

ByteView = memoryview | bytes | bytearray
"""C-contiguous bytes."""


def slab_digest(view: ByteView) -> int:
    """The digest of a slab's bytes, in [0, 2^64)."""
    digest: int = xxhash.xxh3_64_intdigest(view)
    return digest


def pieces_digest(pieces: Iterable[ByteView]) -> int:
    """What `slab_digest` gives for the pieces joined in order, without joining them."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    digest: int = state.intdigest()
    return digest


def combine(digests: Iterable[int]) -> int:
    """The digest of a set of slabs, whatever order they arrived in: the sum modulo 2^64.

    A sum, not an exclusive-or, because equal slabs must not cancel each other out.
    """
    return sum(digests) % _MODULUS
