"""Drafts change no token and no logprob, whoever makes them, in whatever company, wherever the KV rests.

Small random models, against the same engine without drafts, of which other tests say that it is Hugging Face's.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from decode_workers.local_engine import LocalEngine
from decode_workers.pacing import LayerKvConfig
from decode_workers.scheduler import Emission
from engine.drafting.draft_model import DraftModel
from engine.drafting.drafter import Draft, Drafter, DrafterName
from engine.drafting.lookup import HistoryDrafter, LookupDrafter, PredictionDrafter
from engine.drafting.speculation import GrammarDrafter, Speculation
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence, TokenLogprobs
from engine.steps.loading import EngineConfig, LoadedModel, load_model
from engine.steps.memory_profile import StepSize
from kernels.native.library import native_library
from tests.support.forked_child import fork_ranks
from tests.support.small_models import SmallModel, greedy, memorised, random_prompts, shallower
from tests.support.thoroughness import THOROUGH, combined

NUM_TOKENS = 20
DRAWN = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.95, seed=7, ignore_eos=True)
WISHES: dict[str, SamplingParams] = {
    "greedy": greedy(NUM_TOKENS),
    "drawn": DRAWN,
    "penalised": replace(
        DRAWN, temperature=0.3, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.6, logprobs=3
    ),
    "judged": greedy(NUM_TOKENS, logprobs=2),
    "biased": replace(greedy(NUM_TOKENS), logit_bias={5: 4.0, 9: -100.0}),
    "begun late": replace(greedy(NUM_TOKENS), ignore_eos=False, stop_token_ids=tuple(range(40)), min_tokens=6),
    "limited": replace(DRAWN, allowed_token_ids=tuple(range(20, 60)), bad_words=((21, 22), (30,), (31, 32, 33))),
    "by a grammar": replace(DRAWN, ignore_eos=False, grammar='start: "[" /[a-z]{2,9}/ ("," /[a-z]{2,9}/){1,9} "]"'),
    "mostly forced": replace(
        DRAWN, ignore_eos=False, logprobs=2, grammar='start: "{" /[a-z]{2}/ "one two" /[0-9]/ "}"'
    ),
    "of one token": greedy(1),
}
Request = tuple[str, list[int], SamplingParams]


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    finish: str | None


def requests() -> list[Request]:
    """Prompts that repeat themselves, so that there is something to look up, and some that do not."""
    lengths = [3 + 7 * n % 50 for n in range(len(WISHES))]
    prompts = [prompt * (1 + n % 3) for n, prompt in enumerate(random_prompts(lengths, seed=3))]
    return [(name, prompt, params) for prompt, (name, params) in zip(prompts, WISHES.items(), strict=True)]


@dataclass
class Knowing:
    """Proposes what was generated without drafts, or something else: `wrong` of the `every` last tokens are."""

    answers: dict[str, list[int]]
    every: int = 0  # 0: all are right
    name: DrafterName = "prediction"

    def propose(self, seq: Sequence, most: int) -> Draft | None:
        at = seq.num_output_tokens
        token_ids = self.answers[seq.request_id][at : at + most]
        if self.every:
            token_ids = [(t + 1) % 60 if (at + n) % self.every == 0 else t for n, t in enumerate(token_ids)]
        return Draft(tuple(token_ids), self.name, 3) if token_ids else None

    def ended(self, seq: Sequence) -> None:
        pass


@dataclass
class Guessing:
    name: DrafterName = "lookup"
    random: random.Random = field(default_factory=lambda: random.Random(5))

    def propose(self, seq: Sequence, most: int) -> Draft | None:
        return Draft(tuple(self.random.randrange(60) for _ in range(most)), self.name, 0)

    def ended(self, seq: Sequence) -> None:
        pass


MAKERS: dict[str, Callable[[dict[str, list[int]]], Drafter | type[GrammarDrafter]]] = {
    "an oracle": Knowing,
    "often wrong": lambda answers: Knowing(answers, every=3),
    "chance": lambda answers: Guessing(),
    "lookup": lambda answers: LookupDrafter(),
    "history": lambda answers: HistoryDrafter(),
    "prediction": lambda answers: PredictionDrafter(),
    "grammar": lambda answers: GrammarDrafter,
}
MEMORY: dict[str, dict[str, Any]] = {
    "on the device": {"kv_blocks": 400},
    "preempted": {"kv_blocks": 48},
    "five rows of logits at a time": {"kv_blocks": 400, "largest_step": StepSize(num_tokens=5, num_seqs=5)},
    "half on the host": {
        "kv_blocks": 120,
        "block_size": 8,
        "layers_per_group": 1,
        "host_bytes": 8 << 20,
        "staging_bytes": 1 << 20,
    },
}


@pytest.fixture(autouse=True)
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """They end with the test that has them."""
    fork_ranks(monkeypatch)
    with contextlib.ExitStack() as ends:

        def load(config: EngineConfig) -> LoadedModel:
            model = load_model(config)
            ends.callback(model.runner.close)
            return model

        monkeypatch.setattr(sys.modules[__name__], "load", load)
        yield


load = load_model  # in a test, what it loads is closed


def engine(
    model: SmallModel,
    drafter: Drafter | type[GrammarDrafter] | None = None,
    *,
    fixed: int | None = 4,
    draft: Path | None = None,
    **memory: Any,
) -> LocalEngine:
    """`draft`: the folder of a model that drafts, or of heads, in place of a `drafter`."""
    wanted = {"dtype": model.dtype, "num_threads": 1, "block_size": 4, "kv_blocks": 400} | memory
    draft_ref = None if draft is None else str(draft)
    config = EngineConfig(model_ref=str(model.folder), model_name="small", draft_ref=draft_ref, **wanted)
    loaded = load(config)
    if isinstance(drafter, type):
        assert loaded.runner.sampler.masks is not None
        drafter = drafter(loaded.runner.sampler.masks)
    drafter = loaded.draft_model or drafter
    speculation = None if drafter is None else Speculation([drafter], loaded.costs, fixed=fixed)
    layerkv = LayerKvConfig() if "host_bytes" in memory else None
    return LocalEngine(loaded, token_budget=64, layerkv=layerkv, speculation=speculation)


def generate(
    engine: LocalEngine, wanted: list[Request], predictions: Mapping[str, list[int]] = MappingProxyType({})
) -> dict[str, Answer]:
    """All at once. Their emissions come in order, and nothing is left behind."""
    seqs = [
        Sequence(
            request_id=name,
            attempt=0,
            params=params,
            prompt_token_ids=prompt,
            prediction_token_ids=predictions.get(name, []),
            tpot_s=1e3 if number % 2 else None,  # beside prompts nobody else has drafts
        )
        for number, (name, prompt, params) in enumerate(wanted)
    ]
    emissions: dict[str, list[Emission]] = {seq.request_id: [] for seq in seqs}
    for emission in engine.run(seqs):
        assert emission.index == len(emissions[emission.seq.request_id])
        emissions[emission.seq.request_id].append(emission)
    engine.scheduler.allocator.pool.check_idle()
    return {
        name: Answer([e.token.token_id for e in found], [e.token.logprobs for e in found], found[-1].finish)
        for name, found in emissions.items()
    }


def check_idle(engine: LocalEngine) -> None:
    """Nothing is left behind in the KV of the model that drafts, if one does."""
    assert engine.speculation is not None
    [drafter] = engine.speculation.drafters
    if isinstance(drafter, DraftModel):
        drafter.check_idle()


def alone(model: SmallModel, **memory: Any) -> dict[str, Answer]:
    """Without drafts, each by itself."""
    plain = engine(model, **memory)
    return {request[0]: generate(plain, [request])[request[0]] for request in requests()}


def predicted(answers: dict[str, Answer]) -> dict[str, list[int]]:
    """Much like the answers: some tokens are others, some are left out, some are too many."""
    return {
        name: [t for n, t in enumerate(answer.token_ids) for t in ([], [t + 1], [t, t], *[[t]] * 6)[n * 5 % 9]]
        for name, answer in answers.items()
    }


@pytest.fixture(scope="module")
def in_float32(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel("llama", tmp_path_factory.mktemp("model"))


DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module", params=DTYPES)
def model(request: pytest.FixtureRequest, in_float32: SmallModel) -> SmallModel:
    if request.param == "bfloat16" and native_library() is None:
        pytest.skip("in bfloat16 torch's kernels give other logits in other company")
    return SmallModel("llama", in_float32.folder, dtype=request.param)


@pytest.fixture(scope="module")
def plain(model: SmallModel) -> dict[str, Answer]:
    return alone(model)


def check(found: dict[str, Answer], plain: dict[str, Answer]) -> None:
    assert found.keys() == plain.keys()
    for name, answer in found.items():
        assert answer.token_ids == plain[name].token_ids, name
        assert answer.finish == plain[name].finish, name
        if native_library() is not None:
            assert answer.logprobs == plain[name].logprobs, name


def rounds(drafter: str, place: str) -> int:
    """The second time with what was generated the first time, which tells some what to propose, and its blocks, which
    lie on the device."""
    return 2 if THOROUGH or drafter == "history" or place == "on the device" else 1


@combined(one_in=3, drafter=MAKERS.keys(), place=MEMORY.keys(), model=DTYPES, indirect=["model"])
def test_drafts_change_no_token_and_no_logprob(
    model: SmallModel, plain: dict[str, Answer], drafter: str, place: str
) -> None:
    made = MAKERS[drafter]({name: answer.token_ids for name, answer in plain.items()})
    drafting = engine(model, made, **MEMORY[place])
    for _ in range(rounds(drafter, place)):
        check(generate(drafting, requests(), predicted(plain)), plain)
    speculation = drafting.speculation
    assert speculation is not None
    counts = speculation.counts[made.name]
    assert counts.drafted > 0 or (drafter, place) == ("lookup", "preempted"), "nothing was drafted"
    assert drafter != "an oracle" or counts.accepted == counts.drafted
    assert place != "preempted" or drafting.scheduler.num_preemptions
    assert drafter in ("chance", "history", "lookup") or counts.accepted > 0, "no draft was ever right"


@pytest.fixture(scope="module")
def heads(in_float32: SmallModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """They know most of the answers by heart, and not all tokens."""
    folder, answers = tmp_path_factory.mktemp("heads"), alone(in_float32)
    texts = [prompt + answers[name].token_ids for name, prompt, _ in requests()]
    memorised(in_float32, texts, folder, num_tokens=280)
    return folder


DRAFTS = ("model", "heads")


@pytest.fixture(scope="module", params=DRAFTS)
def draft(
    request: pytest.FixtureRequest, model: SmallModel, heads: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[DrafterName, Path]:
    """A model of fewer layers, or heads."""
    return (
        ("heads", heads) if request.param == "heads" else ("model", shallower(model, tmp_path_factory.mktemp("draft")))
    )


@pytest.fixture(scope="module")
def known() -> dict[str, dict[str, Answer]]:
    """By type, what two ranks answer without drafts; a test that needs it adds it, for ranks end with their test."""
    return {}


@combined(place=[*MEMORY, "of two ranks"], draft=DRAFTS, model=DTYPES, indirect=["model", "draft"])
def test_nor_do_those_that_are_drawn(
    model: SmallModel,
    plain: dict[str, Answer],
    draft: tuple[DrafterName, Path],
    known: dict[str, dict[str, Answer]],
    place: str,
) -> None:
    name, folder = draft
    ranks = {"of two ranks": {"tensor_parallel": 2}}
    drafting = engine(model, draft=folder, **(MEMORY | ranks)[place])
    if place in ranks and model.dtype not in known:
        known[model.dtype] = alone(model, **ranks[place])
    expected = known[model.dtype] if place in ranks else plain
    for _ in range(rounds(name, place)):
        check(generate(drafting, requests()), expected)
    assert drafting.speculation is not None
    counts = drafting.speculation.counts[name]
    assert counts.accepted > counts.drafted / 4, "they say mostly something else"
    assert place != "preempted" or drafting.scheduler.num_preemptions
    check_idle(drafting)


@pytest.mark.parametrize("drafter", ["an oracle", "chance"])
def test_nor_alone(model: SmallModel, plain: dict[str, Answer], drafter: str) -> None:
    made = MAKERS[drafter]({name: answer.token_ids for name, answer in plain.items()})
    drafting = engine(model, made, fixed=15)
    for request in requests():
        check(generate(drafting, [request]), {request[0]: plain[request[0]]})


def test_what_a_grammar_forces_is_right(model: SmallModel, plain: dict[str, Answer]) -> None:
    """Where a token is a byte there is one way to write it."""
    drafting = engine(model, GrammarDrafter, fixed=15, block_size=16)
    [request] = [request for request in requests() if request[0] == "mostly forced"]
    found = generate(drafting, [request])
    check(found, {request[0]: plain[request[0]]})
    assert drafting.speculation is not None
    counts = drafting.speculation.counts["grammar"]
    assert counts.drafted == counts.accepted == len("one two") + len("}")
    assert found[request[0]].finish == "stop"


def test_steps_are_saved(model: SmallModel, plain: dict[str, Answer]) -> None:
    """By right drafts, one a token."""
    made = Knowing({name: answer.token_ids for name, answer in plain.items()})
    drafting = engine(model, made, fixed=15, block_size=16)
    [request] = [request for request in requests() if request[0] == "greedy"]
    seq = Sequence(request_id=request[0], attempt=0, params=request[2], prompt_token_ids=request[1])
    drafting.add(seq)
    steps: list[int] = []
    while not steps or drafting.scheduler.num_running:
        steps.append(len(drafting.step()))
    assert steps == [1, 16, 3]
