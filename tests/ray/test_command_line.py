"""What `python -m cluster` says when it cannot start: one sentence, no traceback, before Ray is touched."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.__main__ import main
from tests.ray.served_cluster import MODEL, config_file


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cluster", *arguments], capture_output=True, text=True, timeout=240, check=False
    )


def test_a_setting_that_does_not_exist(tmp_path: Path) -> None:
    result = run("serve", str(config_file(tmp_path, {"decode": {"max_num_seq": 4}})))
    assert result.returncode == 1
    assert "decode.max_num_seq is no setting; did you mean max_num_seqs?" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", str(config_file(tmp_path, {"model": {"ref": MODEL}}, port)))
    assert result.returncode == 1
    assert f"127.0.0.1:{port} cannot be listened on" in result.stderr
    assert "--port" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_that_does_not_exist(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["legato", "serve", "nowhere.yaml"])
    assert main() == 1
    assert "nowhere.yaml cannot be read" in capsys.readouterr().err
