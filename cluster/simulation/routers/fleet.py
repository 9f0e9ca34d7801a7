"""What a baseline router remembers: workers, and what it placed on them and has not ended, counted at once.

Knows no rule of placement. Tokens that a request has generated so far are nobody's to tell a router, hence contexts
here are those of prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from cluster.scheduler.block_index import BlockIndex
from cluster.simulation.routers.base import PlaceQuery
from cluster.simulation.worker_shape import WorkerShape
from engine.cost_model.step_cost import StepCost, StepWork
from kv_transfer.messages.blocks import BlockEvents, BlockIndexSnapshot
from kv_transfer.messages.workers import WorkerInfo

_LEAST_ERROR: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCosts:
    """What a predicting baseline is given instead of a model that it would have to learn: the truth."""

    prefill: StepCost
    decode: StepCost
    prefill_chunk_tokens: int
    decode_chunk_tokens: int
    handoff_s: float = 0.0
    max_num_seqs: float = float("inf")  # of a decode worker

    @classmethod
    def of(cls, prefill: WorkerShape, decode: WorkerShape) -> KnownCosts:
        """The workers' true costs, with about the error that they would measure of themselves: 0.8 of the noise of
        decode steps, at least 2 %. Hand-offs cost nothing."""
        error = max(_LEAST_ERROR, 0.8 * decode.step_noise)
        return cls(
            prefill=replace(prefill.cost, relative_error=error),
            decode=replace(decode.cost, relative_error=error),
            prefill_chunk_tokens=prefill.token_budget,
            decode_chunk_tokens=decode.token_budget,
            max_num_seqs=decode.max_num_seqs,
        )

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of a prefill worker that computes full chunks."""
        return self.prefill_chunk_tokens / self.prefill.prefill_s(self.prefill_chunk_tokens)


@dataclass(slots=True, eq=False)
class Placed:
    query: PlaceQuery
    uncached_tokens: int
    computing: Member
    decode: Member


@dataclass(slots=True, eq=False)
class Member:
    """A worker and its load. `prefills`: requests that it computes the prompt of; `decodes`: that end here.

    Of the former, until the first token, `queued_tokens` are those not found cached; of the latter `context_tokens` are
    the prompts', `outstanding_tokens` these and the declared new ones.
    """

    info: WorkerInfo
    prefills: dict[str, Placed] = field(default_factory=dict)
    decodes: dict[str, Placed] = field(default_factory=dict)
    queued_tokens: int = 0
    queued_blocks: int = 0
    context_tokens: int = 0
    outstanding_tokens: int = 0
    decode_blocks: int = 0
    computed_at: float = 0.0  # when the prompts placed here are predicted to be computed

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    def blocks_of(self, query: PlaceQuery) -> int:
        return -(-query.num_tokens // self.info.block_size)

    def step_s(self, cost: StepCost, query: PlaceQuery) -> float:
        """Of a decode step with all that decodes or will, and `query`."""
        context = self.context_tokens + query.num_tokens
        return cost.step_s(StepWork(decodes=len(self.decodes) + 1, context_tokens=context))

    def count_prefill(self, placed: Placed, sign: int) -> None:
        self.queued_tokens += sign * placed.uncached_tokens
        self.queued_blocks += sign * self.blocks_of(placed.query)

    def count_decode(self, placed: Placed, sign: int) -> None:
        self.context_tokens += sign * placed.query.num_tokens
        self.outstanding_tokens += sign * (placed.query.num_tokens + placed.query.max_new_tokens)
        self.decode_blocks += sign * self.blocks_of(placed.query)


class Fleet:
    def __init__(self) -> None:
        self.prefills: list[Member] = []
        self.decodes: list[Member] = []
        self._members: dict[str, Member] = {}
        self._placed: dict[str, Placed] = {}
        self._index = BlockIndex()

    def register(self, info: WorkerInfo) -> None:
        member = self._members[info.worker_id] = Member(info)
        (self.prefills if info.role == "prefill" else self.decodes).append(member)

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._members

    def learn(self, message: BlockEvents | BlockIndexSnapshot, now: float) -> None:
        if isinstance(message, BlockEvents):
            self._index.on_events(message, now)
        else:
            self._index.on_snapshot(message, now)

    def cached_tokens(self, query: PlaceQuery) -> dict[str, int]:
        """By worker; who holds nothing is left out."""
        reaches = self._index.longest_prefix(b"".join(query.hashes))
        return {w: reach.device * self._members[w].info.block_size for w, reach in reaches.items()}

    def assign(self, query: PlaceQuery, prefill: Member | None, decode: Member, uncached_tokens: int) -> None:
        computing = prefill or decode
        placed = Placed(query, uncached_tokens, computing, decode)
        self._placed[query.request_id] = computing.prefills[query.request_id] = placed
        decode.decodes[query.request_id] = placed
        computing.count_prefill(placed, 1)
        decode.count_decode(placed, 1)

    def first_token(self, request_id: str, now: float) -> None:
        placed = self._placed[request_id]
        self._computed(placed)
        if not placed.computing.prefills:
            placed.computing.computed_at = now

    def ended(self, request_id: str) -> None:
        placed = self._placed.pop(request_id, None)
        if placed is not None:
            self._computed(placed)
            del placed.decode.decodes[request_id]
            placed.decode.count_decode(placed, -1)

    @staticmethod
    def _computed(placed: Placed) -> None:
        if placed.computing.prefills.pop(placed.query.request_id, None) is not None:
            placed.computing.count_prefill(placed, -1)
