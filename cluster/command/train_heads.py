"""`legato train-heads`: heads for `decode.draft_model`, trained on texts like those that the model is to write.

They learn until the time is over, or Ctrl-C, with a part of the texts held out. Then the model generates from that part
without them and with them, and only if they make it faster their folder gets its name. Until then it is `DIR.partial`,
from which the same command goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file

from cluster.command.arguments import ArgumentsError
from decode_workers.local_engine import LocalEngine
from engine.checkpoint.builtin_models import ModelUnavailableError
from engine.checkpoint.store import resolve_model
from engine.checkpoint.weights import load_output_layer
from engine.drafting.head_training import HeadScores, HeadTraining, Tokens, frequent_tokens
from engine.drafting.heads import HeadDrafter, HeadsConfig, is_heads, target_config
from engine.drafting.speculation import MOST_DRAFTS, Speculation
from engine.model.config import ModelConfig, read_config
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence
from engine.steps.loading import EngineConfig, LoadedModel, attach_heads, load_model, model_fingerprint
from engine.text.tokenizer import Tokenizer

_WINDOW: Final = 256
"""Tokens of a text that are read together."""
_WINDOWS: Final = 4
"""Windows that a step of the training learns from."""
_SHORTEST: Final = 32
_MOST_TOKENS: Final = 4_000_000
"""Tokens of all texts, which are drawn by chance: more than some hours on a CPU take in."""
_HELD_OUT: Final = 20
"""One of so many texts is held out; where there are fewer texts, the last part of each."""
_SCORED: Final = 16
"""Windows of the texts held out that are scored before and after the training."""
_TOLD_S, _SAVED_S = 5.0, 60.0
_MINUTES: Final = 10.0
_PROMPTS, _PROMPT_TOKENS, _ANSWER_TOKENS = 6, 64, 64
"""How many prompts, of how many tokens, are answered with how many tokens for each row of the table."""


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns its exit code: 1 if heads bring nothing, or cannot be trained."""
    if arguments.heads > MOST_DRAFTS:
        raise ArgumentsError(f"--heads {arguments.heads}: a step checks {MOST_DRAFTS} drafts of a sequence at most")
    for path in arguments.texts:
        if not path.exists():
            raise ArgumentsError(f"there is no file or folder {path}")
    _require_own_folder(arguments.output)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 1
    except (ModelUnavailableError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _require_own_folder(output: Path) -> None:
    """Check that heads may take the place of what is at `output`: nothing, an empty folder, or other heads. Raises
    ArgumentsError: whatever else is there would be deleted."""
    is_free = not output.exists() or (output.is_dir() and not any(output.iterdir()))
    with contextlib.suppress(ValueError):  # its config.json is no JSON, hence not of ours
        is_free |= is_heads(output)
    if not is_free or not output.name:
        raise ArgumentsError(
            f"{output} is there already, and holds no heads, which get a folder of their own: name one with --output"
            " that is not there yet"
        )


def _run(arguments: argparse.Namespace) -> int:
    folder = resolve_model(arguments.model)
    config = target_config(read_config(folder))
    texts = _tokenised(Tokenizer(folder), arguments.texts)
    engine = EngineConfig(
        model_ref=arguments.model,
        model_name=arguments.model,
        kv_blocks=2 * _WINDOWS * _WINDOW // 16,
        backend="native",
        prefix_caching=False,
        device="cuda:0" if torch.cuda.is_available() else "cpu",
    )
    model = load_model(engine)
    partial = arguments.output.with_name(f"{arguments.output.name}.partial")
    training = _training(model, config, folder, texts, arguments, (partial, arguments.output))
    _train(training, texts, partial, _Bounds.of(arguments.minutes, arguments.steps))
    drafter = attach_heads(model.runner, engine, partial, training.config, folder)
    gain = _measured(model, drafter, texts.held_out, arguments.heads)
    if gain <= 1.0:
        print(
            f"With them the model is not faster, so they are not put into {arguments.output}. They are in {partial}:"
            " the same command goes on from there, with more time or other texts."
        )
        return 1
    if arguments.output.exists():
        shutil.rmtree(arguments.output)
    partial.rename(arguments.output)
    print(
        f"The heads are in {arguments.output}. To use them:\n\n  decode: {{draft_model: {arguments.output.resolve()}}}"
    )
    return 0


# --- texts ---


@dataclass(frozen=True, slots=True)
class _Texts:
    """Windows of tokens, to learn from and held out."""

    learnt: list[Tokens] = field(default_factory=list)
    held_out: list[Tokens] = field(default_factory=list)


def _tokenised(tokenizer: Tokenizer, paths: list[Path]) -> _Texts:
    """Read the texts, and cut their tokens into windows to learn from and to hold out. Raises ValueError if there is
    too little to learn from."""
    began = time.monotonic()
    documents = sorted({document for path in paths for document in _read(path, tokenizer)})
    random.Random(0).shuffle(documents)
    texts, num_tokens, num_read = _Texts(), 0, 0
    for document in documents:
        token_ids = tokenizer.encode(document)
        num_tokens, num_read = num_tokens + len(token_ids), num_read + 1
        cut = len(token_ids) * (_HELD_OUT - 1) // _HELD_OUT
        if len(documents) >= 2 * _HELD_OUT:  # a part of a text is much like the rest of it
            cut = 0 if hashlib.sha256(document.encode()).digest()[0] % _HELD_OUT == 0 else len(token_ids)
        texts.learnt.extend(_windows(token_ids[:cut]))
        texts.held_out.extend(_windows(token_ids[cut:]))
        if num_tokens > _MOST_TOKENS:
            break
    if len(texts.learnt) < _WINDOWS or not texts.held_out:
        raise ValueError(
            f"{num_tokens} tokens in {len(documents)} texts are too few to learn from: give some hundred thousand, of"
            " the kind that the model is to write"
        )
    print(
        f"{num_tokens:,} tokens of {num_read:,} of {len(documents):,} texts, read in {time.monotonic() - began:.0f} s;"
        f" {sum(map(len, texts.held_out)):,} of them are held out"
    )
    return texts


def _read(path: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """Yields the texts in a file or a folder that was named. Raises ValueError, with the file, where it has none."""
    try:
        yield from _documents(path, tokenizer)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 ({error}); leave it out, or name its folder") from error


def _windows(token_ids: Tokens) -> Iterator[Tokens]:
    """Yields the windows of a text, without a last one that is too short."""
    for start in range(0, len(token_ids), _WINDOW):
        window = token_ids[start : start + _WINDOW]
        if len(window) >= _SHORTEST:
            yield window


def _documents(path: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """Yields the texts in a file, or in all files of a folder but hidden ones and those that are no text. Raises
    ValueError for a file named itself that is no text, and for a line of a .jsonl file that has none."""
    if path.is_dir():
        for inner in sorted(path.rglob("*")):
            if inner.is_file() and not any(part.startswith(".") for part in inner.relative_to(path).parts):
                try:
                    yield from _documents(inner, tokenizer)
                except UnicodeDecodeError:
                    continue
        return
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.split("\n"), 1):  # `splitlines` knows others, which JSON's texts may hold
        if line.strip():
            try:
                yield _text_of(json.loads(line), tokenizer)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: {error}; each line is an object with a text, or messages, or a prompt and"
                    " a completion"
                ) from error


def _text_of(line: dict[str, object], tokenizer: Tokenizer) -> str:
    """The text in a line of a .jsonl file. Raises ValueError, KeyError or TypeError if it has none."""
    if "messages" in line:
        messages = line["messages"]
        if not isinstance(messages, list):
            raise ValueError("messages is no list")
        return tokenizer.decode(
            tokenizer.apply_chat_template(messages, add_generation_prompt=False), skip_special_tokens=False
        )
    return str(line["text"] if "text" in line else f"{line['prompt']}{line['completion']}")


# --- the training ---


def _training(
    model: LoadedModel,
    config: ModelConfig,
    folder: Path,
    texts: _Texts,
    arguments: argparse.Namespace,
    before: Iterable[Path],
) -> HeadTraining:
    """A training that begins anew, or goes on from the heads in the first of the folders `before` that has some. Raises
    ValueError if those are of another kind."""
    heads = HeadsConfig(
        num_heads=arguments.heads,
        num_layers=1,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_tokens=min(arguments.vocabulary, config.vocab_size),
        target=model_fingerprint(folder, None),
    )
    begun = None
    token_map = frequent_tokens(texts.learnt, config.vocab_size, heads.num_tokens)
    found = next((path for path in before if (path / "config.json").exists()), None)
    if found is not None:
        if HeadsConfig.from_folder(found) != heads:
            raise ValueError(f"{found} has heads of another number, vocabulary or model; remove it, or name another")
        begun = load_file(found / "model.safetensors")
        token_map = begun.get("token_map", token_map)
        print(f"Goes on from {found}")
    layer = load_output_layer(folder, config, model.layout.dtype)[token_map]
    return HeadTraining(model, heads, layer, token_map, begun)


@dataclass(slots=True)
class _Bounds:
    """The bounds of a training: seconds or steps, whichever are over first."""

    seconds: float
    steps: float

    @classmethod
    def of(cls, minutes: float | None, steps: int | None) -> _Bounds:
        if minutes is None and steps is None:
            minutes = _MINUTES
        unbounded = float("inf")
        return cls(unbounded if minutes is None else 60 * minutes, unbounded if steps is None else steps)

    def done(self, elapsed_s: float, num_steps: int) -> float:
        """The part of the training that is over, from 0 to 1."""
        return min(max(elapsed_s / self.seconds, num_steps / self.steps), 1.0)


def _train(training: HeadTraining, texts: _Texts, folder: Path, bounds: _Bounds) -> None:
    """Train until the bounds are reached, or until Ctrl-C,
    and save the heads in `folder` now and then and at the end."""
    chooser = random.Random()
    scored = random.Random(0).sample(texts.held_out, min(_SCORED, len(texts.held_out)))
    print(f"Held out, before: {_describe(training.scores(scored))}")
    began = told = saved = time.monotonic()
    num_steps = num_tokens = 0
    try:
        while (done := bounds.done(time.monotonic() - began, num_steps)) < 1.0:
            batch = chooser.sample(texts.learnt, min(_WINDOWS, len(texts.learnt)))
            scores = training.step(batch, done)
            num_steps, num_tokens = num_steps + 1, num_tokens + sum(map(len, batch))
            now = time.monotonic()
            if now - told > _TOLD_S:
                left_s = round((now - began) * (1 / max(bounds.done(now - began, num_steps), 1e-9) - 1))
                print(
                    f"  step {num_steps}, {_describe(scores)}, {num_tokens / (now - began):,.0f} tokens/s,"
                    f" {left_s // 60}:{left_s % 60:02} left",
                    flush=True,
                )
                told = now
            if now - saved > _SAVED_S:
                training.save(folder)
                saved = now
    except KeyboardInterrupt:
        print("Stopped; what is learnt is measured. Ctrl-C again leaves it unmeasured.")
    training.save(folder)
    print(
        f"Held out, after {num_steps} steps of {num_tokens:,} tokens: {_describe(training.scores(scored))}", flush=True
    )


def _describe(scores: HeadScores) -> str:
    return f"loss {scores.loss:.3f}, right {' '.join(f'{100 * part:.0f}' for part in scores.agreement)} %"


# --- what it brings ---


@dataclass(slots=True)
class _Run:
    """What it took to generate some answers: seconds of each decode step, and what became of its drafts."""

    steps_s: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # of the steps that had drafts
    num_tokens: int = 0

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / len(self.steps_s)

    @property
    def step_s(self) -> float:
        """The time of a quick step, the lower quartile: what else the machine does only makes steps longer."""
        return statistics.quantiles(self.steps_s, n=4)[0]

    def gain(self, plain: _Run) -> float:
        """How many times as fast this is as `plain`, a run without drafts. A step with drafts never counts as shorter
        than one without."""
        return self.tokens_per_step * min(plain.step_s / self.step_s, 1.0)

    def share(self, head: int) -> float:
        """The share of a head's drafts that were right, among those before which all were right."""
        reached = [count for count in self.accepted if count >= head]
        return sum(count > head for count in reached) / len(reached) if reached else 0.0


def _measured(model: LoadedModel, drafter: HeadDrafter, held_out: list[Tokens], num_heads: int) -> float:
    """Measure how many times as fast the model writes one answer at a time with the best number of drafts,
    and print the measurements."""
    long = [window for window in held_out if len(window) >= _PROMPT_TOKENS] or held_out
    prompts = [window[:_PROMPT_TOKENS] for window in random.Random(1).sample(long, min(_PROMPTS, len(long)))]
    greedy, *others = _generated(model, drafter, prompts, temperature=0.0, counts=range(num_heads + 1))
    shares = ", ".join(f"{100 * others[-1].share(head):.0f} %" for head in range(num_heads))
    print(f"{len(prompts)} answers to what is held out, one at a time, likeliest tokens.")
    print(f"Of the drafts of each head, right where those before them were: {shares}")
    print("drafts  tokens per step  ms per step  times as fast")
    gains = [run.gain(greedy) for run in (greedy, *others)]
    for num_drafts, (run, gain) in enumerate(zip((greedy, *others), gains, strict=True)):
        print(_row(num_drafts, run, gain))
    best = max(range(1, num_heads + 1), key=gains.__getitem__)
    plain, drawn = _generated(model, drafter, prompts, temperature=1.0, counts=(0, best))
    print(_row(best, drawn, drawn.gain(plain)) + "  drawn at temperature 1", flush=True)
    return gains[best]


def _row(num_drafts: int, run: _Run, gain: float) -> str:
    return f"{num_drafts:6}  {run.tokens_per_step:15.2f}  {1e3 * run.step_s:11.2f}  {gain:13.2f}"


def _generated(
    model: LoadedModel, drafter: HeadDrafter, prompts: list[Tokens], *, temperature: float, counts: Iterable[int]
) -> list[_Run]:
    """Generate answers with each of these numbers of drafts. Each prompt is answered with all of them in turn before
    the next one, so that all meet the same machine."""
    params = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=temperature, seed=0, ignore_eos=True)
    engines = [
        LocalEngine(model, speculation=Speculation([drafter], model.costs, fixed=count) if count else None)
        for count in counts
    ]
    runs = [_Run() for _ in engines]
    for engine in engines:
        _generate(engine, prompts[0], params, _Run())  # uncounted: the first time, libraries set themselves up
    for prompt in prompts:
        for engine, run in zip(engines, runs, strict=True):
            _generate(engine, prompt, params, run)
    return runs


def _generate(engine: LocalEngine, prompt: Tokens, params: SamplingParams, run: _Run) -> None:
    """Generate one answer and note its steps in `run`; the step that computes the prompt is not counted."""
    seq = Sequence(request_id="measured", attempt=0, params=params, prompt_token_ids=prompt)
    engine.add(seq)
    while not seq.output_token_ids:
        engine.step()
    while engine.scheduler.num_running:
        began = time.perf_counter()
        emissions = engine.step()
        run.steps_s.append(time.perf_counter() - began)
        run.num_tokens += len(emissions)
        run.accepted += [emission.drafted.num_accepted for emission in emissions if emission.drafted is not None]
