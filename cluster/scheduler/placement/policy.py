"""By which rules a request is placed: `DecisionPolicy`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.placement.worker_table import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionPolicy:
    """A request with targets is placed where the expected number of requests that meet theirs grows by `min_gain`.
    Batch requests are placed where others lose at most `batch_slo_loss` and the queue is at most `batch_queue_s` long;
    prompts that take longer than that, only while `batch_idle` of the pool's workers compute none, and of its time
    lately.
    Decode alone is chosen over a pair where it brings `alone_gain` more. Among pairs, and among those, one whose
    first token or pace is later by as much as the target is worth `delay_cost` less, one that takes as much more of the
    workers' time as an average prompt does, `work_cost` less where all of that time is in use.
    Where decode workers are `one_pool`, they compute prompts for each other, too. A prompt is charged there, as far as
    its TPOT target is near, `role_gain` for a mean worker's decodes that it disturbs, and as much for a mean worker's
    prompts that disturb its tokens; `wait_gain` for waiting as long as its TTFT target allows; `handover_gain` for
    being moved. So roles emerge where targets are tight, and nothing moves where they are not.
    A prompt is split between a pair (if `splits`) only where the expected number of requests grows by `split_gain` more
    than with any worker that computes all of it.
    Nobody is bound to a decode worker that has no room for `max_room_s`.

    `num_exact`: the workers of each pool that are looked at closely. `host_token_s`, `disk_token_s`: to bring the KV of
    a token up from there.
    """

    min_gain: float = 0.5
    alone_gain: float = 0.1
    one_pool: bool = False
    role_gain: float = 0.3
    wait_gain: float = 0.5
    handover_gain: float = 0.01
    splits: bool = True
    split_gain: float = 0.05
    work_cost: float = 0.3
    delay_cost: float = 0.3
    max_room_s: float = 0.1
    batch_slo_loss: float = 0.01
    batch_queue_s: float = 1.0
    batch_idle: float = 0.75
    num_exact: int = 6
    host_token_s: float = 5e-6
    disk_token_s: float = 60e-6

    def __post_init__(self) -> None:
        if not 0.0 < self.min_gain < 1.0:
            raise ValueError(f"min_gain is {self.min_gain}: it must lie between 0 and 1, as chances do")
        if self.num_exact < 1:
            raise ValueError(f"num_exact is {self.num_exact}: at least one worker must be looked at")

    def admits(self, ttft_s: Floats, slo_gain: Floats, target_s: float, share: float) -> NDArray[np.bool_]:
        """Whether a request with targets is good enough, each way that it could go. `target_s`: for its TTFT.

        `share`, up to 1: of its TTFT target, and of the doubt that is allowed, that the request may use up. The rest is
        kept for those who are to be served first.
        """
        most_s = share * target_s if share < 1.0 else np.inf
        admitted: NDArray[np.bool_] = (ttft_s <= most_s) & (slo_gain >= 1.0 - share * (1.0 - self.min_gain))
        return admitted
