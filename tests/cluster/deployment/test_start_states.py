"""What `legato serve` prints while workers come up, on a terminal and elsewhere."""

from __future__ import annotations

import io
from typing import Any

import pytest

from cluster.config.load import load_config
from cluster.deployment import local_cluster
from cluster.deployment.local_cluster import Interruption, StartError, StartStates, wait_until_ready

GB = 10**9


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def loading(worker_id: str, read: float, placed: float = 0.0, total: int = 16 * GB) -> dict[str, Any]:
    return {"worker_id": worker_id, "total_bytes": total, "read_bytes": int(read), "placed_bytes": int(placed)}


def seen(*reports: dict[str, Any], ready: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"workers": [{"role": role} for role in ready], "loading": list(reports)}


def printed(stream: io.StringIO, *seen: dict[str, Any]) -> StartStates:
    states = StartStates("legato", "http://nowhere", load_config({"decode": {"replicas": 2}}), stream)
    for cluster in seen:
        states.tell_of_workers(cluster)
    return states


def told(stream: io.StringIO) -> list[str]:
    """Lines without their times."""
    return [line.partition(" s  ")[2] for line in stream.getvalue().splitlines()]


def test_in_a_pipe_there_is_a_line_for_each_tenth_of_each_worker() -> None:
    stream = io.StringIO()
    far = [seen(loading("d-1", share * 16 * GB / 100)) for share in range(101)]
    placed = [seen(loading("d-1", 16 * GB, share * 16 * GB / 100)) for share in range(1, 101)]
    printed(stream, seen(loading("d-1", 0, total=0)), *far, *placed)
    lines = told(stream)
    assert lines[:3] == ["d-1: begins", "d-1: read 0.0 of 16.0 GB", "d-1: read 3.2 of 16.0 GB"]
    assert "d-1: packed 3.2 of 16.0 GB" in lines
    assert lines[-1] == "d-1: all 16.0 GB loaded, tries steps out"
    assert 10 < len(lines) < 16


def test_which_worker_loads_what() -> None:
    stream = io.StringIO()
    printed(stream, seen(loading("p-1", 2e8, total=269_000_000), loading("d-1", 16 * GB, GB)))
    assert told(stream) == ["p-1: read 200.0 of 269.0 MB", "d-1: packed 1.0 of 16.0 GB"]


def test_a_terminal_has_one_line_that_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "41")
    stream = Terminal()
    states = printed(
        stream,
        seen(loading("p-1", 4 * GB), loading("d-1", 8 * GB)),
        seen(loading("p-1", 5 * GB), loading("d-1", 9 * GB)),
        seen(loading("p-1", 5 * GB), ready=("decode",)),
    )
    states.close()
    pieces = stream.getvalue().split("\r\x1b[K")
    assert [piece.partition(" s  ")[2] for piece in pieces] == [
        "",
        "p-1: read 4.0 of 16.0 GB; d-1",
        "p-1: read 5.0 of 16.0 GB; d-1",
        "Ready workers: 1 of 3: 1 decode\n",
        "p-1: read 5.0 of 16.0 GB",
        "",
    ]
    assert max(map(len, pieces)) < 45


def test_all_are_ready_when_as_many_are_there_as_are_started() -> None:
    some, all_of_them = seen(ready=("decode", "prefill")), seen(ready=("decode", "prefill", "decode"))
    assert not printed(io.StringIO(), some).all_ready
    assert printed(stream := io.StringIO(), some, all_of_them).all_ready
    assert told(stream) == ["Ready workers: 2 of 3: 1 prefill, 1 decode", "Ready workers: 3 of 3: 1 prefill, 2 decode"]


def test_who_waits_in_vain_is_told_where_the_logs_of_these_nodes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    states = StartStates("legato", "http://nowhere", load_config({}), io.StringIO(), logs="/tmp/nodes/NODE/logs")
    monkeypatch.setattr(states, "refresh", lambda: None)
    monkeypatch.setattr(local_cluster, "_why_not_ready", lambda url: "nobody is there")
    with pytest.raises(StartError, match=r"\(nobody is there\)\. .* under /tmp/nodes/NODE/logs\.$"):
        wait_until_ready(states, Interruption(), silence_s=-1.0)
