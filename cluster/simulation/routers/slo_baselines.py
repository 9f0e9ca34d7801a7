"""Published routers that predict TTFT and TPOT and know targets. A prediction is of the present state of a worker, as
theirs is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from cluster.simulation.routers.base import Baseline, Member, Placed, turned_away
from kv_transfer.messages.scheduling import Place, Unplaceable

_NONE: Final = float("inf")


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
            ttft_s = _NONE if is_split else _target(query.ttft_s) - member.ttft_s(query, found, now)
            tpot_s = self._tpot_target(member, query) - member.tpot_s(query)
            return _Candidate(member, ttft_s, tpot_s, found / query.num_tokens)

        def at_prefill(member: Member) -> _Candidate:
            found = cached.get(member.info.worker_id, 0)
            ttft_s = _target(query.ttft_s) - member.ttft_s(query, found, now)
            return _Candidate(member, ttft_s, _NONE, found / query.num_tokens)

        decode = self._draw([at_decode(m) for m in self.decodes], lambda m: len(m.decodes))
        if not is_split:
            return Placed(query, None, decode, cached.get(decode.info.worker_id, 0))
        prefill = self._draw([at_prefill(m) for m in self.prefills], lambda m: len(m.prefills))
        return Placed(query, prefill, decode, cached.get(prefill.info.worker_id, 0))

    def _tpot_target(self, member: Member, query: Place) -> float:
        running = (_target(p.query.tpot_s) for p in member.decodes.values() if p.query.tpot_s is not None)
        return min(_target(query.tpot_s), min(running, default=_NONE)) if query.tpot_s is not None else 0.0

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
