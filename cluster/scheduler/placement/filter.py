"""Filter: which workers could take a request at all, and which few pairs of them deserve a closer look.

The first stage of a decision (see the package). `filter_workers` looks at every worker, in a few vector operations none
of which depends on the request's targets; `shortlist` keeps the best few, which `score` then predicts exactly.

All arrays are by row of the `WorkerTable`: prefill workers first, then decode workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.block_index import PrefixReach
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.scheduler.placement.worker_table import Fact, Floats, Rows, WorkerTable
from kv_transfer.messages.scheduling import Place

_NUM_SPLIT: Final = 3  # prefill and decode workers that split prompts between them
_NUM_IN_POOL: Final = 3  # decode workers that may compute for others, by either measure, and that others compute for


class PromptForecast(NamedTuple):
    """A prompt's computation, by worker. `wait_s`: of its queue; `work_s`: from then on, to load its adapter, to bring
    up the hits that lie in lower tiers and to compute the rest, as fast as those who decode there can bear. Of that
    `adapter_s` is until its adapter is there, in which others are computed, and `added_s` what it adds to steps that
    they have in any case.

    Of `cached_tokens`, `coming_tokens` are not there yet: prompts in the worker's queue bring them.

    Of candidates, some may be split (`split_at` above 0; see `split`): then the worker computes the tokens before that
    in `first_s`, who decodes the others in `rest_s`, and `work_s` is both and what lies in between.

    `parts`: all of these, a row each, so that candidates are taken out of it at once."""

    parts: Floats
    cached_tokens: Floats
    wait_s: Floats
    work_s: Floats
    adapter_s: Floats
    added_s: Floats
    split_at: Floats
    first_s: Floats
    rest_s: Floats
    coming_tokens: Floats

    @classmethod
    def of(cls, parts: Floats) -> PromptForecast:
        return cls(parts, *parts)

    @classmethod
    def nothing(cls, num_workers: int) -> PromptForecast:
        """To be filled in."""
        return cls.of(np.zeros((len(cls._fields) - 1, num_workers)))

    def at(self, index: Rows) -> PromptForecast:
        return PromptForecast.of(self.parts.take(index, axis=1))

    def and_then(self, other: PromptForecast) -> PromptForecast:
        """The forecast of these candidates followed by that of others."""
        return PromptForecast.of(np.concatenate([self.parts, other.parts], axis=1))


@dataclass(frozen=True, slots=True)
class Filtered:
    """`prompt`: by row of the table. `ready_s`: by row, when the prompt would be computed there; inf for those that may
    not compute it, or of the decode workers, may not do the rest. `decodes`: whether any may do that, if there is one.
    `shortest_s`: TTFT on the fastest, were no other prompt there, beside those who decode there now; `shortest_tpot_s`:
    TPOT on the fastest, were nobody else there; inf without any.
    """

    prompt: PromptForecast
    ready_s: Floats
    decodes: bool
    shortest_s: float
    shortest_tpot_s: float


def filter_workers(
    ledger: Ledger, policy: DecisionPolicy, query: Place, reach: Mapping[str, PrefixReach], now: float
) -> Filtered:
    """All workers, for one request; called once a decision. `reach`: what workers hold of the prompt, by worker."""
    table, allowed = ledger.table, eligible(ledger.table, query)
    _, decodes = table.pools()
    tiers = (policy.host_token_s, policy.disk_token_s)
    held = _reach_tokens(table, reach)
    coming = ledger.coming.reaches(query.prefix_hashes)
    reaching = np.maximum(held, _coming_tokens(table, coming)) if coming else held
    prompt = forecast_prompt(table, query.num_tokens, reaching, tiers, now)
    if coming:
        np.maximum(prompt.cached_tokens - held[2], 0.0, out=prompt.coming_tokens)
    if query.adapter:  # who decodes loads it while the prompt is computed
        prompt.adapter_s[:] = table.adapter_s(query.adapter)
        prompt.work_s[:] += prompt.adapter_s
    alone_tpot_s = table.alone_s(decodes, query.num_tokens) / table.facts[Fact.TOKENS_PER_STEP, decodes]
    return Filtered(
        prompt=prompt,
        ready_s=np.where(allowed, prompt.wait_s + prompt.work_s, np.inf),
        decodes=bool(allowed[decodes].any()) or (query.is_pooled and bool(allowed.any())),
        shortest_s=float(prompt.work_s[allowed].min(initial=np.inf)) + ledger.overhead.seconds,
        shortest_tpot_s=float(alone_tpot_s[allowed[decodes]].min(initial=np.inf)),
    )


def eligible(table: WorkerTable, query: Place) -> NDArray[np.bool_]:
    """Whether a prefill worker could compute the prompt, whether a decode worker could do the rest.

    The decode worker that holds a reservation already is the only one then, leaving or not. Where no decode worker is
    left, excluded ones no longer are excluded."""
    _, decodes = table.pools()
    longest = table.facts[Fact.MAX_MODEL_LEN, : len(table)]
    fits = longest >= query.num_tokens
    fits[decodes] = longest[decodes] >= query.num_tokens + query.max_new_tokens
    wanted: NDArray[np.bool_] = fits & (table.facts[Fact.DRAINING, : len(table)] == 0.0)
    if query.is_pooled:
        return _for_pooling(table, query, wanted)
    staying = wanted[decodes].copy()
    if query.exclude:
        wanted[[table.row(worker_id) for worker_id in query.exclude if worker_id in table]] = False
    if query.prefer_decode is not None and query.prefer_decode in table:
        preferred = table.row(query.prefer_decode)
        if preferred >= decodes.start and fits[preferred]:
            wanted[decodes] = False
            wanted[preferred] = True
    if not wanted[decodes].any():
        wanted[decodes] = staying
    return wanted


def _for_pooling(table: WorkerTable, query: Place, wanted: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Narrow the workers that could compute a prompt for an embedding: to prefill workers, where there are any; without
    the excluded ones, where there are others."""
    prefills, _ = table.pools()
    others = wanted.copy()
    others[[table.row(worker_id) for worker_id in query.exclude if worker_id in table]] = False
    chosen = others if others.any() else wanted
    if chosen[prefills].any():
        chosen[prefills.stop :] = False
    return chosen


def may_ever_fit(ledger: Ledger, query: Place, now: float) -> bool:
    """Whether it may fit once workers are there, or are not leaving: not if those that are there, or left lately and
    are replaced, are all too small. What has begun did fit."""
    _, decodes = ledger.table.pools()
    lengths = ledger.table.facts[Fact.MAX_MODEL_LEN, slice(0, len(ledger.table)) if query.is_pooled else decodes]
    longest = max(lengths.max(initial=0.0), ledger.longest_gone(now))
    is_any_there = len(lengths) > 0
    return query.attempt > 0 or not is_any_there or bool(longest >= query.num_tokens + query.max_new_tokens)


def forecast_prompt(
    table: WorkerTable, num_tokens: int, reach: Floats, tier_token_s: tuple[float, float], now: float
) -> PromptForecast:
    """Forecast the computation of a prompt on every worker. `reach[3, rows]`: leading tokens held on the device, down
    to host memory, down to disk. Loads as far down as it pays; `tier_token_s`: seconds per token brought up from host
    memory and from disk. How many of its tokens go into a step is the table's (`WorkerTable.predict_step`)."""
    facts = table.facts[:, : len(table)]
    depths = 3 if (reach[2] > reach[0]).any() else 1
    cached = np.minimum(reach[:depths], num_tokens - 1.0)
    uncached = num_tokens - cached
    added_s = uncached * (facts[Fact.PREFILL_TOKEN_S] + facts[Fact.PREFILL_PAIR_S] * (cached + (uncached + 1) / 2))
    num_steps = np.maximum(np.ceil(uncached / facts[Fact.CHUNK_LEFT]), added_s / facts[Fact.ROOM_S])
    num_steps = np.maximum(num_steps, 1.0)
    work_s = added_s + num_steps * facts[Fact.WITH_PROMPTS_S]
    added_s += num_steps * facts[Fact.PREFILL_BASE_S]
    if depths > 1:
        host_s = (cached[1] - cached[0]) * tier_token_s[0]
        work_s[1] += host_s
        work_s[2] += host_s + (cached[2] - cached[1]) * tier_token_s[1]
    best = 0 if depths == 1 else (work_s.argmin(axis=0), np.arange(len(table)))
    prompt = PromptForecast.nothing(len(table))
    prompt.cached_tokens[:] = cached[best]
    prompt.work_s[:] = prompt.first_s[:] = work_s[best]
    prompt.added_s[:] = added_s[best]
    np.maximum(facts[Fact.DRAINED_AT] - now, 0.0, out=prompt.wait_s)
    return prompt


def shortlist(
    table: WorkerTable, policy: DecisionPolicy, query: Place, found: Filtered
) -> tuple[tuple[Rows, Rows], Rows]:
    """The candidates: who computes the prompt and who decodes, by row. Of each group that can hand over to each other,
    the best few of either pool with each other, unless one told that it cannot reach the other; and for decode alone
    those few, and the two who would have the prompt computed first. In one pool also these few, each for each of them.
    With them, which of the candidates may be split. Of what is pooled nobody decodes: the best few alone."""
    if query.is_pooled:
        best = np.array(_first(found.ready_s, policy.num_exact), dtype=np.intp)
        return (best, best), np.array([], dtype=np.intp)
    prefills, decodes = table.pools()
    kinds, one = table.facts[Fact.COMPATIBILITY, : len(table)], len(table.kinds) == 1
    step_s = np.where(found.ready_s[decodes] < np.inf, _coarse_step_s(table, decodes, query, policy), np.inf)
    computing: list[int] = []
    decode: list[int] = []
    first_pairs: list[int] = []
    for kind in table.kinds:
        ready_s = found.ready_s if one else np.where(kinds == kind, found.ready_s, np.inf)
        of_kind = step_s if one else np.where(kinds[decodes] == kind, step_s, np.inf)
        emptiest = [decodes.start + row for row in _first(of_kind, policy.num_exact)]
        first = [decodes.start + row for row in _first(ready_s[decodes], 2)]
        alone = sorted({*emptiest, *first})
        reaching_s = ready_s[prefills].copy()
        for row in table.rows_of(table.unreachable):
            if row < prefills.stop and not _reached(table, decodes, row, of_kind, emptiest, 1):
                reaching_s[row] = np.inf  # nobody gives it work, so it would be the first
        for rank, prefill in enumerate(_first(reaching_s, policy.num_exact)):
            reached = _reached(table, decodes, prefill, of_kind, emptiest, policy.num_exact)
            if rank < _NUM_SPLIT:
                first_pairs += range(len(decode), len(decode) + min(_NUM_SPLIT, len(reached)))
            computing += [prefill] * len(reached)
            decode += reached
        for here in _first_to_compute(table, decodes, ready_s, query) if policy.one_pool else ():
            reached = _reached(table, decodes, here, of_kind, emptiest, policy.num_exact)
            others = [row for row in reached[:_NUM_IN_POOL] if row != here]
            first_pairs += range(len(decode), len(decode) + len(others))
            computing += [here] * len(others)
            decode += others
        computing += alone
        decode += alone
    pairs = np.array(computing, dtype=np.intp), np.array(decode, dtype=np.intp)
    may_split = policy.splits and query.ttft_s is not None
    return pairs, np.array(first_pairs if may_split else [], dtype=np.intp)


def _reach_tokens(table: WorkerTable, reach: Mapping[str, PrefixReach]) -> Floats:
    tokens = np.zeros((3, len(table)))
    if reach:
        rows = table.rows_of(reach)
        known = rows >= 0
        columns = np.fromiter(chain.from_iterable(reach.values()), np.float64).reshape(-1, 3)[known].T
        tokens[:, rows[known]] = columns * table.facts[Fact.BLOCK_SIZE, rows[known]]
    return tokens


def _coming_tokens(table: WorkerTable, columns: Mapping[str, int]) -> Floats:
    """`columns`: leading ones of the prompt that these workers, all of them known, will hold when its turn comes."""
    tokens, rows = np.zeros(len(table)), table.rows_of(columns)
    tokens[rows] = np.fromiter(columns.values(), np.float64) * table.facts[Fact.BLOCK_SIZE, rows]
    return tokens


def _first(score: Floats, count: int) -> list[int]:
    """The workers with the lowest finite scores, best first. Of equals the first: they come in the order of the
    workers' names."""
    left, best = score.copy(), []
    for _ in range(min(count, len(score))):
        lowest = int(left.argmin())
        if left[lowest] == np.inf:
            break
        best.append(lowest)
        left[lowest] = np.inf
    return best


def _reached(table: WorkerTable, pool: slice, computing: int, score: Floats, first: list[int], count: int) -> list[int]:
    """The rows of the decode workers with the lowest scores to whom this worker can hand over. `first`: whether it can
    or not."""
    unreachable = table.unreachable.get(table.ids[computing])
    if not unreachable:
        return first
    rows = table.rows_of(unreachable)
    rows = rows[rows >= pool.start] - pool.start
    left = score.copy()
    left[rows] = np.inf
    return [pool.start + row for row in _first(left, count)]


def _first_to_compute(table: WorkerTable, pool: slice, ready_s: Floats, query: Place) -> list[int]:
    """Choose among the decode workers with room for the prompt: who would have it first, and on whom fewest decode."""
    facts = table.facts[:, pool]
    held = (1.0 - facts[Fact.SHARED]) * (facts[Fact.BOOKED_CONTEXT] + facts[Fact.EXTRA_CONTEXT])
    has_room = held + facts[Fact.LENT_TOKENS] + query.num_tokens <= facts[Fact.KV_TOKENS]
    ready_s = np.where(has_room, ready_s[pool], np.inf)
    fewest = np.where(ready_s < np.inf, facts[Fact.BOOKED] + facts[Fact.EXTRA_DECODES], np.inf)
    return [pool.start + row for row in {*_first(ready_s, _NUM_IN_POOL), *_first(fewest, _NUM_IN_POOL)}]


def _coarse_step_s(table: WorkerTable, pool: slice, query: Place, policy: DecisionPolicy) -> Floats:
    """A rough step's seconds on each worker, with everyone who is booked, whenever they come and go; late where the
    prompts alone fill the memory. In one pool some compute most prompts, which counts."""
    facts = table.facts[:, pool]
    context = facts[Fact.BOOKED_CONTEXT] + facts[Fact.EXTRA_CONTEXT]
    held = (1.0 - facts[Fact.SHARED]) * context + query.num_tokens
    decodes = facts[Fact.BOOKED] + facts[Fact.EXTRA_DECODES] + 1
    step_s = (
        facts[Fact.BASE_S] + facts[Fact.DECODE_S] * decodes + facts[Fact.CONTEXT_TOKEN_S] * (context + query.num_tokens)
    )
    if policy.one_pool:
        step_s = step_s * facts[Fact.STRETCH]
    coarse: Floats = np.where(held > facts[Fact.KV_TOKENS], 1000.0 * step_s, step_s)
    return coarse
