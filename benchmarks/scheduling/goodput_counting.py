"""The four countings (`cluster.slo.countings`) of one simulation, under two promises, as outcomes become known.

Traces name no tenants, so that each conversation is one of `NUM_TENANTS` tenants', the k-th with weight 1 / k.

A request is in time if it was served the first time that it came, its first token came in time, and what is promised
of the others was kept: their mean (`tpot`), or 99 of 100 of the gaps between them (`gap`).
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from cluster.simulation.records import RequestRecord
from cluster.simulation.workload.traces import TraceRequest
from cluster.slo.classes import SloClass
from cluster.slo.countings import LEAST, SHARES, Counting, length_groups

Promise = Literal["tpot", "gap"]
Miss = Literal["turned away", "first token", "mean", "gaps"]
"""The first thing that was amiss; of who was turned away once nothing else counts."""
NUM_TENANTS: Final = 8
_ROUNDING: Final = 1e-9


class DecidedError(Exception):
    """Every counting is decided, whatever becomes of the requests that are still served."""


@dataclass(slots=True, eq=False)
class _Group:
    """`weight` of all its requests together: how much of it is known to be in time, and how much not to be, and for
    what."""

    weight: float = 0.0
    met: float = 0.0
    missed: float = 0.0
    misses: Counter[Miss] = field(default_factory=Counter)  # requests

    @property
    def share(self) -> float:
        """The share in time, among those of whom it is known."""
        known = self.met + self.missed
        return self.met / known if known else 0.0

    def verdict(self, share: float) -> bool | None:
        if self.missed > (1.0 - share + _ROUNDING) * self.weight:
            return False
        return True if self.met >= (share - _ROUNDING) * self.weight else None


@dataclass(frozen=True, slots=True)
class Count:
    """`serves`: whether enough is in time. `share`: how much, of the group with the least, at the end or where it was
    decided; `least`: that group's name, `misses`: how many of its requests were not, and for what."""

    serves: bool
    share: float
    least: str
    misses: Mapping[Miss, int] = field(default_factory=dict)


class Counts:
    """Counts the requests of one simulation as their outcomes become known; `see` is for `simulate(watch=...)`.

    `promises`: what is judged beside the targets of TTFT, which the requests' classes have; its `tpot_s` or `gap_s`.
    `stops`: raise DecidedError once nothing can change which countings are served. `kind`: groups of length and tenant
    are formed for each value of it apart.
    """

    def __init__(
        self,
        requests: Iterable[TraceRequest],
        promises: Mapping[Promise, SloClass],
        *,
        stops: bool = False,
        kind: Callable[[TraceRequest], str] = lambda request: "",
    ) -> None:
        self._promises = promises
        self._stops = stops
        self._groups: dict[tuple[Promise, Counting], dict[str, _Group]] = {}
        self._of: defaultdict[str, list[tuple[Counting, str, float]]] = defaultdict(list)
        for counting, name, request, weight in _memberships(list(requests), kind):
            self._of[request.request_id].append((counting, name, weight))
            for promise in promises:
                groups = self._groups.setdefault((promise, counting), {})
                groups.setdefault(name, _Group()).weight += weight
        self._is_open = dict.fromkeys(self._groups, True)
        self._known: set[str] = set()

    def see(self, record: RequestRecord) -> None:
        """Called when it has its first token, ends or is turned away."""
        if record.request_id in self._known:
            return
        miss: Miss | None = None
        if record.num_rejections > 0:
            miss = "turned away"
        elif record.ttft_s is not None and not record.slo.meets_ttft(record.ttft_s):
            miss = "first token"
        elif record.end_s is None:
            return
        self._known.add(record.request_id)
        for promise, targets in self._promises.items():
            if miss is None and not targets.meets_tpot(record.tpot_s):
                self._count(promise, record.request_id, "mean")
            elif miss is None and not targets.meets_gap_p99(record.gaps.p99_s):
                self._count(promise, record.request_id, "gaps")
            else:
                self._count(promise, record.request_id, miss)
        if self._stops and not any(self._is_open.values()):
            raise DecidedError

    def _count(self, promise: Promise, request_id: str, miss: Miss | None) -> None:
        for counting, name, weight in self._of[request_id]:
            group = self._groups[promise, counting][name]
            if miss is None:
                group.met += weight
            else:
                group.missed += weight
                group.misses[miss] += 1
            if self._is_open[promise, counting]:
                self._is_open[promise, counting] = self._verdict(promise, counting) is None

    def _verdict(self, promise: Promise, counting: Counting) -> bool | None:
        verdicts = {group.verdict(SHARES[counting]) for group in self._groups[promise, counting].values()}
        if False in verdicts:
            return False
        return None if None in verdicts else True

    def results(self) -> dict[tuple[Promise, Counting], Count]:
        """The results, once the simulation has ended, or was ended because all is decided."""
        found = {}
        for (promise, counting), groups in self._groups.items():
            least = min(groups, key=lambda name: groups[name].share)
            verdict = self._verdict(promise, counting)
            worst = groups[least]
            found[promise, counting] = Count(bool(verdict), round(worst.share, 4), least, dict(worst.misses))
        return found


def _memberships(
    requests: Sequence[TraceRequest], kind: Callable[[TraceRequest], str]
) -> Iterable[tuple[Counting, str, TraceRequest, float]]:
    """The groups of each request under each counting, and what it weighs there."""
    for request in requests:
        yield "requests", "all", request, 1.0
        yield "most requests", "all", request, 1.0
        yield "tokens", "all", request, float(request.prompt_tokens + request.output_tokens)
    of_kind: defaultdict[str, list[TraceRequest]] = defaultdict(list)
    for request in requests:
        of_kind[kind(request)].append(request)
    for name, alike in of_kind.items():
        for group, members in (*length_groups(alike), *_tenant_groups(alike)):
            for request in members:
                yield "everyone", f"{name} {group}".strip(), request, 1.0


def _tenant_groups(requests: Iterable[TraceRequest]) -> list[tuple[str, Sequence[TraceRequest]]]:
    groups: defaultdict[str, list[TraceRequest]] = defaultdict(list)
    for request in requests:
        groups[tenant_of(request)].append(request)
    return [(name, group) for name, group in sorted(groups.items()) if len(group) >= LEAST]


def tenant_of(request: TraceRequest, seed: int = 0) -> str:
    """The tenant of a request: the same for all turns of a conversation, which have the prompt's second run of tokens
    in common (the first one is everybody's in Mooncake's traces); drawn of that run's name, or of the request's where
    it has none."""
    if request.tenant:
        return request.tenant
    conversation = request.content[1] if len(request.content) > 1 else request.request_id
    rng = random.Random(f"{seed} {conversation}")
    ranks = range(1, NUM_TENANTS + 1)
    return f"tenant {rng.choices(ranks, [1 / rank for rank in ranks])[0]}"
