"""When a request that does no good now would do some: later, by as much as those before it need to get on.

Looks at the best candidates of a decision again, as if it were placed later. Knows nothing of those who may come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from cluster.placement.candidates import Candidates, evaluate
from cluster.placement.ledger import Ledger
from cluster.placement.policy import DecisionPolicy
from cluster.placement.query import Query

LATER_S: Final = tuple(0.05 * 1.6**power for power in range(17))  # up to 92 s
_NUM_CANDIDATES: Final = 3


def placeable_s(
    ledger: Ledger,
    policy: DecisionPolicy,
    query: Query,
    found: Candidates,
    now: float,
    share: float,
    within_s: float,
) -> float | None:
    """Seconds until it could be placed and still meet its targets; None if it cannot `within_s`. `share`: see
    `is_welcome`."""
    moments = [later_s for later_s in LATER_S if later_s <= within_s]
    return _first(ledger, policy, query, found, now, share, moments, arrived_later=False)


def welcome_s(
    ledger: Ledger, policy: DecisionPolicy, query: Query, found: Candidates, now: float, share: float
) -> float:
    """Seconds until it could if it came only then: at most the time that is looked at."""
    found_s = _first(ledger, policy, query, found, now, share, LATER_S, arrived_later=True)
    return LATER_S[-1] if found_s is None else found_s


def _first(
    ledger: Ledger,
    policy: DecisionPolicy,
    query: Query,
    found: Candidates,
    now: float,
    share: float,
    moments: Sequence[float],
    *,
    arrived_later: bool,
) -> float | None:
    best, later_s = found.order[:_NUM_CANDIDATES], np.repeat(moments, min(_NUM_CANDIDATES, len(found)))
    if not len(later_s):
        return None
    again = np.tile(best, len(moments))
    computing, decode, prompt = found.computing[again], found.decode[again], found.prompt.at(again)
    later = evaluate(ledger, policy, query, computing, decode, prompt, now, later_s, arrived_later=arrived_later)
    if query.has_targets:
        good = (later.gain >= 1.0 - share * (1.0 - policy.min_gain)) & (
            (later.ttft_s <= share * query.ttft_s) | (share >= 1.0)
        )
    else:
        good = later.leaves_room
    return float(later_s[good].min()) if good.any() else None
