"""One process's place in the cluster: a loaded model with its memory tiers, and the worker that uses them.

The worker may be replaced by one of another role at any time: it drains, stops, and the new one is made over the same
weights, the same KV memory and what is cached in it. Or by one of another model, whose weights and memory take the
place of those that were here. A Serve deployment holds one, without which it works as well.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace

from engine.checkpoint.weights import LoadProgress
from engine.cost_model.costs import StepCosts
from engine.steps.calibration import compile_kernels
from engine.steps.loading import LoadedModel
from kernels.cache_folder import compiling_s
from kv_transfer.messages import Message
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Endpoint
from kv_transfer.messages.workers import ChangeRole, LoadingReport, PoolTarget, StepCostReport
from kv_transfer.tiers.block_events import BlockEventLog
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from kv_transfer.tiers.worker_tiers import WorkerTiers
from kv_transfer.transports.base import Identity
from kv_transfer.transports.choose import TransferConfig
from kv_transfer.worker.base import Worker, WorkerParts, WorkerRole
from kv_transfer.worker.cost_report import reported_cost
from kv_transfer.worker.port import telling_of_loading, warn_of_order, worker_identity

logger = logging.getLogger(__name__)

CLEAR_S = 10.0  # for blocks to be let go that copies or a step in flight still use
STOP_S = 30.0
TARGET_HOLDS_S = 10.0  # the scheduler repeats it every second
START_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSite:
    """Where a replica runs, and what it is called: its workers' ids are made from `name`."""

    name: str
    node_id: str
    host: str
    secret: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKit:
    """What workers of one model are made of. `roles`: those that they can have. `tiers(role)` makes the memory of one
    that begins in this role, with nothing loaded."""

    roles: Mapping[Role, WorkerRole]
    tiers: Callable[[Role], WorkerTiers]
    transfer: TransferConfig


class WorkerReplica:
    """Owns the model, the tiers and the worker. `kits`: the models that it can have, by name, of which `model` is the
    first one, as `role` is of its roles."""

    def __init__(
        self,
        role: Role,
        model: str,
        kits: Mapping[str, ModelKit],
        site: ReplicaSite,
        locate_scheduler: Callable[[], Awaitable[Endpoint]],
    ) -> None:
        self.role = role
        self.model_name = model
        self._home = role
        self._home_model = model
        self._kits = kits
        self._tiers: WorkerTiers | None = None
        self._model: LoadedModel | None = None
        self._load_s = 0.0  # that it took, from when it was wanted; without compiling kernels, once on a machine
        self._costs: dict[tuple[str, Role], StepCosts] = {}  # of steps here, by the model and the role it was loaded in
        self._site = site
        self._locate_scheduler = locate_scheduler
        self._events: BlockEventLog | None = None
        self._lower: PrefixTiers | None = None
        self._worker: Worker | None = None
        self._change: asyncio.Task[None] | None = None
        self._num_changes = 0
        self._is_ending = False
        self._failure: BaseException | None = None
        self._pool_target: tuple[int, float] | None = None  # and when it was heard

    async def start(self) -> None:
        """Load the model and begin to work; the scheduler is told how far that is. Returns when requests can come."""
        await self._load(time.monotonic(), None)

    async def _load(self, wanted_at: float, step_cost: StepCostReport | None) -> None:
        """Load the model that is wanted since then, and make its worker. What its steps cost is known from before, or
        else `step_cost`, where it is told."""
        progress, site, compiled_s = LoadProgress(), self._site, compiling_s()
        self._tiers = self._kits[self.model_name].tiers(self.role)
        identity = Identity(worker_id=self._worker_id, node_id=site.node_id, secret=site.secret, compatibility={})

        def report() -> LoadingReport:
            return LoadingReport(
                worker_id=self._worker_id,
                role=self.role,
                model=self.model_name,
                home=self._home,
                home_model=self._home_model,
                pid=os.getpid(),
                **asdict(progress),
            )

        async with telling_of_loading(identity, report, self._locate_scheduler):
            loaded = await asyncio.to_thread(self._tiers.load, progress)
            costs = self._costs.setdefault((self.model_name, self.role), loaded.costs)
            self._model = replace(loaded, costs=costs)  # from here on, `stop` closes it
            await asyncio.to_thread(compile_kernels, loaded)  # not within somebody's step, nor a measured one
            if not costs.is_seeded and (told := reported_cost(self.role, step_cost)) is not None:
                costs.seed(told)
            self._events = BlockEventLog(self._worker_id, layer_groups=self.model.layout.num_layer_groups)
            for masks in self.model.grammar_masks:
                # Before anybody knows the worker: it is silent meanwhile, and who is silent for long counts as gone.
                await asyncio.to_thread(masks.read_ahead)
            self._lower = await self._tiers.open(self.model, self._events)
            self._load_s = max(0.0, time.monotonic() - wanted_at - (compiling_s() - compiled_s))
            self._worker = await self._begin()

    async def _unload(self) -> None:
        """End what a model and its memory have at work, as far as they are there. Nothing may use them after. Raises
        TimeoutError where something of it does not end."""
        if self._model is not None:
            await asyncio.to_thread(self._model.runner.close)
        if self._tiers is not None:
            await self._tiers.close()

    @property
    def model(self) -> LoadedModel:
        assert self._model is not None, "the replica is between two models, or has not been started"
        return self._model

    @property
    def worker(self) -> Worker | None:
        """The worker that runs now; None for the moment between two."""
        return self._worker

    @property
    def is_healthy(self) -> bool:
        """False: it cannot be helped, another replica should take its place."""
        return self._failure is None and (self._worker is None or self._worker.is_healthy)

    @property
    def is_changing(self) -> bool:
        return self._change is not None

    def pool_target(self) -> int | None:
        """How many workers its pool should have. None: the scheduler does not say, or is gone."""
        if self._pool_target is None or time.monotonic() - self._pool_target[1] > TARGET_HOLDS_S:
            return None
        return self._pool_target[0]

    def change_role(self, role: Role, drain_s: float, model: str = "", step_cost: StepCostReport | None = None) -> bool:
        """Begin to become a worker of that role and model ("": the one that it has); requests that run on after
        `drain_s` go elsewhere. `step_cost`: what steps of the other model cost others.

        False, and nothing happens, if it is one, is becoming another one, is about to end, or cannot be one.
        """
        model = model or self.model_name
        kit = self._kits.get(model)
        is_able = not (self.is_changing or self._is_ending or self._failure) and kit is not None and role in kit.roles
        if not is_able or (role, model) == (self.role, self.model_name):
            return False
        self._change = asyncio.create_task(self._change_to(role, model, drain_s, step_cost), name="role-change")
        self._change.add_done_callback(self._on_changed)
        return True

    async def changed(self) -> None:
        """Wait until no change is going on. Whether the last one succeeded, `is_healthy` says."""
        if self._change is not None:
            await asyncio.wait([self._change])

    async def stop(self, drain_s: float) -> None:
        """Finish what is here as far as the time allows, then end everything. Raises TimeoutError where something does
        not end: nothing of it may be used again, and the process has to end."""
        self._is_ending = True
        if self._change is not None:
            if self._worker is not None:  # else it is between two: that has deadlines, or Serve's for loading a model
                self._change.cancel()
            await asyncio.gather(self._change, return_exceptions=True)
        if self._worker is not None:
            await self._worker.drain(drain_s, stops=True)
            await self._worker.stop()
        await self._unload()

    @property
    def _worker_id(self) -> str:
        """Another one for each worker: nobody takes a new one for what went before it."""
        suffix = f".{self._num_changes}" if self._num_changes else ""
        return f"{self.role}-{self._site.name}{suffix}"

    async def _begin(self) -> Worker:
        site, kit = self._site, self._kits[self.model_name]
        identity = worker_identity(self.model, worker_id=self._worker_id, node_id=site.node_id, secret=site.secret)
        parts = WorkerParts(
            model=self.model,
            identity=identity,
            transport=kit.transfer.open(identity, site.host, self.model.kv_cache.tensor.device),
            locate_scheduler=self._locate_scheduler,
            host=site.host,
            lower_tiers=self._lower,
            events=self._events,
            on_order=self._on_order,
            home=self._home,
            home_model=self._home_model,
            digest_kind=kit.transfer.digest_kind(self.model.kv_cache.tensor.device),
            models=[name for name in self._kits if name != self.model_name],
            load_s=self._load_s,
        )
        worker = kit.roles[self.role](parts)
        await worker.start()
        return worker

    def _on_order(self, message: Message) -> None:
        if isinstance(message, PoolTarget):
            self._pool_target = (message.num_workers, time.monotonic())
        elif not isinstance(message, ChangeRole):
            warn_of_order(message)
        elif not self.change_role(message.role, message.drain_s, message.model, message.step_cost):
            told = (self.role, message.role, message.model or self.model_name)
            logger.warning("a %s worker was told to become a %s worker of %s, and cannot now", *told)

    async def _change_to(self, role: Role, model: str, drain_s: float, step_cost: StepCostReport | None) -> None:
        """Drain and stop the worker, then start one of the other role over the same model and tiers, or over those of
        another model. Raises RuntimeError or TimeoutError if the old worker does not give its blocks back, and whatever
        starting the new one raises."""
        began, old, old_id = time.monotonic(), self._worker, self._worker_id
        assert old is not None
        if not await old.drain(drain_s):
            old.migrate_all("the worker changes its role")
            if not await old.drain(CLEAR_S):
                raise RuntimeError(f"blocks are in use {CLEAR_S:g} s after their requests were sent elsewhere")
        drained = time.monotonic()
        self._worker = None
        async with asyncio.timeout(STOP_S):
            await old.stop(changes=True)
        del old
        self.role = role
        self._num_changes += 1
        if model == self.model_name:
            assert self._events is not None
            self._events.rename(self._worker_id)
            async with asyncio.timeout(START_S):
                self._worker = await self._begin()
        else:
            await self._unload()
            self._model = self._tiers = self._events = self._lower = None
            await asyncio.to_thread(gc.collect)  # the next one may need the room of what is in cycles
            self.model_name = model
            await self._load(drained, step_cost)  # for as long as a model takes: the scheduler hears how far that is
        logger.info(
            "%s became %s of %s: %.2f s to drain, %.0f ms from the old worker to the new one",
            old_id,
            self._worker_id,
            model,
            drained - began,
            1e3 * (time.monotonic() - drained),
        )

    def _on_changed(self, change: asyncio.Task[None]) -> None:
        self._change = None  # only now: until its failure is known, nobody is to think it has come to its end
        if not change.cancelled() and change.exception() is not None:
            self._failure = change.exception()
            logger.error("the change of the role failed, the replica is of no use now", exc_info=self._failure)
