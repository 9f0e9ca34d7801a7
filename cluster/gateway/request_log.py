"""What a cluster served and on what, as lines of JSON: the first describes the cluster, each further one a request.

Written in order of arrival. Knows the format alone; not who writes it when, nor what is made of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from cluster.slo.classes import SloConfig
from engine.cost_model.noise import StepNoise
from engine.cost_model.step_cost import StepCost

T = TypeVar("T")


class RequestLogError(ValueError):
    """A line of a log is not what the format says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedWorker:
    """A worker of one pool: what its steps cost by its own fit, how many tokens its KV memory and a step hold.
    Where `noise` is not known, steps scatter by the cost's error, each by itself."""

    cost: StepCost
    kv_tokens: int
    token_budget: int
    max_num_seqs: int
    noise: StepNoise = field(default_factory=StepNoise)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCluster:
    """`prefill` None: there were no prefill workers. `block_size`: tokens of the blocks that requests' hashes name.

    What no worker's cost holds: `gateway_s`, of HTTP and the gateway, in each first token; `handoff_s`, and for each
    token of a prompt's last chunk `handoff_token_s`, from the first token until decode may go on.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRequest:
    """`arrival_s` counts from any moment common to all. `hashes` name the prompt's full blocks together with all before
    them, in any spelling. `ttft_s` None: it was turned away, and `output_tokens` are 0. `tpot_s` None: fewer than two
    tokens. `slo_class` "": the default."""

    request_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hashes: tuple[str, ...] = ()
    slo_class: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 0:
            raise ValueError(
                f"request {self.request_id} has {self.prompt_tokens} prompt and {self.output_tokens} output tokens"
            )


_CLUSTER: Final = TypeAdapter(LoggedCluster)
_REQUEST: Final = TypeAdapter(LoggedRequest)


def cluster_line(cluster: LoggedCluster) -> str:
    return _CLUSTER.dump_json(cluster).decode()


def request_line(request: LoggedRequest) -> str:
    return _REQUEST.dump_json(request).decode()


def read_log(path: Path) -> tuple[LoggedCluster, list[LoggedRequest]]:
    """Raises RequestLogError with the line that is wrong, OSError where the file cannot be read."""
    with path.open(encoding="utf-8") as lines:
        cluster = _parsed(_CLUSTER, path, 1, next(lines, ""))
        return cluster, [_parsed(_REQUEST, path, number, line) for number, line in enumerate(lines, start=2)]


def _parsed(adapter: TypeAdapter[T], path: Path, number: int, line: str) -> T:
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the line"
        what = "the cluster" if number == 1 else "a request"
        raise RequestLogError(f"{path}, line {number} does not describe {what}: {where}: {first['msg']}") from error
