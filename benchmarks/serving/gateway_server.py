"""The gateway's HTTP application in a process of its own, on one core: `python -m benchmarks.serving.gateway_server
'<JSON>'`.

Prints its port as a line of JSON; serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import uvicorn
import uvloop

from benchmarks.common.workload import MODEL
from benchmarks.transfer.handoff_worker import NODE_ID, SECRET_VARIABLE
from cluster.config.settings import GatewaySettings
from cluster.errors import NotFoundError
from cluster.gateway.generator import AnswerGateway, ClusterView, ConnectionState, Generator, ServingLimits, Tokens
from cluster.gateway.orchestrator import Orchestrator, OrchestratorConfig
from cluster.gateway.timeline import SequenceTimeline
from cluster.http.api import Api
from cluster.http.app import create_app
from cluster.http.served_model import ServedModel
from cluster.http.server.connection import prepare_server
from cluster.metrics.requests import Metrics
from cluster.slo.account import SloAccount
from engine.checkpoint.pooling import CheckpointPooling
from engine.checkpoint.store import resolve_model
from engine.text.tokenizer import Tokenizer
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Endpoint, RequestSpec, TokenEvent
from kv_transfer.messages.workers import KnownWorker, LoadingReport
from kv_transfer.transports.base import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOrder:
    """`scheduler_port` None: tokens come from a generator in the process, as fast as it is asked."""

    scheduler_port: int | None
    cpu: int


class _FullSpeed:
    """A `Generator` whose next token is there in the next turn of the event loop, and a `ClusterView` of nothing."""

    pools: ClassVar[dict[str, dict[Role, int]]] = {}

    gateway: ClassVar[str] = "gateway"

    def answer_gateways(self, about: str, answer: AnswerGateway) -> None:
        pass

    async def ask_gateways(
        self, about: str, question: bytes, *, one_is_enough: bool = False
    ) -> dict[str, bytes | None]:
        return {}

    async def decisions(self, limit: int, *, as_text: bool) -> list[str]:
        return []

    def describe_workers(self) -> list[dict[str, object]]:
        return []

    def reports(self) -> list[KnownWorker]:
        return []

    def connection_states(self) -> dict[str, ConnectionState]:
        return {}

    @property
    def loading(self) -> list[LoadingReport]:
        return []

    def limits(self, model: str = "") -> ServingLimits:
        return ServingLimits(max_model_len=8_192, ready=True)

    async def change_role(self, worker_id: str, role: Role, drain_s: float, model: str = "") -> None:
        raise NotFoundError("There are no workers here.")

    async def generate(
        self, request: RequestSpec, timeline: SequenceTimeline | None = None
    ) -> AsyncGenerator[Tokens, None]:
        timeline = timeline or SequenceTimeline()
        for index in range(request.params.max_tokens):
            await asyncio.sleep(0)
            token = TokenEvent(
                request_id=request.request_id,
                attempt=request.attempt,
                index=index,
                token_id=1_000 + index * 31 % 997,
                finish_reason="length" if index + 1 == request.params.max_tokens else None,
            )
            timeline.token(time.monotonic())
            yield [token]


async def _serve(order: ServerOrder) -> None:
    if order.scheduler_port is None:
        full_speed = _FullSpeed()
        await _serve_http(full_speed, full_speed)
        return
    endpoint = Endpoint(host="127.0.0.1", port=order.scheduler_port, node_id=NODE_ID)

    async def locate_scheduler() -> Endpoint:
        return endpoint

    secret = bytes.fromhex(os.environ[SECRET_VARIABLE])
    identity = Identity(worker_id="gateway", node_id=NODE_ID, secret=secret, compatibility={})
    orchestrator = Orchestrator(identity, OrchestratorConfig(), locate_scheduler)
    orchestrator.start()
    await _serve_http(orchestrator, orchestrator.scheduler)
    await orchestrator.stop()


async def _serve_http(generator: Generator, cluster: ClusterView) -> None:
    settings = GatewaySettings(max_concurrent=2_048)
    model = ServedModel(
        name=MODEL,
        tokenizer=Tokenizer(resolve_model(MODEL)),
        pooling=CheckpointPooling(size=1),
        limits=partial(generator.limits, MODEL),
    )
    api = Api(
        generator=generator,
        cluster=cluster,
        models=[model],
        settings=settings,
        metrics=Metrics(),
        slo=SloAccount(models=[MODEL]),
        secret=b"",
    )
    gc.collect()
    gc.freeze()  # as a gateway does
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        # The kernel's default may be one that spreads packets over time, which would be taken for the gateway's.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        server = uvicorn.Server(uvicorn.Config(create_app(api), log_level="warning", lifespan="off", access_log=False))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        server.should_exit = True
        await serving


def main() -> None:
    order = ServerOrder(**json.loads(sys.argv[1]))
    os.sched_setaffinity(0, {order.cpu})
    prepare_server()
    uvloop.run(_serve(order))


if __name__ == "__main__":
    main()
