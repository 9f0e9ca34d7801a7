"""Several gateways of one cluster: whichever is asked tells of the requests of all."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from cluster.gateway import scheduler_client
from cluster.gateway.orchestrator import Orchestrator, OrchestratorConfig
from cluster.http.app import create_app
from cluster.http.board import picture
from cluster.http.board.picture import Observer
from cluster.http.other_gateways import MAX_ROWS, NEWEST, ONE
from cluster.scheduler.server import ModelRules, SchedulerServer
from engine.text.tokenizer import Tokenizer
from kv_transfer.messages.requests import Endpoint
from kv_transfer.transports.base import Identity
from tests.support.http_server import MODEL, scripted_api
from tests.support.openai_conformance import PROMPT
from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.waiting import HANGS_S, eventually

pytestmark = pytest.mark.model


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gateway counts as silent because this machine is busy."""
    monkeypatch.setattr(scheduler_client, "GATEWAYS_TIMEOUT_S", HANGS_S)


class Gateway:
    """Its tokens are scripted; its line to the scheduler is real."""

    def __init__(self, name: str, secret: bytes, scheduler: Endpoint, tokenizer: Tokenizer) -> None:
        async def locate() -> Endpoint:
            return scheduler

        identity = Identity(worker_id=name, node_id="node", secret=secret, compatibility={})
        self.name = name
        self.orchestrator = Orchestrator(identity, OrchestratorConfig(), locate)
        self.generator = ScriptedGenerator(tokenizer)
        self.api = scripted_api(self.generator, tokenizer)
        self.api.cluster = self.orchestrator.scheduler
        self.app: FastAPI = create_app(self.api)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://gateway")

    async def complete(self, **fields: Any) -> str:
        """The request's id."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, **fields}
        answer = await self.http.post("/v1/completions", json=body)
        return str(answer.raise_for_status().json()["id"])

    async def get(self, path: str, status: int = 200, **params: Any) -> Any:
        answer = await self.http.get(path, params=params)
        assert answer.status_code == status, answer.text
        return answer.json()

    @property
    def is_connected(self) -> bool:
        return self.orchestrator.scheduler.connection is not None


@dataclass
class Cluster:
    tokenizer: Tokenizer
    stack: AsyncExitStack
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    async def start(self) -> None:
        identity = Identity(worker_id="scheduler", node_id="node", secret=self.secret, compatibility={})
        self.scheduler = SchedulerServer({MODEL: ModelRules()}, identity)
        self.endpoint = await self.scheduler.start("127.0.0.1")
        self.stack.push_async_callback(self.scheduler.stop)

    async def gateway(self, name: str) -> Gateway:
        gateway = Gateway(name, self.secret, self.endpoint, self.tokenizer)
        self.stack.push_async_callback(gateway.http.aclose)
        gateway.orchestrator.start()
        self.stack.push_async_callback(gateway.orchestrator.stop)
        await eventually(lambda: gateway.is_connected)
        return gateway


@asynccontextmanager
async def cluster_of(tokenizer: Tokenizer) -> AsyncIterator[Cluster]:
    async with asyncio.timeout(HANGS_S), AsyncExitStack() as stack:
        cluster = Cluster(tokenizer, stack)
        await cluster.start()
        yield cluster


async def test_a_request_is_found_at_each_gateway(tokenizer: Tokenizer) -> None:
    async with cluster_of(tokenizer) as cluster:
        first, second = [await cluster.gateway(name) for name in ("gateway-a", "gateway-b")]
        here, there = await first.complete(), await second.complete(n=2)
        for asked in (first, second):
            for request_id, name in ((here, "gateway-a"), (there, "gateway-b")):
                told = await asked.get(f"/cluster/requests/{request_id}")
                assert (told["id"], told["gateway"], told["outcome"]) == (request_id, name, "finished")
                assert sum(part["seconds"] for part in told["parts"]) == pytest.approx(told["total_s"], abs=1e-6)
            listed = await asked.get("/cluster/requests")
            assert [(row["id"], row["gateway"]) for row in listed["requests"]] == [
                (there, "gateway-b"),
                (here, "gateway-a"),
            ]
            assert listed["gateway"] == asked.name and listed["gateways"] == ["gateway-a", "gateway-b"]
            assert listed["silent"] == []
            assert len((await asked.get("/cluster/requests", limit=1))["requests"]) == 1
            own = await asked.get("/cluster/requests", scope="gateway")
            assert [row["gateway"] for row in own["requests"]] == [asked.name]
        assert (await first.get(f"/cluster/requests/{there}", choice=1))["choice"] == 1
        assert (await first.get(f"/cluster/requests/{there}-1"))["id"] == there
        assert (await first.get(f"/cluster/requests/{there}", 400, choice=2))["error"]["param"] == "choice"
        text = await first.http.get(f"/cluster/requests/{there}", params={"format": "text"})
        assert text.text.startswith(there)
        error = (await first.get("/cluster/requests/cmpl-unknown", 404))["error"]
        assert "among the 1 that this gateway keeps, nor at the 1 other that answered" in error["message"]


async def test_of_others_a_list_has_so_many(tokenizer: Tokenizer) -> None:
    async with cluster_of(tokenizer) as cluster:
        first, second = [await cluster.gateway(name) for name in ("gateway-a", "gateway-b")]
        timelines = [await second.complete(max_tokens=1)]
        (kept,) = second.api.recent.newest(1)
        for number in range(MAX_ROWS + 1):
            kept.request_id = f"cmpl-{number}"
            second.api.recent.ended(kept)
        assert timelines and len((await first.get("/cluster/requests", limit=1_000))["requests"]) == MAX_ROWS


async def test_one_that_is_gone_or_silent_is_left_out(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster_of(tokenizer) as cluster:
        first, second, third = [await cluster.gateway(name) for name in ("gateway-a", "gateway-b", "gateway-c")]
        there = await second.complete()
        hung = asyncio.Event()

        async def hang(question: bytes) -> bytes:
            hung.set()
            await asyncio.get_running_loop().create_future()
            return b""

        for about in (ONE, NEWEST):
            third.orchestrator.scheduler.answer_gateways(about, hang)
        # Nobody waits for the others once one has it: not for as long as the hung one would take.
        assert (await first.get(f"/cluster/requests/{there}"))["gateway"] == "gateway-b"
        await hung.wait()
        monkeypatch.setattr(scheduler_client, "GATEWAYS_TIMEOUT_S", 0.2)
        listed: dict[str, Any] = {"silent": []}
        while listed["silent"] != ["gateway-c"]:  # the other one may be late, too, where all of this is
            listed = await first.get("/cluster/requests")
        assert listed["gateways"] == ["gateway-a", "gateway-b", "gateway-c"]
        said = ""
        while "1 of 3 gateways did not answer" not in said:
            said = (await first.get("/cluster/requests/cmpl-unknown", 404))["error"]["message"]
        for gone in (second, third):
            await gone.orchestrator.stop()
        while listed["gateways"] != ["gateway-a"]:
            listed = await first.get("/cluster/requests")
        assert (listed["silent"], listed["requests"]) == ([], [])
        await cluster.scheduler.stop()
        await eventually(lambda: not first.is_connected)
        assert (await first.get("/cluster/requests"))["gateways"] == ["gateway-a"]


async def test_the_board_shows_requests_of_all(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster_of(tokenizer) as cluster:
        first, second = [await cluster.gateway(name) for name in ("gateway-a", "gateway-b")]
        monkeypatch.setattr(picture, "SLOW_S", 0.0)
        here = await first.complete()
        second.generator.script = Script(hang_after=1)
        asking = asyncio.create_task(second.complete())
        await eventually(lambda: len(second.api.recent))
        (running,) = second.api.recent.newest(1)
        observer = Observer(first.api)
        shown: dict[str, Any] = {}

        async def both_are_shown() -> None:
            while not shown.get("requests", {}).keys() >= {here, running.request_id}:
                shown.update(await observer.observe())
                await asyncio.sleep(0)

        await both_are_shown()
        assert (shown["gateways"], shown["silent"]) == (2, 0)
        row = shown["requests"][running.request_id]
        assert "end" not in row and row["at"] == round(running.arrived_at, 3), "by one clock, as of one machine"
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        while "end" not in shown["requests"][running.request_id]:
            shown.update(await observer.observe())
            await asyncio.sleep(0)
        monkeypatch.setattr(scheduler_client, "GATEWAYS_TIMEOUT_S", 0.2)  # who is asked as it stops never answers
        observer.forget()

        async def so_many_are_shown(number: int) -> None:
            while shown["gateways"] != number:
                shown.update(await observer.observe())
                await asyncio.sleep(0)

        for number in (1, 2):
            await so_many_are_shown(number)
        await second.orchestrator.stop()
        await so_many_are_shown(1)
        assert shown["requests"].keys() == {here}


def test_rows_of_another_machine_are_moved_to_this_ones_clock() -> None:
    row = {"at": 1.0, "end": 3.0, "marks": [[1.0, "queue", ""], [2.0, "decode", "d0"]], "tokens": 3}
    assert picture.moved_row(row, 100.5) == {
        "at": 101.5,
        "end": 103.5,
        "marks": [(101.5, "queue", ""), (102.5, "decode", "d0")],
        "tokens": 3,
    }
