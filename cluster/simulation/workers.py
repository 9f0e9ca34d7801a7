"""Simulated workers: the real schedulers over real block pools, with a cost model in the place of a model.

They speak with each other and with the gateway by calls; who calls decides how long that takes. What is as in life: who
waits for what, in which order, up to which limits. What is not: nothing fails, and copies between tiers are not made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from cluster.simulation.clock import VirtualClock
from cluster.simulation.steps import SimulatedSteps
from cluster.simulation.worker_shape import WorkerShape
from cluster.simulation.workload.prompts import TOKEN
from decode_workers.scheduler import DecodeScheduler
from engine.kv.allocation import BlockAllocator
from engine.kv.block_pool import BlockPool
from engine.sequence import Sequence, SequenceKey, StepOutput, StepPlan, finish_reason
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Endpoint
from kv_transfer.messages.workers import WorkerInfo, WorkerSnapshot
from kv_transfer.tiers.block_events import BlockEventLog
from prefill_workers.scheduler import PrefillScheduler

Refuse = Callable[[str, float | None], None]
"""Takes the reason, and after how many seconds it would probably fit; None: never on this worker."""

_NOWHERE: Final = Endpoint(host="", port=0, node_id="")


class Listener(Protocol):
    """Who hears of requests' tokens, at the moment at which the worker has them."""

    def on_first_token(self, seq: Sequence, worker_id: str) -> None: ...

    def on_finished(self, seq: Sequence) -> None: ...


class SimulatedWorker:
    """What both kinds have in common: a pool, its events, and what they tell the scheduler."""

    def __init__(self, worker_id: str, role: Role, shape: WorkerShape, *, epoch: int) -> None:
        self.shape = shape
        self.pool = BlockPool(shape.kv_tokens // shape.block_size, epoch=epoch)
        self.allocator = BlockAllocator(
            self.pool, layer_groups=1, block_size=shape.block_size, prefix_caching=shape.prefix_caching
        )
        self.events = BlockEventLog(worker_id, layer_groups=1, epoch=epoch)
        self.info = WorkerInfo(
            worker_id=worker_id,
            role=role,
            endpoint=_NOWHERE,
            pid=0,
            model="simulated",
            compatibility="simulated",
            max_model_len=min(shape.max_model_len, self.pool.num_blocks * shape.block_size),
            num_blocks=self.pool.num_blocks,
            block_size=shape.block_size,
            layer_groups=1,
        )
        self.on_activity: Callable[[], None] = lambda: None
        self.draining = False
        self._num_snapshots = 0

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    def _snapshot(self, *, running: int, waiting: int, queued_tokens: int) -> WorkerSnapshot:
        self._num_snapshots += 1
        return WorkerSnapshot(
            worker_id=self.worker_id,
            sequence_number=self._num_snapshots,
            draining=self.draining,
            num_running=running,
            num_waiting=waiting,
            queued_prefill_tokens=queued_tokens,
            blocks_available=self.pool.num_available,
            num_leases=self.pool.num_leases,
        )


@dataclass(slots=True, eq=False)
class _Pending:
    seq: Sequence
    grant: Callable[[], None]
    refuse: Refuse


class SimulatedDecode(SimulatedWorker):
    """Reserves, decodes what was handed over, and computes whole requests that are started here."""

    def __init__(
        self, worker_id: str, shape: WorkerShape, clock: VirtualClock, listener: Listener, *, epoch: int
    ) -> None:
        super().__init__(worker_id, "decode", shape, epoch=epoch)
        self._clock = clock
        self._listener = listener
        self.scheduler = DecodeScheduler(
            self.allocator,
            max_num_seqs=shape.max_num_seqs,
            token_budget=shape.token_budget,
            max_model_len=self.info.max_model_len,
            eos_token_ids=frozenset(),
        )
        self._pending: deque[_Pending] = deque()
        self.steps = SimulatedSteps(
            clock,
            shape.cost,
            plan=self._plan,
            finish=self._finish,
            repetitions=self._repetitions,
            noise=shape.noise(epoch),
        )

    def reserve(self, seq: Sequence, grant: Callable[[], None], refuse: Refuse) -> None:
        """`grant` or `refuse(reason, retry_after_s)` is called, at once or when it is known."""
        self.on_activity()
        if not self._takes(seq, refuse):
            return
        pending = _Pending(seq, grant, refuse)
        self._pending.append(pending)
        self._retry()
        if pending in self._pending:
            self._clock.after(self.shape.reserve_wait_s, lambda: self._give_up(pending))

    def start(self, seq: Sequence, refuse: Refuse) -> None:
        """All of it here."""
        self.on_activity()
        if not self._takes(seq, refuse):
            return
        self.steps.interrupt()
        self.scheduler.add(seq)
        self.steps.wake()

    def admit(self, key: SequenceKey) -> None:
        self.on_activity()
        self.steps.interrupt()
        self.scheduler.admit(key, TOKEN)
        self.steps.wake()

    def drop(self, key: SequenceKey) -> None:
        self.on_activity()
        self.steps.interrupt()
        self.scheduler.drop(key)
        self._retry()
        self.steps.wake()

    @property
    def is_quiet(self) -> bool:
        return self.steps.is_idle and not self._pending and self.scheduler.num_running == 0

    def snapshot(self) -> WorkerSnapshot:
        self.steps.settle()
        return self._snapshot(
            running=self.scheduler.num_running,
            waiting=len(self._pending) + self.scheduler.num_waiting,
            queued_tokens=self.scheduler.num_uncomputed_tokens,
        )

    def _takes(self, seq: Sequence, refuse: Refuse) -> bool:
        if seq.num_tokens >= self.info.max_model_len:
            refuse(f"{seq.num_tokens} tokens leave no room in {self.info.max_model_len}", None)
            return False
        if len(self._pending) + self.scheduler.num_waiting >= self.shape.max_waiting:
            refuse("the decode queue is full", self.shape.reserve_wait_s)
            return False
        return True

    def _retry(self) -> None:
        """First come, first served."""
        while self._pending and self.scheduler.can_reserve(self._pending[0].seq.num_tokens):
            pending = self._pending.popleft()
            self.scheduler.reserve(pending.seq)
            pending.grant()

    def _give_up(self, pending: _Pending) -> None:
        if pending in self._pending:
            self._pending.remove(pending)
            pending.refuse(f"no room for its KV within {self.shape.reserve_wait_s:g} s", self.shape.reserve_wait_s)
            self._retry()

    def _plan(self) -> StepPlan:
        return self.scheduler.plan(self._clock.now)

    def _finish(self, plan: StepPlan, output: StepOutput) -> None:
        for emission in self.scheduler.finish_step(plan, output):
            if emission.index == 0:
                self._listener.on_first_token(emission.seq, self.worker_id)
            if emission.finish is not None:
                self._listener.on_finished(emission.seq)
        self._retry()

    def _repetitions(self, plan: StepPlan) -> int:
        """Steps in which all decode on within the blocks that they have, none becomes full and none ends.

        A block that becomes full is published. Nothing but that, growth and ends concerns blocks where no prompt is
        computed and nobody rests in host memory.
        """
        if not self.shape.fast_forward or plan.copies or self.scheduler.num_uncomputed_tokens:
            return 0
        fewest = self.info.max_model_len
        for item in plan.items:
            seq = item.seq
            in_block = -(seq.num_computed + 1) % self.shape.block_size
            until_end = seq.params.max_tokens - len(seq.output_token_ids) - 1
            fewest = min(fewest, in_block, until_end, self.info.max_model_len - seq.num_tokens - 1)
            if fewest <= 0:
                return 0
        return fewest


class SimulatedPrefill(SimulatedWorker):
    """Computes prompts, emits their first tokens and hands them over."""

    def __init__(
        self, worker_id: str, shape: WorkerShape, clock: VirtualClock, listener: Listener, *, epoch: int
    ) -> None:
        super().__init__(worker_id, "prefill", shape, epoch=epoch)
        self._clock = clock
        self._listener = listener
        self.scheduler = PrefillScheduler(
            self.allocator,
            token_budget=shape.token_budget,
            max_waiting=shape.max_waiting,
            shared_tokens=shape.cost.shared_tokens,
        )
        self.steps = SimulatedSteps(clock, shape.cost, plan=self._plan, finish=self._finish, noise=shape.noise(epoch))
        self._receivers: dict[SequenceKey, SimulatedDecode] = {}

    def start(self, seq: Sequence, to: SimulatedDecode, refuse: Refuse) -> None:
        """`to` has a reservation for it."""
        self.on_activity()
        if seq.num_tokens > self.info.max_model_len:
            refuse(f"{seq.num_tokens} tokens exceed {self.info.max_model_len}", None)
            return
        if not self.scheduler.can_add():
            refuse("the prefill queue is full", self.shape.cost.prefill_s(self.scheduler.num_uncomputed_tokens))
            return
        self._receivers[seq.key] = to
        self.scheduler.add(seq)
        self.steps.wake()

    @property
    def is_quiet(self) -> bool:
        return self.steps.is_idle and not self._receivers

    def snapshot(self) -> WorkerSnapshot:
        return self._snapshot(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            queued_tokens=self.scheduler.num_uncomputed_tokens,
        )

    def _plan(self) -> StepPlan:
        return self.scheduler.plan()[0]

    def _finish(self, plan: StepPlan, output: StepOutput) -> None:
        chunks = {item.seq.key: item.num_tokens for item in plan.items}
        for seq, sampled in self.scheduler.finish_step(plan, output):
            seq.output_token_ids.append(sampled.token_id)
            self._listener.on_first_token(seq, self.worker_id)
            if finish_reason(seq, frozenset()) is None:
                exposed_s = self.shape.handoff_s + self.shape.handoff_token_s * chunks[seq.key]
                self._clock.after(exposed_s, lambda seq=seq: self._handed_over(seq))  # type: ignore[misc]
            else:
                self._receivers.pop(seq.key).drop(seq.key)
                self.scheduler.release(seq.key)
                self._listener.on_finished(seq)

    def _handed_over(self, seq: Sequence) -> None:
        """Decode has verified it: it goes on there, and the blocks are free here."""
        self.on_activity()
        self._receivers.pop(seq.key).admit(seq.key)
        self.scheduler.release(seq.key)
        self.steps.wake()


Worker = SimulatedPrefill | SimulatedDecode
