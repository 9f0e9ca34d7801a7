"""Mini clusters of decode workers alone, in which one computes each prompt and another one decodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from decode_workers.worker import DecodeWorker
from kv_transfer.messages.scheduling import Place, Placement
from tests.support.clusters.mini_cluster import MiniCluster


@contextlib.contextmanager
def split(cluster: MiniCluster, *parts: float, block_size: int = 16) -> Iterator[list[Placement]]:
    """Of each request that two workers take part in, the first computes so much, in whole blocks, and the second the
    rest. `parts` come in turns, of the tokens of which there is more than a block; none: all stay whole. Yields those
    placements."""
    client = cluster.orchestrator.scheduler
    place = client.place
    placed: list[Placement] = []

    async def in_parts(query: Place) -> Placement:
        placement = await place(query)
        most = (query.num_tokens - 1) // block_size
        if not parts or placement.prefill is None or most < 1:
            return placement
        at = max(1, round(parts[len(placed) % len(parts)] * most)) * block_size
        placed.append(replace(placement, split_at=at))
        return placed[-1]

    client.place = in_parts  # type: ignore[method-assign,assignment]
    yield placed
    client.place = place  # type: ignore[method-assign]


@contextlib.contextmanager
def computed_elsewhere(cluster: MiniCluster) -> Iterator[list[Placement]]:
    """Whom the scheduler lets do all of a request gets its KV from another one, if there is one. Yields such pairs."""
    client = cluster.orchestrator.scheduler
    place = client.place
    pairs: list[Placement] = []

    async def apart(query: Place) -> Placement:
        placement = await place(query)
        others = [w.info.worker_id for w in cluster.decodes if w.info.worker_id != placement.decode]
        may_compute = sorted(set(others) - set(query.exclude))
        if placement.prefill is not None or not may_compute:
            return placement
        pairs.append(replace(placement, prefill=may_compute[len(pairs) % len(may_compute)]))
        return pairs[-1]

    client.place = apart  # type: ignore[method-assign,assignment]
    yield pairs
    client.place = place  # type: ignore[method-assign]


def computing(cluster: MiniCluster) -> DecodeWorker:
    """Who computes a prompt for another one, or holds its blocks for it."""
    return next(worker for worker in cluster.decodes if worker.sender.num_handing_over)
