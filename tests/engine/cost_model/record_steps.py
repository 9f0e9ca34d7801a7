"""Records real steps of SmolLM2 for the tests of the cost model: `python -m tests.engine.cost_model.record_steps FILE
[STEPS] [SEED]`.

Requests come at random, some behind a prefix that is cached, through the real scheduler: steps of prefill, of
decoding and of both. Steps are appended to those that the file has, so that the machine is not held for long.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, cast

from benchmarks.common.part import provenance
from decode_workers.local_engine import LocalEngine
from engine.cost_model.step_cost import StepWork
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence, StepOutput, StepPlan
from engine.steps.loading import EngineConfig, LoadedModel, load_model
from engine.steps.runner import ModelRunner

MODEL = "smollm2-135m-instruct"
COLUMNS = [*(field.name for field in dataclasses.fields(StepWork)), "wall_s", "cpu_s"]
_MAX_SEQS = 16
_TOKEN_BUDGET = 160
_MAX_WORDS = 49_000


class RecordingRunner:
    """The runner, and a row for each step it takes."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.rows: list[list[float]] = []

    def execute(self, plan: StepPlan) -> StepOutput:
        work = StepWork.of_plan(plan)
        wall, cpu = time.perf_counter(), time.thread_time()
        output = self._runner.execute(plan)
        times = round(time.perf_counter() - wall, 6), round(time.thread_time() - cpu, 6)
        self.rows.append([*dataclasses.astuple(work), *times])
        return output


def record(num_steps: int, seed: int) -> list[list[float]]:
    """Rows of COLUMNS."""
    model = load_model(EngineConfig(model_ref=MODEL, model_name=MODEL, dtype="bfloat16", kv_blocks=1200, num_threads=1))
    recorder = RecordingRunner(model.runner)
    engine = LocalEngine(_with_runner(model, recorder), max_num_seqs=_MAX_SEQS, token_budget=_TOKEN_BUDGET)
    requests = Requests(seed)
    while len(recorder.rows) < num_steps + 3:
        for _ in range(requests.arriving(engine.scheduler.num_running + engine.scheduler.num_waiting)):
            engine.add(requests.make())
        engine.step()
    return recorder.rows[3:]  # the first ones pay for what is made once


class Requests:
    """Prompts of 8 to 1,200 tokens, half of them behind one of four prefixes, and answers of 1 to 60."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._num_made = 0
        self._prefixes = [self._words(length) for length in (64, 200, 400, 800)]

    def arriving(self, num_present: int) -> int:
        """Calm and busy times take turns."""
        if num_present == 0:
            return self._random.choice((1, 1, 4, 12))
        return int(num_present < _MAX_SEQS and self._random.random() < 0.06)

    def make(self) -> Sequence:
        self._num_made += 1
        prompt = self._words(int(8 * 150 ** self._random.random()))
        if self._random.random() < 0.5:
            prompt = self._random.choice(self._prefixes) + prompt
        num_answer = self._random.choice((1, 1, 10, 60))  # half of them as a prefill worker sees them
        params = SamplingParams(max_tokens=num_answer, temperature=0.0, seed=0, ignore_eos=True)
        return Sequence(request_id=f"r{self._num_made}", attempt=0, params=params, prompt_token_ids=prompt)

    def _words(self, count: int) -> list[int]:
        return [self._random.randrange(10, _MAX_WORDS) for _ in range(count)]


def _with_runner(model: LoadedModel, recorder: RecordingRunner) -> LoadedModel:
    return dataclasses.replace(model, runner=cast(ModelRunner, Delegating(recorder, model.runner)))


class Delegating:
    """All of the runner but `execute`."""

    def __init__(self, recorder: RecordingRunner, runner: ModelRunner) -> None:
        self.execute = recorder.execute
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def main(arguments: list[str]) -> None:
    path = Path(arguments[0])
    num_steps, seed = (int(text) for text in (arguments[1:] + ["250", "1"][len(arguments) - 1 :])[:2])
    log: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"columns": COLUMNS, "runs": []}
    about = provenance() | {"model": MODEL, "dtype": "bfloat16", "threads": 1, "seed": seed}
    log["runs"].append(about | {"steps": record(num_steps, seed)})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(log, separators=(",", ":")).replace("],[", "],\n[") + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
