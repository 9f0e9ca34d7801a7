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

from cluster.autoscaling.demand import DecodeRoom, DemandWindows, Forecast, WorkRate, decode_work_s, prefill_work_s
from cluster.autoscaling.sizing import FlipRules, PoolAdvice, PoolRules, PoolSizer, PoolView
from cluster.scheduler.placement.admission import Outcome, Verdict
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.query import Query
from cluster.scheduler.placement.worker_table import Row, Slot
from cluster.slo.tracker import SeriesSnapshot

_FEWEST_MISSES: Final = 3  # that say anything about a budget
_EARLY_S: Final = 0.5  # clocks differ
_RETURN_S: Final = 60.0  # so long after it was asked to come back, who asks the same again is the same client


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsPlan:
    """What the pools may be. Demand is predicted as far ahead as a new worker takes to start, from what came in three
    times as long as the pool waits before it shrinks. `settle_s`: see `PoolSizer`."""

    prefill: PoolRules
    decode: PoolRules
    flips: FlipRules = field(default_factory=FlipRules)
    settle_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnAlerts:
    """Which promises are broken faster than the budget allows, in both windows. `other`: by turning clients away, or by
    failing them."""

    ttft: bool = False
    tpot: bool = False
    other: bool = False

    @classmethod
    def of(cls, series: Iterable[SeriesSnapshot]) -> BurnAlerts:
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


class DemandMonitor:
    """Hears of every verdict, and says now and then what the pools should be."""

    def __init__(self, ledger: Ledger, plan: PoolsPlan, now: float) -> None:
        self._ledger = ledger
        self._plan = plan
        self._prefill, self._decode = (WorkRate(now, _windows(rules)) for rules in (plan.prefill, plan.decode))
        self._held = _Smoothed(_windows(plan.decode).short_s, now)
        self._turned_away: OrderedDict[Hashable, float] = OrderedDict()  # and when they were asked to come back
        self._sizer = PoolSizer(plan.prefill, plan.decode, plan.flips, now=now, settle_s=plan.settle_s)

    def asked(self, query: Query, verdict: Verdict, now: float) -> None:
        """A request came for the first time, and this is what became of it. One that waits counts like one that was
        placed, one that is turned away until its client has come back."""
        if query.attempt > 0 or not verdict.decision.rows:
            return
        is_back = self._is_back(query, now)
        if verdict.outcome is Outcome.REJECTED and verdict.retry_after_s is not None and query.prefix_hashes:
            self._turned_away.setdefault(query.question, now + verdict.retry_after_s)
        if not is_back:
            self._count(query, verdict, now)

    def advise(self, now: float, burning: BurnAlerts | None = None) -> PoolAdvice | None:
        prefill, decode = self.views(now, burning or BurnAlerts())
        return self._sizer.advise(now, prefill, decode)

    def forecasts(self, now: float) -> tuple[Forecast, Forecast]:
        """Of what was asked of prefill and of decode."""
        return (
            self._prefill.forecast(now, self._plan.prefill.start_s),
            self._decode.forecast(now, self._plan.decode.start_s),
        )

    def views(self, now: float, burning: BurnAlerts) -> tuple[PoolView, PoolView]:
        """Of prefill and decode. What is not one pool's fault is blamed on the busier one."""
        table = self._ledger.table
        num_prefill, num_decode = (int((table.rows[Row.DRAINING, pool] == 0.0).sum()) for pool in table.pools())
        held = self._held.update(_held(self._ledger), now)
        prefill, decode = (forecast.predicted for forecast in self.forecasts(now))
        decode = max(decode, held)
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

    def _is_back(self, query: Query, now: float) -> bool:
        """Others may ask the same; hence nobody is before its time, and nobody twice."""
        while self._turned_away and now - next(iter(self._turned_away.values())) > _RETURN_S:
            self._turned_away.popitem(last=False)
        client = query.question
        if now < self._turned_away.get(client, math.inf) - _EARLY_S:
            return False
        del self._turned_away[client]
        return True


def _windows(rules: PoolRules) -> DemandWindows:
    return DemandWindows(short_s=rules.hold_s / 2, long_s=3 * rules.hold_s)


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
    _, decodes = ledger.table.pools()
    facts, slots = ledger.table.rows[:, decodes], ledger.table.slots[:, decodes]
    contexts = np.maximum(slots[Slot.TOKENS] + slots[Slot.OUTPUT] / 2, 1.0)
    each_s = facts[Row.DECODE_S][:, None] + facts[Row.CONTEXT_TOKEN_S][:, None] * contexts
    in_time_s = np.maximum(slots[Slot.TPOT_TARGET_S] - facts[Row.BASE_S][:, None], each_s)
    shares = np.maximum(each_s / np.maximum(in_time_s, 1e-9), contexts / facts[Row.KV_TOKENS].clip(min=1.0)[:, None])
    shares = np.maximum(shares, 1.0 / facts[Row.MAX_SEQUENCES][:, None])
    decoding = (slots[Slot.OUTPUT] > 0.0) & (slots[Slot.JOINED_STEP] < np.inf)
    unknown = facts[Row.EXTRA_CONTEXT] / facts[Row.KV_TOKENS].clip(min=1.0)
    return float((shares * decoding).sum() + unknown.sum())
