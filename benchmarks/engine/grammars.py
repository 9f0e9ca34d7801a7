"""What a JSON schema costs: tokens/s of 32 streams that all follow one, beside the same streams without, in turns; and
the processor time of compiling 200 schemas of JSONSchemaBench.

Both kinds of streams have the same prompts and write the same number of tokens, greedy and drawn. The schema is a list
of records that does not end before they do. `lost_by_processor` is what is lost of the tokens for a second of this
process' processor time, which neighbours of a shared machine disturb less.
"""

from __future__ import annotations

import gc
import gzip
import json
import statistics
import time
from typing import Any, Final

import numpy as np

from benchmarks.common.local import load_default_model, local_engine
from benchmarks.common.part import GateError, note, run_part
from benchmarks.common.provenance import ROOT
from benchmarks.common.summary import Json, spread
from benchmarks.common.workload import MODEL, RECORDS, draw_prompts
from cluster.http.openai.json_schemas import UnsupportedGrammarError
from cluster.http.openai.structured import OutputConstraint, compiled
from decode_workers.local_engine import LocalEngine
from engine.checkpoint.store import resolve_model
from engine.sampling.grammar import grammar_tokenizer
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
    llg = grammar_tokenizer(tokenizer.json, tokenizer.vocab_size, tuple(tokenizer.eos_token_ids))
    grammar = compiled(OutputConstraint("json", json.dumps(RECORDS), ""), llg)
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
        "compile": _compile_times(llg),
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


def _compile_times(llg: Any) -> Json:
    """Processor time of compiling each schema that a gateway serves, the median of three. As in its process for
    grammars, cycles among what was there before are not looked for."""
    times = []
    with gzip.open(SCHEMAS, "rt") as lines:
        schemas = [json.dumps(json.loads(line)["schema"], separators=(",", ":")) for line in lines]
    gc.freeze()
    gc.disable()
    for schema in schemas:
        taken = []
        for _ in range(3 if len(schema) <= MAX_GRAMMAR_CHARS else 0):
            before = time.process_time()
            try:
                compiled(OutputConstraint("json", schema, ""), llg)
            except UnsupportedGrammarError:
                break
            taken.append((time.process_time() - before) * 1e3)
            gc.collect()
        if taken:
            times.append(statistics.median(taken))
    gc.enable()
    found = dict(zip(("p50", "p90", "p99", "max"), np.percentile(times, [50, 90, 99, 100]).round(2), strict=True))
    note(f"{len(times)} of {len(schemas)} schemas are served; compiling: P99 {found['p99']} ms of a processor")
    return {"schemas": len(schemas), "served": len(times), "ms": found}


if __name__ == "__main__":
    run_part("grammars", measure)
