"""Weights of 8 and 4 bits beside bfloat16: how well they predict a fixed text, and how fast they are.

Quality: perplexity of the text, and how often the likeliest next token is the one that bfloat16 finds likeliest. The
text is a copy of design notes, which no training data holds. Speed: in process, two threads, in turns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.common.local import local_engine, local_wave
from benchmarks.common.part import GateError, Json, note, ratio, run_part, spread
from benchmarks.common.quiet import QuietMachine
from benchmarks.common.workload import MODEL, Load, sequences, throughputs
from benchmarks.texts import TEXT
from decode_workers.local_engine import LocalEngine
from engine.checkpoint.quantisation import Quantisation
from engine.checkpoint.store import resolve_model
from engine.sampling.params import SamplingParams
from engine.sequence import TokenLogprobs
from engine.steps.loading import EngineConfig, LoadedModel, load_model
from engine.text.tokenizer import Tokenizer
from kernels.quantised_weight import ActivationBits

NUM_THREADS = 2
SINGLE = Load(num_requests=1, prompt_tokens=128, output_tokens=128)
PREFILL = Load(num_requests=1, prompt_tokens=512, output_tokens=2)
CONCURRENT = Load(num_requests=8, prompt_tokens=256, output_tokens=64)
REPEATS = 3
# Weights of 8 bits that predict a text visibly worse are not of 8 bits.
MOST_WORSE_8_BITS = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    model_ref: str = MODEL
    quantisation: Quantisation | None = None
    activation_bits: ActivationBits = 8


BASE = "bfloat16"
VARIANTS: Mapping[str, Variant] = {
    BASE: Variant(),
    "int8": Variant(quantisation=Quantisation.of("int8")),
    "int8, activations of 16": Variant(quantisation=Quantisation.of("int8"), activation_bits=16),
    "int8, groups of 32": Variant(quantisation=Quantisation(name="int8", group_size=32)),
    "int4": Variant(quantisation=Quantisation.of("int4")),
    "GGUF Q4_1": Variant(model_ref=f"{MODEL}-q4_1"),
    "GGUF Q4_1, activations of 16": Variant(model_ref=f"{MODEL}-q4_1", activation_bits=16),
}


def measure() -> Json:
    token_ids = _tokenizer().encode(TEXT.read_text(encoding="utf-8"), True)
    models = {name: _model(variant) for name, variant in VARIANTS.items()}
    engines = {name: local_engine(model) for name, model in models.items()}
    judged = {name: _judge(engine, token_ids) for name, engine in engines.items()}
    quality = {name: _quality(logprobs, judged[BASE]) for name, logprobs in judged.items()}
    for name, row in quality.items():
        note(f"{name}: perplexity {row['perplexity']}, {row['top1_agreement_percent']} % as {BASE}")
    _require_8_bits(quality)
    quiet = QuietMachine()
    return {
        "model": MODEL,
        "text_tokens": len(token_ids),
        "threads": NUM_THREADS,
        "quality": quality,
        "weight_megabytes": {name: round(model.runner.weight_bytes / 1e6, 1) for name, model in models.items()},
        "speed": _speed(engines, quiet),
        "quiet": quiet.report(),
    }


def _tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model(MODEL))


def _model(variant: Variant) -> LoadedModel:
    config = EngineConfig(
        model_ref=variant.model_ref,
        model_name=MODEL,
        dtype="bfloat16",
        kv_blocks=512,
        num_threads=NUM_THREADS,
        prefix_caching=False,
        quantisation=variant.quantisation,
        activation_bits=variant.activation_bits,
    )
    return load_model(config)


def _judge(engine: LocalEngine, token_ids: list[int]) -> list[TokenLogprobs]:
    """Judge each token but the first, given all before it."""
    params = SamplingParams(max_tokens=1, seed=0, temperature=0.0, prompt_logprobs=1)
    emissions = list(engine.run(sequences([token_ids], params)))
    logprobs = emissions[0].prompt_logprobs
    assert logprobs is not None and len(logprobs) == len(token_ids) - 1
    return logprobs


def _quality(judged: list[TokenLogprobs], base: list[TokenLogprobs]) -> Json:
    mean = sum(token.logprob for token in judged) / len(judged)
    same = sum(token.top[0][0] == other.top[0][0] for token, other in zip(judged, base, strict=True))
    return {
        "perplexity": round(math.exp(-mean), 3),
        "top1_agreement_percent": round(100 * same / len(judged), 2),
    }


def _require_8_bits(quality: Mapping[str, Json]) -> None:
    """Raises GateError."""
    ours, base = (float(str(quality[name]["perplexity"])) for name in ("int8", BASE))
    if ours > base * MOST_WORSE_8_BITS:
        raise GateError(f"perplexity is {ours} with 8 bits and {base} without: the kernels or the rounding are wrong")


def _speed(engines: Mapping[str, LocalEngine], quiet: QuietMachine) -> dict[str, Json]:
    single, prefill, concurrent = (
        quiet.in_turns({name: partial(local_wave, engine, load) for name, engine in engines.items()}, REPEATS)
        for load in (SINGLE, PREFILL, CONCURRENT)
    )
    rows: dict[str, Json] = {}
    for name in engines:
        decode = [1 / wave.requests[0].tpot_s for wave in single[name]]
        filled = [PREFILL.prompt_tokens / wave.requests[0].ttft_s for wave in prefill[name]]
        speedup = ratio(decode, [1 / wave.requests[0].tpot_s for wave in single[BASE]])
        rows[name] = {
            "single_decode_tokens_per_s": spread(decode),
            "single_speedup": speedup,
            "prefill_512_tokens_per_s": spread(filled),
            "concurrent_8_tokens_per_s": spread(throughputs(concurrent[name])),
        }
        note(f"{name}: one stream {max(decode):.0f} tokens/s ({speedup:.2f}x), prefill {max(filled):.0f}")
    return rows


if __name__ == "__main__":
    torch.set_num_threads(NUM_THREADS)
    run_part("quantisation", measure)
