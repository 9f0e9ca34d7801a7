"""How much of each pool's time requests take, and whose error budget burns: what pool sizing goes by.

Demand is counted where it arrives, not where it is served: a pool that is too small, and turns clients away or keeps
them waiting, must not look as if less was asked of it. Reads the ledger and the tracker of SLOs, changes neither;
decides nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cluster.autoscaling.sizing import PoolsPlan, PoolView
from cluster.scheduler.placement.admission import AdmissionOutcome, Verdict
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.worker_table import Fact, Slot
from cluster.slo.sliding_window import SlidingWindow
from cluster.slo.tracker import Burn, SeriesSnapshot
from engine.cost_model.step_cost import StepCost
from kv_transfer.messages.fields import Role
from kv_transfer.messages.scheduling import Place

_NUM_PARTS: Final = 12
_FASTEST_GROWTH: Final = 2.0  # a trend, however steep, at most doubles the demand
_SURE: Final = 2.0  # standard errors by which a rise must show before it counts as a trend
_FEWEST_MISSES: Final = 3  # with fewer missed promises nothing is said about a budget
_EARLY_S: Final = 0.5  # how much too early a client may come back, since clocks differ
_RETURN_S: Final = 60.0  # who asks the same again within this time after it was to come back is the same client
# So many refusals before that time are taken for other clients that ask the same, any more for one that does not wait:
# else one client that polls orders workers for hundreds. What of theirs is placed is work, and counts in any case.
_MAX_ALIKE: Final = 2


def prefill_work_s(cost: StepCost, uncached_tokens: float, cached_tokens: float, chunk_tokens: float) -> float:
    """How much of a busy worker's time a prompt takes, in seconds. Such a worker fills its steps, so that short prompts
    share what every step costs, and long ones take several."""
    each_s = cost.base_s + cost.prefill_base_s
    work = cost.prefill_s(uncached_tokens, cached_tokens) - each_s
    return work + each_s * uncached_tokens / chunk_tokens


def largest_batch(
    cost: StepCost, kv_tokens: float, max_num_seqs: float, *, context_tokens: float, tpot_s: float
) -> float:
    """How many sequences of `context_tokens` a decode worker can run together: its memory of `kv_tokens` and
    `max_num_seqs` must allow it, and a step must take at most `tpot_s` (inf: it may take any time)."""
    each_s = cost.decode_s + cost.context_token_s * context_tokens
    in_time = (tpot_s - cost.base_s) / each_s if each_s > 0.0 else math.inf
    return max(1.0, min(in_time, kv_tokens / context_tokens, max_num_seqs))


def decode_work_s(
    cost: StepCost, kv_tokens: float, max_num_seqs: float, *, context_tokens: float, num_output: float, tpot_s: float
) -> float:
    """How much of a decode worker's time `num_output` tokens of a sequence take, in seconds, which has `context_tokens`
    in the mean meanwhile, in the largest batch of such sequences (see `largest_batch`)."""
    batch = largest_batch(cost, kv_tokens, max_num_seqs, context_tokens=context_tokens, tpot_s=tpot_s)
    return num_output * (cost.base_s / batch + cost.decode_s + cost.context_token_s * context_tokens)


@dataclass(slots=True)
class _TurnedAway:
    """A question that was refused, first `at`, and whose client was asked to come back at `until`. `num_alike`: times
    that it was counted once more, for other clients."""

    at: float
    until: float
    num_alike: int = 0


@dataclass(slots=True)
class _Part:
    """The work that arrived in one part of a window, in seconds: its sum, and the sum of its squares."""

    work: float = 0.0
    squares: float = 0.0


class WorkRate:
    """Counts work as it arrives and forecasts its rate. Taken as a compound Poisson process: the sum of the work tells
    the rate, the sum of squares how sure that is. A short window shows what is new, a long one what is usual."""

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
        """The demand `lead_s` from now, in worker-seconds per second, that is workers kept busy: the usual demand, or
        the new one where that is surely higher, plus what it rises by until then.
        """
        short_s = max(self._short.covered_s(now), self._short.window_s / 2)  # in the first moments, nothing is sure
        long_s = max(self._long.covered_s(now), short_s)
        recent = self._short.parts(now)
        short = sum(part.work for part in recent) / short_s
        error = math.sqrt(sum(part.squares for part in recent)) / short_s  # the standard error of `short`
        long = sum(part.work for part in self._long.parts(now)) / long_s
        return max(long, short - error) + _rise(short - long, error, short_s, long_s, lead_s)

    def bounds(self, now: float) -> tuple[float, float]:
        """Between what the demand surely is now, whatever is usual and whatever is to come."""
        short_s = max(self._short.covered_s(now), self._short.window_s / 2)
        recent = self._short.parts(now)
        work, error = sum(part.work for part in recent), math.sqrt(sum(part.squares for part in recent))
        return max(0.0, work - error) / short_s, (work + error) / short_s


def _rise(difference: float, error: float, short_s: float, long_s: float, lead_s: float) -> float:
    """How much the demand rises from the middle of the short window to `lead_s` from now, if it goes on growing as it
    did between the middles of the two windows (a mean over a window tells of its middle). 0 if no rise is sure.
    """
    between_s = (long_s - short_s) / 2
    sure = difference - _SURE * error
    if sure <= 0.0 or between_s < short_s / 2:
        return 0.0
    return min(sure / between_s * (short_s / 2 + lead_s), (_FASTEST_GROWTH - 1.0) * difference)


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnAlerts:
    """Which promises are broken faster than their error budgets allow, in both windows. `ttft`: first tokens came late.
    `tpot`: tokens came too slowly, in the mean or between two of them. `other`: requests were turned away or failed."""

    ttft: bool = False
    tpot: bool = False
    other: bool = False

    @classmethod
    def of(cls, series: Iterable[SeriesSnapshot]) -> BurnAlerts:
        """The alerts of these series: one is on if any class burns its budget. Few misses are chance, however small the
        budget, and do not count."""
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
    """The burn rate of tokens that came late. Who is late in the mean is so between two tokens, too, as a rule, and
    must not count twice: the larger of both rates."""
    return max(burn.tpot_rate, burn.gap_rate)


class DemandMonitor:
    """Predicts the demand on each pool from the scheduler's verdicts, all of which it hears. It looks as far ahead as a
    new worker takes to start, and back three times as long as the pool waits before it shrinks."""

    def __init__(self, ledger: Ledger, plan: PoolsPlan, now: float) -> None:
        self._ledger = ledger
        self._plan = plan
        self._prefill, self._decode = (
            WorkRate(now, short_s=rules.hold_s / 2, long_s=3 * rules.hold_s) for rules in (plan.prefill, plan.decode)
        )
        self._held, self._held_at = 0.0, now  # see `_held_by_those_who_decode`, smoothed
        self._turned_away: OrderedDict[Hashable, _TurnedAway] = OrderedDict()  # by question

    def asked(self, query: Place, verdict: Verdict, now: float, has_waited: bool) -> None:
        """Count a request, if it is its first attempt, by the verdict on it. One that waits counts like one that was
        placed, and not again by the verdict after that (`has_waited`). One that was turned away counts as well, so its
        client's return does not, nor does what it asks before its time, but for a few (see `_MAX_ALIKE`)."""
        if query.attempt > 0 or not verdict.decision.rows:
            return
        refused_for_s = verdict.retry_after_s if verdict.outcome is AdmissionOutcome.REJECTED else None
        if has_waited and refused_for_s is None:
            return
        if not self._is_counted(query, refused_for_s, now) and not has_waited:
            self._count(query, verdict, now)

    def forecasts(self, now: float) -> tuple[float, float]:
        """How many workers the demand on prefill, and that on decode, will keep busy, by arrivals alone."""
        return (
            self._prefill.forecast(now, self._plan.prefill.start_s),
            self._decode.forecast(now, self._plan.decode.start_s),
        )

    def views(self, now: float, burning: BurnAlerts, loading: Sequence[Role] = ()) -> tuple[PoolView, PoolView]:
        """How the pools of prefill and of decode stand now. What is not one pool's fault is blamed on the busier one;
        first tokens that are late on decode, where there is no pool for prefill. `loading`: the role of each worker
        that loads its model."""
        table = self._ledger.table
        pools = [table.facts[Fact.DRAINING, pool] for pool in table.pools()]
        num_prefill, num_decode = (int((draining == 0.0).sum()) for draining in pools)
        roles: tuple[Role, ...] = ("prefill", "decode")
        present = [len(draining) + loading.count(role) for draining, role in zip(pools, roles, strict=True)]
        fresh = -math.expm1((self._held_at - now) / (self._plan.decode.hold_s / 2))
        self._held, self._held_at = self._held + fresh * (_held_by_those_who_decode(self._ledger) - self._held), now
        prefill, decode = self.forecasts(now)
        decode = max(decode, self._held)
        prefill_is_busier = prefill * num_decode > decode * num_prefill
        least, most = self._decode.bounds(now)
        decode_computes = self._plan.prefill.max_workers == 0
        return (
            PoolView(
                demand=prefill,
                bounds=self._prefill.bounds(now),
                burns=burning.ttft or (burning.other and prefill_is_busier),
                live=num_prefill,
                present=present[0],
            ),
            PoolView(
                demand=decode,
                bounds=(max(self._held, least), max(self._held, most)),
                burns=burning.tpot or (burning.ttft and decode_computes) or (burning.other and not prefill_is_busier),
                live=num_decode,
                present=present[1],
            ),
        )

    def _count(self, query: Place, verdict: Verdict, now: float) -> None:
        """Add the work of a request to the pools whose workers would do it; of targets, what the verdict left."""
        best, table, uncached = verdict.decision.best, self._ledger.table, verdict.decision.uncached_tokens
        computing, decoding = table.row(best.computing), table.row(best.decode)
        prompt_s = prefill_work_s(
            table.cost(computing),
            uncached,
            query.num_tokens - uncached,
            float(table.facts[Fact.CHUNK_TOKENS, computing]),
        )
        (self._decode if table.decodes(best.computing) else self._prefill).add(now, prompt_s)
        if query.is_pooled:
            return
        expected = self._ledger.lengths.expect(query.tenant, query.slo_class, query.max_new_tokens)
        kv_tokens, max_num_seqs = table.facts[[Fact.KV_TOKENS, Fact.MAX_SEQUENCES], decoding].tolist()
        decode_s = decode_work_s(
            *(table.cost(decoding), kv_tokens, max_num_seqs),
            context_tokens=query.num_tokens + expected / 2,
            num_output=expected,
            tpot_s=verdict.decision.query.tpot_target_s,
        )
        self._decode.add(now, decode_s)

    def _is_counted(self, query: Place, refused_for_s: float | None, now: float) -> bool:
        """Whether it is of a client that was turned away and is counted; remembers whoever is told now to come back in
        `refused_for_s`. It must be time for that, and each is back only once, since others may ask the same."""
        while self._turned_away and now - next(iter(self._turned_away.values())).until > _RETURN_S:
            self._turned_away.popitem(last=False)
        known = self._turned_away.get(query.question)
        if known is None:
            if refused_for_s is not None and query.is_told_apart:
                self._turned_away[query.question] = _TurnedAway(at=now, until=now + refused_for_s)
            return False
        if now >= known.until - _EARLY_S:
            if refused_for_s is None:
                del self._turned_away[query.question]
            else:
                known.until = now + refused_for_s
                self._turned_away.move_to_end(query.question)
            return True
        if refused_for_s is None or now - query.waited_s <= known.at:
            return False  # it is served, or was sent before anybody could repeat it, like all choices of a request
        known.num_alike += 1
        return known.num_alike > _MAX_ALIKE


def _held_by_those_who_decode(ledger: Ledger) -> float:
    """How many decode workers the sequences that decode now would fill, if each takes its share of the largest batch
    that it could be in.

    In smaller batches they leave sooner, so this tells less than arrivals do, unless outputs turn out longer than
    expected, or began before this scheduler did."""
    _, decodes = ledger.table.pools()
    facts, slots = ledger.table.facts[:, decodes], ledger.table.slots[:, decodes]
    contexts = np.maximum(slots[Slot.TOKENS] + slots[Slot.OUTPUT] / 2, 1.0)
    each_s = facts[Fact.DECODE_S][:, None] + facts[Fact.CONTEXT_TOKEN_S][:, None] * contexts
    in_time_s = np.maximum(slots[Slot.TPOT_TARGET_S] - facts[Fact.BASE_S][:, None], each_s)
    shares = np.maximum(each_s / np.maximum(in_time_s, 1e-9), contexts / facts[Fact.KV_TOKENS].clip(min=1.0)[:, None])
    shares = np.maximum(shares, 1.0 / facts[Fact.MAX_SEQUENCES][:, None])
    decoding = (slots[Slot.OUTPUT] > 0.0) & (slots[Slot.JOINED_STEP] < np.inf)
    unknown = facts[Fact.EXTRA_CONTEXT] / facts[Fact.KV_TOKENS].clip(min=1.0)
    return float((shares * decoding).sum() + unknown.sum())
