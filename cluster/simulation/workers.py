"""Simulated workers: the real schedulers over real block pools, with a cost model in the place of a model.

They speak with each other and with the gateway by calls; who calls decides how long that takes. What is as in life: who
waits for what, in which order, up to which limits. What is not: nothing fails, and copies between tiers are not made.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from cluster.simulation.clock import VirtualClock
from cluster.simulation.routers.base import Router
from cluster.simulation.steps import SimulatedSteps, step_factors
from cluster.simulation.workload.prompts import TOKEN
from decode_workers.scheduler import DecodeScheduler
from engine.cost_model.fit import scaled
from engine.cost_model.step_cost import StepCost
from engine.kv.allocation import BlockAllocator
from engine.kv.block_pool import BlockPool
from engine.sequence import Sequence, SequenceKey, StepOutput, StepPlan, finish_reason
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Endpoint
from kv_transfer.messages.workers import WorkerInfo, WorkerSnapshot
from kv_transfer.tiers.block_events import BlockEventLog
from kv_transfer.worker.cost_report import stated_report
from prefill_workers.scheduler import PrefillScheduler

Refuse = Callable[[str, float | None], None]
"""Takes the reason, and after how many seconds it would probably fit; None: never on this worker."""

_LEAST_ERROR: Final = 0.02
_NOWHERE: Final = Endpoint(host="", port=0, node_id="")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShape:
    """What a worker is, apart from its id. `token_budget` bounds a step. `kv_tokens`: the room of its pool.

    The exposed part of a hand-off, from the prompt's last step until decode may go on: `handoff_s`, and for each token
    of the prompt's last chunk `handoff_token_s` (the last layer's slab, which nothing is left to hide behind). Where
    decode makes room only then, for each token of the prompt `pulled_token_s`, too.

    Steps take what `cost` says, or that times a log-normal factor of mean 1 and sigma `step_noise`, whose
    logarithm correlates with the next step's by `step_correlation`. `cost` is also what the worker reports, with
    its `relative_error`.
    """

    cost: StepCost
    kv_tokens: int
    token_budget: int = 2048
    block_size: int = 64
    max_num_seqs: int = 256
    max_model_len: int = 131_072
    max_waiting: int = 256
    reserve_wait_s: float = 10.0
    handoff_s: float = 0.002
    handoff_token_s: float = 0.0
    pulled_token_s: float = 0.0
    prefix_caching: bool = True
    step_noise: float = 0.0
    step_correlation: float = 0.0
    fast_forward: bool = True

    def __post_init__(self) -> None:
        if self.kv_tokens < self.block_size:
            raise ValueError(f"{self.kv_tokens} tokens of KV are less than one block of {self.block_size}")
        if self.step_noise < 0:
            raise ValueError(f"step_noise is {self.step_noise}; 0 means none, 0.1 that steps vary by a tenth")
        if not 0 <= self.step_correlation < 1:
            raise ValueError(f"step_correlation is {self.step_correlation}; it must be at least 0 and less than 1")

    def cautious_cost(self) -> StepCost:
        """What nearly all of its steps stay below, as `StepCosts` has it of real ones."""
        return scaled(self.cost, 1 + 2 * self.step_noise)


def measured(cost: StepCost, step_noise: float = 0.0) -> StepCost:
    """`cost` with about the error that a worker would measure of it: 0.8 of the noise of its steps, at least 2 %."""
    return replace(cost, relative_error=max(_LEAST_ERROR, 0.8 * step_noise))


class Listener(Protocol):
    """Who hears of requests' tokens: of the first and the last at the moment at which the worker has them, of others
    perhaps later."""

    def on_first_token(self, seq: Sequence, worker_id: str) -> None: ...

    def on_tokens(self, request_id: str, times: Iterable[float]) -> None:
        """More tokens, and when each came. The last one is told of before `on_finished`."""
        ...

    def on_finished(self, seq: Sequence) -> None: ...

    def on_stuck(self, seq: Sequence, to: SimulatedDecode) -> None:
        """Its prompt is not computed for `to` there, where all memory is kept for others."""


class SimulatedWorker(ABC):
    """What both kinds have in common: a pool, its events, its steps, and what they tell the scheduler.

    Heartbeats come at the period of the real ones. A worker that has nothing to do and has said so is silent until it
    has: its heartbeats would say the same again. Hence a router under simulation must not take silence for death.
    """

    scheduler: PrefillScheduler | DecodeScheduler

    def __init__(
        self,
        role: Role,
        worker_id: str,
        shape: WorkerShape,
        clock: VirtualClock,
        listener: Listener,
        *,
        epoch: int,
        repetitions: Callable[[StepPlan], int] = lambda plan: 0,
    ) -> None:
        self.shape = shape
        self.worker_id = worker_id
        self._clock = clock
        self._listener = listener
        self.pool = BlockPool(shape.kv_tokens // shape.block_size, epoch=epoch)
        self.allocator = BlockAllocator(
            self.pool, layer_groups=1, block_size=shape.block_size, prefix_caching=shape.prefix_caching
        )
        self.steps = SimulatedSteps(
            clock,
            shape.cost,
            plan=self._plan,
            finish=self._finish,
            repetitions=repetitions,
            silent=self._silent,
            factors=step_factors(shape.step_noise, epoch, shape.step_correlation),
        )
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
            chunk_tokens=shape.token_budget,
            max_num_seqs=shape.max_num_seqs if role == "decode" else 0,
        )
        self.draining = False
        self._receivers: dict[SequenceKey, SimulatedDecode] = {}  # of prompts that are computed for others
        self._unreserved: dict[SequenceKey, Sequence] = {}  # of those, who is reserved for once they are computed
        self._step_cost = stated_report(shape.cost)
        self._cautious_cost = shape.cautious_cost()
        self._events = BlockEventLog(worker_id, layer_groups=1, epoch=epoch)
        self._num_snapshots = 0
        self._is_silent = True
        self._num_beats = 0

    def join(self, router: Router, *, period_s: float, phase_s: float) -> None:
        """Register with `router`, and tell it of this worker every `period_s` from `phase_s` on. Called before all
        else."""
        self._router, self._period_s, self._phase_s = router, period_s, phase_s
        router.register(self.info, self.snapshot(), self._clock.now)
        if router.wants_blocks:
            self._events.watch("device", self.pool)
            for part in self._events.snapshot():
                router.blocks(part, self._clock.now)

    @property
    @abstractmethod
    def is_quiet(self) -> bool:
        """Whether nothing is to be done, now or for what was promised."""

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    def snapshot(self) -> WorkerSnapshot:
        self.steps.settle()
        self._num_snapshots += 1
        return WorkerSnapshot(
            worker_id=self.worker_id,
            sequence_number=self._num_snapshots,
            draining=self.draining,
            num_running=self.scheduler.num_running,
            num_waiting=self.num_waiting,
            queued_prefill_tokens=self.scheduler.num_uncomputed_tokens,
            num_handing_over=len(self._receivers),
            blocks_available=self.pool.num_available,
            num_leases=self.pool.num_leases,
            step_cost=self._step_cost,
        )

    def break_silence(self) -> None:
        """There is something to tell: heartbeats go on, when the next one is due."""
        if self._is_silent:
            self._is_silent = False
            self._num_beats = max(0, math.ceil((self._clock.now - self._phase_s) / self._period_s))
            self._schedule_beat()

    def _schedule_beat(self) -> None:
        self._clock.at(max(self._clock.now, self._phase_s + self._num_beats * self._period_s), self._beat)

    def _beat(self) -> None:
        self._is_silent = self.is_quiet
        if self._router.wants_blocks:
            for events in self._events.take():
                self._router.blocks(events, self._clock.now)
        self._router.heartbeat(self.snapshot(), self._clock.now)
        self._num_beats += 1
        if not self._is_silent:
            self._schedule_beat()

    def _compute_for(self, to: SimulatedDecode, key: SequenceKey, unreserved: Sequence | None) -> None:
        self._receivers[key] = to
        if unreserved is not None:
            self._unreserved[key] = unreserved

    def _hand_over(self, seq: Sequence, num_last: int, has_ended: bool) -> None:
        """Its prompt is computed, the last `num_last` tokens in the step that ends now."""
        receiver, unreserved = self._receivers[seq.key], self._unreserved.pop(seq.key, None)
        exposed_s = self.shape.handoff_s + self.shape.handoff_token_s * num_last

        def go_over() -> None:
            self._clock.after(exposed_s, lambda: self._handed_over(seq))

        if has_ended:
            del self._receivers[seq.key]
            if unreserved is None:
                receiver.drop(seq.key)
            self.scheduler.release(seq.key)
        elif unreserved is None:
            go_over()
        else:
            exposed_s += self.shape.pulled_token_s * len(seq.prompt_token_ids)
            receiver.pull(unreserved, go_over)

    def _handed_over(self, seq: Sequence) -> None:
        """Decode has verified it: it goes on there, and the blocks are free here."""
        self.break_silence()
        self._receivers.pop(seq.key).admit(seq.key)
        self.scheduler.release(seq.key)
        self.on_room()

    @abstractmethod
    def on_room(self) -> None:
        """Blocks are free."""

    @abstractmethod
    def _plan(self) -> StepPlan: ...

    @abstractmethod
    def _finish(self, plan: StepPlan, output: StepOutput) -> None: ...

    def _silent(self, plan: StepPlan, ends: Iterable[float]) -> None:
        for item in plan.items:
            self._listener.on_tokens(item.seq.request_id, ends)


def _never_refused(reason: str, retry_after_s: float | None) -> None:
    raise AssertionError(f"what was computed is not refused: {reason}")


@dataclass(slots=True, eq=False)
class _Pending:
    seq: Sequence
    grant: Callable[[], None]
    refuse: Refuse


class SimulatedDecode(SimulatedWorker):
    """Reserves, decodes what was handed over, and computes what is started here: all of it, or prompts for others."""

    scheduler: DecodeScheduler

    def __init__(
        self, worker_id: str, shape: WorkerShape, clock: VirtualClock, listener: Listener, *, epoch: int
    ) -> None:
        super().__init__("decode", worker_id, shape, clock, listener, epoch=epoch, repetitions=self._repetitions)
        self.scheduler = DecodeScheduler(
            self.allocator,
            max_num_seqs=shape.max_num_seqs,
            token_budget=shape.token_budget,
            max_model_len=self.info.max_model_len,
            eos_token_ids=frozenset(),
            cost=lambda: self._cautious_cost,
        )
        self._pending: deque[_Pending] = deque()

    def reserve(self, seq: Sequence, grant: Callable[[], None], refuse: Refuse) -> None:
        """`grant` or `refuse(reason, retry_after_s)` is called, at once or when it is known."""
        self.break_silence()
        if not self._takes(seq, refuse):
            return
        pending = _Pending(seq, grant, refuse)
        self._pending.append(pending)
        self._retry()
        if pending in self._pending:
            self._clock.after(self.shape.reserve_wait_s, lambda: self._give_up(pending))

    def pull(self, seq: Sequence, grant: Callable[[], None]) -> None:
        """Its prompt is computed elsewhere, and waits there or in host memory until there is room here."""
        self.break_silence()
        self._pending.append(_Pending(seq, grant, _never_refused))
        self._retry()

    def start(
        self,
        seq: Sequence,
        refuse: Refuse,
        to: SimulatedDecode | None = None,
        unreserved: Sequence | None = None,
    ) -> None:
        """All of it here, or the prompt for `to`, which has a reservation for it; or, `unreserved`, will make room for
        that once the prompt is computed."""
        self.break_silence()
        if not self._takes(seq, refuse):
            return
        self.steps.interrupt()
        if to is not None:
            self._compute_for(to, seq.key, unreserved)
        self.scheduler.add(seq, hands_over=to is not None)
        self.steps.wake()

    def admit(self, key: SequenceKey) -> None:
        self.break_silence()
        self.steps.interrupt()
        self.scheduler.admit(key, TOKEN, self._clock.now)
        self.steps.wake()

    def drop(self, key: SequenceKey) -> None:
        self.break_silence()
        self.steps.interrupt()
        self.scheduler.drop(key)
        self.on_room()

    def on_room(self) -> None:
        self._retry()
        self.steps.wake()

    @property
    def longest_prompt(self) -> int:
        return self.info.max_model_len - 1

    @property
    def is_quiet(self) -> bool:
        return self.steps.is_idle and not self._pending and self.scheduler.num_running == 0

    @property
    def num_waiting(self) -> int:
        return len(self._pending) + self.scheduler.num_waiting

    def _takes(self, seq: Sequence, refuse: Refuse) -> bool:
        if seq.num_tokens >= self.info.max_model_len:
            refuse(f"{seq.num_tokens} tokens leave no room in {self.info.max_model_len}", None)
            return False
        if self.num_waiting >= self.shape.max_waiting:
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
        plan = self.scheduler.plan(self._clock.now)
        if not plan.items:
            for seq in self.scheduler.stuck():
                self.scheduler.release(seq.key)
                self._unreserved.pop(seq.key, None)
                self._listener.on_stuck(seq, self._receivers.pop(seq.key))
        return plan

    def _finish(self, plan: StepPlan, output: StepOutput) -> None:
        now = (self._clock.now,)
        last_tokens = {item.seq.key: item.num_tokens for item in plan.items if item.seq.key in self._receivers}
        for emission in self.scheduler.finish_step(plan, output):
            seq = emission.seq
            if emission.index == 0:
                self._listener.on_first_token(seq, self.worker_id)
            else:
                self._listener.on_tokens(seq.request_id, now)
            if emission.finish is not None:
                self._listener.on_finished(seq)
            if seq.key in last_tokens:
                self._hand_over(seq, last_tokens[seq.key], emission.finish is not None)
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

    scheduler: PrefillScheduler

    def __init__(
        self, worker_id: str, shape: WorkerShape, clock: VirtualClock, listener: Listener, *, epoch: int
    ) -> None:
        super().__init__("prefill", worker_id, shape, clock, listener, epoch=epoch)
        self.scheduler = PrefillScheduler(
            self.allocator,
            token_budget=shape.token_budget,
            max_waiting=shape.max_waiting,
            cost=lambda: self._cautious_cost,
        )

    def start(self, seq: Sequence, to: SimulatedDecode, refuse: Refuse, unreserved: Sequence | None = None) -> None:
        """`to` has a reservation for it; or, `unreserved`, will make room for that once the prompt is computed."""
        self.break_silence()
        longest = self.info.max_model_len if unreserved is None else min(self.info.max_model_len, to.longest_prompt)
        if seq.num_tokens > longest:
            refuse(f"{seq.num_tokens} tokens exceed {longest}", None)
            return
        if not self.scheduler.can_add():
            refuse("the prefill queue is full", self.shape.cost.prefill_s(self.scheduler.num_uncomputed_tokens))
            return
        self._compute_for(to, seq.key, unreserved)
        self.scheduler.add(seq)
        self.steps.wake()

    @property
    def is_quiet(self) -> bool:
        return self.steps.is_idle and not self._receivers

    def _plan(self) -> StepPlan:
        return self.scheduler.plan()[0]

    def _finish(self, plan: StepPlan, output: StepOutput) -> None:
        chunks = {item.seq.key: item.num_tokens for item in plan.items}
        for seq, sampled in self.scheduler.finish_step(plan, output):
            seq.output_token_ids.append(sampled.token_id)
            self._listener.on_first_token(seq, self.worker_id)
            has_ended = finish_reason(seq, frozenset()) is not None
            self._hand_over(seq, chunks[seq.key], has_ended)
            if has_ended:
                self._listener.on_finished(seq)

    def on_room(self) -> None:
        self.steps.wake()
