"""What clients hear of a failure tells nothing of the machines: reasons go to the log, under the request's id."""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from fastapi import FastAPI

from cluster.gateway.orchestrator import OrchestratorConfig
from cluster.http.app import create_app
from engine.sequence import SequenceKey
from engine.steps.runner import ModelRunner
from engine.text.tokenizer import Tokenizer
from kv_transfer.messages import Message
from kv_transfer.messages.requests import RequestSpec, Reserve, Start, TokenEvent
from kv_transfer.worker.port import GatewayId, GatewayPort, Registration
from tests.http.http_fuzz import Answer, Sent, call
from tests.support.clusters.mini_cluster import MiniCluster, cluster_of
from tests.support.clusters.worker_reports import worker_snapshot
from tests.support.http_server import MODEL, scripted_api
from tests.support.small_models import SmallModel
from tests.support.waiting import eventually

pytestmark = pytest.mark.model

ERRORS: Final[list[Exception]] = [
    RuntimeError(
        "CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA\n  at 0x7f31c0de"
    ),
    FileNotFoundError(2, "No such file or directory", "/srv/models/llama/model-00001-of-00004.safetensors"),
    ConnectionResetError(104, "Connection reset by peer 10.12.0.7:41873"),
    OSError(28, "No space left on device", "/dev/shm/legato-3f2a"),
    MemoryError("Unable to allocate 3.2 GiB for an array"),
    KeyError("decode-9f3a11c0"),
    AssertionError("lease 17 of decode-9f3a11c0 (pid 41233) is not held"),
    RecursionError('Traceback (most recent call last):\n  File "/opt/legato/engine/steps/runner.py", line 88, in run'),
    ValueError("prefill-77aa0b12 rejected the hand-off: [fe80::1%eth0]:5555"),
    UnicodeEncodeError("utf-8", "\udc80 /root/.cache/legato", 0, 1, "surrogates not allowed"),
]
# No path, address, pid, worker's id, exception's name or text, and no line but one.
FORBIDDEN: Final = re.compile(
    r"/\w+/|\d+\.\d+\.\d+|\[\w*:|:\d{4,}|0x|\bpid\b|(decode|prefill)-|Error|Exception|Traceback|File |CUDA|lease|errno|"
    r"Errno|device|surrogates|allocate|\n",
)


def text_of(error: Exception) -> str:
    return str(error).encode(errors="replace").decode()  # as frames carry it


class FailingWorker:
    """A decode worker whose requests fail, in every way that a worker can tell of."""

    def __init__(self, worker_id: str, cluster: MiniCluster, rng: random.Random) -> None:
        self.worker_id = worker_id
        self._cluster = cluster
        self._port = GatewayPort(cluster.identity(worker_id), on_message=self._on_message, on_lost=lambda gateway: None)
        self._rng = rng
        self._ways = [*[self._fail, self._end, self._refuse, self._never, self._fail_late] * 8, self._die]

    async def start(self) -> None:
        endpoint = await self._port.start("127.0.0.1")
        numbers = itertools.count(1)
        self._registration = Registration(
            self._cluster.identity(self.worker_id),
            replace(self._cluster.prefills[0].info, worker_id=self.worker_id, role="decode", endpoint=endpoint),
            locate_scheduler=self._cluster.locate,
            snapshot=lambda: worker_snapshot(self.worker_id, next(numbers)),
            period_s=0.1,
        )
        self._registration.start()

    async def stop(self) -> None:
        await self._registration.stop()
        await self._port.close("the test is over")

    def _on_message(self, gateway: GatewayId, message: Message) -> None:
        if isinstance(message, Reserve | Start):
            self._rng.choice(self._ways)(gateway, message.request, text_of(self._rng.choice(ERRORS)))

    def _fail(self, gateway: GatewayId, request: RequestSpec, reason: str) -> None:
        self._port.fail(gateway, SequenceKey(request.request_id, request.attempt), reason, retryable=True)

    def _end(self, gateway: GatewayId, request: RequestSpec, reason: str) -> None:
        self._port.fail(gateway, SequenceKey(request.request_id, request.attempt), reason, retryable=False)

    def _fail_late(self, gateway: GatewayId, request: RequestSpec, reason: str) -> None:
        index = len(request.output_token_ids)
        event = TokenEvent(request_id=request.request_id, attempt=request.attempt, index=index, token_id=5)
        self._port.emit(gateway, event)
        self._fail(gateway, request, reason)

    def _refuse(self, gateway: GatewayId, request: RequestSpec, reason: str) -> None:
        self._port.refuse(gateway, request, reason, 0.5)

    def _never(self, gateway: GatewayId, request: RequestSpec, reason: str) -> None:
        self._port.refuse(gateway, request, reason, None)

    def _die(self, gateway: GatewayId, request: RequestSpec, reason: str) -> None:
        self._port.connections[gateway].close(reason[:100])


def are_connected(cluster: MiniCluster, workers: list[FailingWorker]) -> bool:
    return all(cluster.orchestrator.connections.is_up(worker.worker_id) for worker in workers)


def app_of(cluster: MiniCluster, tokenizer: Tokenizer) -> FastAPI:
    return create_app(scripted_api(cluster.orchestrator, tokenizer))


async def asked(app: FastAPI, number: int, *, stream: bool) -> Answer:
    body = {"model": MODEL, "prompt": [3 + number % 200, 7, 9], "max_tokens": 9, "ignore_eos": True, "stream": stream}
    return await call(app, "POST", "/v1/completions", Sent(json.dumps(body).encode()))


def check(answer: Answer) -> str:
    """The sentence that the client got, which gives nothing away."""
    assert answer.status >= 400 or b'"error"' in answer.body, answer
    last = answer.body.strip().split(b"\n")[-1].removeprefix(b"data: ")
    message: str = json.loads(last)["error"]["message"]
    assert message.endswith(".") and not FORBIDDEN.search(message), message
    assert not FORBIDDEN.search(json.dumps(json.loads(last)["error"])), last
    return message


async def test_no_reason_of_a_worker_reaches_a_client(
    llama: SmallModel, smollm2_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 500 forced failures; the operator finds each reason by the id that the client was told."""
    caplog.set_level(logging.INFO, logger="cluster.gateway.orchestrator")
    config = OrchestratorConfig(max_attempts=2, retry_delay_s=0.001)
    said: set[str] = set()
    async with cluster_of(llama, num_decode=0, orchestrator=config) as cluster, AsyncExitStack() as stack:
        app = app_of(cluster, Tokenizer(smollm2_folder))
        workers = [FailingWorker(f"decode-{seed}", cluster, random.Random(seed)) for seed in range(2)]
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.stop)
        for number in range(500):
            await eventually(lambda: are_connected(cluster, workers), what="a link that was cut is not made again")
            answer = await asked(app, number, stream=number % 2 == 0)
            message = check(answer)
            request_id = f"{answer.headers[b'x-request-id'].decode()}-0"
            assert (request_id in message) == (b'"generation_failed"' in answer.body)
            noted = [record.getMessage() for record in caplog.records if request_id in record.getMessage()]
            assert any(text_of(error) in line or "is gone" in line for line in noted for error in ERRORS), noted
            caplog.clear()
            said.add(message.replace(request_id, "ID"))
    assert len(said) == 4, said


@contextmanager
def raising(runner: ModelRunner, error: Exception) -> Iterator[None]:
    run = runner.run

    def failing(*args: object) -> None:
        raise error

    runner.run = failing  # type: ignore[method-assign,assignment]
    yield
    runner.run = run  # type: ignore[method-assign]
    error.__traceback__ = None  # a constant's frames would hold this cluster's memory until the process ends


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_what_a_step_raises_reaches_the_log_alone(
    llama: SmallModel, smollm2_folder: Path, caplog: pytest.LogCaptureFixture, role: str, error: Exception
) -> None:
    config = OrchestratorConfig(max_attempts=1)
    async with cluster_of(llama, orchestrator=config) as cluster:
        app = app_of(cluster, Tokenizer(smollm2_folder))
        (worker,) = cluster.prefills if role == "prefill" else cluster.decodes
        with raising(worker.model.runner, error):
            check(await asked(app, 0, stream=role == "decode"))
    assert str(error) in caplog.text
