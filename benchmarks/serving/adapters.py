"""LoRA adapters over HTTP, one worker that does both: what they cost streams, and when the first token of one comes
that is not in memory.

Streams: 32 of them over 8 adapters and of the model alone, in turns. First tokens: a request of an adapter that was put
into the folder and that nobody has named before, of one that the worker has put out for others, of one that was just
registered over HTTP; and each time the next request of the same adapter, of the same length.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
import uvloop
from safetensors.torch import save_file

from benchmarks.common.cluster_process import running_cluster
from benchmarks.common.cluster_watch import post_json
from benchmarks.common.local import MAX_NUM_SEQS
from benchmarks.common.part import GateError, Json, note, ratio, run_part, spread
from benchmarks.common.quiet import QuietMachine
from benchmarks.common.sse_client import stream_one
from benchmarks.common.workload import MODEL, Wave, draw_prompts
from benchmarks.peers.engines.http_asker import HttpAsker
from benchmarks.peers.peer import Request
from cluster.config.settings import AdapterSettings
from engine.checkpoint.adapters import CONFIG_NAME, WEIGHTS_NAME
from engine.checkpoint.store import resolve_model
from engine.checkpoint.weights import expected_shapes
from engine.model.config import ModelConfig

NUM_THREADS: Final = 2
RANK: Final = 16
PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NUM_IN_STREAMS: Final = 8
NUM_COLD: Final = AdapterSettings().max_loaded + 8  # more than are loaded at once: whoever comes again is out by then
STREAMS: Final = (32, 128, 64)  # requests, tokens of each prompt and answer
COLD_PROMPT: Final = 64
ROUNDS: Final = 5
AIMS: Final = {"streams_share": 0.85, "cold_ms": 20}


def measure() -> Json:
    with tempfile.TemporaryDirectory(prefix="legato-adapters-") as made:
        config = ModelConfig.from_folder(resolve_model(MODEL))
        folder, elsewhere = Path(made) / "served", Path(made) / "elsewhere"
        folder.mkdir()
        elsewhere.mkdir()
        names = [f"adapter-{number}" for number in range(NUM_COLD)]
        to_register = [elsewhere / f"registered-{number}" for number in range(NUM_COLD)]
        for number, path in enumerate([*(folder / name for name in names), *to_register]):
            write_adapter(path, config, number)
        settings = {
            "prefill": {"replicas": 0},
            "decode": {"max_num_seqs": MAX_NUM_SEQS, "threads": NUM_THREADS, "speculation": "off"},
            "kv": {"prefix_cache": False},
            "adapters": {"folder": str(folder)},
        }
        with running_cluster(settings) as port:
            return _measured(port, names, to_register)


def _measured(port: int, names: Sequence[str], to_register: Sequence[Path]) -> Json:
    quiet = QuietMachine()
    _wave(port, [MODEL] * STREAMS[0])  # whatever is made at first
    cold = {what: _first_tokens(port, names) for what in ("new", "put_out", "put_out again")}
    cold["registered"] = _first_tokens(port, [_register(port, folder) for folder in to_register])
    several = [names[number % NUM_IN_STREAMS] for number in range(STREAMS[0])]
    _wave(port, several)  # loads them
    rates = quiet.in_turns(
        {
            "base": lambda: _wave(port, [MODEL] * STREAMS[0]).tokens_per_s,
            "adapters": lambda: _wave(port, several).tokens_per_s,
        },
        ROUNDS,
    )
    share = ratio(rates["adapters"], rates["base"])
    note(f"{STREAMS[0]} streams over {NUM_IN_STREAMS} adapters: {share:.2f} of the model's tokens/s")
    return {
        "model": MODEL,
        "dtype": "bfloat16",
        "threads": NUM_THREADS,
        "rank": RANK,
        "aims": AIMS,
        "streams": {
            "load": f"{STREAMS[0]} streams of {STREAMS[1]} -> {STREAMS[2]} tokens, {NUM_IN_STREAMS} adapters",
            **{name: spread(found) for name, found in rates.items()},
            "share": share,
        },
        "cold": cold,
        "quiet": quiet.report(),
    }


def _first_tokens(port: int, names: Sequence[str]) -> Json:
    """Of each adapter's next request, and of the one after. Not repeated when others disturb: then none were cold."""
    cold: list[float] = []
    warm: list[float] = []
    for name in names:
        base, first, second = (_asked(port, of) for of in (MODEL, name, name))
        if first[1] != second[1] or base[1] == first[1]:
            raise GateError(f"{name} says {first[1]!r} and {second[1]!r}, and the model alone {base[1]!r}")
        cold.append(first[0])
        warm.append(second[0])
    later = [one - other for one, other in zip(cold, warm, strict=True)]
    note(f"first tokens come {statistics.median(later):.1f} ms later than of an adapter in memory")
    return {"cold_ms": spread(cold), "warm_ms": spread(warm), "later_ms": spread(later)}


def _register(port: int, folder: Path) -> str:
    post_json(port, "/v1/load_lora_adapter", {"lora_name": folder.name, "lora_path": str(folder)})
    return folder.name


def _asked(port: int, model: str) -> tuple[float, str]:
    """Milliseconds to the first token, and what is said."""
    (answer,) = HttpAsker(port, model).wave([Request(prompt=_PROMPT, num_tokens=8)])
    return 1e3 * answer.timing.ttft_s, answer.text


_PROMPT: Final = draw_prompts(1, COLD_PROMPT)[0]


def _wave(port: int, models: Sequence[str]) -> Wave:
    """A request of each of these models, all at once."""
    prompts = draw_prompts(len(models), STREAMS[1])

    async def run() -> Wave:
        streams = (stream_one(port, model, prompt, STREAMS[2]) for model, prompt in zip(models, prompts, strict=True))
        return Wave(tuple(await asyncio.gather(*streams)))

    wave: Wave = uvloop.run(run())
    return wave


def write_adapter(folder: Path, config: ModelConfig, seed: int) -> None:
    """A random adapter of all projections, in bfloat16, as PEFT saves it; large enough to change what is said."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in expected_shapes(config).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in PROJECTIONS:
            continue
        for part, (rows, columns) in (("A", (RANK, shape[1])), ("B", (shape[0], RANK))):
            values = torch.randn(rows, columns, generator=generator) * 0.5 / math.sqrt(columns)
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = values.to(torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS_NAME, {"format": "pt"})
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(PROJECTIONS), "bias": "none"}
    (folder / CONFIG_NAME).write_text(json.dumps(told))


if __name__ == "__main__":
    run_part("adapters", measure)
