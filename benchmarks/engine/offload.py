"""What it costs that KV rests in host memory: decode steps and prompts beside the same ones on the device alone.

One thread computes and another one copies. What is compared takes turns step by step, so that what disturbs one
disturbs all. A CPU has one memory for both tiers: whatever is copied meanwhile takes bandwidth and cache from what is
computed, which an accelerator's own memory and copy engine would not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from benchmarks.common.part import GateError, Json, note, ratio, run_part, spread
from benchmarks.common.quiet import QuietMachine
from benchmarks.common.tiered_engine import StepCost, TieredEngine
from benchmarks.common.workload import MODEL, draw_prompts, greedy
from cluster.load.timing import MS
from engine.sequence import SampledToken, Sequence
from engine.steps.loading import EngineConfig, load_model

LAYERS_PER_GROUP = 3  # what the engine chooses for these 30 layers
NUM_GROUPS = 10
BLOCK_SIZE = 16
RINGS = (1, 2, NUM_GROUPS)  # slots: nothing overlaps, the default, everything is fetched at once
DECODE_RING = 2
HOST_GROUPS = {
    "none": range(0),
    "none, again": range(0),  # what noise alone makes of it
    "every other": range(1, NUM_GROUPS, 2),
    "all": range(NUM_GROUPS),
}
FEWEST_UNDISTURBED = 8  # steps, of which a median is worth telling
AIMS = {"decode step, every other group in host memory": 1.1, "prefill, exposed share of the copying": 0.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is measured."""

    num_sequences: int = 8
    context_tokens: int = 512
    steps_a_round: int = 6
    decode_rounds: int = 12
    prompt_tokens: tuple[int, ...] = (1024, 2048, 4096)  # multiples of a chunk
    chunk_tokens: int = 512
    prefill_repeats: int = 3

    @property
    def num_columns(self) -> int:
        """Block columns that a step touches, at most."""
        decode_tokens = self.num_sequences * (self.context_tokens + self.steps_a_round + BLOCK_SIZE)
        tokens = max(decode_tokens, NEEDED_TOKENS + 3 * BLOCK_SIZE, *self.prompt_tokens)
        return -(-tokens // BLOCK_SIZE)


def measure(extent: Extent) -> Json:
    torch.set_num_threads(1)
    engines = {num_slots: _load(num_slots, extent) for num_slots in RINGS}
    gate = require_equal_logprobs(engines, extent.chunk_tokens)
    quiet = QuietMachine()
    decode = _measure_decode(engines[DECODE_RING], extent, quiet)
    prefill = _measure_prefill(engines, extent, quiet)
    for engine in engines.values():
        engine.close()
    return {
        "model": f"{MODEL}, bf16, 1 thread that computes, {NUM_GROUPS} layer groups",
        "aims": AIMS,
        "gate": gate,
        "decode": decode,
        "prefill": prefill,
        "quiet": quiet.report(),
    }


def _load(num_slots: int, extent: Extent) -> TieredEngine:
    """Load an engine whose device holds what decode keeps there, and whose host memory holds as much and a prompt."""
    column_bytes = LAYERS_PER_GROUP * BLOCK_SIZE * 2 * 3 * 64 * 2
    tier_bytes = 4 * NUM_GROUPS * extent.num_columns * column_bytes
    engine = TieredEngine(
        load_model(
            EngineConfig(
                model_ref=MODEL,
                model_name=MODEL,
                dtype="bfloat16",
                block_size=BLOCK_SIZE,
                layers_per_group=LAYERS_PER_GROUP,
                kv_bytes=tier_bytes,
                host_bytes=tier_bytes,
                staging_bytes=num_slots * extent.num_columns * column_bytes,
                ring_groups=num_slots,
                num_threads=1,
            )
        )
    )
    assert engine.layout.num_layer_groups == NUM_GROUPS
    assert engine.layout.block_bytes == column_bytes
    return engine


# --- decode ---


def _measure_decode(engine: TieredEngine, extent: Extent, quiet: QuietMachine) -> Json:
    """Steps of one token for each sequence, all of the same context, whatever rests where."""
    prompts = draw_prompts(extent.num_sequences, extent.context_tokens)
    params = greedy(extent.steps_a_round + 1)
    batches = {
        name: engine.prefill(prompts, groups, params, extent.chunk_tokens) for name, groups in HOST_GROUPS.items()
    }
    costs: dict[str, list[StepCost]] = {name: [] for name in HOST_GROUPS}
    for _ in range(extent.decode_rounds):
        for name, cost in quiet.run(lambda: list(_decode_round(engine, batches, extent))):
            costs[name].append(cost)
    for batch in batches.values():
        engine.release(batch)
    load = f"{extent.num_sequences} sequences of {extent.context_tokens} tokens, a ring of {DECODE_RING} slots"
    return {"load": load, "rows": [_decode_row(name, costs) for name in HOST_GROUPS]}


def _decode_round(
    engine: TieredEngine, batches: dict[str, list[Sequence]], extent: Extent
) -> Iterable[tuple[str, StepCost]]:
    for batch in batches.values():
        for seq in batch:
            engine.rewind(seq, extent.context_tokens)
    for _ in range(extent.steps_a_round):
        for name, batch in batches.items():
            yield name, engine.step(batch, 1)[0]


def _decode_row(name: str, costs: dict[str, list[StepCost]]) -> Json:
    ours, device = costs[name], costs["none"]
    row: Json = {
        "host_groups": name,
        "tpot_ms": spread([cost.wall_s / MS for cost in ours]),
        "over_device": _ratio(ours, device, lambda cost: cost.wall_s),
        "undisturbed": _undisturbed(ours, device),
        "computed_and_waited_over_device": _ratio(ours, device, lambda cost: cost.compute_s + cost.waited_s),
        "waited_ms": spread([cost.waited_s / MS for cost in ours]),
        "copied_ms": spread([cost.copied_s / MS for cost in ours]),
    }
    note(f"decode, in host memory {name}: {row['over_device']} times the step on the device; {row['undisturbed']}")
    return row


def _undisturbed(ours: list[StepCost], device: list[StepCost]) -> Json:
    """The ratio to the device alone, of the steps during which nobody took the core: all that there is to see on a busy
    machine."""
    ours, device = ([cost for cost in costs if not cost.num_preemptions] for costs in (ours, device))
    enough = min(len(ours), len(device)) >= FEWEST_UNDISTURBED
    return {"steps": len(ours), "over_device": _ratio(ours, device, lambda cost: cost.wall_s) if enough else None}


def _ratio(ours: list[StepCost], theirs: list[StepCost], seconds: Callable[[StepCost], float]) -> float:
    return ratio(list(map(seconds, ours)), list(map(seconds, theirs)))


# --- prefill ---


@dataclass(frozen=True, slots=True)
class PromptCosts:
    """What the steps of one prompt cost, and those of prompts that are its beginnings, whose last steps end with a
    token."""

    chunks: list[StepCost] = field(default_factory=list)
    last: dict[int, StepCost] = field(default_factory=dict)  # by the prompt's length

    def of(self, num_tokens: int, chunk_tokens: int) -> list[StepCost]:
        return [*self.chunks[: num_tokens // chunk_tokens - 1], self.last[num_tokens]]


Costs = dict[str, list[PromptCosts]]
"""By what is compared, in the order of the repeats."""
Opened = dict[str, tuple[TieredEngine, Sequence]]
"""By what is compared, a sequence and the engine that computes it."""


def _measure_prefill(engines: dict[int, TieredEngine], extent: Extent, quiet: QuietMachine) -> Json:
    """Prompts all of whose layers stream to host memory as they finish, or none."""
    variants = {"device": (engines[DECODE_RING], range(0))} | {
        _ring_name(num_slots): (engine, range(NUM_GROUPS)) for num_slots, engine in engines.items()
    }
    costs: Costs = {name: [] for name in variants}
    for prompt in draw_prompts(extent.prefill_repeats, max(extent.prompt_tokens)):
        opened = {name: (engine, engine.open(prompt, groups, greedy(1))) for name, (engine, groups) in variants.items()}
        for name, found in _measure_prompt(opened, prompt, extent, quiet).items():
            costs[name].append(found)
        for engine, seq in opened.values():
            engine.release([seq])
    rows = [
        _prefill_row(num_tokens, extent.chunk_tokens, name, costs)
        for num_tokens in extent.prompt_tokens
        for name in variants
        if name != "device"
    ]
    return {"load": f"one prompt in chunks of {extent.chunk_tokens} tokens, all groups in host memory", "rows": rows}


def _measure_prompt(opened: Opened, prompt: list[int], extent: Extent, quiet: QuietMachine) -> dict[str, PromptCosts]:
    """Chunk by chunk in turns."""
    found = {name: PromptCosts() for name in opened}
    for stop in range(extent.chunk_tokens, len(prompt) + 1, extent.chunk_tokens):
        if stop in extent.prompt_tokens:
            for name, cost in quiet.run(partial(_chunk, opened, prompt[:stop], extent.chunk_tokens)).items():
                found[name].last[stop] = cost
        if stop < len(prompt):
            for name, cost in quiet.run(partial(_chunk, opened, prompt[: stop + 1], extent.chunk_tokens)).items():
                found[name].chunks.append(cost)
    return found


def _ring_name(num_slots: int) -> str:
    return f"{num_slots} slots" if num_slots > 1 else "1 slot"


def _chunk(opened: dict[str, tuple[TieredEngine, Sequence]], prompt: list[int], num_tokens: int) -> dict[str, StepCost]:
    """The step that computes the last full chunk of this prompt, in each variant; it may have been taken before."""
    costs = {}
    for name, (engine, seq) in opened.items():
        start = (len(prompt) // num_tokens - 1) * num_tokens
        seq.prompt_token_ids = prompt
        engine.rewind(seq, start)
        costs[name] = engine.step([seq], num_tokens)[0]
    return costs


def _prefill_row(num_tokens: int, chunk_tokens: int, name: str, costs: Costs) -> Json:
    def total(name: str, seconds: Callable[[StepCost], float]) -> list[float]:
        """The seconds of a prompt's steps, for each repeat."""
        return [sum(map(seconds, repeat.of(num_tokens, chunk_tokens))) for repeat in costs[name]]

    def longer(seconds: Callable[[StepCost], float]) -> list[float]:
        return [a - b for a, b in zip(total(name, seconds), total("device", seconds), strict=True)]

    device = total("device", lambda cost: cost.wall_s)
    copied, waited = total(name, lambda cost: cost.copied_s), total(name, lambda cost: cost.waited_s)
    slower = longer(lambda cost: cost.wall_s)
    row: Json = {
        "prompt_tokens": num_tokens,
        "ring": name,
        "device_ms": spread([s / MS for s in device]),
        "copied_ms": spread([s / MS for s in copied]),
        "waited_ms": spread([s / MS for s in waited]),
        "slower_ms": spread([s / MS for s in slower]),
        "more_compute_ms": spread([s / MS for s in longer(lambda cost: cost.compute_s)]),
        "waited_share_of_copying": ratio(waited, copied),
        "slower_share_of_copying": ratio(slower, copied),
        "slower_share_of_prefill": ratio(slower, device),
    }
    note(
        f"prefill {num_tokens}, {name}: waits for {row['waited_share_of_copying']} of the copying; takes "
        f"{statistics.median(slower) / MS:.1f} of {statistics.median(device) / MS:.0f} ms longer"
    )
    return row


PROMPT_TOKENS = (5, 200, 600)
OUTPUT_TOKENS = 12
NUM_TOP = 5  # log-probabilities are compared of the tokens that the model finds most likely

NEEDED_TOKENS = sum(num_tokens + OUTPUT_TOKENS for num_tokens in PROMPT_TOKENS)  # of KV, all in one step


def require_equal_logprobs(engines: dict[int, TieredEngine], chunk_tokens: int) -> Json:
    """A few prompts in chunks, then decoded together, on the device and in host memory. Raises GateError."""
    prompts = [draw_prompts(1, num_tokens)[0] for num_tokens in PROMPT_TOKENS]
    expected = None
    num_compared = 0
    for num_slots, engine in engines.items():
        groups = range(engine.layout.num_layer_groups)
        for name, host_groups in {"none": groups[:0], "every other": groups[1::2], "all": groups}.items():
            found = _generate(engine, prompts, host_groups, chunk_tokens)
            expected = expected or found
            num_compared += len(found)
            if found != expected:
                raise GateError(
                    f"with {name} of the layer groups in host memory and a ring of {num_slots} slots, the model's "
                    "log-probabilities are not those on the device: fix the staging before measuring it"
                )
    note(f"gate: {num_compared} tokens and their log-probabilities are those on the device, bit by bit")
    return {"compared_tokens": num_compared}


def _generate(
    engine: TieredEngine, prompts: list[list[int]], host_groups: range, chunk_tokens: int
) -> list[SampledToken]:
    params = replace(greedy(OUTPUT_TOKENS), logprobs=NUM_TOP)
    seqs = [engine.open(prompt, host_groups, params) for prompt in prompts]
    sampled = []
    while unfinished := [seq for seq in seqs if len(seq.output_token_ids) < OUTPUT_TOKENS]:
        # Prompts one by one, then all of them together.
        prompt = next((seq for seq in unfinished if not seq.output_token_ids), None)
        chosen = unfinished if prompt is None else [prompt]
        sampled += engine.step(chosen, chunk_tokens)[1]
    engine.release(seqs)
    return [token for token in sampled if token is not None]


if __name__ == "__main__":
    run_part("offload", lambda: measure(Extent()))
