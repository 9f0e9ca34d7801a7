"""A trace over simulated workers, placed by a router: the life of each request from arrival to its last token.

    arrival -> place, or wait for that -> (turned away, and back after Retry-After if clients do that)
                     -> decode reserves, or the request waits for room there -> prefill computes, first token
                        -> hand-off -> decode computes the rest
                     -> or decode computes all of it; in one pool, some compute prompts for others as prefill does

Each message takes `message_s`. The same trace, router and settings give the same records bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from cluster.gateway.orchestrator import OrchestratorConfig
from cluster.simulation.clock import VirtualClock
from cluster.simulation.failures import Kill, Slow
from cluster.simulation.records import Gaps, RequestRecord, Summary, summarise
from cluster.simulation.routers.base import Router
from cluster.simulation.workers.links import Network
from cluster.simulation.workers.worker import SimulatedDecode, SimulatedPrefill, SimulatedWorker, WorkerShape
from cluster.simulation.workload.prompts import ContentHasher, sequence_of
from cluster.simulation.workload.traces import TraceRequest
from cluster.slo.classes import SloClass, SloConfig
from engine.sequence import Sequence, SequenceKey
from kv_transfer.messages.scheduling import Place, Placement, Queued, Unplaceable

_NOTHING: Final = SloClass(name="nothing is promised")
_LOOK_S: Final = 0.05  # whether a worker that drains has
_GATEWAY: Final = OrchestratorConfig()  # how a request is tried again


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """`declared_tokens`: the most new tokens that clients say they want; None: exactly what they will get, as if they
    knew. Clients that are turned away come back after Retry-After, up to `max_returns` times. `gateway_s`: of each
    request, in HTTP and the gateway, before anybody is asked.

    `promises_steps`: workers know what each sequence was promised, and size their steps by that; else by `token_budget`
    alone, as engines do that have a fixed one. `reserves_late`: decode makes room for a prompt once that is computed,
    not before it queues, as engines do whose decode workers pull KV, or let it land in host memory.

    `failures`: what goes wrong, and when. A request whose worker dies goes on elsewhere, behind the tokens that its
    client has: their KV and the prompt's are computed again, unless found cached.

    `shapes`: of workers that are unlike the others of their pool, by name: `prefill-0`, `prefill-1`..., `decode-0`...
    `first_number`: of both pools' first workers, where others have the numbers below it.
    """

    num_prefill: int
    num_decode: int
    prefill: WorkerShape
    decode: WorkerShape
    shapes: Mapping[str, WorkerShape] = field(default_factory=dict)
    failures: tuple[Kill | Slow, ...] = ()
    slo: SloConfig = field(default_factory=SloConfig)
    heartbeat_s: float = 0.5
    message_s: float = 0.0002
    gateway_s: float = 0.0
    declared_tokens: int | None = None
    max_returns: int = 0
    promises_steps: bool = True
    reserves_late: bool = False
    seed: int = 0  # of the noise in steps
    first_number: int = 0

    def __post_init__(self) -> None:
        if self.num_prefill < 0 or self.num_decode < 1:
            raise ValueError(f"{self.num_prefill} prefill and {self.num_decode} decode workers cannot serve requests")
        if unknown := (self.shapes.keys() | {failure.worker_id for failure in self.failures}) - set(self.worker_ids):
            raise ValueError(f"there is no worker {min(unknown)}; there are {', '.join(self.worker_ids)}")
        if len({shape.block_size for shape in self.all_shapes}) > 1:
            raise ValueError("all workers name prompts' blocks alike: give them the same block size")
        if len({shape.link is None for shape in self.all_shapes}) > 1:
            raise ValueError("either all workers have a link, or none has")

    @property
    def worker_ids(self) -> list[str]:
        pools = {"prefill": self.num_prefill, "decode": self.num_decode}
        return [f"{pool}-{self.first_number + index}" for pool, size in pools.items() for index in range(size)]

    def shape_of(self, worker_id: str) -> WorkerShape:
        pool = self.prefill if worker_id.startswith("prefill-") else self.decode
        return self.shapes.get(worker_id, pool)

    @property
    def all_shapes(self) -> list[WorkerShape]:
        return [self.shape_of(worker_id) for worker_id in self.worker_ids]


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that is in the cluster, or whose client will come back."""

    request: TraceRequest
    hasher: ContentHasher
    record: RequestRecord
    attempt: int = 0
    token_times: list[float] = field(default_factory=list)  # at the workers
    placement: Placement | None = None  # where it runs
    num_retries: int = 0  # since its client last came
    num_faults: int = 0  # of these, by dying workers since there was progress
    num_before: int = 0  # tokens, of earlier attempts
    exclude: list[str] = field(default_factory=list)
    held: tuple[SequenceKey, SimulatedDecode] | None = None  # blocks that are kept for an earlier attempt

    @property
    def key(self) -> SequenceKey:
        """The key of this attempt's sequences."""
        return SequenceKey(self.request.request_id, self.attempt)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    records: list[RequestRecord]  # in order of first arrival
    summary: Summary

    def only(self, request_ids: Set[str]) -> SimulationResult:
        """What became of these requests alone, of workers that were as busy and preempted as often. Raises ValueError
        where there are none."""
        records = [record for record in self.records if record.request_id in request_ids]
        summary = self.summary
        return SimulationResult(
            records, summarise(records, summary.utilisation, summary.router, summary.num_preemptions)
        )


Watch = Callable[[RequestRecord], None]
"""Told of a request when it has its first token, ends or is turned away. What it raises ends the simulation."""


def simulate(
    config: SimulationConfig, requests: Iterable[TraceRequest], router: Router, watch: Watch = lambda record: None
) -> SimulationResult:
    """Play the trace to its end. Raises ValueError where it holds no requests or not in order of arrival."""
    return Simulation(config, router, watch).run(iter(requests))


class Simulation:
    """`clock`: that of others which are played at the same time; None: its own."""

    def __init__(
        self,
        config: SimulationConfig,
        router: Router,
        watch: Watch = lambda record: None,
        clock: VirtualClock | None = None,
    ) -> None:
        self._config = config
        self._router = router
        self._watch = watch
        self._clock = VirtualClock() if clock is None else clock
        self._all_came = False
        self._was_here: dict[str, tuple[float, float]] = {}  # from when to when, by worker; a dead one could have been
        self._live: dict[str, LiveRequest] = {}
        self._records: list[RequestRecord] = []
        self._asks_at = math.inf  # when the router is asked for answers next
        self._over_at = 0.0  # when the last request so far was served or turned away
        self._network = Network(self._clock) if config.decode.link is not None else None
        self._prefills: dict[str, SimulatedPrefill] = {}
        self._decodes: dict[str, SimulatedDecode] = {}
        self._dead: list[SimulatedWorker] = []
        for worker_id in config.worker_ids:
            self._make_worker(worker_id, number=int(worker_id.partition("-")[2]))
        workers: list[SimulatedWorker] = [*self._prefills.values(), *self._decodes.values()]
        for index, worker in enumerate(workers):
            phase_s = config.heartbeat_s * index / len(workers)
            worker.join(router, period_s=config.heartbeat_s, phase_s=phase_s, neighbours=self._alive)
        for failure in config.failures:
            self._clock.at(failure.at_s, partial(self._fail, failure))

    def _make_worker(self, worker_id: str, *, number: int, life: int = 0) -> SimulatedWorker:
        """Make a worker. Its `number` tells it from all others of its role, and from its earlier lives."""
        shape, epoch = self._config.shape_of(worker_id), self._config.seed + 2 * number
        self._was_here.setdefault(worker_id, (self._clock.now, math.inf))
        if worker_id.startswith("prefill-"):
            prefill = SimulatedPrefill(
                worker_id, shape, self._clock, self, epoch=epoch, network=self._network, life=life
            )
            self._prefills[worker_id] = prefill
            return prefill
        decode = SimulatedDecode(worker_id, shape, self._clock, self, epoch=epoch + 1, network=self._network, life=life)
        self._decodes[worker_id] = decode
        return decode

    def run(self, requests: Iterator[TraceRequest]) -> SimulationResult:
        self.begin(requests)
        while self._clock.step():
            pass
        return self.result()

    def begin(self, requests: Iterator[TraceRequest]) -> None:
        """Have the requests come as the clock goes on. Raises ValueError, also later, where they are not in order."""
        self._await_next(requests)

    @property
    def is_over(self) -> bool:
        """Whether all requests have come, and none of them is here or will come back."""
        return self._all_came and not self._live

    def result(self) -> SimulationResult:
        """What became of the requests, once the clock has nothing left. Raises ValueError where there were none."""
        assert not self._live, f"{len(self._live)} requests are stuck, such as {next(iter(self._live.values()))}"
        for worker in (*self._prefills.values(), *self._decodes.values()):
            worker.pool.check_idle()
            if worker.host is not None:
                worker.host.pool.check_idle()
        decodes = [w for w in (*self._decodes.values(), *self._dead) if isinstance(w, SimulatedDecode)]
        num_preemptions = sum(worker.scheduler.num_preemptions for worker in decodes)
        router = type(self._router).__name__
        return SimulationResult(self._records, summarise(self._records, self._utilisation(), router, num_preemptions))

    def _utilisation(self) -> dict[str, float]:
        """The busy share of each pool's time until the last request was over, after which failures and timers may
        follow; a worker that is dead could have computed, too."""
        shares = {}
        for pool in ("prefill", "decode"):
            workers = [worker for worker in (*self._alive(), *self._dead) if worker.info.role == pool]
            here = [self._was_here[worker_id] for worker_id in {worker.worker_id for worker in workers}]
            time_s = sum(max(0.0, min(until, self._over_at) - since) for since, until in here)
            if time_s:
                shares[pool] = sum(worker.steps.busy_s for worker in workers) / time_s
        return shares

    # --- who comes and goes ---

    def join(self, worker_id: str, *, number: int) -> SimulatedWorker:
        """Have one more worker from now on; its role is in its name. `number`: no other worker's."""
        worker = self._make_worker(worker_id, number=number)
        phase_s = self._clock.now % self._config.heartbeat_s
        worker.join(self._router, period_s=self._config.heartbeat_s, phase_s=phase_s, neighbours=self._alive)
        return worker

    def drain(self, worker_id: str, drain_s: float, left: Callable[[], None]) -> None:
        """Have a worker take nothing new, and be gone when it is done, or after `drain_s`: what runs on then goes on
        elsewhere. `left` is called when it is gone, unless it died before."""
        worker = self._worker(worker_id)
        assert worker is not None, f"{worker_id} is not here"
        worker.draining = True
        worker.break_silence()
        self._router.heartbeat(worker.snapshot(), self._clock.now)
        self._await_drained(worker, self._clock.now + drain_s, left)

    def _await_drained(self, worker: SimulatedWorker, until: float, left: Callable[[], None]) -> None:
        if worker.is_dead:
            return
        is_needed = not worker.is_quiet or any(self._concerns(worker, live) for live in self._live.values())
        if is_needed and self._clock.now < until:
            self._clock.after(_LOOK_S, lambda: self._await_drained(worker, until, left))
            return
        self._was_here[worker.worker_id] = (self._was_here[worker.worker_id][0], self._clock.now)
        self._end(worker)
        left()

    def _end(self, worker: SimulatedWorker) -> None:
        """End a worker with all that it has: a message later that is seen."""
        keys = [live.key for live in self._live.values() if self._concerns(worker, live)]
        worker.die()
        self._prefills.pop(worker.worker_id, None)
        self._decodes.pop(worker.worker_id, None)
        self._dead.append(worker)
        self._clock.after(self._config.message_s, lambda: self._lost(worker, keys))

    # --- what goes wrong ---

    def _fail(self, failure: Kill | Slow) -> None:
        worker = self._worker(failure.worker_id)
        if worker is None:
            return  # it is dead already
        if isinstance(failure, Slow):
            worker.slow_down(failure.factor)
            return
        self._end(worker)
        if failure.back_s is not None:
            life = worker.info.pid + 1
            after_s = self._config.message_s + failure.back_s  # its connections are seen to break, and then
            self._clock.after(after_s, lambda: self._come_back(worker.worker_id, life))

    def _alive(self) -> list[SimulatedWorker]:
        return [*self._prefills.values(), *self._decodes.values()]

    def _worker(self, worker_id: str) -> SimulatedWorker | None:
        """The worker of that id; None if it is dead."""
        return self._prefills.get(worker_id) or self._decodes.get(worker_id)

    def _concerns(self, worker: SimulatedWorker, live: LiveRequest) -> bool:
        """Whether this attempt cannot end without that worker."""
        if live.placement is None:
            return False
        computes = worker.worker_id == live.placement.prefill and worker.hands_over(live.key)
        return computes or worker.worker_id == live.placement.decode

    def _lost(self, worker: SimulatedWorker, keys: list[SequenceKey]) -> None:
        """Gateways and scheduler see that it is gone."""
        self._router.unregister(worker.worker_id, self._clock.now)
        for key in keys:
            live = self._live.get(key.request_id)
            if live is not None and live.key == key and live.placement is not None:
                self._retry(live, worker.worker_id)

    def _come_back(self, worker_id: str, life: int) -> None:
        phase_s = self._config.heartbeat_s * self._config.worker_ids.index(worker_id) / len(self._config.worker_ids)
        number = int(worker_id.partition("-")[2]) + life * len(self._config.worker_ids)
        worker = self._make_worker(worker_id, number=number, life=life)
        worker.join(self._router, period_s=self._config.heartbeat_s, phase_s=phase_s, neighbours=self._alive)

    def _retry(self, live: LiveRequest, lost: str) -> None:
        """The attempt is over, the request is not: as `Orchestrator._prepare_retry` has it. What a decode worker keeps
        for it is kept, what others compute for it is not wanted any more."""
        placement, key = live.placement, live.key
        assert placement is not None
        computing = None if placement.prefill is None else self._worker(placement.prefill)
        live.exclude = [lost]
        if lost == placement.decode:
            if computing is not None and computing.hands_over(key):
                live.exclude.append(computing.worker_id)
                self._clock.after(self._config.message_s, lambda: computing.cancel(key))
        elif (decode := self._decodes.get(placement.decode)) is not None:
            live.held = (key, decode)
        if len(live.token_times) > live.num_before + 1:  # progress: one token each comes of computing the prompt again
            live.num_faults = 0
        live.num_faults += 1
        self._attempt_again(live, _GATEWAY.retry_delay_s * min(live.num_faults - 1, _GATEWAY.max_attempts))

    def _attempt_again(self, live: LiveRequest, delay_s: float) -> None:
        """Another attempt, or the end of the request."""
        live.attempt += 1
        live.num_retries += 1
        live.record.num_retries += 1
        live.num_before, live.placement = len(live.token_times), None
        if live.num_faults >= _GATEWAY.max_attempts:
            self._refused(live, f"it failed {_GATEWAY.max_attempts} times", None)
        else:
            self._clock.after(delay_s + self._config.message_s, lambda: self._place(live))

    def _drop_held(self, live: LiveRequest) -> None:
        if live.held is not None:
            (key, decode), live.held = live.held, None
            decode.drop(key)

    # --- the gateway ---

    def _await_next(self, requests: Iterator[TraceRequest]) -> None:
        request = next(requests, None)
        if request is None:
            self._all_came = True
            return
        if request.arrival_s < self._clock.now:
            raise ValueError(f"request {request.request_id} arrives before the one that it follows in the trace")
        self._clock.at(request.arrival_s, lambda: self._arrive(request, requests))

    def _arrive(self, request: TraceRequest, requests: Iterator[TraceRequest]) -> None:
        slo_class = self._config.slo.named(request.slo_class or self._config.slo.default)
        if slo_class is None or request.request_id in self._live:
            raise ValueError(f"request {request.request_id} of class {request.slo_class!r}: no such class, or a twin")
        record = RequestRecord(
            request_id=request.request_id,
            slo=slo_class,
            first_arrival_s=self._clock.now,
            arrival_s=self._clock.now,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            tenant=request.tenant,
        )
        hasher = ContentHasher(request, len(self._records), self._config.decode.block_size)
        self._records.append(record)
        self._live[request.request_id] = live = LiveRequest(request, hasher, record)
        self._come_to_gateway(live)
        self._await_next(requests)

    def _come_to_gateway(self, live: LiveRequest) -> None:
        live.record.arrival_s = self._clock.now
        live.num_retries, live.placement = 0, None
        self._clock.after(self._config.gateway_s + self._config.message_s, lambda: self._place(live))

    def _place(self, live: LiveRequest) -> None:
        answer = self._router.place(self._query(live), self._clock.now)
        if not isinstance(answer, Queued):
            self._answer(live, answer)
        self._await_answers()

    def _await_answers(self) -> None:
        """Unless the router will be asked by then anyway."""
        next_at = self._router.next_at()
        if next_at is not None and next_at < self._asks_at:
            self._asks_at = max(next_at, self._clock.now)
            self._clock.at(self._asks_at, self._take_answers)

    def _take_answers(self) -> None:
        if self._clock.now < self._asks_at:
            return  # it was asked in between
        self._asks_at = math.inf
        for answer in self._router.answers(self._clock.now):
            self._answer(self._live[answer.request_id], answer)
        self._await_answers()

    def _answer(self, live: LiveRequest, answer: Placement | Unplaceable) -> None:
        if isinstance(answer, Unplaceable) and self._may_wait(live):  # what has begun is not turned away
            self._clock.after(_GATEWAY.retry_delay_s, lambda: self._place(live))
        elif isinstance(answer, Unplaceable):
            reason, retry_after_s = answer.reason, answer.retry_after_s
            self._clock.after(self._config.message_s, lambda: self._reject(live, reason, retry_after_s))
        else:
            self._clock.after(2 * self._config.message_s, lambda: self._begin(live, answer))

    def _may_wait(self, live: LiveRequest) -> bool:
        has_begun = live.num_retries > 0 or len(live.token_times) > live.num_before
        return has_begun and self._clock.now < live.record.arrival_s + _GATEWAY.request_deadline_s

    def _query(self, live: LiveRequest) -> Place:
        request, declared, slo = live.request, self._config.declared_tokens, live.record.slo
        num_emitted = live.num_before
        num_findable = (request.prompt_tokens - 1) // self._config.decode.block_size
        return Place(
            request_id=request.request_id,
            attempt=live.num_retries,
            num_tokens=request.prompt_tokens + num_emitted,
            max_new_tokens=(request.output_tokens if declared is None else max(declared, request.output_tokens))
            - num_emitted,
            exclude=live.exclude,
            prefer_decode=None if live.held is None or live.held[1].is_dead else live.held[1].worker_id,
            slo_class=slo.name,
            tenant=request.tenant,
            ttft_s=slo.ttft_s,
            tpot_s=slo.tpot_s,
            gap_s=slo.gap_s,
            waited_s=self._clock.now - live.record.arrival_s,
            prefix_hashes=b"".join(live.hasher.hashes[:num_findable]),
            prompt_hash=live.hasher.whole,
        )

    def _begin(self, live: LiveRequest, placement: Placement) -> None:
        """The decode worker has the gateway's message."""
        live.record.placed_s = self._clock.now
        live.record.prefill, live.record.decode = placement.prefill, placement.decode
        live.placement = placement
        decode = self._decodes.get(placement.decode)
        if decode is None:
            self._retry(live, placement.decode)
            return
        live.record.split_at = placement.split_at
        seq = self._sequence(live)
        seq.num_received = placement.split_at
        keeping: SimulatedPrefill | None = None  # its prompt, while the reservation waits for room

        def refuse(reason: str, retry_after_s: float | None) -> None:
            if keeping is not None:
                self._clock.after(self._config.message_s, partial(keeping.cancel, seq.key))
            self._refuse(live, reason, retry_after_s)

        def granted() -> None:
            def begin() -> None:
                if keeping is not None:
                    keeping.reserved(seq.key)
                else:
                    self._prefill(live, placement, seq)

            self._clock.after(2 * self._config.message_s, begin)

        held, live.held = live.held, None
        if held is not None and held[1] is decode and placement.prefill is not None and not self._config.reserves_late:
            if decode.renew(held[0], seq):
                granted()
                return
        elif held is not None:
            held[1].drop(held[0])
        if placement.prefill is None:
            decode.start(seq, refuse)
        elif self._config.reserves_late:
            self._prefill(live, placement, seq)
        else:
            decode.reserve(seq, granted, refuse)
            prefill = self._worker(placement.prefill)
            if isinstance(prefill, SimulatedPrefill) and decode.waits_for_room(seq.key):
                keeping = prefill
                self._clock.after(2 * self._config.message_s, lambda: self._prefill(live, placement, seq, False))

    def _prefill(self, live: LiveRequest, placement: Placement, reserved: Sequence, is_reserved: bool = True) -> None:
        assert placement.prefill is not None
        if live.key != reserved.key:
            return  # this attempt is over
        decode, prefill = self._decodes.get(placement.decode), self._worker(placement.prefill)
        if decode is None or prefill is None:
            self._retry(live, placement.decode if decode is None else placement.prefill)
            return

        def refuse(reason: str, retry_after_s: float | None) -> None:
            self._refuse(live, reason, retry_after_s)
            if not self._config.reserves_late:
                self._clock.after(2 * self._config.message_s, lambda: decode.drop(reserved.key))

        seq = self._sequence(live, placement.split_at)
        unreserved = reserved if self._config.reserves_late else None
        if isinstance(prefill, SimulatedPrefill):
            prefill.start(seq, decode, refuse, unreserved, is_reserved=is_reserved)
        elif isinstance(prefill, SimulatedDecode):
            prefill.start(seq, refuse, decode, unreserved)

    def _sequence(self, live: LiveRequest, part_tokens: int = 0) -> Sequence:
        promised = live.record.slo if self._config.promises_steps else _NOTHING
        return sequence_of(live.request, live.hasher, live.attempt, promised, live.num_before, part_tokens)

    def _refuse(self, live: LiveRequest, reason: str, retry_after_s: float | None) -> None:
        """A worker refuses the request; its message has a way to go."""
        key = live.key
        self._clock.after(self._config.message_s, lambda: self._heard_refusal(live, key, reason, retry_after_s))

    def _heard_refusal(self, live: LiveRequest, key: SequenceKey, reason: str, retry_after_s: float | None) -> None:
        if live.key != key:
            return  # this attempt is over
        if retry_after_s is not None and self._may_wait(live):
            self._attempt_again(live, _GATEWAY.retry_delay_s)
        else:
            self._refused(live, reason, retry_after_s)

    def _refused(self, live: LiveRequest, reason: str, retry_after_s: float | None) -> None:
        self._router.ended(live.request.request_id, self._clock.now, None)
        self._reject(live, reason, retry_after_s)

    def _reject(self, live: LiveRequest, reason: str, retry_after_s: float | None) -> None:
        self._drop_held(live)
        self._over_at = self._clock.now
        live.record.num_rejections += 1
        live.record.rejected, live.record.retry_after_s = reason, retry_after_s
        self._watch(live.record)
        if retry_after_s is None or live.record.num_rejections > self._config.max_returns:
            del self._live[live.request.request_id]
            return
        live.attempt += 1  # of the sequences' keys: workers may hold on to the last ones for a moment
        self._clock.after(retry_after_s, lambda: self._come_to_gateway(live))

    # --- what workers tell ---

    def on_first_token(self, seq: Sequence, worker_id: str) -> None:
        live = self._live.get(seq.request_id)
        if live is None or live.key != seq.key:
            return  # of an attempt that is over
        live.token_times.append(self._clock.now)
        if live.record.first_token_s is None:
            live.record.cached_tokens = seq.num_cached
            live.record.first_token_s = self._clock.now + self._config.message_s
            self._watch(live.record)
        self._router.first_token(seq.request_id, self._clock.now)

    def on_part(self, seq: Sequence) -> None:
        self._router.part_computed(seq.request_id, self._clock.now)

    def on_tokens(self, request_id: str, times: Iterable[float]) -> None:
        self._live[request_id].token_times.extend(times)

    def on_stuck(self, seq: Sequence, to: SimulatedDecode) -> None:
        """Place the prompt anew with the decode worker that keeps memory for it, which computes it as well."""
        live = self._live.get(seq.request_id)
        if live is None or live.key != seq.key:
            return  # of an attempt that is over

        def begin() -> None:
            to.drop(seq.key)
            if live.key != seq.key or to.is_dead:
                return  # its death is, or will be, heard of
            live.attempt += 1
            to.start(self._sequence(live), partial(self._refuse, live))

        live.record.prefill, live.record.split_at = None, 0
        if live.placement is not None:
            live.placement = replace(live.placement, prefill=None, split_at=0)
        self._clock.after(2 * self._config.message_s, begin)

    def on_finished(self, seq: Sequence) -> None:
        live = self._live.get(seq.request_id)
        if live is None or live.key != seq.key:
            return  # of an attempt that is over
        del self._live[seq.request_id]
        self._over_at = self._clock.now
        live.record.gaps = Gaps.between(live.token_times)
        live.record.end_s = self._clock.now + self._config.message_s
        live.record.rejected, live.record.retry_after_s = "", None
        self._watch(live.record)
        self._router.ended(seq.request_id, self._clock.now, live.record.output_tokens)
