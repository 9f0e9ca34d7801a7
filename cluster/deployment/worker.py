"""A worker replica as a Ray Serve deployment: translates Serve's life cycle and nothing else."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Awaitable, Callable, Sequence

import ray
from pydantic import SecretBytes
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.config.load import cluster_secret
from cluster.config.settings import LegatoConfig
from cluster.deployment.announce import log_with_serve, starting
from cluster.deployment.ray_access import keep_replica_on_loopback
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Endpoint

logger = logging.getLogger(__name__)

DRAIN_S = 20.0  # shorter than Serve's graceful_shutdown_timeout_s, which `cluster.app` sets


class WorkerDeployment:
    """A replica, which is one worker: at first of its pool's role and model. Requests reach it over its own port,
    without Serve. `others`: a configuration for each other model."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        role: Role,
        config: LegatoConfig,
        others: Sequence[LegatoConfig],
        drawn_secret: SecretBytes | None,
        scheduler: DeploymentHandle,
    ) -> None:
        log_with_serve(config.log_level)
        keep_replica_on_loopback()
        # Read by torch at its first allocation: huge pages for weights and KV are worth 4 to 10 % of a decode step.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        # Read with torch: a thread that waits for the others of its step looks for some 80 us before it sleeps. By
        # default it is 3 ms, in which those that send a step's tokens wait for its core.
        os.environ.setdefault("GOMP_SPINCOUNT", "8000")
        # These import torch, which gateways and whoever starts the application do without.
        from cluster.config.build import worker_replica
        from kv_transfer.worker.replica import ReplicaSite

        with starting(f"a {role} worker", logger):
            site = ReplicaSite(
                name=f"{serve.get_replica_context().replica_id.unique_id}-{os.getpid()}",
                node_id=ray.get_runtime_context().get_node_id(),
                host=resolve_host(config.network.host),
                secret=cluster_secret(drawn_secret),
            )
            gc.freeze()  # what libraries have made stays: who gives up a model need not look through it for cycles
            self._replica = worker_replica(role, config, others, site, locator(scheduler))
            await self._replica.start()

    async def check_health(self) -> None:
        """Raises RuntimeError if the worker is not healthy.
        Serve calls this, and replaces the replica after repeated failures."""
        if not self._replica.is_healthy:
            raise RuntimeError(
                f"the {self._replica.role} worker's step loop has ended or fails repeatedly, or a change of its role"
                " failed; see its log"
            )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The scheduler's advice for the size of this worker's pool, which the pool's autoscaling policy follows: see
        `cluster.autoscaling.serve_policy`."""
        target = self._replica.pool_target()
        return {} if target is None else {"wanted": float(target)}

    async def __del__(self) -> None:
        """Finish what runs here, as far as time allows, and stop. Serve calls this for a graceful shutdown."""
        if hasattr(self, "_replica"):  # else the constructor raised before it was made
            await self._replica.stop(DRAIN_S)


def locator(scheduler: DeploymentHandle) -> Callable[[], Awaitable[Endpoint]]:
    """A function that asks Serve where the scheduler listens. It may raise any error of Ray's, Serve's or gRPC's."""

    async def locate() -> Endpoint:
        endpoint: Endpoint = await scheduler.endpoint.remote()
        return endpoint

    return locate


def resolve_host(host: str) -> str:
    """The address to listen on, on this node: `host`, or this node's own where the configuration says `node`."""
    return ray.util.get_node_ip_address() if host == "node" else host
