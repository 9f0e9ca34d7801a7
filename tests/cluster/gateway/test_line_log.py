"""Logs in lines that other programs read."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.gateway.line_log import LineLog
from cluster.gateway.request_log import log_of_model


def test_it_may_lie_in_the_user_s_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`gateway.request_log: ~/legato/requests.jsonl`, as `gateway.storage` and `kv.disk.path` may."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    LineLog(Path("~/logs/lines")).append(["one"])
    assert (tmp_path / "logs" / "lines").read_text() == "one\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs"]


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
