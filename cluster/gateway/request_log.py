"""What a cluster served and on what, as lines of JSON: the first describes the cluster, each further one a request.

A gateway's `RequestRecorder` writes a line for each choice of a request when it has been answered; `read_logs` reads
them for `python -m cluster whatif`, of several models a file for each. Each file begins with the workers' own costs;
what ends before they are known waits until then. Blocks are named by keyed hashes, so that nobody can tell from a log
whether a guessed text was sent.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote

from pydantic import TypeAdapter, ValidationError

from cluster.gateway.line_log import STOP_S, LineLog, LineWriter
from cluster.gateway.placing import naming_block_size
from cluster.gateway.timeline import Drafts, RequestTimeline, SequenceTimeline
from cluster.slo.classes import SloConfig
from engine.cost_model.fit import StepKind
from engine.cost_model.noise import StepNoise
from engine.cost_model.step_cost import StepCost
from engine.kv.prefix import HASH_BYTES
from kv_transfer.messages.fields import Role
from kv_transfer.messages.workers import KnownWorker, LoadingReport
from kv_transfer.worker.cost_report import observed_steps

T = TypeVar("T")

MAX_WAITING: Final = 1_024  # requests that have ended and are yet to be written
_ANY_NUMBER: Final = 100_000  # of sequences, where a worker does not bound it
_NAME_BYTES: Final = 8  # of a block's hash: enough to tell the blocks of a log apart


class RequestLogError(ValueError):
    """A line of a log is not what the format says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedWorker:
    """A worker of one pool: what its steps cost by its own fit, and how many tokens its KV memory and a step hold.
    Where the noise of a kind of step is not known, each step scatters by the cost's error, independently."""

    cost: StepCost
    kv_tokens: int
    token_budget: int
    max_num_seqs: int
    noise_by_kind: dict[StepKind, StepNoise] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCluster:
    """The cluster that served a log's requests. `prefill` None: there were no prefill workers. `block_size`: tokens of
    the blocks that requests' hashes name. `one_pool`: decode workers compute prompts for each other, too. `model`: that
    all requests were for; "": nobody noted it. `change_s`: workers change their model, and one of another model takes
    so many seconds to have this one, 0 where nobody knows; the numbers are then of those that were started for this
    model. None: workers keep their model.

    Three times are in no worker's cost. `gateway_s`: what HTTP and the gateway add to each first token. `handoff_s`,
    and for each token of a prompt's last chunk `handoff_token_s`: from the first token until decode may go on.
    """

    num_prefill: int
    num_decode: int
    prefill: LoggedWorker | None
    decode: LoggedWorker
    block_size: int
    slo: SloConfig
    gateway_s: float = 0.0
    handoff_s: float = 0.002
    handoff_token_s: float = 0.0
    one_pool: bool = False
    model: str = ""
    change_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRequest:
    """One choice of a request as it was served.

    `arrival_s` counts from any moment common to all. `hashes` name the prompt's full blocks, each together with all
    before it, in any spelling. `ttft_s` None: it was turned away, and `output_tokens` are 0. `tpot_s` None: it had
    fewer than two tokens. `gap_p99_s`: its longest gap but for one in a hundred; None then as well, or where nobody
    noted it. `slo_class` "": the default.
    `drafted_tokens` were guessed and checked by steps; `accepted_tokens` of them became tokens."""

    request_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hashes: tuple[str, ...] = ()
    slo_class: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    gap_p99_s: float | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 0:
            raise ValueError(
                f"request {self.request_id} has {self.prompt_tokens} prompt and {self.output_tokens} output tokens"
            )


Log = tuple[LoggedCluster, Sequence[LoggedRequest]]
"""What a file tells."""

_CLUSTER: Final = TypeAdapter(LoggedCluster)
_REQUEST: Final = TypeAdapter(LoggedRequest)


def log_of_model(log: str, model: str) -> Path:
    """The log of one of several models, beside `log`. One that is full becomes NAME.1, which must be no other model's:
    there are `llama-3` and `llama-3.1`."""
    name = quote(model, safe="")
    return Path(f"{log}.{name.removesuffix('.1')}%2E1" if name.endswith(".1") else f"{log}.{name}")


def logs_of(log: Path) -> list[Path]:
    """The log of that name, or those of several models beside it, by name: see `log_of_model`. Where there are both, as
    the application had one model before or after: those that were written last. Full ones, NAME.1, are left out. Raises
    FileNotFoundError where there is neither."""
    beside = [path for path in log.parent.glob(f"{glob.escape(log.name)}.*") if path.suffix != ".1"]
    if log.exists() and all(path.stat().st_mtime_ns <= log.stat().st_mtime_ns for path in beside):
        return [log]
    if not beside:
        raise FileNotFoundError(errno.ENOENT, "No such file, and none for each of several models beside it", str(log))
    return sorted(beside)


def cluster_line(cluster: LoggedCluster) -> str:
    return _CLUSTER.dump_json(cluster).decode()


def request_line(request: LoggedRequest) -> str:
    return _REQUEST.dump_json(request).decode()


def read_log(path: Path, newest: int | None = None) -> tuple[LoggedCluster, list[LoggedRequest]]:
    """Read the cluster and all requests of a log, or only its `newest` requests. Raises RequestLogError with the line
    that is wrong, OSError where the file cannot be read."""
    with path.open(encoding="utf-8") as lines:
        cluster = _parsed(_CLUSTER, path, 1, next(lines, ""))
        kept = deque(enumerate(lines, start=2), maxlen=newest)
        return cluster, [_parsed(_REQUEST, path, number, line) for number, line in kept]


def read_logs(paths: Iterable[Path], newest: int | None = None) -> dict[str, Log]:
    """Read a log for each model, by the model's name, or the name of the file where a log does not tell it. `newest`:
    only so many requests, the last ones of all models together. Raises RequestLogError with the line that is wrong, or
    for two logs of one model, OSError where a file cannot be read."""
    found: dict[str, tuple[Path, Log]] = {}
    for path in paths:
        log = read_log(path, newest)
        name = log[0].model or path.name
        if name in found:
            raise RequestLogError(
                f"{found[name][0]} and {path} are both of {name}: give one log for each model, of the same time"
            )
        found[name] = path, log
    logs = {name: log for name, (_, log) in found.items()}
    if newest is None or len(logs) == 1:
        return logs
    arrivals = sorted(request.arrival_s for _, requests in logs.values() for request in requests)
    since = arrivals[-newest] if newest < len(arrivals) else -math.inf
    return {
        name: (cluster, [request for request in requests if request.arrival_s >= since])
        for name, (cluster, requests) in logs.items()
    }


def _parsed(adapter: TypeAdapter[T], path: Path, number: int, line: str) -> T:
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the line"
        what = "the cluster" if number == 1 else "a request"
        raise RequestLogError(f"{path}, line {number} does not describe {what}: {where}: {first['msg']}") from error


class RequestRecorder:
    """Writes a gateway's log of the requests for one model, in a thread of its own. `stop` it when the gateway ends.
    `workers()`, called in that thread, gives the live workers, of all models, and `loading()` those that have yet to
    load theirs. `model_flips`: workers change their model. Gateways of one machine and one `secret` may share a
    file."""

    def __init__(
        self,
        path: Path,
        slo: SloConfig,
        workers: Callable[[], Iterable[KnownWorker]],
        *,
        model: str,
        secret: bytes,
        one_pool: bool = False,
        model_flips: bool = False,
        loading: Callable[[], Iterable[LoadingReport]] = tuple,
    ) -> None:
        self._slo = slo
        self._workers = workers
        self._model = model
        self._one_pool = one_pool
        self._model_flips = model_flips
        self._loading = loading
        self._key = hashlib.blake2b(secret, person=b"legato-reqlog").digest()
        log = LineLog(path, head=self._head)
        self._writer = LineWriter(log, f"request log of {model}", self._lines, MAX_WAITING)

    def ended(self, timeline: RequestTimeline) -> None:
        """Have a line written for each choice of a request that has been answered, if it was for this model. Nobody may
        write to its timeline any more."""
        if timeline.model == self._model:
            self._writer.put(timeline)

    def stop(self, within_s: float = STOP_S) -> None:
        """Write what waits, if that takes no longer, and end the thread. Call it off the event loop."""
        self._writer.stop(within_s)

    def _lines(self, timeline: RequestTimeline) -> list[str]:
        offset_s = time.time() - time.monotonic()
        logged = (logged_request(sequence, offset_s, self._key) for sequence in timeline.sequences)
        return [request_line(line) for line in logged if line is not None]

    def _head(self) -> str | None:
        cluster = logged_cluster(
            self._workers(),
            self._slo,
            one_pool=self._one_pool,
            model=self._model,
            model_flips=self._model_flips,
            loading=self._loading(),
        )
        return None if cluster is None else cluster_line(cluster)


def logged_request(sequence: SequenceTimeline, clock_offset_s: float, key: bytes) -> LoggedRequest | None:
    """The line to log of one choice, with the tokens that it had by its end. None: its client left before it was sent
    anything. `key`: of the keyed hashes that name its blocks."""
    if sequence.ttft_s is None and sequence.end != "failed":
        return None
    hashes, drafts = sequence.prefix_hashes, Drafts.total([sequence])
    return LoggedRequest(
        request_id=sequence.request_id,
        arrival_s=sequence.terms.arrived_at + clock_offset_s,
        prompt_tokens=sequence.num_prompt_tokens,
        output_tokens=0 if sequence.ttft_s is None else len(sequence.token_times),
        hashes=tuple(_name(hashes[at : at + HASH_BYTES], key) for at in range(0, len(hashes), HASH_BYTES)),
        slo_class=sequence.terms.slo.name,
        ttft_s=sequence.ttft_s,
        tpot_s=sequence.tpot_s,
        gap_p99_s=sequence.gap_p99_s,
        drafted_tokens=drafts.drafted,
        accepted_tokens=drafts.accepted,
    )


def _name(block_hash: bytes, key: bytes) -> str:
    return hashlib.blake2b(block_hash, key=key, digest_size=_NAME_BYTES).hexdigest()


def logged_cluster(
    workers: Iterable[KnownWorker],
    slo: SloConfig,
    *,
    one_pool: bool = False,
    model: str = "",
    model_flips: bool = False,
    loading: Iterable[LoadingReport] = (),
) -> LoggedCluster | None:
    """The cluster of those of the workers that have this model ("": of all), as the log's first line tells it. None: in
    some pool no worker has reported yet what its steps cost. `model_flips`: workers change their model. Then those are
    counted that were started for this one, those that are `loading` among them, as the logs of all models must tell of
    each worker once, whenever they were begun."""
    workers = list(workers)
    serving = [worker for worker in workers if worker[0].serves(model)]
    pools: dict[Role, list[KnownWorker]] = {
        role: [w for w in serving if w[0].role == role] for role in ("prefill", "decode")
    }
    prefill, decode = (_logged_worker(pools[role]) for role in ("prefill", "decode"))
    block_size = naming_block_size(info for info, _ in serving)
    sizes = Counter(info.role for info, _ in serving)
    if model_flips:
        sizes = Counter(info.home or info.role for info, _ in workers if (info.home_model or info.model) == model)
        sizes.update(report.home for report in loading if report.home_model == model)
    if decode is None or block_size is None or (prefill is None and sizes["prefill"]) or not sizes["decode"]:
        return None
    return LoggedCluster(
        num_prefill=sizes["prefill"],
        num_decode=sizes["decode"],
        prefill=prefill,
        decode=decode,
        block_size=block_size,
        slo=slo,
        one_pool=one_pool,
        model=model,
        change_s=min((info.load_s for info, _ in serving if info.load_s), default=0.0) if model_flips else None,
    )


def _logged_worker(pool: list[KnownWorker]) -> LoggedWorker | None:
    """The first worker of a pool that reports its costs, which stands for all of them. None: none does."""
    for info, snapshot in pool:
        observed = observed_steps(info.role, snapshot.step_cost)
        if observed is not None:
            return LoggedWorker(
                cost=observed[0],
                kv_tokens=info.num_blocks // info.layer_groups * info.block_size,
                token_budget=info.chunk_tokens or info.max_model_len,
                max_num_seqs=info.max_num_seqs or _ANY_NUMBER,
                noise_by_kind=observed[1],
            )
    return None
