"""What pool sizing goes by, gathered where requests are placed: who asked for how much of which pool, and whose error
budget burns.

Reads the ledger and the tracker of SLOs, changes neither. Decides nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from cluster.placement.admission import Outcome, Verdict
from cluster.placement.ledger import Ledger
from cluster.placement.query import Query
from cluster.placement.worker_table import Row, Slot
from cluster.pool_demand import DecodeRoom, DemandWindows, WorkRate, decode_work_s, prefill_work_s
from cluster.pool_sizing import FlipRules, PoolAdvice, PoolRules, PoolSizer, PoolView
from cluster.slo_tracker import SeriesSnapshot

_FEWEST_MISSES: Final = 3  # that say anything about a budget
_RETURN_S: Final = 120.0  # so long after it was turned away, a client that asks the same again is the same


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsPlan:
    """What the pools may be. Demand is predicted as far ahead as a new worker takes to start."""

    prefill: PoolRules
    decode: PoolRules
    flips: FlipRules = field(default_factory=FlipRules)
    windows: DemandWindows = field(default_factory=DemandWindows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Burning:
    """Which promises are broken faster than the budget allows, in both windows. `other`: by turning clients away, or by
    failing them."""

    ttft: bool = False
    tpot: bool = False
    other: bool = False

    @classmethod
    def of(cls, series: Iterable[SeriesSnapshot]) -> Burning:
        """By any class. Few misses are chance, however small the budget."""
        windows = [(s.short, s.long) for s in series if s.counts.missed >= _FEWEST_MISSES]
        return cls(
            ttft=any(min(short.ttft_rate, long.ttft_rate) > 1.0 for short, long in windows),
            tpot=any(min(short.tpot_rate, long.tpot_rate) > 1.0 for short, long in windows),
            other=any(
                min(burn.rate - burn.ttft_rate - burn.tpot_rate for burn in (short, long)) > 1.0
                for short, long in windows
            ),
        )


class PoolWatch:
    """Hears of every verdict, and says now and then what the pools should be."""

    def __init__(self, ledger: Ledger, plan: PoolsPlan, now: float) -> None:
        self._ledger = ledger
        self._plan = plan
        self._prefill, self._decode = WorkRate(now, plan.windows), WorkRate(now, plan.windows)
        self._held = _Smoothed(plan.windows.short_s, now)
        self._turned_away: OrderedDict[Hashable, float] = OrderedDict()
        self._sizer = PoolSizer(plan.prefill, plan.decode, plan.flips, now=now)

    def asked(self, query: Query, verdict: Verdict, now: float) -> None:
        """A request came for the first time, and this is what became of it. One that waits counts like one that was
        placed, one that is turned away until its client has come back."""
        if query.attempt > 0 or not verdict.decision.rows:
            return
        self._forget(now)
        is_new = self._turned_away.pop(_client(query), None) is None
        if verdict.outcome is Outcome.REJECTED:
            self._turned_away[_client(query)] = now
        if is_new:
            self._count(query, verdict, now)

    def advise(self, now: float, burning: Burning | None = None) -> PoolAdvice | None:
        prefill, decode = self.views(now, burning or Burning())
        return self._sizer.advise(now, prefill, decode)

    def views(self, now: float, burning: Burning) -> tuple[PoolView, PoolView]:
        """Of prefill and decode. What is not one pool's fault is blamed on the busier one."""
        plan, table = self._plan, self._ledger.table
        rows = table.live()[table.rows[Row.DRAINING, table.live()] == 0.0]
        num_decode = int(table.rows[Row.DECODES, rows].sum())
        num_prefill = len(rows) - num_decode
        held = self._held.update(_held(self._ledger), now)
        prefill = self._prefill.forecast(now, plan.prefill.start_s).predicted
        decode = max(self._decode.forecast(now, plan.decode.start_s).predicted, held)
        prefill_is_busier = prefill * num_decode > decode * num_prefill
        return (
            PoolView(demand=prefill, burns=burning.ttft or (burning.other and prefill_is_busier), live=num_prefill),
            PoolView(demand=decode, burns=burning.tpot or (burning.other and not prefill_is_busier), live=num_decode),
        )

    def _count(self, query: Query, verdict: Verdict, now: float) -> None:
        best, table, uncached = verdict.decision.best, self._ledger.table, verdict.decision.uncached_tokens
        computing, decoding = table.row(best.prefill or best.decode), table.row(best.decode)
        prompt_s = prefill_work_s(
            table.cost(computing), uncached, query.num_tokens - uncached, float(table.rows[Row.CHUNK_TOKENS, computing])
        )
        expected = self._ledger.lengths.expect(query.tenant, query.slo_class, query.max_new_tokens)
        kv_tokens, max_num_seqs = table.rows[[Row.KV_TOKENS, Row.MAX_SEQUENCES], decoding].tolist()
        room = DecodeRoom(kv_tokens=kv_tokens, max_num_seqs=max_num_seqs)
        (self._decode if best.prefill is None else self._prefill).add(now, prompt_s)
        self._decode.add(now, decode_work_s(table.cost(decoding), room, query.num_tokens, expected, query.tpot_s))

    def _forget(self, now: float) -> None:
        while self._turned_away and now - next(iter(self._turned_away.values())) > _RETURN_S:
            self._turned_away.popitem(last=False)


@dataclass(slots=True)
class _Smoothed:
    over_s: float
    as_of: float
    value: float = 0.0

    def update(self, value: float, now: float) -> float:
        self.value += (value - self.value) * -math.expm1((self.as_of - now) / self.over_s)
        self.as_of = now
        return self.value


def _held(ledger: Ledger) -> float:
    """Decode workers that those who decode now fill: each takes its share of the largest batch that it could be in.

    At less than that batch they also leave sooner, so this tells less than arrivals do, unless outputs turn out longer
    than expected, or began before this scheduler did."""
    table = ledger.table
    rows = table.live()[table.rows[Row.DECODES, table.live()] == 1.0]
    facts, slots = table.rows[:, rows], table.slots[:, rows]
    contexts = np.maximum(slots[Slot.TOKENS] + slots[Slot.OUTPUT] / 2, 1.0)
    each_s = facts[Row.DECODE_S][:, None] + facts[Row.CONTEXT_TOKEN_S][:, None] * contexts
    in_time_s = np.maximum(slots[Slot.TPOT_TARGET_S] - facts[Row.BASE_S][:, None], each_s)
    shares = np.maximum(each_s / np.maximum(in_time_s, 1e-9), contexts / facts[Row.KV_TOKENS].clip(min=1.0)[:, None])
    shares = np.maximum(shares, 1.0 / facts[Row.MAX_SEQUENCES][:, None])
    decoding = (slots[Slot.OUTPUT] > 0.0) & (slots[Slot.JOINED_STEP] < np.inf)
    unknown = facts[Row.EXTRA_CONTEXT] / facts[Row.KV_TOKENS].clip(min=1.0)
    return float((shares * decoding).sum() + unknown.sum())


def _client(query: Query) -> Hashable:
    """The same for the same question asked again, under whatever id."""
    return (query.tenant, query.slo_class, query.num_tokens, query.max_new_tokens, query.prefix_hashes[-1:])
