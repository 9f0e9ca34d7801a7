"""Routers that others publish, as their papers, documents and code state them, behind the simulation's seam.

Rules here need no targets; `cluster.simulation.routers.slo_baselines` holds those that do. Where a source breaks ties
by chance or says nothing, the first worker of the least loaded is taken, so that runs repeat.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import count

from cluster.simulation.routers.base import NobodyWaits, PlaceQuery
from cluster.simulation.routers.fleet import Fleet, Member
from kv_transfer.messages.blocks import BlockEvents, BlockIndexSnapshot
from kv_transfer.messages.scheduling import Placement, Unplaceable
from kv_transfer.messages.workers import WorkerInfo, WorkerSnapshot


@dataclass(frozen=True, slots=True)
class Choice:
    """`prefill` None: the decode worker computes all of it."""

    prefill: Member | None
    decode: Member
    cached_tokens: int = 0  # where the prompt is computed


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: str
    retry_after_s: float | None


class Baseline(NobodyWaits, ABC):
    """The bookkeeping that all rules share; a rule is `choose`."""

    wants_blocks = False

    def __init__(self) -> None:
        self.fleet = Fleet()

    @abstractmethod
    def choose(self, query: PlaceQuery, now: float) -> Choice | Refusal: ...

    def register(self, info: WorkerInfo, snapshot: WorkerSnapshot, now: float) -> None:
        self.fleet.register(info)

    def heartbeat(self, snapshot: WorkerSnapshot, now: float) -> bool:
        return snapshot.worker_id in self.fleet

    def blocks(self, message: BlockEvents | BlockIndexSnapshot, now: float) -> None:
        self.fleet.learn(message, now)

    def place(self, request: PlaceQuery, now: float) -> Placement | Unplaceable:
        choice = self.choose(request, now)
        if isinstance(choice, Refusal):
            return Unplaceable(
                request_id=request.request_id,
                attempt=request.attempt,
                reason=choice.reason,
                retry_after_s=choice.retry_after_s,
            )
        self.fleet.assign(request, choice.prefill, choice.decode, request.num_tokens - choice.cached_tokens)
        return Placement(
            request_id=request.request_id,
            attempt=request.attempt,
            prefill=None if choice.prefill is None else choice.prefill.worker_id,
            decode=choice.decode.worker_id,
        )

    def first_token(self, request_id: str, now: float) -> None:
        self.fleet.first_token(request_id, now)

    def ended(self, request_id: str, now: float, num_output_tokens: int) -> None:
        self.fleet.ended(request_id)


class RoundRobin(Baseline):
    """Each pool in turn, whatever the load: the default of most load balancers."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = count()

    def choose(self, query: PlaceQuery, now: float) -> Choice | Refusal:
        turn = next(self._turns)
        prefills, decodes = self.fleet.prefills, self.fleet.decodes
        return Choice(prefills[turn % len(prefills)] if prefills else None, decodes[turn % len(decodes)])


class LeastOutstandingTokens(Baseline):
    """In each pool the worker with the fewest tokens placed on it and not done: of prompts to compute on the prefill
    side, of prompts and declared outputs on the decode side.
    """

    def choose(self, query: PlaceQuery, now: float) -> Choice | Refusal:
        prefill = min(self.fleet.prefills, key=lambda m: m.queued_tokens, default=None)
        return Choice(prefill, min(self.fleet.decodes, key=lambda m: m.outstanding_tokens))


class Colocated(Baseline):
    """Continuous batching with chunked prefill, no split (Agrawal et al., "Sarathi-Serve", OSDI 2024): decodes have
    their place in every step, chunks of prompts get what they leave of the token budget. Requests go to the worker with
    the fewest outstanding tokens.

    The workers' scheduler does that with what is started on decode workers; simulate it without prefill workers.
    """

    def choose(self, query: PlaceQuery, now: float) -> Choice | Refusal:
        return Choice(None, min(self.fleet.decodes, key=lambda m: m.outstanding_tokens))


class DistServe(Baseline):
    """A fixed split (Zhong et al., "DistServe", OSDI 2024, section 4.3): prompts go to the prefill instance with the
    shortest queue, first come first served; decodes to the least loaded decode instance. Nobody is turned away.
    """

    def choose(self, query: PlaceQuery, now: float) -> Choice | Refusal:
        prefill = min(self.fleet.prefills, key=lambda m: len(m.prefills), default=None)
        return Choice(prefill, min(self.fleet.decodes, key=lambda m: len(m.decodes)))


class Dynamo(Baseline):
    """NVIDIA Dynamo's KV router at temperature 0 (docs/router-design.md and lib/kv-router, release 1.6).

    cost = prefill blocks to compute, with the worker's queue, less the device overlap + blocks that would be active.
    The prefill stage counts both terms; the decode stage of a split counts active blocks alone. Without prefill workers
    both terms are of the decode workers. What is optional there (host and disk overlap, conditional bypass) is off.
    """

    wants_blocks = True

    def choose(self, query: PlaceQuery, now: float) -> Choice | Refusal:
        cached = self.fleet.cached_tokens(query)
        if not self.fleet.prefills:
            both = min(self.fleet.decodes, key=lambda m: self._prefill_cost(m, query, cached) + self._active(m, query))
            return Choice(None, both, cached.get(both.worker_id, 0))
        prefill = min(
            self.fleet.prefills,
            key=lambda m: self._prefill_cost(m, query, cached) + m.queued_blocks + m.blocks_of(query),
        )
        decode = min(self.fleet.decodes, key=lambda m: self._active(m, query))
        return Choice(prefill, decode, cached.get(prefill.worker_id, 0))

    @staticmethod
    def _prefill_cost(member: Member, query: PlaceQuery, cached: dict[str, int]) -> float:
        uncached = query.num_tokens - cached.get(member.worker_id, 0)
        return (member.queued_tokens + uncached) / member.info.block_size

    @staticmethod
    def _active(member: Member, query: PlaceQuery) -> int:
        return member.decode_blocks + member.blocks_of(query)
