"""Tokens a second with a draft model, beside the same engine without, in turns; every token must be the same.

No package has a pair of models of one family whose bytes are far apart, so one is made here: each layer of the default
model is followed by echoes of it, whose outputs count for little. The deep model reads as many bytes as one that is as
large, and the more its echoes count, the more seldom it says what the default model, which drafts, says. So this
measures what drafts bring at an acceptance, not how often a small model is right of a large one.

In process, two threads: drawn answers to questions. What counts begins when all prompts are computed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.common.part import Json, note, run_part
from benchmarks.common.quiet import QuietMachine
from benchmarks.common.workload import MODEL
from benchmarks.engine.speculation import LEAST_REQUESTS, NUM_THREADS, NUM_TOKENS, Work, chat, compared
from benchmarks.texts import QUESTIONS
from engine.checkpoint.store import resolve_model
from engine.drafting.draft_model import DraftModel
from engine.drafting.speculation import Speculation
from engine.steps.calibration import calibrate, compile_kernels
from engine.steps.loading import EngineConfig, LoadedModel, load_model
from engine.text.tokenizer import Tokenizer

STREAMS = (1, 4, 8)
NUM_ECHOES = 8
STRENGTHS = (0.05, 0.15)
"""Of echoes, beside the layer that they repeat."""


def measure(strengths: tuple[float, ...] = STRENGTHS, streams: tuple[int, ...] = STREAMS) -> Json:
    folder = resolve_model(MODEL)
    tokenizer, quiet = Tokenizer(folder), QuietMachine()
    rows: list[Json] = []
    ratio_of_bytes = 0.0
    for strength in strengths:
        with tempfile.TemporaryDirectory() as made:
            deepened(folder, Path(made), strength)
            model = _load(Path(made))
            compile_kernels(model)
            model.costs.seed(calibrate(model))
            assert isinstance(model.draft_model, DraftModel)
            ratio_of_bytes = model.draft_model.model.runner.weight_bytes / model.runner.weight_bytes
            for num_streams in streams:
                prompts = [chat(tokenizer, QUESTIONS[n]) for n in range(max(num_streams, LEAST_REQUESTS))]
                speculation = Speculation([model.draft_model], model.costs)
                found = compared(model, speculation, Work(prompts, num_streams, draws=True), quiet)
                rows.append({"work": f"prose, echoes of {strength}", "streams": num_streams, **found})
                note(f"{strength}, {num_streams} at once: {json.dumps(rows[-1])}")
    return {
        "model": f"{MODEL} with {NUM_ECHOES} echoes of each layer, {MODEL} drafts ({ratio_of_bytes:.2f} of the bytes)",
        "threads": NUM_THREADS,
        "output_tokens": NUM_TOKENS,
        "rows": rows,
        "quiet": quiet.report(),
    }


def deepened(folder: Path, into: Path, strength: float, num_echoes: int = NUM_ECHOES) -> None:
    """The model in `folder` with so many more layers after each, whose outputs are so much of the layer's own."""
    for path in folder.iterdir():
        if path.suffix != ".safetensors" and path.is_file():
            shutil.copy(path, into)
    weights: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
    config = json.loads((folder / "config.json").read_text())
    deep: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if not name.startswith("model.layers."):
            deep[name] = weight
            continue
        layer, rest = name.removeprefix("model.layers.").split(".", 1)
        is_output = rest in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
        for echo in range(num_echoes + 1):
            number = int(layer) * (num_echoes + 1) + echo
            deep[f"model.layers.{number}.{rest}"] = weight * strength if echo and is_output else weight.clone()
    save_file(deep, into / "model.safetensors", {"format": "pt"})
    num_layers = config["num_hidden_layers"] * (num_echoes + 1)
    (into / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))


def _load(folder: Path) -> LoadedModel:
    return load_model(
        EngineConfig(
            model_ref=str(folder),
            model_name="deepened",
            dtype="bfloat16",
            kv_blocks=512,
            num_threads=NUM_THREADS,
            draft_ref=MODEL,
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strengths", type=float, nargs="+", default=STRENGTHS)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    arguments = parser.parse_args()
    torch.set_num_threads(NUM_THREADS)
    run_part("draft_model", lambda: measure(tuple(arguments.strengths), tuple(arguments.streams)))
