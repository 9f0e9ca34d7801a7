"""Pool sizing as orders to workers: how many there should be in their pools, and who is to change its role or model.

A worker whose role is not that of the pool it was started in counts where it works, and is kept where it was started:
Serve knows only the latter. The `SchedulerServer` asks for orders every second; the clock is passed in.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.autoscaling.demand import BurnAlerts, DemandMonitor
from cluster.autoscaling.sizing import PoolAdvice, PoolSizer, PoolsPlan
from cluster.scheduler.placement.ledger import Ledger
from cluster.slo.tracker import SloTracker
from kv_transfer.messages.fields import Role
from kv_transfer.messages.workers import ChangeRole, KnownWorker, PoolTarget, WorkerInfo

logger = logging.getLogger(__name__)

DRAIN_S: Final = 10.0  # what still runs then goes on elsewhere
_FLIP_S: Final = 120.0  # after this a worker has come back in its new role, or never will
_EXCHANGE_S: Final = 600.0  # or with its new model, which takes as long as that takes to load

Order = tuple[str, PoolTarget | ChangeRole]
"""A worker's id, and the message to send it."""


@dataclass(frozen=True, slots=True)
class _Flip:
    """A change of a worker's role that was ordered. It is done when the process reports the new role, or at `until`."""

    info: WorkerInfo  # in its old role
    role: Role
    until: float

    def is_done(self, workers: Iterable[WorkerInfo], now: float) -> bool:
        return now > self.until or any(_process(w) == _process(self.info) and w.role == self.role for w in workers)


class Autoscaler:
    """Decides how many workers each pool of one model should have, and who changes its role. Its `watch` must hear of
    every verdict of that model's scheduler. `model`: whose promises of those that `tracker` knows count; "": all."""

    def __init__(self, ledger: Ledger, plan: PoolsPlan, tracker: SloTracker, now: float, *, model: str = "") -> None:
        self._ledger = ledger
        self._model = model
        self._tracker = tracker
        self._plan = plan
        self._flips: list[_Flip] = []
        self._sizer = PoolSizer(plan, now)
        self.watch = DemandMonitor(ledger, plan, now)
        self.advice: PoolAdvice | None = None
        self.targets: dict[Role, int] = {}  # what Serve should have in each pool; empty until there is advice

    def orders(self, now: float, loading: Sequence[Role] = ()) -> Iterator[Order]:
        """Yields the orders to send to workers now. Ask again in about a second. `loading`: the role of each worker of
        these pools that loads its model."""
        self._advise(now, loading)
        workers = [info for info, _ in self._ledger.workers()]
        self._flips = [flip for flip in self._flips if not flip.is_done(workers, now)]
        if self.advice is None:
            return
        if self.advice.flip is not None:
            yield from self._flip(self.advice.flip, now)
        self.targets = self._by_home(self.advice, self._ledger.workers())
        for info in workers:
            home = info.home or info.role
            if self.scales(home) and not _is_guest(info):  # whose word would be taken for that of its own model's pool
                yield info.worker_id, PoolTarget(num_workers=self.targets[home])

    @property
    def initial(self) -> dict[Role, int]:
        """How many workers each pool was started with; as many there are for good where it does not scale."""
        return {"prefill": self._plan.prefill.initial, "decode": self._plan.decode.initial}

    def scales(self, role: Role) -> bool:
        """Whether Serve makes that pool as large as this says."""
        return (self._plan.prefill if role == "prefill" else self._plan.decode).scales

    def lacking(self) -> tuple[Role, float] | None:
        """The role of a pool that needs more workers than this model has for it, or is about to have, as one changes
        its role, and how busy demand keeps each of those; None: neither does."""
        lacks = None if self.advice is None else self._sizer.lacking()
        return None if lacks is None or any(flip.role == lacks[0] for flip in self._flips) else lacks

    def spared(self, load: float, model: str) -> WorkerInfo | None:
        """The worker with least to lose of a pool that would be less busy without one than workers of that other model,
        of that load, are; None: there is none, or one is about to change its role."""
        role = None if self.advice is None or self._flips else self._sizer.sparing(load)
        able = [(i, s) for i, s in self._ledger.workers() if i.role == role and model in i.models and not s.draining]
        chosen = min(able, key=_to_lose, default=None)
        return None if chosen is None else chosen[0]

    def refused(self, worker_id: str) -> None:
        """That worker was not told to change its role: it is not waited for, and the pools are to be as large as they
        were. Else Serve, which no flip tells why, would stop one of the pool that it was to leave."""
        for flip in self._flips:
            if flip.info.worker_id == worker_id:
                self._sizer.refused(flip.role)
        self._flips = [flip for flip in self._flips if flip.info.worker_id != worker_id]

    def _advise(self, now: float, loading: Sequence[Role]) -> None:
        """Make `advice` anew from the demand and from burning error budgets; the log tells when it changes."""
        kept = self._tracker.totals(now)
        burning = BurnAlerts.of(series for series in kept if self._model in ("", series.key.model))
        prefill, decode = self.watch.views(now, burning, loading)
        before, advice = self.advice, self._sizer.advise(now, prefill, decode)
        self.advice = advice
        if advice is not None and advice != before:
            logger.info(
                "the pools should have %d prefill and %d decode workers (%s); demand keeps %.2f and %.2f busy, %s",
                advice.num_prefill,
                advice.num_decode,
                f"{prefill.live} and {decode.live} are there"
                if advice.flip is None
                else f"one changes to {advice.flip}",
                prefill.demand,
                decode.demand,
                burning,
            )

    def _flip(self, role: Role, now: float) -> Iterator[Order]:
        """Yields the order to take on `role`, for the worker that has the least to lose; nothing if there is none."""
        able = [(info, snapshot) for info, snapshot in self._ledger.workers() if info.role != role]
        chosen = min((w for w in able if not w[1].draining), key=_to_lose, default=None)
        if chosen is not None:
            self._flips.append(_Flip(chosen[0], role, now + _FLIP_S))
            yield chosen[0].worker_id, ChangeRole(role=role, drain_s=DRAIN_S)

    def _by_home(self, advice: PoolAdvice, workers: Iterable[KnownWorker]) -> dict[Role, int]:
        """How many workers Serve should have in each pool, by the pool that they were started in. A worker that is
        about to change its role counts as if it had, one that is about to stop not at all: Serve counts it no more, and
        whoever is started for it will be where it was started, and not where it works."""
        targets: dict[Role, int] = {"prefill": advice.num_prefill, "decode": advice.num_decode}
        changing = {flip.info.worker_id for flip in self._flips}
        roles = [(flip.info, flip.role) for flip in self._flips]
        roles += [(w, w.role) for w, snapshot in workers if w.worker_id not in changing and not snapshot.stopping]
        for info, role in roles:
            home = role if _is_guest(info) else info.home or info.role
            targets[home] += role != home
            targets[role] -= role != home
        return {role: max(0, target) for role, target in targets.items()}


class ModelExchange:
    """Decides who goes from a model whose workers are less busy to one that lacks workers: one at a time, which has to
    have come back before the next one goes. Where none comes back, as the other model cannot be loaded there, ten
    minutes pass before one more is lost; as long nobody goes while a pool waits for one of its own, whom Serve starts
    in place of one that ended. `autoscalers`: by model; each must have been asked for its own orders."""

    def __init__(self, autoscalers: Mapping[str, Autoscaler]) -> None:
        self._autoscalers = autoscalers
        self._whole_at: float | None = None  # when each pool had all that Serve starts, whatever they work as
        # As it was, its new model, until when it is awaited, and whether each pool had all then.
        self._gone: tuple[WorkerInfo, str, float, bool] | None = None

    def orders(self, workers: Collection[KnownWorker], now: float) -> Iterator[Order]:
        """Yields the order to send now, if there is one. `workers`: of all models."""
        if self._gone is not None:
            left, model, until, was_whole = self._gone
            has_come = any(_process(w) == _process(left) and w.model == model for w, _ in workers)
            if now <= until and not has_come:
                return
            self._gone = None
            if has_come and was_whole:  # nobody looked meanwhile: whoever is missing since has his whole time
                self._whole_at = now
        if self._awaits_one(workers, now):
            return
        for model, gains in self._autoscalers.items():
            if (lacks := gains.lacking()) is None:
                continue
            role, load = lacks
            for gives in self._autoscalers.values():
                worker = None if gives is gains else gives.spared(load, model)
                if worker is not None:
                    self._gone = worker, model, now + _EXCHANGE_S, self._whole_at == now
                    logger.info("%s is to become a %s worker of %s, which lacks one", worker.worker_id, role, model)
                    yield worker.worker_id, ChangeRole(role=role, drain_s=DRAIN_S, model=model)
                    return

    def refused(self, worker_id: str) -> None:
        """That worker was not told to change its model: it is not waited for."""
        if self._gone is not None and self._gone[0].worker_id == worker_id:
            self._gone = None

    def _awaits_one(self, workers: Iterable[KnownWorker], now: float) -> bool:
        """Whether a pool has fewer workers than Serve starts there, wherever they work, and may still get them."""
        homes = Counter(
            (info.home_model or info.model, info.home or info.role)
            for info, snapshot in workers
            if not snapshot.draining
        )
        is_whole = all(
            homes[model, role] >= num_workers
            for model, each in self._autoscalers.items()
            for role, num_workers in each.initial.items()
        )
        if is_whole or self._whole_at is None:
            self._whole_at = now
        return not is_whole and now - self._whole_at <= _EXCHANGE_S


def _process(info: WorkerInfo) -> tuple[str, int]:
    return info.endpoint.node_id, info.pid


def _is_guest(info: WorkerInfo) -> bool:
    """Whether it was started for another model."""
    return info.home_model not in (None, info.model)


def _to_lose(worker: KnownWorker) -> tuple[int, int, int, str]:
    """A key that is smallest for the worker that loses least by a change of its role or model. Who is not where it was
    started goes first: so the last one of a pool is its own, and Serve replaces it there when it dies."""
    info, snapshot = worker
    at_home = (info.home or info.role, info.home_model or info.model) == (info.role, info.model)
    held = snapshot.num_running + snapshot.num_waiting
    return (at_home, held + snapshot.num_pending, snapshot.context_tokens, info.worker_id)
