"""Simulated workers: the real schedulers over real block pools, with a cost model in the place of a model.

They speak with each other and with the gateway by calls; who calls decides how long that takes. What is as in life: who
waits for what, in which order, up to which limits, and what a worker that dies takes with it. What is not: there are no
disks, and host memory holds only what others may find there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, Final, Protocol, get_args

from cluster.simulation.clock import VirtualClock
from cluster.simulation.routers.base import Router
from cluster.simulation.workers.host_tier import HostTier
from cluster.simulation.workers.links import Flow, Network, NetworkLink
from cluster.simulation.workers.steps import (
    CurvedCost,
    DraftedCost,
    SimulatedSpeculation,
    SimulatedSteps,
    TrueCost,
    observed_factors,
    step_factors,
)
from cluster.simulation.workload.prompts import TOKEN
from decode_workers.scheduler import DecodeScheduler, DecodeState
from engine.cost_model.costs import StepCosts
from engine.cost_model.fit import StepKind, scaled
from engine.cost_model.noise import StepNoise
from engine.cost_model.step_cost import StepCost, StepWork
from engine.kv.allocation import BlockAllocator
from engine.kv.block_pool import BlockPool
from engine.sequence import SampledToken, Sequence, SequenceKey, StepOutput, StepPlan, finish_reason
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Endpoint
from kv_transfer.messages.workers import StepCostReport, WorkerInfo, WorkerSnapshot
from kv_transfer.tiers.block_events import BlockEventLog
from kv_transfer.worker.cost_report import cost_report, stated_report
from prefill_workers.scheduler import PrefillScheduler

Refuse = Callable[[str, float | None], None]
"""Takes the reason, and after how many seconds it would probably fit; None: never on this worker."""

_LEAST_ERROR: Final = 0.02
_KINDS: Final[tuple[StepKind, ...]] = get_args(StepKind)
_NOWHERE: Final = Endpoint(host="", port=0, node_id="")
# Who compares layouts plays the same workers in many of them. Of observed steps there are half a megabyte each.
_step_factors = lru_cache(maxsize=256)(step_factors)
_observed_factors = lru_cache(maxsize=32)(observed_factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShape:
    """What a worker is, apart from its id. `token_budget` bounds a step. `kv_tokens`: the room of its pool.

    The exposed part of a hand-off, from the prompt's last step until decode may go on: `handoff_s`, and for each token
    of the prompt's last chunk `handoff_token_s` (the last layer's slab, which nothing is left to hide behind). Where
    decode makes room only then, for each token of the prompt `pulled_token_s`, too.

    With a `link`, `handoff_s` remains, and all else is what sending the bytes takes while others use the links of both
    workers: of a prompt's, as its layers are computed; where `pulled_token_s` is not 0, of all of them at the end.

    With `host_kv_tokens` there is so much room in host memory, too, for KV that others may find; `host_token_s`: to
    copy a token's KV there, in the background, or back, in the step that needs it. A prefill worker that
    `asks_neighbours` fetches what others have there over its `link`, where that is faster than computing.

    Steps take what `cost` says; or that times what was observed of steps of their kind, where `noise` has it; else
    times a log-normal factor of mean 1 and sigma `step_noise`. `cost` is also what the worker reports, with its
    `relative_error` and the means of `noise`. With `half_speed_tokens`, few prompt tokens in a step are computed less
    efficiently than many: see `CurvedCost`. The worker does not know that, but measures its steps and reports the
    linear model that it learns. With an `acceptance`, who decodes checks drafts of which so many are right: see
    `SimulatedSpeculation`.
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
    link: NetworkLink | None = None
    host_kv_tokens: int = 0
    host_token_s: float = 0.0
    asks_neighbours: bool = False
    prefix_caching: bool = True
    step_noise: float = 0.0
    noise: Mapping[StepKind, StepNoise] = field(default_factory=dict)
    half_speed_tokens: float = 0.0
    acceptance: float = 0.0
    fast_forward: bool = True

    def __post_init__(self) -> None:
        if self.kv_tokens < self.block_size:
            raise ValueError(f"{self.kv_tokens} tokens of KV are less than one block of {self.block_size}")
        if self.host_kv_tokens < 0 or self.host_token_s < 0:
            raise ValueError("host_kv_tokens and host_token_s are at least 0")
        if self.asks_neighbours and (self.link is None or not self.host_kv_tokens):
            raise ValueError("neighbours' prefixes travel over links into host memory: give workers both")
        if self.step_noise < 0:
            raise ValueError(f"step_noise is {self.step_noise}; 0 means none, 0.1 that steps vary by a tenth")
        if self.half_speed_tokens < 0:
            raise ValueError(f"half_speed_tokens is {self.half_speed_tokens}; 0 means that steps are linear in tokens")
        if not 0 <= self.acceptance < 1:
            raise ValueError(f"acceptance is {self.acceptance}; 0 means no drafts, 0.7 that 7 of 10 are right")

    def true_cost(self) -> TrueCost:
        cost = CurvedCost(self.cost, self.half_speed_tokens) if self.half_speed_tokens else self.cost
        return DraftedCost(cost, self.cost) if self.acceptance else cost

    def factors(self, kind: StepKind, seed: int) -> list[float]:
        """What to multiply the costs of its steps of a kind by, one after the other."""
        observed = self.noise.get(kind)
        return _step_factors(self.step_noise, seed) if observed is None else _observed_factors(observed, seed)

    def stretch(self, kind: StepKind) -> float:
        """How many times what they cost steps of a kind take in the mean."""
        return self.noise[kind].mean if kind in self.noise else 1.0

    def cautious_cost(self) -> StepCost:
        """What nearly all of its steps with prompts stay below, as `StepCosts` has it of real ones."""
        margin = 1 + 3 * self.step_noise
        return replace(scaled(self.cost, margin * max(1.0, self.stretch("prefill"))), margin=margin)

    def report(self) -> StepCostReport:
        """The report of what its steps cost, if it measured none."""
        stated = stated_report(self.cost)
        return replace(stated, prefill_stretch=self.stretch("prefill"), decode_stretch=self.stretch("decode"))


def measured(cost: StepCost, step_noise: float = 0.0) -> StepCost:
    """`cost` with about the error that a worker would measure of it: 0.8 of the noise of its steps, at least 2 %."""
    return replace(cost, relative_error=max(_LEAST_ERROR, 0.8 * step_noise))


class TokenListener(Protocol):
    """Hears of requests' tokens: of the first and the last at the moment at which the worker has them, of others
    perhaps later."""

    def on_first_token(self, seq: Sequence, worker_id: str) -> None: ...

    def on_part(self, seq: Sequence) -> None:
        """The first part of a prompt is on its decode worker, which computes the rest."""
        ...

    def on_tokens(self, request_id: str, times: Iterable[float]) -> None:
        """More tokens, and when each came. The last one is told of before `on_finished`."""
        ...

    def on_finished(self, seq: Sequence) -> None: ...

    def on_stuck(self, seq: Sequence, to: SimulatedDecode) -> None:
        """The worker cannot compute the prompt that it was to hand over to `to`: all its memory is kept for others."""


class SimulatedWorker(ABC):
    """What both kinds have in common: a pool, its events, its steps, and what they tell the scheduler.

    Heartbeats come at the period of the real ones. A worker that has nothing to do and has said so is silent until it
    has: its heartbeats would say the same again. Hence a router under simulation must not take silence for death.
    """

    role: ClassVar[Role]
    scheduler: PrefillScheduler | DecodeScheduler

    def __init__(
        self,
        worker_id: str,
        shape: WorkerShape,
        clock: VirtualClock,
        listener: TokenListener,
        *,
        epoch: int,
        network: Network | None = None,
        life: int = 0,
    ) -> None:
        self.shape = shape
        self.worker_id = worker_id
        self._clock = clock
        self._listener = listener
        self._network = network
        self.pool = BlockPool(shape.kv_tokens // shape.block_size, epoch=epoch)
        self.host: HostTier | None = None
        if num_host := shape.host_kv_tokens // shape.block_size:
            self.host = HostTier(self.pool, num_host, shape.host_token_s * shape.block_size, clock, self._copied)
        self.allocator = BlockAllocator(
            self.pool,
            layer_groups=1,
            block_size=shape.block_size,
            prefix_caching=shape.prefix_caching,
            host_pool=None if self.host is None else self.host.pool,
        )
        self.steps = SimulatedSteps(
            clock,
            shape.true_cost(),
            plan=self._plan,
            finish=self._finish,
            repetitions=self._repetitions,
            silent=self._silent,
            factors={kind: shape.factors(kind, len(_KINDS) * epoch + at) for at, kind in enumerate(_KINDS)},
            began=None if network is None else self._send,
            copied_block_s=shape.host_token_s * shape.block_size,
            right=self._right,
        )
        self.info = WorkerInfo(
            worker_id=worker_id,
            role=self.role,
            endpoint=_NOWHERE,
            pid=life,
            model="simulated",
            compatibility="simulated",
            max_model_len=min(shape.max_model_len, self.pool.num_blocks * shape.block_size),
            num_blocks=self.pool.num_blocks,
            block_size=shape.block_size,
            layer_groups=1,
            chunk_tokens=shape.token_budget,
            max_num_seqs=shape.max_num_seqs if self.role == "decode" else 0,
            keeps_prefixes=shape.prefix_caching,
        )
        self.draining = False
        self.is_dead = False
        self._receivers: dict[SequenceKey, SimulatedDecode] = {}  # of prompts that are computed for others
        self._unreserved: dict[SequenceKey, Sequence] = {}  # of those, who is reserved for once they are computed
        # Prompts whose KV stays here until the receiver has room: what sends it; None, while the prompt is computed.
        self._kept: dict[SequenceKey, Callable[[], None] | None] = {}
        self._flows: dict[SequenceKey, Flow] = {}  # of those, whose KV is on its way
        self._step_cost = shape.report()
        self._cautious_cost: StepCost | None = shape.cautious_cost()
        self._costs: StepCosts | None = None  # what it has measured, of a worker that has to
        if shape.half_speed_tokens:
            self.slow_down(1.0)
        self._events = BlockEventLog(worker_id, layer_groups=1, epoch=epoch)
        self._num_snapshots = 0
        self._is_silent = True
        self._num_beats = 0
        self._begin(epoch)

    @abstractmethod
    def _begin(self, epoch: int) -> None:
        """Make the scheduler, and what else the role has."""

    def _repetitions(self, plan: StepPlan) -> int:
        """How many more times the same step would follow, with nothing to be told in between."""
        return 0

    def _right(self, plan: StepPlan) -> dict[int, list[SampledToken]]:
        """Which of the step's drafts are right, by their items in the plan."""
        return {}

    def join(
        self,
        router: Router,
        *,
        period_s: float,
        phase_s: float,
        neighbours: Callable[[], Iterable[SimulatedWorker]] = lambda: (),
    ) -> None:
        """Register with `router`, and tell it of this worker every `period_s` from `phase_s` on. Called before all
        else. `neighbours`: all workers that are alive."""
        self._router, self._period_s, self._phase_s, self._neighbours = router, period_s, phase_s, neighbours
        router.register(self.info, self.snapshot(), self._clock.now)
        if router.wants_blocks:
            self._events.watch("device", self.pool)
            if self.host is not None:
                self._events.watch("host", self.host.pool)
            for part in self._events.snapshot():
                router.update_blocks(part, self._clock.now)

    def die(self) -> None:
        """Nothing is done here any more, and nobody is told of anything."""
        self.is_dead = True
        self.steps.stop()
        for flow in self._flows.values():
            flow.close(None)

    def slow_down(self, factor: float) -> None:
        """Make steps take so many times as long, from the next one on. The worker learns that from them, as real
        workers do, and reports it."""
        if self._costs is None:
            self._costs = StepCosts(self.shape.cost)
            self._costs.seed(self.shape.cost)
        shape = replace(self.shape, cost=scaled(self.shape.cost, factor))
        self.steps.change(shape.true_cost(), self._measure)

    def _measure(self, work: StepWork, seconds: float) -> None:
        assert self._costs is not None
        self._costs.observe(work, seconds)
        self._cautious_cost = self._costs.cautious_cost()

    def held_to(self, hashes: list[bytes], first: int) -> int:
        """How far host memory here holds a prompt's columns, from the `first` on."""
        return first if self.host is None else self.host.num_held(hashes, first)

    def hands_over(self, key: SequenceKey) -> bool:
        """Whether it computes a prompt for another worker, and that has not got all of it yet."""
        return key in self._receivers

    def cancel(self, key: SequenceKey) -> None:
        """Drop a prompt that nobody wants any more. Unknown ones are fine."""
        if self.is_dead or self._receivers.pop(key, None) is None:
            return
        self._unreserved.pop(key, None)
        self._kept.pop(key, None)
        if (flow := self._flows.pop(key, None)) is not None:
            flow.close(None)
        self.break_silence()
        self.steps.interrupt()
        self.scheduler.release(key)
        self.on_room()

    @property
    @abstractmethod
    def is_quiet(self) -> bool:
        """Whether nothing is to be done, now or for what was promised."""

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    def snapshot(self) -> WorkerSnapshot:
        self.steps.catch_up()
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
            step_cost=self._step_cost if self._costs is None else cost_report(self._costs),
        )

    def break_silence(self) -> None:
        """Send heartbeats again, when the next one is due: there is something to tell."""
        if self._is_silent and not self.is_dead:
            self._is_silent = False
            self._num_beats = max(0, math.ceil((self._clock.now - self._phase_s) / self._period_s))
            self._schedule_beat()

    def _schedule_beat(self) -> None:
        self._clock.at(max(self._clock.now, self._phase_s + self._num_beats * self._period_s), self._beat)

    def _beat(self) -> None:
        if self.is_dead:
            return
        self._is_silent = self.is_quiet
        if self._router.wants_blocks:
            for events in self._events.take():
                self._router.update_blocks(events, self._clock.now)
        self._router.heartbeat(self.snapshot(), self._clock.now)
        self._num_beats += 1
        if not self._is_silent:
            self._schedule_beat()

    def _compute_for(self, to: SimulatedDecode, key: SequenceKey, unreserved: Sequence | None) -> None:
        self._receivers[key] = to
        if unreserved is not None:
            self._unreserved[key] = unreserved

    def _copied(self) -> None:
        """A block has got to host memory, and is nobody's here now."""
        if not self.is_dead:
            self.break_silence()
            self.on_room()

    def _hand_over(self, seq: Sequence, num_last: int, has_ended: bool) -> None:
        """Hand a sequence over whose prompt is computed, the last `num_last` tokens in the step that ends now."""
        receiver, unreserved = self._receivers[seq.key], self._unreserved.pop(seq.key, None)
        if has_ended:
            del self._receivers[seq.key]
            self._kept.pop(seq.key, None)
            if unreserved is None:
                receiver.drop(seq.key)
            if (flow := self._flows.pop(seq.key, None)) is not None:
                flow.close(None)
            self.scheduler.release(seq.key)
            return
        exposed_s = self.shape.handoff_s
        if self._network is None:
            exposed_s += self.shape.handoff_token_s * num_last
            if unreserved is not None or seq.key in self._kept:
                exposed_s += self.shape.pulled_token_s * len(seq.prompt_token_ids)

        def arrived() -> None:
            self._clock.after(exposed_s, lambda: self._handed_over(seq))

        def go_over() -> None:
            if self._network is None:
                arrived()
            elif seq.key in self._receivers and not self.is_dead:
                if seq.key not in self._flows:
                    self._open_flow(seq).add(self._link.token_bytes * seq.num_computed)
                self._flows[seq.key].close(arrived)

        if unreserved is not None:
            receiver.pull(unreserved, go_over)
        elif seq.key in self._kept:
            self._kept[seq.key] = go_over
        else:
            go_over()

    def _handed_over(self, seq: Sequence) -> None:
        """Decode has verified it: it goes on there, and the blocks are free here. Unless one of them is gone."""
        receiver = self._receivers.get(seq.key)
        if receiver is None or receiver.is_dead or self.is_dead:
            return
        self.break_silence()
        del self._receivers[seq.key]
        self._flows.pop(seq.key, None)
        receiver.admit(seq)
        if seq.is_part:
            self._listener.on_part(seq)
        self.scheduler.release(seq.key)
        self.on_room()

    @property
    def _link(self) -> NetworkLink:
        assert self.shape.link is not None, "where there is a network, each worker has a link"
        return self.shape.link

    def _open_flow(self, seq: Sequence) -> Flow:
        assert self._network is not None
        receiver = self._receivers[seq.key]
        flow = self._network.open(self.worker_id, self._link, receiver.worker_id, receiver._link)
        self._flows[seq.key] = flow
        return flow

    def _send(self, plan: StepPlan, seconds: float) -> None:
        """A step begins: of prompts that are computed for others, all layers but the last go out as they are computed,
        what was found cached at once, and what is left of the step before with it."""
        for item in plan.items:
            if item.seq.key not in self._receivers or self._is_sent_when_computed(item.seq.key):
                continue
            flow = self._flows.get(item.seq.key)
            if flow is None:
                flow = self._open_flow(item.seq)
                flow.add(self._link.token_bytes * item.start)
                flow.num_tokens = item.start
            num_new = item.start + item.num_tokens - flow.num_tokens
            if num_new > 0:  # else it was computed again
                flow.add_over(self._link.hidden_token_bytes * num_new, seconds)

    def _sent(self, plan: StepPlan) -> None:
        """The step is over, and with it the last layer of these chunks."""
        for item in plan.items:
            flow = self._flows.get(item.seq.key)
            if flow is not None and (num_new := item.seq.num_computed - flow.num_tokens) > 0:
                flow.add((self._link.token_bytes - self._link.hidden_token_bytes) * num_new)
                flow.num_tokens = item.seq.num_computed

    def _is_sent_when_computed(self, key: SequenceKey) -> bool:
        """Whether a prompt's KV moves only after its last step: decode pulls it, or has no room for it yet."""
        return key in self._kept or (key in self._unreserved and self.shape.pulled_token_s > 0.0)

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

    role = "decode"
    scheduler: DecodeScheduler

    def _begin(self, epoch: int) -> None:
        shape = self.shape
        self._speculation: SimulatedSpeculation | None = None
        if shape.acceptance:
            costs = self._costs or StepCosts(shape.cost)
            costs.seed(shape.cost)
            self._speculation = SimulatedSpeculation(shape.acceptance, costs, epoch)
        self.scheduler = DecodeScheduler(
            self.allocator,
            max_num_seqs=shape.max_num_seqs,
            token_budget=shape.token_budget,
            max_model_len=self.info.max_model_len,
            eos_token_ids=frozenset(),
            cost=lambda: self._cautious_cost,
            speculation=None if self._speculation is None else self._speculation.speculation,
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
        """Take over a sequence whose prompt is computed elsewhere, and waits there or in host memory until there is
        room here."""
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

    def admit(self, computed: Sequence) -> None:
        """All that the other worker had to compute is here."""
        self.break_silence()
        self.steps.interrupt()
        if computed.is_part:
            seq = self.scheduler.sequence(computed.key)
            assert seq is not None
            seq.num_cached = computed.num_cached
        self.scheduler.admit(computed.key, None if computed.is_part else TOKEN, self._clock.now)
        if self.host is not None:
            self.host.write_through()
        self.steps.wake()

    def waits_for_room(self, key: SequenceKey) -> bool:
        """Whether its reservation has no blocks yet."""
        return any(pending.seq.key == key for pending in self._pending)

    def renew(self, key: SequenceKey, seq: Sequence) -> bool:
        """A newer attempt takes over the blocks that are kept for an earlier one. False if there are none, or not
        enough: they are free then."""
        if self.scheduler.state(key) is DecodeState.RESERVED and self.scheduler.renew(key, seq):
            return True
        self.drop(key)
        return False

    def die(self) -> None:
        super().die()
        self._pending.clear()

    def drop(self, key: SequenceKey) -> None:
        if self.is_dead:
            return
        if self._pending:
            self._pending = deque(pending for pending in self._pending if pending.seq.key != key)
        self.break_silence()
        self.steps.interrupt()
        self.scheduler.drop(key)
        self.on_room()

    def on_room(self) -> None:
        self._retry()
        self.steps.wake()

    def snapshot(self) -> WorkerSnapshot:
        snapshot = replace(super().snapshot(), context_tokens=self.scheduler.num_context_tokens)
        if self._speculation is None:
            return snapshot
        speculation = self._speculation.speculation
        return replace(snapshot, tokens_per_step=speculation.tokens_per_step, drafts_stretch=speculation.drafts_stretch)

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
                if (flow := self._flows.pop(seq.key, None)) is not None:
                    flow.close(None)
                self._listener.on_stuck(seq, self._receivers.pop(seq.key))
        return plan

    def _finish(self, plan: StepPlan, output: StepOutput) -> None:
        now = (self._clock.now,)
        last_tokens = {item.seq.key: item.num_tokens for item in plan.items if item.seq.key in self._receivers}
        emissions = self.scheduler.finish_step(plan, output)
        if self.host is not None:
            self.host.write_through()
        if self._flows:
            self._sent(plan)
        for emission in emissions:
            seq = emission.seq
            if emission.sampled is None:
                pass
            elif emission.index == seq.num_prior_output:
                self._listener.on_first_token(seq, self.worker_id)
            else:
                self._listener.on_tokens(seq.request_id, now)
            if emission.finish is not None:
                self._listener.on_finished(seq)
            if seq.key in last_tokens:
                self._hand_over(seq, last_tokens[seq.key], emission.finish is not None)
        self._retry()

    def _right(self, plan: StepPlan) -> dict[int, list[SampledToken]]:
        return {} if self._speculation is None else self._speculation.right(plan)

    def _repetitions(self, plan: StepPlan) -> int:
        """Steps in which all decode on within the blocks that they have, none becomes full and none ends.

        A block that becomes full is published. Nothing but that, growth and ends concerns blocks where no prompt is
        computed and nobody rests in host memory.
        """
        if (
            not self.shape.fast_forward
            or self._costs is not None
            or self._speculation is not None
            or plan.copies
            or self.scheduler.num_uncomputed_tokens
        ):
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

    role = "prefill"
    scheduler: PrefillScheduler

    def _begin(self, epoch: int) -> None:
        self.scheduler = PrefillScheduler(
            self.allocator,
            token_budget=self.shape.token_budget,
            max_waiting=self.shape.max_waiting,
            longest=self.info.max_model_len,
            cost=lambda: self._cautious_cost,
        )

    def start(
        self,
        seq: Sequence,
        to: SimulatedDecode,
        refuse: Refuse,
        unreserved: Sequence | None = None,
        *,
        is_reserved: bool = True,
    ) -> None:
        """`to` has a reservation for it; or that waits for room, and `reserved` follows (not `is_reserved`); or,
        `unreserved`, it will make room for that once the prompt is computed."""
        self.break_silence()
        longest = self.info.max_model_len if unreserved is None else min(self.info.max_model_len, to.longest_prompt)
        if seq.num_tokens > longest:
            refuse(f"{seq.num_tokens} tokens exceed {longest}", None)
            return
        if not self.scheduler.can_add():
            refuse("the prefill queue is full", self.shape.cost.prefill_s(self.scheduler.num_uncomputed_tokens))
            return
        self._compute_for(to, seq.key, unreserved)
        if not is_reserved:
            self._kept[seq.key] = None
        is_loading = self.shape.asks_neighbours and self._load(seq)
        self.scheduler.add(seq, loading=is_loading, is_reserved=is_reserved)
        self.steps.wake()

    def reserved(self, key: SequenceKey) -> None:
        """Begin to hand over a prompt that was started without room for it. Unknown ones are fine."""
        if key in self._kept and not self.is_dead:
            self.scheduler.reserved(key)
            go_over = self._kept.pop(key)
            if go_over is not None:
                go_over()
            self.steps.wake()

    def _load(self, seq: Sequence) -> bool:
        """Fetch what a neighbour has of the prompt beyond what is here, if that is faster than computing it: as
        `PrefixLoading.begin` and `PrefixTiers` have it. True: the scheduler is told when it is here."""
        assert self.host is not None
        assert self._network is not None
        block_size = self.shape.block_size
        hashes = self.allocator.hashes(seq, (seq.num_tokens - 1) // block_size)
        here = (self.pool.find((h, 0)) is None and self.host.pool.find((h, 0)) is None for h in hashes)
        first = next((number for number, is_missing in enumerate(here) if is_missing), len(hashes))
        holders = [other for other in self._neighbours() if other is not self and other.host is not None]
        best = max(holders, key=lambda other: other.held_to(hashes, first), default=None)
        if best is None or best.host is None:
            return False
        stop = best.held_to(hashes, first)
        num_gained = (stop - first) * block_size
        num_bytes = num_gained * self._link.token_bytes
        bytes_per_s = min(self._link.bytes_per_s, best._link.bytes_per_s)
        budget = self.shape.token_budget
        if not num_gained or num_bytes / bytes_per_s >= self.shape.cost.prefill_s(num_gained, 0, budget):
            return False
        come = self.host.fetch(hashes[first:stop], best.host)
        if come is None:
            return False

        def loaded() -> None:
            come()
            if not self.is_dead:
                self.scheduler.loaded(seq.key)
                self.steps.wake()

        flow = self._network.open(best.worker_id, best._link, self.worker_id, self._link)
        flow.add(num_bytes)
        flow.close(loaded)
        return True

    @property
    def is_quiet(self) -> bool:
        return self.steps.is_idle and not self._receivers

    def _plan(self) -> StepPlan:
        return self.scheduler.plan()

    def _finish(self, plan: StepPlan, output: StepOutput) -> None:
        chunks = {item.seq.key: item.num_tokens for item in plan.items}
        computed = self.scheduler.finish_step(plan, output)
        if self.host is not None:
            self.host.write_through()
        if self._flows:
            self._sent(plan)
        for seq, sampled in computed:
            if sampled is None:
                self._hand_over(seq, chunks[seq.key], has_ended=False)
                continue
            seq.output_token_ids.append(sampled.token_id)
            self._listener.on_first_token(seq, self.worker_id)
            has_ended = finish_reason(seq, frozenset()) is not None
            self._hand_over(seq, chunks[seq.key], has_ended)
            if has_ended:
                self._listener.on_finished(seq)

    def on_room(self) -> None:
        self.steps.wake()
