"""How many workers each pool should have: from predicted demand, and from error budgets that burn.

    up      at once, where predicted demand needs more workers at the target utilisation; by one where the budget burns
            although it should not
    down    by one, where one fewer would still be below the target with a margin, and that held for `hold_s`
    flip    a worker changes its role instead, where one pool needs more and the other can do with one fewer
    lend    a worker changes its model, where another needs more and has less for each of its workers with it

What a pool should be is compared with what it should be with one fewer, never with what its workers are busy with now:
so a size that was just left is not taken again at once. A queue's length alone changes nothing. Knows no workers, no
requests and no Ray; the clock is the caller's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from kv_transfer.messages.fields import Role

_ROUNDING: Final = 1e-9
_LEAST_TARGET: Final = 0.5  # of the configured target: what is learned is never lower
_LEARNED: Final = 0.9  # of the utilisation at which the budget burned: the target for a while


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRules:
    """How the size of one pool is chosen. `initial`: workers that there will be at first. `scales` False: their number
    is fixed, and only flips change it.

    `target`: the utilisation that is aimed at; `margin`: how far below it, as a share, the pool must be with one worker
    fewer. A pool does not shrink before it has the workers that it was given, or after `patience_s` of waiting for
    them. After the error budget burned, a lower target is in force that rises back over `forget_s`. Where the pool is
    idler than `idle` of its target, more workers would not help: single requests are too long for their targets, or
    something else is wrong. `start_s`: how long a new worker takes until it serves; `burn_s`: how long from then until
    the error budget shows it.
    """

    min_workers: int = 1
    initial: int = 1
    max_workers: int
    scales: bool = True
    target: float = 0.7
    margin: float = 0.15
    hold_s: float = 60.0
    start_s: float = 30.0
    burn_s: float = 60.0
    forget_s: float = 1800.0
    patience_s: float = 600.0
    idle: float = 0.4

    def __post_init__(self) -> None:
        assert 0 <= self.min_workers <= self.initial <= self.max_workers, self
        assert 0 < self.target <= 1 and 0 <= self.margin < 1, self


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsPlan:
    """The rules of both pools. With `flips`, a worker may change its role if the pool that it leaves could do without
    it for `flip_hold_s`, and if the last change was `flip_cooldown_s` ago. For the first `settle_s` nothing changes:
    workers have to find a restarted scheduler first."""

    prefill: PoolRules
    decode: PoolRules
    flips: bool = False
    flip_hold_s: float = 15.0
    flip_cooldown_s: float = 60.0
    settle_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """How a pool stands now. `demand`: workers that predicted demand keeps busy; `bounds`: between what it surely is at
    present; `burns`: the error budget of its targets is used up too fast, over both windows; `live`: workers that take
    requests; `present`: with those that load their model or are about to stop."""

    demand: float
    bounds: tuple[float, float]
    burns: bool
    live: int
    present: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAdvice:
    """How many workers there should be of each role.
    `flip`: the role that a worker of the other role should take now."""

    num_prefill: int
    num_decode: int
    flip: Role | None = None


@dataclass(slots=True)
class PoolSize:
    """The wanted size of one pool, and what is known that may change it."""

    rules: PoolRules
    size: int
    fits_since: float | None = None  # since when one fewer would do
    raised_at: float = -math.inf
    learned: float = math.inf  # the target that was learned at `learned_at`
    learned_at: float = -math.inf
    needed: int = field(default=0, init=False)
    load: float = field(default=0.0, init=False)  # of each of its workers at present, at least
    load_of_fewer: float = field(default=math.inf, init=False)  # of each of the others, were there one fewer, at most

    def observe(self, now: float, view: PoolView) -> None:
        """Note how many workers the pool needs now, and whether one fewer would do. Changes no size."""
        if not self.rules.scales:
            self.size = view.live
        burns = view.burns and self._is_busy(view)
        self.needed = max(self.rules.min_workers, math.ceil(view.demand / self.target(now) - _ROUNDING))
        if burns and self.needed <= self.size and now - self.raised_at >= self.rules.start_s + self.rules.burn_s:
            self._learn(now, view)
            self.needed = self.size + 1
        if burns or self.needed > self.size or not self._fits_in(self.size - 1, now, view):
            self.fits_since = None
        elif self.fits_since is None:
            self.fits_since = now
        self.load = view.bounds[0] / max(1, self.size)
        self.load_of_fewer = view.bounds[1] / (self.size - 1) if self.size > 1 else math.inf

    def scale(self, now: float) -> None:
        """Raise the size to what is needed, or lower it by one."""
        if not self.rules.scales:
            return
        if self.needed > self.size:
            self.change(now, min(self.needed, self.rules.max_workers))
        elif self.could_spare(now, self.rules.hold_s):
            self.change(now, self.size - 1)
        self.size = min(max(self.size, self.rules.min_workers), self.rules.max_workers)

    def change(self, now: float, size: int) -> None:
        if size > self.size:
            self.raised_at = now
        self.size, self.fits_since = size, None

    def could_spare(self, now: float, hold_s: float) -> bool:
        return self.fits_since is not None and now - self.fits_since >= hold_s

    def target(self, now: float) -> float:
        """The target utilisation that is in force now: the configured one, or for a while the one that was learned."""
        forgotten = (now - self.learned_at) / self.rules.forget_s
        if forgotten >= 1.0:
            return self.rules.target
        return min(self.rules.target, self.learned + forgotten * (self.rules.target - self.learned))

    def _fits_in(self, fewer: int, now: float, view: PoolView) -> bool:
        """Whether so few workers would carry the demand with a margin, and the pool has what it was given."""
        is_whole = view.live > fewer or now - self.raised_at >= self.rules.patience_s
        room = fewer * self.target(now) * (1 - self.rules.margin)
        return is_whole and fewer >= self.rules.min_workers and view.demand <= room

    def _is_busy(self, view: PoolView) -> bool:
        return view.demand > self.rules.idle * self.rules.target * max(1, view.live)

    def _learn(self, now: float, view: PoolView) -> None:
        """Lower the target: the pool burns its error budget at its present load per worker. For a while, aim at
        `_LEARNED` times that load."""
        burned_at = view.demand / max(1, self.size)
        self.learned = max(_LEAST_TARGET * self.rules.target, min(self.target(now), _LEARNED * burned_at))
        self.learned_at = self.raised_at = now


class PoolSizer:
    """Sizes both pools. The `Autoscaler` asks it every second."""

    def __init__(self, plan: PoolsPlan, now: float) -> None:
        self._plan = plan
        self._prefill = PoolSize(plan.prefill, plan.prefill.initial, raised_at=now)
        self._decode = PoolSize(plan.decode, plan.decode.initial, raised_at=now)
        self._flipped_at = -math.inf
        self._settled_at = now + plan.settle_s

    def advise(self, now: float, prefill: PoolView, decode: PoolView) -> PoolAdvice | None:
        """How many workers there should be, and whether one should change its role. None: it is too early to say."""
        pools = ((self._prefill, prefill), (self._decode, decode))
        is_settling = now < self._settled_at
        if is_settling:  # after a restart: as many are wanted as turn out to be there, or on their way
            for pool, view in pools:
                pool.size = min(max(pool.size, view.live, view.present), pool.rules.max_workers)
        for pool, view in pools:
            pool.observe(now, view)
        if is_settling:
            return None
        flip = self._flip(now)  # before either pool grows or shrinks: what one lacks, the other may be able to spare
        for pool, _ in pools:
            pool.scale(now)
        return PoolAdvice(num_prefill=self._prefill.size, num_decode=self._decode.size, flip=flip)

    def lacking(self) -> tuple[Role, float] | None:
        """The role of a pool that needs more workers than it has, and the load of those; None: neither does."""
        pools: tuple[tuple[Role, PoolSize], ...] = (("decode", self._decode), ("prefill", self._prefill))
        return next(
            ((role, pool.load) for role, pool in pools if pool.needed > pool.size < pool.rules.max_workers), None
        )

    def sparing(self, load: float) -> Role | None:
        """The role of a pool that, with one worker fewer, would surely be less busy than `load`, that of workers of
        another model; None: neither would. So none goes to and fro: only other demand makes it the other way round."""
        pools: tuple[tuple[Role, PoolSize], ...] = (("prefill", self._prefill), ("decode", self._decode))
        role, pool = min(pools, key=lambda known: known[1].load_of_fewer)
        return role if pool.load_of_fewer < load * (1 - pool.rules.margin) else None

    def refused(self, role: Role) -> None:
        """Take back the sizes that were changed for a worker to take on `role`, which it does not."""
        gains, gives = (self._prefill, self._decode) if role == "prefill" else (self._decode, self._prefill)
        gains.size -= 1
        gives.size += 1

    def _flip(self, now: float) -> Role | None:
        """The role that a worker should change to now, with both sizes changed for it; None: none should."""
        if not self._plan.flips or now - self._flipped_at < self._plan.flip_cooldown_s:
            return None
        pairs: tuple[tuple[Role, PoolSize, PoolSize], ...] = (
            ("prefill", self._prefill, self._decode),
            ("decode", self._decode, self._prefill),
        )
        for role, gains, gives in pairs:
            lacks = gains.needed > gains.size < gains.rules.max_workers
            if lacks and gives.size > 1 and gives.could_spare(now, self._plan.flip_hold_s):
                gains.change(now, gains.size + 1)
                gives.change(now, gives.size - 1)
                self._flipped_at = now
                return role
        return None
