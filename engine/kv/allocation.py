"""Gives sequences their blocks: prefix hits, growth, publication, moves between memory tiers, release.

The only writer of a sequence's leases, block tables, `host_groups`, `num_cached` and `num_published`; the pools behind
it stay the sole owners of blocks. Worker schedulers call it; what it asks to be copied
between tiers is part of their plans.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.kv.block_pool import BlockLease, BlockPool
from engine.kv.prefix import PrefixHasher
from engine.sequence import BlockCopy, BlockTable, Sequence

Blocks = npt.NDArray[np.int32]
"""`[groups, columns]` blocks of one tier; -1 for none."""


@dataclass(frozen=True, slots=True)
class PrefixFetch:
    """A prefix hit of which some blocks are fetched from host memory. `sources` are leased until they have been."""

    sources: list[int]


@dataclass(frozen=True, slots=True)
class Relocation:
    """Layer groups on their way to the other tier. Both block tables have their rows until it is complete."""

    groups: list[int]
    to_device: bool


Move = PrefixFetch | Relocation


def row_copies(
    groups: Iterable[int],
    to: Literal["device", "host"],
    source: Blocks,
    destination: Blocks,
    is_copied: npt.NDArray[np.bool_],
) -> tuple[BlockCopy, ...]:
    """A copy for each group that has blocks to copy. `source`, `destination`, `is_copied`: `[len(groups), columns]`,
    row i of `groups[i]`."""
    return tuple(
        BlockCopy(group=group, to=to, source=source[row][chosen], destination=destination[row][chosen])
        for row, (group, chosen) in enumerate(zip(groups, is_copied, strict=True))
        if chosen.any()
    )


def by_columns(blocks: Blocks) -> list[int]:
    """All blocks of a table, column by column."""
    flat = blocks.T.ravel()
    ordered: list[int] = flat[flat >= 0].tolist()
    return ordered


class PrefixLookup:
    """The only writer of a sequence's `prefix`. A prefix is a run of columns that have every layer group's block."""

    def __init__(self, pool: BlockPool, host_pool: BlockPool | None, *, layer_groups: int, block_size: int) -> None:
        self._pool = pool
        self._host_pool = host_pool
        self._layer_groups = layer_groups
        self._block_size = block_size

    def hashes(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """The hashes of the first `num_blocks` full blocks; each token is hashed once in the sequence's life."""
        if seq.prefix is None:
            seq.prefix = PrefixHasher(self._block_size, seq.cache_salt)
        num_hashed = len(seq.prefix.hashes)
        if num_blocks > num_hashed:
            seq.prefix.extend(seq.tokens(num_hashed * self._block_size, num_blocks * self._block_size))
        return seq.prefix.hashes[:num_blocks]

    def published(self, seq: Sequence, groups: list[int], pool: BlockPool) -> Blocks:
        """`[len(groups), num_published]`: what a pool has of the sequence's published blocks; -1 elsewhere."""
        hashes = self.hashes(seq, seq.num_published)
        found = [[_find(pool, digest, group) for digest in hashes] for group in groups]
        return np.array(found, dtype=np.int32).reshape(len(groups), len(hashes))

    def longest(self, seq: Sequence) -> tuple[Blocks, Blocks]:
        """The longest prefix of `seq` that its groups find in their tiers, or the device's in host memory.

        It never covers the last token: its logits are what the next token is sampled from. It is shorter where the
        device lacks blocks for what must be fetched. Returns the blocks of its columns on the device, and on the host
        those of groups that rest there and of blocks that the device lacks; -1 for others.
        """
        device_columns: list[list[int]] = []
        host_columns: list[list[int]] = []
        num_left = self._pool.num_available
        for digest in self.hashes(seq, (seq.num_tokens - 1) // self._block_size):
            on_device = [
                -1 if group in seq.host_groups else _find(self._pool, digest, group)
                for group in range(self._layer_groups)
            ]
            on_host = self._on_host(digest, [group for group, block in enumerate(on_device) if block < 0])
            if on_host is None:
                break
            # What is fetched takes a block, and so does what is only cached as yet.
            num_left -= self._layer_groups - len(seq.host_groups) - sum(map(self._is_held, on_device))
            if num_left < 0:
                break
            device_columns.append(on_device)
            host_columns.append(on_host)
        return self._table(device_columns), self._table(host_columns)

    def _is_held(self, block: int) -> bool:
        return block >= 0 and self._pool.is_held(block)

    def _on_host(self, digest: bytes, groups: Iterable[int]) -> list[int] | None:
        """The column's host blocks of these groups, -1 for others; None unless all are there."""
        column = [-1] * self._layer_groups
        for group in groups:
            column[group] = -1 if self._host_pool is None else _find(self._host_pool, digest, group)
            if column[group] < 0:
                return None
        return column

    def _table(self, columns: list[list[int]]) -> Blocks:
        return np.array(columns, dtype=np.int32).reshape(len(columns), self._layer_groups).T


def _find(pool: BlockPool, digest: bytes, group: int) -> int:
    block = pool.find((digest, group))
    return -1 if block is None else block


class BlockAllocator:
    """Blocks for sequences, `layer_groups` of them per column of `block_size` tokens.

    Out of `pool`, the device's, and for a sequence's `host_groups` out of `host_pool`. Leases are ordered by columns,
    so that what a released sequence leaves in the prefix cache is evicted from its tail on, in whole columns.

    Moves have two phases. What `open`, `begin_offload` and `begin_restore` return belongs into the next step's plan;
    both ends of each copy stay leased until `complete_move` tells how that step ended.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        layer_groups: int,
        block_size: int,
        prefix_caching: bool = True,
        host_pool: BlockPool | None = None,
    ) -> None:
        self.pool = pool
        self.host_pool = host_pool
        self.layer_groups = layer_groups
        self.all_groups = frozenset(range(layer_groups))
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._lookup = PrefixLookup(pool, host_pool, layer_groups=layer_groups, block_size=block_size)
        self._moves: dict[Sequence, Move] = {}

    def num_columns_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Device blocks of a sequence that keeps no layer group in host memory."""
        return self.num_columns_for(num_tokens) * self.layer_groups

    def num_device_blocks(self, seq: Sequence) -> int:
        """Those that it has now; others may share them."""
        num_columns = 0 if seq.block_table is None else seq.block_table.num_columns
        return num_columns * self.num_device_groups(seq)

    def num_device_groups(self, seq: Sequence) -> int:
        """Layer groups of a sequence that are not in host memory."""
        return self.layer_groups - len(seq.host_groups)

    def num_host_blocks_for(self, num_tokens: int, host_groups: frozenset[int]) -> int:
        return self.num_columns_for(num_tokens) * len(host_groups)

    def hashes(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """The hashes of the first `num_blocks` full blocks."""
        return self._lookup.hashes(seq, num_blocks)

    def is_moving(self, seq: Sequence) -> bool:
        """Whether a step has copies to make for `seq` that are not complete."""
        return seq in self._moves

    def open(
        self, seq: Sequence, *, use_cache: bool, host_groups: frozenset[int] = frozenset()
    ) -> tuple[BlockCopy, ...]:
        """Give `seq` empty leases or, on a prefix hit, ones that share the cached columns.

        Blocks that are only in host memory get device blocks, unless of `host_groups`, and the copies to make in the
        step that first uses them are returned.
        """
        assert seq.lease is None, f"sequence {seq.request_id} has a lease already"
        seq.lease = self.pool.lease()
        seq.block_table = BlockTable(self.layer_groups)
        seq.host_groups = host_groups
        if host_groups:
            self._lease_host(seq, with_table=True)
        seq.num_computed = seq.num_cached = seq.num_cached_on_host = seq.num_published = 0
        return self._adopt(seq, *self._lookup.longest(seq)) if use_cache and self.prefix_caching else ()

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Make room for the first `num_tokens` tokens of `seq`. False, and nothing taken, if a pool lacks blocks."""
        assert seq.lease is not None
        assert seq.block_table is not None
        num_new = self.num_columns_for(num_tokens) - seq.block_table.num_columns
        if num_new <= 0:
            return True
        assert not isinstance(self._moves.get(seq), Relocation), f"{seq.request_id} must not grow while it is moved"
        num_host = num_new * len(seq.host_groups)
        if num_new * self.layer_groups - num_host > self.pool.num_available or num_host > self._host_available:
            return False
        seq.block_table.append(self._new_columns(seq, num_new, on_device=True))
        if seq.host_table is not None:
            seq.host_table.append(self._new_columns(seq, num_new, on_device=False))
        return True

    def publish(self, seq: Sequence) -> None:
        """Make the blocks that became full and computed findable for later sequences with the same prefix; not those of
        what is pooled, whose text hardly comes again."""
        if not self.prefix_caching or seq.pooling is not None:
            return
        num_full = seq.num_computed // self.block_size
        if num_full > seq.num_published:
            self._publish(seq, self.all_groups, seq.num_published, num_full)
            seq.num_published = num_full

    def release(self, seq: Sequence) -> None:
        """Take the blocks back; the sequence could be opened again from nothing. Not while a step copies for it."""
        assert seq.lease is not None, f"sequence {seq.request_id} has no lease to release"
        assert seq.block_table is not None
        self._moves.pop(seq, None)
        if self.host_pool is not None:  # groups that were moved are not in the order of columns in the lease
            self.pool.give_back(seq.lease, by_columns(seq.block_table.view))
        if seq.host_lease is not None:
            self._release_host(seq)
        self.pool.release(seq.lease)
        seq.lease = seq.block_table = None
        seq.host_groups = frozenset()
        seq.num_computed = seq.num_published = 0

    def reassign(self, seq: Sequence, heir: Sequence) -> None:
        """Give everything that `seq` holds to another attempt of its request, which holds nothing."""
        assert heir.lease is None, f"sequence {heir.request_id} has a lease already"
        assert seq not in self._moves, f"{seq.request_id} is being moved"
        heir.lease, heir.block_table, heir.host_groups = seq.lease, seq.block_table, seq.host_groups
        heir.host_lease, heir.host_table = seq.host_lease, seq.host_table
        seq.lease = seq.block_table = seq.host_lease = seq.host_table = None
        seq.host_groups = frozenset()

    # --- between tiers ---

    def begin_offload(self, seq: Sequence, groups: frozenset[int]) -> tuple[BlockCopy, ...] | None:
        """Copies of these groups' blocks to host memory, or None, and nothing taken, if it lacks blocks.

        The next step makes them and must not compute `seq`. What the host has already is shared and not copied.
        """
        assert groups and not groups & seq.host_groups, f"{sorted(groups)} are not all on the device"
        assert seq.block_table is not None
        if len(groups) * seq.block_table.num_columns > self._host_available:
            return None
        self._lease_host(seq, with_table=True)
        return self._relocate(seq, groups, to_device=False)

    def begin_restore(self, seq: Sequence, groups: frozenset[int]) -> tuple[BlockCopy, ...] | None:
        """Copies of these groups' blocks to the device, or None, and nothing taken, if it lacks blocks.

        The next step makes them. It may compute `seq`, whose tables speak of the new places from now on.
        """
        assert groups and groups <= seq.host_groups, f"{sorted(groups)} are not all in host memory"
        assert seq.block_table is not None
        if len(groups) * seq.block_table.num_columns > self.pool.num_available:
            return None
        copies = self._relocate(seq, groups, to_device=True)
        seq.host_groups -= groups
        return copies

    def complete_move(self, seq: Sequence, ok: bool) -> bool:
        """The step that made the copies of `seq`, if there were any, is over; not `ok`: they count for nothing.

        A relocation that failed has not happened. Returns False where the failed copies were those of a prefix hit:
        `seq` is without its prefix then and has been released.
        """
        move = self._moves.pop(seq, None)
        if isinstance(move, PrefixFetch):
            if not ok:
                self.release(seq)
                return False
            host_pool, host_lease = self._tier(seq, on_device=False)
            host_pool.give_back(host_lease, move.sources)
        elif move is not None:
            self._complete_relocation(seq, move, ok)
        if seq.host_lease is not None and not seq.host_groups:
            self._release_host(seq)
        return True

    def _relocate(self, seq: Sequence, groups: frozenset[int], *, to_device: bool) -> tuple[BlockCopy, ...]:
        """Fill the groups' rows in the other tier's table: shared blocks where it has the content, else new ones."""
        assert seq not in self._moves, f"{seq.request_id} is being moved already"
        assert seq.block_table is not None
        assert seq.host_table is not None
        pool, lease = self._tier(seq, on_device=to_device)
        rows = sorted(groups)
        near, far = (seq.host_table, seq.block_table) if to_device else (seq.block_table, seq.host_table)
        blocks = np.full((len(rows), seq.block_table.num_columns), -1, dtype=np.int32)
        blocks[:, : seq.num_published] = self._lookup.published(seq, rows, pool)
        pool.adopt(lease, by_columns(blocks), is_reuse=False)
        is_new = blocks < 0
        blocks.T[is_new.T] = pool.extend(lease, int(is_new.sum()))
        far.view[rows] = blocks
        is_new[:, self.num_columns_for(seq.num_computed) :] = False  # nothing stands there yet
        self._moves[seq] = Relocation(rows, to_device)
        return row_copies(rows, "device" if to_device else "host", near.view[rows], blocks, is_new)

    def _complete_relocation(self, seq: Sequence, move: Relocation, ok: bool) -> None:
        """Only the tier that the groups rest in keeps their rows."""
        ends_on_device = move.to_device is ok
        groups = frozenset(move.groups)
        table = seq.host_table if ends_on_device else seq.block_table
        assert table is not None
        pool, lease = self._tier(seq, on_device=not ends_on_device)
        pool.give_back(lease, by_columns(table.view[move.groups]))
        table.view[move.groups] = -1
        seq.host_groups = seq.host_groups - groups if ends_on_device else seq.host_groups | groups
        if ok and self.prefix_caching:
            self._publish(seq, groups, 0, seq.num_published)

    # --- leases ---

    @property
    def _host_available(self) -> int:
        return 0 if self.host_pool is None else self.host_pool.num_available

    def _tier(self, seq: Sequence, *, on_device: bool) -> tuple[BlockPool, BlockLease]:
        pool, lease = (self.pool, seq.lease) if on_device else (self.host_pool, seq.host_lease)
        assert pool is not None
        assert lease is not None
        return pool, lease

    def _lease_host(self, seq: Sequence, *, with_table: bool) -> None:
        assert self.host_pool is not None, "there is no host memory"
        assert seq.block_table is not None
        seq.host_lease = seq.host_lease or self.host_pool.lease()
        if with_table and seq.host_table is None:
            seq.host_table = BlockTable.of(np.full_like(seq.block_table.view, -1))

    def _release_host(self, seq: Sequence) -> None:
        assert self.host_pool is not None
        assert seq.host_lease is not None
        if seq.host_table is not None:
            self.host_pool.give_back(seq.host_lease, by_columns(seq.host_table.view))
        self.host_pool.release(seq.host_lease)
        seq.host_lease = seq.host_table = None

    def _new_columns(self, seq: Sequence, num_columns: int, *, on_device: bool) -> Blocks:
        """`[layer_groups, num_columns]`, leased column by column."""
        pool, lease = self._tier(seq, on_device=on_device)
        rows = sorted(self.all_groups - seq.host_groups if on_device else seq.host_groups)
        columns = np.full((self.layer_groups, num_columns), -1, dtype=np.int32)
        blocks = np.array(pool.extend(lease, num_columns * len(rows)), dtype=np.int32)
        columns[rows] = blocks.reshape(num_columns, len(rows)).T
        return columns

    # --- prefix cache ---

    def _adopt(self, seq: Sequence, on_device: Blocks, on_host: Blocks) -> tuple[BlockCopy, ...]:
        """Share the blocks of a prefix hit. Copies of those that are only in host memory, to new device blocks."""
        assert seq.block_table is not None
        pool, lease = self._tier(seq, on_device=True)
        blocks, num_columns = on_device.copy(), on_device.shape[1]
        is_fetched = blocks < 0
        is_fetched[sorted(seq.host_groups)] = False
        pool.adopt(lease, by_columns(blocks))  # before blocks are taken, which could be these
        blocks.T[is_fetched.T] = pool.extend(lease, int(is_fetched.sum()))
        seq.block_table.append(blocks)
        self._adopt_on_host(seq, on_host)
        seq.num_computed = seq.num_cached = num_columns * self.block_size
        seq.num_cached_on_host = int((on_host >= 0).any(axis=0).sum()) * self.block_size
        # What is fetched can be published when it has been.
        seq.num_published = int(is_fetched.any(axis=0).argmax()) if is_fetched.any() else num_columns
        if is_fetched.any():
            self._moves[seq] = PrefixFetch(on_host.T[is_fetched.T].tolist())
        return row_copies(range(self.layer_groups), "device", on_host, blocks, is_fetched)

    def _adopt_on_host(self, seq: Sequence, on_host: Blocks) -> None:
        """What is to be fetched is leased until it has been; what rests there is also in the table."""
        shared = by_columns(on_host)
        if shared:
            self._lease_host(seq, with_table=False)
            host_pool, host_lease = self._tier(seq, on_device=False)
            host_pool.adopt(host_lease, shared)
        if seq.host_table is not None:
            rests_there = np.isin(np.arange(self.layer_groups), sorted(seq.host_groups))
            seq.host_table.append(np.where(rests_there[:, None], on_host, -1))

    def _publish(self, seq: Sequence, groups: frozenset[int], first: int, stop: int) -> None:
        hashes = self._lookup.hashes(seq, stop)[first:]
        for table, is_host in ((seq.block_table, False), (seq.host_table, True)):
            rows = sorted(groups & seq.host_groups if is_host else groups - seq.host_groups)
            if table is None or not rows:
                continue
            pool, lease = self._tier(seq, on_device=not is_host)
            for digest, blocks in zip(hashes, table.view[rows, first:stop].T.tolist(), strict=True):
                for group, block in zip(rows, blocks, strict=True):
                    pool.publish(lease, block, (digest, group))
