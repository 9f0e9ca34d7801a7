"""Routers that others publish, as their papers, documents and code state them, behind the simulation's seam.

Rules here need no targets; `cluster.simulation.routers.slo_baselines` holds those that do. Where a source breaks ties
by chance or says nothing, the first worker of the least loaded is taken, so that runs repeat.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import count
from typing import Final

from cluster.simulation.routers.base import Baseline, Member, Placed, turned_away
from engine.cost_model.step_cost import ASSUMED_PREFILL_TOKENS_PER_S
from kv_transfer.messages.scheduling import Place, Unplaceable
from kv_transfer.messages.workers import WorkerSnapshot

_MIN_RETRY_AFTER_S: Final = 1.0


class RoundRobin(Baseline):
    """Each pool in turn, whatever the load: the default of most load balancers."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = count()

    def choose(self, query: Place, now: float) -> Placed:
        turn = next(self._turns)
        prefills, decodes = self.prefills, self.decodes
        return Placed(query, prefills[turn % len(prefills)] if prefills else None, decodes[turn % len(decodes)])


class LeastOutstandingTokens(Baseline):
    """In each pool the worker with the fewest tokens placed on it and not done: of prompts to compute on the prefill
    side, of prompts and declared outputs on the decode side.
    """

    def choose(self, query: Place, now: float) -> Placed:
        prefill = min(self.prefills, key=lambda m: m.queued_tokens, default=None)
        return Placed(query, prefill, min(self.decodes, key=lambda m: m.outstanding_tokens))


class Colocated(Baseline):
    """Continuous batching with chunked prefill, no split (Agrawal et al., "Sarathi-Serve", OSDI 2024): decodes have
    their place in every step, chunks of prompts get what they leave of the token budget. Requests go to the worker with
    the fewest outstanding tokens.

    The workers' scheduler does that with what is started on decode workers; simulate it without prefill workers.
    """

    def choose(self, query: Place, now: float) -> Placed:
        return Placed(query, None, min(self.decodes, key=lambda m: m.outstanding_tokens))


class DistServe(Baseline):
    """A fixed split (Zhong et al., "DistServe", OSDI 2024, section 4.3): prompts go to the prefill instance with the
    shortest queue, first come first served; decodes to the least loaded decode instance. Nobody is turned away.
    """

    def choose(self, query: Place, now: float) -> Placed:
        prefill = min(self.prefills, key=lambda m: len(m.prefills), default=None)
        return Placed(query, prefill, min(self.decodes, key=lambda m: len(m.decodes)))


class Dynamo(Baseline):
    """NVIDIA Dynamo's KV router at temperature 0 (docs/router-design.md and lib/kv-router, release 1.6).

    cost = prefill blocks to compute, with the worker's queue, less the device overlap + blocks that would be active.
    The prefill stage counts both terms; the decode stage of a split counts active blocks alone. Without prefill workers
    both terms are of the decode workers. What is optional there (host and disk overlap, conditional bypass) is off.
    """

    wants_blocks = True

    def choose(self, query: Place, now: float) -> Placed:
        cached = self.cached_tokens(query)
        if not self.prefills:
            both = min(self.decodes, key=lambda m: self._prefill_cost(m, query, cached) + self._active(m, query))
            return Placed(query, None, both, cached.get(both.info.worker_id, 0))
        prefill = min(
            self.prefills,
            key=lambda m: self._prefill_cost(m, query, cached) + m.queued_blocks + m.blocks_of(query),
        )
        decode = min(self.decodes, key=lambda m: self._active(m, query))
        return Placed(query, prefill, decode, cached.get(prefill.info.worker_id, 0))

    @staticmethod
    def _prefill_cost(member: Member, query: Place, cached: dict[str, int]) -> float:
        uncached = query.num_tokens - cached.get(member.info.worker_id, 0)
        return (member.queued_tokens + uncached) / member.info.block_size

    @staticmethod
    def _active(member: Member, query: Place) -> int:
        return member.decode_blocks + member.blocks_of(query)


class QueueLengthRouter(Baseline):
    """A rule of thumb, Legato's older one: the shortest queue of prompt tokens, then the emptiest memory.

    A queue is what the worker reported, and what was placed there since. Knows neither targets nor prefixes, and turns
    away behind too long a queue, with the time until it is shorter.
    """

    def __init__(self, max_queued_tokens: int = 131_072) -> None:
        super().__init__()
        self._max_queued_tokens = max_queued_tokens
        self._heard_at: dict[str, float] = {}
        # By worker and request: when it was placed, and its prompt's tokens, until snapshots include it.
        self._unreported: defaultdict[str, dict[str, tuple[float, int]]] = defaultdict(dict)

    def heartbeat(self, snapshot: WorkerSnapshot, now: float) -> None:
        super().heartbeat(snapshot, now)
        # What was placed before the previous snapshot has reached the worker and counts in this one.
        heard_at, unreported = self._heard_at.get(snapshot.worker_id, 0.0), self._unreported[snapshot.worker_id]
        self._unreported[snapshot.worker_id] = {r: new for r, new in unreported.items() if new[0] >= heard_at}
        self._heard_at[snapshot.worker_id] = now

    def choose(self, query: Place, now: float) -> Placed | Unplaceable:
        whole_tokens = query.num_tokens + query.max_new_tokens
        decode = min(_able(self.decodes, whole_tokens), key=self._fullness, default=None)
        if decode is None:
            return turned_away(query, "no decode worker holds it", None)
        prefills = _able(self.prefills, query.num_tokens)
        prefill = min(prefills, key=lambda m: (self._queued_tokens(m), m.info.worker_id), default=None)
        placed = Placed(query, prefill, decode)
        queued_tokens = self._queued_tokens(placed.computing)
        excess = queued_tokens - self._max_queued_tokens
        if excess > 0:
            speed = ASSUMED_PREFILL_TOKENS_PER_S if prefill is None else _prefill_tokens_per_s(prefill)
            retry_after_s = max(_MIN_RETRY_AFTER_S, excess / speed)
            return turned_away(query, f"{queued_tokens} prompt tokens are waiting", retry_after_s)
        self._unreported[placed.computing.info.worker_id][query.request_id] = now, query.num_tokens
        return placed

    def ended(self, request_id: str, now: float, num_output_tokens: int | None) -> None:
        super().ended(request_id, now, num_output_tokens)
        for unreported in self._unreported.values():
            unreported.pop(request_id, None)

    def _queued_tokens(self, member: Member) -> int:
        unreported = self._unreported[member.info.worker_id].values()
        return member.snapshot.queued_prefill_tokens + sum(num_tokens for _, num_tokens in unreported)

    @staticmethod
    def _fullness(member: Member) -> tuple[float, int, str]:
        """Predicted KV of everything placed here and not ended, as a share of its memory."""
        capacity = member.info.num_blocks // member.info.layer_groups * member.info.block_size
        return member.outstanding_tokens / capacity, member.snapshot.num_running, member.info.worker_id


def _able(members: list[Member], num_tokens: int) -> list[Member]:
    return [member for member in members if member.info.max_model_len >= num_tokens]


def _prefill_tokens_per_s(member: Member) -> float:
    """Of a worker that computes full chunks."""
    return member.info.chunk_tokens / member.cost.prefill_s(member.info.chunk_tokens)
