"""When a request that does no good now would do some: later, by as much as those before it need to get on.

Looks at the best candidates of a decision again, as if it were placed later. Knows nothing of those who may come.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from typing import Final

import numpy as np

from cluster.scheduler.placement.candidates import Candidates
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.scheduler.placement.query import Query
from cluster.scheduler.placement.score import Prospects, foresee, judge
from cluster.scheduler.placement.worker_table import Floats

LATER_S: Final = tuple(0.05 * 1.6**power for power in range(17))  # up to 92 s
_NUM_CANDIDATES: Final = 3


class Outlook:
    """Of one request, as things are now. `share`: see `DecisionPolicy.admits`."""

    def __init__(self, ledger: Ledger, query: Query, found: Candidates, now: float) -> None:
        self._ledger = ledger
        self._query = query
        self._found = found
        self._now = now

    def placeable_s(self, policy: DecisionPolicy, share: float, within_s: float) -> float | None:
        """Seconds until it could be placed and still meet its targets; None if it cannot `within_s`."""
        waited_s = max(0.0, self._now - self._query.arrived_at)
        return self._first(policy, share, waited_s, bisect_right(LATER_S, within_s))

    def welcome_s(self, policy: DecisionPolicy, share: float) -> float:
        """Seconds until it could if it came only then: at most the time that is looked at."""
        found_s = self._first(policy, share, -np.array(LATER_S)[:, None], len(LATER_S))
        return LATER_S[-1] if found_s is None else found_s

    @cached_property
    def _seen(self) -> Prospects:
        """The same for all questions: only what it is worth depends on them."""
        found, best = self._found, self._found.order[:_NUM_CANDIDATES]
        computing, decode, prompt = found.computing[best], found.decode[best], found.prompt.at(best)
        return foresee(self._ledger, self._query, computing, decode, prompt, np.array(LATER_S), self._now)

    def _first(self, policy: DecisionPolicy, share: float, waited_s: float | Floats, num_moments: int) -> float | None:
        if not num_moments:
            return None
        query, later = self._query, judge(self._ledger, policy, self._query, self._seen, waited_s, self._now)
        good = policy.admits(later.ttft_s, later.gain, query.ttft_s, share) if query.has_targets else later.leaves_room
        moments = np.flatnonzero(good[:num_moments].any(axis=1))
        return LATER_S[moments[0]] if len(moments) else None
