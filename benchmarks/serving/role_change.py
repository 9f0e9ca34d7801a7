"""What it takes to change a worker's role, beside what it takes to load the model: `python -m
benchmarks.serving.role_change`.

One process, the default model: a prefill worker, two decode workers, scheduler and gateway with real connections. A
change is timed from the order to the replica until its next worker takes requests: of an idle worker, and of one that
decodes and has to leave at once. Then the streams' longest gap tells what clients notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import statistics
import time
from collections.abc import AsyncIterator
from functools import partial
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.common.part import GateError, Json, note, run_part, spread
from benchmarks.common.workload import MODEL, draw_prompts, greedy
from cluster.errors import UnavailableError
from cluster.gateway.orchestrator import Orchestrator, OrchestratorConfig
from cluster.scheduler.server import ModelRules, SchedulerServer
from decode_workers.worker import DecodeWorker, DecodeWorkerConfig
from engine.steps.loading import EngineConfig
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Endpoint, RequestSpec
from kv_transfer.tiers.config import Budget, TiersConfig
from kv_transfer.tiers.worker_tiers import WorkerTiers
from kv_transfer.transports.base import Identity
from kv_transfer.transports.choose import TransferConfig
from kv_transfer.worker.base import WorkerRole
from kv_transfer.worker.replica import ModelKit, ReplicaSite, WorkerReplica
from prefill_workers.worker import PrefillWorker, PrefillWorkerConfig

REPEATS: Final = 5
NUM_STREAMS: Final = 4
PROMPT_TOKENS: Final = 256
OUTPUT_TOKENS: Final = 96
TELL_AFTER: Final = 24  # tokens
TIMEOUT_S: Final = 60.0
RETRY_S: Final = 0.2
HOST = "127.0.0.1"

_SECRET = secrets.token_bytes(32)
_ROLES: dict[Role, WorkerRole] = {
    "prefill": partial(PrefillWorker, config=PrefillWorkerConfig()),
    "decode": partial(DecodeWorker, config=DecodeWorkerConfig()),
}
_OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}


async def _measure() -> Json:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        async with _cluster(folder) as (replicas, gateway, load_s):
            idle_s = [await _change(replicas[1], 5.0) for _ in range(2 * REPEATS)]
            prompts = draw_prompts(NUM_STREAMS, PROMPT_TOKENS)
            quiet = await _streams(gateway, "quiet", prompts, [])
            busy = [await _streams(gateway, f"busy{n}", prompts, replicas) for n in range(REPEATS)]
    if any([tokens for tokens, _ in found] != [tokens for tokens, _ in quiet] for found in busy):
        raise GateError("streams that were moved brought other tokens than those that were not")
    note(f"load {statistics.median(load_s):.2f} s, change {1e3 * statistics.median(idle_s):.0f} ms")
    return {
        "load_s": spread(load_s),
        "idle_change_ms": spread([1e3 * s for s in idle_s]),
        "busy": {
            "streams": NUM_STREAMS,
            "longest_gap_undisturbed_ms": _longest_gap_ms(quiet),
            "longest_gap_ms": spread([_longest_gap_ms(found) for found in busy]),
        },
    }


@contextlib.asynccontextmanager
async def _cluster(folder: str) -> AsyncIterator[tuple[list[WorkerReplica], Orchestrator, list[float]]]:
    scheduler = SchedulerServer({MODEL: ModelRules()}, _identity("scheduler"))
    endpoint = await scheduler.start(HOST)

    async def locate() -> Endpoint:
        return endpoint

    replicas: list[WorkerReplica] = []
    load_s: list[float] = []
    first: tuple[Role, ...] = ("prefill", "decode", "decode")
    gateway = Orchestrator(_identity("gateway"), OrchestratorConfig(), locate)
    gateway.start()
    for number, role in enumerate(first):
        site = ReplicaSite(name=str(number), node_id="node", host=HOST, secret=_SECRET)
        kit = ModelKit(roles=_ROLES, tiers=partial(_tiers, folder), transfer=TransferConfig())
        replica = WorkerReplica(role, MODEL, {MODEL: kit}, site, locate)
        began = time.perf_counter()
        await replica.start()
        load_s.append(time.perf_counter() - began)
        replicas.append(replica)
    try:
        await _until_served(gateway)
        yield replicas, gateway, load_s
    finally:
        await gateway.stop()
        for replica in replicas:
            await replica.stop(0.0)
        await scheduler.stop()


def _tiers(folder: str, role: Role) -> WorkerTiers:
    engine = EngineConfig(model_ref=MODEL, model_name=MODEL, dtype="float32", kv_bytes=2**27, num_threads=1)
    return WorkerTiers(TiersConfig(host=Budget(num_bytes=2**24), host_folder=folder), engine, _SECRET)


async def _change(replica: WorkerReplica, drain_s: float) -> float:
    """Seconds until the worker of the other role takes requests."""
    began = time.perf_counter()
    assert replica.change_role(_OTHER[replica.role], drain_s)
    await replica.changed()
    assert replica.is_healthy
    return time.perf_counter() - began


async def _until_served(gateway: Orchestrator) -> None:
    """The gateway has to hear of the workers first."""
    async with asyncio.timeout(TIMEOUT_S):
        for number in itertools.count():
            with contextlib.suppress(UnavailableError):
                await _stream(gateway, f"first-{number}", [5] * 8, asyncio.Event())
                return
            await asyncio.sleep(RETRY_S)


async def _stream(
    gateway: Orchestrator, request_id: str, prompt: list[int], begun: asyncio.Event
) -> tuple[list[int], list[float]]:
    """A request's tokens, and the times between them. It has a salt of its own, so that no cache helps."""
    params = greedy(OUTPUT_TOKENS)
    spec = RequestSpec(request_id=request_id, attempt=0, prompt_token_ids=prompt, params=params, cache_salt=request_id)
    tokens: list[int] = []
    times: list[float] = []
    async with contextlib.aclosing(gateway.generate(spec)) as stream:
        async for events in stream:
            for event in events:
                tokens.append(event.token_id)
                times.append(time.perf_counter())
            if len(tokens) >= TELL_AFTER:
                begun.set()
    return tokens, [later - earlier for earlier, later in itertools.pairwise(times)]


def _is_busy(replica: WorkerReplica) -> bool:
    return replica.worker is not None and replica.worker.snapshot().num_running > 0


async def _streams(
    gateway: Orchestrator, name: str, prompts: list[list[int]], replicas: list[WorkerReplica]
) -> list[tuple[list[int], list[float]]]:
    """All of them together. A decoding one of the replicas leaves at once, in their middle, and comes back."""
    begun = asyncio.Event()
    tasks = [
        asyncio.create_task(_stream(gateway, f"{name}-{number}", prompt, begun))
        for number, prompt in enumerate(prompts)
    ]
    await begun.wait()
    leaving = next((replica for replica in replicas if replica.role == "decode" and _is_busy(replica)), None)
    if leaving is not None:
        await _change(leaving, 0.0)
    found = await asyncio.gather(*tasks)
    if leaving is not None:
        await _change(leaving, 5.0)
    return found


def _longest_gap_ms(found: list[tuple[list[int], list[float]]]) -> float:
    return round(1e3 * max(max(gaps) for _, gaps in found), 1)


def _identity(worker_id: str) -> Identity:
    return Identity(worker_id=worker_id, node_id="node", secret=_SECRET, compatibility={})


if __name__ == "__main__":
    run_part("role_change", lambda: asyncio.run(_measure()))
