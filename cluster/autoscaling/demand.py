"""How much of each pool's time requests take, and whose error budget burns: what pool sizing goes by.

Demand is counted where it arrives, not where it is served: a pool that is too small, and turns clients away or keeps
them waiting, must not look as if less was asked of it. Reads the ledger and the tracker of SLOs, changes neither;
decides nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from cluster.autoscaling.sizing import PoolsPlan, PoolView
from cluster.scheduler.placement.admission import Outcome, Verdict
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.worker_table import Row, Slot
from cluster.slo.sliding_window import SlidingWindow
from cluster.slo.tracker import Burn, SeriesSnapshot
from engine.cost_model.step_cost import StepCost, StepWork
from kv_transfer.messages.scheduling import Place

_NUM_PARTS: Final = 12
_FASTEST_GROWTH: Final = 2.0  # more is not believed of a trend, however steep
_SURE: Final = 2.0  # standard errors by which a rise must show before it counts as a trend
_FEWEST_MISSES: Final = 3  # that say anything about a budget
_EARLY_S: Final = 0.5  # clocks differ
_RETURN_S: Final = 60.0  # so long after it was asked to come back, who asks the same again is the same client


def prefill_work_s(cost: StepCost, uncached_tokens: float, cached_tokens: float, chunk_tokens: float) -> float:
    """Of a busy worker's time: it fills its steps, so that short prompts share what every step costs."""
    work = cost.step_s(StepWork.of_prefill(uncached_tokens, cached_tokens)) - cost.base_s
    return work + cost.base_s * min(1.0, uncached_tokens / chunk_tokens)


def largest_batch(
    cost: StepCost, kv_tokens: float, max_num_seqs: float, *, context_tokens: float, tpot_s: float
) -> float:
    """Of sequences alike on a decode worker: as many as its memory of `kv_tokens` and `max_num_seqs` allow, and whose
    step is in time (inf: any time is)."""
    each_s = cost.decode_s + cost.context_token_s * context_tokens
    in_time = (tpot_s - cost.base_s) / each_s if each_s > 0.0 else math.inf
    return max(1.0, min(in_time, kv_tokens / context_tokens, max_num_seqs))


def decode_work_s(
    cost: StepCost, kv_tokens: float, max_num_seqs: float, *, num_tokens: float, num_output: float, tpot_s: float
) -> float:
    """Of a worker's time, with as many beside it as may be (see `largest_batch`): `num_output` tokens behind a prompt
    of `num_tokens`."""
    context = num_tokens + num_output / 2
    batch = largest_batch(cost, kv_tokens, max_num_seqs, context_tokens=context, tpot_s=tpot_s)
    return num_output * (cost.base_s / batch + cost.decode_s + cost.context_token_s * context)


@dataclass(slots=True)
class _Part:
    work: float = 0.0
    squares: float = 0.0


class WorkRate:
    """Work as it arrives, as a compound Poisson process: its sum tells the rate, the sum of squares how sure it is.
    A short window shows what is new, a long one what is usual."""

    def __init__(self, start_s: float, short_s: float, long_s: float) -> None:
        assert 0 < short_s < long_s
        self._short, self._long = (
            SlidingWindow[_Part](window_s=window_s, num_parts=_NUM_PARTS, start_s=start_s, make=_Part)
            for window_s in (short_s, long_s)
        )

    def add(self, now: float, work_s: float) -> None:
        for window in (self._short, self._long):
            part = window.current(now)
            part.work += work_s
            part.squares += work_s * work_s

    def forecast(self, now: float, lead_s: float) -> float:
        """The demand in `lead_s`: the usual one, or the new one where it is surely higher, and on as it rises.

        In worker-seconds per second, that is workers kept busy.
        """
        short_s = max(self._short.covered_s(now), self._short.window_s / 2)  # in the first moments, nothing is sure
        long_s = max(self._long.covered_s(now), short_s)
        recent = self._short.parts(now)
        short = sum(part.work for part in recent) / short_s
        error = math.sqrt(sum(part.squares for part in recent)) / short_s  # the standard error of `short`
        long = sum(part.work for part in self._long.parts(now)) / long_s
        return max(long, short - error) + _rise(short - long, error, short_s, long_s, lead_s)


def _rise(difference: float, error: float, short_s: float, long_s: float, lead_s: float) -> float:
    """From the middle of the short window on, if the demand grows as steadily as from the middle of the long one.

    A mean over a window tells of the window's middle.
    """
    between_s = (long_s - short_s) / 2
    sure = difference - _SURE * error
    if sure <= 0.0 or between_s < short_s / 2:
        return 0.0
    return min(sure / between_s * (short_s / 2 + lead_s), (_FASTEST_GROWTH - 1.0) * difference)


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnAlerts:
    """Which promises are broken faster than the budget allows, in both windows. `tpot`: by tokens that came too slowly,
    in the mean or between two of them. `other`: by turning clients away, or by failing them."""

    ttft: bool = False
    tpot: bool = False
    other: bool = False

    @classmethod
    def of(cls, series: Iterable[SeriesSnapshot]) -> BurnAlerts:
        """By any class. Few misses are chance, however small the budget."""
        windows = [(s.short, s.long) for s in series if s.counts.missed >= _FEWEST_MISSES]
        return cls(
            ttft=any(min(short.ttft_rate, long.ttft_rate) > 1.0 for short, long in windows),
            tpot=any(min(_tokens_rate(short), _tokens_rate(long)) > 1.0 for short, long in windows),
            other=any(
                min(burn.rate - burn.ttft_rate - _tokens_rate(burn) for burn in (short, long)) > 1.0
                for short, long in windows
            ),
        )


def _tokens_rate(burn: Burn) -> float:
    """Who is late in the mean is so between two tokens, too, as a rule: counted once."""
    return max(burn.tpot_rate, burn.gap_rate)


class DemandMonitor:
    """Hears of every verdict, and says now and then what is asked of each pool. Demand is predicted as far ahead as a
    new worker takes to start, from what came in three times as long as the pool waits before it shrinks."""

    def __init__(self, ledger: Ledger, plan: PoolsPlan, now: float) -> None:
        self._ledger = ledger
        self._plan = plan
        self._prefill, self._decode = (
            WorkRate(now, short_s=rules.hold_s / 2, long_s=3 * rules.hold_s) for rules in (plan.prefill, plan.decode)
        )
        self._held, self._held_at = 0.0, now  # see `_held_by_those_who_decode`, smoothed
        self._turned_away: OrderedDict[Hashable, float] = OrderedDict()  # and when they were asked to come back

    def asked(self, query: Place, verdict: Verdict, now: float) -> None:
        """A request came for the first time, and this is what became of it. One that waits counts like one that was
        placed, one that is turned away until its client has come back."""
        if query.attempt > 0 or not verdict.decision.rows:
            return
        is_back = self._is_back(query, now)
        if verdict.outcome is Outcome.REJECTED and verdict.retry_after_s is not None and query.prefix_hashes:
            self._turned_away.setdefault(query.question, now + verdict.retry_after_s)
        if not is_back:
            self._count(query, verdict, now)

    def forecasts(self, now: float) -> tuple[float, float]:
        """Workers that what was asked of prefill, and of decode, will keep busy."""
        return (
            self._prefill.forecast(now, self._plan.prefill.start_s),
            self._decode.forecast(now, self._plan.decode.start_s),
        )

    def views(self, now: float, burning: BurnAlerts) -> tuple[PoolView, PoolView]:
        """Of prefill and decode. What is not one pool's fault is blamed on the busier one."""
        table = self._ledger.table
        num_prefill, num_decode = (int((table.rows[Row.DRAINING, pool] == 0.0).sum()) for pool in table.pools())
        fresh = -math.expm1((self._held_at - now) / (self._plan.decode.hold_s / 2))
        self._held, self._held_at = self._held + fresh * (_held_by_those_who_decode(self._ledger) - self._held), now
        prefill, decode = self.forecasts(now)
        decode = max(decode, self._held)
        prefill_is_busier = prefill * num_decode > decode * num_prefill
        return (
            PoolView(demand=prefill, burns=burning.ttft or (burning.other and prefill_is_busier), live=num_prefill),
            PoolView(demand=decode, burns=burning.tpot or (burning.other and not prefill_is_busier), live=num_decode),
        )

    def _count(self, query: Place, verdict: Verdict, now: float) -> None:
        best, table, uncached = verdict.decision.best, self._ledger.table, verdict.decision.uncached_tokens
        computing, decoding = table.row(best.computing), table.row(best.decode)
        prompt_s = prefill_work_s(
            table.cost(computing), uncached, query.num_tokens - uncached, float(table.rows[Row.CHUNK_TOKENS, computing])
        )
        (self._decode if table.decodes(best.computing) else self._prefill).add(now, prompt_s)
        if query.is_pooled:
            return
        expected = self._ledger.lengths.expect(query.tenant, query.slo_class, query.max_new_tokens)
        kv_tokens, max_num_seqs = table.rows[[Row.KV_TOKENS, Row.MAX_SEQUENCES], decoding].tolist()
        decode_s = decode_work_s(
            *(table.cost(decoding), kv_tokens, max_num_seqs),
            num_tokens=query.num_tokens,
            num_output=expected,
            tpot_s=query.tpot_target_s,
        )
        self._decode.add(now, decode_s)

    def _is_back(self, query: Place, now: float) -> bool:
        """Others may ask the same; hence nobody is before its time, and nobody twice."""
        while self._turned_away and now - next(iter(self._turned_away.values())) > _RETURN_S:
            self._turned_away.popitem(last=False)
        client = query.question
        if now < self._turned_away.get(client, math.inf) - _EARLY_S:
            return False
        del self._turned_away[client]
        return True


def _held_by_those_who_decode(ledger: Ledger) -> float:
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
