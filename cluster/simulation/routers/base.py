"""The seam between the simulation and who places requests, and what the routers that others publish have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

from cluster.scheduler.block_index import BlockIndex
from cluster.scheduler.placement.retry_after import MIN_RETRY_AFTER_S
from engine.cost_model.step_cost import StepCost, StepWork
from kv_transfer.messages.blocks import BlockEvents, BlockIndexSnapshot
from kv_transfer.messages.scheduling import Place, Placement, Queued, Unplaceable
from kv_transfer.messages.workers import WorkerInfo, WorkerSnapshot
from kv_transfer.worker.cost_report import reported_cost


class Router(Protocol):
    """What the simulation needs of `GlobalScheduler`, in whose words it speaks. `now` never goes back.

    `wants_blocks`: whether `update_blocks` is called at all.
    """

    wants_blocks: bool

    def register(self, info: WorkerInfo, snapshot: WorkerSnapshot, now: float) -> None: ...

    def unregister(self, worker_id: str, now: float) -> object:
        """Forget a worker that is gone, and what was placed there. What comes again has the same request id."""
        ...

    def heartbeat(self, snapshot: WorkerSnapshot, now: float) -> object: ...

    def update_blocks(self, message: BlockEvents | BlockIndexSnapshot, now: float) -> object:
        """What a worker's prefix cache holds: all of it after `register`, changes with its heartbeats."""
        ...

    def place(self, request: Place, now: float) -> Placement | Unplaceable | Queued:
        """Queued: it waits, and will be among the `answers`."""
        ...

    def answers(self, now: float) -> list[Placement | Unplaceable]:
        """The answers to requests that waited. Called at `next_at`."""
        ...

    def next_at(self) -> float | None:
        """The time at which there may be answers, as it stands; asked after each `place` and `answers`."""
        ...

    def part_computed(self, request_id: str, now: float) -> None:
        """The first part of a request that it split is computed."""
        ...

    def first_token(self, request_id: str, now: float) -> None: ...

    def ended(self, request_id: str, now: float, num_output_tokens: int | None) -> None:
        """A request was served, or, without tokens, refused by a worker. Not told of whom the router turned away
        itself."""
        ...


@dataclass(slots=True, eq=False)
class Member:
    """A worker and its load. `prefills`: requests that it computes the prompt of; `decodes`: that end here.

    Of the former, until the first token, `queued_tokens` are those not found cached; of the latter `context_tokens` are
    the prompts', `outstanding_tokens` these and the declared new ones. Tokens that a request has generated so far are
    nobody's to tell a router, hence contexts here are those of prompts.
    """

    info: WorkerInfo
    snapshot: WorkerSnapshot
    cost: StepCost
    prefills: dict[str, PlacedRequest] = field(default_factory=dict)
    decodes: dict[str, PlacedRequest] = field(default_factory=dict)
    queued_tokens: int = 0
    context_tokens: int = 0
    outstanding_tokens: int = 0
    computed_at: float = 0.0  # when the prompts placed here are predicted to be computed

    def blocks_of(self, query: Place) -> int:
        return -(-query.num_tokens // self.info.block_size)

    def ttft_s(self, query: Place, cached_tokens: int, now: float) -> float:
        """Wait for what was placed here before, then the uncached part of the prompt."""
        new_tokens = query.num_tokens - cached_tokens
        return max(0.0, self.computed_at - now) + self.cost.prefill_s(new_tokens, cached_tokens, self.info.chunk_tokens)

    def beside_s(self, query: Place, cached_tokens: int) -> float:
        """What those who decode here add to the steps that compute the prompt."""
        num_steps = -(-(query.num_tokens - cached_tokens) // self.info.chunk_tokens)
        decoding = StepWork(decodes=len(self.decodes), context_tokens=self.context_tokens)
        return max(1, num_steps) * (self.cost.step_s(decoding) - self.cost.base_s)

    def tpot_s(self, query: Place) -> float:
        """Seconds of a decode step with all that decodes or will, and `query`."""
        context = self.context_tokens + query.num_tokens
        return self.cost.step_s(StepWork(decodes=len(self.decodes) + 1, context_tokens=context))

    def count_prefill(self, placed: PlacedRequest, sign: int) -> None:
        self.queued_tokens += sign * (placed.query.num_tokens - placed.cached_tokens)

    def count_decode(self, placed: PlacedRequest, sign: int) -> None:
        self.context_tokens += sign * placed.query.num_tokens
        self.outstanding_tokens += sign * (placed.query.num_tokens + placed.query.max_new_tokens)


@dataclass(slots=True, eq=False)
class PlacedRequest:
    """A request and its workers. `prefill` None: the decode worker computes all of it."""

    query: Place
    prefill: Member | None
    decode: Member
    cached_tokens: int = 0  # where the prompt is computed

    @property
    def computing(self) -> Member:
        return self.prefill or self.decode


class Baseline(ABC):
    """The bookkeeping that published rules share: workers, what was placed on them and has not ended, counted at once.

    A rule is `choose`; it answers at once. Predictions are by the costs that workers report of themselves, which in a
    simulation are the true ones unless workers have to measure them: that favours who predicts.
    """

    wants_blocks = False

    def __init__(self) -> None:
        self.prefills: list[Member] = []
        self.decodes: list[Member] = []
        self._members: dict[str, Member] = {}
        self._placed: dict[str, PlacedRequest] = {}
        self._index = BlockIndex()

    @abstractmethod
    def choose(self, query: Place, now: float) -> PlacedRequest | Unplaceable: ...

    def register(self, info: WorkerInfo, snapshot: WorkerSnapshot, now: float) -> None:
        cost = reported_cost(info.role, snapshot.step_cost)
        assert cost is not None, f"{info.worker_id} does not report its costs"
        member = self._members[info.worker_id] = Member(info, snapshot, cost)
        (self.prefills if info.role == "prefill" else self.decodes).append(member)

    def unregister(self, worker_id: str, now: float) -> None:
        member = self._members.pop(worker_id)
        (self.prefills if member.info.role == "prefill" else self.decodes).remove(member)
        self._index.forget(worker_id)

    def heartbeat(self, snapshot: WorkerSnapshot, now: float) -> None:
        member = self._members[snapshot.worker_id]
        if snapshot.step_cost is not member.snapshot.step_cost:  # it measures its steps
            member.cost = reported_cost(member.info.role, snapshot.step_cost) or member.cost
        member.snapshot = snapshot

    def update_blocks(self, message: BlockEvents | BlockIndexSnapshot, now: float) -> None:
        if isinstance(message, BlockEvents):
            self._index.on_events(message, now)
        else:
            self._index.on_snapshot(message, now)

    def cached_tokens(self, query: Place) -> dict[str, int]:
        """How many of the prompt's tokens each worker holds; a worker that holds nothing is left out."""
        reaches = self._index.longest_prefix(query.prefix_hashes)
        return {w: reach.device * self._members[w].info.block_size for w, reach in reaches.items()}

    def place(self, request: Place, now: float) -> Placement | Unplaceable:
        if request.request_id in self._placed:
            self.ended(request.request_id, now, None)  # an earlier attempt
        if not self.decodes:
            return turned_away(request, "no decode worker is there", MIN_RETRY_AFTER_S)
        placed = self.choose(request, now)
        if isinstance(placed, Unplaceable):
            return placed
        self.book(placed, now)
        return Placement(
            request_id=request.request_id,
            attempt=request.attempt,
            prefill=None if placed.prefill is None else placed.prefill.info.worker_id,
            decode=placed.decode.info.worker_id,
        )

    def book(self, placed: PlacedRequest, now: float) -> None:
        request_id, computing = placed.query.request_id, placed.computing
        computing.computed_at = now + computing.ttft_s(placed.query, placed.cached_tokens, now)
        self._placed[request_id] = computing.prefills[request_id] = placed.decode.decodes[request_id] = placed
        computing.count_prefill(placed, 1)
        placed.decode.count_decode(placed, 1)

    def answers(self, now: float) -> list[Placement | Unplaceable]:
        return []

    def next_at(self) -> float | None:
        return None

    def part_computed(self, request_id: str, now: float) -> None:
        raise AssertionError(f"{request_id} was not split")

    def first_token(self, request_id: str, now: float) -> None:
        placed = self._placed[request_id]
        self._computed(placed)
        if not placed.computing.prefills:
            placed.computing.computed_at = now

    def ended(self, request_id: str, now: float, num_output_tokens: int | None) -> None:
        placed = self._placed.pop(request_id)
        self._computed(placed)
        del placed.decode.decodes[request_id]
        placed.decode.count_decode(placed, -1)

    @staticmethod
    def _computed(placed: PlacedRequest) -> None:
        if placed.computing.prefills.pop(placed.query.request_id, None) is not None:
            placed.computing.count_prefill(placed, -1)


def turned_away(query: Place, reason: str, retry_after_s: float | None) -> Unplaceable:
    return Unplaceable(request_id=query.request_id, attempt=query.attempt, reason=reason, retry_after_s=retry_after_s)
