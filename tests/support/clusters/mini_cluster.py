"""A whole cluster in one process and one event loop, without Ray: real workers, sockets, shared memory and weights.

Everything between gateway and workers is what runs under Serve; only the processes and their supervision are missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from cluster.autoscaling.sizing import PoolsPlan
from cluster.gateway import scheduler_client
from cluster.gateway.line_log import LineLog
from cluster.gateway.orchestrator import Orchestrator, OrchestratorConfig
from cluster.scheduler.scheduler import SchedulerPolicy
from cluster.scheduler.server import ModelRules, SchedulerServer
from decode_workers.worker import DecodeWorker, DecodeWorkerConfig
from engine.cost_model.step_cost import StepCost
from engine.sampling.params import SamplingParams
from engine.sampling.pending_output import PendingOutput
from engine.sequence import StepPlan
from engine.steps.loading import EngineConfig, LoadedModel, load_model
from engine.steps.runner import ModelRunner, PreparedStep
from kv_transfer.connections.connection import Connection, connect
from kv_transfer.digest import DigestKind
from kv_transfer.handoff import sender
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Endpoint, RequestSpec, TokenEvent
from kv_transfer.tiers.base import ColumnSink, ColumnSource, TierMemory
from kv_transfer.tiers.block_events import BlockEventLog
from kv_transfer.tiers.config import TiersConfig
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from kv_transfer.tiers.worker_tiers import WorkerTiers
from kv_transfer.transports.base import Identity
from kv_transfer.transports.choose import TransferConfig
from kv_transfer.worker.base import WorkerParts
from kv_transfer.worker.port import worker_identity
from prefill_workers.worker import PrefillWorker, PrefillWorkerConfig
from tests.support.http_server import MODEL
from tests.support.small_models import SmallModel
from tests.support.token_streams import one_by_one
from tests.support.waiting import HANGS_S, eventually

# After which what is still held is a leak. Whoever dies, or is called in vain, has been given up long before.
# Reservations that nobody keeps alive lapse later (`DecodeWorkerConfig.lease_ttl_s`), as do prompts that wait for one
# (`sender_state.KEPT_S`): neither hides a leak.
IDLE_S = 0.75 * HANGS_S

# What a worker may believe that computing costs: more than loading a prefix from anywhere, or less.
COMPUTING_IS_SLOW = StepCost(base_s=1.0, prefill_token_s=1.0, prefill_pair_s=0.0, decode_s=1e-3, context_token_s=0.0)
COMPUTING_IS_FREE = replace(COMPUTING_IS_SLOW, base_s=1e-9, prefill_token_s=1e-12)


@dataclass(frozen=True, kw_only=True)
class MiniClusterConfig:
    """`prefill_engine` and `decode_engine` change fields of the workers' `EngineConfig`. `others`: models beside
    `MODEL`, each with as many workers, by name: what their `model_ref` is."""

    model_ref: str
    others: dict[str, str] = field(default_factory=dict)
    num_prefill: int = 1
    num_decode: int = 1
    prefill_engine: dict[str, object] = field(default_factory=dict)
    decode_engine: dict[str, object] = field(default_factory=dict)
    prefill: PrefillWorkerConfig = field(default_factory=PrefillWorkerConfig)
    decode: DecodeWorkerConfig = field(default_factory=DecodeWorkerConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    digest_kinds: dict[Role, DigestKind] = field(default_factory=dict)  # in place of what `transfer` says
    orchestrator: OrchestratorConfig = field(default_factory=OrchestratorConfig)
    # Patient: the workers' reports wait while a test computes on the loop that all of it shares.
    policy: SchedulerPolicy = field(default_factory=lambda: SchedulerPolicy(stale_after_s=HANGS_S))
    overdue_s: float = HANGS_S  # of a step, beyond its prediction: a brake, or a busy machine, must not pass for a hang
    pools: PoolsPlan | None = None
    decision_log: LineLog | None = None
    prefill_sources: tuple[ColumnSource, ...] = ()  # below the prefill workers' host memory, if they have any
    prefill_sink: ColumnSink | None = None
    kv_silence_s: float = HANGS_S  # after which a KV link is given up: each end has a thread, which may be kept waiting
    load_timeout_s: float = HANGS_S  # what is loaded, and what computed, must not depend on how busy the machine is
    tiers: TiersConfig | None = None  # of all workers, as they are opened in production; the engines' `host_bytes` then
    # do not count


class MiniCluster:
    """Use `async with mini_cluster(config) as cluster`."""

    def __init__(self, config: MiniClusterConfig) -> None:
        self.config = replace(
            config,
            prefill=replace(config.prefill, overdue_s=config.overdue_s),
            decode=replace(config.decode, overdue_s=config.overdue_s),
            transfer=replace(config.transfer, silence_s=config.kv_silence_s),
            tiers=None if config.tiers is None else replace(config.tiers, load_timeout_s=config.load_timeout_s),
        )
        self.secret = secrets.token_bytes(32)
        self.prefills: list[PrefillWorker] = []
        self.decodes: list[DecodeWorker] = []
        self.models: list[LoadedModel] = []
        self._patience = contextlib.ExitStack()
        self.tiers: list[PrefixTiers] = []  # of the workers in `models` that have some
        self._close_tiers: list[Callable[[], Awaitable[None]]] = []

    @property
    def workers(self) -> list[PrefillWorker | DecodeWorker]:
        return [*self.prefills, *self.decodes]

    def believe(self, cost: StepCost) -> None:
        """All workers take steps to cost so much, until those that come teach them better."""
        for model in self.models:
            model.costs.seed(cost)

    async def start(self) -> None:
        # No gateway places a request itself or forgets who worked before its scheduler did, and no hand-off is begun
        # again, because this machine is busy.
        for module, name, seconds in (
            (scheduler_client, "PLACE_TIMEOUT_S", HANGS_S),
            (scheduler_client, "SETTLE_S", HANGS_S),
            (sender, "CONNECT_TIMEOUT_S", HANGS_S / 6),  # several times sooner than `IDLE_S`: who is called may be dead
        ):
            self._patience.enter_context(mock.patch.object(module, name, seconds))
        await self.start_scheduler()
        for model in ({}, *({"model_name": name, "model_ref": ref} for name, ref in self.config.others.items())):
            for _ in range(self.config.num_prefill):
                await self.add_prefill(**model)
            for _ in range(self.config.num_decode):
                await self.add_decode(**model)
        self.orchestrator = self.new_orchestrator()
        self.orchestrator.start()
        await self.ready()

    async def start_scheduler(self) -> None:
        """Also to replace one that was stopped."""
        rules = ModelRules(policy=self.config.policy, pools=self.config.pools)
        self.scheduler = SchedulerServer(
            dict.fromkeys([MODEL, *self.config.others], rules),
            self.identity("scheduler"),
            broadcast_period_s=0.2,
            decision_log=self.config.decision_log,
        )
        await self.scheduler.start("127.0.0.1")

    def new_orchestrator(self, on_slo: Callable[[bytes], None] = lambda report: None) -> Orchestrator:
        """One more gateway, for the caller to start and stop."""
        return Orchestrator(self.identity("gateway"), self.config.orchestrator, self.locate, on_slo)

    async def ready(self, timeout_s: float = HANGS_S) -> None:
        """Until the gateway is connected to every worker."""
        wanted = {worker.info.worker_id for worker in self.workers}
        assert await self.orchestrator.connections.wait_up(wanted, timeout_s), "the workers did not come up"

    async def add_prefill(self, **engine: str) -> PrefillWorker:
        worker = PrefillWorker(
            await self._load({**self.config.prefill_engine, **engine}, "prefill"), self.config.prefill
        )
        await worker.start()
        self.prefills.append(worker)
        return worker

    async def add_decode(self, **engine: str) -> DecodeWorker:
        worker = DecodeWorker(await self._load({**self.config.decode_engine, **engine}, "decode"), self.config.decode)
        await worker.start()
        self.decodes.append(worker)
        return worker

    async def remove(self, worker: PrefillWorker | DecodeWorker) -> None:
        """A worker dies in the middle of whatever it does, and what it held with it: nobody hears a word of it."""
        for connection in worker.connections:
            connection.abort()
        await self.retire(worker)

    async def retire(self, worker: PrefillWorker | DecodeWorker) -> None:
        """Stop a worker as it is stopped in production."""
        if isinstance(worker, PrefillWorker):
            self.prefills.remove(worker)
        else:
            self.decodes.remove(worker)
        self.models.remove(worker.model)
        await self._end(worker)

    async def stop(self) -> None:
        with self._patience:  # to the end: until then somebody may still connect or place
            await self.orchestrator.stop()
            for worker in self.workers:
                await self._end(worker)
            for close in self._close_tiers:
                await close()
            await self.scheduler.stop()

    @staticmethod
    async def _end(worker: PrefillWorker | DecodeWorker) -> None:
        await worker.stop()
        await asyncio.to_thread(worker.model.runner.close)

    async def connect(self, worker: PrefillWorker | DecodeWorker) -> Connection:
        """As one more gateway, whose messages are the caller's to say and to hear."""
        identity = self.identity("gateway-by-hand")
        return await connect(worker.info.endpoint, identity, purpose="gateway", timeout_s=HANGS_S)

    async def generate(
        self, request_id: str, prompt: list[int], params: SamplingParams, **spec: object
    ) -> list[TokenEvent]:
        """All tokens of one request."""
        async with contextlib.aclosing(self.stream(request_id, prompt, params, **spec)) as events:
            return [event async for event in events]

    async def stream(
        self, request_id: str, prompt: list[int], params: SamplingParams, **spec: object
    ) -> AsyncGenerator[TokenEvent, None]:
        """The tokens of one request as they come; closing cancels it."""
        request = RequestSpec(request_id=request_id, attempt=0, prompt_token_ids=prompt, params=params)
        events = self.orchestrator.generate(replace(request, **spec))  # type: ignore[arg-type]
        async with contextlib.aclosing(one_by_one(events)) as tokens:
            async for event in tokens:
                yield event

    async def idle(self) -> None:
        """Until no live worker holds anything for anyone, or lists it; AssertionError with what is left after
        `IDLE_S`."""
        with contextlib.suppress(AssertionError):
            await eventually(lambda: not (self.num_held or self._left()), IDLE_S)
        assert not self.num_held, "blocks are still held"
        assert not self._left(), f"still listed, running or waiting: {self._left()}"
        for model in self.models:
            model.block_pool.check_idle()
            if model.host_pool is not None:
                model.host_pool.check_idle()

    def _left(self) -> dict[str, object]:
        """By worker, whom it lists and how many of them run or wait, if it does."""
        left: dict[str, object] = {}
        for worker in self.workers:
            num_waiting = worker.reservations.num_waiting if isinstance(worker, DecodeWorker) else 0
            counts = (worker.scheduler.num_running, worker.scheduler.num_waiting, num_waiting)
            if worker.gateway_of or any(counts):
                left[worker.info.worker_id] = (list(worker.gateway_of), *counts)
        return left

    async def flush_disks(self) -> None:
        """Until all that was given to the workers' disk tiers lies in files, and nothing is held any more."""
        for tiers in self.tiers:
            if tiers.disk is not None:
                assert await asyncio.to_thread(tiers.disk.flush, HANGS_S)
        await self.copied_down()

    async def copied_down(self) -> None:
        """Until nothing is held any more, such as by what copies prefixes down."""
        await eventually(lambda: self.num_held == 0, what="blocks are held")

    @property
    def num_held(self) -> int:
        """Leases that anybody holds, on devices and hosts."""
        pools = [pool for model in self.models for pool in (model.block_pool, model.host_pool)]
        return sum(pool.num_leases for pool in pools if pool is not None)

    def _private_tiers(self, model: LoadedModel) -> PrefixTiers | None:
        if model.host_cache is None or model.host_pool is None:
            return None
        device, host = TierMemory(model.sequence_kv, model.block_pool), TierMemory(model.host_cache, model.host_pool)
        tiers = PrefixTiers(
            device,
            host,
            sources=self.config.prefill_sources,
            sink=self.config.prefill_sink,
            load_timeout_s=self.config.load_timeout_s,
        )
        self._close_tiers.append(tiers.close)
        return tiers

    def identity(self, worker_id: str) -> Identity:
        """Of a member without a model: a gateway, the scheduler."""
        return Identity(worker_id=worker_id, node_id="node", secret=self.secret, compatibility={})

    async def locate(self) -> Endpoint:
        """Of the scheduler that there is now."""
        return self.scheduler.endpoint

    async def _load(self, options: dict[str, object], role: Role) -> WorkerParts:
        defaults = EngineConfig(
            model_ref=self.config.model_ref,
            model_name=MODEL,
            dtype="float32",
            block_size=16,
            kv_blocks=512,
            num_threads=1,
        )
        engine = replace(defaults, **options)  # type: ignore[arg-type]
        events = None
        if self.config.tiers is None:
            model = load_model(engine)
            identity = self._worker_identity(model, role)
            lower = self._private_tiers(model) if role == "prefill" else None
        else:
            worker_tiers = WorkerTiers(self.config.tiers, engine, self.secret)
            self._close_tiers.append(worker_tiers.close)
            model = worker_tiers.load()
            identity = self._worker_identity(model, role)
            events = BlockEventLog(identity.worker_id, layer_groups=model.layout.num_layer_groups)
            lower = await worker_tiers.open(model, events)
        self.models.append(model)
        if lower is not None:
            self.tiers.append(lower)
        return WorkerParts(
            model=model,
            identity=identity,
            transport=self.config.transfer.open(identity, "127.0.0.1", model.kv_cache.tensor.device),
            locate_scheduler=self.locate,
            lower_tiers=lower,
            events=events,
            digest_kind=self.config.digest_kinds.get(
                role, self.config.transfer.digest_kind(model.kv_cache.tensor.device)
            ),
        )

    def _worker_identity(self, model: LoadedModel, role: str) -> Identity:
        number = secrets.token_hex(4)
        return worker_identity(model, worker_id=f"{role}-{number}", node_id="node", secret=self.secret)


@contextlib.asynccontextmanager
async def mini_cluster(config: MiniClusterConfig) -> AsyncIterator[MiniCluster]:
    cluster = MiniCluster(config)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


@contextlib.asynccontextmanager
async def cluster_of(model: SmallModel, **config: Any) -> AsyncIterator[MiniCluster]:
    """A cluster that must hold nothing when the test is over."""
    async with mini_cluster(MiniClusterConfig(model_ref=str(model.folder), **config)) as cluster:
        yield cluster
        await cluster.idle()


class Brake:
    """Holds a runner before a step that `stops(plan)`, until released. `holding` says that it does."""

    def __init__(self, run: Callable[..., PendingOutput], stops: Callable[[StepPlan], bool]) -> None:
        self._run = run
        self._stops = stops
        self._released = threading.Event()
        self.holding = threading.Event()

    def run(self, step: PreparedStep, *hooks: object) -> PendingOutput:
        if not self._released.is_set() and self._stops(step.plan):
            self.holding.set()
            self._released.wait()
        return self._run(step, *hooks)

    async def reached(self) -> None:
        await eventually(self.holding.is_set, what="no such step was made")

    def release(self) -> None:
        self._released.set()


def has_generated(num_tokens: int) -> Callable[[StepPlan], bool]:
    """For `brake`: a step of a sequence that has more output than that."""
    return lambda plan: any(item.seq.num_output_tokens > num_tokens for item in plan.items)


@contextlib.contextmanager
def brake(runner: ModelRunner, stops: Callable[[StepPlan], bool] = lambda plan: True) -> Iterator[Brake]:
    """The runner hangs in such a step for as long as the context lasts, or until released."""
    run = runner.run
    held = Brake(run, stops)
    runner.run = held.run  # type: ignore[method-assign,assignment]
    try:
        yield held
    finally:
        held.release()
        runner.run = run  # type: ignore[method-assign]
