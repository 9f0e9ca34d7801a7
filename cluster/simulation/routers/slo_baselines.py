"""Published routers that predict TTFT and TPOT and know targets. What they predict with is the true cost model.

That favours them: in life they learn their models. A prediction is of the present state of a worker, as theirs is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from cluster.simulation.routers.base import PlaceQuery
from cluster.simulation.routers.baselines import Baseline, Choice, Refusal
from cluster.simulation.routers.fleet import KnownCosts, Member

_NONE: Final = float("inf")


class Predicting(Baseline):
    """Adds predictions to the bookkeeping."""

    wants_blocks = True

    def __init__(self, costs: KnownCosts) -> None:
        super().__init__()
        self._costs = costs

    def ttft_s(self, member: Member, query: PlaceQuery, cached_tokens: int, now: float) -> float:
        """Wait for what was placed here before, then the uncached part of the prompt."""
        return max(0.0, member.computed_at - now) + self._prompt_s(member, query, cached_tokens)

    def tpot_s(self, member: Member, query: PlaceQuery) -> float:
        return member.step_s(self._costs.decode, query)

    def count_on(self, choice: Choice, query: PlaceQuery, now: float) -> Choice:
        computing = choice.prefill or choice.decode
        computing.computed_at = now + self.ttft_s(computing, query, choice.cached_tokens, now)
        return choice

    def _prompt_s(self, member: Member, query: PlaceQuery, cached_tokens: int) -> float:
        is_prefill = member.info.role == "prefill"
        cost = self._costs.prefill if is_prefill else self._costs.decode
        chunk = self._costs.prefill_chunk_tokens if is_prefill else self._costs.decode_chunk_tokens
        return cost.prefill_s(query.num_tokens - cached_tokens, cached_tokens, chunk)


class Mooncake(Predicting):
    """Algorithm 1 of Qin et al., "Mooncake", FAST 2025, with its early rejection.

    TTFT of an instance = queue + prefill behind its own prefix or, where the best prefix elsewhere is more than
    `balancing_threshold` times as long, behind that one and after its transfer. The least TTFT wins, decode is by the
    least predicted time between tokens, and who would miss either target is turned away. `transfer_token_s` None: there
    are no transfers between prefill instances, as among simulated workers, which have no memory below the device's.
    """

    def __init__(
        self, costs: KnownCosts, *, balancing_threshold: float = 2.0, transfer_token_s: float | None = None
    ) -> None:
        super().__init__(costs)
        self._balancing_threshold = balancing_threshold
        self._transfer_token_s = transfer_token_s

    def choose(self, query: PlaceQuery, now: float) -> Choice | Refusal:
        cached = self.fleet.cached_tokens(query)
        computing = self.fleet.prefills or self.fleet.decodes
        best = max((cached.get(m.worker_id, 0) for m in computing), default=0)
        times = [self._ttft_s(m, query, cached.get(m.worker_id, 0), best, now) for m in computing]
        ttft_s = min(times)
        chosen = computing[times.index(ttft_s)]
        decode = min(self.fleet.decodes, key=lambda m: self.tpot_s(m, query)) if self.fleet.prefills else chosen
        refusal = self._refusal(query, ttft_s, self.tpot_s(decode, query))
        if refusal is not None:
            return refusal
        choice = Choice(chosen if self.fleet.prefills else None, decode, cached.get(chosen.worker_id, 0))
        return self.count_on(choice, query, now)

    def _ttft_s(self, member: Member, query: PlaceQuery, own: int, best: int, now: float) -> float:
        if self._transfer_token_s is None or best <= own * self._balancing_threshold:
            return self.ttft_s(member, query, own, now)
        return self._transfer_token_s * (best - own) + self.ttft_s(member, query, best, now)

    @staticmethod
    def _refusal(query: PlaceQuery, ttft_s: float, tpot_s: float) -> Refusal | None:
        if query.slo.ttft_s is not None and ttft_s > query.slo.ttft_s:
            return Refusal(f"the first token would come after {ttft_s:.2f} s", max(1.0, ttft_s - query.slo.ttft_s))
        if query.slo.tpot_s is not None and tpot_s > query.slo.tpot_s:
            return Refusal(f"tokens would come every {tpot_s * 1000:.0f} ms", 1.0)
        return None


@dataclass(frozen=True, slots=True)
class _Candidate:
    member: Member
    ttft_s: float  # headroom: target less prediction
    tpot_s: float
    cached_share: float


class LlmdHeadroom(Predicting):
    """llm-d's router with predicted latencies (llm-d-inference-scheduler, `predictedlatency`, strategy `least`).

    Decode first. Headroom is the target less the prediction, of TPOT the strictest target of those that run there. One
    of those with both positive is drawn, the less headroom the likelier (packing), in 1 of 100 cases one of the others;
    there, idle workers go first, and weights are by the deficit within each combination of what is missed. TTFT weighs
    0.8, TPOT 0.2. In 99 of 100 draws only who holds 80 % of the prompt is drawn from, if there is any. Prefill, by its
    TTFT headroom, where at least `split_from_tokens` are to be computed. Turns nobody away that has targets; without
    any it assumes targets of 0.
    """

    def __init__(self, costs: KnownCosts, *, seed: int = 0, split_from_tokens: int = 0) -> None:
        super().__init__(costs)
        self._rng = random.Random(seed)
        self._split_from_tokens = split_from_tokens

    def choose(self, query: PlaceQuery, now: float) -> Choice | Refusal:
        cached = self.fleet.cached_tokens(query)
        is_split = bool(self.fleet.prefills)

        def at_decode(member: Member) -> _Candidate:
            found = cached.get(member.worker_id, 0)
            ttft_s = _NONE if is_split else _target(query.slo.ttft_s) - self.ttft_s(member, query, found, now)
            tpot_s = self._tpot_target(member, query) - self.tpot_s(member, query)
            return _Candidate(member, ttft_s, tpot_s, found / query.num_tokens)

        def at_prefill(member: Member) -> _Candidate:
            found = cached.get(member.worker_id, 0)
            ttft_s = _target(query.slo.ttft_s) - self.ttft_s(member, query, found, now)
            return _Candidate(member, ttft_s, _NONE, found / query.num_tokens)

        decode = self._draw([at_decode(m) for m in self.fleet.decodes], lambda m: len(m.decodes))
        found = cached.get(decode.worker_id, 0)
        if not is_split or query.num_tokens - found < self._split_from_tokens:
            return self.count_on(Choice(None, decode, found), query, now)
        prefill = self._draw([at_prefill(m) for m in self.fleet.prefills], lambda m: len(m.prefills))
        return self.count_on(Choice(prefill, decode, cached.get(prefill.worker_id, 0)), query, now)

    def _tpot_target(self, member: Member, query: PlaceQuery) -> float:
        running = (_target(p.query.slo.tpot_s) for p in member.decodes.values() if p.query.slo.tpot_s is not None)
        return min(_target(query.slo.tpot_s), min(running, default=_NONE)) if query.slo.tpot_s is not None else 0.0

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
