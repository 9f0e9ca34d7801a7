"""Wires Legato into one Ray Serve application. Decides nothing: every number comes from the configuration.

`serve run ray_configs/<file>.yaml` calls `build` with the file's `args`, and `serve run cluster.app:build model=NAME`
with what is typed.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import ray
from fastapi import FastAPI
from pydantic import SecretBytes
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from ray.util.metrics import Gauge as RayGauge

from cluster.autoscaling.serve_policy import autoscaling_config, present_sizes
from cluster.batch.database import Database
from cluster.batch.lines import LINE_ENVELOPE
from cluster.batch.service import BatchService
from cluster.config.load import cluster_secret, draw_secret, load_config
from cluster.config.settings import SCHEDULER_CPUS, LegatoConfig
from cluster.deployment.announce import (
    announce_when_ready,
    describe_start,
    is_first_replica,
    log_with_serve,
    say,
    starting,
)
from cluster.deployment.capacity import live_nodes, pool_name, require_room, sizes_at_start
from cluster.deployment.ray_access import keep_replica_on_loopback, require_token
from cluster.deployment.worker import WorkerDeployment, locator, resolve_host
from cluster.gateway.generator import ServingLimits
from cluster.gateway.layout_study import LayoutStudy
from cluster.gateway.orchestrator import Orchestrator, OrchestratorConfig
from cluster.gateway.request_log import RequestRecorder, log_of_model
from cluster.gateway.timeline import RequestTimeline
from cluster.http.api import Api, HttpLimits
from cluster.http.app import create_app
from cluster.http.endpoints.batches import running_batches
from cluster.http.served_model import ServedModel
from cluster.http.server.connection import prepare_server
from cluster.metrics.ray_export import RayExport, ray_collects
from cluster.metrics.requests import Metrics, RunMetrics
from cluster.metrics.slo import SloMetrics
from cluster.metrics.traces import trace_exporter
from cluster.metrics.workers import WorkerMetrics
from cluster.slo.account import SloAccount
from engine.checkpoint.builtin_models import BUILTIN_MODELS
from engine.checkpoint.pooling import CheckpointPooling
from engine.checkpoint.store import resolve_model
from engine.sampling.params import checkpoint_defaults, told_defaults
from engine.text.tokenizer import Tokenizer
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Endpoint
from kv_transfer.transports.base import Identity

if TYPE_CHECKING:
    from cluster.gateway.adapter_folder import AdapterFolder

logger = logging.getLogger(__name__)

# Gateways and workers have their own limits, which answer in OpenAI's shape; Serve's must not get there first.
UNLIMITED = 1_000_000


def build(args: dict[str, Any]) -> Application:
    """The Serve application for a configuration tree (see `cluster.config.settings`). Raises ConfigError."""
    with starting("the application"):
        config = load_config(args)
        sizes: dict[str, int] = {}
        if ray.is_initialized():  # `serve run cluster.app:build` builds first and starts Ray then
            nodes = live_nodes()
            require_room(config, nodes)
            sizes = sizes_at_start(config, nodes, present_sizes(args))
        require_token(config)
        describe_start(config, sizes)
        for served in config.served:
            if served.model.ref in BUILTIN_MODELS:
                resolve_model(served.model.ref)  # here, so that the download is seen, and once for all that start then
        return build_application(config, sizes)


def build_application(config: LegatoConfig, sizes: Mapping[str, int] = MappingProxyType({})) -> Application:
    """Bind the deployments of a configuration: gateways, the scheduler and the pools of workers. `sizes`: how many
    workers pools that scale begin with (see `sizes_at_start`), where it is not `replicas`. Raises ConfigError."""
    logging.basicConfig(level=config.log_level)
    drawn_secret = draw_secret()
    scheduler = Scheduler.options(  # type: ignore[attr-defined]
        num_replicas=1,
        ray_actor_options={"num_cpus": SCHEDULER_CPUS},
        health_check_period_s=2,
        graceful_shutdown_timeout_s=2,
    ).bind(config, drawn_secret, config.network.host)
    pools = []
    for served in config.served:
        others = [other for other in config.served if other.model.name != served.model.name]
        roles: list[Role] = ["decode"] if served.is_colocated else ["prefill", "decode"]
        for role in roles:
            name = pool_name(role, config, served)
            pools.append(worker_pool(name, role, served, others, drawn_secret, scheduler, sizes))
    gateway = Gateway.options(  # type: ignore[attr-defined]
        num_replicas=config.gateway.replicas,
        max_ongoing_requests=UNLIMITED,
        ray_actor_options={"num_cpus": config.gateway.num_cpus},
        graceful_shutdown_timeout_s=20,
    )
    application: Application = gateway.bind(config, drawn_secret, scheduler, pools)
    return application


def worker_pool(
    name: str,
    role: Role,
    config: LegatoConfig,
    others: Sequence[LegatoConfig],
    drawn_secret: SecretBytes | None,
    scheduler: Application,
    sizes: Mapping[str, int],
) -> Application:
    """Bind the pool of workers of one model that are started in this role, as the deployment `name`: how many there
    are, and each one's share of the machine. `others`: a configuration for each other model. `sizes`: see
    `build_application`."""
    settings = config.prefill if role == "prefill" else config.decode
    scaling = settings.autoscaling
    size: dict[str, Any] = (
        {"num_replicas": settings.replicas}
        if scaling is None
        else {"autoscaling_config": autoscaling_config(scaling, sizes.get(name, settings.replicas))}
    )
    deployment = serve.deployment(WorkerDeployment).options(
        name=name,
        **size,
        max_ongoing_requests=UNLIMITED,
        ray_actor_options={
            "num_cpus": settings.num_cpus,
            "num_gpus": settings.num_gpus,
            "resources": dict(settings.resources),
        },
        health_check_period_s=2,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=30,
    )
    pool: Application = deployment.bind(role, config, others, drawn_secret, scheduler)
    return pool


@serve.deployment(name="GlobalScheduler")
class Scheduler:
    """The one global scheduler. Others ask its Serve handle for its address, and speak to it over its own port."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: LegatoConfig, drawn_secret: SecretBytes | None, host: str
    ) -> None:
        # Gateways, which import this module, too, do without.
        from cluster.config.build_scheduler import scheduler_server

        log_with_serve(config.log_level)
        keep_replica_on_loopback()
        _settle_heap()
        self._server = scheduler_server(config, control_identity("scheduler", cluster_secret(drawn_secret)))
        await self._server.start(resolve_host(host))

    async def endpoint(self) -> Endpoint:
        return self._server.endpoint

    async def check_health(self) -> None:
        if not self._server.is_healthy:
            raise RuntimeError("the global scheduler's housekeeping has ended; see its log")

    async def __del__(self) -> None:
        await self._server.stop()


@serve.deployment(name="Gateway")
@serve.ingress()
class Gateway:
    """A gateway: takes HTTP requests and answers them with tokens. It holds the worker pools' handles only so that they
    belong to the application."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: LegatoConfig,
        drawn_secret: SecretBytes | None,
        scheduler: DeploymentHandle,
        pools: list[DeploymentHandle],
    ) -> None:
        log_with_serve(config.log_level)
        keep_replica_on_loopback()
        prepare_server()
        secret = cluster_secret(drawn_secret)

        self._config = config
        self._identity = control_identity("gateway", secret)
        self._slo = SloAccount(config.slo_classes, models=[served.model.name for served in config.served])
        self._orchestrator = Orchestrator(
            self._identity,
            config.tuned(OrchestratorConfig(request_deadline_s=config.gateway.request_deadline_s)),
            locator(scheduler),
            self._slo.on_report,
        )
        self._orchestrator.start()
        self._slo.start(self._orchestrator.scheduler.publish_slo)
        self._metrics = self._all_metrics(config)
        self._recorders: list[RequestRecorder] = []
        self._traces = trace_exporter(self._metrics.registry, self._identity.worker_id)
        self._exporting: asyncio.Task[None] | None = None
        if config.gateway.metrics_to_ray and ray_collects():
            exporting = RayExport(self._metrics.registry, RayGauge).run()
            self._exporting = asyncio.create_task(exporting, name="metrics-to-ray")
        if is_first_replica():
            self._announcing = asyncio.create_task(announce_when_ready(self._is_ready, config.names))

    def _is_ready(self) -> bool:
        limits = [self._orchestrator.limits(served.model.name) for served in self._config.served]
        return all(found is not None and found.ready for found in limits)

    def _on_ended(self, config: LegatoConfig) -> Callable[[RequestTimeline], None]:
        """The function that passes each request that has ended on to the request log and to the maker of spans, where
        there are any."""
        told = [] if self._traces is None else [self._traces.ended]
        if (log := config.gateway.request_log) is not None:
            for served in config.served:
                name = served.model.name
                recorder = RequestRecorder(
                    log_of_model(log, name) if config.models else Path(log),
                    config.slo_classes,
                    self._orchestrator.scheduler.reports,
                    model=name,
                    secret=self._identity.secret,
                    one_pool=served.workers is not None,
                    model_flips=config.scheduler.model_flips,
                    loading=lambda: self._orchestrator.scheduler.loading,
                )
                self._recorders.append(recorder)
                told.append(recorder.ended)

        def on_ended(timeline: RequestTimeline) -> None:
            for tell in told:
                tell(timeline)

        return on_ended

    def __serve_build_asgi_app__(self) -> Any:
        """Make the HTTP application. Serve calls this after the constructor."""
        with starting("a gateway", logger):
            return self._app(self._config)

    def _all_metrics(self, config: LegatoConfig) -> Metrics:
        metrics, orchestrator, scheduler = Metrics(), self._orchestrator, self._orchestrator.scheduler
        models = [served.model.name for served in config.served]
        metrics.registry.register(RunMetrics(orchestrator.runs.values, models, orchestrator.retries))
        least = {served.model.name: served.least_workers for served in config.served}
        workers = WorkerMetrics(scheduler.reports, lambda: scheduler.pools, least, lambda: scheduler.loading)
        metrics.registry.register(workers)
        metrics.registry.register(SloMetrics(self._slo, self._identity.worker_id))
        return metrics

    def _app(self, config: LegatoConfig) -> FastAPI:
        log = None if config.gateway.request_log is None or config.models else Path(config.gateway.request_log)
        api = Api(
            generator=self._orchestrator,
            cluster=self._orchestrator.scheduler,
            models=[served_model(served, self._orchestrator.limits) for served in config.served],
            settings=config.gateway,
            metrics=self._metrics,
            slo=self._slo,
            secret=self._identity.secret,
            limits=config.tuned(HttpLimits()),
            on_ended=self._on_ended(config),
            layouts=LayoutStudy(log),
            batches=_batch_service(config),
        )
        if is_first_replica():
            for model in api.models:
                if told := told_defaults(model.sampling):
                    say(f"{model.name}: {told}")
        app = create_app(api)
        self._batching = asyncio.create_task(_run_batches(app), name="batches")
        _settle_heap()
        return app

    async def __del__(self) -> None:
        if self._exporting is not None:
            self._exporting.cancel()
        self._batching.cancel()
        await asyncio.wait({self._batching})
        if self._traces is not None:
            await asyncio.to_thread(self._traces.stop)
        await asyncio.gather(*(asyncio.to_thread(recorder.stop) for recorder in self._recorders))
        await self._slo.stop()
        await self._orchestrator.stop()


def served_model(config: LegatoConfig, limits: Callable[[str], ServingLimits | None]) -> ServedModel:
    """The one model of a configuration, as a gateway serves it. `limits`: what the workers of a model, by its name, can
    do together. Raises ValueError if it cannot."""
    name = config.model.name
    folder = resolve_model(config.model.ref, backend=config.model.backend, with_weights=False)
    tokenizer = Tokenizer(folder)
    tokenizer.require_template_reads(config.model.chat_template_kwargs)
    return ServedModel(
        name=name,
        tokenizer=tokenizer,
        pooling=CheckpointPooling.from_folder(folder),
        limits=partial(limits, name),
        tool_format=config.model.tool_format,
        reasoning_format=config.model.reasoning_format,
        adapters=_adapter_folder(config, folder),
        sampling=checkpoint_defaults(folder) if config.model.generation_config == "auto" else {},
        chat_template_kwargs=config.model.chat_template_kwargs,
    )


def _batch_service(config: LegatoConfig) -> BatchService | None:
    """What keeps files, batches and responses, of all models in a folder of the first one's own: each line and each
    response says whose it is. None: no storage is configured."""
    settings = config.gateway
    if settings.storage is None:
        return None
    folder = Path(settings.storage).expanduser() / quote(config.served[0].model.name, safe="")
    return BatchService(Database(folder), settings.storage_budget, settings.max_body_bytes + LINE_ENVELOPE)


def _adapter_folder(config: LegatoConfig, model_folder: Path) -> AdapterFolder | None:
    settings = config.adapters
    if settings.folder is None:
        return None
    from cluster.gateway.adapter_folder import AdapterFolder  # brings torch, which gateways do without otherwise

    adapters = AdapterFolder.of(settings.folder, model_folder, config.model.backend, settings.max_rank)
    adapters.watch()
    return adapters


async def _run_batches(app: FastAPI) -> None:
    """Run the batches that clients leave, until cancelled."""
    async with running_batches(app):
        await asyncio.get_running_loop().create_future()


def control_identity(role: str, secret: bytes) -> Identity:
    """The identity by which this replica, a gateway or the scheduler, introduces itself on connections."""
    replica = serve.get_replica_context().replica_id.unique_id
    node_id = ray.get_runtime_context().get_node_id()
    return Identity(worker_id=f"{role}-{replica}-{os.getpid()}", node_id=node_id, secret=secret, compatibility={})


def _settle_heap() -> None:
    """Keep the garbage collector away from all objects that exist now. Call it once everything is loaded.

    A collection that looks through all libraries is a pause of a tenth of a second, and costs a gateway a third of its
    time. From now on it looks only through what comes later.
    """
    gc.collect()
    gc.freeze()
