"""Decoding without host memory: every sequence has all its blocks on the device, and who cannot grow is preempted.

Takes the place of `Residency` where a worker has no host tier. Knows nothing of time, requests or hand-offs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from decode_workers.offload_policy import Turn
from engine.kv.allocation import BlockAllocator
from engine.sequence import Sequence, SequenceKey


class DeviceOnly:
    """Residency for one tier: there is no ring and nothing moves. No more are in flight than a step may hold."""

    num_offloads = num_restores = 0
    staging_columns = 0
    prefill_is_overdue = False

    def __init__(self, allocator: BlockAllocator, *, max_num_seqs: int) -> None:
        self._allocator = allocator
        self.max_in_flight = max_num_seqs

    def host_groups_for(self, num_tokens: int, running: list[Sequence]) -> frozenset[int] | None:
        """No host groups, if there is room beside one more column for everyone who runs; else None."""
        available = self._allocator.pool.num_available - len(running) * self._allocator.layer_groups
        return frozenset() if self._allocator.num_blocks_for(num_tokens) <= available else None

    def is_calm(self, running: list[Sequence]) -> bool:
        """Whether all of these can take their next token, so that nobody would be preempted."""
        num_new = sum(map(self._num_lacking_columns, running))
        return num_new * self._allocator.layer_groups <= self._allocator.pool.num_available

    def turn(
        self, running: list[Sequence], now: float, *, limit: int, ring_columns: int, preempt: Callable[[Sequence], None]
    ) -> Turn:
        """All that can take their next token; preempts the youngest until the others can."""
        turn = Turn(ring_left=0)
        candidates = deque(running)
        while candidates:
            seq = candidates.popleft()
            while not self._allocator.grow(seq, seq.num_tokens_ahead):
                victim = candidates.pop() if candidates else seq
                preempt(victim)
                if victim is seq:
                    break
            else:
                turn.ready.append(seq)
        return turn

    def prefill_budget(self, running: list[Sequence], now: float, wanted: int) -> int:
        """All that is wanted: decodes come first in every step, and chunks get what they leave."""
        return wanted

    def note_prefill(self, *, wanted: bool, computed: bool) -> None:
        """Nobody waits for a ring."""

    def forget(self, key: SequenceKey) -> None:
        """Nobody has a schedule."""

    def _num_lacking_columns(self, seq: Sequence) -> int:
        assert seq.block_table is not None
        return max(self._allocator.num_columns_for(seq.num_tokens_ahead) - seq.block_table.num_columns, 0)
