"""Routers that others publish, as their papers, documents and code state them, behind the simulation's seam.

First those that need no targets, then those that predict TTFT and TPOT, of the present state of a worker, and know
targets. Where a source breaks ties by chance or says nothing, the first worker of the least loaded is taken, so that
runs repeat.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from typing import Final, Literal

from cluster.scheduler.placement.retry_after import MIN_RETRY_AFTER_S
from cluster.simulation.routers.base import Baseline, Member, PlacedRequest, turned_away
from engine.cost_model.step_cost import ASSUMED_PREFILL_TOKENS_PER_S
from engine.kv.prefix import HASH_BYTES
from kv_transfer.messages.scheduling import Place, Unplaceable
from kv_transfer.messages.workers import WorkerSnapshot

_MAX_QUEUED_TOKENS: Final = 131_072
_NO_TARGET: Final = float("inf")


class RoundRobin(Baseline):
    """Each pool in turn, whatever the load: the default of most load balancers."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = count()

    def choose(self, query: Place, now: float) -> PlacedRequest:
        turn = next(self._turns)
        prefills, decodes = self.prefills, self.decodes
        return PlacedRequest(query, prefills[turn % len(prefills)] if prefills else None, decodes[turn % len(decodes)])


class LeastOutstandingTokens(Baseline):
    """Chooses in each pool the worker with the fewest tokens placed on it and not done: of prompts to compute on the
    prefill side, of prompts and declared outputs on the decode side.
    """

    def choose(self, query: Place, now: float) -> PlacedRequest:
        prefill = min(self.prefills, key=lambda m: m.queued_tokens, default=None)
        return PlacedRequest(query, prefill, min(self.decodes, key=lambda m: m.outstanding_tokens))


class Colocated(Baseline):
    """Continuous batching with chunked prefill, no split (Agrawal et al., "Sarathi-Serve", OSDI 2024): decodes have
    their place in every step, chunks of prompts get what they leave of the token budget. Requests go to the worker with
    the fewest outstanding tokens.

    The workers' scheduler does that with what is started on decode workers; simulate it without prefill workers.
    """

    def choose(self, query: Place, now: float) -> PlacedRequest:
        return PlacedRequest(query, None, min(self.decodes, key=lambda m: m.outstanding_tokens))


class DistServe(Baseline):
    """A fixed split (Zhong et al., "DistServe", OSDI 2024, section 4.3): prompts go to the prefill instance with the
    shortest queue, first come first served; decodes to the least loaded decode instance. Nobody is turned away.
    """

    def choose(self, query: Place, now: float) -> PlacedRequest:
        prefill = min(self.prefills, key=lambda m: len(m.prefills), default=None)
        return PlacedRequest(query, prefill, min(self.decodes, key=lambda m: len(m.decodes)))


class Dynamo(Baseline):
    """NVIDIA Dynamo's KV router at temperature 0 (docs/router-design.md and lib/kv-router, release 1.6).

    cost = prefill blocks to compute, with the worker's queue, less the device overlap + blocks that would be active.
    Without prefill workers both terms are of the decode workers; with them the prefill stage counts the first alone,
    as its documents set it up, and the decode stage the second. A block that several requests share is active once.
    What is optional there (host and disk overlap, conditional bypass) is off.

    Its busy thresholds, which are off there until they are set: workers with more than the share `busy_blocks` of their
    blocks active, or more than `busy_tokens` prompt tokens to compute, get nothing, and where all are busy requests are
    turned away.
    """

    wants_blocks = True

    def __init__(self, *, busy_blocks: float = math.inf, busy_tokens: float = math.inf) -> None:
        super().__init__()
        self._busy_blocks, self._busy_tokens = busy_blocks, busy_tokens
        self._active: defaultdict[str, Counter[bytes]] = defaultdict(Counter)  # by worker: blocks that requests share
        self._alone: Counter[str] = Counter()  # by worker: the last, partial blocks of requests

    def choose(self, query: Place, now: float) -> PlacedRequest | Unplaceable:
        cached = self.cached_tokens(query)
        decodes = [m for m in self.decodes if not self._is_busy(m)]
        prefills = [m for m in self.prefills if m.queued_tokens <= self._busy_tokens]
        if not decodes or (self.prefills and not prefills):
            return turned_away(query, "all workers are busy", MIN_RETRY_AFTER_S)
        if not prefills:
            both = min(decodes, key=lambda m: self._prefill_cost(m, query, cached) + self._would_be_active(m, query))
            return PlacedRequest(query, None, both, cached.get(both.info.worker_id, 0))
        prefill = min(prefills, key=lambda m: self._prefill_cost(m, query, cached))
        decode = min(decodes, key=lambda m: self._would_be_active(m, query))
        return PlacedRequest(query, prefill, decode, cached.get(prefill.info.worker_id, 0))

    def book(self, placed: PlacedRequest, now: float) -> None:
        super().book(placed, now)
        self._count(placed, 1)

    def ended(self, request_id: str, now: float, num_output_tokens: int | None) -> None:
        self._count(self._placed[request_id], -1)
        super().ended(request_id, now, num_output_tokens)

    def _count(self, placed: PlacedRequest, sign: int) -> None:
        worker_id, hashes = placed.decode.info.worker_id, _hashes(placed.query)
        active = self._active[worker_id]
        for block in hashes:
            active[block] += sign
            if not active[block]:
                del active[block]
        self._alone[worker_id] += sign * (placed.decode.blocks_of(placed.query) - len(hashes))

    def _would_be_active(self, member: Member, query: Place) -> int:
        active, hashes = self._active[member.info.worker_id], _hashes(query)
        shared = sum(block in active for block in hashes)
        return self._num_active(member) + member.blocks_of(query) - shared

    def _num_active(self, member: Member) -> int:
        return len(self._active[member.info.worker_id]) + self._alone[member.info.worker_id]

    def _is_busy(self, member: Member) -> bool:
        is_full = self._num_active(member) > self._busy_blocks * member.info.num_blocks
        return is_full or member.queued_tokens > self._busy_tokens

    @staticmethod
    def _prefill_cost(member: Member, query: Place, cached: dict[str, int]) -> float:
        uncached = query.num_tokens - cached.get(member.info.worker_id, 0)
        return (member.queued_tokens + uncached) / member.info.block_size


class CacheAware(Baseline):
    """SGLang's router and the vLLM router's default, `cache_aware` (sgl-router, policies/cache_aware.rs): the worker
    that has been sent the longest prefix of the prompt if that is more than 0.3 of it, else the one that has been sent
    the fewest different tokens; the fewest running requests while loads differ by more than 64 and by more than 1.5
    times. What it was sent is the router's own approximation of its cache. With a split, decode is by the fewest
    requests.

    `most_uncached`: no such rule of anybody's, but the plainest one of whom to turn away: prompts with more tokens than
    these that the chosen worker was not sent, for good.
    """

    def __init__(self, *, most_uncached: float = math.inf) -> None:
        super().__init__()
        self._most_uncached = most_uncached
        self._sent: defaultdict[str, set[bytes]] = defaultdict(set)

    def choose(self, query: Place, now: float) -> PlacedRequest | Unplaceable:
        hashes = _hashes(query)
        computing = self.prefills or self.decodes
        matched = [self._matched_tokens(m, hashes) for m in computing]
        loads = [len(m.prefills) if self.prefills else len(m.decodes) for m in computing]
        most = max(range(len(computing)), key=lambda at: matched[at])
        if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
            at = loads.index(min(loads))
        elif matched[most] > 0.3 * query.num_tokens:
            at = most
        else:
            at = min(range(len(computing)), key=lambda at: len(self._sent[computing[at].info.worker_id]))
        uncached = query.num_tokens - matched[at]
        if uncached > self._most_uncached:
            return turned_away(query, f"{uncached} tokens would have to be computed", None)
        chosen = computing[at]
        self._sent[chosen.info.worker_id].update(hashes)
        if not self.prefills:
            return PlacedRequest(query, None, chosen, matched[at])
        return PlacedRequest(query, chosen, min(self.decodes, key=lambda m: len(m.decodes)), matched[at])

    def _matched_tokens(self, member: Member, hashes: Sequence[bytes]) -> int:
        sent = self._sent[member.info.worker_id]
        num_blocks = next((number for number, block in enumerate(hashes) if block not in sent), len(hashes))
        return num_blocks * member.info.block_size


def _hashes(query: Place) -> list[bytes]:
    """Names of the prompt's full blocks, as far as the last one may be cached."""
    joined = query.prefix_hashes
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]


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

    def choose(self, query: Place, now: float) -> PlacedRequest | Unplaceable:
        whole_tokens = query.num_tokens + query.max_new_tokens
        decode = min(_able(self.decodes, whole_tokens), key=self._fullness, default=None)
        if decode is None:
            return turned_away(query, "no decode worker holds it", None)
        prefills = _able(self.prefills, query.num_tokens)
        prefill = min(prefills, key=lambda m: (self._queued_tokens(m), m.info.worker_id), default=None)
        placed = PlacedRequest(query, prefill, decode)
        queued_tokens = self._queued_tokens(placed.computing)
        excess = queued_tokens - _MAX_QUEUED_TOKENS
        if excess > 0:
            speed = ASSUMED_PREFILL_TOKENS_PER_S if prefill is None else _prefill_tokens_per_s(prefill)
            retry_after_s = max(MIN_RETRY_AFTER_S, excess / speed)
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
    """Tokens per second of a worker that computes full chunks."""
    return member.info.chunk_tokens / member.cost.prefill_s(member.info.chunk_tokens)


class Mooncake(Baseline):
    """Algorithm 1 of Qin et al., "Mooncake", FAST 2025, with its early rejection.

    TTFT of an instance = queue + prefill behind its own prefix. Longer prefixes elsewhere are not transferred:
    simulated prefill workers have no memory below the device's to send them from. The least TTFT wins, among equals
    who decodes the least; decode is by the least predicted time between tokens, and who would miss either target is
    turned away. Its formulas know prefill and decode instances: of a worker that is both, each forgets half the work.

    `ttft_share`, `tbt_share`: of the requests' targets, what its own limits are. Time between tokens is what it
    promises: the target of gaps, or of their mean where there is none.
    """

    wants_blocks = True

    def __init__(self, *, ttft_share: float = 1.0, tbt_share: float = 1.0) -> None:
        super().__init__()
        self._ttft_share, self._tbt_share = ttft_share, tbt_share

    def choose(self, query: Place, now: float) -> PlacedRequest | Unplaceable:
        cached = self.cached_tokens(query)
        computing = self.prefills or self.decodes
        times = [m.ttft_s(query, cached.get(m.info.worker_id, 0), now) for m in computing]
        ttft_s = min(times)
        chosen = min(
            (m for m, each_s in zip(computing, times, strict=True) if each_s == ttft_s), key=lambda m: m.context_tokens
        )
        decode = min(self.decodes, key=lambda m: m.tpot_s(query)) if self.prefills else chosen
        tbt_s, tbt_target_s = decode.tpot_s(query), _between_tokens_s(query)
        if query.ttft_s is not None and ttft_s > self._ttft_share * query.ttft_s:
            reason = f"the first token would come after {ttft_s:.2f} s"
            return turned_away(query, reason, max(MIN_RETRY_AFTER_S, ttft_s - self._ttft_share * query.ttft_s))
        if tbt_target_s is not None and tbt_s > self._tbt_share * tbt_target_s:
            return turned_away(query, f"tokens would come every {tbt_s * 1000:.0f} ms", MIN_RETRY_AFTER_S)
        return PlacedRequest(query, chosen if self.prefills else None, decode, cached.get(chosen.info.worker_id, 0))


def _between_tokens_s(query: Place) -> float | None:
    """The one target between tokens, for rules that know only one."""
    return query.tpot_s if query.gap_s is None else query.gap_s


@dataclass(frozen=True, slots=True)
class _Candidate:
    member: Member
    ttft_s: float  # headroom: target less prediction
    tpot_s: float
    cached_share: float


class LlmdHeadroom(Baseline):
    """llm-d's router with predicted latencies (llm-d-inference-scheduler, `predictedlatency`).

    Decode first. Headroom is the target less the prediction, of TPOT the strictest target of those that run there. One
    of those with both positive is drawn, the less headroom the likelier (`strategy` least, which packs; with `most`,
    the more), in 1 of 100 cases one of the others; there, idle workers go first, and weights are by the deficit within
    each combination of what is missed. TTFT weighs 0.8, TPOT 0.2. In 99 of 100 draws only who holds 80 % of the prompt
    is drawn from, if there is any. Then prefill, by its TTFT headroom. Turns nobody away that has targets; without any
    it assumes targets of 0. Its predictor is told how many requests run on a worker, so that here the prompt's steps
    hold these, too.
    """

    wants_blocks = True

    def __init__(self, seed: int = 0, *, strategy: Literal["least", "most"] = "least") -> None:
        super().__init__()
        self._rng = random.Random(seed)
        self._is_most = strategy == "most"

    def choose(self, query: Place, now: float) -> PlacedRequest:
        cached = self.cached_tokens(query)
        is_split = bool(self.prefills)

        def at_decode(member: Member) -> _Candidate:
            found = cached.get(member.info.worker_id, 0)
            predicted_s = member.ttft_s(query, found, now) + member.beside_s(query, found)
            ttft_s = _NO_TARGET if is_split else _target(query.ttft_s) - predicted_s
            tpot_s = self._tpot_target(member, query) - member.tpot_s(query)
            return _Candidate(member, ttft_s, tpot_s, found / query.num_tokens)

        def at_prefill(member: Member) -> _Candidate:
            found = cached.get(member.info.worker_id, 0)
            ttft_s = _target(query.ttft_s) - member.ttft_s(query, found, now)
            return _Candidate(member, ttft_s, _NO_TARGET, found / query.num_tokens)

        decode = self._draw([at_decode(m) for m in self.decodes], lambda m: len(m.decodes))
        if not is_split:
            return PlacedRequest(query, None, decode, cached.get(decode.info.worker_id, 0))
        prefill = self._draw([at_prefill(m) for m in self.prefills], lambda m: len(m.prefills))
        return PlacedRequest(query, prefill, decode, cached.get(prefill.info.worker_id, 0))

    def _tpot_target(self, member: Member, query: Place) -> float:
        own_s = _between_tokens_s(query)
        if own_s is None:
            return 0.0
        running = (_between_tokens_s(p.query) for p in member.decodes.values())
        return min((own_s, *(target_s for target_s in running if target_s is not None)))

    def _draw(self, candidates: Sequence[_Candidate], num_running: Callable[[Member], int]) -> Member:
        positive = [c for c in candidates if c.ttft_s > 0 and c.tpot_s > 0]
        negative = [c for c in candidates if not (c.ttft_s > 0 and c.tpot_s > 0)]
        if positive and (not negative or self._rng.random() >= 0.01):
            holders = self._holders(positive)
            weights = _weights([(c.ttft_s, c.tpot_s) for c in holders], of_most=self._is_most)
            return self._rng.choices(holders, weights)[0].member
        idle = [c for c in negative if num_running(c.member) == 0]
        holders = self._holders(idle or negative)
        # Stable: candidates of a bucket keep their order.
        holders.sort(key=lambda c: (c.ttft_s < 0, c.tpot_s < 0))
        weights = []
        for _, bucket in groupby(holders, key=lambda c: (c.ttft_s < 0, c.tpot_s < 0)):
            weights += _weights([(max(0.0, -c.ttft_s), max(0.0, -c.tpot_s)) for c in bucket])
        return self._rng.choices(holders, weights)[0].member

    def _holders(self, candidates: list[_Candidate]) -> list[_Candidate]:
        holders = [c for c in candidates if c.cached_share >= 0.8]
        return holders if holders and self._rng.random() >= 0.01 else list(candidates)


def _target(seconds: float | None) -> float:
    return 0.0 if seconds is None else seconds


def _weights(values: Sequence[tuple[float, float]], *, of_most: bool = False) -> list[int]:
    """More for the smaller ones of (TTFT, TPOT), or for the larger."""
    ttft, tpot = zip(*values, strict=True)
    blended = (0.8 * a + 0.2 * b for a, b in zip(_normalised(ttft), _normalised(tpot), strict=True))
    return [int((value if of_most else 1 - value) * 80) + 2 for value in blended]


def _normalised(values: Sequence[float]) -> list[float]:
    """Onto [0, 1]; 0 where all are alike."""
    low, high = min(values), max(values)
    if not high - low > 1e-9:  # nor where none counts, and the difference is none
        return [0.0] * len(values)
    return [(value - low) / (high - low) for value in values]
