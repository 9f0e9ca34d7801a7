"""What a running cluster says of itself over HTTP, sampled while it is loaded: its workers and their steps' cost."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, fields
from statistics import fmean
from types import TracebackType
from typing import Any, Final, Self

from pydantic import TypeAdapter

from cluster.gateway.request_log import LoggedWorker
from engine.cost_model.fit import StepKind
from engine.cost_model.noise import StepNoise
from engine.cost_model.step_cost import StepCost, StepWork
from kv_transfer.messages.workers import StepCostReport
from kv_transfer.worker.cost_report import observed_steps

SAMPLE_S = 1.0
TIMEOUT_S = 10.0


def read_json(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=TIMEOUT_S) as answer:
        return json.load(answer)


def post_json(port: int, path: str, fields: Mapping[str, Any]) -> bytes:
    """What is answered to a body of these fields."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(fields).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        body: bytes = answer.read()
    return body


@dataclass(frozen=True, slots=True)
class _Sample:
    """What `/cluster` shows of one worker."""

    worker: dict[str, Any]
    cost: StepCost
    noise: dict[StepKind, StepNoise]


_REPORT: Final = TypeAdapter(StepCostReport)
_USUAL: Final[dict[StepKind, StepWork]] = {
    "prefill": StepWork.of_prefill(256),
    "decode": StepWork(decodes=8, context_tokens=2400),
}


class ClusterWatch:
    """Within its block, looks at the workers once a second."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._samples: dict[str, list[_Sample]] = {}  # by role, of all of its workers
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cluster-watch", daemon=True)

    def __enter__(self) -> Self:
        self.look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(TIMEOUT_S)
        self.look()

    def worker(self, role: str) -> LoggedWorker:
        """A worker of this role with the mean of what their steps were said to cost, and how steps scattered around
        that: by what they did at each look, and by what the looks differ, since the machine is now faster and now
        slower for a while."""
        samples = self._samples[role]
        newest = samples[-1].worker
        cost = _mean([sample.cost for sample in samples])
        return LoggedWorker(
            cost=cost,
            kv_tokens=newest["num_blocks"] // newest["layer_groups"] * newest["block_size"],
            token_budget=newest["chunk_tokens"],
            max_num_seqs=newest["max_num_seqs"],
            noise_by_kind=_noise_around(cost, samples),
        )

    def num_workers(self, role: str) -> int:
        return len({sample.worker["worker_id"] for sample in self._samples.get(role, ())})

    def block_size(self) -> int:
        size: int = self._samples["decode"][-1].worker["block_size"]
        return size

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.look()

    def look(self) -> None:
        for worker in read_json(self._port, "/cluster")["workers"]:
            report = None if worker["step_cost"] is None else _REPORT.validate_python(worker["step_cost"])
            observed = observed_steps(worker["role"], report)
            if observed is not None:
                self._samples.setdefault(worker["role"], []).append(_Sample(worker, *observed))


def _mean(costs: list[StepCost]) -> StepCost:
    """The mean of each coefficient: then the predictions are the mean of predictions, too."""
    return StepCost(**{field.name: fmean(getattr(cost, field.name) for cost in costs) for field in fields(StepCost)})


def _noise_around(cost: StepCost, samples: list[_Sample]) -> dict[StepKind, StepNoise]:
    around: dict[StepKind, list[StepNoise]] = {}
    for sample in samples:
        for kind, noise in sample.noise.items():
            around.setdefault(kind, []).append(noise.over(cost.step_s(_USUAL[kind]) / sample.cost.step_s(_USUAL[kind])))
    return {kind: StepNoise.of_all(noises) for kind, noises in around.items()}
