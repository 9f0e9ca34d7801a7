"""Legato itself: the server of one worker that does both, of a prefill and a decode worker, and the bare engine; and
transformers, which lives in the same environment."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from benchmarks.common.cluster_process import running_cluster
from benchmarks.common.provenance import commit
from benchmarks.common.summary import Json
from benchmarks.common.workload import MODEL
from benchmarks.peers.child_asker import child_engine
from benchmarks.peers.http_asker import HttpAsker
from benchmarks.peers.peer import MAX_CONCURRENT, THREADS, Peer
from benchmarks.peers.weights import model_folder

_DECODE: Json = {"max_num_seqs": MAX_CONCURRENT, "chunk_tokens": 512}
COLOCATED: Json = {"prefill": {"replicas": 0}, "decode": {**_DECODE, "threads": THREADS}}
APART: Json = {"prefill": {"threads": 1}, "decode": {**_DECODE, "threads": 1}}


def quantised(kind: str) -> Json:
    return {**COLOCATED, "model": {"quantization": kind}}


def legato(name: str, told: str, settings: Json, works: tuple[str, ...]) -> Peer:
    return Peer(
        name=name,
        told=f"Legato {commit()}, {told}",
        works=works,
        prepare=_prepare,
        start=functools.partial(_start, settings),
    )


def in_process(name: str, engine: str, told: str, works: tuple[str, ...], weights: str = "bfloat16") -> Peer:
    """`engine`: legato or transformers; `weights`: a dtype, or int8 or int4 for Legato."""
    return Peer(
        name=name,
        told=f"{told}, in a process of its own without a server",
        works=works,
        prepare=_prepare,
        start=functools.partial(child_engine, engine, weights),
    )


def _prepare() -> None:
    model_folder()


@contextlib.contextmanager
def _start(settings: Json) -> Iterator[HttpAsker]:
    with running_cluster(settings) as port:
        yield HttpAsker(port, MODEL)
