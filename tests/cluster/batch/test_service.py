"""Batches whose lines are for several models: where one model has no workers, the lines of the others are answered. And
batches whose answers the disk has no room for."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from cluster.batch import batches as claiming
from cluster.batch import database as storage
from cluster.batch import service
from cluster.batch.batches import KEPT_S, Batch, Batches, KeptAnswer
from cluster.batch.database import Database
from cluster.batch.lines import BatchLine, LineAnswer, LineError, read_lines
from cluster.batch.service import BatchService
from cluster.batch.stored_responses import StoredResponse
from cluster.errors import NotFoundError
from cluster.http.background import StoredResponses
from tests.cluster.batch.test_database import a_full_disk
from tests.support.waiting import HANGS_S, eventually

MODELS = ("gone", "here")
NO_WORKER = LineAnswer(status=503, body="{}", retry_after_s=0.01)


async def begun(batches: BatchService, *models: str, owner: str = "o") -> Batch:
    """A batch with a line for each of these models."""
    lines = [
        {"custom_id": f"l{n}", "method": "POST", "url": "/v1/completions", "body": {"model": model, "prompt": "x"}}
        for n, model in enumerate(models)
    ]
    content = batches.files.new_content()
    content.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    file = await batches.files.add(content, owner=owner, filename="f", purpose="batch")
    batch = Batch(
        owner=owner, tenant="t", salt="", endpoint="/v1/completions", input_file_id=file.id, completion_window="24h",
        expires_at=int(time.time()) + 86_400,
    )  # fmt: skip
    await batches.add(batch, file)
    return batch


class Server:
    """Has no workers of the model `gone`; remembers what it answered."""

    def __init__(self) -> None:
        self.answered: list[tuple[str, object]] = []

    async def send(self, batch: Batch, line: BatchLine) -> LineAnswer:
        if line.body["model"] == "gone":
            return NO_WORKER
        self.answered.append((batch.id, line.body["model"]))
        return LineAnswer(status=200, body="{}")


async def test_lines_of_a_model_without_workers_hold_up_no_others(tmp_path: Path) -> None:
    """Neither those behind them in the same batch nor another batch's."""
    server, batches = Server(), BatchService(Database(tmp_path), 10**6)
    async with batches.running(server.send, MODELS):
        mixed = await begun(batches, *["gone"] * 100, "here")
        other = await begun(batches, "here", "an adapter")
        await eventually(lambda: len(server.answered) == 3)
    expected = [(mixed.id, "here"), (other.id, "here"), (other.id, "an adapter")]
    assert sorted(server.answered, key=repr) == sorted(expected, key=repr)


async def test_batches_that_stand_still_keep_no_other_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_STALLED_S", 0.1)
    monkeypatch.setattr(service, "_LOOK_S", 0.02)
    server, batches = Server(), BatchService(Database(tmp_path), 10**6)
    async with batches.running(server.send, MODELS):
        for _ in range(6):
            await begun(batches, "gone")
        other = await begun(batches, "here")
        await eventually(lambda: server.answered == [(other.id, "here")])


async def test_a_clients_many_batches_hold_up_no_other_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that run at a time are one client's, and none of them ends."""
    monkeypatch.setattr(service, "_STALLED_S", 10 * HANGS_S)
    batches, sent, may_end = BatchService(Database(tmp_path), 10**6), list[str](), asyncio.Event()

    async def send(batch: Batch, line: BatchLine) -> LineAnswer:
        sent.append(batch.owner)
        await may_end.wait()
        return LineAnswer(status=200, body="{}")

    async with batches.running(send):
        for _ in range(8):
            await begun(batches, "here", owner="many")
        await eventually(lambda: len(sent) == 4)
        for _ in range(2):
            await begun(batches, "here", owner="other")
        await eventually(lambda: "other" in sent)
        assert sent == ["many"] * 4 + ["other"]
        may_end.set()
        await eventually(lambda: len(sent) == 10)


async def test_lines_are_read_once_there_is_room_to_send_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many batches run: a line may have many megabytes."""
    batches, may_end = BatchService(Database(tmp_path), 10**6), asyncio.Event()
    num_read = num_done = most = 0

    def noted(*args: Any) -> Iterator[BatchLine | LineError]:
        nonlocal num_read, most
        for line in read_lines(*args):
            num_read += 1
            most = max(most, num_read - num_done)
            yield line

    async def send(batch: Batch, line: BatchLine) -> LineAnswer:
        nonlocal num_done
        await may_end.wait()
        num_done += 1
        return LineAnswer(status=200, body="{}")

    monkeypatch.setattr(service, "read_lines", noted)
    async with batches.running(send):
        for number in range(5):
            await begun(batches, *["here"] * 63, owner=f"{number}")
        await eventually(lambda: len(batches._runs) == 5 and num_read >= 64)
        may_end.set()
        await eventually(lambda: num_done == 5 * 63)
    assert most <= 64 + 5  # each batch has read the one that it waits with


async def test_lines_that_wait_are_not_held_in_memory(tmp_path: Path) -> None:
    """Those of many batches may, for hours: of a model without workers, say."""
    batches, num_sent = BatchService(Database(tmp_path), 10**6), 0

    async def send(batch: Batch, line: BatchLine) -> LineAnswer:
        nonlocal num_sent
        num_sent += 1
        return LineAnswer(status=503, body="{}", retry_after_s=HANGS_S)

    def in_memory() -> list[BatchLine]:
        lines = (found for found in gc.get_objects() if isinstance(found, BatchLine))
        return [line for line in lines if line.body.get("model") == "of these batches"]

    async with batches.running(send):
        for number in range(3):
            await begun(batches, *["of these batches"] * 64, owner=f"{number}")
        await eventually(lambda: num_sent == 3 * 64)
        await eventually(lambda: len(in_memory()) <= 3)  # what reads a file has the line that it gave last


async def test_a_line_that_has_waited_is_sent_as_it_is_in_its_file(tmp_path: Path) -> None:
    batches, turned_away, answered = BatchService(Database(tmp_path), 10**6), set[str](), dict[str, object]()

    async def send(batch: Batch, line: BatchLine) -> LineAnswer:
        if line.custom_id not in turned_away:
            turned_away.add(line.custom_id)
            return NO_WORKER
        answered[line.custom_id] = line.body
        return LineAnswer(status=200, body="{}")

    models = [f"an adapter of {n} ä" for n in range(100)]
    async with batches.running(send, MODELS):
        await begun(batches, *models)
        await eventually(lambda: len(answered) == 100)
    assert answered == {f"l{n}": {"model": model, "prompt": "x"} for n, model in enumerate(models)}


async def test_lines_of_one_batch_are_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few milliseconds of them, or one: a large line holds the interpreter's lock while it is parsed, and a gateway's
    loop waits for that of each thread."""
    batches, calls, reading = BatchService(Database(tmp_path), 10**6), [0], list[int]()
    both = threading.Barrier(2)

    def noted(*args: Any) -> Iterator[BatchLine | LineError]:
        for line in read_lines(*args):
            reading.append(calls[0])
            if len(reading) <= 2:
                with suppress(threading.BrokenBarrierError):
                    both.wait(0.5)
                    raise AssertionError("two are read at the same time")
            yield line

    def counted(*args: Any) -> Any:
        calls[0] += 1
        return found_soon(*args)

    found_soon = service.found_soon
    monkeypatch.setattr(service, "_STRETCH_S", 0.0)
    monkeypatch.setattr(service, "found_soon", counted)
    monkeypatch.setattr("cluster.batch.lines.read_lines", noted)
    server = Server()
    async with batches.running(server.send):
        for owner in "ab":
            await begun(batches, *["here"] * 5, owner=owner)
        await eventually(lambda: len(server.answered) == 10)
    assert len(set(reading)) == len(reading)


async def test_a_batch_ends_though_lines_of_another_model_hold_all_its_places(tmp_path: Path) -> None:
    """Which it would need to learn that it has none for that model."""
    batches, num_stuck = BatchService(Database(tmp_path), 10**6), 0

    async def send(batch: Batch, line: BatchLine) -> LineAnswer:
        nonlocal num_stuck
        if line.body["model"] == "gone":
            num_stuck += 1
            await asyncio.Event().wait()
        return LineAnswer(status=200, body="{}")

    async with batches.running(send, MODELS):
        await begun(batches, *["gone"] * 100, owner="waits")
        await eventually(lambda: num_stuck == 64)
        batch = await begun(batches, "here", owner="another")
        await eventually(lambda: batch.id in batches._runs)
        await eventually(batches._runs[batch.id].task.done)
        assert (await batches.batches.get(batch.id, "another")).status == "completed"


async def test_lines_that_wait_or_are_cancelled_leave_their_room_to_others(tmp_path: Path) -> None:
    batches, num_stuck, answered = BatchService(Database(tmp_path), 10**6), 0, list[str]()

    async def send(batch: Batch, line: BatchLine) -> LineAnswer:
        nonlocal num_stuck
        if line.body["model"] == "gone":
            return NO_WORKER
        if line.body["model"] == "stuck":
            num_stuck += 1
            await asyncio.Event().wait()
        answered.append(batch.owner)
        return LineAnswer(status=200, body="{}")

    async with batches.running(send):
        await begun(batches, *["gone"] * 100, owner="waits")
        await begun(batches, "here", owner="another")
        await eventually(lambda: answered == ["another"])
        stuck = await begun(batches, *["stuck"] * 100, owner="cancelled")
        await eventually(lambda: num_stuck == 64)
        await batches.batches.cancel(stuck.id, stuck.owner)
        batches.wake()
        await begun(batches, "here", owner="yet another")
        await eventually(lambda: answered == ["another", "yet another"])


async def test_the_next_batch_is_of_who_has_the_fewest_that_run(tmp_path: Path) -> None:
    """On all gateways together; of one client the oldest goes first."""
    one, other = Batches(Database(tmp_path)), Batches(Database(tmp_path))
    for number, owner in enumerate(("many", "many", "many", "few", "few")):
        await one.create(
            Batch(
                id=f"{owner} {number}", owner=owner, tenant="", salt="", endpoint="", input_file_id="f",
                completion_window="1h", expires_at=2**31,
            )
        )  # fmt: skip
    claimed = [await batches.claim(of_others=of_others) for batches, of_others in (
        (one, False), (other, True), (one, True), (one, False), (other, False), (other, False), (one, False),
    )]  # fmt: skip
    assert [batch and batch.id for batch in claimed] == ["many 0", "few 3", None, "many 1", "few 4", "many 2", None]
    for each in (one, other):
        each.database.close()


async def test_a_claim_reads_few_batches_however_many_wait_or_have_ended(tmp_path: Path) -> None:
    """Each gateway looks each second, and keeps all others from writing meanwhile."""
    database, num_rows, num_steps = Database(tmp_path), 0, 0
    batches, connection = Batches(database), database._connection

    def create(connection: sqlite3.Connection, number: int, ended: bool) -> None:
        for _ in range(number):
            batch = Batch(
                owner="o", tenant="", salt="", endpoint="", input_file_id="f", completion_window="1h", expires_at=2**31
            )
            if ended:
                batch = batch.turned("completed")
            connection.execute(
                "INSERT INTO batches (id, owner, created_at, record, ended) VALUES (?, ?, ?, ?, ?)",
                (batch.id, batch.owner, batch.created_at, json.dumps(asdict(batch)), ended),
            )

    def counted(cursor: sqlite3.Cursor, row: Any) -> sqlite3.Row:
        nonlocal num_rows
        num_rows += 1
        return sqlite3.Row(cursor, row)

    def count_step() -> None:
        nonlocal num_steps
        num_steps += 1

    async def claimed() -> tuple[int, int]:
        """The rows that one takes, and SQLite's steps."""
        nonlocal num_rows, num_steps
        num_rows = num_steps = 0
        assert await batches.claim() is not None
        return num_rows, num_steps

    await database.transact(create, 300, False)
    connection.row_factory = counted
    connection.set_progress_handler(count_step, 1)
    rows, steps = await claimed()
    assert rows < 10
    await database.transact(create, 300, True)
    _, more_steps = await claimed()
    assert more_steps < steps + 300
    database.close()


async def test_a_clients_second_batch_has_its_turn_though_others_keep_coming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with one, so that none of theirs runs. What could not be claimed, for a reader, is no turn."""
    monkeypatch.setattr(storage, "BUSY_S", 0.05)
    batches = Batches(Database(tmp_path))

    async def create(name: str, owner: str) -> None:
        await batches.create(
            Batch(
                id=name, owner=owner, tenant="", salt="", endpoint="", input_file_id="f", completion_window="1h",
                expires_at=2**31,
            )
        )  # fmt: skip

    claimed = list[str]()
    for name in ("first", "second"):
        await create(name, "many")
    for number in range(6):
        await create(f"other {number}", f"{number}")
        with closing(sqlite3.connect(tmp_path / "records.sqlite", isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM batches").fetchall()
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                await batches.claim(of_others=True)
        batch = await batches.claim(of_others=True)
        assert batch is not None
        claimed.append(batch.id)
    assert claimed == ["first", "other 0", "other 1", "second", "other 2", "other 3"]
    batches.database.close()


async def test_a_batch_whose_claim_runs_out_here_is_not_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is slow for longer than a claim lasts, as while a backup reads it."""
    monkeypatch.setattr(storage, "CLAIM_S", 0.0)
    batches, sent, may_end = BatchService(Database(tmp_path), 10**6), list[object](), asyncio.Event()

    async def send(batch: Batch, line: BatchLine) -> LineAnswer:
        sent.append(line.body["model"])
        if line.body["model"] == "slow":
            await may_end.wait()
        return LineAnswer(status=200, body="{}")

    async with batches.running(send):
        slow = await begun(batches, "slow")
        await eventually(lambda: len(sent) > 0)
        await begun(batches, "another")  # claimed behind the first
        await eventually(lambda: len(sent) > 1)
        assert sent == ["slow", "another"]
        may_end.set()
        await eventually(lambda: slow.id not in batches._runs)
        assert (await batches.batches.get(slow.id, "o")).status == "completed"
    assert sent == ["slow", "another"]


async def test_a_claim_holds_by_whichever_clock_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's clock may be wrong by any time; that a claim is prolonged shows that somebody is there."""
    one, other = Batches(Database(tmp_path)), Batches(Database(tmp_path))
    await one.create(
        Batch(owner="o", tenant="", salt="", endpoint="", input_file_id="f", completion_window="1h", expires_at=2**31)
    )
    with monkeypatch.context() as patched:
        patched.setattr(claiming, "time", SimpleNamespace(time=lambda: 1.0))
        claimed = await one.claim()
    assert claimed is not None and await other.claim() is None
    monkeypatch.setattr(storage, "CLAIM_S", 0.0)  # whoever is silent between two looks is gone
    for _ in range(3):
        assert await one.renew([claimed.id]) and await other.claim() is None
    taken = await other.claim()
    assert taken is not None and taken.id == claimed.id and not await one.renew([claimed.id])
    await other.leave([taken.id])
    assert await one.claim() is not None, "what was given up is free at once"
    for each in (one, other):
        each.database.close()


async def test_who_takes_a_batch_over_does_not_wait_for_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whom the gateway that runs it waits for, too, to prolong its claim."""
    monkeypatch.setattr(storage, "CLAIM_S", 0.0)
    database, other = Database(tmp_path), Database(tmp_path)
    await Batches(database).create(
        Batch(owner="o", tenant="", salt="", endpoint="", input_file_id="f", completion_window="1h", expires_at=2**31)
    )
    assert await Batches(database).claim() is not None
    taking = Batches(other)
    assert await taking.claim() is None
    with closing(sqlite3.connect(tmp_path / "records.sqlite", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM batches").fetchall()
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            await taking.claim()
    (waited_ms,) = other._connection.execute("PRAGMA busy_timeout").fetchone()
    assert waited_ms < 1000 * storage.BUSY_S
    for each in (database, other):
        each.close()


async def test_answers_are_forgotten_although_their_batch_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than a look, of a large batch; and so where a gateway has left them that ended just then."""
    monkeypatch.setattr("cluster.batch.batches._FORGOTTEN_AT_ONCE", 1)
    monkeypatch.setattr(service, "_LOOK_S", 0.0)
    batches = BatchService(Database(tmp_path), 10**6)
    async with batches.running(Server().send):
        batch = await begun(batches, *["here"] * 30)
        await eventually(lambda: batch.id in batches._runs)
        await eventually(lambda: batch.id not in batches._runs)
        assert (await batches.batches.get(batch.id, "o")).status == "completed"
        assert not await batches.batches.answered(batch) and not batches._input(batch).exists()

    def leave(connection: sqlite3.Connection) -> None:
        connection.executemany("INSERT INTO answers VALUES (?, ?, 1, '')", ((batch.id, line) for line in range(30)))

    database = Database(tmp_path)
    await database.transact(leave)
    another = BatchService(database, 10**6)
    async with another.running(Server().send), asyncio.timeout(HANGS_S):
        while await another.batches.answered(batch):
            pass


async def test_answers_that_the_disk_has_no_room_for_leave_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each try would fill the disk by what it has written, until a sweep an hour later."""
    database = Database(tmp_path)
    batches = BatchService(database, 10**6).batches

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    contents = [database.files / name for name in ("output", "errors")]
    await batches.create(
        Batch(owner="o", tenant="", salt="", endpoint="", input_file_id="f", completion_window="1h", expires_at=2**31)
    )
    batch = await batches.claim()
    assert batch is not None
    await batches.answer(batch, [KeptAnswer(1, True, "an answer"), KeptAnswer(2, False, "an error")])
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            await batches.finish(batch, "completed", *contents)
    assert not list(database.files.iterdir())
    await batches.finish(batch, "completed", *contents)
    assert [content.read_text() for content in contents] == ["an answer\n", "an error\n"]
    database.close()


async def test_a_batch_that_ended_a_month_ago_goes_with_the_last_of_its_files(tmp_path: Path) -> None:
    database = Database(tmp_path)
    kept = BatchService(database, 10**6)
    batches, contents = kept.batches, [database.files / name for name in ("output", "errors")]
    ended, runs = [
        Batch(owner="o", tenant="", salt="", endpoint="", input_file_id="f", completion_window="1h", expires_at=2**31)
        for _ in range(2)
    ]
    await batches.create(ended)
    assert await batches.claim() is not None
    await batches.answer(ended, [KeptAnswer(1, True, "an answer")])
    await batches.finish(ended, "completed", *contents)
    await batches.create(runs)
    month_later = time.time() + KEPT_S + 60.0
    await batches.sweep(month_later)
    (output,) = await kept.files.list("o", purpose=None, after=None, limit=10, newest_first=True)
    assert (await batches.get(ended.id, "o")).output_file_id == output.id
    await kept.files.delete(output.id, "o")
    await batches.sweep(month_later - 120.0)
    assert len(await batches.list("o", after=None, limit=10)) == 2
    await batches.sweep(month_later)
    assert [batch.id for batch in await batches.list("o", after=None, limit=10)] == [runs.id]
    with pytest.raises(NotFoundError):
        await batches.get(ended.id, "o")
    database.close()


async def test_what_is_deleted_or_has_expired_makes_room_though_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record's deletion needs room on the disk that the content's gives: also while a batch waits for it."""
    monkeypatch.setattr(service, "_LOOK_S", 0.0)
    monkeypatch.setattr(service, "_SWEEP_S", 0.0)
    database = Database(tmp_path)
    batches = BatchService(database, 10**6)
    files, orphan = batches.files, batches.files.new_content()
    contents = [batches.files.new_content() for _ in range(3)]
    for content, expires_after_s in zip(contents, (None, None, 100), strict=True):
        content.write_text("x")
        os.utime(content, (0, 0))  # longer ago than any that is on its way
        await files.add(content, "o", filename="f", purpose="batch", expires_after_s=expires_after_s)
    kept, deleted, expired = contents

    async with batches.running(Server().send, MODELS):
        batch = await begun(batches, "gone")
        await eventually(lambda: batch.id in batches._runs)
        with ExitStack() as stack:
            # Between transactions: to undo one SQLite writes in place, as a full disk allows and this limit does not.
            await database.in_thread(stack.enter_context, a_full_disk())
            with pytest.raises(sqlite3.OperationalError):
                await files.delete(deleted.name, "o")
            assert not deleted.exists() and kept.exists()
            with pytest.raises(sqlite3.OperationalError):
                await files.sweep(time.time() + 200.0)
            assert not expired.exists()
            orphan.hardlink_to(kept)  # takes no room
            await eventually(lambda: not orphan.exists())
        with pytest.raises(NotFoundError):
            [piece async for piece in files.read(await files.get(deleted.name, "o"))]
        await files.delete(deleted.name, "o")
        with pytest.raises(NotFoundError):
            await files.get(deleted.name, "o")
        assert kept.exists()


async def test_answers_wait_for_a_folder_that_takes_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is computed again; and they are written together."""
    monkeypatch.setattr(service, "_WAIT_S", 0.01)
    database, num_sent, may_end = Database(tmp_path), 0, asyncio.Event()
    batches, written = BatchService(database, 10**6), list[int]()
    answer = batches.batches.answer

    async def send(batch: Batch, line: BatchLine) -> LineAnswer:
        nonlocal num_sent
        num_sent += 1
        await may_end.wait()
        return LineAnswer(status=200, body="{}")

    async def noted(batch: Batch, answers: Iterable[KeptAnswer]) -> None:
        answers = list(answers)
        await answer(batch, answers)
        written.append(len(answers))

    monkeypatch.setattr(batches.batches, "answer", noted)
    async with batches.running(send):
        batch = await begun(batches, *["here"] * 50)
        await eventually(lambda: num_sent == 50)
        await database.in_thread(database._connection.execute, "PRAGMA query_only = 1")
        may_end.set()
        await eventually(lambda: "answers of batch" in caplog.text)
        await database.in_thread(database._connection.execute, "PRAGMA query_only = 0")
        await eventually(lambda: sum(written) == 50)
        await eventually(lambda: batch.id not in batches._runs)
        ended = await batches.batches.get(batch.id, "o")
    assert (ended.status, ended.num_succeeded, num_sent) == ("completed", 50, 50)
    assert len(written) < 10


async def test_a_folder_that_cannot_be_written_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once that it can be again."""
    monkeypatch.setattr(service, "_LOOK_S", 0.0)
    database = Database(tmp_path)
    batches, looks = BatchService(database, 10**6), list[None]()
    once = batches._once

    async def counted(send: service.SendFor) -> None:
        looks.append(None)
        await once(send)

    async def allow(writes: bool) -> None:
        await database.in_thread(database._connection.execute, f"PRAGMA query_only = {int(not writes)}")

    monkeypatch.setattr(batches, "_once", counted)
    await allow(False)
    async with batches.running(Server().send):
        await eventually(lambda: len(looks) > 3)
        await allow(True)
        await eventually(lambda: "can be looked at again" in caplog.text)
        num_looks = len(looks)
        await eventually(lambda: len(looks) > num_looks + 3)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


async def test_a_gateway_ends_in_order_though_its_folder_takes_no_writes(tmp_path: Path) -> None:
    database = Database(tmp_path)
    batches, responses = BatchService(database, 10**6), StoredResponses(database, 10**6)
    async with batches.running(Server().send, MODELS), responses.running():
        batch = await begun(batches, "gone")
        await eventually(lambda: batch.id in batches._runs)
        known: Any = {"owner": "o", "previous": None, "is_background": True, "items": "[]", "response": "{}"}
        await responses.begin(StoredResponse(id="r", status="queued", runs_until=1.0, **known), never)
        await database.in_thread(database._connection.execute, "PRAGMA query_only = 1")
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        database._connection.execute("SELECT 1")


async def never(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.Event().wait()
