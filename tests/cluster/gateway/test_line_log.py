"""Logs in lines that other programs read."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import pytest

from cluster.gateway import line_log
from cluster.gateway.line_log import LineLog, LineWriter
from cluster.gateway.request_log import log_of_model
from tests.support.waiting import HANGS_S, wait_until


def test_it_may_lie_in_the_user_s_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`gateway.request_log: ~/legato/requests.jsonl`, as `gateway.storage` and `kv.disk.path` may."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    LineLog(Path("~/logs/lines")).append(["one"])
    assert (tmp_path / "logs" / "lines").read_text() == "one\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs"]


def test_a_full_file_is_put_aside_once_though_two_processes_find_it_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = tmp_path / "log", fcntl.flock
    log, faster = LineLog(path, max_bytes=100), LineLog(path, max_bytes=100)
    log.append(["a" * 60])

    def lock_second(file: IO[bytes], operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        faster.append(["b" * 50])
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", lock_second)
    log.append(["c" * 45])
    assert (tmp_path / "log.1").read_text().split() == ["a" * 60]
    assert path.read_text().split() == ["b" * 50, "c" * 45]


class Entry(str):
    @property
    def request_id(self) -> str:
        return str(self)


class HeldLog(LineLog):
    """A disk that takes its time, once for each of `goes_on`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.goes_on = threading.Semaphore(0)

    def append(self, lines: Iterable[str] = ()) -> None:
        assert threading.current_thread() is not threading.main_thread(), "the loop would wait as long"
        assert self.goes_on.acquire(timeout=HANGS_S)
        super().append(lines)


def writer_of(log: LineLog, max_waiting: int = 1000) -> LineWriter[Entry]:
    return LineWriter(log, "log of m", lambda entry: [str(entry)], max_waiting)


def test_nobody_waits_for_the_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes meanwhile waits, up to a bound; then it is left out until half of that is written. The process's log
    says so once, and then how many entries it was."""
    monkeypatch.setattr(line_log, "_AT_ONCE", 1)
    log = HeldLog(tmp_path / "log")
    writer = writer_of(log, max_waiting=4)
    for number in range(7):
        writer.put(Entry(number))
    log.goes_on.release()
    wait_until(lambda: len(writer._entries) == 3)
    writer.put(Entry("as the disk is about as fast as entries come"))
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    log.goes_on.release(2)
    wait_until(lambda: len(writer._entries) == 1)
    writer.put(Entry(7))
    log.goes_on.release(9)
    writer.stop(HANGS_S)
    assert (tmp_path / "log").read_text().split() == list("01237")
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 2
    assert "4 entries are not in the log of m" in caplog.messages[-1]


def test_what_a_slow_disk_costs_in_the_end_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = HeldLog(tmp_path / "log")
    writer = writer_of(log)
    for number in range(3):
        writer.put(Entry(number))
    writer.stop(within_s=0)
    assert "3 entries are not in" in caplog.messages[-1], "unless the disk hurries up after all"
    log.goes_on.release(9)
    writer.stop(HANGS_S)
    assert (tmp_path / "log").read_text().split() == list("012")


def test_what_cannot_be_written_is_tried_again_though_nothing_comes(tmp_path: Path) -> None:
    log = LineLog(tmp_path / "a-file" / "log")
    (tmp_path / "a-file").write_text("in the way")
    writer = writer_of(log)
    writer.put(Entry("one"))
    wait_until(lambda: log.has_waiting)
    (tmp_path / "a-file").unlink()
    wait_until(lambda: not log.has_waiting)
    assert (tmp_path / "a-file" / "log").read_text() == "one\n"
    writer.stop(HANGS_S)


def test_the_last_lines_wait_for_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways of one machine stop at one time and share a file."""
    path, lock, num_tries = tmp_path / "log", fcntl.flock, 0
    with path.open("ab") as other:
        lock(other, fcntl.LOCK_EX)

        def lock_in_vain(file: IO[bytes], operation: int) -> None:
            nonlocal num_tries
            try:
                lock(file, operation)
            except BlockingIOError:
                num_tries += 1
                if num_tries == 3:  # the first when it is put, or stopped
                    lock(other, fcntl.LOCK_UN)
                raise

        monkeypatch.setattr(fcntl, "flock", lock_in_vain)
        writer = writer_of(LineLog(path))
        writer.put(Entry("last"))
        writer.stop(HANGS_S)
    assert path.read_text() == "last\n"


def test_who_has_no_lines_costs_nobody_else_any(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log"
    writer = LineWriter[Entry](LineLog(path), "log of m", lambda entry: [f"{1 / int(entry)}"], 10)
    for number in (1, 0, 2):
        writer.put(Entry(number))
    writer.stop(HANGS_S)
    assert path.read_text().split() == ["1.0", "0.5"]
    assert "request 0 is not in the log of m" in caplog.messages[0]


def test_a_model_s_full_log_is_in_no_other_model_s_place(tmp_path: Path) -> None:
    logs = {name: LineLog(log_of_model(f"{tmp_path}/log", name), max_bytes=10) for name in ("llama-3.1", "llama-3")}
    for name, log in logs.items():
        for _ in range(2):
            log.append([name])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "log.llama-3%2E1": "llama-3.1\n",
        "log.llama-3%2E1.1": "llama-3.1\n",
        "log.llama-3": "llama-3\n",
        "log.llama-3.1": "llama-3\n",
    }
