"""`PrefillWorker` as a Ray Serve deployment: translates Serve's life cycle and nothing else."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from engine.loading import EngineConfig
from kv_transfer.block_events import BlockEventLog
from kv_transfer.messages import Endpoint
from kv_transfer.tiers.tiers_config import TiersConfig
from kv_transfer.tiers.worker_tiers import WorkerTiers
from kv_transfer.transfer_config import TransferConfig
from kv_transfer.worker_port import worker_identity
from prefill_workers.worker import PrefillWorker, PrefillWorkerConfig


class PrefillDeployment:
    """One replica is one worker. Requests reach it over its own port, not through Serve."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        engine: EngineConfig,
        worker: PrefillWorkerConfig,
        tiers: TiersConfig,
        transfer: TransferConfig,
        secret: bytes,
        scheduler: DeploymentHandle,
    ) -> None:
        # Read by torch at its first allocation: huge pages for weights and KV are worth 4 to 10 % of a decode step.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

        async def locate_scheduler() -> Endpoint:
            endpoint: Endpoint = await scheduler.endpoint.remote()
            return endpoint

        self._tiers = WorkerTiers(tiers, engine, secret)
        model = await asyncio.to_thread(self._tiers.load)
        identity = worker_identity(
            model,
            worker_id=f"prefill-{serve.get_replica_context().replica_id.unique_id}-{os.getpid()}",
            node_id=ray.get_runtime_context().get_node_id(),
            secret=secret,
        )
        self._drain_s = worker.drain_s
        if worker.host == "node":
            worker = replace(worker, host=ray.util.get_node_ip_address())
        transport = transfer.open(identity, worker.host)
        events = BlockEventLog(identity.worker_id, layer_groups=model.layout.num_layer_groups)
        self._worker = PrefillWorker(
            model,
            worker,
            identity,
            transport,
            locate_scheduler,
            lower_tiers=self._tiers.open(model, events),
            events=events,
        )
        await self._worker.start()

    async def check_health(self) -> None:
        """Called by Serve, which replaces the replica after repeated failures."""
        if not self._worker.healthy:
            raise RuntimeError("the prefill worker's step loop has ended or fails repeatedly; see its log")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the pool's autoscaling policy goes by: prompt tokens that wait."""
        return {"load": float(self._worker.snapshot().queued_prefill_tokens)}

    async def __del__(self) -> None:
        """Serve's graceful shutdown: finish what is here, as far as time allows."""
        await self._worker.drain(self._drain_s)
        await self._worker.stop()
        await self._tiers.close()
