"""Tokens a second with drafts, beside the same engine without, in turns; every token must be the same.

* *edits*: code that the model writes, with a `prediction` that differs from it as a file before an edit does: in a
  run of up to three tokens in every 33. *exact*: with a prediction that is right.
* *copies*: the model is asked to repeat lines of a given text; *summaries* are of a given text. By lookup.
* *records*: JSON by a schema whose names are much of it; they are drafted by the grammar, and by lookup.
* *prose*: drawn answers to questions, with nothing to copy.
* *adversary*: the same, with a prediction of tokens drawn at random.

In process, two threads. What counts begins when all prompts are computed. Tokens a second are those of all streams up
to the end of the last one, which may be alone for long; `stream_times` says how many times sooner a stream ends, in the
median. `processor_times` is the same as `times` by this process' processor time, which neighbours of a shared machine
disturb less. Where nothing is to be gained, these scatter by more than may be lost, so there `by_steps` says it: two
engines with the same requests, one with drafts, take a step each in turns for as long as all streams run.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.common.local import load_default_model, local_engine
from benchmarks.common.part import GateError, Json, note, ratio, run_part, spread
from benchmarks.common.quiet import QuietMachine
from benchmarks.common.workload import MODEL, greedy
from benchmarks.texts import CODE, QUESTIONS, TEXT
from decode_workers.local_engine import LocalEngine
from engine.checkpoint.store import resolve_model
from engine.drafting.drafter import DrafterName
from engine.drafting.speculation import Speculation, SpeculationConfig
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence
from engine.steps.calibration import calibrate, compile_kernels
from engine.steps.loading import LoadedModel
from engine.text.tokenizer import Tokenizer

NUM_THREADS = 2
STREAMS = (1, 8, 32)
NUM_TOKENS = 160
LEAST_REQUESTS = 4  # where one is alone they come one after the other: one text says little of others
EDITED_EVERY = 33
REPEATS = 3

_TEXT = {"type": "string", "maxLength": 12}
RECORDS = {
    "type": "array",
    "minItems": 32,
    "items": {
        "type": "object",
        "properties": {
            "order_number": {"type": "integer", "minimum": 0, "maximum": 9999},
            "customer_name": _TEXT,
            "delivery_address": {
                "type": "object",
                "properties": {"street_and_number": _TEXT, "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"}},
                "required": ["street_and_number", "postal_code"],
                "additionalProperties": False,
            },
            "payment_method": {"enum": ["credit_card", "bank_transfer"]},
        },
        "required": ["order_number", "customer_name", "delivery_address", "payment_method"],
        "additionalProperties": False,
    },
    "x-guidance": {"whitespace_flexible": False},
}


@dataclass(frozen=True, slots=True)
class Work:
    """Requests, so many `at_once`, and the next ones when these have ended. `predictions` None: none of them has one.
    Those that draw say something else in each turn; of the others history would know the answers from the turn
    before."""

    prompts: list[list[int]]
    at_once: int
    draws: bool = False
    predictions: list[list[int]] | None = None
    grammar: str | None = None

    @property
    def drafters(self) -> tuple[DrafterName, ...]:
        return ("prediction", "grammar", "lookup", "history") if self.draws else ("prediction", "grammar", "lookup")

    def sequences(self, turn: int) -> list[list[Sequence]]:
        """Those that run together, group by group."""
        seqs = [
            Sequence(
                request_id=f"bench-{number}",
                attempt=0,
                params=_drawn(1000 * turn + number)
                if self.draws
                else replace(greedy(NUM_TOKENS), grammar=self.grammar),
                prompt_token_ids=list(prompt),
                prediction_token_ids=[] if self.predictions is None else self.predictions[number],
            )
            for number, prompt in enumerate(self.prompts)
        ]
        return [seqs[first : first + self.at_once] for first in range(0, len(seqs), self.at_once)]


@dataclass(slots=True)
class Run:
    turn: int
    tokens: list[list[int]]
    tokens_per_s: float
    tokens_per_processor_s: float
    median_end_s: float  # of the streams
    num_steps: int
    drafted: int
    accepted: int


def measure() -> Json:
    model = load_default_model("bfloat16", num_threads=NUM_THREADS, kv_blocks=2048)
    compile_kernels(model)
    model.costs.seed(calibrate(model))
    tokenizer = Tokenizer(resolve_model(MODEL))
    quiet = QuietMachine()
    rows: list[Json] = []
    for num_streams in STREAMS:
        for name, work in _works(model, tokenizer, num_streams).items():
            config = SpeculationConfig(drafters=work.drafters)
            speculation = Speculation.of(config, model.costs, model.runner.sampler.masks)
            rows.append({"work": name, "streams": num_streams, **compared(model, speculation, work, quiet)})
            note(
                f"{name}, {num_streams} at once: {rows[-1]['times']} times, {rows[-1]['tokens_per_step']} tokens a step"
            )
    return {"model": MODEL, "threads": NUM_THREADS, "output_tokens": NUM_TOKENS, "rows": rows, "quiet": quiet.report()}


def _works(model: LoadedModel, tokenizer: Tokenizer, num_streams: int) -> dict[str, Work]:
    code, text = (path.read_text(encoding="utf-8") for path in (CODE, TEXT))
    numbers = range(max(LEAST_REQUESTS, num_streams))
    of_code = [chat(tokenizer, f"Improve this code:\n{code[200 * n : 200 * n + 1200]}") for n in numbers]
    work = partial(Work, at_once=num_streams)
    written = run(model, None, work(of_code), itertools.count()).tokens
    parts = [text[300 * n : 300 * n + 1500] for n in numbers]
    questions = [chat(tokenizer, QUESTIONS[n % len(QUESTIONS)] + " " * (n // len(QUESTIONS))) for n in numbers]
    source = random.Random(num_streams)
    vocab_size = model.runner.config.vocab_size
    at_random = [[source.randrange(vocab_size) for _ in range(2 * NUM_TOKENS)] for _ in questions]
    return {
        "edits": work(of_code, predictions=[_before_an_edit(tokens, source, vocab_size) for tokens in written]),
        "exact": work(of_code, predictions=written),
        "copies": work([chat(tokenizer, f"Repeat this text word for word:\n{part[:700]}") for part in parts]),
        "summaries": work([chat(tokenizer, f"Summarise this text:\n{part}") for part in parts]),
        "records": work(
            [chat(tokenizer, f"Write a list of {n + 5} orders, as JSON.") for n in numbers],
            grammar=json.dumps({"grammars": [{"json_schema": RECORDS}]}),
        ),
        "prose": work(questions, draws=True),
        "adversary": work(questions, draws=True, predictions=at_random),
    }


def compared(model: LoadedModel, speculation: Speculation, work: Work, quiet: QuietMachine) -> Json:
    """What is learnt of drafts and rows stays from turn to turn, as in a worker. Raises GateError where a token is
    another one."""
    variants: Mapping[str, Callable[[], Run]] = {
        "without": partial(run, model, None, work, itertools.count()),
        "with": partial(run, model, speculation, work, itertools.count()),
    }
    runs = quiet.in_turns(variants, REPEATS)
    expected = {one.turn: one.tokens for one in runs["without"]}  # a disturbed turn was followed by another one
    if any(one.tokens != expected.get(one.turn, one.tokens) for one in runs["with"]):
        raise GateError("drafts have changed tokens")
    found = runs["with"]
    ends_per_s = {name: [1 / one.median_end_s for one in turns] for name, turns in runs.items()}
    speeds = {name: [one.tokens_per_s for one in turns] for name, turns in runs.items()}
    by_processor = {name: [one.tokens_per_processor_s for one in turns] for name, turns in runs.items()}
    return {
        "times": ratio(speeds["with"], speeds["without"]),
        "processor_times": ratio(by_processor["with"], by_processor["without"]),
        "stream_times": ratio(ends_per_s["with"], ends_per_s["without"]),
        "tokens_per_s": spread(speeds["with"]),
        "without_tokens_per_s": spread(speeds["without"]),
        "tokens_per_step": round(runs["without"][0].num_steps / found[-1].num_steps, 2),
        "drafted": found[-1].drafted,
        "accepted": found[-1].accepted,
    } | (by_steps(model, speculation, work) if work.draws else {})


def by_steps(model: LoadedModel, speculation: Speculation, work: Work) -> Json:
    """How many times the tokens of as much time, with drafts. What drafts and rows cost is known from the turns before,
    and of these answers nothing: they are others."""
    tokens, seconds, processor_s = [0, 0], [0.0, 0.0], [0.0, 0.0]
    turns = range(100, 100 + REPEATS)
    groups = [pair for turn in turns for pair in zip(work.sequences(turn), work.sequences(turn), strict=True)]
    for requests in groups:
        engines = [_begun(model, made, seqs) for made, seqs in zip((None, speculation), requests, strict=True)]
        num_before = [_num_output(seqs) for seqs in requests]
        order = [0, 1]
        while all(engine.scheduler.num_running == len(requests[0]) for engine in engines):
            for index in order:
                began, processor_began = time.perf_counter(), time.process_time()
                engines[index].step()
                seconds[index] += time.perf_counter() - began
                processor_s[index] += time.process_time() - processor_began
            order.reverse()
        for index, seqs in enumerate(requests):
            tokens[index] += _num_output(seqs) - num_before[index]
            while engines[index].scheduler.num_running:
                engines[index].step()
    more = tokens[1] / tokens[0]
    return {
        "by_steps": {
            "times": round(more * seconds[0] / seconds[1], 3),
            "processor_times": round(more * processor_s[0] / processor_s[1], 3),
        }
    }


def _begun(model: LoadedModel, speculation: Speculation | None, seqs: list[Sequence]) -> LocalEngine:
    """An engine that has computed the prompts."""
    engine = local_engine(model, speculation)
    for seq in seqs:
        engine.add(seq)
    while engine.scheduler.num_uncomputed:
        engine.step()
    return engine


def run(model: LoadedModel, speculation: Speculation | None, work: Work, turns: Iterator[int]) -> Run:
    turn = next(turns)
    groups = work.sequences(turn)
    num_tokens, num_steps, seconds, processor_s = 0, 0, 0.0, 0.0
    ends_s: list[float] = []
    for seqs in groups:
        engine = _begun(model, speculation, seqs)
        num_tokens -= _num_output(seqs)
        began, processor_began = time.perf_counter(), time.process_time()
        while engine.scheduler.num_running:
            num_running = engine.scheduler.num_running
            engine.step()
            num_steps += 1
            ends_s += [time.perf_counter() - began] * (num_running - engine.scheduler.num_running)
        seconds += time.perf_counter() - began
        processor_s += time.process_time() - processor_began
        num_tokens += _num_output(seqs)
    counts = [] if speculation is None else speculation.counts.values()  # of all turns so far
    return Run(
        turn=turn,
        tokens=[seq.output_token_ids for seqs in groups for seq in seqs],
        tokens_per_s=num_tokens / seconds,
        tokens_per_processor_s=num_tokens / processor_s,
        median_end_s=statistics.median(ends_s),
        num_steps=num_steps,
        drafted=sum(each.drafted for each in counts),
        accepted=sum(each.accepted for each in counts),
    )


def _num_output(seqs: list[Sequence]) -> int:
    return sum(len(seq.output_token_ids) for seq in seqs)


def _before_an_edit(tokens: list[int], source: random.Random, vocab_size: int) -> list[int]:
    """A text before an edit: where a run of tokens was written anew, as many others, fewer, or more stood."""
    before: list[int] = []
    at = 0
    while at < len(tokens):
        kept = source.randint(1, 2 * EDITED_EVERY - 5)
        before += tokens[at : at + kept]
        before += [source.randrange(vocab_size) for _ in range(source.randint(0, 3))]
        at += kept + source.randint(1, 3)
    return before


def _drawn(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, seed=seed, temperature=0.7, top_p=0.95, ignore_eos=True)


def chat(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.apply_chat_template([{"role": "user", "content": text}])


if __name__ == "__main__":
    torch.set_num_threads(NUM_THREADS)
    run_part("speculation", measure)
