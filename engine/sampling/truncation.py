"""Top-k, top-p and min-p filtering: which tokens of a row may be drawn at all.

Steps 6 to 8 of `engine.sampling.logits`, in the order of Hugging Face's logits warpers. Each keeps the tokens that are
at least as likely as some least likely one, the floor, so that what survives depends on the logits alone: tokens
exactly as likely as the last one kept are kept too, whatever their order.

The CPU's sampler calls it. Legend: `relative` is a row less its largest logit, by the
temperature; a token's mass is the exponential of that, and a radius is a distance from the best one, which is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from engine.sampling.logits import Row, TokenIds
from engine.sampling.params import SamplingParams
from kernels.native.sampling import top_logits

_RADII: Final = (2.0, 5.0, 10.0, 15.0)  # in which the most likely tokens are looked for, before all are sorted
_TOP_RADIUS: Final = 8.0  # likewise in C++: 100 to 500 tokens of a language model's row, 95 to 99 % of its mass
_UNCERTAIN: Final = 3e-6  # of the row's mass, which C++ knows to 1e-6: whoever is closer than that may fall either way


def is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    """Whether some tokens may be left out."""
    return 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0


def survivors(relative: Row, params: SamplingParams) -> TokenIds | None:
    """Ids of the tokens kept, ascending; never empty. None: all of them."""
    floor = -math.inf
    if 0 < params.top_k < len(relative):
        floor = kth_largest(relative, params.top_k)
    if params.top_p < 1.0:
        found = _nucleus_floor_nearby(relative, params.top_p) if floor == -math.inf else None
        floor = _nucleus_floor(relative, floor, params.top_p) if found is None else found
    if params.min_p > 0.0:
        floor = max(floor, math.log(params.min_p))
    if floor == -math.inf:
        return None
    return np.flatnonzero(relative >= np.float32(floor))


def kth_largest(relative: Row, k: int) -> float:
    """The k-th largest value of a row whose largest is 0; 1 ≤ k ≤ its length."""
    candidates = _nearest(relative, lambda near: len(near) >= k)
    return float(np.partition(candidates, len(candidates) - k)[len(candidates) - k])


def _nucleus_floor(relative: Row, floor: float, top_p: float) -> float:
    """The least value kept by top-p among those at or above `floor`.

    A token is kept if those more likely than it have less than `top_p` of the mass.
    """
    kept = relative if floor == -math.inf else relative[relative >= np.float32(floor)]
    wanted = top_p * _mass(kept)
    candidates = _nearest(kept, lambda near: _mass(near) >= wanted)
    descending = np.sort(candidates)[::-1]
    last = int(np.searchsorted(np.cumsum(np.exp(descending), dtype=np.float64), wanted))
    return float(descending[min(last, len(descending) - 1)])


def _nucleus_floor_nearby(relative: Row, top_p: float) -> float | None:
    """`_nucleus_floor` of a whole row by a pass in C++. None: it is further away, a close thing, or there is no C++."""
    found = top_logits(relative, _TOP_RADIUS)
    if found is None:
        return None
    descending = np.sort(found.values)[::-1]
    reached = np.cumsum(np.exp(descending), dtype=np.float64)
    wanted, slack = top_p * found.mass, _UNCERTAIN * found.mass
    last, last_at_most = np.searchsorted(reached, [wanted - slack, wanted + slack]).tolist()
    return float(descending[last]) if last == last_at_most < len(descending) else None


def _nearest(relative: Row, suffices: Callable[[Row], bool]) -> Row:
    """The values within the smallest of some radii that suffices; all of them where none does."""
    for radius in _RADII:
        near = relative[relative >= -radius]
        if suffices(near):
            return near
    return relative


def _mass(relative: Row) -> float:
    return float(np.exp(relative).sum(dtype=np.float64))
