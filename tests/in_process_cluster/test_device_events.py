"""Hand-offs whose KV a device stores in its own time: events go along, and only the threads for copies wait for them.

The device is the CPU with events of the test's, so that all but the device is what a GPU worker runs.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

import pytest
import torch

from decode_workers import reservations
from engine.memory.streams import MarkQueued, nothing_queued, queued_on
from engine.sampling.params import SamplingParams
from kv_transfer.connections.event_loops import to_the_end
from kv_transfer.handoff.slab_copy import copying_threads
from kv_transfer.transports.choose import TransferConfig, TransportKind
from kv_transfer.worker import base as worker_base
from prefill_workers.worker import PrefillWorkerConfig
from tests.support.clusters.mini_cluster import MiniClusterConfig, mini_cluster
from tests.support.small_models import SmallModel
from tests.support.waiting import HANGS_S

PROMPT = [7 + (3 * n) % 90 for n in range(150)]
CHUNK = 64
T = TypeVar("T")


class Marks:
    """A device's events: where each was made, and who waited for it."""

    def __init__(self) -> None:
        self.made_in: list[str] = []
        self.waited: dict[int, set[str]] = {}

    def queued_on(self, device: torch.device) -> MarkQueued:
        return self._mark

    def _mark(self) -> Mark:
        self.made_in.append(threading.current_thread().name)
        return Mark(self, len(self.made_in))


class Mark:
    def __init__(self, marks: Marks, number: int) -> None:
        self._marks = marks
        self._number = number

    def wait(self) -> None:
        self._marks.waited.setdefault(self._number, set()).add(threading.current_thread().name)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_slabs_go_and_come_behind_their_events(
    llama: SmallModel, monkeypatch: pytest.MonkeyPatch, transport: TransportKind
) -> None:
    stored, free = Marks(), Marks()
    monkeypatch.setattr(worker_base, "queued_on", stored.queued_on)
    monkeypatch.setattr(reservations, "queued_on", free.queued_on)
    config = MiniClusterConfig(
        model_ref=str(llama.folder),
        prefill_engine={"block_size": 8},
        decode_engine={"block_size": 5},
        prefill=PrefillWorkerConfig(chunk_tokens=CHUNK, max_slab_bytes=7 * 256),
        transfer=TransferConfig(transport=transport),
    )
    params = SamplingParams(max_tokens=8, seed=1, temperature=0.0, ignore_eos=True)
    async with mini_cluster(config) as cluster:
        first = await cluster.generate("first", PROMPT, params)
        num_marks = len(stored.made_in)
        again = await cluster.generate("again", PROMPT, params)
        await cluster.idle()
        num_layers = cluster.models[0].layout.num_layers
    tokens = llama.local(PROMPT, params).tokens
    assert [event.token_id for event in first] == [event.token_id for event in again] == tokens
    main = threading.current_thread().name
    # One for each layer of each chunk, made by the thread that computes; and then one for a hit, by the main loop.
    assert num_marks == num_layers * -(-len(PROMPT) // CHUNK)
    assert main not in stored.made_in[:num_marks]
    assert stored.made_in[num_marks] == main
    assert free.made_in == [main] * 2, "one for each lease"
    assert stored.waited.keys() == set(range(1, len(stored.made_in) + 1)), "every layer's event"
    assert free.waited.keys() == {1, 2}
    for marks, name in ((stored, "kv-copies-out"), (free, "kv-copies-in")):
        threads = set(itertools.chain.from_iterable(marks.waited.values()))
        assert {thread.rsplit("_", 1)[0] for thread in threads} == {name}, "no loop and no compute thread waits"


async def test_on_a_cpu_there_are_neither_events_nor_threads(llama: SmallModel) -> None:
    assert queued_on(torch.device("cpu")) is nothing_queued
    params = SamplingParams(max_tokens=2, seed=1, temperature=0.0, ignore_eos=True)
    others = set(threading.enumerate())  # of an earlier test, which may end any time
    async with mini_cluster(MiniClusterConfig(model_ref=str(llama.folder))) as cluster:
        await cluster.generate("r", PROMPT, params)
        await cluster.idle()
        threads = set(threading.enumerate()) - others
        assert not [thread for thread in threads if thread.name.startswith("kv-copies-")]


# --- the threads that wait ---


async def run(threads: Executor, job: Callable[[], T]) -> T:
    """As the sender does."""
    return await to_the_end(asyncio.wrap_future(threads.submit(job)))


def held(begun: threading.Event, goes_on: threading.Event) -> Callable[[], int]:
    def job() -> int:
        begun.set()
        assert goes_on.wait(HANGS_S)
        return 5

    return job


async def test_who_is_cancelled_waits_for_the_copy_to_end() -> None:
    thread, begun, goes_on = copying_threads("copies"), threading.Event(), threading.Event()
    waiting = asyncio.create_task(run(thread, held(begun, goes_on)))
    await asyncio.to_thread(begun.wait, HANGS_S)
    for _ in range(3):
        waiting.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done(), "the copy still reads its blocks"
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, HANGS_S)
    assert await run(thread, lambda: 6) == 6
    thread.shutdown(wait=False)
    with pytest.raises(RuntimeError):
        await run(thread, lambda: 7)


async def test_what_was_taken_before_the_stop_is_done() -> None:
    thread, begun, goes_on = copying_threads("copies"), threading.Event(), threading.Event()
    running = thread.submit(held(begun, goes_on))
    thread.shutdown(wait=False)
    goes_on.set()
    assert await asyncio.wait_for(asyncio.wrap_future(running), HANGS_S) == 5


async def test_an_error_of_a_copy_is_its_callers() -> None:
    thread = copying_threads("copies")

    def failing() -> None:
        raise ValueError("no such block")

    with pytest.raises(ValueError, match="no such block"):
        await run(thread, failing)
    thread.shutdown(wait=False)
