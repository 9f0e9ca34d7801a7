"""A gateway's log of what it served, for `python -m cluster whatif`: a line for each request when it ends.

Each file begins with the workers' own costs; what ends before they are known waits until then. Blocks are named by
keyed hashes, so that nobody can tell from a log whether a text that he guesses was sent.
Knows the format's meaning and when a request counts; `cluster.gateway.request_log` knows how it is written.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from cluster.gateway.line_log import MAX_BYTES, LineLog
from cluster.gateway.prompt_hashes import naming_block_size
from cluster.gateway.request_log import LoggedCluster, LoggedRequest, LoggedWorker, cluster_line, request_line
from cluster.gateway.request_state import RequestRun, RequestState
from cluster.slo.classes import SloConfig
from engine.kv.prefix import HASH_BYTES
from kv_transfer.messages.fields import Role
from kv_transfer.messages.workers import KnownWorker
from kv_transfer.worker.cost_report import reported_cost, reported_noise

_ANY_NUMBER: Final = 100_000  # of sequences, where a worker does not bound it
_NAME_BYTES: Final = 8  # of a block's hash: enough to tell the blocks of a log apart


class RequestRecorder:
    """`workers()` gives the live ones. Several gateways of one machine and one `secret` may share a file."""

    def __init__(
        self,
        path: Path,
        slo: SloConfig,
        workers: Callable[[], Iterable[KnownWorker]],
        *,
        secret: bytes,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._file = LineLog(path, max_bytes, self._head)
        self._slo = slo
        self._workers = workers
        self._key = hashlib.blake2b(secret, person=b"legato-reqlog").digest()

    def ended(self, run: RequestRun) -> None:
        """Called when the request leaves the gateway."""
        logged = logged_request(run, time.time() - time.monotonic(), self._key)
        if logged is not None:
            self._file.append([request_line(logged)])

    def _head(self) -> str | None:
        cluster = logged_cluster(self._workers(), self._slo)
        return None if cluster is None else cluster_line(cluster)


def logged_request(run: RequestRun, clock_offset_s: float, key: bytes) -> LoggedRequest | None:
    """None for one whose client left before there was anything to see. A request that was cut short counts with the
    tokens that it had. `key`: of the hashes that name its blocks."""
    first, num_output = run.first_token_at, len(run.emitted) - len(run.request.output_token_ids)
    if first is None and run.state is not RequestState.FAILED:
        return None
    arrived_at, hashes = run.terms.arrived_at, run.prefix_hashes
    return LoggedRequest(
        request_id=run.request_id,
        arrival_s=arrived_at + clock_offset_s,
        prompt_tokens=len(run.request.prompt_token_ids),
        output_tokens=num_output,
        hashes=tuple(_name(hashes[at : at + HASH_BYTES], key) for at in range(0, len(hashes), HASH_BYTES)),
        slo_class=run.terms.slo.slo_class,
        ttft_s=None if first is None else first - arrived_at,
        tpot_s=None if first is None or num_output < 2 else (run.last_token_at - first) / (num_output - 1),
    )


def _name(block_hash: bytes, key: bytes) -> str:
    return hashlib.blake2b(block_hash, key=key, digest_size=_NAME_BYTES).hexdigest()


def logged_cluster(workers: Iterable[KnownWorker], slo: SloConfig) -> LoggedCluster | None:
    """None as long as a pool's workers have not reported what their steps cost."""
    workers = list(workers)
    pools: dict[Role, list[KnownWorker]] = {
        role: [w for w in workers if w[0].role == role] for role in ("prefill", "decode")
    }
    prefill, decode = (_logged_worker(pools[role]) for role in ("prefill", "decode"))
    block_size = naming_block_size(info for info, _ in workers)
    if decode is None or block_size is None or (prefill is None and pools["prefill"]):
        return None
    return LoggedCluster(
        num_prefill=len(pools["prefill"]),
        num_decode=len(pools["decode"]),
        prefill=prefill,
        decode=decode,
        block_size=block_size,
        slo=slo,
    )


def _logged_worker(pool: list[KnownWorker]) -> LoggedWorker | None:
    """The first that reports its costs stands for its pool."""
    for info, snapshot in pool:
        cost = reported_cost(info.role, snapshot.step_cost)
        if cost is not None:
            return LoggedWorker(
                cost=cost,
                kv_tokens=info.num_blocks // info.layer_groups * info.block_size,
                token_budget=info.chunk_tokens or info.max_model_len,
                max_num_seqs=info.max_num_seqs or _ANY_NUMBER,
                noise=reported_noise(info.role, snapshot.step_cost),
            )
    return None
