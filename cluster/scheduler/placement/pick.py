"""Pick: one request, one decision: which pair of workers, or none now.

The third stage (see the package): `pick` takes what `filter_workers` found, has the shortlist scored, puts the
candidates in order, and says whether the best one is good enough; `first_good_s`, when it would be. Both are functions
of ledger, query, prefixes and clock alone and change nothing; `bind` makes the choice count. A `Decision` keeps the
table that it was made from, for operators to read.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.placement.filter import Filtered, shortlist
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.scheduler.placement.retry_after import LATER_S, NUM_LATER_CANDIDATES
from cluster.scheduler.placement.score import PlacementForecast, Score, predict, score
from cluster.scheduler.placement.split import with_splits
from cluster.scheduler.placement.worker_table import Fact, Floats, WorkerTable
from kv_transfer.messages.scheduling import Place

_AT_ONCE: Final = np.zeros(1)
_LATER: Final = np.array(LATER_S)
_NUM_ROWS: Final = 8  # candidates that a decision keeps
_ASSUMED_TTFT_S: Final = 10.0  # what delays are relative to where there is no target
_ASSUMED_TPOT_S: Final = 0.1
_QUIET_SHARE: Final = 0.05  # of the pool's time for prompts: less is nothing to keep away from
_MOST_SHARES: Final = 2.0


class Action(Enum):
    PLACE = "it goes to the chosen workers"
    DEFER = "nowhere would it do more good than harm now; later it may"
    IMPOSSIBLE = "no worker that is there could ever do it"


class Candidates(NamedTuple):
    """The candidates of the shortlist, as if the request were placed now, which is their only moment. `order`: best
    first."""

    predicted: PlacementForecast
    scores: Score
    order: NDArray[np.intp]


class CandidateRow(NamedTuple):
    """One line of the table. `prefill` computes the prompt; where decode workers are one pool, it may be one of these.
    None: `decode` does all of it."""

    prefill: str | None
    decode: str
    cached_tokens: int
    wait_s: float
    prefill_s: float
    ttft_s: float
    tpot_s: float
    kv_share: float
    slo_probability: float
    slo_loss: float
    slo_gain: float
    split_at: int = 0  # `prefill` computes the tokens before, `decode` the others, in `rest_s`; 0: `prefill` all
    first_s: float = 0.0
    rest_s: float = 0.0
    adapter_s: float = 0.0  # of `prefill_s`, until the adapter is there
    coming_tokens: int = 0  # of `cached_tokens`, those that prompts in its queue bring

    @property
    def computing_s(self) -> float:
        """Seconds of `prefill_s` in which no other prompt is computed: others do not wait for its adapter."""
        return self.prefill_s - self.adapter_s

    @property
    def computing(self) -> str:
        """The worker that computes the prompt."""
        return self.prefill or self.decode

    def __str__(self) -> str:
        return (
            f"{self.prefill or '(decode alone)':<20} {self.decode:<20} {self.cached_tokens:>7} {self.wait_s:>8.3f} "
            f"{self.prefill_s:>8.3f} {self.ttft_s:>8.3f} {1000 * self.tpot_s:>8.2f} {100 * self.kv_share:>5.0f} "
            f"{self.slo_probability:>7.3f} {self.slo_loss:>7.3f} {self.slo_gain:>7.3f} {self.split_at or '-':>7}"
        )


_HEADINGS = (
    f"{'prefill':<20} {'decode':<20} {'cached':>7} {'wait s':>8} {'comp. s':>8} {'TTFT s':>8} {'TPOT ms':>8} "
    f"{'KV %':>5} {'P(SLO)':>7} {'loss':>7} {'gain':>7} {'split':>7}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`rows`: best first; the first one is chosen where the action is PLACE."""

    query: Place
    now: float
    action: Action
    rows: tuple[CandidateRow, ...]

    @property
    def best(self) -> CandidateRow:
        return self.rows[0]

    @property
    def uncached_tokens(self) -> int:
        """The number of the prompt's tokens that the best candidate has to compute."""
        return self.query.num_tokens - self.best.cached_tokens

    def __str__(self) -> str:
        query = self.query
        targets = [] if query.ttft_s is None else [f"TTFT {query.ttft_s:g} s"]
        targets += [
            f"{name} {1000 * target_s:g} ms"
            for name, target_s in (("TPOT", query.tpot_s), ("gap", query.gap_s))
            if target_s is not None
        ]
        title = (
            f"{query.request_id} (attempt {query.attempt}, tenant {query.tenant!r}, class {query.slo_class!r}) at "
            f"{self.now:.3f} s: {query.num_tokens} tokens, at most {query.max_new_tokens} new, "
            f"{', '.join(targets) or 'no targets'}: {self.action.name}, {self.action.value}"
        )
        return "\n".join([title, _HEADINGS, *map(str, self.rows)])


def pick(
    ledger: Ledger, policy: DecisionPolicy, query: Place, found: Filtered, now: float, *, share: float = 1.0
) -> tuple[Decision, Candidates | None]:
    """The decision, and all candidates that it was made among, for `Admission` to look at again; None where there are
    none. `share`: see `DecisionPolicy.admits`."""
    candidates = rank(ledger, policy, query, found, now, share=share)
    if candidates is None:
        return Decision(query=query, now=now, action=Action.IMPOSSIBLE, rows=()), None
    action = Action.PLACE if _is_good_enough(policy, query, candidates, share) else Action.DEFER
    return Decision(query=query, now=now, action=action, rows=_rows(ledger, candidates)), candidates


def rank(
    ledger: Ledger, policy: DecisionPolicy, query: Place, found: Filtered, now: float, *, share: float = 1.0
) -> Candidates | None:
    """The shortlist, scored and in order, those first that are good enough with that `share`: the best of the others
    must not be why the request is turned away. None where no decode worker is there that could ever do it."""
    if not found.decodes:
        return None
    computing, decode, prompt = with_splits(ledger, query, found, *shortlist(ledger.table, policy, query, found))
    predicted = predict(ledger, query, computing, decode, prompt, _AT_ONCE, now)
    scores = score(ledger, policy, query, predicted, query.waited_s)
    ttft_s, tpot_s = scores.ttft_s[0], predicted.forecast.tpot_s[0]
    delay = _relative(ttft_s, query.ttft_s, _ASSUMED_TTFT_S) + _relative(tpot_s, query.tpot_s, _ASSUMED_TPOT_S)
    slo_gain, slo_probability, leaves_room = scores.slo_gain[0], scores.slo_probability[0], scores.leaves_room[0]
    # The pair, unless that costs chances: a decode worker that computes no prompts is better for those who come next.
    elsewhere, is_split = predicted.in_decode_pool & ~predicted.is_decode_alone, prompt.split_at > 0.0
    if policy.one_pool:
        rounded = (slo_gain - _price_in_one_pool(ledger.table, policy, query, predicted, ttft_s, now)).round(2)
    else:
        cost = policy.delay_cost * delay + policy.work_cost * _busy_work(ledger, predicted, now)
        for kind in (predicted.in_decode_pool, ~predicted.in_decode_pool):
            if (least := cost[kind & ~is_split].min(initial=np.inf)) < np.inf:  # else none of them has ever room
                cost[kind] -= least
        rounded = (slo_gain - cost - policy.alone_gain * predicted.in_decode_pool).round(3)
    if query.has_targets:
        too_bad = ~policy.admits(ttft_s, slo_gain, query.ttft_target_s, share)
        barred = np.zeros_like(leaves_room)
    else:
        too_bad = np.zeros_like(leaves_room)
        barred = ~(leaves_room & (slo_probability >= policy.min_gain))
    barred |= is_split & (slo_gain < slo_gain[~is_split].max() + policy.split_gain)
    # Of equals who has least to do: predictions err, and then it is good not to have put everything on one. Between
    # decode workers nothing moves for nothing.
    ties = (computing, decode, ledger.table.facts[Fact.BOOKED, decode])
    return Candidates(
        predicted, scores, np.lexsort((*ties, delay, elsewhere, predicted.in_decode_pool, -rounded, too_bad, barred))
    )


def _price_in_one_pool(
    table: WorkerTable, policy: DecisionPolicy, query: Place, predicted: PlacementForecast, ttft_s: Floats, now: float
) -> Floats:
    """What each candidate costs those who come next (see `DecisionPolicy`). Without it all workers would stay alike:
    each is as good as the others, and none is good for tokens that have to come fast."""
    computing, decode, pool = predicted.computing, predicted.decode, table.pools()[1]
    crowds = table.facts[Fact.BOOKED, : len(table)] / max(1.0, float(table.facts[Fact.BOOKED, pool].mean()))
    prompts = np.minimum(table.prompt_shares(slice(0, len(table)), now), 1.0)
    prompts = prompts / max(_QUIET_SHARE, float(prompts[pool].mean()))
    paces_s = predicted.forecast.tpot_s[0] * table.facts[Fact.STRETCH, decode]  # with the prompts that come in between
    tightness = min(1.0, float(paces_s.min()) / query.tpot_target_s) ** 2
    prompt = predicted.prompt
    here = prompt.rest_s / np.maximum(prompt.first_s + prompt.rest_s, 1e-9)  # of a split one, where it decodes
    crowd = crowds[computing] + here * (crowds[decode] - crowds[computing])
    disturbed = np.minimum(crowd, _MOST_SHARES) + np.minimum(prompts[decode], _MOST_SHARES)
    never = ttft_s == np.inf  # no room is foreseen: later than any target, and where there is none
    waits = np.where(never, _MOST_SHARES, np.minimum(np.where(never, 0.0, ttft_s) / query.ttft_target_s, _MOST_SHARES))
    handed_over = ~predicted.is_decode_alone
    price: Floats = (
        policy.role_gain * tightness * disturbed + policy.wait_gain * waits + policy.handover_gain * handed_over
    )
    return price


def _busy_work(ledger: Ledger, predicted: PlacementForecast, now: float) -> Floats:
    """What the prompt takes of the workers' time, in average prompts, the less the more of that time is unused: on busy
    workers it pays to go where a prefix is, on idle ones to be served sooner."""
    table = ledger.table
    of_prefill, of_decode = (min(1.0, share) for share in table.busy_shares(now))
    prompt = predicted.prompt
    busy_share = np.where(predicted.in_decode_pool, of_decode, of_prefill)
    work: Floats = busy_share * prompt.first_s + of_decode * prompt.rest_s
    return work / ledger.demand.prompt_s if ledger.demand.prompt_s > 0.0 else np.zeros_like(work)


def _is_good_enough(policy: DecisionPolicy, query: Place, candidates: Candidates, share: float) -> bool:
    """Whether the best candidate is to be taken. What was begun already (a later attempt) always is, if it fits."""
    scores, best = candidates.scores, (0, candidates.order[0])
    if scores.ttft_s[best] == float("inf"):
        return False
    if query.attempt > 0:
        return True
    if not query.has_targets:
        return bool(scores.leaves_room[best] and scores.slo_probability[best] >= policy.min_gain)
    return bool(policy.admits(scores.ttft_s[best], scores.slo_gain[best], query.ttft_target_s, share))


def place_anyway(decision: Decision) -> Decision:
    """Place the request with the best candidate, good enough or not; where none has the room, with the one that lacks
    least of it."""
    assert decision.action is Action.DEFER, decision
    rows = decision.rows
    if rows[0].ttft_s == float("inf"):
        rows = tuple(sorted(rows, key=lambda row: row.kv_share))
    return replace(decision, action=Action.PLACE, rows=rows)


def predict_later(ledger: Ledger, query: Place, candidates: Candidates, now: float) -> PlacementForecast:
    """The best candidates as if the request were placed at each of the moments `LATER_S` from now; those who may come
    in between are not foreseen."""
    predicted, best = candidates.predicted, candidates.order[:NUM_LATER_CANDIDATES]
    computing, decode, prompt = predicted.computing[best], predicted.decode[best], predicted.prompt.at(best)
    return predict(ledger, query, computing, decode, prompt, _LATER, now)


def first_good_s(
    ledger: Ledger,
    policy: DecisionPolicy,
    query: Place,
    later: PlacementForecast,
    waited_s: float | Floats,
    *,
    share: float,
    within_s: float = float("inf"),
) -> float | None:
    """Seconds until a request that does no good now could be placed, as those before it get on: the first good moment
    of `later` (see `predict_later`) that is `within_s`, or None. `waited_s`: see `score`."""
    scores = score(ledger, policy, query, later, waited_s)
    if query.has_targets:
        good = policy.admits(scores.ttft_s, scores.slo_gain, query.ttft_target_s, share)
    else:
        good = scores.leaves_room
    moments = np.flatnonzero(good[: bisect_right(LATER_S, within_s)].any(axis=1))
    return LATER_S[moments[0]] if len(moments) else None


def bind(ledger: Ledger, decision: Decision) -> None:
    """Bind, the fourth stage: book the request on its workers, so that it counts as theirs from now on."""
    assert decision.action is Action.PLACE, decision
    best = decision.best
    rest_tokens = decision.query.num_tokens - best.split_at if best.split_at else 0
    booking = ledger.book(
        decision.query,
        prefill=best.prefill,
        decode=best.decode,
        uncached_tokens=decision.uncached_tokens - rest_tokens,
        prefill_s=best.first_s if best.split_at else best.computing_s,
        weight=best.slo_probability,
        now=decision.now,
        rest_tokens=rest_tokens,
        rest_s=best.rest_s,
        coming_tokens=best.coming_tokens,
    )
    booking.is_first = booking.is_first and best.wait_s + best.adapter_s == 0.0  # also of memory and slots


def _relative(seconds: Floats, target_s: float | None, assumed_s: float) -> Floats:
    return seconds / (assumed_s if target_s is None else target_s)


def _rows(ledger: Ledger, candidates: Candidates) -> tuple[CandidateRow, ...]:
    ids, best = ledger.table.ids, candidates.order[:_NUM_ROWS]
    predicted, scores, forecast = candidates.predicted, candidates.scores, candidates.predicted.forecast
    prompt = predicted.prompt.at(best)
    columns = (
        *(prompt.cached_tokens, predicted.start_s[0, best], prompt.work_s),
        *(scores.ttft_s[0, best], forecast.tpot_s[0, best], forecast.kv_share[0, best]),
        *(scores.slo_probability[0, best], predicted.slo_loss[0, best], scores.slo_gain[0, best]),
        *(prompt.split_at, prompt.first_s, prompt.rest_s, prompt.adapter_s, prompt.coming_tokens),
    )
    pairs = zip(predicted.computing[best].tolist(), predicted.decode[best].tolist(), strict=True)
    return tuple(
        CandidateRow._make(
            (
                *(None if computing == decode else ids[computing], ids[decode], int(cached), *numbers),
                *(int(split_at), first_s, rest_s, adapter_s, int(coming)),
            )
        )
        for (computing, decode), (cached, *numbers, split_at, first_s, rest_s, adapter_s, coming) in zip(
            pairs, np.array(columns).T.tolist(), strict=True
        )
    )
