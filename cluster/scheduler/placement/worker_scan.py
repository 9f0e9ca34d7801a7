"""Compiled: all workers, looked at coarsely for one request. What `survey` wires together.

Columns of `rows[Row]` are workers: prefill workers first, `num_prefills` of them, then decode workers, `num_workers` in
all; there may be room for more behind them. What is called stands before what calls it, since that is compiled at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.placement.compiled import compiled, part
from cluster.scheduler.placement.worker_table import PROMPTS_OVER_S, Floats, Row, Rows


@compiled("f8[:, ::1](f8[:, ::1], i8, f8, f8[:, ::1], f8, f8, f8)")
def forecast_prompts(
    rows: Floats,
    num_workers: int,
    num_tokens: float,
    reach: Floats,
    host_token_s: float,
    disk_token_s: float,
    now: float,
) -> Floats:
    """The columns of a `PromptForecast`, in their order, of each worker. `reach`: as in `forecast_prompt`."""
    found = np.empty((6, num_workers))
    for worker in range(num_workers):
        step_s = rows[Row.STEP_S, worker] / rows[Row.STRETCH, worker]
        # Each that decodes takes a token of the step's budget.
        chunk = max(rows[Row.CHUNK_TOKENS, worker] - rows[Row.BOOKED, worker], 1.0)
        least_s, load_s, deeper = np.inf, 0.0, 0.0
        for depth in range(3):
            cached = min(reach[depth, worker], num_tokens - 1.0)
            if depth > 0 and cached <= deeper:
                continue
            if depth > 0:
                load_s += (cached - deeper) * (host_token_s if depth == 1 else disk_token_s)
            deeper, uncached = cached, num_tokens - cached
            pair_s = rows[Row.PREFILL_PAIR_S, worker] * (cached + (uncached + 1) / 2)
            added_s = uncached * (rows[Row.PREFILL_TOKEN_S, worker] + pair_s)
            prefill_s = added_s + max(np.ceil(uncached / chunk), 1.0) * step_s
            if load_s + prefill_s < least_s:
                least_s = load_s + prefill_s
                found[0, worker], found[1, worker] = cached, uncached
                found[3, worker], found[4, worker], found[5, worker] = load_s, prefill_s, added_s
        found[2, worker] = max(rows[Row.DRAINED_AT, worker] - now, 0.0)
    return found


@compiled("b1[::1](f8[:, ::1], i8, i8, f8, f8, i8[::1], i8)")
def eligible(
    rows: Floats,
    num_prefills: int,
    num_workers: int,
    num_tokens: float,
    max_new_tokens: float,
    excluded: Rows,
    preferred: int,
) -> NDArray[np.bool_]:
    """Whether a prefill worker could compute the prompt, whether a decode worker could do the rest. `preferred`: the
    one decode worker that is wanted, leaving or not, since it holds a reservation; -1: none. Where no other is left,
    excluded ones are no longer."""
    fits, wanted = np.empty(num_workers, np.bool_), np.empty(num_workers, np.bool_)
    staying, num_decodes = np.empty(num_workers, np.bool_), 0
    for worker in range(num_workers):
        needed = num_tokens if worker < num_prefills else num_tokens + max_new_tokens
        fits[worker] = rows[Row.MAX_MODEL_LEN, worker] >= needed
        staying[worker] = wanted[worker] = fits[worker] and rows[Row.DRAINING, worker] == 0.0
    for worker in excluded:
        wanted[worker] = False
    is_bound = preferred >= num_prefills and fits[preferred]
    for worker in range(num_prefills, num_workers):
        wanted[worker] = worker == preferred if is_bound else wanted[worker]
        num_decodes += wanted[worker]
    for worker in range(num_prefills, num_workers):
        wanted[worker] = staying[worker] if num_decodes == 0 else wanted[worker]
    return wanted


@compiled("Tuple((f8[::1], f8, f8))(f8[:, ::1], i8, f8, f8[::1], f8[::1], f8[::1], b1[::1])")
def look(
    rows: Floats,
    num_prefills: int,
    num_tokens: float,
    wait_s: Floats,
    load_s: Floats,
    prefill_s: Floats,
    wanted: NDArray[np.bool_],
) -> tuple[Floats, float, float]:
    """When the prompt would be computed, by worker; the shortest TTFT and TPOT, were nobody else there. inf: nowhere.
    Seconds: of a `PromptForecast`."""
    ready_s, shortest_s, shortest_tpot_s = np.full(len(wanted), np.inf), np.inf, np.inf
    for worker in range(len(wanted)):
        if not wanted[worker]:
            continue
        ready_s[worker] = wait_s[worker] + load_s[worker] + prefill_s[worker]
        shortest_s = min(shortest_s, load_s[worker] + prefill_s[worker])
        if worker >= num_prefills:
            alone_s = rows[Row.BASE_S, worker] + rows[Row.DECODE_S, worker]
            shortest_tpot_s = min(shortest_tpot_s, alone_s + rows[Row.CONTEXT_TOKEN_S, worker] * num_tokens)
    return ready_s, shortest_s, shortest_tpot_s


@part
def _coarse_step_s(rows: Floats, worker: int, num_tokens: float) -> float:
    """With everyone who is booked, whenever they come and go; late where the prompts alone fill the memory."""
    context = rows[Row.BOOKED_CONTEXT, worker] + rows[Row.EXTRA_CONTEXT, worker] + num_tokens
    decodes = rows[Row.BOOKED, worker] + rows[Row.EXTRA_DECODES, worker] + 1
    step_s = (
        rows[Row.BASE_S, worker] + rows[Row.DECODE_S, worker] * decodes + rows[Row.CONTEXT_TOKEN_S, worker] * context
    )
    return float(1000.0 * step_s if context > rows[Row.KV_TOKENS, worker] else step_s)


@part
def _first(score: Floats, start: int, end: int, count: int) -> Rows:
    """Between `start` and `end`, whose score is lowest, where it is finite, best first. Of equals the first: they come
    in the order of the workers' names."""
    best, num = np.empty(count, np.intp), 0
    for worker in range(start, end):
        if score[worker] < (np.inf if num < count else score[best[count - 1]]):
            place = num if num < count else count - 1
            num = place + 1
            while place > 0 and score[worker] < score[best[place - 1]]:
                best[place] = best[place - 1]
                place -= 1
            best[place] = worker
    return best[:num]


@part
def _union(some: Rows, others: Rows) -> Rows:
    """In order, each once."""
    both, num = np.empty(len(some) + len(others), np.intp), 0
    for index in range(len(both)):
        worker = some[index] if index < len(some) else others[index - len(some)]
        place = num
        while place > 0 and both[place - 1] > worker:
            place -= 1
        if place > 0 and both[place - 1] == worker:
            continue
        for later in range(num, place, -1):
            both[later] = both[later - 1]
        both[place] = worker
        num += 1
    return both[:num]


@compiled("Tuple((i8[::1], i8[::1]))(f8[:, ::1], i8, f8[::1], f8, f8, i8)")
def shortlist_kind(
    rows: Floats, num_prefills: int, ready_s: Floats, kind: float, num_tokens: float, num_exact: int
) -> tuple[Rows, Rows]:
    """Who computes and who decodes, by candidate, among those of one kind: the best few of either pool with each other;
    and for decode alone those few, and the two who would have the prompt computed first."""
    of_kind, step_s, end = np.full(len(ready_s), np.inf), np.full(len(ready_s), np.inf), len(ready_s)
    for worker in range(end):
        if rows[Row.COMPATIBILITY, worker] == kind and ready_s[worker] < np.inf:
            of_kind[worker], step_s[worker] = ready_s[worker], _coarse_step_s(rows, worker, num_tokens)
    emptiest = _first(step_s, num_prefills, end, num_exact)
    soonest = _first(of_kind, 0, num_prefills, num_exact)
    alone = _union(emptiest, _first(of_kind, num_prefills, end, 2))
    num_pairs = len(soonest) * len(emptiest)
    computing, decode = np.empty(num_pairs + len(alone), np.intp), np.empty(num_pairs + len(alone), np.intp)
    for index in range(len(decode)):
        if index < num_pairs:
            computing[index], decode[index] = soonest[index // len(emptiest)], emptiest[index % len(emptiest)]
        else:
            computing[index] = decode[index] = alone[index - num_pairs]
    return computing, decode


@part
def _mean_queue_s(rows: Floats, start: int, end: int, later_s: float, now: float) -> float:
    """Seconds of prompts that each of these workers will have to compute, in the mean."""
    queues_s = 0.0
    for worker in range(start, end):
        queues_s += max(rows[Row.DRAINED_AT, worker] - now - later_s, 0.0)
    return queues_s / max(1, end - start)


@compiled("f8[:, ::1](f8[:, ::1], i8, i8, b1[::1], f8[::1], f8, f8)")
def queue_shares(
    rows: Floats,
    num_prefills: int,
    num_workers: int,
    alone: NDArray[np.bool_],
    later_s: Floats,
    ttft_s: float,
    now: float,
) -> Floats:
    """By moment and candidate: how long the queues of the pool are that computes the prompt, in the mean, as a share of
    what TTFT targets allow; just below 1 where they are longer. `alone`: its decode workers do."""
    found, longest_s = np.zeros((len(later_s), len(alone))), 0.0
    for worker in range(num_workers):
        longest_s = max(longest_s, rows[Row.DRAINED_AT, worker] - now)
    for moment in range(len(later_s)):
        if later_s[moment] >= longest_s:
            continue
        there_s = _mean_queue_s(rows, 0, num_prefills, later_s[moment], now)
        here_s = _mean_queue_s(rows, num_prefills, num_workers, later_s[moment], now)
        for index in range(len(alone)):
            found[moment, index] = min((here_s if alone[index] else there_s) / ttft_s, 0.99)
    return found


@part
def _idle_share(rows: Floats, start: int, end: int, later_s: float, now: float) -> float:
    """Of these workers, those that have no prompts to compute by then, or that had none lately if these are fewer."""
    num_idle, busy = 0, 0.0
    for worker in range(start, end):
        num_idle += rows[Row.DRAINED_AT, worker] - now <= later_s
        if rows[Row.PROMPTS_S, worker] > 0.0:
            busy += rows[Row.PROMPTS_S, worker] * np.exp((rows[Row.PROMPTS_AT, worker] - now) / PROMPTS_OVER_S)
    size = max(1, end - start)
    lately = 1.0 - busy / PROMPTS_OVER_S / size * np.exp(-later_s / PROMPTS_OVER_S)
    return float(min(num_idle / size, lately))


@compiled("f8[:, ::1](f8[:, ::1], i8, i8, b1[::1], f8[::1], f8)")
def idle_shares(
    rows: Floats, num_prefills: int, num_workers: int, alone: NDArray[np.bool_], later_s: Floats, now: float
) -> Floats:
    """By moment and candidate, of the pool that computes the prompt."""
    found = np.empty((len(later_s), len(alone)))
    for moment in range(len(later_s)):
        there = _idle_share(rows, 0, num_prefills, later_s[moment], now)
        here = _idle_share(rows, num_prefills, num_workers, later_s[moment], now)
        for index in range(len(alone)):
            found[moment, index] = here if alone[index] else there
    return found
