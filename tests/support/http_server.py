"""The HTTP application in this process: under a real uvicorn in a thread, or on the loop of the test."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn

from cluster.batch.database import Database
from cluster.batch.lines import LINE_ENVELOPE
from cluster.batch.service import BatchService
from cluster.config.settings import GatewaySettings
from cluster.gateway.adapter_folder import AdapterFolder
from cluster.gateway.orchestrator import Orchestrator
from cluster.gateway.timeline import RequestTimeline
from cluster.http.api import Api, HttpLimits
from cluster.http.app import create_app
from cluster.http.endpoints.batches import running_batches
from cluster.http.served_model import ServedModel
from cluster.http.server.connection import TimedProtocol
from cluster.metrics.requests import Metrics
from cluster.metrics.slo import SloMetrics
from cluster.slo.account import SloAccount
from cluster.slo.classes import NO_TARGETS, SloConfig
from engine.checkpoint.pooling import CheckpointPooling
from engine.text.formats import ReasoningFormatName
from engine.text.tokenizer import Tokenizer
from tests.support.openai_conformance import Target
from tests.support.scripted_generator import EMBEDDING_SIZE, ScriptedGenerator
from tests.support.waiting import HANGS_S

MODEL = "smollm2-135m-instruct"
LIMITS = HttpLimits()


def scripted_api(
    generator: ScriptedGenerator | Orchestrator,
    tokenizer: Tokenizer,
    settings: GatewaySettings | None = None,
    slo: SloConfig = NO_TARGETS,
    on_ended: Callable[[RequestTimeline], None] = lambda timeline: None,
    limits: HttpLimits = LIMITS,
    reasoning_format: ReasoningFormatName = "auto",
    storage: Path | None = None,
    adapters: AdapterFolder | None = None,
    others: Sequence[ServedModel] = (),
) -> Api:
    settings = settings or GatewaySettings()
    models = [
        ServedModel(
            name=MODEL,
            tokenizer=tokenizer,
            pooling=CheckpointPooling(size=EMBEDDING_SIZE),
            limits=generator.limits,
            reasoning_format=reasoning_format,
            adapters=adapters,
        ),
        *others,
    ]
    account = SloAccount(slo, models=[model.name for model in models])
    metrics = Metrics()
    metrics.registry.register(SloMetrics(account, "gateway-1"))
    return Api(
        generator=generator,
        cluster=generator.scheduler if isinstance(generator, Orchestrator) else generator,
        models=models,
        settings=settings,
        metrics=metrics,
        slo=account,
        secret=b"a secret of the cluster",
        limits=limits,
        on_ended=on_ended,
        batches=None
        if storage is None
        else BatchService(Database(storage), settings.storage_budget, settings.max_body_bytes + LINE_ENVELOPE),
    )


@asynccontextmanager
async def clients_of(api: Api) -> AsyncIterator[tuple[openai.AsyncOpenAI, httpx.AsyncClient]]:
    """OpenAI's client, and one for what that has no words for; on this loop, without sockets."""
    transport = httpx.ASGITransport(create_app(api))
    http = httpx.AsyncClient(transport=transport, base_url="http://gateway")
    inside: Any = httpx.AsyncClient(transport=transport)  # openai's own is of a newer httpx
    url = "http://gateway/v1"
    async with http, openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, http_client=inside) as client:
        yield client, http


@contextmanager
def running_server(
    generator: ScriptedGenerator,
    tokenizer: Tokenizer,
    settings: GatewaySettings | None = None,
    slo: SloConfig = NO_TARGETS,
    send_buffer_bytes: int | None = None,
    on_ended: Callable[[RequestTimeline], None] = lambda timeline: None,
    limits: HttpLimits = LIMITS,
    reasoning_format: ReasoningFormatName = "auto",
    storage: Path | None = None,
    adapters: AdapterFolder | None = None,
    others: Sequence[ServedModel] = (),
) -> Iterator[Target]:
    """A server on a port of its own, and clients for it. The kernel holds `send_buffer_bytes` for each client, or as
    much as it likes. Files and batches: in the folder `storage`, or none."""
    app = create_app(
        scripted_api(generator, tokenizer, settings, slo, on_ended, limits, reasoning_format, storage, adapters, others)
    )
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)  # inherited by what it accepts
    server = uvicorn.Server(uvicorn.Config(app, http=TimedProtocol, log_level="warning", loop="uvloop", lifespan="off"))

    async def serve() -> None:
        async with running_batches(app):
            await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    root = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with (
            openai.OpenAI(base_url=f"{root}/v1", api_key="unused", max_retries=0, timeout=HANGS_S) as client,
            httpx.Client(base_url=root, timeout=HANGS_S) as http,
        ):
            yield Target(client=client, http=http, model=MODEL)
    finally:
        server.should_exit = True
        thread.join(timeout=HANGS_S)
        listener.close()
        assert not thread.is_alive(), "the server did not stop"
