"""One request, one decision: which pair of workers, or none now. A function of ledger, query, prefixes and clock alone.

Changes nothing; keeps the table that it was made from, for operators to read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from cluster.scheduler.placement.candidates import Candidates, find_candidates
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.scheduler.placement.query import Query
from cluster.scheduler.placement.survey import Survey
from cluster.scheduler.placement.worker_table import Rows


class Action(Enum):
    PLACE = "it goes to the chosen workers"
    DEFER = "nowhere would it do more good than harm now; later it may"
    IMPOSSIBLE = "no worker that is there could ever do it"


class CandidateRow(NamedTuple):
    """One line of the table. `prefill` None: the decode worker does all of it."""

    prefill: str | None
    decode: str
    cached_tokens: int
    wait_s: float
    prefill_s: float
    ttft_s: float
    tpot_s: float
    kv_share: float
    chance: float
    harm: float
    gain: float

    def __str__(self) -> str:
        return (
            f"{self.prefill or '(decode alone)':<20} {self.decode:<20} {self.cached_tokens:>7} {self.wait_s:>8.3f} "
            f"{self.prefill_s:>8.3f} {self.ttft_s:>8.3f} {1000 * self.tpot_s:>8.2f} {100 * self.kv_share:>5.0f} "
            f"{self.chance:>7.3f} {self.harm:>7.3f} {self.gain:>7.3f}"
        )


_HEADINGS = (
    f"{'prefill':<20} {'decode':<20} {'cached':>7} {'wait s':>8} {'comp. s':>8} {'TTFT s':>8} {'TPOT ms':>8} "
    f"{'KV %':>5} {'chance':>7} {'harm':>7} {'gain':>7}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`rows`: best first; the first one is chosen where the action is PLACE."""

    query: Query
    now: float
    action: Action
    rows: tuple[CandidateRow, ...]
    uncached_tokens: float = 0.0  # of the first row

    @property
    def best(self) -> CandidateRow:
        return self.rows[0]

    def __str__(self) -> str:
        query = self.query
        title = (
            f"{query.request_id} (attempt {query.attempt}, tenant {query.tenant!r}, class {query.slo_class!r}) at "
            f"{self.now:.3f} s: {query.num_tokens} tokens, at most {query.max_new_tokens} new, "
            f"TTFT {query.ttft_s:g} s, TPOT {1000 * query.tpot_s:g} ms: {self.action.name}, {self.action.value}"
        )
        return "\n".join([title, _HEADINGS, *map(str, self.rows)])


def decide(
    ledger: Ledger,
    policy: DecisionPolicy,
    query: Query,
    surveyed: Survey,
    now: float,
    *,
    share: float = 1.0,
    num_rows: int = 8,
) -> tuple[Decision, Candidates | None]:
    """`share`: see `DecisionPolicy.admits`. `num_rows`: that the decision keeps."""
    found = find_candidates(ledger, policy, query, surveyed, now)
    if found is None:
        return Decision(query=query, now=now, action=Action.IMPOSSIBLE, rows=()), None
    action = Action.PLACE if is_welcome(policy, query, found, share) else Action.DEFER
    rows = _rows(ledger, found, found.order[:num_rows])
    uncached = float(found.prompt.uncached_tokens[found.order[0]])
    return Decision(query=query, now=now, action=action, rows=rows, uncached_tokens=uncached), found


def is_welcome(policy: DecisionPolicy, query: Query, found: Candidates, share: float = 1.0) -> bool:
    """Whether the best candidate is good enough. What was begun already (a later attempt) always is, if it fits.
    `share`: see `DecisionPolicy.admits`."""
    best = found.order[0]
    if found.ttft_s[best] == float("inf"):
        return False
    if query.attempt > 0:
        return True
    if not query.has_targets:
        return bool(found.leaves_room[best] and found.chance[best] >= policy.min_gain)
    return bool(policy.admits(found.ttft_s[best], found.gain[best], query.ttft_s, share))


def anyway(decision: Decision) -> Decision:
    """To the best candidate, good enough or not; where none has the room, to the one that lacks least of it."""
    assert decision.action is Action.DEFER, decision
    rows, query = decision.rows, decision.query
    if rows[0].ttft_s == float("inf"):
        rows = tuple(sorted(rows, key=lambda row: row.kv_share))
    uncached = float(query.num_tokens - rows[0].cached_tokens)
    return replace(decision, action=Action.PLACE, rows=rows, uncached_tokens=uncached)


def book(ledger: Ledger, decision: Decision) -> None:
    """Count the placement from now on."""
    assert decision.action is Action.PLACE, decision
    best = decision.best
    ledger.book(
        decision.query,
        prefill=best.prefill,
        decode=best.decode,
        uncached_tokens=decision.uncached_tokens,
        prefill_s=best.prefill_s,
        weight=best.chance,
        now=decision.now,
    )


def _rows(ledger: Ledger, found: Candidates, best: Rows) -> tuple[CandidateRow, ...]:
    ids = ledger.table.ids
    columns = (
        *(found.computing, found.decode, found.prompt.cached_tokens, found.start_s),
        *(found.prompt.load_s + found.prompt.prefill_s, found.ttft_s, found.tpot_s, found.kv_share),
        *(found.chance, found.harm, found.gain),
    )
    return tuple(
        CandidateRow(None if computing == decode else ids[computing], ids[decode], int(cached), *numbers)
        for computing, decode, cached, *numbers in zip(*(column[best].tolist() for column in columns), strict=True)
    )
