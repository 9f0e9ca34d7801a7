"""One prefill and one decode worker in processes of their own, each on a core, driven without Ray or HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import asdict, replace

from benchmarks.common.local import CHUNK_TOKENS
from benchmarks.common.part import ROOT
from benchmarks.common.workload import MODEL, greedy
from benchmarks.transfer.handoff_worker import NODE_ID, SECRET_VARIABLE, SLAB_BYTES, Transporting, WorkerOrder
from cluster.errors import UnavailableError
from cluster.gateway.orchestrator import Orchestrator, OrchestratorConfig
from cluster.scheduler.server import ModelRules, SchedulerServer
from engine.steps.loading import DtypeName
from kv_transfer.handoff.sender import HandoffTimeline
from kv_transfer.messages.requests import Endpoint, RequestSpec
from kv_transfer.transports.base import Identity

START_TIMEOUT_S = 300.0  # on a GPU kernels are compiled first
HANDOFF_TIMEOUT_S = 60.0
RETRY_S = 0.3


class HandoffCluster:
    """Use `running_handoffs`."""

    def __init__(self, orchestrator: Orchestrator, prefill: Process) -> None:
        self._orchestrator = orchestrator
        self._prefill = prefill
        self._numbers = itertools.count(1)

    async def hand_over(self, prompt: list[int]) -> HandoffTimeline:
        """Prefill the prompt, hand it over, decode one more token; how that went."""
        _, timeline = await self.hand_over_and_decode(prompt, num_tokens=2)
        return timeline

    async def hand_over_and_decode(self, prompt: list[int], *, num_tokens: int) -> tuple[list[int], HandoffTimeline]:
        """The greedy tokens, and how the hand-off went."""
        request_id = f"handoff-{next(self._numbers)}"
        tokens = await self.generate(request_id, prompt, num_tokens=num_tokens)
        async with asyncio.timeout(HANDOFF_TIMEOUT_S):
            while (timeline := await self._timeline()).request_id != request_id:
                pass
        return tokens, timeline

    async def generate(self, request_id: str, prompt: list[int], *, num_tokens: int) -> list[int]:
        spec = RequestSpec(request_id=request_id, attempt=0, prompt_token_ids=prompt, params=greedy(num_tokens))
        async with contextlib.aclosing(self._orchestrator.generate(spec)) as stream:
            return [token.token_id async for tokens in stream for token in tokens]

    async def wait_until_served(self) -> None:
        """Wait until a request went through both workers."""
        async with asyncio.timeout(START_TIMEOUT_S):
            for number in itertools.count():
                with contextlib.suppress(UnavailableError, TimeoutError):
                    await self.generate(f"warm-up-{number}", [1] * 64, num_tokens=2)
                    async with asyncio.timeout(RETRY_S):
                        await self._timeline()
                        return
                await asyncio.sleep(RETRY_S)

    async def _timeline(self) -> HandoffTimeline:
        assert self._prefill.stdout is not None
        line = await self._prefill.stdout.readline()
        if not line:
            raise RuntimeError("the prefill worker has ended; its error output is above")
        return HandoffTimeline(**json.loads(line))


@contextlib.asynccontextmanager
async def running_handoffs(
    transport: Transporting,
    *,
    model_ref: str = MODEL,
    dtype: DtypeName = "bfloat16",
    device: str = "cpu",
    kv_blocks: int | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    slab_bytes: int = SLAB_BYTES,
) -> AsyncIterator[HandoffCluster]:
    """The scheduler and a gateway's orchestrator here, the workers elsewhere: each on one core where that computes."""
    secret = secrets.token_bytes(32)
    scheduler = SchedulerServer({MODEL: ModelRules()}, _control("scheduler", secret), broadcast_period_s=0.2)
    endpoint = await scheduler.start("127.0.0.1")
    cpus, computes_here = sorted(os.sched_getaffinity(0)), device == "cpu"
    order = WorkerOrder(
        role="prefill",
        transport=transport,
        scheduler_port=endpoint.port,
        cpu=cpus[0] if computes_here else None,
        model_ref=model_ref,
        dtype=dtype,
        device=device,
        kv_blocks=kv_blocks,
        chunk_tokens=chunk_tokens,
        slab_bytes=slab_bytes,
    )
    prefill = await _start(order, secret)
    decode = await _start(replace(order, role="decode", cpu=cpus[-1] if computes_here else None), secret)

    async def locate_scheduler() -> Endpoint:
        return endpoint

    orchestrator = Orchestrator(_control("gateway", secret), OrchestratorConfig(), locate_scheduler)
    orchestrator.start()
    try:
        cluster = HandoffCluster(orchestrator, prefill)
        await cluster.wait_until_served()
        yield cluster
    finally:
        await orchestrator.stop()
        await asyncio.gather(_end(prefill), _end(decode))
        await scheduler.stop()


def _control(name: str, secret: bytes) -> Identity:
    return Identity(worker_id=name, node_id=NODE_ID, secret=secret, compatibility={})


async def _start(order: WorkerOrder, secret: bytes) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.transfer.handoff_worker",
        json.dumps(asdict(order)),
        cwd=ROOT,
        env={**os.environ, SECRET_VARIABLE: secret.hex()},
        stdin=PIPE,
        stdout=PIPE if order.role == "prefill" else None,
    )


async def _end(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(20):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
