"""A mini cluster whose workers are those of replicas, so that they can change their roles."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from unittest import mock

from decode_workers.worker import DecodeWorker
from engine.steps.loading import EngineConfig
from kv_transfer.messages.fields import Role
from kv_transfer.tiers.config import Budget, TiersConfig
from kv_transfer.tiers.worker_tiers import WorkerTiers
from kv_transfer.worker import replica as worker_replica
from kv_transfer.worker.base import WorkerRole
from kv_transfer.worker.replica import ModelKit, ReplicaSite, WorkerReplica
from prefill_workers.worker import PrefillWorker
from tests.processes.host_segments import SHARED_MEMORY
from tests.support.clusters.mini_cluster import MiniCluster, MiniClusterConfig
from tests.support.http_server import MODEL
from tests.support.small_models import SmallModel
from tests.support.waiting import HANGS_S


class ReplicaCluster(MiniCluster):
    """`workers` are those that the replicas have at the moment."""

    def __init__(self, config: MiniClusterConfig, folder: str) -> None:
        super().__init__(config)
        self._tiers_config = TiersConfig(
            host=Budget(num_bytes=2**23), host_folder=folder, load_timeout_s=config.load_timeout_s
        )
        self.roles: dict[Role, WorkerRole] = {
            "prefill": partial(PrefillWorker, config=self.config.prefill),
            "decode": partial(DecodeWorker, config=self.config.decode),
        }
        self.replicas: list[WorkerReplica] = []

    async def start(self) -> None:
        # No change of a role comes to nothing because this machine is busy.
        for name in ("CLEAR_S", "STOP_S", "START_S"):
            self._patience.enter_context(mock.patch.object(worker_replica, name, HANGS_S))
        await super().start()

    async def add_prefill(self, **engine: str) -> PrefillWorker:
        worker = (await self.add_replica("prefill", self.roles, **engine)).worker
        assert isinstance(worker, PrefillWorker)
        return worker

    async def add_decode(self, **engine: str) -> DecodeWorker:
        worker = (await self.add_replica("decode", self.roles, **engine)).worker
        assert isinstance(worker, DecodeWorker)
        return worker

    async def add_replica(self, role: Role, roles: Mapping[Role, WorkerRole], **changes: str) -> WorkerReplica:
        defaults = EngineConfig(
            model_ref=self.config.model_ref,
            model_name=MODEL,
            dtype="float32",
            block_size=16,
            kv_blocks=512,
            num_threads=1,
        )
        model = changes.get("model_name", MODEL)

        def kit(name: str, ref: str) -> ModelKit:
            def tiers(role: Role) -> WorkerTiers:
                options = self.config.prefill_engine if role == "prefill" else self.config.decode_engine
                engine = replace(defaults, **{**options, "model_name": name, "model_ref": ref})  # type: ignore[arg-type]
                return WorkerTiers(self._tiers_config, engine, self.secret)

            return ModelKit(roles=roles, tiers=tiers, transfer=self.config.transfer)

        refs = {MODEL: self.config.model_ref, **self.config.others}
        kits = {name: kit(name, ref) for name, ref in refs.items()}
        site = ReplicaSite(name=secrets.token_hex(4), node_id="node", host="127.0.0.1", secret=self.secret)
        replica = WorkerReplica(role, model, kits, site, self.locate)
        try:
            await replica.start()
        except BaseException:
            await replica.stop(0.0)  # as Serve does with whom it could not start
            raise
        self.replicas.append(replica)
        self.update()
        return replica

    async def change(self, replica: WorkerReplica, role: Role, drain_s: float = HANGS_S, model: str = "") -> None:
        """Until it has the other role, or model, and the gateway is connected to it."""
        assert replica.change_role(role, drain_s, model)
        await self.changed(replica)

    async def changed(self, replica: WorkerReplica) -> None:
        await asyncio.wait_for(replica.changed(), HANGS_S)
        assert replica.is_healthy, "it did not become the other, see the log"
        self.update()
        await self.ready()

    async def stop(self) -> None:
        with self._patience:  # to the end: who stops may be amid a change
            await self.orchestrator.stop()
            for replica in self.replicas:
                await replica.stop(0.0)
            await self.scheduler.stop()

    def update(self) -> None:
        self.models = [replica.model for replica in self.replicas]
        workers = [replica.worker for replica in self.replicas]
        self.prefills = [worker for worker in workers if isinstance(worker, PrefillWorker)]
        self.decodes = [worker for worker in workers if isinstance(worker, DecodeWorker)]


@asynccontextmanager
async def replica_cluster(model: SmallModel, **config: object) -> AsyncIterator[ReplicaCluster]:
    """Two replicas of each role unless told otherwise; nothing may be held when the test is over."""
    sizes = {"num_prefill": 2, "num_decode": 2} | config
    with TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        cluster = ReplicaCluster(MiniClusterConfig(model_ref=str(model.folder), **sizes), folder)  # type: ignore[arg-type]
        try:
            await cluster.start()
            yield cluster
            cluster.update()
            await cluster.idle()
        finally:
            await cluster.stop()
