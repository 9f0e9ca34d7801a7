"""What `legato serve` asks of Ray, up to the call that would start it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import ray

from cluster.__main__ import main
from cluster.deployment import local_cluster
from cluster.deployment.ray_environment import free_port


class Started(Exception):
    """In place of a Ray."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options


def start(**options: Any) -> NoReturn:
    raise Started(**options)


@pytest.mark.parametrize(("options", "has_dashboard"), [([], True), (["--no-dashboard"], False)])
def test_the_dashboard_is_started_unless_it_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], has_dashboard: bool
) -> None:
    # A model's folder, as far as it is looked at by then.
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    line = ["legato", "serve", str(tmp_path), "--cpu", "--port", str(free_port()), *options]
    monkeypatch.setattr("sys.argv", line)
    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(local_cluster, "interrupted_by_signals", threading.Event)  # the tests' own handlers stay
    with patch.dict(os.environ, RAY_AUTH_TOKEN_PATH=str(tmp_path / "token")), pytest.raises(Started) as started:
        main()
    assert started.value.options["include_dashboard"] is has_dashboard
