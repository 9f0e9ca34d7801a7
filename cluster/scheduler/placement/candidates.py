"""Where a request could go, and what each possibility would bring: pairs (prefill, decode), and decode alone.

All workers are scored coarsely in a few vector operations; the pairs among the best few exactly. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.scheduler.placement.prediction import PromptForecast
from cluster.scheduler.placement.query import Query
from cluster.scheduler.placement.score import foresee, judge
from cluster.scheduler.placement.survey import Survey, shortlist
from cluster.scheduler.placement.worker_table import Floats, Row, Rows

_AT_ONCE: Final = np.zeros(1)
_ASSUMED_TTFT_S: Final = 10.0  # what delays are relative to where there is no target
_ASSUMED_TPOT_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Columns by candidate: see `Prospects` and `Worth`."""

    computing: Rows
    decode: Rows
    prompt: PromptForecast
    start_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    kv_share: Floats
    chance: Floats
    harm: Floats
    gain: Floats
    leaves_room: NDArray[np.bool_]
    order: NDArray[np.intp]  # best first

    def __len__(self) -> int:
        return len(self.decode)


def find_candidates(
    ledger: Ledger, policy: DecisionPolicy, query: Query, found: Survey, now: float
) -> Candidates | None:
    """None where no decode worker is there that could ever do it."""
    if not found.decodes:
        return None
    computing, decode = shortlist(ledger.table, policy, query, found)
    seen = foresee(ledger, query, computing, decode, found.prompt.at(computing), _AT_ONCE, now)
    worth = judge(ledger, policy, query, seen, max(0.0, now - query.arrived_at), now)
    ttft_s, tpot_s = worth.ttft_s[0], seen.after.tpot_s[0]
    delay = _relative(ttft_s, query.ttft_s, _ASSUMED_TTFT_S) + _relative(tpot_s, query.tpot_s, _ASSUMED_TPOT_S)
    gain, leaves_room = worth.gain[0], worth.leaves_room[0]
    # The pair, unless that costs chances: a decode worker that computes no prompts is better for those who come next.
    rounded = (gain - policy.alone_gain * seen.alone).round(3)
    barred = np.zeros_like(leaves_room) if query.has_targets else ~(leaves_room & (worth.chance[0] >= policy.min_gain))
    # Of equals who has least to do: predictions err, and then it is good not to have put everything on one.
    ties = (computing, decode, ledger.table.rows[Row.BOOKED, decode])
    return Candidates(
        computing=computing,
        decode=decode,
        prompt=seen.prompt,
        start_s=seen.start_s[0],
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        kv_share=seen.after.kv_share[0],
        chance=worth.chance[0],
        harm=seen.after.harm[0],
        gain=gain,
        leaves_room=leaves_room,
        order=np.lexsort((*ties, delay, seen.alone, -rounded, barred)),
    )


def _relative(seconds: Floats, target_s: float, assumed_s: float) -> Floats:
    return seconds / (target_s if target_s < np.inf else assumed_s)
