"""What the scheduler learns from requests that came and went: lengths of outputs, overhead of first tokens, demand, and
who of them was served.

The `Ledger` feeds all but the last and holds one of each; predictions read them. `Admission` keeps `Attainment`. All
are smoothed over recent requests and take bounded memory.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from statistics import median
from typing import Final

import numpy as np

from cluster.scheduler.placement.worker_table import RESIDUAL_STEP, Floats

_RECENT_LENGTHS: Final = 256  # observations kept per key
_ENOUGH_LENGTHS: Final = 8  # observations before a key is believed by itself
_PRIOR_TOKENS: Final = 256.0
_RESIDUAL_EVERY: Final = 16  # observations
_RESIDUALS: Final = 64
_RECENT_OVERHEADS: Final = 32
_ENOUGH_OVERHEADS: Final = 4
_DEMAND_SMOOTHING: Final = 0.01  # about the last hundred requests
_GROUP_SMOOTHING: Final = 0.1  # about a group's last ten requests, at most
FLOOR: Final = 0.8  # of what all get in time: a group that gets less leaves nobody room


class _Recent:
    """The newest lengths of one key."""

    __slots__ = ("_bound", "_lengths", "_mean", "num_seen")

    def __init__(self) -> None:
        self._lengths = np.zeros(_RECENT_LENGTHS)
        self.num_seen = 0
        self._bound, self._mean = 0.0, 0.0  # the last that was asked for: a decision asks several times

    def add(self, length: float) -> None:
        self._lengths[self.num_seen % _RECENT_LENGTHS] = length
        self.num_seen += 1
        self._bound = self._mean = 0.0

    def residuals(self) -> Floats:
        """How much is still to come after 0, 1, 2... times `RESIDUAL_STEP` of the mean, as a share of the mean."""
        lengths = self._lengths[: self.num_seen]
        if not lengths.any():
            return np.ones(_RESIDUALS)
        ages = np.arange(_RESIDUALS) * RESIDUAL_STEP * lengths.mean()
        beyond = np.maximum(lengths - ages[:, None], 0.0)
        left = beyond.sum(axis=1) / np.maximum((beyond > 0.0).sum(axis=1), 1)
        # Past the longest that was seen, as much again as a tail without memory would have.
        shares: Floats = np.maximum(left / lengths.mean(), RESIDUAL_STEP)
        return shares

    def mean_below(self, bound: float) -> float:
        """Mean of the lengths, each cut at `bound`."""
        if bound != self._bound:
            self._bound, self._mean = bound, float(np.minimum(self._lengths[: self.num_seen], bound).mean())
        return self._mean


class OutputLengths:
    """How many tokens a request will probably put out, learned from those that ended: per (tenant, class); where little
    is known of it, per class; then of all. A client's `max_new_tokens` is a bound, and usually far above what comes."""

    def __init__(self, max_keys: int = 1000) -> None:
        self._max_keys = max_keys
        self._recent: OrderedDict[tuple[str, str] | str | None, _Recent] = OrderedDict()
        self.residuals = np.ones(_RESIDUALS)  # of all; like a tail without memory before anything is known

    def __len__(self) -> int:
        """Keys that are remembered."""
        return len(self._recent)

    def observe(self, tenant: str, slo_class: str, num_tokens: float) -> None:
        for key in ((tenant, slo_class), slo_class, None):
            self._recent.setdefault(key, _Recent()).add(num_tokens)
            self._recent.move_to_end(key)
        everyone = self._recent[None]
        if everyone.num_seen % _RESIDUAL_EVERY == 0:
            self.residuals = everyone.residuals()
        while len(self._recent) > self._max_keys:
            self._recent.popitem(last=False)

    def expect(self, tenant: str, slo_class: str, max_new_tokens: int) -> float:
        """The number of tokens that a request will probably put out: at least one, at most `max_new_tokens`."""
        for key in ((tenant, slo_class), slo_class, None):
            recent = self._recent.get(key)
            if recent is not None and recent.num_seen >= _ENOUGH_LENGTHS:
                return max(1.0, recent.mean_below(max_new_tokens))
        return max(1.0, min(_PRIOR_TOKENS, max_new_tokens))


class Overhead:
    """Seconds from a placement to its first token, beyond what was predicted for its prompt (messages, reservation,
    gateway): the median of lately.

    Only of prompts that nobody was ahead of and nobody came after, and that had not to wait for memory or a slot: else
    it would learn how far predicted queues are off, and what it costs to share a step.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_RECENT_OVERHEADS)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        self._recent.append(seconds)
        if len(self._recent) >= _ENOUGH_OVERHEADS:
            self.seconds = max(0.0, median(self._recent))


class PromptDemand:
    """What requests ask of those who compute prompts: by this placement tells much work from little, whatever model and
    device.

    `prompt_s`: of the prompts asked for, without what is cached. 0 before the first."""

    def __init__(self) -> None:
        self.prompt_s = 0.0
        self._num_seen = 0

    def observe(self, prompt_s: float) -> None:
        """Count a request with a TTFT target, when it comes."""
        self._num_seen += 1
        weight = max(_DEMAND_SMOOTHING, 1.0 / self._num_seen)
        self.prompt_s += weight * (prompt_s - self.prompt_s)


class Attainment:
    """The share of recent requests with targets that could be in time where they were placed; who was turned away
    could not. Of all (`overall`), and of each group that must not fall far behind the others.

    A group's floor is `FLOOR` of the share of all."""

    def __init__(self, max_groups: int = 10_000) -> None:
        self.overall = 1.0
        self._max_groups = max_groups
        self._num_seen = 0
        self._of: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()  # with how many were seen of it

    def __len__(self) -> int:
        """Groups that are remembered."""
        return len(self._of)

    def observe(self, groups: Iterable[Hashable], in_time: float) -> None:
        """What became of a request of these groups: the chance that it is in time, 0 where it was turned away."""
        self.overall += _DEMAND_SMOOTHING * (in_time - self.overall)
        self._num_seen += 1
        for group in groups:
            share, num_seen = self._of.get(group, (self.overall, 0))
            # Who is nearly all of them looks as far back as these: else it is below its floor now and then by chance.
            weight = min(_GROUP_SMOOTHING, _DEMAND_SMOOTHING * self._num_seen / (num_seen + 1))
            self._of[group] = share + weight * (in_time - share), num_seen + 1
            self._of.move_to_end(group)
        while len(self._of) > self._max_groups:
            self._of.popitem(last=False)

    def falls_short(self, group: Hashable) -> bool:
        """Whether less of it than `FLOOR` is served, whatever the others get."""
        return self._share(group) < FLOOR

    def is_below_floor(self, group: Hashable) -> bool:
        return self._share(group) < FLOOR * self.overall

    def _share(self, group: Hashable) -> float:
        return self._of[group][0] if group in self._of else self.overall
