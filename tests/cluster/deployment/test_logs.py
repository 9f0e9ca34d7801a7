"""What Legato logs in a replica: a line of JSON in the replica's own file, at once, with the request's id."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest
from ray._common.formatters import JSONFormatter

from cluster.deployment.logs import log_with_serve


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
    assert told.items() <= first.items()
    assert (second["levelname"], second["message"]) == ("INFO", "calibrated") and "request" not in second


def test_exceptions_are_in_their_line(replica_log: Path) -> None:
    log_with_serve("ERROR")
    try:
        raise ValueError("of that")
    except ValueError:
        logging.getLogger("engine").exception("a step failed")
    (line,) = replica_log.read_text().splitlines()
    assert "ValueError: of that" in json.loads(line)["exc_text"]
