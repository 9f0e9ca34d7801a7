"""Logs in lines that other programs read."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.gateway.line_log import LineLog


def test_it_may_lie_in_the_user_s_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`gateway.request_log: ~/legato/requests.jsonl`, as `gateway.storage` and `kv.disk.path` may."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    LineLog(Path("~/logs/lines")).append(["one"])
    assert (tmp_path / "logs" / "lines").read_text() == "one\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs"]
