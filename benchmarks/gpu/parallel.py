"""`python -m benchmarks.gpu.parallel`: one model over several GPUs of this machine, beside one GPU.

Right first: the tokens are one GPU's, KV goes over to one GPU and back, and a rank that is killed amid a step fails it
by name while this process's GPU computes on. Only then steps of Llama-3.1-8B's shape are timed.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import psutil
import torch

from benchmarks.common.local import greedy_tokens
from benchmarks.common.part import GateError
from benchmarks.common.workload import draw_prompts, greedy
from benchmarks.gpu.figures import Figure, Report, run_step
from benchmarks.gpu.random_model import RandomModel, engine_config, small_model
from benchmarks.gpu.speed import model_speed
from decode_workers.local_engine import LocalEngine
from engine.parallel.leader import STEP_S
from engine.parallel.processes import GroupError
from engine.sequence import BlockTable, ScheduledSequence, Sequence, StepPlan
from engine.steps.loading import LoadedModel, load_model
from engine.steps.memory_profile import StepSize
from kv_transfer.digest import DigestKind
from kv_transfer.handoff.slab_copy import fill_slab, write_slab

_CHECKED = small_model(
    "small-with-even-heads",
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=32_000,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """`degree` 0: four GPUs, or two where there are not as many. `checked` is in float32, `timed` is not judged."""

    degree: int = 0
    checked: RandomModel = _CHECKED
    prompts: tuple[int, ...] = (1, 63, 1000)
    num_tokens: int = 32
    timed: model_speed.Scale = model_speed.Scale()  # noqa: RUF009 - frozen


def measure(report: Report, device: torch.device, scale: Scale = Scale()) -> None:
    degree = scale.degree or _degree(torch.cuda.device_count())
    if degree < 2:
        report.tell("needs two GPUs")
        report.note(needs="two GPUs")
        return
    report.note(degree=degree, model=scale.timed.model.shape.name)
    with _checked(scale, device, 1) as one, _checked(scale, device, degree) as group:
        _check_tokens(scale, one, group)
        _check_handover(scale, group, one)
        _check_handover(scale, one, group)
        report.tell(f"{degree} ranks give one GPU's tokens, with KV of their own and of each other's")
        report.add(Figure(name="a killed rank is noticed", value=_kill(group, device), unit="s", at_most=STEP_S))
    alone, together = (_times(report, scale.timed, device, ranks) for ranks in (1, degree))
    for name, seconds in together.items():
        report.add(Figure(name=f"{name}, {degree} GPUs", value=seconds * 1e3, unit="ms"))
        report.add(Figure(name=f"{name}, times one GPU's speed", value=alone[name] / seconds))


def _degree(num_gpus: int) -> int:
    return 4 if num_gpus >= 4 else num_gpus


@contextmanager
def _checked(scale: Scale, device: torch.device, degree: int) -> Iterator[LoadedModel]:
    config = replace(
        engine_config(scale.checked, device),
        kv_blocks=len(scale.prompts) * (max(scale.prompts) + scale.num_tokens) // 16 + 64,
        tensor_parallel=degree,
        prefix_caching=False,
    )
    model = load_model(config)
    try:
        yield model
    finally:
        model.runner.close()


def _check_tokens(scale: Scale, one: LoadedModel, group: LoadedModel) -> None:
    prompts = [draw_prompts(1, length, below=scale.checked.shape.vocab_size)[0] for length in scale.prompts]
    expected, actual = (greedy_tokens(LocalEngine(model), prompts, scale.num_tokens) for model in (one, group))
    for prompt, theirs, ours in zip(prompts, expected, actual, strict=True):
        if ours != theirs:
            raise GateError(f"a prompt of {len(prompt)} tokens is answered by {ours} instead of {theirs}")


def _check_handover(scale: Scale, sender: LoadedModel, receiver: LoadedModel) -> None:
    """A prompt computed by one, its KV handed over layer by layer, goes on at the other as if it were its own."""
    [prompt] = draw_prompts(1, max(scale.prompts), below=scale.checked.shape.vocab_size)
    [expected] = greedy_tokens(LocalEngine(receiver), [prompt], scale.num_tokens)
    computed, received = (_placed(model, prompt, scale.num_tokens) for model in (sender, receiver))
    _step(sender, computed, len(prompt))
    for layer in range(sender.layout.num_layers):
        _hand_over(layer, (sender, computed), (receiver, received), len(prompt))
    received.num_computed = len(prompt)
    received.output_token_ids = list(computed.output_token_ids)
    while len(received.output_token_ids) < scale.num_tokens:
        _step(receiver, received, 1)
    if received.output_token_ids != expected:
        raise GateError(f"what was handed over goes on with {received.output_token_ids} instead of {expected}")


def _placed(model: LoadedModel, prompt: list[int], num_tokens: int) -> Sequence:
    """A sequence on the first blocks, which nobody else uses now."""
    groups = model.layout.num_layer_groups
    columns = -(-(len(prompt) + num_tokens) // model.layout.block_size)
    table = BlockTable(groups)
    table.append(np.arange(groups * columns, dtype=np.int32).reshape(groups, columns))
    return Sequence(
        request_id="placed", attempt=0, params=greedy(num_tokens), prompt_token_ids=prompt, block_table=table
    )


def _step(model: LoadedModel, seq: Sequence, num_tokens: int) -> None:
    [token] = model.runner.execute(StepPlan((ScheduledSequence(seq, num_tokens),))).sampled
    assert token is not None
    seq.num_computed += num_tokens
    seq.output_token_ids.append(token.token_id)


def _hand_over(
    layer: int, source: tuple[LoadedModel, Sequence], target: tuple[LoadedModel, Sequence], num_tokens: int
) -> None:
    slab = memoryview(bytearray(num_tokens * source[0].layout.bytes_per_token_layer))
    kind: DigestKind = "xxh3_64" if source[0].sequence_kv.device.type == "cpu" else "row_sum_64"
    digests = []
    for copy, (model, seq) in ((fill_slab, source), (write_slab, target)):
        assert seq.block_table is not None
        row = seq.block_table.view[layer // model.layout.layers_per_group]
        digests.append(copy(model.sequence_kv, row, layer, 0, num_tokens, slab, kind))
    if digests[0] != digests[1]:
        raise GateError(f"layer {layer} did not arrive as it was sent")


def _kill(group: LoadedModel, device: torch.device) -> float:
    """Seconds from a rank's end, amid a step, until the step has failed."""
    ranks = [child for child in psutil.Process().children() if "engine.parallel.follower" in child.cmdline()]
    killed: list[float] = []

    def kill(layer: int) -> None:
        if layer == 0:
            ranks[-1].kill()
            killed.append(time.perf_counter())

    seq = _placed(group, [5, 6, 7], 1)
    try:
        group.runner.execute(StepPlan((ScheduledSequence(seq, 3),)), kill)
    except GroupError as error:
        noticed_s = time.perf_counter() - killed[0]
        if f"rank {len(ranks)} has ended by signal 9" not in str(error):
            raise GateError(f"a killed rank was reported so: {error}") from error
    else:
        raise GateError("a step succeeded though one of its ranks was killed")
    assert float(torch.ones(1000, device=device).sum()) == 1000.0, "this process's device computes on"
    return noticed_s


def _times(report: Report, scale: model_speed.Scale, device: torch.device, degree: int) -> dict[str, float]:
    """Seconds, by what took them. No step is recorded: those of a group cannot be."""
    config = replace(
        engine_config(scale.model, device),
        kv_blocks=scale.kv_blocks,
        largest_step=StepSize(num_tokens=max(scale.prefills), num_seqs=max(scale.decodes)),
        tensor_parallel=degree,
        prefix_caching=False,
    )
    model = load_model(config)
    try:
        times = {f"decode step of {n}": asyncio.run(model_speed.decode(model, scale, n))[1] for n in scale.decodes}
        longest = max(scale.prefills)
        times[f"prefill of {longest}"] = asyncio.run(model_speed.prefill(report, model, scale, longest))
        return times
    finally:
        model.runner.close()


if __name__ == "__main__":
    sys.exit(run_step("parallel", measure))
