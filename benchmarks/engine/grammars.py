"""What a JSON schema costs: tokens/s of 32 streams that all follow one, beside the same streams without, in turns; and
the processor time of compiling 200 schemas of JSONSchemaBench.

Both kinds of streams have the same prompts and write the same number of tokens, greedy and drawn. The schema is a list
of records that does not end before they do. `lost_by_processor` is what is lost of the tokens for a second of this
process' processor time, which neighbours of a shared machine disturb less.
"""

from __future__ import annotations

import gzip
import json
import statistics
import time
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.common.local import load_default_model, local_engine
from benchmarks.common.part import ROOT, GateError, Json, note, run_part, spread
from benchmarks.common.workload import MODEL, RECORDS, draw_prompts
from cluster.http.openai.grammar_process import CompilerProcess, compiler_process
from decode_workers.local_engine import LocalEngine
from engine.checkpoint.store import resolve_model
from engine.sampling.params import MAX_GRAMMAR_CHARS, SamplingParams
from engine.sequence import Sequence
from engine.text.tokenizer import Tokenizer

NUM_THREADS: Final = 2
NUM_STREAMS: Final = 32
PROMPT_TOKENS: Final = 128
OUTPUT_TOKENS: Final = 64
ROUNDS: Final = 9
SCHEMAS: Final = ROOT / "tests/http/schemas/jsonschemabench.jsonl.gz"


def measure() -> Json:
    model = load_default_model("bfloat16", num_threads=NUM_THREADS)
    tokenizer = Tokenizer(resolve_model(MODEL))
    compiler = compiler_process(tokenizer.json, tokenizer.vocab_size, tuple(sorted(tokenizer.eos_token_ids)))
    grammar = compiler.ask("json", json.dumps(RECORDS))["grammar"]
    engine = local_engine(model)
    prompts = draw_prompts(NUM_STREAMS, PROMPT_TOKENS)
    rows = []
    for temperature in (0.0, 1.0):
        rates: dict[str | None, list[tuple[float, float]]] = {None: [], grammar: []}
        _tokens_per_s(engine, prompts, grammar, temperature)  # whatever is made at first
        for _ in range(ROUNDS):
            for kind, found in rates.items():
                found.append(_tokens_per_s(engine, prompts, kind, temperature))
        lost, by_processor = (
            [1 - under[clock] / free[clock] for free, under in zip(*rates.values(), strict=True)] for clock in (0, 1)
        )
        rows.append(
            {
                "temperature": temperature,
                "without": spread([by_clock for by_clock, _ in rates[None]]),
                "with": spread([by_clock for by_clock, _ in rates[grammar]]),
                "lost": round(statistics.median(lost), 4),
                "lost_by_round": [round(one, 4) for one in lost],
                "lost_by_processor": round(statistics.median(by_processor), 4),
                "lost_by_processor_by_round": [round(one, 4) for one in by_processor],
            }
        )
        note(
            f"temperature {temperature}: under a schema {rows[-1]['lost']:.1%} of tokens/s are lost, "
            f"{rows[-1]['lost_by_processor']:.1%} by processor time"
        )
    return {
        "streams": f"{NUM_STREAMS} of {PROMPT_TOKENS} -> {OUTPUT_TOKENS} tokens, all under a schema and none",
        "rows": rows,
        "compile": _compile_times(compiler),
    }


def _tokens_per_s(
    engine: LocalEngine, prompts: list[list[int]], grammar: str | None, temperature: float
) -> tuple[float, float]:
    """By the clock, and for each second of processor time."""
    seqs = [
        Sequence(
            request_id=f"stream-{number}",
            attempt=0,
            params=SamplingParams(
                max_tokens=OUTPUT_TOKENS, seed=number, temperature=temperature, ignore_eos=True, grammar=grammar
            ),
            prompt_token_ids=prompt,
        )
        for number, prompt in enumerate(prompts)
    ]
    first_s, processor_s, num_before = 0.0, 0.0, 0
    for _ in engine.run(seqs):
        if first_s == 0.0 and all(seq.output_token_ids for seq in seqs):
            first_s, processor_s = time.perf_counter(), time.process_time()
            num_before = sum(len(seq.output_token_ids) for seq in seqs)
    if any(len(seq.output_token_ids) != OUTPUT_TOKENS for seq in seqs):
        raise GateError("a stream ended before its time")
    num = NUM_STREAMS * OUTPUT_TOKENS - num_before
    return num / (time.perf_counter() - first_s), num / (time.process_time() - processor_s)


def _compile_times(compiler: CompilerProcess) -> Json:
    """What compiling each schema takes, the median of three: of the processor, by the process that compiles, and by the
    clock, as its gateway waits. `served`: of those that it compiles; `all`: with those that it finds it must refuse."""
    served: list[tuple[float, float]] = []
    all_times: list[tuple[float, float]] = []
    with gzip.open(SCHEMAS, "rt") as lines:
        schemas = [json.dumps(json.loads(line)["schema"], separators=(",", ":")) for line in lines]
    for schema in schemas:
        if len(schema) > MAX_GRAMMAR_CHARS:  # refused unread
            all_times.append((0.0, 0.0))
            continue
        taken = []
        for _ in range(3):
            processor_ns, began_at = _processor_ns(compiler), time.perf_counter()
            answer = compiler.ask("json", schema)
            clock_ms = (time.perf_counter() - began_at) * 1e3
            taken.append(((_processor_ns(compiler) - processor_ns) / 1e6, clock_ms))
        processor, clock = zip(*taken, strict=True)
        all_times.append((statistics.median(processor), statistics.median(clock)))
        if "grammar" in answer:
            served.append(all_times[-1])
    ms = {
        f"{which}, {by}": _percentiles([one[number] for one in times])
        for which, times in (("served", served), ("all", all_times))
        for number, by in enumerate(("processor", "clock"))
    }
    note(
        f"{len(served)} of {len(schemas)} schemas are served; compiling: P99 {ms['served, processor']['p99']} ms of a "
        f"processor, {ms['served, clock']['p99']} ms by the clock; with the refused ones "
        f"{ms['all, processor']['p99']} and {ms['all, clock']['p99']}"
    )
    return {"schemas": len(schemas), "served": len(served), "ms": ms}


def _percentiles(times: list[float]) -> dict[str, float]:
    found = np.percentile(times, [50, 90, 99, 100]).round(2).tolist()
    return dict(zip(("p50", "p90", "p99", "max"), found, strict=True))


def _processor_ns(compiler: CompilerProcess) -> int:
    """What the fork that compiles has had of a processor: the only child of the compiler's process."""
    fork = Path(f"/proc/{compiler.pid}/task/{compiler.pid}/children").read_text()
    return int(Path(f"/proc/{fork.strip()}/schedstat").read_text().split()[0])


if __name__ == "__main__":
    run_part("grammars", measure)
