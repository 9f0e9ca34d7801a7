"""Runners of several processes, as tests of groups start them and make them compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from engine.sequence import ScheduledSequence, StepPlan
from engine.steps.runner import ModelRunner
from tests.support.small_models import runner_of
from tests.support.stepping import Stepper


def start(folder: Path, degree: int = 2, **options: Any) -> ModelRunner:
    return runner_of(folder, kv_blocks=400, num_threads=1, tensor_parallel=degree, **options)


def whole_prompt(runner: ModelRunner, prompt: list[int], num_tokens: int) -> tuple[Stepper, Any, StepPlan]:
    stepper = Stepper(runner)
    seq = stepper.add(prompt)
    stepper.reserve(seq, len(prompt))
    return stepper, seq, StepPlan((ScheduledSequence(seq, num_tokens),))


def one_step(runner: ModelRunner) -> None:
    stepper = Stepper(runner)
    stepper.step([(stepper.add([5, 6, 7]), 3)])


def other_ranks(runner: ModelRunner) -> list[psutil.Process]:
    assert runner.group is not None
    return [psutil.Process(pid) for pid in runner.group.pids]
