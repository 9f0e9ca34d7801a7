"""What a baseline router remembers: workers, and what it placed on them and has not ended, counted at once.

Knows no rule of placement. Tokens that a request has generated so far are nobody's to tell a router, hence contexts
here are those of prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.block_index import BlockIndex
from cluster.simulation.router import PlaceQuery
from engine.step_cost import StepCost, StepWork
from kv_transfer.messages import BlockEvents, BlockIndexSnapshot, WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCosts:
    """What a predicting baseline is given instead of a model that it would have to learn: the truth."""

    prefill: StepCost
    decode: StepCost
    prefill_chunk_tokens: int
    decode_chunk_tokens: int
    handoff_s: float = 0.0


@dataclass(slots=True, eq=False)
class Placed:
    query: PlaceQuery
    uncached_tokens: int
    computing: Member
    decode: Member


@dataclass(slots=True, eq=False)
class Member:
    """A worker and its load. `prefills`: requests that it computes the prompt of; `decodes`: that end here."""

    info: WorkerInfo
    prefills: dict[str, Placed] = field(default_factory=dict)
    decodes: dict[str, Placed] = field(default_factory=dict)
    computed_at: float = 0.0  # when the prompts placed here are predicted to be computed

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    @property
    def queued_tokens(self) -> int:
        """Of prompts, less what was found cached, until the first token."""
        return sum(placed.uncached_tokens for placed in self.prefills.values())

    @property
    def outstanding_tokens(self) -> int:
        """Prompt and declared new tokens of all that is to end here."""
        return sum(p.query.num_tokens + p.query.max_new_tokens for p in self.decodes.values())

    def blocks(self, placed: dict[str, Placed], query: PlaceQuery) -> int:
        """Of prompts, with that of `query`."""
        size = self.info.block_size
        return sum(-(-p.query.num_tokens // size) for p in placed.values()) + -(-query.num_tokens // size)

    def step_s(self, cost: StepCost, query: PlaceQuery) -> float:
        """Of a decode step with all that decodes or will, and `query`."""
        context = sum(p.query.num_tokens for p in self.decodes.values()) + query.num_tokens
        return cost.step_s(StepWork(decodes=len(self.decodes) + 1, context_tokens=context))


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
        reaches = self._index.longest_prefix(query.hashes)
        return {w: reach.device * self._members[w].info.block_size for w, reach in reaches.items()}

    def assign(self, query: PlaceQuery, prefill: Member | None, decode: Member, uncached_tokens: int) -> None:
        computing = prefill or decode
        placed = Placed(query, uncached_tokens, computing, decode)
        self._placed[query.request_id] = computing.prefills[query.request_id] = placed
        decode.decodes[query.request_id] = placed

    def first_token(self, request_id: str, now: float) -> None:
        computing = self._placed[request_id].computing
        computing.prefills.pop(request_id, None)
        if not computing.prefills:
            computing.computed_at = now

    def ended(self, request_id: str) -> None:
        placed = self._placed.pop(request_id, None)
        if placed is not None:
            placed.computing.prefills.pop(request_id, None)
            placed.decode.decodes.pop(request_id, None)
