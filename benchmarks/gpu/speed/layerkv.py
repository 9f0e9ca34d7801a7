"""`python -m benchmarks.gpu.speed.layerkv`: LayerKV on the GPU: the same tokens, what it costs, what runs beside what.

SmolLM2 in float32 with every other layer group of each sequence in host memory must give the tokens that it gives with
all of them on the device. Then decode steps of Llama-3.1-8B's shape, whose layers take as long as copies should, take
turns, staged and not, and a profiler's trace of staged steps and of a prompt says how much of the copies ran beside
compute. Copies are told apart by their stream.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from benchmarks.common.part import GateError, ratio, spread
from benchmarks.common.tiered_engine import StepCost, TieredEngine
from benchmarks.common.workload import draw_prompts, greedy
from benchmarks.gpu.exactness import generated, model_or_stand_in
from benchmarks.gpu.figures import Figure, Report, run_step
from benchmarks.gpu.random_model import LLAMA_8B, RandomModel, checkpoint
from benchmarks.gpu.speed.host_gap import profiling
from benchmarks.gpu.speed.trace import DEVICE_WORK, Activity, length, read_trace, share_beside, union
from cluster.load.timing import MS
from engine.checkpoint.store import resolve_model
from engine.kv.sizes import layers_per_group_for
from engine.model.config import ModelConfig
from engine.sequence import Sequence as TokenSequence
from engine.steps.loading import DtypeName, EngineConfig, load_model

AIM_RATIO = 1.1  # of a decode step with every other group on the host, over one with all on the device
AIM_BESIDE = 0.9  # of the time that a prompt's copies take
BLOCK_SIZE = 16
NUM_SLOTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """`exact_prompts` and `contexts` are lengths; those of each are decoded together. `model_ref`: of the tokens; None
    is SmolLM2.

    Four contexts of 1,024 tokens are 16 MiB a layer of an 8B model: 0.3 ms of a link of 55 GB/s, and two layers of a
    decode step, one staged and one not, read their weights in about that time. A chunk of 2,048 tokens computes longer
    in a layer than all 8,192 take to be fetched.
    """

    model_ref: str | None = None
    timed: RandomModel = LLAMA_8B
    exact_prompts: tuple[int, ...] = (1, 63, 1000)
    exact_tokens: int = 32
    contexts: tuple[int, ...] = (1024,) * 4
    num_rounds: int = 32
    prompt_tokens: int = 8192
    chunk_tokens: int = 2048
    traced_steps: int = 8

    @property
    def num_columns(self) -> int:
        """Block columns of all sequences that a step touches, at most."""
        exact = sum(self.exact_prompts) + len(self.exact_prompts) * (self.exact_tokens + BLOCK_SIZE)
        decode = sum(self.contexts) + len(self.contexts) * (self.num_rounds + self.traced_steps + 2 * BLOCK_SIZE)
        return -(-max(exact, decode, self.prompt_tokens + 2 * BLOCK_SIZE) // BLOCK_SIZE)


def measure(report: Report, device: torch.device, scale: Scale = Scale()) -> None:
    model_ref = scale.model_ref or model_or_stand_in()
    timed = scale.timed
    report.note(model=model_ref, timed_model=timed.shape.name, contexts=list(scale.contexts), ring_slots=NUM_SLOTS)
    report.note(prompt_tokens=scale.prompt_tokens, chunk_tokens=scale.chunk_tokens)
    with _engine(model_ref, "float32", device, scale) as engine:
        _require_equal_tokens(report, engine, model_ref, scale)
    with _engine(str(checkpoint(timed, device)), timed.dtype_name, device, scale) as engine:
        _measure_decode(report, engine, scale, device)
        _measure_prompt(report, engine, scale, device)


@contextmanager
def _engine(model_ref: str, dtype: DtypeName, device: torch.device, scale: Scale) -> Iterator[TieredEngine]:
    """An engine each of whose tiers holds all that is measured at once twice over, and a slot of whose ring holds it
    once."""
    model = ModelConfig.from_folder(resolve_model(model_ref))
    layers = layers_per_group_for(model.num_layers)
    itemsize = 4 if dtype == "float32" else 2
    row_bytes = scale.num_columns * layers * BLOCK_SIZE * 2 * model.num_kv_heads * model.head_dim * itemsize
    tier_bytes = 2 * -(-model.num_layers // layers) * row_bytes
    config = EngineConfig(
        model_ref=model_ref,
        model_name="staged",
        dtype=dtype,
        block_size=BLOCK_SIZE,
        layers_per_group=layers,
        kv_bytes=tier_bytes,
        host_bytes=tier_bytes,
        staging_bytes=NUM_SLOTS * row_bytes,
        ring_groups=NUM_SLOTS,
        device=str(device),
    )
    engine = TieredEngine(load_model(config))
    yield engine
    engine.close()


def _every_other(engine: TieredEngine) -> range:
    """The first group computes while the second one is fetched."""
    return range(1, engine.layout.num_layer_groups, 2)


# --- the same tokens ---


def _require_equal_tokens(report: Report, engine: TieredEngine, model_ref: str, scale: Scale) -> None:
    """Raises GateError: no speed counts where tokens differ."""
    prompts = [draw_prompts(1, num_tokens)[0] for num_tokens in scale.exact_prompts]
    groups = range(engine.layout.num_layer_groups)
    expected = [tokens[: scale.exact_tokens] for tokens in generated(model_ref, "cpu", prompts)]
    for name, on_host in {"none": groups[:0], "every other": _every_other(engine), "all": groups}.items():
        found = _generate(engine, prompts, on_host, scale)
        if found != expected:
            raise GateError(f"with {name} of the layer groups in host memory, tokens are {found}, not {expected}")
    report.add(Figure(name="tokens that are the CPU's", value=3 * len(prompts) * scale.exact_tokens, unit="tokens"))


def _generate(engine: TieredEngine, prompts: list[list[int]], on_host: range, scale: Scale) -> list[list[int]]:
    seqs = engine.prefill(prompts, on_host, greedy(scale.exact_tokens), scale.chunk_tokens)
    while len(seqs[0].output_token_ids) < scale.exact_tokens:
        engine.step(seqs, 1)
    engine.release(seqs)
    return [seq.output_token_ids for seq in seqs]


# --- what it costs, and what runs beside what ---


def _measure_decode(report: Report, engine: TieredEngine, scale: Scale, device: torch.device) -> None:
    """Steps of one token for each sequence, in turns with those that have all on the device."""
    prompts = [draw_prompts(1, num_tokens)[0] for num_tokens in scale.contexts]
    params = greedy(scale.num_rounds + scale.traced_steps + 2)
    batches = {
        name: engine.prefill(prompts, on_host, params, scale.chunk_tokens)
        for name, on_host in {"device": range(0), "every other": _every_other(engine)}.items()
    }
    costs: dict[str, list[StepCost]] = {name: [] for name in batches}
    for _ in range(scale.num_rounds):
        for name, batch in batches.items():
            costs[name].append(engine.step(batch, 1)[0])
    ours, alone = ([cost.wall_s for cost in costs[name]] for name in ("every other", "device"))
    name = "decode step, every other group in host memory, over one on the device"
    report.add(Figure(name=name, value=ratio(ours, alone), unit="times", at_most=AIM_RATIO))
    waited = [cost.waited_s / MS for cost in costs["every other"]]
    steps = {f"{name}_ms": spread([cost.wall_s / MS for cost in found]) for name, found in costs.items()}
    report.note(decode_steps=steps, waited_ms=spread(waited), recorded=False)
    _tell_trace(report, "decode", None, _traced(device, lambda: _repeat(engine, batches["every other"], scale)))
    for batch in batches.values():
        engine.release(batch)


def _repeat(engine: TieredEngine, batch: list[TokenSequence], scale: Scale) -> None:
    for _ in range(scale.traced_steps):
        engine.step(batch, 1)


def _measure_prompt(report: Report, engine: TieredEngine, scale: Scale, device: torch.device) -> None:
    """Measure a prompt in chunks, all of whose layers stream to host memory as they finish; once before, so that all is
    compiled."""
    groups = range(engine.layout.num_layer_groups)
    for _ in range(2):
        prompts = draw_prompts(1, scale.prompt_tokens)
        activities = _traced(
            device,
            lambda: engine.release(engine.prefill(prompts, groups, greedy(1), scale.chunk_tokens)),  # noqa: B023 - now
        )
    _tell_trace(report, "a prompt", AIM_BESIDE, activities)


def _traced(device: torch.device, work: Callable[[], None]) -> list[Activity]:
    on_gpu = device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profiling([ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU], path):
            work()
        return read_trace(path, DEVICE_WORK if on_gpu else ("cpu_op",))


def _tell_trace(report: Report, what: str, aim: float | None, activities: Sequence[Activity]) -> None:
    copies, compute = told_apart(activities)
    busy = length(union(activity.interval for activity in copies))
    share = share_beside(copies, compute)
    report.add(Figure(name=f"copies of {what}, beside compute", value=share, unit="share", at_least=aim))
    report.add(Figure(name=f"copies of {what}, in all", value=busy / 1e3, unit="ms"))


def told_apart(activities: Sequence[Activity]) -> tuple[list[Activity], list[Activity]]:
    """Copies and compute. Compute's stream is the one that is busy longest with anything but the copies' kernel; on a
    CPU a thread is a stream. Raises ValueError if there is one stream alone."""
    by_stream: dict[int, list[Activity]] = {}
    for activity in activities:
        by_stream.setdefault(activity.stream, []).append(activity)
    if len(by_stream) < 2:
        raise ValueError(f"the trace has {len(by_stream)} streams: nothing was copied beside compute")
    computes = max(by_stream, key=lambda stream: length(union(_computing(by_stream[stream]))))
    copies = [activity for activity in activities if activity.stream != computes]
    return copies, by_stream[computes]


def _computing(activities: Sequence[Activity]) -> Iterator[tuple[float, float]]:
    for activity in activities:
        if "copy_blocks" not in activity.name and "emcpy" not in activity.name:
            yield activity.interval


if __name__ == "__main__":
    sys.exit(run_step("layerkv", measure))
