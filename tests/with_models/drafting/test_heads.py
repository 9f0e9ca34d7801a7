"""Heads that draft: they learn what a model says, load in every form that is known, and for their own model only."""

from __future__ import annotations

import gc
import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode_workers.local_engine import LocalEngine
from engine.drafting.drafter import Draft
from engine.drafting.heads import HeadDrafter
from engine.drafting.speculation import DraftCounts, Speculation
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence
from engine.steps import memory_profile
from engine.steps.loading import EngineConfig, load_model
from engine.steps.memory_profile import StepSize
from tests.support.small_models import SmallModel, greedy, memorised, random_prompts

PROMPT = random_prompts([12])[0]
NUM_TOKENS = 32


@dataclass(frozen=True)
class Known:
    """A model, and heads that know one of its answers by heart."""

    model: SmallModel
    folder: Path
    answer: list[int]
    losses: tuple[float, float]  # before the training, and after it


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    model = SmallModel("llama", tmp_path_factory.mktemp("llama"))
    answer, folder = model.local(PROMPT, greedy(NUM_TOKENS)).tokens, tmp_path_factory.mktemp("heads")
    texts = [PROMPT + answer]
    before, after = (memorised(model, texts, folder, num_steps=count).scores(texts).loss for count in (0, 300))
    return Known(model, folder, answer, (before, after))


def engine(model: SmallModel, heads: Path) -> LocalEngine:
    wanted: dict[str, Any] = {"dtype": model.dtype, "num_threads": 1, "block_size": 4, "kv_blocks": 400}
    config = EngineConfig(model_ref=str(model.folder), model_name="small", draft_ref=str(heads), **wanted)
    loaded = load_model(config)
    assert isinstance(loaded.draft_model, HeadDrafter)
    return LocalEngine(loaded, speculation=Speculation([loaded.draft_model], loaded.costs, fixed=3))


def generate(engine: LocalEngine, params: SamplingParams) -> tuple[list[int], DraftCounts]:
    seq = Sequence(request_id="r", attempt=0, params=params, prompt_token_ids=PROMPT)
    for _ in engine.run([seq]):
        pass
    assert engine.speculation is not None
    return seq.output_token_ids, engine.speculation.counts["heads"]


def test_what_heads_take_is_no_room_for_kv(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device of 64 MB, which holds nothing but the tensors of one load."""
    older: dict[int, torch.UntypedStorage] = {}  # other tests' too: kept, so that no newer one gets their address

    def storages() -> dict[int, torch.UntypedStorage]:
        gc.collect()
        alive = [kept.untyped_storage() for kept in gc.get_objects() if issubclass(type(kept), torch.Tensor)]
        return {storage.data_ptr(): storage for storage in alive if storage.device.type == "cpu"}

    def device_memory(device: torch.device) -> tuple[int, int]:
        held = {address: storage.nbytes() for address, storage in storages().items() if address not in older}
        return 64_000_000 - sum(held.values()), 64_000_000

    monkeypatch.setattr(memory_profile, "device_memory", device_memory)

    def kv_bytes(heads: str | None) -> int:
        older.update(storages())
        size = StepSize(num_tokens=100, num_seqs=4)
        wanted: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "block_size": 4, "kv_share": 0.9}
        wanted |= {"model_ref": str(known.model.folder), "draft_ref": heads, "largest_step": size}
        return load_model(EngineConfig(model_name="small", **wanted)).kv_cache.num_bytes

    taken = sum(weight.nbytes for weight in load_file(known.folder / "model.safetensors").values())
    assert kv_bytes(None) - kv_bytes(str(known.folder)) == pytest.approx(taken, rel=0.2)


def test_heads_learn(known: Known) -> None:
    before, after = known.losses
    assert after < before / 10
    found, counts = generate(engine(known.model, known.folder), greedy(NUM_TOKENS))
    assert found == known.answer
    assert counts.accepted > 0.9 * counts.drafted
    assert counts.accepted > 0.6 * NUM_TOKENS, "3 of 4 tokens may be drafts"


def changed(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], None], **fields: Any) -> Path:
    shutil.copytree(folder, to)
    weights = load_file(to / "model.safetensors")
    change(weights)
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | fields))
    return to


def nothing(weights: dict[str, torch.Tensor]) -> None:
    pass


def without_output(weights: dict[str, torch.Tensor]) -> None:
    del weights["lm_head.weight"]


def output_of_each(weights: dict[str, torch.Tensor]) -> None:
    shared = weights.pop("lm_head.weight")
    weights |= {f"lm_heads.{head}.weight": shared.clone() for head in range(3)}


def output_of_fewer(weights: dict[str, torch.Tensor]) -> None:
    """The last ones are left out, as if the text hardly had them."""
    weights["token_map"] = torch.arange(200)
    weights["lm_head.weight"] = weights["lm_head.weight"][:200].clone()


def old_names(weights: dict[str, torch.Tensor]) -> None:
    for name in list(weights):
        if name.startswith("blocks"):
            weights[f"medusa_heads.{name}"] = weights.pop(name)


@pytest.mark.parametrize("form", [without_output, output_of_each, old_names])
def test_every_form_says_the_same(known: Known, tmp_path: Path, form: Callable[..., None]) -> None:
    expected = generate(engine(known.model, known.folder), greedy(NUM_TOKENS))
    assert (
        generate(engine(known.model, changed(known.folder, tmp_path / "heads", form)), greedy(NUM_TOKENS)) == expected
    )


def test_tokens_that_heads_do_not_know_are_drawn_only_where_nothing_else_may_be(known: Known, tmp_path: Path) -> None:
    folder = changed(known.folder, tmp_path / "heads", output_of_fewer, truncated_vocab_size=200)
    drafting = engine(known.model, folder)
    found, counts = generate(drafting, greedy(NUM_TOKENS))
    assert found == known.answer
    assert 0 < counts.accepted < counts.drafted
    beyond = greedy(NUM_TOKENS, allowed_token_ids=(250, 260))
    found, more = generate(drafting, beyond)
    assert found == known.model.local(PROMPT, beyond).tokens
    assert set(found) <= {250, 260}
    assert more.drafted > NUM_TOKENS / 2


def test_what_ends_a_sequence_is_no_draft_and_nothing_after_it(known: Known) -> None:
    end = known.answer[20]
    params = greedy(NUM_TOKENS, stop_token_ids=(end,))
    found, counts = generate(engine(known.model, known.folder), params)
    assert found == known.answer[: known.answer.index(end) + 1]
    assert counts.accepted < len(found)


def test_a_failing_head_costs_its_drafts_and_no_step(known: Known, caplog: pytest.LogCaptureFixture) -> None:
    drafting = engine(known.model, known.folder)
    with mock.patch("engine.drafting.heads.MedusaHeads.logits", side_effect=RuntimeError("out of memory")):
        found, counts = generate(drafting, greedy(NUM_TOKENS))
    assert found == known.answer
    assert counts.drafted == 0
    assert caplog.text.count("drawing from heads failed") == 3


def test_without_the_state_of_the_newest_token_nothing_is_proposed(known: Known) -> None:
    drafting = engine(known.model, known.folder)
    assert drafting.speculation is not None
    [drafter] = drafting.speculation.drafters
    assert isinstance(drafter, HeadDrafter)
    seq = Sequence(request_id="r", attempt=0, params=greedy(), prompt_token_ids=PROMPT)
    assert drafter.propose(seq, 3) is None
    drafting.add(seq)
    while not seq.output_token_ids:
        drafting.step()
    draft = drafter.propose(seq, 2)
    assert isinstance(draft, Draft)
    assert len(draft.token_ids) == 2
    seq.output_token_ids.append(5)  # by somebody else, as behind a hand-off
    assert drafter.propose(seq, 3) is None


def test_what_drawing_takes_is_told_for_each_draft(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = itertools.count()  # a second between any two
    monkeypatch.setattr("engine.drafting.heads.time", SimpleNamespace(perf_counter=lambda: float(next(readings))))
    drafting = engine(known.model, known.folder)
    assert drafting.speculation is not None
    [drafter] = drafting.speculation.drafters
    seq = Sequence(request_id="r", attempt=0, params=greedy(NUM_TOKENS), prompt_token_ids=PROMPT)
    drafting.add(seq)
    while len(seq.output_token_ids) < 12:
        drafting.step()
    draft = drafter.propose(seq, 3)
    assert isinstance(draft, Draft) and draft.drawing is not None
    assert draft.drawing.once_s == 1.0 and draft.drawing.each_s == pytest.approx(1 / 3)


def test_no_sequence_holds_the_states_of_others(known: Known) -> None:
    drafting = engine(known.model, known.folder)
    assert drafting.speculation is not None
    [drafter] = drafting.speculation.drafters
    assert isinstance(drafter, HeadDrafter)
    seqs = [
        Sequence(request_id=f"r{number}", attempt=0, params=greedy(), prompt_token_ids=PROMPT) for number in range(4)
    ]
    for seq in seqs:
        drafting.add(seq)
    for _ in range(4):
        drafting.step()
    states = [drafter._kept[seq].hidden for seq in seqs]
    assert [state.untyped_storage().nbytes() for state in states] == [state.nbytes for state in states]


@pytest.mark.parametrize(
    ("form", "fields", "reason"),
    [
        (nothing, {"target_fingerprint": "another"}, "has other weights; train some for this model"),
        (nothing, {"hidden_size": 32}, r"hidden states of 32 and \d+ tokens, and the model has 64"),
        (nothing, {"vocab_size": 50}, r"and 50 tokens, and the model has 64 and"),
        (nothing, {"num_heads": 4}, r"blocks\.3\.layers\.0\.weight of shape \[64, 64\]; here it is missing"),
        (nothing, {"num_heads": 2}, r"have no tensor blocks\.2"),
        (nothing, {"num_heads": None}, "not that of Medusa heads"),
        (without_output, {"truncated_vocab_size": 200}, "token_map of shape"),
    ],
)
def test_others_are_refused(
    known: Known, tmp_path: Path, form: Callable[..., None], fields: dict[str, Any], reason: str
) -> None:
    folder = changed(known.folder, tmp_path / "heads", form, **fields)
    with pytest.raises(ValueError, match=reason):
        engine(known.model, folder)


def test_models_that_others_compute_have_none(known: Known) -> None:
    config = EngineConfig(
        model_ref=str(known.model.folder), model_name="small", draft_ref=str(known.folder), backend="transformers"
    )  # without a size of its KV, so that nothing can be loaded
    with pytest.raises(ValueError, match="heads draft only for models that Legato's own code computes"):
        load_model(config)
