"""What lies in a host segment: a header, one record per block, then the blocks.

One process writes, any number read at any moment and without locks; either side may be killed between any two
instructions. So each record is a seqlock: its version is even while the block's bytes stand under its key, and odd from
before they may change until they stand under another one. Version 0 is a block that was never published.

The versions tell a reader early and cheaply. What it may rely on is the digest: of the block's bytes, seeded with
their key, so that no mixture of an old and a new record, or of old and new bytes, passes, in whatever order the
processor made the writes visible. Digests are computed over the reader's own copy.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from engine.kv.block_pool import BlockKey
from engine.kv.prefix import HASH_BYTES
from kv_transfer.digest import ByteView

_MAGIC: Final = b"LegatoKV"
_FORMAT: Final = 1
_FINGERPRINT_BYTES: Final = 16

_HEADER: Final = struct.Struct(f"=8sII{_FINGERPRINT_BYTES}sQQ")  # magic, format, record bytes, fingerprint, shape
_CHANGES_AT: Final = 64  # in a cache line of its own: readers poll it
_RECORDS_AT: Final = mmap.PAGESIZE
HEADER_BYTES: Final = _HEADER.size

_RECORD: Final = struct.Struct(f"=QQQ{HASH_BYTES}sI4x")  # version, digest, stamp, hash, group
_BODY: Final = struct.Struct(f"=QQ{HASH_BYTES}sI")  # a record after its version
_VERSION_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentShape:
    """What two segments must share for the blocks of one to be of use in the other, and how many blocks there are."""

    fingerprint: bytes
    block_bytes: int
    num_blocks: int

    @classmethod
    def of(cls, fingerprint: str, block_bytes: int, num_blocks: int) -> SegmentShape:
        if block_bytes < 1 or num_blocks < 1:
            raise ValueError(f"a segment needs at least one block of one byte, not {num_blocks} of {block_bytes}")
        return cls(fingerprint=fingerprint_digest(fingerprint), block_bytes=block_bytes, num_blocks=num_blocks)

    @property
    def blocks_at(self) -> int:
        """The offset of the first block: at a page, as pinning, direct I/O and tensors want it."""
        end = _RECORDS_AT + self.num_blocks * _RECORD.size
        return -(-end // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def num_bytes(self) -> int:
        return self.blocks_at + self.num_blocks * self.block_bytes

    def header(self) -> bytes:
        return _HEADER.pack(_MAGIC, _FORMAT, _RECORD.size, self.fingerprint, self.num_blocks, self.block_bytes)


def fingerprint_digest(fingerprint: str) -> bytes:
    return blake2b(fingerprint.encode(), digest_size=_FINGERPRINT_BYTES, person=b"legato-segment").digest()


def read_shape(header: bytes) -> SegmentShape | None:
    """The shape that a file's first bytes announce; None unless they are the header of a segment of this format."""
    if len(header) < _HEADER.size:
        return None
    magic, form, record_bytes, fingerprint, num_blocks, block_bytes = _HEADER.unpack_from(header)
    if (magic, form, record_bytes) != (_MAGIC, _FORMAT, _RECORD.size):
        return None
    return SegmentShape(fingerprint=fingerprint, block_bytes=block_bytes, num_blocks=num_blocks)


def block_digest(key: BlockKey, content: ByteView) -> int:
    """XXH3 (64 bits) of a block's bytes, seeded with what they are the content of."""
    content_hash, group = key
    seed = xxhash.xxh3_64_intdigest(content_hash + group.to_bytes(4, "little"))
    digest: int = xxhash.xxh3_64_intdigest(content, seed)
    return digest


class BlockRecord(NamedTuple):
    """A record as it was read; its fields may stem from different moments, which only the digest can tell."""

    version: int
    digest: int
    stamp: int  # grows with each publication in the segment
    content_hash: bytes
    group: int

    @property
    def is_valid(self) -> bool:
        return self.version > 0 and self.version % 2 == 0

    @property
    def key(self) -> BlockKey:
        return self.content_hash, self.group


class SegmentIndex:
    """The records and blocks of one mapped segment. Over a read-only mapping, `publish` and `retract` raise."""

    def __init__(self, memory: memoryview, shape: SegmentShape) -> None:
        assert memory.nbytes >= shape.num_bytes, f"{memory.nbytes} bytes mapped, {shape.num_bytes} needed"
        self.shape = shape
        self.blocks = memory[shape.blocks_at : shape.num_bytes]
        self._memory = memory
        words = np.frombuffer(memory, dtype=np.uint64, count=shape.blocks_at // _VERSION_BYTES)
        self._changes = words[_CHANGES_AT // _VERSION_BYTES :]
        records = words[_RECORDS_AT // _VERSION_BYTES :]
        stride = _RECORD.size // _VERSION_BYTES
        self._versions: npt.NDArray[np.uint64] = records[: shape.num_blocks * stride : stride]

    @property
    def changes(self) -> int:
        """Differs from an earlier reading if any record has changed since then."""
        return int(self._changes[0])

    def versions(self) -> npt.NDArray[np.uint64]:
        """A copy of all versions, `[num_blocks]`."""
        return self._versions.copy()

    def record(self, block: int) -> BlockRecord:
        return BlockRecord._make(_RECORD.unpack_from(self._memory, self._record_at(block)))

    def block(self, block: int) -> memoryview:
        """The block's bytes in place."""
        start = block * self.shape.block_bytes
        return self.blocks[start : start + self.shape.block_bytes]

    def valid_records(self) -> Iterator[tuple[int, BlockRecord]]:
        """(block, record) of those that are valid, in the order of their blocks."""
        for block in range(self.shape.num_blocks):
            record = self.record(block)
            if record.is_valid:
                yield block, record

    def read(self, block: int, key: BlockKey, destination: npt.NDArray[np.uint8]) -> bool:
        """Copy the block out, `[block_bytes]`. True only if `destination` now holds what was published under `key`.

        Else the block has other content by now, or had while it was copied; `destination` then holds anything.
        """
        record = self.record(block)
        if not record.is_valid or record.key != key:
            return False
        np.copyto(destination, np.frombuffer(self.block(block), dtype=np.uint8))
        unchanged = int(self._versions[block]) == record.version
        return unchanged and block_digest(key, destination.data) == record.digest

    def publish(self, block: int, key: BlockKey, digest: int) -> None:
        """Let readers find the block. Its bytes must stand, and stay, until `retract`."""
        content_hash, group = key
        assert len(content_hash) == HASH_BYTES, f"a content hash has {HASH_BYTES} bytes, not {len(content_hash)}"
        version = int(self._versions[block]) | 1
        self._versions[block] = version
        body_at = self._record_at(block) + _VERSION_BYTES
        _BODY.pack_into(self._memory, body_at, digest, self.changes, content_hash, group)
        self._versions[block] = version + 1
        self._count_change()

    def retract(self, block: int) -> None:
        """Let readers find it no more; once this returns the block's bytes may change."""
        version = int(self._versions[block])
        if version % 2 == 0:
            self._versions[block] = version + 1
            self._count_change()

    def _count_change(self) -> None:
        # After the record: a reader that misses the record's change sees the counter's later, and looks again.
        self._changes[0] += np.uint64(1)

    def _record_at(self, block: int) -> int:
        assert 0 <= block < self.shape.num_blocks, f"block {block} of {self.shape.num_blocks}"
        return _RECORDS_AT + block * _RECORD.size
