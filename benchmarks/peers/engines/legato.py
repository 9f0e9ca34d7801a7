"""Legato itself: the server of one worker that does both, of a prefill and a decode worker, and the bare engine; and
transformers, which lives in the same environment."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

from benchmarks.common.cluster_process import running_cluster
from benchmarks.common.part import ROOT, Json, commit
from benchmarks.common.workload import MODEL
from benchmarks.peers.engines.http_asker import HttpAsker
from benchmarks.peers.engines.installation import model_folder
from benchmarks.peers.engines.started import START_TIMEOUT_S, end_process
from benchmarks.peers.peer import MAX_CONCURRENT, THREADS, Answer, Peer, PeerUnavailableError, Request

WAVE_TIMEOUT_S = 600.0


class ChildAsker:
    """A child that has said `ready`. What it says else goes to this process's standard error."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        if self._read(START_TIMEOUT_S).strip() != "ready":
            raise PeerUnavailableError("the engine's process did not say that it is ready")

    def wave(self, requests: Sequence[Request]) -> list[Answer]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([dataclasses.asdict(request) for request in requests]) + "\n")
        self._process.stdin.flush()
        return [Answer(**fields) for fields in json.loads(self._read(WAVE_TIMEOUT_S))]

    def steady(self, streams: Sequence[Request], prompts: Sequence[Request]) -> tuple[list[Answer], list[Answer]]:
        raise PeerUnavailableError("an engine without a server takes no request while it answers others")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read(self, timeout_s: float) -> str:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerUnavailableError(f"the engine's process said nothing for {timeout_s:.0f} s") from None
        if line is None:
            raise PeerUnavailableError(f"the engine's process ended with {self._process.wait()}")
        return line


@contextlib.contextmanager
def child_engine(*arguments: str) -> Iterator[ChildAsker]:
    """`python -m benchmarks.peers.engines.in_process ...` with Legato's own interpreter."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.peers.engines.in_process", *arguments],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield ChildAsker(process)
    finally:
        end_process(process)


_DECODE: Json = {"max_num_seqs": MAX_CONCURRENT}
COLOCATED: Json = {"prefill": {"replicas": 0}, "decode": {**_DECODE, "threads": THREADS}}
PLAIN_STEPS: Json = {"prefill": {"replicas": 0}, "decode": {**_DECODE, "threads": THREADS, "speculation": "off"}}
APART: Json = {"prefill": {"threads": 1}, "decode": {**_DECODE, "threads": 1}}


def quantised(kind: str) -> Json:
    return {**COLOCATED, "model": {"quantization": kind}}


def legato(name: str, told: str, settings: Json, works: tuple[str, ...], model: str = MODEL) -> Peer:
    return Peer(
        name=name,
        told=f"Legato {commit()}, {told}",
        works=works,
        prepare=functools.partial(_prepare, model),
        start=functools.partial(_start, settings, model),
    )


def in_process(
    name: str, engine: str, told: str, works: tuple[str, ...], weights: str = "bfloat16", model: str = MODEL
) -> Peer:
    """`engine`: legato, legato-drafts or transformers; `weights`: a dtype, or int8 or int4 for Legato."""
    return Peer(
        name=name,
        told=f"{told}, in a process of its own without a server",
        works=works,
        prepare=functools.partial(_prepare, model),
        start=functools.partial(child_engine, engine, weights, model),
    )


def _prepare(model: str) -> None:
    model_folder(model)


@contextlib.contextmanager
def _start(settings: Json, model: str) -> Iterator[HttpAsker]:
    if model != MODEL:
        settings = {**settings, "model": {"ref": str(model_folder(model)), "served_name": MODEL}}
    with running_cluster(settings) as port:
        yield HttpAsker(port, MODEL)
