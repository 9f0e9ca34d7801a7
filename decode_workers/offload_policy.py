"""Which sequences decode in a step, and which layer groups move between device and host memory meanwhile.

A pure class over the allocator. Sequences take turns by slack, least first: those in host memory while their columns
fit the staging ring and their bytes fit the time that others can spare. A sequence that waits loses slack, so each has
its turn. `DecodeScheduler` asks it in each step: `OffloadPolicy` with host memory, `NoOffload` without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from decode_workers.pacing import LayerKvConfig, Pacer
from engine.cost_model.step_cost import StepCost
from engine.kv.allocation import BlockAllocator
from engine.sequence import BlockCopy, Sequence


@dataclass(slots=True)
class StepSelection:
    """A step's decodes, all with room for their next token, and its moves."""

    ring_left: int  # columns of the staging ring
    ready: list[Sequence] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    moving: list[Sequence] = field(default_factory=list)

    def move(self, seq: Sequence, copies: tuple[BlockCopy, ...]) -> None:
        self.moving.append(seq)
        self.copies += copies


class OffloadPolicy:
    """Decides where sequences rest. `staging_columns` is what the ring holds, `block_bytes` what one block has.

    `cost()` is what steps cost, None as long as none was measured; `host_bytes_per_s()` is the measured speed of copies
    between device and host, 0 as long as there was none.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        config: LayerKvConfig,
        *,
        staging_columns: int,
        block_bytes: int,
        cost: Callable[[], StepCost | None],
        host_bytes_per_s: Callable[[], float],
    ) -> None:
        assert allocator.host_pool is not None, "without host memory there is nothing to decide"
        assert staging_columns > 0, "without a staging ring nothing in host memory can be computed"
        self.config = config
        self.max_in_flight = config.max_in_flight
        self.staging_columns = staging_columns
        self.pacer = Pacer(config.tpot_target_s, config.max_steps_without_prefill)
        self._allocator = allocator
        self._host_pool = allocator.host_pool
        self._block_bytes = block_bytes
        self._cost = cost
        self._host_bytes_per_s = host_bytes_per_s
        self.num_offloads = 0
        self.num_restores = 0
        self.num_offloaded_blocks = 0
        self.num_restored_blocks = 0

    # --- where a newcomer goes ---

    def host_groups_for(self, num_tokens: int, running: list[Sequence]) -> frozenset[int] | None:
        """The host groups of a newcomer of so many tokens: none, if the device has room beside everyone's growth; all,
        if the host has; None if neither, or if nobody on the device can go on."""
        # They wait for each other's blocks, and for room in the host or its end, which newcomers there would always put
        # off: by taking the room, and by going on. Who lacks its adapter would not go on with blocks either.
        holders = [seq for seq in running if self._allocator.num_device_groups(seq) and seq.has_adapter]
        if holders and all(map(self._waits_for_device, holders)):
            return None
        # Who can only go on from the device has been waiting for its blocks, and newcomers would always take them.
        is_waited_for = any(self._outgrown(seq) or self._lacks_column(seq) for seq in running)
        if not is_waited_for and self._allocator.num_blocks_for(num_tokens) <= self._spare(running):
            return frozenset()
        groups = self._allocator.all_groups
        grown = num_tokens + self.config.growth_tokens
        needed = self._allocator.num_host_blocks_for(grown, groups)
        longest = self.staging_columns * self._allocator.block_size
        if num_tokens <= longest and needed <= self._host_pool.num_available:
            return groups
        alone = self._host_pool.num_held == 0 and num_tokens <= longest
        fits = self._allocator.num_host_blocks_for(num_tokens, groups) <= self._host_pool.num_available
        return groups if alone and fits else None

    # --- a step ---

    def all_stay_on_device(self, running: list[Sequence]) -> bool:
        """Whether all of these rest on the device and will have room there for another column after the next one, so
        that nothing would move."""
        num_blocks = sum(map(self._allocator.num_device_groups, running))
        return not any(seq.host_groups for seq in running) and self._spare(running) >= num_blocks

    def select(
        self,
        running: list[Sequence],
        now: float,
        *,
        limit: int,
        ring_columns: int,
        preempt: Callable[[Sequence], None],
        idle: list[Sequence],
    ) -> StepSelection:
        """Select at most `limit` decodes with `ring_columns` of the ring, and moves for later steps.

        `preempt` is called for sequences whose KV is to be computed again: where that is cheaper than moving it, or
        where nothing could go on. It takes them out of `running`, or of `idle`: those that have blocks, could not go on
        in any case, and so give way first.
        """

        def attempt() -> StepSelection:
            selection = StepSelection(ring_columns)
            queue = sorted(running, key=lambda seq: self.pacer.slack_s(seq, now))
            stalled = self._select(selection, queue, now, limit)
            self._make_headroom(selection, queue, idle, stalled, preempt)
            if not selection.moving:
                self._restore(selection, queue)
            return selection

        selection = attempt()
        is_first = True
        while (
            running
            and not (selection.ready or selection.copies)
            and (selection.moving or ring_columns == self.staging_columns)
        ):
            # Moves to where all the content is already: no step is needed for them, and none comes of this one.
            for seq in selection.moving:
                self._allocator.complete_move(seq, True)
            if not (selection.moving and is_first):
                preempt(self._victim(running, idle, now))
            is_first = False
            selection = attempt()
        return selection

    def _select(self, selection: StepSelection, queue: list[Sequence], now: float, limit: int) -> list[Sequence]:
        """Fill `ready`; returns those for whose next token a pool lacks blocks."""
        stalled = []
        bytes_left = self._fetch_budget(queue, now) if any(seq.host_groups for seq in queue) else 0.0
        any_staged = False
        for seq in queue:
            if len(selection.ready) >= limit:
                break
            if seq.host_groups:
                columns = self._allocator.num_columns_for(seq.num_tokens)
                num_bytes = columns * len(seq.host_groups) * self._block_bytes
                # The first one goes however little time there is: nobody waits for ever.
                if columns > selection.ring_left or (any_staged and num_bytes > bytes_left):
                    continue
            if not self._allocator.grow(seq, seq.num_tokens_ahead):
                stalled.append(seq)
                continue
            if seq.host_groups:
                any_staged = True
                selection.ring_left -= columns
                bytes_left -= num_bytes
            selection.ready.append(seq)
        return stalled

    def _victim(self, running: list[Sequence], idle: list[Sequence], now: float) -> Sequence:
        """Who is preempted where nothing can go on: the youngest that is idle and has blocks of a tier in which
        somebody lacks some, or to which somebody could be offloaded; without any, who is furthest ahead."""
        lacks_device = any(map(self._waits_for_device, running))
        uses_host = any(self._lacks_column(seq) or self._could_be_offloaded(seq) for seq in running)
        for seq in reversed(idle):
            if (lacks_device and self._allocator.num_device_groups(seq)) or (uses_host and seq.host_groups):
                return seq
        return max(running, key=lambda seq: self.pacer.slack_s(seq, now))

    def _fetch_budget(self, queue: list[Sequence], now: float) -> float:
        """Bytes that may be fetched from host memory while the device-resident sequences keep to their schedules.

        Those that are late already lose nothing more by steps of a token's time. Shorter ones would have most of the
        others wait, and everybody's delay grow: computing more sequences in a step costs less than more steps.
        """
        target_s = self.config.tpot_target_s
        slack_s = min((self.pacer.slack_s(seq, now) for seq in queue if not seq.host_groups), default=target_s)
        allowed_s = target_s + min(max(slack_s, 0.0), target_s)  # at most two tokens' time, whatever the slack
        return allowed_s * self._host_bytes_per_s()

    def _make_headroom(
        self,
        selection: StepSelection,
        queue: list[Sequence],
        idle: list[Sequence],
        stalled: list[Sequence],
        preempt: Callable[[Sequence], None],
    ) -> None:
        """Offload idle sequences, and then those furthest ahead, ahead of time: until everyone's next column is on the
        device."""
        shortage = -self._spare(queue)
        others = [*reversed(idle), *reversed(queue)]
        victims = [seq for seq in others if self._allocator.num_device_groups(seq) and not self._outgrown(seq)]
        if not stalled and len(victims) < 2:
            return  # alone, and nothing lacks yet
        for seq in victims:
            if shortage <= 0:
                return
            shortage -= self._free_device_blocks(selection, seq, shortage, preempt)

    def _free_device_blocks(
        self, selection: StepSelection, seq: Sequence, shortage: int, preempt: Callable[[Sequence], None]
    ) -> int:
        """Blocks that the next step will have; 0 if the host has no room for them."""
        assert seq.block_table is not None
        columns = seq.block_table.num_columns
        if not self._could_be_offloaded(seq):
            return 0  # with its next token it could not be computed from there
        on_device = sorted(self._allocator.all_groups - seq.host_groups)
        # Every other group first: the fetches of a step then alternate with groups that need none.
        half = on_device[1::2] if len(on_device) > 1 and not seq.host_groups else on_device
        groups = half if columns * len(half) >= shortage else on_device
        if self._recomputing_is_cheaper(seq, len(groups)):
            freed = columns * len(on_device)
            self._deselect(selection, seq)
            preempt(seq)
            return freed
        if columns * len(groups) + self._allocator.layer_groups > self._host_pool.num_available:
            return 0  # not even its next column would have room
        copies = self._allocator.begin_offload(seq, frozenset(groups))
        if copies is None:
            return 0
        self.num_offloads += 1
        self.num_offloaded_blocks += _num_blocks(copies)
        self._deselect(selection, seq)
        selection.move(seq, copies)
        return columns * len(groups)

    def _deselect(self, selection: StepSelection, seq: Sequence) -> None:
        if seq in selection.ready:
            selection.ready.remove(seq)
            if seq.host_groups:
                selection.ring_left += self._allocator.num_columns_for(seq.num_tokens)

    def _recomputing_is_cheaper(self, seq: Sequence, num_groups: int) -> bool:
        """Against moving the groups out and back again, by what was measured."""
        cost, bytes_per_s = self._cost(), self._host_bytes_per_s()
        if cost is None or not bytes_per_s:
            return False
        num_bytes = 2 * self._allocator.num_columns_for(seq.num_computed) * num_groups * self._block_bytes
        return cost.prefill_s(seq.num_computed) < num_bytes / bytes_per_s

    def _restore(self, selection: StepSelection, queue: list[Sequence]) -> None:
        """Bring as many groups of one sequence back as the device has blocks for: of one that the ring cannot hold, or
        else of the one with the least slack."""
        staged = sorted((seq for seq in queue if seq.host_groups), key=lambda seq: not self._outgrown(seq))
        if not staged:
            return
        seq = staged[0]
        assert seq.block_table is not None
        # Two columns for everyone stay free, so that what is restored need not leave again at once.
        room = self._allocator.pool.num_available
        if not self._outgrown(seq):
            room -= 2 * self._allocator.layer_groups * len(queue)
        num_groups = min(len(seq.host_groups), room // max(seq.block_table.num_columns, 1))
        if num_groups <= 0:
            return
        copies = self._allocator.begin_restore(seq, frozenset(sorted(seq.host_groups)[:num_groups]))
        if copies is not None:
            self.num_restores += 1
            self.num_restored_blocks += _num_blocks(copies)
            selection.move(seq, copies)

    def _could_be_offloaded(self, seq: Sequence) -> bool:
        """Whether something of it is on the device, and the ring is large enough to compute it from host memory."""
        fits = self._allocator.num_columns_for(seq.num_tokens) <= self.staging_columns
        return fits and self._allocator.num_device_groups(seq) > 0

    def _outgrown(self, seq: Sequence) -> bool:
        """Whether the sequence's KV is in host memory, and the ring is too small to compute it from there."""
        return bool(seq.host_groups) and self._allocator.num_columns_for(seq.num_tokens) > self.staging_columns

    def _waits_for_device(self, seq: Sequence) -> bool:
        """Whether the sequence can go on only once it has more of the device's blocks than there are."""
        needs_blocks = (
            self._needs_column(seq) and self._allocator.num_device_groups(seq) > self._allocator.pool.num_available
        )
        return needs_blocks or self._outgrown(seq)

    def _lacks_column(self, seq: Sequence) -> bool:
        """Whether the sequence's KV is in host memory, and there is no block left for its next token."""
        return self._needs_column(seq) and len(seq.host_groups) > self._host_pool.num_available

    def _needs_column(self, seq: Sequence) -> bool:
        """Whether the sequence's next token begins a new column."""
        assert seq.block_table is not None
        return self._allocator.num_columns_for(seq.num_tokens) > seq.block_table.num_columns

    def _spare(self, running: list[Sequence]) -> int:
        """Device blocks beside one more column for everyone."""
        return self._allocator.pool.num_available - sum(map(self._allocator.num_device_groups, running))


def _num_blocks(copies: tuple[BlockCopy, ...]) -> int:
    return sum(len(copy.source) for copy in copies)


class NoOffload:
    """What takes the place of `OffloadPolicy` without host memory: nothing moves, and who cannot grow is preempted.

    All that are in flight are in each step, so `max_in_flight` is no more than what a step may hold.
    """

    num_offloads = num_restores = num_offloaded_blocks = num_restored_blocks = 0
    staging_columns = 0

    def __init__(self, allocator: BlockAllocator, *, max_in_flight: int) -> None:
        self._allocator = allocator
        self.max_in_flight = max_in_flight
        self.pacer = Pacer()

    def host_groups_for(self, num_tokens: int, running: list[Sequence]) -> frozenset[int] | None:
        """No host groups, if there is room beside one more column for everyone who runs; else None."""
        available = self._allocator.pool.num_available - len(running) * self._allocator.layer_groups
        return frozenset() if self._allocator.num_blocks_for(num_tokens) <= available else None

    def all_stay_on_device(self, running: list[Sequence]) -> bool:
        """Whether all of these can take their next token, so that nobody would be preempted."""
        num_new = sum(map(self._num_lacking_columns, running))
        return num_new * self._allocator.layer_groups <= self._allocator.pool.num_available

    def select(
        self,
        running: list[Sequence],
        now: float,
        *,
        limit: int,
        ring_columns: int,
        preempt: Callable[[Sequence], None],
        idle: list[Sequence],
    ) -> StepSelection:
        """All that can take their next token; preempts the youngest until the others can, those that are idle first."""
        selection = StepSelection(ring_left=0)
        candidates = deque(running)
        while candidates:
            seq = candidates.popleft()
            while not self._allocator.grow(seq, seq.num_tokens_ahead):
                victim = idle[-1] if idle else candidates.pop() if candidates else seq
                preempt(victim)
                if victim is seq:
                    break
            else:
                selection.ready.append(seq)
        return selection

    def _num_lacking_columns(self, seq: Sequence) -> int:
        assert seq.block_table is not None
        return max(self._allocator.num_columns_for(seq.num_tokens_ahead) - seq.block_table.num_columns, 0)
