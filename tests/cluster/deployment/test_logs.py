"""What Legato logs in a replica: a line of JSON in the replica's own file, at once, with the request's id."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import os
import re
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import NoReturn
from unittest.mock import Mock, patch

import pytest
from ray import serve as ray_serve
from ray._common.formatters import JSONFormatter

from cluster.config.load import load_config
from cluster.deployment.announce import log_with_serve
from cluster.deployment.worker import WorkerDeployment
from tests.cluster.config.test_config import ROOT

PRODUCT = ("cluster", "engine", "kv_transfer", "prefill_workers", "decode_workers")


@pytest.fixture
def replica_log(tmp_path: Path) -> Iterator[Path]:
    """As Serve configures a replica's log in JSON: through a buffer that puts the replica's name into each record."""
    path = tmp_path / "replica.log"
    file = logging.FileHandler(path)
    file.setFormatter(JSONFormatter())
    buffer = MemoryHandler(capacity=1000, target=file)
    buffer.addFilter(Named())
    serve, root = logging.getLogger("ray.serve"), logging.getLogger()
    before = serve.handlers[:], root.handlers[:], root.level
    serve.handlers = [buffer]
    try:
        yield path
    finally:
        serve.handlers, root.handlers = before[0], before[1]
        root.setLevel(before[2])
        file.close()


class Named(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.replica = "abc"
        return True


def test_lines_are_objects_that_name_the_request(replica_log: Path) -> None:
    log_with_serve("INFO")
    logging.getLogger("cluster.gateway.orchestrator").warning("request %s ended", "r-0", extra={"request": "r-0"})
    logging.getLogger("engine.steps.loop").info("calibrated")
    logging.getLogger("engine.steps.loop").debug("nobody wants to know")
    first, second = (json.loads(line) for line in replica_log.read_text().splitlines())
    told = {"levelname": "WARNING", "message": "request r-0 ended", "request": "r-0", "replica": "abc"}
    assert told.items() <= first.items() and isinstance(first["timestamp_ns"], int)
    assert (second["levelname"], second["message"]) == ("INFO", "calibrated") and "request" not in second


def test_whatever_is_said_of_one_request_names_it() -> None:
    """In the record, by which the dashboard's log view finds it: the text alone is for people."""
    texts = [path.read_text(encoding="utf-8") for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    trees = [ast.parse(text) for text in texts if "logger." in text]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    logged = [ast.unparse(call) for call in calls if ast.unparse(call.func).startswith("logger.")]
    said = [call for call in logged if re.match(r"logger\..*(request|response) %s", call)]
    assert len(said) > 5 and [call for call in said if "extra=" not in call] == []


def test_exceptions_are_in_their_line(replica_log: Path) -> None:
    log_with_serve("ERROR")
    try:
        raise ValueError("of that")
    except ValueError:
        logging.getLogger("engine").exception("a step failed")
    (line,) = replica_log.read_text().splitlines()
    assert "ValueError: of that" in json.loads(line)["exc_text"]


def test_a_worker_that_cannot_start_says_why_in_its_own_log(replica_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node was started without the secret. Serve ends what it has constructed, and had only an error about that."""
    monkeypatch.setattr("cluster.deployment.worker.keep_replica_on_loopback", lambda: None)
    monkeypatch.setattr(ray_serve, "get_replica_context", fail)
    worker = Collected.__new__(Collected)

    async def start_and_end() -> None:
        with pytest.raises(RuntimeError, match="no secret here"):
            await WorkerDeployment.__init__(worker, "decode", load_config({}), [], None, Mock())
        await WorkerDeployment.__del__(worker)

    with patch.dict(os.environ):
        asyncio.run(start_and_end())
    (line,) = [json.loads(text) for text in replica_log.read_text().splitlines()]
    assert line["message"] == "a decode worker cannot start"
    assert "no secret here" in line["exc_text"]


class Collected(WorkerDeployment):
    """One whose end Serve alone awaits, not whoever collects it."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


def fail() -> NoReturn:
    raise RuntimeError("no secret here")
