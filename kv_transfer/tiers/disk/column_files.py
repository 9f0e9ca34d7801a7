"""How one column of KV lies in a file, and how a damaged file is told from a sound one.

A column is the blocks of all layer groups for one chained prefix hash. All files of a tier have one size. Everything is
little-endian and aligned to 4096 bytes, so that files can be read and written past the page cache:

    header  magic 8s | version u32 | num_groups u32 | block_bytes u64 | fingerprint 16s | hash 16s
            | digest of each group's block u64[num_groups] | zeros | digest of the header so far u64
    body    the blocks of groups 0, 1, ... without gaps | zeros

The digests tell accidents (a torn write, a rotten sector, another model's file), not forgers.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import numpy as np

from engine.kv.prefix import HASH_BYTES
from kv_transfer.digest import slab_digest

ALIGNMENT: Final = 4096
VERSION: Final = 1
_MAGIC: Final = b"LEGATOKV"
_FIXED: Final = struct.Struct(f"<8sIIQ16s{HASH_BYTES}s")
_DIGEST: Final = struct.Struct("<Q")


class DamagedColumnError(Exception):
    """A file is not a sound column of this tier; a sentence says what is wrong with it."""


def aligned_buffer(num_bytes: int) -> memoryview:
    """Writable memory that begins at a page, as direct I/O wants it."""
    return memoryview(mmap.mmap(-1, num_bytes))


class ColumnFormat:
    """The layout of one tier's files. `fingerprint` names whatever two processes must share to use each other's KV."""

    def __init__(self, *, fingerprint: str, num_groups: int, block_bytes: int) -> None:
        assert num_groups >= 1, f"{num_groups} layer groups"
        assert block_bytes >= 1, f"blocks of {block_bytes} bytes"
        self.num_groups = num_groups
        self.block_bytes = block_bytes
        self.fingerprint_digest = blake2b(fingerprint.encode(), digest_size=16, person=b"legato-disk").digest()
        self.header_bytes = _aligned(_FIXED.size + (num_groups + 1) * _DIGEST.size)
        self.file_bytes = self.header_bytes + _aligned(self.column_bytes)
        self._digests = struct.Struct(f"<{num_groups}Q")

    @property
    def column_bytes(self) -> int:
        """KV in one file."""
        return self.num_groups * self.block_bytes

    @property
    def mark(self) -> str:
        """A short text that differs where files could not be shared."""
        return f"{VERSION} {self.num_groups} {self.block_bytes} {self.fingerprint_digest.hex()}"

    def encode(self, file: memoryview, prefix_hash: bytes, blocks: Sequence[memoryview]) -> None:
        """Fill `file` (`file_bytes`) with the blocks of one column, one per group."""
        assert len(prefix_hash) == HASH_BYTES, f"a hash has {HASH_BYTES} bytes, not {len(prefix_hash)}"
        for own, block in zip(self._bodies(file), blocks, strict=True):
            copy_bytes(own, block)
        digests = self._digests.pack(*(slab_digest(own) for own in self._bodies(file)))
        fixed = _FIXED.pack(
            _MAGIC, VERSION, self.num_groups, self.block_bytes, self.fingerprint_digest, bytes(prefix_hash)
        )
        content = (fixed + digests).ljust(self.header_bytes - _DIGEST.size, b"\0")
        file[: self.header_bytes] = content + _DIGEST.pack(slab_digest(content))

    def hash_of(self, header: memoryview) -> bytes:
        """The hash that a sound header names. Raises DamagedColumnError for any other header."""
        content, digest = header[: self.header_bytes - _DIGEST.size], header[self.header_bytes - _DIGEST.size :]
        magic, version, num_groups, block_bytes, fingerprint, prefix_hash = _FIXED.unpack_from(content)
        if magic != _MAGIC or version != VERSION:
            raise DamagedColumnError(f"it is no Legato KV file of version {VERSION}")
        if _DIGEST.unpack_from(digest)[0] != slab_digest(content):
            raise DamagedColumnError("its header does not match the header's digest")
        if (num_groups, block_bytes, fingerprint) != (self.num_groups, self.block_bytes, self.fingerprint_digest):
            raise DamagedColumnError("it was written for another model or another layout of blocks")
        found: bytes = prefix_hash
        return found

    def decode(self, file: memoryview, prefix_hash: bytes) -> list[memoryview]:
        """The blocks in a file's bytes, as views of them. Raises DamagedColumnError unless each byte is right."""
        if self.hash_of(file[: self.header_bytes]) != prefix_hash:
            raise DamagedColumnError("it holds another prefix")
        blocks = self._bodies(file)
        digests = self._digests.unpack_from(file, _FIXED.size)
        for group, (block, digest) in enumerate(zip(blocks, digests, strict=True)):
            if slab_digest(block) != digest:
                raise DamagedColumnError(f"the block of layer group {group} does not match its digest")
        return blocks

    def _bodies(self, file: memoryview) -> list[memoryview]:
        assert file.nbytes == self.file_bytes, f"a file has {self.file_bytes} bytes, not {file.nbytes}"
        ends = range(self.header_bytes + self.block_bytes, self.header_bytes + self.column_bytes + 1, self.block_bytes)
        return [file[end - self.block_bytes : end] for end in ends]


def copy_bytes(destination: memoryview, source: memoryview) -> None:
    """Copy between C-contiguous views of equal size; other threads run meanwhile, as they would not for a slice."""
    np.copyto(np.frombuffer(destination, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
