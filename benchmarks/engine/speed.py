"""The in-process engine beside Hugging Face `generate`: same weights, threads and requests, in turns.

Speeds are reported only after both gave the same greedy tokens in float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.common.hugging_face import HuggingFace
from benchmarks.common.local import greedy_tokens, load_default_model, local_engine, local_wave
from benchmarks.common.part import GateError, Json, note, ratio, run_part, spread
from benchmarks.common.quiet import QuietMachine
from benchmarks.common.workload import MODEL, Load, Wave, describe_waves, draw_prompts, throughputs
from decode_workers.local_engine import LocalEngine
from engine.checkpoint.store import resolve_model
from engine.steps.loading import LoadedModel

NUM_THREADS = 2
SINGLE = Load(num_requests=1, prompt_tokens=128, output_tokens=128)
# (load, repeats): Hugging Face's largest batch takes most of a minute.
CONCURRENT = (
    (Load(num_requests=1, prompt_tokens=256, output_tokens=128), 3),
    (Load(num_requests=8, prompt_tokens=256, output_tokens=128), 3),
    (Load(num_requests=32, prompt_tokens=256, output_tokens=128), 2),
)
PREFILL_TOKENS = (512, 2048)
PREFILL_REPEATS = 5


def measure() -> Json:
    torch.set_num_threads(NUM_THREADS)
    folder = resolve_model(MODEL)
    gate = require_agreement(folder)
    model = load_default_model("bfloat16", num_threads=NUM_THREADS)
    engine, peer = local_engine(model), HuggingFace(folder, torch.bfloat16)
    warm_up(engine, peer)
    quiet = QuietMachine()
    single = _single_stream(engine, peer, quiet)
    return {
        "gate": gate,
        "model": MODEL,
        "dtype": "bfloat16",
        "threads": NUM_THREADS,
        "single_stream": single,
        "concurrent": [compared(engine, peer, quiet, load, repeats) for load, repeats in CONCURRENT],
        "prefill": [prefill(engine, peer, quiet, num_tokens) for num_tokens in PREFILL_TOKENS],
        "ceiling": quiet.run(lambda: _ceiling(model)),
        "quiet": quiet.report(),
    }


def warm_up(engine: LocalEngine, peer: HuggingFace) -> None:
    load = Load(num_requests=4, prompt_tokens=64, output_tokens=4)
    local_wave(engine, load)
    peer.wave(load)


def _waves(
    engine: LocalEngine, peer: HuggingFace, quiet: QuietMachine, load: Load, repeats: int
) -> tuple[list[Wave], list[Wave]]:
    """Ours and theirs."""
    waves = quiet.in_turns({"ours": lambda: local_wave(engine, load), "theirs": lambda: peer.wave(load)}, repeats)
    return waves["ours"], waves["theirs"]


def _single_stream(engine: LocalEngine, peer: HuggingFace, quiet: QuietMachine) -> Json:
    ours, theirs = _waves(engine, peer, quiet, SINGLE, repeats=5)
    described = {
        who: {
            "ttft_ms": spread([wave.requests[0].ttft_s * 1e3 for wave in waves]),
            "tpot_ms": spread([wave.requests[0].tpot_s * 1e3 for wave in waves]),
            "decode_tokens_per_s": spread([1 / wave.requests[0].tpot_s for wave in waves]),
        }
        for who, waves in (("legato", ours), ("hugging_face", theirs))
    }
    ttft = ratio([w.requests[0].ttft_s for w in theirs], [w.requests[0].ttft_s for w in ours])
    tpot = ratio([w.requests[0].tpot_s for w in theirs], [w.requests[0].tpot_s for w in ours])
    note(f"one stream 128 -> 128: first token {ttft:.2f}x, each further token {tpot:.2f}x as fast as Hugging Face")
    return {"load": "128 -> 128", **described, "speedup": {"ttft": ttft, "tpot": tpot}}


def compared(engine: LocalEngine, peer: HuggingFace, quiet: QuietMachine, load: Load, repeats: int) -> Json:
    ours, theirs = _waves(engine, peer, quiet, load, repeats)
    speedup = ratio(throughputs(ours), throughputs(theirs))
    row = {
        "concurrent": load.num_requests,
        "load": f"{load.prompt_tokens} -> {load.output_tokens}",
        "legato": describe_waves(ours),
        "hugging_face": {"output_tokens_per_s": spread(throughputs(theirs))},
        "speedup": speedup,
    }
    rate, peer_rate = max(throughputs(ours)), max(throughputs(theirs))
    note(f"{load.num_requests} concurrent: {rate:.0f} output tokens/s, Hugging Face {peer_rate:.0f}: {speedup:.2f}x")
    return row


def prefill(engine: LocalEngine, peer: HuggingFace, quiet: QuietMachine, num_tokens: int) -> Json:
    load = Load(num_requests=1, prompt_tokens=num_tokens, output_tokens=2)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(PREFILL_REPEATS):
        ours.append(num_tokens / quiet.run(lambda: local_wave(engine, load)).requests[0].ttft_s)
        theirs.append(num_tokens / quiet.run(lambda: peer.prefill_s(draw_prompts(1, num_tokens)[0])))
    speedup = ratio(ours, theirs)
    note(f"prefill {num_tokens}: {max(ours):.0f} tokens/s, Hugging Face {max(theirs):.0f}: {speedup:.2f}x")
    return {
        "prompt_tokens": num_tokens,
        "legato_tokens_per_s": spread(ours),
        "hugging_face_tokens_per_s": spread(theirs),
        "speedup": speedup,
    }


def _ceiling(model: LoadedModel) -> Json:
    """The ceiling of one stream: each of its tokens reads all weights once, so memory bandwidth bounds it."""
    read = memory_read_bytes_per_s()
    bound = read / model.runner.weight_bytes
    note(f"memory reads at {read / 1e9:.0f} GB/s: at most {bound:.0f} tokens/s for one stream")
    return {
        "memory_read_gb_per_s": round(read / 1e9, 1),
        "matmul_bf16_tflops": round(matmul_flops_per_s(torch.bfloat16) / 1e12, 3),
        "weight_bytes": model.runner.weight_bytes,
        "single_stream_bound_tokens_per_s": round(bound, 1),
    }


NEAR_TIE = (
    1e-4  # where Hugging Face's two best logits are closer, either token is right, and what follows is not compared
)
PROMPT_TOKENS = (1, 17, 64, 600)
OUTPUT_TOKENS = 24


def require_agreement(folder: Path) -> Json:
    """Compare a few prompts of mixed lengths in one batch. Raises GateError."""
    prompts = [draw_prompts(1, num_tokens)[0] for num_tokens in PROMPT_TOKENS]
    model = load_default_model("float32", num_threads=torch.get_num_threads(), model_ref=str(folder))
    engine = local_engine(model)
    ours = greedy_tokens(engine, prompts, OUTPUT_TOKENS)
    peer = HuggingFace(folder, torch.float32)
    compared = near_ties = 0
    for number, prompt in enumerate(prompts):
        matching = _matching(peer, prompt, ours[number])
        compared += matching
        near_ties += matching < OUTPUT_TOKENS
    note(f"gate: {compared} greedy tokens equal Hugging Face's in float32 ({near_ties} prompts left at a near-tie)")
    return {"compared_tokens": compared, "near_ties": near_ties}


def _matching(peer: HuggingFace, prompt: list[int], ours: list[int]) -> int:
    """How many leading tokens agree: all, or those before a near-tie."""
    output = peer.generate([prompt], OUTPUT_TOKENS, return_dict_in_generate=True, output_logits=True)
    theirs = output.sequences[0, len(prompt) :].tolist()
    for index, (token, expected) in enumerate(zip(ours, theirs, strict=True)):
        best, second = output.logits[index][0].topk(2).values.tolist()
        if token != expected:
            if best - second < NEAR_TIE:
                return index
            raise GateError(
                f"a prompt of {len(prompt)} tokens continues with token {token} at {index}, Hugging Face with "
                f"{expected}, whose logit is {best - second:.2e} above the next: fix the engine before measuring it"
            )
    return OUTPUT_TOKENS


_BYTES = 512 * 2**20
_MATRIX = 2048


def memory_read_bytes_per_s(repeats: int = 5) -> float:
    """The best of some passes over memory far larger than any cache, by torch's threads."""
    numbers = torch.ones(_BYTES // 8, dtype=torch.int64)
    return _BYTES / min(_seconds(numbers.max) for _ in range(repeats))


def matmul_flops_per_s(dtype: torch.dtype, repeats: int = 5) -> float:
    """The best of some square products that fit the caches, by torch's threads."""
    a, b = (torch.randn(_MATRIX, _MATRIX).to(dtype) for _ in range(2))
    return 2 * _MATRIX**3 / min(_seconds(lambda: a @ b) for _ in range(repeats))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    run_part("engine", measure)
