"""A trace over simulated workers, placed by a router: the life of each request from arrival to its last token.

    arrival -> place, or wait for that -> (turned away, and back after Retry-After if clients do that)
                     -> decode reserves, or the request waits for room there -> prefill computes, first token
                        -> hand-off -> decode computes the rest
                     -> or decode computes all of it; in one pool, some compute prompts for others as prefill does

Each message takes `message_s`. The same trace, router and settings give the same records bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from cluster.simulation.clock import VirtualClock
from cluster.simulation.records import Gaps, Record, Summary, summarise
from cluster.simulation.routers.base import Router
from cluster.simulation.workers import SimulatedDecode, SimulatedPrefill, SimulatedWorker, WorkerShape
from cluster.simulation.workload.prompts import ContentHasher, sequence_of
from cluster.simulation.workload.traces import TraceRequest
from cluster.slo.classes import SloClass, SloConfig
from engine.kv.prefix import PrefixHasher
from engine.sequence import Sequence
from kv_transfer.messages.scheduling import Place, Placement, Queued, Unplaceable

_NOTHING: Final = SloClass(name="nothing is promised")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """`declared_tokens`: the most new tokens that clients say they want; None: exactly what they will get, as if they
    knew. Clients that are turned away come back after Retry-After, up to `max_returns` times. `gateway_s`: of each
    request, in HTTP and the gateway, before anybody is asked.

    `promises_steps`: workers know what each sequence was promised, and size their steps by that; else by `token_budget`
    alone, as engines do that have a fixed one. `reserves_late`: decode makes room for a prompt once that is computed,
    not before it queues, as engines do whose decode workers pull KV, or let it land in host memory.
    """

    num_prefill: int
    num_decode: int
    prefill: WorkerShape
    decode: WorkerShape
    slo: SloConfig = field(default_factory=SloConfig)
    heartbeat_s: float = 0.5
    message_s: float = 0.0002
    gateway_s: float = 0.0
    declared_tokens: int | None = None
    max_returns: int = 0
    promises_steps: bool = True
    reserves_late: bool = False
    seed: int = 0  # of the noise in steps

    def __post_init__(self) -> None:
        if self.num_prefill < 0 or self.num_decode < 1:
            raise ValueError(f"{self.num_prefill} prefill and {self.num_decode} decode workers cannot serve requests")
        if self.prefill.block_size != self.decode.block_size:
            raise ValueError("prefill and decode workers name prompts' blocks alike: give both the same block size")


@dataclass(slots=True, eq=False)
class Live:
    """A request that is in the cluster, or whose client will come back."""

    request: TraceRequest
    hasher: PrefixHasher
    record: Record
    attempt: int = 0
    token_times: list[float] = field(default_factory=list)  # at the workers


@dataclass(frozen=True, slots=True)
class SimulationResult:
    records: list[Record]  # in order of first arrival
    summary: Summary


Watch = Callable[[Record], None]
"""Told of a request when it has its first token, ends or is turned away. What it raises ends the simulation."""


def simulate(
    config: SimulationConfig, requests: Iterable[TraceRequest], router: Router, watch: Watch = lambda record: None
) -> SimulationResult:
    """Play the trace to its end. Raises ValueError where it holds no requests or not in order of arrival."""
    return Simulation(config, router, watch).run(iter(requests))


class Simulation:
    def __init__(self, config: SimulationConfig, router: Router, watch: Watch = lambda record: None) -> None:
        self._config = config
        self._router = router
        self._watch = watch
        self._clock = VirtualClock()
        self._live: dict[str, Live] = {}
        self._records: list[Record] = []
        self._asks_at = math.inf  # when the router is asked for answers next
        self._prefills = {
            w.worker_id: w
            for w in (
                SimulatedPrefill(f"prefill-{i}", config.prefill, self._clock, self, epoch=config.seed + 2 * i)
                for i in range(config.num_prefill)
            )
        }
        self._decodes = {
            w.worker_id: w
            for w in (
                SimulatedDecode(f"decode-{i}", config.decode, self._clock, self, epoch=config.seed + 2 * i + 1)
                for i in range(config.num_decode)
            )
        }
        workers: list[SimulatedWorker] = [*self._prefills.values(), *self._decodes.values()]
        for index, worker in enumerate(workers):
            phase_s = config.heartbeat_s * index / len(workers)
            worker.join(router, period_s=config.heartbeat_s, phase_s=phase_s)

    def run(self, requests: Iterator[TraceRequest]) -> SimulationResult:
        self._await_next(requests)
        while self._clock.step():
            pass
        assert not self._live, f"{len(self._live)} requests are stuck, such as {next(iter(self._live.values()))}"
        for worker in (*self._prefills.values(), *self._decodes.values()):
            worker.pool.check_idle()
        num_preemptions = sum(worker.scheduler.num_preemptions for worker in self._decodes.values())
        router = type(self._router).__name__
        return SimulationResult(self._records, summarise(self._records, self._utilisation(), router, num_preemptions))

    def _utilisation(self) -> dict[str, float]:
        pools: dict[str, list[SimulatedWorker]] = {
            "prefill": [*self._prefills.values()],
            "decode": [*self._decodes.values()],
        }
        return {
            name: sum(worker.steps.busy_s for worker in pool) / (len(pool) * self._clock.now)
            for name, pool in pools.items()
            if pool and self._clock.now
        }

    # --- the gateway ---

    def _await_next(self, requests: Iterator[TraceRequest]) -> None:
        request = next(requests, None)
        if request is None:
            return
        if request.arrival_s < self._clock.now:
            raise ValueError(f"request {request.request_id} arrives before the one that it follows in the trace")
        self._clock.at(request.arrival_s, lambda: self._arrive(request, requests))

    def _arrive(self, request: TraceRequest, requests: Iterator[TraceRequest]) -> None:
        slo_class = self._config.slo.named(request.slo_class or self._config.slo.default)
        if slo_class is None or request.request_id in self._live:
            raise ValueError(f"request {request.request_id} of class {request.slo_class!r}: no such class, or a twin")
        record = Record(
            request_id=request.request_id,
            slo=slo_class,
            first_arrival_s=self._clock.now,
            arrival_s=self._clock.now,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
        )
        hasher = ContentHasher(request, len(self._records), self._config.decode.block_size)
        self._records.append(record)
        self._live[request.request_id] = live = Live(request, hasher, record)
        self._come(live)
        self._await_next(requests)

    def _come(self, live: Live) -> None:
        live.record.arrival_s = self._clock.now
        self._clock.after(self._config.gateway_s + self._config.message_s, lambda: self._place(live))

    def _place(self, live: Live) -> None:
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

    def _answer(self, live: Live, answer: Placement | Unplaceable) -> None:
        if isinstance(answer, Unplaceable):
            reason, retry_after_s = answer.reason, answer.retry_after_s
            self._clock.after(self._config.message_s, lambda: self._reject(live, reason, retry_after_s))
        else:
            self._clock.after(2 * self._config.message_s, lambda: self._begin(live, answer))

    def _query(self, live: Live) -> Place:
        request, declared, slo = live.request, self._config.declared_tokens, live.record.slo
        num_findable = (request.prompt_tokens - 1) // self._config.decode.block_size
        return Place(
            request_id=request.request_id,
            attempt=0,
            num_tokens=request.prompt_tokens,
            max_new_tokens=request.output_tokens if declared is None else max(declared, request.output_tokens),
            slo_class=slo.name,
            tenant=request.tenant,
            ttft_s=slo.ttft_s,
            tpot_s=slo.tpot_s,
            gap_s=slo.gap_s,
            waited_s=self._clock.now - live.record.arrival_s,
            prefix_hashes=b"".join(live.hasher.hashes[:num_findable]),
        )

    def _begin(self, live: Live, placement: Placement) -> None:
        """The decode worker has the gateway's message."""
        live.record.placed_s = self._clock.now
        live.record.prefill, live.record.decode = placement.prefill, placement.decode
        decode = self._decodes[placement.decode]
        seq, refuse = self._sequence(live), partial(self._refuse, live)

        def granted() -> None:
            self._clock.after(2 * self._config.message_s, lambda: self._prefill(live, placement, seq))

        if placement.prefill is None:
            decode.start(seq, refuse)
        elif self._config.reserves_late:
            self._prefill(live, placement, seq)
        else:
            decode.reserve(seq, granted, refuse)

    def _prefill(self, live: Live, placement: Placement, reserved: Sequence) -> None:
        assert placement.prefill is not None
        decode = self._decodes[placement.decode]

        def refuse(reason: str, retry_after_s: float | None) -> None:
            self._refuse(live, reason, retry_after_s)
            if not self._config.reserves_late:
                self._clock.after(2 * self._config.message_s, lambda: decode.drop(reserved.key))

        seq, unreserved = self._sequence(live), reserved if self._config.reserves_late else None
        if placement.prefill in self._prefills:
            self._prefills[placement.prefill].start(seq, decode, refuse, unreserved)
        else:
            self._decodes[placement.prefill].start(seq, refuse, decode, unreserved)

    def _sequence(self, live: Live) -> Sequence:
        promised = live.record.slo if self._config.promises_steps else _NOTHING
        return sequence_of(live.request, live.hasher, live.attempt, promised)

    def _refuse(self, live: Live, reason: str, retry_after_s: float | None) -> None:
        """By a worker, whose message has a way to go."""
        self._clock.after(self._config.message_s, lambda: self._refused(live, reason, retry_after_s))

    def _refused(self, live: Live, reason: str, retry_after_s: float | None) -> None:
        self._router.ended(live.request.request_id, self._clock.now, None)
        self._reject(live, reason, retry_after_s)

    def _reject(self, live: Live, reason: str, retry_after_s: float | None) -> None:
        live.record.num_rejections += 1
        live.record.rejected, live.record.retry_after_s = reason, retry_after_s
        self._watch(live.record)
        if retry_after_s is None or live.record.num_rejections > self._config.max_returns:
            del self._live[live.request.request_id]
            return
        live.attempt += 1  # of the sequences' keys: workers may hold on to the last ones for a moment
        self._clock.after(retry_after_s, lambda: self._come(live))

    # --- what workers tell ---

    def on_first_token(self, seq: Sequence, worker_id: str) -> None:
        live = self._live[seq.request_id]
        live.record.cached_tokens = seq.num_cached
        live.token_times.append(self._clock.now)
        live.record.first_token_s = self._clock.now + self._config.message_s
        self._watch(live.record)
        self._router.first_token(seq.request_id, self._clock.now)

    def on_tokens(self, request_id: str, times: Iterable[float]) -> None:
        self._live[request_id].token_times.extend(times)

    def on_stuck(self, seq: Sequence, to: SimulatedDecode) -> None:
        """Who keeps memory for it computes it as well."""
        live = self._live[seq.request_id]

        def begin() -> None:
            to.drop(seq.key)
            live.attempt += 1
            to.start(self._sequence(live), partial(self._refuse, live))

        live.record.prefill = None
        self._clock.after(2 * self._config.message_s, begin)

    def on_finished(self, seq: Sequence) -> None:
        live = self._live.pop(seq.request_id)
        live.record.gaps = Gaps.between(live.token_times, live.record.slo)
        live.record.end_s = self._clock.now + self._config.message_s
        live.record.rejected, live.record.retry_after_s = "", None
        self._watch(live.record)
        self._router.ended(seq.request_id, self._clock.now, live.record.output_tokens)
