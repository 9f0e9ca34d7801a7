"""Where a request could go, and what each possibility would bring: pairs (prefill, decode), and decode alone.

All workers are scored coarsely in a few vector operations; the pairs among the best few exactly. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.block_index import PrefixReach
from cluster.placement.ledger import Ledger
from cluster.placement.policy import DecisionPolicy
from cluster.placement.prediction import (
    PromptForecast,
    fit_probability,
    forecast_decode,
    forecast_prompt,
    log_probability,
)
from cluster.placement.query import Query
from cluster.placement.worker_table import PROMPTS_OVER_S, Floats, Row, Rows, WorkerTable

_ASSUMED_TTFT_S = 10.0  # what delays are relative to where there is no target
_ASSUMED_TPOT_S = 0.1
_UNSEEN = 0.1  # of a prompt's work on a decode worker, what those who are to be handed over there lose beside the wait
_COARSE_FACTS = (
    *(Row.BASE_S, Row.DECODE_S, Row.CONTEXT_TOKEN_S),
    *(Row.BOOKED, Row.EXTRA_DECODES, Row.BOOKED_CONTEXT, Row.EXTRA_CONTEXT, Row.KV_TOKENS),
)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Columns by candidate; where `computing` is `decode`, the decode worker computes the prompt itself. `chance`: of
    meeting all targets; `gain`: expected requests that meet theirs, after minus before; `delay`: over the targets."""

    computing: Rows
    decode: Rows
    prompt: PromptForecast
    start_s: Floats  # from now until the prompt's computation begins
    ttft_s: Floats
    tpot_s: Floats
    kv_share: Floats
    chance: Floats
    harm: Floats
    gain: Floats
    delay: Floats
    leaves_room: NDArray[np.bool_]  # those who have targets, and those who will come, hardly notice
    order: NDArray[np.intp]  # best first
    reach: Floats  # `[3, rows of the table]`: leading tokens of the prompt on the device, down to host memory, to disk

    def __len__(self) -> int:
        return len(self.decode)


def eligible(table: WorkerTable, query: Query) -> tuple[Rows, Rows]:
    """Rows of the prefill and the decode workers that could do it, each by worker id."""
    rows = table.live()
    excluded = np.array([table.ids[row] in query.exclude for row in rows], dtype=bool) if query.exclude else False
    decodes, longest = table.rows[Row.DECODES, rows] == 1.0, table.rows[Row.MAX_MODEL_LEN, rows]
    holds = decodes & (longest >= query.num_tokens + query.max_new_tokens)
    stays = table.rows[Row.DRAINING, rows] == 0.0
    computes = rows[~decodes & stays & (longest >= query.num_tokens) & ~np.asarray(excluded)]
    if query.prefer_decode is not None and query.prefer_decode in table:
        preferred = rows[holds & (rows == table.row(query.prefer_decode))]  # draining or not: it holds a reservation
        if len(preferred):
            return computes, preferred
    wanted = rows[holds & stays & ~np.asarray(excluded)]
    return computes, wanted if len(wanted) else rows[holds & stays]


def could_ever(table: WorkerTable, query: Query) -> bool:
    """Whether it may fit once workers are there, or are not leaving: not if those that are there are all too small."""
    decodes = table.rows[:, table.live()]
    decodes = decodes[:, decodes[Row.DECODES] == 1.0]
    return bool((decodes[Row.MAX_MODEL_LEN] >= query.num_tokens + query.max_new_tokens).any()) or not decodes.size


def shortest_s(
    ledger: Ledger, policy: DecisionPolicy, query: Query, reach: Mapping[str, PrefixReach], now: float
) -> float:
    """TTFT of the request on the fastest worker, were no queue there; inf where no worker takes it."""
    rows = np.concatenate(eligible(ledger.table, query))
    prompt = _prompt(ledger.table, policy, query, rows, _reach_tokens(ledger, reach), now)
    return float((prompt.load_s + prompt.prefill_s).min(initial=np.inf)) + ledger.overhead.seconds


def find_candidates(
    ledger: Ledger, policy: DecisionPolicy, query: Query, reach: Mapping[str, PrefixReach], now: float
) -> Candidates | None:
    """None where no decode worker is there that could ever do it."""
    table = ledger.table
    prefills, decodes = eligible(table, query)
    if not len(decodes):
        return None
    tokens = _reach_tokens(ledger, reach)
    computing, decode = _shortlist(table, policy, query, prefills, decodes, tokens, now)
    return evaluate(ledger, policy, query, computing, decode, tokens, now, np.zeros(len(decode)))


def evaluate(
    ledger: Ledger,
    policy: DecisionPolicy,
    query: Query,
    computing: Rows,
    decode: Rows,
    reach: Floats,
    now: float,
    later_s: Floats,
    *,
    arrived_later: bool = False,
) -> Candidates:
    """Exactly. `later_s`: as if it were placed so much later; `arrived_later`: and only came then."""
    table, num_output = ledger.table, ledger.lengths.expect(query.tenant, query.slo_class, query.max_new_tokens)
    prompt = _prompt(table, policy, query, computing, reach, now)
    work_s = prompt.load_s + prompt.prefill_s
    alone = computing == decode
    # The same moment for all: were it each one's own, a longer queue would make a crowded decode worker look better.
    soonest = np.where(alone & ~alone.all(), np.inf, prompt.wait_s + work_s).argmin()
    lead_s = np.maximum(later_s, prompt.wait_s[soonest]) + work_s[soonest]
    added_s = np.where(alone, prompt.added_s, 0.0)
    firsts, same = _distinct(decode, added_s, lead_s)
    after = forecast_decode(table, decode[firsts], query, num_output, lead_s[firsts], added_s[firsts], now).at(same)
    # The prompt is computed where it decodes, or queues only when the decode worker has room for it.
    queues_s = np.where(alone, 0.0, np.maximum(prompt.wait_s - later_s, 0.0))
    start_s = np.where(
        after.room_s > later_s, after.room_s + queues_s, np.maximum(np.maximum(later_s, prompt.wait_s), after.room_s)
    )
    waited_s = -later_s if arrived_later else max(0.0, now - query.arrived_at)
    ttft_s = waited_s + start_s + work_s + ledger.overhead.seconds
    chance = _chance(table, query, computing, decode, ttft_s, after.tpot_s) * fit_probability(after.kv_share)
    harm = after.harm
    crowding = _crowding(ledger, policy, query, alone, work_s, later_s, now)
    # Who has no room yet is bound to nobody yet.
    early = after.room_s > later_s + policy.max_room_s
    gain = np.where(early & (query.attempt == 0), -1.0, (chance if query.has_targets else 0.0) - harm - crowding)
    if query.has_targets:
        room = np.ones(len(decode), dtype=bool)  # nobody asks
    else:
        room = _leaves_room(policy, work_s, start_s - later_s, harm, _idle_share(table, alone, later_s, now))
    delay = _relative(ttft_s, query.ttft_s, _ASSUMED_TTFT_S) + _relative(after.tpot_s, query.tpot_s, _ASSUMED_TPOT_S)
    # The pair, unless that costs chances: a decode worker that computes no prompts is better for those who come next.
    worth = np.round(gain - policy.alone_gain * alone, 3)
    barred = np.zeros_like(room) if query.has_targets else ~(room & (chance >= policy.min_gain))
    # Of equals who has least to do: predictions err, and then it is good not to have put everything on one.
    ties = (table.rank[computing], table.rank[decode], table.rows[Row.BOOKED, decode])
    order = np.lexsort((*ties, delay, alone, -worth, barred))
    return Candidates(
        *(computing, decode, prompt, start_s, ttft_s, after.tpot_s, after.kv_share),
        *(chance, harm, gain, delay, room, order, reach),
    )


def _crowding(
    ledger: Ledger,
    policy: DecisionPolicy,
    query: Query,
    alone: NDArray[np.bool_],
    work_s: Floats,
    later_s: Floats,
    now: float,
) -> Floats:
    """Requests still to come that the prompt keeps out."""
    demand, table = ledger.demand, ledger.table
    if query.ttft_s == np.inf or demand.ttft_s <= 0.0:
        return np.zeros_like(work_s)
    rows, moments, same = table.live(), later_s[:1], np.zeros(len(later_s), dtype=np.intp)
    if later_s.any():
        moments, same = np.unique(later_s, return_inverse=True)
    decodes, drained_s = table.rows[Row.DECODES, rows] == 1.0, table.rows[Row.DRAINED_AT, rows] - now
    here, there = (
        np.maximum(drained_s[pool] - moments[:, None], 0.0).sum(axis=1)[same] / max(1, pool.sum())
        for pool in (decodes, ~decodes)
    )
    used = np.minimum(np.where(alone, here, there) / demand.ttft_s, 0.99)
    crowding: Floats = policy.crowding_cost * used / (1.0 - used) * work_s / max(demand.prompt_s, 1e-9)
    return crowding


def _leaves_room(
    policy: DecisionPolicy, work_s: Floats, wait_s: Floats, harm: Floats, idle_share: Floats
) -> NDArray[np.bool_]:
    quiet = (harm <= policy.batch_harm) & (wait_s <= policy.batch_queue_s)
    return quiet & ((work_s <= policy.batch_queue_s) | (idle_share >= policy.batch_idle))


def _idle_share(table: WorkerTable, alone: NDArray[np.bool_], later_s: Floats, now: float) -> Floats:
    """Of the workers of the same role as who computes the prompt, those that have no prompts to compute by then,
    or that had none lately if these are fewer."""
    rows = table.live()
    decodes, drained_s = table.rows[Row.DECODES, rows] == 1.0, table.rows[Row.DRAINED_AT, rows] - now
    lately = table.prompt_share(rows, now)
    here, there = (
        np.minimum(
            np.searchsorted(np.sort(drained_s[pool]), later_s, side="right") / max(1, pool.sum()),
            1.0 - lately[pool].sum() / max(1, pool.sum()) * np.exp(-later_s / PROMPTS_OVER_S),
        )
        for pool in (decodes, ~decodes)
    )
    share: Floats = np.where(alone, here, there)
    return share


def _reach_tokens(ledger: Ledger, reach: Mapping[str, PrefixReach]) -> Floats:
    tokens = np.zeros((3, len(ledger.table.ids)))
    if reach:
        rows = ledger.table.rows_of(reach)
        held = [[r.device for r in reach.values()], [r.host for r in reach.values()], [r.disk for r in reach.values()]]
        known = rows >= 0
        columns = np.array(held, dtype=np.float64)[:, known]
        tokens[:, rows[known]] = columns * ledger.table.rows[Row.BLOCK_SIZE, rows[known]]
    return tokens


def _distinct(decode: Rows, added_s: Floats, lead_s: Floats) -> tuple[list[int], list[int]]:
    """What decode workers will be like does not depend on which prefill worker computes the prompt: the candidates that
    differ there, and for each candidate which of those it is like."""
    found: dict[tuple[int, float, float], int] = {}
    firsts: list[int] = []
    same: list[int] = []
    for index, key in enumerate(zip(decode.tolist(), added_s.tolist(), lead_s.tolist(), strict=True)):
        if key not in found:
            found[key] = len(firsts)
            firsts.append(index)
        same.append(found[key])
    return firsts, same


def _prompt(
    table: WorkerTable, policy: DecisionPolicy, query: Query, rows: Rows, reach: Floats, now: float
) -> PromptForecast:
    tiers = (policy.host_token_s, policy.disk_token_s)
    return forecast_prompt(table, rows, query.num_tokens, reach[:, rows], tiers, now)


def _shortlist(
    table: WorkerTable,
    policy: DecisionPolicy,
    query: Query,
    prefills: Rows,
    decodes: Rows,
    reach: Floats,
    now: float,
) -> tuple[Rows, Rows]:
    """The pairs to be looked at closely: of each group that can hand over to each other, the best few of either pool;
    and for decode alone those few, and those who would have the prompt computed first."""
    kinds = table.rows[Row.COMPATIBILITY]
    computing, decode = [], []
    for kind in sorted(set(kinds[decodes].tolist())):
        here, there = decodes[kinds[decodes] == kind], prefills[kinds[prefills] == kind]
        emptiest = _first(here, _coarse_step_s(table, here, query), policy.num_exact)
        ready_s = _ready_s(table, policy, query, np.concatenate([here, there]), reach, now)
        first = _first(here, ready_s[: len(here)], 2)
        alone = np.array(sorted({*emptiest.tolist(), *first.tolist()}), dtype=np.intp)
        soonest = _first(there, ready_s[len(here) :], policy.num_exact)
        computing += [np.repeat(soonest, len(emptiest)), alone]
        decode += [np.tile(emptiest, len(soonest)), alone]
    return np.concatenate(computing), np.concatenate(decode)


def _first(rows: Rows, score: Floats, count: int) -> Rows:
    """Of equals the first: `rows` come in the order of the workers' names."""
    if len(rows) > count:
        good = np.flatnonzero(score <= np.partition(score, count)[count])
        rows, score = rows[good], score[good]
    return rows[score.argsort(kind="stable")[:count]]


def _ready_s(table: WorkerTable, policy: DecisionPolicy, query: Query, rows: Rows, reach: Floats, now: float) -> Floats:
    prompt = _prompt(table, policy, query, rows, reach, now)
    return prompt.wait_s + prompt.load_s + prompt.prefill_s


def _coarse_step_s(table: WorkerTable, rows: Rows, query: Query) -> Floats:
    """With everyone who is booked, whenever they come and go; late where the prompts alone fill the memory."""
    base_s, decode_s, token_s, booked, more, tokens, more_tokens, capacity = (
        table.rows[fact, rows] for fact in _COARSE_FACTS
    )
    context = tokens + more_tokens + query.num_tokens
    step_s = base_s + decode_s * (booked + more + 1) + token_s * context
    coarse: Floats = np.where(context > capacity, 1000.0 * step_s, step_s)
    return coarse


def _chance(table: WorkerTable, query: Query, computing: Rows, decode: Rows, ttft_s: Floats, tpot_s: Floats) -> Floats:
    error = table.rows[Row.RELATIVE_ERROR]
    in_time = log_probability(ttft_s, query.ttft_s, error[computing])
    chance: Floats = np.exp(in_time + log_probability(tpot_s, query.tpot_s, error[decode]))
    return chance


def _relative(seconds: Floats, target_s: float, assumed_s: float) -> Floats:
    return seconds / (target_s if target_s < np.inf else assumed_s)
