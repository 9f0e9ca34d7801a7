"""A whole cluster in one process and one event loop, without Ray: real workers, sockets, shared memory and weights.

Everything between gateway and workers is what runs under Serve; only the processes and their supervision are missing.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from cluster.orchestrator import Orchestrator, OrchestratorConfig
from cluster.scheduler import SchedulerPolicy
from cluster.scheduler_server import SchedulerServer
from decode_workers.worker import DecodeWorker, DecodeWorkerConfig
from engine.loading import EngineConfig, LoadedModel, load_model
from engine.sampling_params import SamplingParams
from kv_transfer.messages import Endpoint, RequestSpec, TokenEvent
from kv_transfer.transfer_config import TransferConfig
from kv_transfer.transports.base import Identity
from kv_transfer.worker_port import worker_identity
from prefill_workers.worker import PrefillWorker, PrefillWorkerConfig


@dataclass(frozen=True, kw_only=True)
class MiniClusterConfig:
    model_ref: str
    num_prefill: int = 1
    num_decode: int = 1
    prefill_engine: dict[str, object] = field(default_factory=dict)
    decode_engine: dict[str, object] = field(default_factory=dict)
    prefill: PrefillWorkerConfig = field(default_factory=PrefillWorkerConfig)
    decode: DecodeWorkerConfig = field(default_factory=DecodeWorkerConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    orchestrator: OrchestratorConfig = field(default_factory=OrchestratorConfig)


class MiniCluster:
    """Use `async with mini_cluster(config) as cluster`."""

    def __init__(self, config: MiniClusterConfig) -> None:
        self.config = config
        self._secret = secrets.token_bytes(32)
        self.scheduler = SchedulerServer(
            SchedulerPolicy(), self._identity("scheduler"), broadcast_period_s=0.2
        )
        self.prefills: list[PrefillWorker] = []
        self.decodes: list[DecodeWorker] = []
        self.models: list[LoadedModel] = []

    def _identity(self, worker_id: str) -> Identity:
        return Identity(worker_id=worker_id, node_id="node", secret=self._secret, compatibility={})

    async def _locate(self) -> Endpoint:
        return self.scheduler.endpoint

    async def start(self) -> None:
        await self.scheduler.start("127.0.0.1")
        for _ in range(self.config.num_prefill):
            await self.add_prefill()
        for _ in range(self.config.num_decode):
            await self.add_decode()
        self.orchestrator = Orchestrator(self._identity("gateway"), self.config.orchestrator, self._locate)
        self.orchestrator.start()
        await self.ready()

    async def ready(self, timeout_s: float = 10.0) -> None:
        """Until the gateway is connected to every worker."""
        wanted = {worker.info.worker_id for worker in (*self.prefills, *self.decodes)}
        assert await self.orchestrator._links.wait_up(wanted, timeout_s), "the workers did not come up"

    async def add_prefill(self) -> PrefillWorker:
        model = self._load(self.config.prefill_engine)
        identity = self._worker_identity(model, "prefill")
        worker = PrefillWorker(
            model, self.config.prefill, identity, self.config.transfer.open(identity, "127.0.0.1"), self._locate
        )
        await worker.start()
        self.prefills.append(worker)
        return worker

    async def add_decode(self) -> DecodeWorker:
        model = self._load(self.config.decode_engine)
        identity = self._worker_identity(model, "decode")
        worker = DecodeWorker(
            model, self.config.decode, identity, self.config.transfer.open(identity, "127.0.0.1"), self._locate
        )
        await worker.start()
        self.decodes.append(worker)
        return worker

    async def stop(self) -> None:
        await self.orchestrator.stop()
        for worker in (*self.prefills, *self.decodes):
            await worker.stop()
        await self.scheduler.stop()

    async def generate(
        self, request_id: str, prompt: list[int], params: SamplingParams, **spec: object
    ) -> list[TokenEvent]:
        """All tokens of one request."""
        request = replace(
            RequestSpec(request_id=request_id, attempt=0, prompt_token_ids=prompt, params=params), **spec  # type: ignore[arg-type]
        )
        async with contextlib.aclosing(self.orchestrator.generate(request)) as events:
            return [event async for event in events]

    def _load(self, options: dict[str, object]) -> LoadedModel:
        defaults = EngineConfig(
            model_ref=self.config.model_ref,
            model_name="model",
            dtype="float32",
            block_size=16,
            kv_blocks=512,
            num_threads=1,
        )
        model = load_model(replace(defaults, **options))  # type: ignore[arg-type]
        self.models.append(model)
        return model

    def _worker_identity(self, model: LoadedModel, role: str) -> Identity:
        return worker_identity(
            model, worker_id=f"{role}-{len(self.models)}", node_id="node", secret=self._secret
        )


@contextlib.asynccontextmanager
async def mini_cluster(config: MiniClusterConfig) -> AsyncIterator[MiniCluster]:
    cluster = MiniCluster(config)
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.stop()
