"""The worker behind the gateway's benchmark: who waits for a request hears of it, even if a beat has ended it since."""

from __future__ import annotations

import asyncio

from benchmarks.serving.scripted_worker import ScriptedWorker
from engine.sampling.params import SamplingParams
from kv_transfer.connections.connection import connect
from kv_transfer.messages.requests import Endpoint, RequestSpec, Start, StepFrame
from kv_transfer.transports.base import Identity
from tests.support.waiting import HANGS_S

SECRET = b"of the scripted worker's tests"


def identity(name: str) -> Identity:
    return Identity(worker_id=name, node_id="node", secret=SECRET, compatibility={})


async def nowhere() -> Endpoint:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_request_that_a_beat_has_ended_has_been_started() -> None:
    worker = ScriptedWorker(identity("scripted"), nowhere)
    await worker.start()
    gateway = await connect(worker.endpoint, identity("gateway"), purpose="requests", timeout_s=HANGS_S)
    try:
        async with asyncio.timeout(HANGS_S):
            for number in range(3):
                params = SamplingParams(max_tokens=1, seed=0)
                spec = RequestSpec(request_id=str(number), attempt=0, prompt_token_ids=[1, 2], params=params)
                await gateway.send(Start(request=spec, ticket=None))
                await worker.until_active(1)
                worker.beat()
                assert not worker.num_active
                await worker.until_started(number + 1)
                frame = await anext(aiter(gateway))
                assert isinstance(frame, StepFrame)
                assert [token.finish_reason for token in frame.tokens] == ["length"]
    finally:
        gateway.close("the test is over")
        await worker.stop()
