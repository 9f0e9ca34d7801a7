"""Timelines over real workers, some of which die: the parts of each request sum to what its client saw."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from cluster.gateway.orchestrator import OrchestratorConfig
from cluster.gateway.timeline import PARTS, RequestTimeline
from cluster.http.app import create_app
from engine.text.tokenizer import Tokenizer
from tests.support.clusters.mini_cluster import MiniCluster, cluster_of
from tests.support.clusters.mini_requests import busy
from tests.support.http_server import MODEL, scripted_api
from tests.support.small_models import SmallModel, random_prompts
from tests.support.waiting import HANGS_S, eventually

pytestmark = pytest.mark.model

NUM_REQUESTS = 36
NUM_TOKENS = 24
MICROSECOND = 1e-6


@dataclass
class Client:
    """One request as a server would hand it to the application, and what its client's own clock says of it."""

    app: FastAPI
    prompt: list[int]
    stream: bool
    leaves_after: int | None = None  # messages of the answer
    asked_at: float = 0.0
    read_at: float | None = None  # when the application asked for the body: it knows of the request by then
    sent_at: list[float] = field(default_factory=list)  # each message of the answer, when it came
    over_at: float = 0.0
    request_id: str = ""

    async def ask(self) -> None:
        body = {
            "model": MODEL,
            "prompt": self.prompt,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "stream": self.stream,
        }
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
            "headers": [], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        has_left = asyncio.Event()

        async def receive() -> Any:
            if self.read_at is None:
                self.read_at = time.monotonic()
                return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.sent_at.append(time.monotonic())
            if message["type"] == "http.response.start":
                self.request_id = dict(message["headers"])[b"x-request-id"].decode()
            if len(self.sent_at) == self.leaves_after:
                has_left.set()

        self.asked_at = time.monotonic()
        async with asyncio.timeout(HANGS_S):
            await self.app(scope, receive, send)
        self.over_at = time.monotonic()

    def check(self, timeline: RequestTimeline) -> None:
        """Bounds by the client's clock that hold on a machine however busy, and exact sums between them."""
        parts = timeline.parts()
        assert all(part.name in PARTS and part.seconds > 0 for part in parts)
        assert sum(part.seconds for part in parts) == pytest.approx(timeline.total_s, abs=MICROSECOND)
        assert self.read_at is not None and timeline.ended_at is not None
        assert self.asked_at <= timeline.arrived_at <= self.read_at
        assert self.sent_at[-1] <= timeline.ended_at <= self.over_at
        if self.leaves_after is None:
            assert timeline.outcome == "finished" and timeline.num_tokens == NUM_TOKENS
        if not self.stream:
            return
        (sequence,) = timeline.sequences
        assert sequence.sent_at is not None
        assert self.sent_at[1] <= sequence.sent_at <= [*self.sent_at[2:], self.over_at][0], "the first byte of its text"
        until_first = [part.seconds for part in parts if part.start_s + part.seconds / 2 < (timeline.ttft_s or 0)]
        assert sum(until_first) == pytest.approx(timeline.ttft_s, abs=MICROSECOND)


async def test_parts_sum_to_what_clients_saw(llama: SmallModel, smollm2_folder: Path) -> None:
    """Through preemptions, the deaths of a prefill and of a decode worker, and clients that leave."""
    engine: dict[str, Any] = {"kv_blocks": 24, "block_size": 4}
    config = OrchestratorConfig(retry_delay_s=0.01)
    async with cluster_of(
        llama, num_prefill=2, num_decode=3, prefill_engine=engine, decode_engine=engine, orchestrator=config
    ) as cluster:
        api = scripted_api(cluster.orchestrator, Tokenizer(smollm2_folder))
        app = create_app(api)
        clients = [
            Client(app, prompt, stream=number % 4 != 0, leaves_after=6 if number % 12 == 5 else None)
            for number, prompt in enumerate(random_prompts([6 + number % 9 for number in range(NUM_REQUESTS)]))
        ]
        asking = [asyncio.create_task(client.ask()) for client in clients]
        await _kill_some(cluster, clients)
        await asyncio.gather(*asking)
        timelines = {timeline.request_id: timeline for timeline in api.recent.newest(NUM_REQUESTS)}
        assert len(timelines) == NUM_REQUESTS
        for client in clients:
            client.check(timelines[client.request_id])
    told = Counter(part.name for timeline in timelines.values() for part in timeline.parts())
    assert told["preempted"] > 0 and told["retry"] > 0, told
    causes = {part.cause for timeline in timelines.values() for part in timeline.parts() if part.name == "retry"}
    assert "fault" in causes


async def _kill_some(cluster: MiniCluster, clients: list[Client]) -> None:
    """A decode worker while it streams, then a prefill worker, but not under one who is tried for the first death: two
    losses would convict it."""
    await eventually(lambda: sum(len(client.sent_at) for client in clients) > 40 and any_busy(cluster))
    await cluster.remove(busy(cluster))
    await eventually(lambda: sum(len(client.sent_at) for client in clients) > 150 and not any_suspected(cluster))
    await cluster.remove(cluster.prefills[0])


def any_suspected(cluster: MiniCluster) -> bool:
    allows = cluster.orchestrator._quarantine.allows
    return any(run.alone or not allows(run) for run in cluster.orchestrator.runs.values())


def any_busy(cluster: MiniCluster) -> bool:
    return any(worker.gateway_of for worker in cluster.decodes)
