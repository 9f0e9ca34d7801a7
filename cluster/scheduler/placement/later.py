"""Later: when a request that does no good now would do some, as those before it get on.

`Admission` asks it for a request that it neither places nor has to refuse: how long to keep it waiting, or when to ask
its client back. The best candidates of the decision are scored again as if the request were placed later; those who may
come in between are not foreseen.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property

import numpy as np

from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.pick import Candidates
from cluster.scheduler.placement.query import DecisionPolicy, Query
from cluster.scheduler.placement.retry_after import LATER_S, NUM_LATER_CANDIDATES
from cluster.scheduler.placement.score import Prediction, predict, score
from cluster.scheduler.placement.worker_table import Floats


class Later:
    """Of one request, as things are now. `share`: see `DecisionPolicy.admits`."""

    def __init__(self, ledger: Ledger, query: Query, candidates: Candidates, now: float) -> None:
        self._ledger = ledger
        self._query = query
        self._candidates = candidates
        self._now = now

    def earliest_feasible_s(self, policy: DecisionPolicy, share: float, within_s: float) -> float | None:
        """Seconds until it could be placed and still meet its targets; None if it cannot `within_s`."""
        waited_s = max(0.0, self._now - self._query.arrived_at)
        return self._first(policy, share, waited_s, bisect_right(LATER_S, within_s))

    def earliest_admission_s(self, policy: DecisionPolicy, share: float) -> float:
        """Seconds until it could if it came only then: at most the time that is looked at."""
        found_s = self._first(policy, share, -np.array(LATER_S)[:, None], len(LATER_S))
        return LATER_S[-1] if found_s is None else found_s

    @cached_property
    def _predicted(self) -> Prediction:
        """The same for all questions: only what it is worth depends on them."""
        found, best = self._candidates, self._candidates.order[:NUM_LATER_CANDIDATES]
        computing, decode, prompt = found.computing[best], found.decode[best], found.prompt.at(best)
        return predict(self._ledger, self._query, computing, decode, prompt, np.array(LATER_S), self._now)

    def _first(self, policy: DecisionPolicy, share: float, waited_s: float | Floats, num_moments: int) -> float | None:
        if not num_moments:
            return None
        query = self._query
        scores = score(self._ledger, policy, query, self._predicted, waited_s)
        if query.has_targets:
            good = policy.admits(scores.ttft_s, scores.slo_gain, query.ttft_s, share)
        else:
            good = scores.leaves_room
        moments = np.flatnonzero(good[:num_moments].any(axis=1))
        return LATER_S[moments[0]] if len(moments) else None
