"""Which blocks a later attempt of a request takes over: with the real scheduler, pool and hand-off machine."""

from __future__ import annotations

from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import torch

from decode_workers.reservations import Reservations
from engine.sequence import SequenceKey
from kv_transfer.handoff.receiver_state import HandoffReceiver
from kv_transfer.messages.requests import Reserved
from kv_transfer.worker.sequences import sequence_of
from tests.decode_workers.test_decode_rules import Bench
from tests.kv_transfer.handoff.handoff_world.scripted import PREFILL, ScriptedReceiver, request, slab


class Recorder:
    """Whoever is told: a port, a listener, or the thread of the copies, on which nothing is ever done."""

    def __init__(self) -> None:
        self.posted: list[Any] = []

    def post(self, gateway: object, message: object) -> None:
        self.posted.append(message)

    def submit(self, work: Coroutine[Any, Any, None]) -> None:
        work.close()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: None


async def test_what_an_attempt_drains_is_not_taken_over_by_a_later_one() -> None:
    """A copy into the first attempt's blocks is still under way when the third renews the second's reservation."""
    bench, port, quiet = Bench(), Recorder(), Recorder()
    kv = SimpleNamespace(tensor=torch.empty(0))
    model = SimpleNamespace(
        layout=SimpleNamespace(layers_per_group=4), kv_cache=kv, sequence_kv=kv, host_cache=None, block_pool=bench.pool
    )
    parts = SimpleNamespace(
        model=model, identity=SimpleNamespace(worker_id="d"), transport=quiet, digest_kind="xxh3_64"
    )
    known: Any = (parts, bench.scheduler, port, quiet)
    reservations = Reservations(*known, sequence_of=sequence_of, wait_s=60.0, listener=quiet)
    machine: HandoffReceiver = ScriptedReceiver().machine
    reservations.receiver.machine = machine
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
