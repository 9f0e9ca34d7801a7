"""Names for the content of KV blocks: equal names, equal tokens from the sequence's start to the block's end.

The name of a full block is a hash chained over the blocks before it:

    hash[-1] = blake2b(salt), personalised "legato-salt"
    hash[j]  = blake2b(hash[j-1] + tokens of block j as little-endian uint32), personalised "legato-block"

each 16 bytes; the two personalisations keep a cleverly chosen salt from passing for another tenant's prefix.

It is the same in every process and on every platform, so that a scheduler can compare what different workers hold. The
salt is the tenant's: without it nobody could tell, from a name or from how fast a prompt is answered, whether another
tenant has sent the same text. A name says nothing of model, layer group or tier; those who keep blocks add them.

Equality is that of a 128-bit cryptographic hash: a collision cannot be found by trying.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import numpy as np

HASH_BYTES: Final = 16
_TOKEN_BYTES: Final = 4


class PrefixHasher:
    """The block hashes of one growing sequence. `hashes` holds those of its full blocks so far."""

    __slots__ = ("_block_bytes", "_rest", "_tail", "hashes")

    def __init__(self, block_size: int, salt: str = "") -> None:
        if block_size < 1:
            raise ValueError(f"a block holds at least one token, not {block_size}")
        self.hashes: list[bytes] = []
        self._block_bytes = block_size * _TOKEN_BYTES
        self._rest = b""  # the tokens after the last full block, encoded
        self._tail = _hash(salt.encode(), person=b"legato-salt")

    def extend(self, token_ids: Sequence[int]) -> list[bytes]:
        """Append tokens; returns the hashes of the blocks they completed. OverflowError for ids outside [0, 2^32)."""
        encoded = self._rest + np.asarray(token_ids, dtype="<u4").tobytes()
        full = len(encoded) - len(encoded) % self._block_bytes
        first_new = len(self.hashes)
        for start in range(0, full, self._block_bytes):
            block = encoded[start : start + self._block_bytes]
            self._tail = _hash(self._tail + block, person=b"legato-block")
            self.hashes.append(self._tail)
        self._rest = encoded[full:]
        return self.hashes[first_new:]


def block_hashes(token_ids: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """The hashes of all full blocks of a sequence, first block first."""
    return PrefixHasher(block_size, salt).extend(token_ids)


def _hash(data: bytes, *, person: bytes) -> bytes:
    return blake2b(data, digest_size=HASH_BYTES, person=person).digest()
