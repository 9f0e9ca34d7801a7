"""A model that drafts: with the other one's noise, caught up with whatever its KV lacks, and never in anybody's way."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from decode_workers.local_engine import LocalEngine
from engine.drafting import draft_model
from engine.drafting.draft_model import DraftModel
from engine.drafting.speculation import DraftCounts, Speculation
from engine.sampling.grammar import RULES_OF_A_CLIENT
from engine.sampling.params import SamplingParams
from engine.sequence import UNDRAWN, ScheduledSequence, Sequence, StepPlan
from engine.steps.calibration import calibrate
from engine.steps.loading import EngineConfig, LoadedModel, load_model
from engine.text.tokenizer import Tokenizer
from tests.support.small_models import SmallModel, greedy, random_prompts, shallower

DRAWN = SamplingParams(max_tokens=24, temperature=1.0, top_p=0.95, seed=3, presence_penalty=0.4, ignore_eos=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel("llama", tmp_path_factory.mktemp("llama"))


def loaded(model: SmallModel, draft: Path, **changes: Any) -> LoadedModel:
    wanted: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "block_size": 4, "kv_blocks": 400} | changes
    return load_model(EngineConfig(model_ref=str(model.folder), model_name="small", draft_ref=str(draft), **wanted))


def drafter_of(model: LoadedModel) -> DraftModel:
    assert isinstance(model.draft_model, DraftModel)
    return model.draft_model


def drafting(model: LoadedModel, fixed: int | None = 3) -> LocalEngine:
    return LocalEngine(model, speculation=Speculation([drafter_of(model)], model.costs, fixed=fixed))


def generate(engine: LocalEngine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    seqs = [
        Sequence(request_id=f"r{n}", attempt=0, params=replace(params, seed=params.seed + n), prompt_token_ids=prompt)
        for n, prompt in enumerate(prompts)
    ]
    for _ in engine.run(seqs):
        pass
    return [seq.output_token_ids for seq in seqs]


def assert_hugging_faces(llama: SmallModel, prompts: list[list[int]], found: list[list[int]]) -> None:
    assert found == [llama.hugging_face(prompt, 24, guess=guess) for prompt, guess in zip(prompts, found, strict=True)]


def counts_of(engine: LocalEngine) -> DraftCounts:
    assert engine.speculation is not None
    return engine.speculation.counts["model"]


def first_with_drafts(engine: LocalEngine, model: LoadedModel) -> StepPlan:
    """The first step that is to draw some, before it is made."""
    while not (plan := engine.scheduler.plan()).has_undrawn:
        engine.scheduler.finish_step(plan, model.runner.execute(plan))
    return plan


def test_a_model_that_drafts_for_itself_is_always_right(llama: SmallModel) -> None:
    """Whatever is drawn: by the same noise, of the same position, with what the drafts so far do to penalties."""
    engine = drafting(loaded(llama, llama.folder))
    generate(engine, random_prompts([5, 30, 61]), DRAWN)
    counts = counts_of(engine)
    assert counts.accepted == counts.drafted > 40
    drafter_of_engine(engine).check_idle()


def drafter_of_engine(engine: LocalEngine) -> DraftModel:
    assert engine.speculation is not None
    [drafter] = engine.speculation.drafters
    assert isinstance(drafter, DraftModel)
    return drafter


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_model_len": 100_000}, "max_model_len is 100000, but the model was made for"),
        ({"tensor_parallel": 3}, "tensor_parallel is 3, but a model of"),
    ],
)
def test_what_does_not_go_together_is_told_before_the_draft_model_is_read(
    llama: SmallModel, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    """It is the first to be loaded, and here cannot be."""
    damaged = Path(shutil.copytree(llama.folder, tmp_path / "damaged"))
    (damaged / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=told):
        loaded(llama, damaged, **changes)


def test_one_pass_draws_for_all_sequences(llama: SmallModel) -> None:
    model = loaded(llama, llama.folder)
    engine = drafting(model, fixed=2)
    with mock.patch.object(type(model.runner), "execute", autospec=True, side_effect=type(model.runner).execute) as run:
        generate(engine, random_prompts([9] * 6), replace(DRAWN, max_tokens=1 + 3 * 4))
    passes = [call.args[1] for call in run.call_args_list if call.args[0] is drafter_of(model).model.runner]
    assert [len(plan.items) for plan in passes] == [6] * 8


def test_a_long_prompt_is_caught_up_with_in_parts(llama: SmallModel) -> None:
    prompts = random_prompts([130, 20])
    model = loaded(llama, llama.folder)
    engine = drafting(model)
    with (
        mock.patch.object(draft_model, "CATCH_UP_TOKENS", 32),
        mock.patch.object(type(model.runner), "execute", autospec=True, side_effect=type(model.runner).execute) as run,
    ):
        found = generate(engine, prompts, greedy())
    passes = [call.args[1] for call in run.call_args_list if call.args[0] is drafter_of(model).model.runner]
    assert 32 <= max(plan.num_tokens for plan in passes) <= 32 + 16
    assert counts_of(engine).accepted == counts_of(engine).drafted > 10
    assert_hugging_faces(llama, prompts, found)


def test_who_is_drawn_for_takes_the_room_of_who_is_not(llama: SmallModel) -> None:
    """Sequences that take turns, with KV for some of them only."""
    model = loaded(llama, llama.folder)
    drafter = drafter_of(model)
    pool = drafter.model.block_pool
    held = pool.lease(pool.num_available - 40)
    speculation = Speculation([drafter], model.costs, fixed=3)
    engine = LocalEngine(model, max_num_seqs=2, speculation=speculation)
    prompts = random_prompts([60] * 4)
    assert_hugging_faces(llama, prompts, generate(engine, prompts, greedy()))
    assert counts_of(engine).drafted > 0
    pool.release(held)
    drafter.check_idle()


def test_who_ends_between_a_plan_and_its_step_leaves_nothing_behind(llama: SmallModel) -> None:
    """A request is cancelled while the step that draws for it waits for its turn."""
    model = loaded(llama, llama.folder)
    drafter = drafter_of(model)
    engine = drafting(model)
    seq = Sequence(request_id="r", attempt=0, params=greedy(), prompt_token_ids=random_prompts([30])[0])
    engine.add(seq)
    plan = first_with_drafts(engine, model)
    engine.scheduler.drop(seq.key)
    engine.scheduler.finish_step(plan, model.runner.execute(plan))
    drafter.check_idle()


def test_of_who_ends_without_a_draft_nothing_is_kept(llama: SmallModel) -> None:
    """Where drafts do not pay, nobody is drafted for; sequences come and go all the same."""
    model = loaded(llama, llama.folder)
    engine, drafter = drafting(model), drafter_of(model)
    gone = []
    for number in range(3):
        seq = Sequence(request_id=f"r{number}", attempt=0, params=greedy(1), prompt_token_ids=[5, 6, 7])
        assert len(list(engine.run([seq]))) == 1
        gone.append(weakref.ref(seq))
    del seq
    gc.collect()
    assert [seq() for seq in gone] == [None] * 3
    drafter.check_idle()


def test_a_model_that_fails_costs_its_drafts_and_no_step(llama: SmallModel, caplog: pytest.LogCaptureFixture) -> None:
    model = loaded(llama, llama.folder)
    engine = drafting(model)
    prompts = random_prompts([9, 33])
    with mock.patch.object(drafter_of(model).model.runner, "prepare", side_effect=RuntimeError("out of memory")):
        found = generate(engine, prompts, greedy())
    assert_hugging_faces(llama, prompts, found)
    assert counts_of(engine).drafted == 0
    assert caplog.text.count("the draft model failed") == 3
    drafter_of(model).check_idle()


def test_a_grammar_that_fails_ahead_costs_its_own_drafts(llama: SmallModel) -> None:
    """However many requests have such: others are drafted for as before."""
    model = loaded(llama, llama.folder)
    drafter = drafter_of(model)
    rules = f'{RULES_OF_A_CLIENT}\nstart: x\nx: "a" | x x | x x x'
    letter = Tokenizer(llama.folder).encode("a")

    def decoding(name: str, output: list[int], grammar: str | None = None) -> Sequence:
        params = greedy(200, grammar=grammar)
        seq = Sequence(request_id=name, attempt=0, params=params, prompt_token_ids=[5, 6, 7], output_token_ids=output)
        seq.num_computed = seq.num_tokens - 1
        return seq

    def drawn(*seqs: Sequence) -> list[int]:
        assert all(drafter.propose(seq, 3) for seq in seqs)
        plan = StepPlan(tuple(ScheduledSequence(seq, 1, (UNDRAWN,) * 3) for seq in seqs))
        drafter.draw(plan)
        return [len(item.drafts) for item in plan.items]

    other = decoding("other", letter)
    for number in range(5):
        seq = decoding(f"r{number}", letter * 130, rules)
        assert drawn(seq, other) == [0, 0]
        assert drafter.propose(seq, 3) is None
        drafter.ended(seq)
    assert drawn(other) == [3]
    drafter.ended(other)
    drafter.check_idle()


def test_its_kv_is_a_part_of_what_was_given(llama: SmallModel, tmp_path: Path) -> None:
    model = loaded(llama, shallower(llama, tmp_path, 1), kv_blocks=None, kv_bytes=4 << 20)
    draft = drafter_of(model).model
    num_bytes = model.kv_cache.num_bytes + draft.kv_cache.num_bytes
    assert (4 << 20) * 0.99 < num_bytes <= 4 << 20
    assert model.block_pool.num_available == pytest.approx(draft.block_pool.num_available, abs=1)
    with pytest.raises(ValueError, match=r"set kv\.decode\.memory to"):
        loaded(llama, llama.folder, kv_blocks=None, kv_share=0.5)


def test_what_its_passes_take_is_known_from_the_start(llama: SmallModel) -> None:
    model = loaded(llama, llama.folder)
    model.costs.seed(calibrate(model, budget_s=0.1))
    assert drafter_of(model).model.costs.is_seeded
    engine = drafting(model)
    engine.add(Sequence(request_id="r", attempt=0, params=greedy(), prompt_token_ids=random_prompts([30])[0]))
    assert first_with_drafts(engine, model).drawing_s > 0.0


def test_another_vocabulary_is_refused_before_anything_is_loaded(llama: SmallModel, tmp_path: Path) -> None:
    smaller = SmallModel("llama", tmp_path / "smaller", vocab_size=200).folder
    other = shallower(llama, tmp_path / "other", 1)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    first, second = sorted(ids)[:2]
    ids[first], ids[second] = ids[second], ids[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with mock.patch("engine.steps.loading.load_runner", side_effect=AssertionError("loaded")):
        with pytest.raises(ValueError, match=r"one has \d+ tokens, the other 200; choose a smaller model"):
            loaded(llama, smaller)
        with pytest.raises(ValueError, match=r"is \d+ in one and \d+ in the other; .* leave decode.draft_model out"):
            loaded(llama, other)
