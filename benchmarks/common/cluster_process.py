"""A cluster as a user starts it: `python -m cluster serve FILE` in processes of its own, on a free port."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.part import ROOT, Json
from cluster.deployment.ray_environment import free_port

QUICKSTART = ROOT / "ray_configs" / "quickstart.yaml"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


@contextlib.contextmanager
def running_cluster(
    changes: Json, environment: Mapping[str, str] | None = None, *, dashboard: bool = False
) -> Iterator[int]:
    """The quickstart cluster with some of its settings changed (`{"decode": {"threads": 2}}`), and variables of its
    environment; gives its HTTP port. `dashboard`: with Ray's."""
    with tempfile.TemporaryDirectory(prefix="legato-bench-") as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(yaml.safe_dump(cluster_document(changes)), encoding="utf-8")
        port = free_port()
        command = [sys.executable, "-m", "cluster", "serve", str(path), "--port", str(port)]
        process = subprocess.Popen(
            command if dashboard else [*command, "--no-dashboard"],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            _await_serving(process)
            yield port
        finally:
            _stop(process)


def cluster_document(changes: Json) -> dict[str, Any]:
    """The YAML file's content: sections are changed setting by setting, or taken out (None), all else is replaced."""
    document: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    settings = document["applications"][0]["args"]
    for section, values in changes.items():
        if values is None:
            settings.pop(section, None)
            continue
        settings[section] = {**settings.get(section, {}), **values} if isinstance(values, dict) else values
    return document


def _await_serving(process: subprocess.Popen[str]) -> None:
    """Wait until the cluster says that it serves. Its output is read on to the end, or it would block."""
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    said: list[str] = []
    while True:
        try:
            line = lines.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            line = None
        if line is None:
            raise RuntimeError("the cluster did not come up; it said:\n" + "".join(said[-40:]))
        said.append(line)
        if line.startswith("Serving on"):
            return


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
