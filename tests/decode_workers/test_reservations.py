"""Which blocks a later attempt of a request takes over: with the real scheduler, pool and hand-off machine."""

from __future__ import annotations

import itertools
from collections.abc import Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decode_workers.reservations import Reservations
from engine.sequence import SequenceKey
from kv_transfer.messages.requests import RequestSpec, Reserved
from kv_transfer.worker.sequences import sequence_of
from tests.decode_workers.test_decode_rules import Bench
from tests.kv_transfer.handoff.handoff_world.model import request_spec
from tests.kv_transfer.handoff.handoff_world.scripted import PREFILL, ScriptedReceiver, request, slab


class Recorder:
    """Whoever is told: a port, a listener, or the thread of the copies, on which nothing is ever done."""

    def __init__(self) -> None:
        self.posted: list[Any] = []
        self.called: list[tuple[Any, ...]] = []

    def post(self, gateway: object, message: object) -> None:
        self.posted.append(message)

    def call(self, *call: object) -> None:
        self.called.append(call)

    def submit(self, work: Coroutine[Any, Any, None]) -> None:
        work.close()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: None


def the_reservations(bench: Bench, port: Recorder, thread: Recorder) -> Reservations:
    kv = SimpleNamespace(tensor=torch.empty(0))
    layout = SimpleNamespace(layers_per_group=4)
    model = SimpleNamespace(
        layout=layout, kv_cache=kv, sequence_kv=kv, host_cache=None, block_pool=bench.pool, adapters=None
    )
    parts = SimpleNamespace(
        model=model, identity=SimpleNamespace(worker_id="d"), transport=Recorder(), digest_kind="xxh3_64"
    )
    known: Any = (parts, bench.scheduler, port, thread)
    made = Reservations(*known, sequence_of=sequence_of, wait_s=60.0, listener=Recorder())
    made.receiver.machine = ScriptedReceiver().machine
    return made


async def test_what_is_written_into_a_renewed_lease_follows_all_that_its_new_blocks_were_used_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The later attempt has more tokens, and so blocks that something else had when the first one reserved."""
    marks = itertools.count()
    monkeypatch.setattr("decode_workers.reservations.queued_on", lambda device: lambda: next(marks))
    bench, port, thread = Bench(), Recorder(), Recorder()
    reservations = the_reservations(bench, port, thread)
    gateway: Any = "gateway"
    reservations.add(gateway, request(1))
    next(marks)  # what else was queued meanwhile
    assert reservations.renew(gateway, replace(request(2), output_token_ids=[7] * 4))
    ticket = port.posted[-1].ticket
    actions = reservations.receiver.machine.on_message(PREFILL, slab(0, 0, fence=ticket.fence), 1.0, 1)
    reservations.receiver._do(actions)
    assert thread.called[-1][-1] == 2, "the event behind which the copy is made"
    reservations.stop()


async def test_what_an_attempt_drains_is_not_taken_over_by_a_later_one() -> None:
    """A copy into the first attempt's blocks is still under way when the third renews the second's reservation."""
    bench, port = Bench(), Recorder()
    reservations = the_reservations(bench, port, Recorder())
    machine = reservations.receiver.machine
    gateway: Any = "gateway"

    def ticket() -> Any:
        return next(m.ticket for m in reversed(port.posted) if isinstance(m, Reserved))

    reservations.add(gateway, request(1))
    first = ticket()
    reservations.receiver._do(machine.on_message(PREFILL, slab(0, 0, fence=first.fence), 1.0, 1))  # and never copied
    reservations.cancel(SequenceKey("r", 1))
    reservations.add(gateway, request(2))
    second = ticket()
    assert second.fence.lease != first.fence.lease
    assert reservations.renew(gateway, request(3))
    third = ticket()
    assert third.fence.lease == second.fence.lease

    _, blocks = reservations.target_of(third.fence.lease, 0)
    admitted = bench.scheduler.sequence(SequenceKey("r", 3))
    assert admitted is not None and admitted.block_table is not None
    assert blocks.tolist() == admitted.block_table.view[0].tolist()
    # What was under way ends, and then the others: nothing is left.
    reservations.receiver._do(machine.on_copy_failed(1, "the device refused it"))
    reservations.cancel(SequenceKey("r", 3))
    bench.pool.check_idle()
    reservations.stop()


async def test_who_found_no_room_is_told_when_there_may_be_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the pace at which others got it while it waited; where nobody did, all that is known is how long that was."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("decode_workers.reservations.time", SimpleNamespace(monotonic=lambda: clock.now))
    bench, port = Bench(max_num_seqs=1), Recorder()
    told: list[tuple[str, float]] = []

    def refuse(gateway: object, request: RequestSpec, reason: str, retry_after_s: float) -> None:
        told.append((request.request_id, retry_after_s))

    monkeypatch.setattr(port, "refuse", refuse, raising=False)
    reservations = the_reservations(bench, port, Recorder())
    gateway: Any = "gateway"
    assert reservations.room_in_s == 0.0
    for name in "abcd":
        reservations.add(gateway, request_spec(name, 1, 10))
    assert reservations.room_in_s == 60.0, "nobody has got room while they wait"
    for now, name in ((20.0, "a"), (40.0, "b")):
        clock.now = now
        reservations.cancel(SequenceKey(name, 1))
        reservations.retry()
    assert reservations.room_in_s == 20.0, "d alone waits, and two had room within 40 s"
    clock.now = 60.0
    reservations.retry()
    assert told == [("d", 30.0)]
    reservations.add(gateway, request_spec("e", 1, 10))
    clock.now = 120.0
    reservations.retry()
    assert told[1:] == [("e", 60.0)], "while e waited nobody had room"
    reservations.stop()
