"""When a request that does no good now would do some: later, by as much as those before it need to get on.

Looks at the best candidates of a decision again, as if it were placed later. Knows nothing of those who may come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cluster.placement.candidates import Candidates, evaluate
from cluster.placement.ledger import Ledger
from cluster.placement.policy import DecisionPolicy
from cluster.placement.query import Query
from cluster.placement.worker_table import Floats

LATER_S: Final = tuple(0.05 * 1.6**power for power in range(17))  # up to 92 s
_NUM_CANDIDATES: Final = 3


@dataclass(frozen=True, slots=True)
class Outlook:
    """Seconds from now. `placeable_s`: until it could be placed and still meet its targets (None: it could not);
    `welcome_s`: until it could if it came only then (None: not within the time that was looked at)."""

    placeable_s: float | None
    welcome_s: float | None


def look_ahead(
    ledger: Ledger, policy: DecisionPolicy, query: Query, found: Candidates, now: float, share: float = 1.0
) -> Outlook:
    """`share`: see `is_welcome`."""
    best = found.order[:_NUM_CANDIDATES]
    later_s = np.repeat(LATER_S, len(best))
    waiting, fresh = (
        evaluate(
            ledger,
            policy,
            query,
            np.tile(found.computing[best], len(LATER_S)),
            np.tile(found.decode[best], len(LATER_S)),
            found.reach,
            now,
            later_s,
            arrived_later=arrived_later,
        )
        for arrived_later in (False, True)
    )
    return Outlook(_first(policy, query, waiting, later_s, share), _first(policy, query, fresh, later_s, share))


def _first(policy: DecisionPolicy, query: Query, later: Candidates, later_s: Floats, share: float) -> float | None:
    if query.has_targets:
        good = (later.gain >= 1.0 - share * (1.0 - policy.min_gain)) & (
            (later.ttft_s <= share * query.ttft_s) | (share >= 1.0)
        )
    else:
        good = later.leaves_room
    return float(later_s[good].min()) if good.any() else None
