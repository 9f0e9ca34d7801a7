"""Routers that others publish, as their papers, documents and code state them, behind the simulation's seam.

First those that need no targets, then those that predict TTFT and TPOT, of the present state of a worker, and know
targets. Where a source breaks ties by chance or says nothing, the first worker of the least loaded is taken, so that
runs repeat.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from typing import Final

from cluster.simulation.routers.base import Baseline, Member, Placed, turned_away
from engine.cost_model.step_cost import ASSUMED_PREFILL_TOKENS_PER_S
from kv_transfer.messages.scheduling import Place, Unplaceable
from kv_transfer.messages.workers import WorkerSnapshot

_MAX_QUEUED_TOKENS: Final = 131_072
_MIN_RETRY_AFTER_S: Final = 1.0
_NO_TARGET: Final = float("inf")


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

    def __init__(self) -> None:
        super().__init__()
        self._heard_at: dict[str, float] = {}
        # By worker and request: when it was placed, and its prompt's tokens, until snapshots include it.
        self._unreported: defaultdict[str, dict[str, tuple[float, int]]] = defaultdict(dict)

    def heartbeat(self, snapshot: WorkerSnapshot, now: float) -> None:
        super().heartbeat(snapshot, now)
        # What was placed before the previous snapshot has reached the worker and counts in this one.
        heard_at, unreported = self._heard_at.get(snapshot.worker_id, 0.0), self._unreported[snapshot.worker_id]
        self._unreported[snapshot.worker_id] = {
            request_id: (placed_at, num_tokens)
            for request_id, (placed_at, num_tokens) in unreported.items()
            if placed_at >= heard_at
        }
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
        excess = queued_tokens - _MAX_QUEUED_TOKENS
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


class Mooncake(Baseline):
    """Algorithm 1 of Qin et al., "Mooncake", FAST 2025, with its early rejection.

    TTFT of an instance = queue + prefill behind its own prefix. Longer prefixes elsewhere are not transferred:
    simulated prefill workers have no memory below the device's to send them from. The least TTFT wins, decode is by the
    least predicted time between tokens, and who would miss either target is turned away.
    """

    wants_blocks = True

    def choose(self, query: Place, now: float) -> Placed | Unplaceable:
        cached = self.cached_tokens(query)
        computing = self.prefills or self.decodes
        times = [m.ttft_s(query, cached.get(m.info.worker_id, 0), now) for m in computing]
        ttft_s = min(times)
        chosen = computing[times.index(ttft_s)]
        decode = min(self.decodes, key=lambda m: m.tpot_s(query)) if self.prefills else chosen
        tpot_s = decode.tpot_s(query)
        if query.ttft_s is not None and ttft_s > query.ttft_s:
            reason = f"the first token would come after {ttft_s:.2f} s"
            return turned_away(query, reason, max(1.0, ttft_s - query.ttft_s))
        if query.tpot_s is not None and tpot_s > query.tpot_s:
            return turned_away(query, f"tokens would come every {tpot_s * 1000:.0f} ms", 1.0)
        return Placed(query, chosen if self.prefills else None, decode, cached.get(chosen.info.worker_id, 0))


@dataclass(frozen=True, slots=True)
class _Candidate:
    member: Member
    ttft_s: float  # headroom: target less prediction
    tpot_s: float
    cached_share: float


class LlmdHeadroom(Baseline):
    """llm-d's router with predicted latencies (llm-d-inference-scheduler, `predictedlatency`, strategy `least`).

    Decode first. Headroom is the target less the prediction, of TPOT the strictest target of those that run there. One
    of those with both positive is drawn, the less headroom the likelier (packing), in 1 of 100 cases one of the others;
    there, idle workers go first, and weights are by the deficit within each combination of what is missed. TTFT weighs
    0.8, TPOT 0.2. In 99 of 100 draws only who holds 80 % of the prompt is drawn from, if there is any. Then prefill, by
    its TTFT headroom. Turns nobody away that has targets; without any it assumes targets of 0.
    """

    wants_blocks = True

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._rng = random.Random(seed)

    def choose(self, query: Place, now: float) -> Placed:
        cached = self.cached_tokens(query)
        is_split = bool(self.prefills)

        def at_decode(member: Member) -> _Candidate:
            found = cached.get(member.info.worker_id, 0)
            ttft_s = _NO_TARGET if is_split else _target(query.ttft_s) - member.ttft_s(query, found, now)
            tpot_s = self._tpot_target(member, query) - member.tpot_s(query)
            return _Candidate(member, ttft_s, tpot_s, found / query.num_tokens)

        def at_prefill(member: Member) -> _Candidate:
            found = cached.get(member.info.worker_id, 0)
            ttft_s = _target(query.ttft_s) - member.ttft_s(query, found, now)
            return _Candidate(member, ttft_s, _NO_TARGET, found / query.num_tokens)

        decode = self._draw([at_decode(m) for m in self.decodes], lambda m: len(m.decodes))
        if not is_split:
            return Placed(query, None, decode, cached.get(decode.info.worker_id, 0))
        prefill = self._draw([at_prefill(m) for m in self.prefills], lambda m: len(m.prefills))
        return Placed(query, prefill, decode, cached.get(prefill.info.worker_id, 0))

    def _tpot_target(self, member: Member, query: Place) -> float:
        running = (_target(p.query.tpot_s) for p in member.decodes.values() if p.query.tpot_s is not None)
        return min(_target(query.tpot_s), min(running, default=_NO_TARGET)) if query.tpot_s is not None else 0.0

    def _draw(self, candidates: Sequence[_Candidate], num_running: Callable[[Member], int]) -> Member:
        positive = [c for c in candidates if c.ttft_s > 0 and c.tpot_s > 0]
        negative = [c for c in candidates if not (c.ttft_s > 0 and c.tpot_s > 0)]
        if positive and (not negative or self._rng.random() >= 0.01):
            holders = self._holders(positive)
            return self._rng.choices(holders, _weights([(c.ttft_s, c.tpot_s) for c in holders]))[0].member
        idle = [c for c in negative if num_running(c.member) == 0]
        holders = self._holders(idle or negative)
        # Stable: candidates of a bucket keep their order.
        holders.sort(key=lambda c: (c.ttft_s < 0, c.tpot_s < 0))
        weights: list[int] = []
        for _, bucket in groupby(holders, key=lambda c: (c.ttft_s < 0, c.tpot_s < 0)):
            weights += _weights([(max(0.0, -c.ttft_s), max(0.0, -c.tpot_s)) for c in bucket])
        return self._rng.choices(holders, weights)[0].member

    def _holders(self, candidates: list[_Candidate]) -> list[_Candidate]:
        holders = [c for c in candidates if c.cached_share >= 0.8]
        return holders if holders and self._rng.random() >= 0.01 else list(candidates)


def _target(seconds: float | None) -> float:
    return 0.0 if seconds is None else seconds


def _weights(values: Sequence[tuple[float, float]]) -> list[int]:
    """More for the smaller ones of (TTFT, TPOT)."""
    ttft, tpot = zip(*values, strict=True)
    blended = (0.8 * a + 0.2 * b for a, b in zip(_normalised(ttft), _normalised(tpot), strict=True))
    return [int((1 - value) * 80) + 2 for value in blended]


def _normalised(values: Sequence[float]) -> list[float]:
    """Onto [0, 1]; 0 where all are alike."""
    low, high = min(values), max(values)
    if not high - low > 1e-9:  # nor where none counts, and the difference is none
        return [0.0] * len(values)
    return [(value - low) / (high - low) for value in values]
