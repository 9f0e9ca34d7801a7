"""A real Prometheus beside a real cluster: configured as Ray has it, with Legato's rules, and asked over HTTP."""

from __future__ import annotations

import contextlib
import math
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from cluster.deployment.ray_environment import free_port
from tests.operators.queries import RULES
from tests.support.waiting import HANGS_S, wait_until

Samples = dict[tuple[tuple[str, str], ...], float]
"""By their labels."""


@dataclass(frozen=True)
class Prometheus:
    url: str

    def ask(self, query: str) -> Samples:
        """What it knows now, without the labels that Ray adds."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": query}, timeout=30)
        assert answer.status_code == 200, f"{query}: {answer.text}"
        found: list[dict[str, Any]] = answer.json()["data"]["result"]
        return {tuple(sorted(row["metric"].items())): float(row["value"][1]) for row in found}

    def number(self, query: str) -> float:
        """Of a query with one answer; NaN while there is none."""
        values = [*self.ask(query).values()]
        assert len(values) < 2, f"{query} has several answers"
        return values[0] if values else math.nan


def ray_config(session: Path) -> dict[str, Any]:
    """What Ray has written for a Prometheus, which scrapes what Ray's discovery file names."""
    config: dict[str, Any] = yaml.safe_load((session / "metrics" / "prometheus" / "prometheus.yml").read_text())
    return config


@contextlib.contextmanager
def running_prometheus(binary: str, session: Path, folder: Path, port: int | None = None) -> Iterator[Prometheus]:
    """Scrapes and evaluates every second. `port`: one that was told to others; else any."""
    config = ray_config(session) | {"rule_files": [str(RULES)]}
    config["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    port = port or free_port()
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                binary,
                f"--config.file={path}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        prometheus = Prometheus(f"http://127.0.0.1:{port}")
        wait_until(lambda: _is_ready(prometheus.url), what="Prometheus does not start")
        yield prometheus
    finally:
        process.terminate()
        try:
            process.wait(HANGS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(url: str) -> bool:
    time.sleep(0.1)
    try:
        return httpx.get(f"{url}/-/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
