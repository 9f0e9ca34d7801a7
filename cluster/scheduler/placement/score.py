"""What a request's placement on each of a few candidates would bring, now or later, and what that is worth.

A candidate is a pair (prefill, decode), or a decode worker alone. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.moments import join_times, start_times
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.scheduler.placement.prediction import DecodeForecast, PromptForecast, forecast_decode
from cluster.scheduler.placement.query import Query
from cluster.scheduler.placement.tpot_forecast import chances
from cluster.scheduler.placement.worker_scan import idle_shares, queue_shares
from cluster.scheduler.placement.worker_table import Floats, Rows


@dataclass(frozen=True, slots=True)
class Prospects:
    """What would be, whatever the targets. `later_s`, by moment: when it is placed, from now.

    By candidate: who computes the prompt, and who decodes; `alone`, where these are the same; `prompt`. By moment and
    candidate: `start_s`, from now until the prompt's computation begins, which takes `work_s` of each candidate;
    `after`, on the decode worker. Of the pool that computes the prompt: `queue_share`, see `queue_shares`, for
    requests with a TTFT target; `idle_share`, see `idle_shares`, for those without targets; 0 for others."""

    later_s: Floats
    computing: Rows
    decode: Rows
    alone: NDArray[np.bool_]
    prompt: PromptForecast
    work_s: Floats
    start_s: Floats
    after: DecodeForecast
    queue_share: Floats
    idle_share: Floats


@dataclass(frozen=True, slots=True)
class Worth:
    """By moment and candidate. `chance`: of meeting all targets; `gain`: expected requests that meet theirs, after
    minus before; `leaves_room`: those who have targets, and those who will come, hardly notice."""

    ttft_s: Floats
    chance: Floats
    gain: Floats
    leaves_room: NDArray[np.bool_]


_UNASKED: Final = np.zeros((1, 1))


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
    table = ledger.table
    num_output = ledger.lengths.expect(query.tenant, query.slo_class, query.max_new_tokens)
    work_s, alone = prompt.load_s + prompt.prefill_s, computing == decode
    lead_s = join_times(prompt.wait_s, work_s, alone, later_s)
    after = forecast_decode(table, decode, query, num_output, lead_s, prompt.added_s * alone, now)
    start_s = start_times(prompt.wait_s, after.room_s, alone, later_s)
    pools = (table.rows, table.num_prefills, len(table), alone, later_s)
    queue_share = idle_share = _UNASKED
    if query.ttft_s < np.inf and ledger.demand.ttft_s > 0.0:
        queue_share = queue_shares(*pools, ledger.demand.ttft_s, now)
    if not query.has_targets:
        idle_share = idle_shares(*pools, now)
    return Prospects(later_s, computing, decode, alone, prompt, work_s, start_s, after, queue_share, idle_share)


def judge(
    ledger: Ledger, policy: DecisionPolicy, query: Query, seen: Prospects, waited_s: float | Floats, now: float
) -> Worth:
    """`waited_s`: how long the client has waited by now, or will have by each moment's now."""
    work_s, later_s, after = seen.work_s, seen.later_s, seen.after
    ttft_s = waited_s + seen.start_s + work_s + ledger.overhead.seconds
    predicted, targets = (ttft_s, after.tpot_s, after.kv_share), (query.ttft_s, query.tpot_s)
    chance = chances(ledger.table.rows, seen.computing, seen.decode, *predicted, *targets)
    # Requests still to come that the prompt keeps out.
    crowding = policy.crowding_cost * seen.queue_share / (1.0 - seen.queue_share)
    crowding = crowding * work_s / max(ledger.demand.prompt_s, 1e-9)
    harm = after.harm
    # Who has no room yet is bound to nobody yet.
    early = after.room_s > later_s[:, None] + policy.max_room_s
    gain = np.where(early & (query.attempt == 0), -1.0, (chance if query.has_targets else 0.0) - harm - crowding)
    if query.has_targets:
        room = np.ones(gain.shape, dtype=bool)  # nobody asks
    else:
        room = _leaves_room(policy, work_s, seen.start_s - later_s[:, None], harm, seen.idle_share)
    return Worth(ttft_s, chance, gain, room)


def _leaves_room(
    policy: DecisionPolicy, work_s: Floats, wait_s: Floats, harm: Floats, idle_share: Floats
) -> NDArray[np.bool_]:
    quiet = (harm <= policy.batch_harm) & (wait_s <= policy.batch_queue_s)
    return quiet & ((work_s <= policy.batch_queue_s) | (idle_share >= policy.batch_idle))
