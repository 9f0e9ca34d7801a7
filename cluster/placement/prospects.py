"""What a request's placement on each of a few candidates would bring, now or later, and what that is worth.

A candidate is a pair (prefill, decode), or a decode worker alone. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.placement.ledger import Ledger
from cluster.placement.policy import DecisionPolicy
from cluster.placement.prediction import (
    DecodeForecast,
    PromptForecast,
    fit_probability,
    forecast_decode,
    log_probability,
)
from cluster.placement.query import Query
from cluster.placement.worker_table import PROMPTS_OVER_S, Floats, Row, Rows, WorkerTable


@dataclass(frozen=True, slots=True)
class Prospects:
    """What would be, whatever the targets. `later_s`, by moment: when it is placed, from now.

    By candidate: who computes the prompt, and who decodes; `alone`, where these are the same; `prompt`. By moment and
    candidate: `start_s`, from now until the prompt's computation begins, which takes `work_s` of each candidate;
    `after`, on the decode worker."""

    later_s: Floats
    computing: Rows
    decode: Rows
    alone: NDArray[np.bool_]
    prompt: PromptForecast
    work_s: Floats
    start_s: Floats
    after: DecodeForecast


@dataclass(frozen=True, slots=True)
class Worth:
    """By moment and candidate. `chance`: of meeting all targets; `gain`: expected requests that meet theirs, after
    minus before; `leaves_room`: those who have targets, and those who will come, hardly notice."""

    ttft_s: Floats
    chance: Floats
    gain: Floats
    leaves_room: NDArray[np.bool_]


def foresee(
    ledger: Ledger,
    query: Query,
    computing: Rows,
    decode: Rows,
    prompt: PromptForecast,
    later_s: Floats,
    now: float,
) -> Prospects:
    """As if it were placed at each of these moments, `later_s` from now. `prompt`: by candidate."""
    num_output = ledger.lengths.expect(query.tenant, query.slo_class, query.max_new_tokens)
    work_s, alone = prompt.load_s + prompt.prefill_s, computing == decode
    # The same moment for all: were it each one's own, a longer queue would make a crowded decode worker look better.
    ready_s = prompt.wait_s + work_s
    soonest = (ready_s if alone.all() else np.where(alone, np.inf, ready_s)).argmin()
    lead_s = np.maximum(later_s, prompt.wait_s[soonest]) + work_s[soonest]
    firsts, same = _distinct(2 * decode + alone)
    added_s = (prompt.added_s * alone)[firsts]
    after = forecast_decode(ledger.table, decode[firsts], query, num_output, lead_s, added_s, now).at(same)
    # The prompt is computed where it decodes, or queues only when the decode worker has room for it.
    later_s = later_s[:, None]
    queues_s = np.where(alone, 0.0, np.maximum(prompt.wait_s - later_s, 0.0))
    start_s = np.where(
        after.room_s > later_s, after.room_s + queues_s, np.maximum(np.maximum(later_s, prompt.wait_s), after.room_s)
    )
    return Prospects(later_s[:, 0], computing, decode, alone, prompt, work_s, start_s, after)


def judge(
    ledger: Ledger, policy: DecisionPolicy, query: Query, seen: Prospects, waited_s: float | Floats, now: float
) -> Worth:
    """`waited_s`: how long the client has waited by now, or will have by each moment's now."""
    work_s, later_s, after = seen.work_s, seen.later_s, seen.after
    ttft_s = waited_s + seen.start_s + work_s + ledger.overhead.seconds
    chance = _chance(ledger.table, query, seen, ttft_s) * fit_probability(after.kv_share)
    harm, crowding = after.harm, _crowding(ledger, policy, query, seen, now)
    # Who has no room yet is bound to nobody yet.
    early = after.room_s > later_s[:, None] + policy.max_room_s
    gain = np.where(early & (query.attempt == 0), -1.0, (chance if query.has_targets else 0.0) - harm - crowding)
    if query.has_targets:
        room = np.ones(gain.shape, dtype=bool)  # nobody asks
    else:
        idle_share = _idle_share(ledger.table, seen, now)
        room = _leaves_room(policy, work_s, seen.start_s - later_s[:, None], harm, idle_share)
    return Worth(ttft_s, chance, gain, room)


def _crowding(ledger: Ledger, policy: DecisionPolicy, query: Query, seen: Prospects, now: float) -> Floats:
    """Requests still to come that the prompt keeps out."""
    demand, table = ledger.demand, ledger.table
    if query.ttft_s == np.inf or demand.ttft_s <= 0.0:
        return np.zeros((1, 1))
    queue_s = np.maximum((table.rows[Row.DRAINED_AT, : len(table)] - now) - seen.later_s[:, None], 0.0)
    there, here = (queue_s[:, pool].sum(axis=1)[:, None] / _size(pool) for pool in table.pools())
    used = np.minimum(np.where(seen.alone, here, there) / demand.ttft_s, 0.99)
    crowding: Floats = policy.crowding_cost * used / (1.0 - used) * seen.work_s / max(demand.prompt_s, 1e-9)
    return crowding


def _leaves_room(
    policy: DecisionPolicy, work_s: Floats, wait_s: Floats, harm: Floats, idle_share: Floats
) -> NDArray[np.bool_]:
    quiet = (harm <= policy.batch_harm) & (wait_s <= policy.batch_queue_s)
    return quiet & ((work_s <= policy.batch_queue_s) | (idle_share >= policy.batch_idle))


def _idle_share(table: WorkerTable, seen: Prospects, now: float) -> Floats:
    """Of the workers of the same role as who computes the prompt, those that have no prompts to compute by then,
    or that had none lately if these are fewer."""
    there, here = (
        np.minimum(
            np.searchsorted(np.sort(table.rows[Row.DRAINED_AT, pool] - now), seen.later_s, side="right") / _size(pool),
            1.0 - table.prompt_share(pool, now).sum() / _size(pool) * np.exp(-seen.later_s / PROMPTS_OVER_S),
        )[:, None]
        for pool in table.pools()
    )
    share: Floats = np.where(seen.alone, here, there)
    return share


def _distinct(keys: Rows) -> tuple[list[int], list[int]]:
    """What decode workers will be like does not depend on which prefill worker computes the prompt: the candidates that
    differ there, and for each candidate which of those it is like."""
    firsts: dict[int, int] = {}
    for index, key in enumerate(keys.tolist()):
        firsts.setdefault(key, index)
    number = {key: position for position, key in enumerate(firsts)}
    return list(firsts.values()), [number[key] for key in keys.tolist()]


def _chance(table: WorkerTable, query: Query, seen: Prospects, ttft_s: Floats) -> Floats:
    error = table.rows[Row.RELATIVE_ERROR]
    in_time = log_probability(ttft_s, query.ttft_s, error[seen.computing])
    chance: Floats = np.exp(in_time + log_probability(seen.after.tpot_s, query.tpot_s, error[seen.decode]))
    return chance


def _size(pool: slice) -> int:
    return max(1, int(pool.stop - pool.start))
