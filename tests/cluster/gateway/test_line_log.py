"""Logs in lines that other programs read."""

from __future__ import annotations

import fcntl
import threading
from array import array
from pathlib import Path
from typing import IO

import pytest

from cluster.gateway.line_log import LineLog
from cluster.gateway.request_log import MAX_WAITING, RequestRecorder, log_of_model, read_log
from cluster.gateway.timeline import RequestTimeline, SequenceTimeline
from cluster.slo.classes import RequestTerms, SloConfig
from kv_transfer.messages.workers import KnownWorker
from tests.support.clusters.worker_reports import REPORT, worker_info, worker_snapshot
from tests.support.waiting import HANGS_S

TERMS = RequestTerms(model="m", arrived_at=0.0)


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


def test_streams_do_not_wait_for_the_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What ends meanwhile waits, up to a bound; then it is left out until half of that is written. The gateway's log
    says so once, and then how many it was."""
    slow, goes_on = threading.Event(), threading.Event()

    def workers() -> list[KnownWorker]:
        assert threading.current_thread() is not threading.main_thread(), "the loop would wait as long"
        slow.set()
        assert goes_on.wait(HANGS_S)
        return [(worker_info("d1", model="m"), worker_snapshot("d1", step_cost=REPORT))]

    sequence = SequenceTimeline(TERMS)
    sequence.num_prompt_tokens, sequence.token_times, sequence.sent_at = 9, array("d", [1.0, 2.0]), 1.5
    ended = RequestTimeline(endpoint="/v1/completions", terms=TERMS, sequences=[sequence], parsed_at=0.1, ended_at=3.0)
    recorder = RequestRecorder(tmp_path / "log", SloConfig(), workers, model="m", secret=b"a secret")
    recorder.ended(ended)
    assert slow.wait(HANGS_S)
    for _ in range(MAX_WAITING + 2):
        recorder.ended(ended)
    for _ in range(3):  # as if they were being written about as fast as others end
        recorder._ended.get()
        recorder.ended(ended)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    recorder.stop(within_s=0)
    assert f"{MAX_WAITING + 3} requests are not in" in caplog.messages[-1], "unless the disk hurries up after all"
    goes_on.set()
    recorder._thread.join(HANGS_S)
    found, requests = read_log(tmp_path / "log")
    assert (found.num_decode, len(requests)) == (1, MAX_WAITING - 2)


def test_who_was_left_out_is_counted_when_the_disk_is_fast_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = RequestRecorder(tmp_path / "log", SloConfig(), tuple, model="m", secret=b"a secret")
    recorder.stop(HANGS_S)
    ended = RequestTimeline(endpoint="/v1/completions", terms=TERMS)
    for _ in range(MAX_WAITING + 2):
        recorder.ended(ended)
    while recorder._ended.qsize() >= MAX_WAITING // 2:
        recorder._ended.get()
    recorder.ended(ended)
    recorder.ended(ended)
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 2
    assert "2 requests are not in" in caplog.messages[-1]


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
