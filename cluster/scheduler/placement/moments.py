"""Compiled: when a request's prompt would be computed by each candidate, and when it would decode, placed now or later.

By candidate: `wait_s`, until its queue is done; `work_s`, of its prompt; `room_s`, until the memory of who decodes has
room; `alone`, whether it decodes where its prompt is computed. By moment: `later_s`, until it is placed. All from now.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.placement.compiled import compiled
from cluster.scheduler.placement.worker_table import Floats


@compiled("f8[::1](f8[::1], f8[::1], b1[::1], f8[::1])")
def join_times(wait_s: Floats, work_s: Floats, alone: NDArray[np.bool_], later_s: Floats) -> Floats:
    """Until it decodes, by moment; the same for all candidates: were it each one's own, a longer queue would make a
    crowded decode worker look better."""
    soonest, pairs = 0, not alone.all()
    for index in range(len(alone)):
        if pairs and alone[index]:
            continue
        if (pairs and alone[soonest]) or wait_s[index] + work_s[index] < wait_s[soonest] + work_s[soonest]:
            soonest = index
    joins_s: Floats = np.maximum(later_s, wait_s[soonest]) + work_s[soonest]
    return joins_s


@compiled("f8[:, ::1](f8[::1], f8[::1], b1[::1], f8[::1])")
def start_times(wait_s: Floats, room_s: Floats, alone: NDArray[np.bool_], later_s: Floats) -> Floats:
    """Until the prompt's computation begins, by moment and candidate. It is computed where it decodes, or queues only
    when the decode worker has room for it."""
    found = np.empty((len(later_s), len(alone)))
    for moment in range(len(later_s)):
        for index in range(len(alone)):
            if room_s[index] > later_s[moment]:
                queues_s = 0.0 if alone[index] else max(wait_s[index] - later_s[moment], 0.0)
                found[moment, index] = room_s[index] + queues_s
            else:
                found[moment, index] = max(later_s[moment], wait_s[index], room_s[index])
    return found
