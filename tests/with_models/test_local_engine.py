"""The local engine on real weights against Hugging Face, and what it makes of little memory and many sequences."""

from __future__ import annotations

import json
import random
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoTokenizer

from decode_workers.local_engine import LocalEngine
from decode_workers.scheduler import Emission
from engine.cost_model.step_cost import StepCost
from engine.model.config import Backend
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence
from engine.steps.loading import EngineConfig, load_model
from engine.text.tokenizer import Tokenizer
from tests.support import exactness
from tests.support.exactness import count_near_ties, exactness_prompts, hf_model, hf_reference
from tests.support.small_models import EOS, MaskProcessor, SmallModel, greedy, random_prompts
from tests.support.thoroughness import THOROUGH

NUM_TOKENS = 24


def _engine(folder: Path, *, max_num_seqs: int = 64, token_budget: int = 512, **changes: object) -> LocalEngine:
    wanted = {"dtype": "float32", "kv_blocks": 256, "num_threads": 1} | changes
    config = EngineConfig(model_ref=str(folder), model_name="model", **wanted)  # type: ignore[arg-type]
    return LocalEngine(load_model(config), max_num_seqs=max_num_seqs, token_budget=token_budget)


def _seq(number: int, prompt: list[int], params: SamplingParams) -> Sequence:
    return Sequence(request_id=f"r{number}", attempt=0, params=params, prompt_token_ids=prompt)


def _generate(engine: LocalEngine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[Emission]]:
    """All at once; the emissions of each, which must come in order and end with a reason."""
    seqs = [_seq(number, prompt, params[number]) for number, prompt in enumerate(prompts)]
    found: dict[str, list[Emission]] = {seq.request_id: [] for seq in seqs}
    for emission in engine.run(seqs):
        found[emission.seq.request_id].append(emission)
    for emissions in found.values():
        assert [e.index for e in emissions] == list(range(len(emissions)))
        assert [e.finish is not None for e in emissions] == [False] * (len(emissions) - 1) + [True]
    engine.scheduler.allocator.pool.check_idle()
    return list(found.values())


def _tokens(found: list[list[Emission]]) -> list[list[int]]:
    return [[emission.token.token_id for emission in emissions] for emissions in found]


def _logprobs(found: list[list[Emission]]) -> list[list[float]]:
    return [[e.token.logprobs.logprob for e in emissions if e.token.logprobs] for emissions in found]


# --- real weights ---


def _check_against_hugging_face(
    engine: LocalEngine, folder: Path, prompts: list[list[int]], num_tokens: int = NUM_TOKENS, *, guessed: bool = False
) -> None:
    """`guessed`: it is asked whether it says the same, and not what it says."""
    found = _generate(engine, prompts, [greedy(num_tokens, logprobs=0)] * len(prompts))
    guesses = _tokens(found) if guessed else []
    references = hf_reference(folder, prompts, num_tokens, guesses=guesses, batch_size=3)  # short ones, and long ones
    assert count_near_ties(_tokens(found), references, _logprobs(found)) <= 1
    for emissions, reference in zip(found, references, strict=True):
        for emission, best in zip(emissions, reference.logprobs, strict=True):
            assert emission.token.logprobs is not None
            if emission.token.token_id not in best:
                break  # gone another way at a near-tie
            assert emission.token.logprobs.logprob == pytest.approx(best[emission.token.token_id], abs=1e-3)


def test_what_hugging_face_says_is_no_matter_of_what_is_guessed(tmp_path: Path) -> None:
    prompt, num_tokens = random_prompts([40])[0], 24
    [said] = hf_reference(SmallModel("llama", tmp_path / "said").folder, [prompt], num_tokens)
    tokens = said.token_ids
    for number, wrong in enumerate(([*tokens[:-1], tokens[-1] ^ 1], tokens[:-1], [tokens[0] ^ 1, *tokens[1:]])):
        folder = SmallModel("llama", tmp_path / str(number)).folder
        assert hf_reference(folder, [prompt], num_tokens, guesses=[wrong]) == [said]
    folder = SmallModel("llama", tmp_path / "right").folder
    with mock.patch.object(exactness, "_generate", side_effect=AssertionError):
        [found] = hf_reference(folder, [prompt], num_tokens, guesses=[tokens])
    assert found.token_ids == tokens
    assert found.gaps == pytest.approx(said.gaps, abs=1e-4)
    for ours, best in zip(found.logprobs, said.logprobs, strict=True):
        assert ours == pytest.approx(best, abs=1e-4)


def test_smollm2_says_what_it_says_under_hugging_face(smollm2_folder: Path) -> None:
    """Small chunks, so that prompts are computed beside others' decodes."""
    everything = exactness_prompts(AutoTokenizer.from_pretrained(smollm2_folder), long_tokens=150)
    prompts = [everything[n] for n in (0, 7, 10, 43, 45)]
    assert max(map(len, prompts)) > 150
    _check_against_hugging_face(_engine(smollm2_folder, token_budget=64), smollm2_folder, prompts)


def test_smollm2_follows_a_grammar_as_under_hugging_face(smollm2_folder: Path) -> None:
    """With the same masks as a logits processor: a schema, and an expression that is cut."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    schema = '{"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}'
    grammars = [f"start: %json {schema}", "start: /([a-z]+ ){50}/"]
    prompts = [tokenizer.encode(text) for text in ("The capital of France is", "Once upon a time")]
    found = _tokens(_generate(_engine(smollm2_folder), prompts, [greedy(12, grammar=text) for text in grammars]))
    model = hf_model(smollm2_folder)
    for tokens, prompt, grammar in zip(found, prompts, grammars, strict=True):
        mask = MaskProcessor(smollm2_folder, model.config.vocab_size, tokenizer.eos_token_id, len(prompt), grammar)
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=12,
                do_sample=False,
                eos_token_id=tokenizer.eos_token_id,
                logits_processor=[mask],
            )
        assert tokens == output[0, len(prompt) :].tolist()
    assert "Paris" in tokenizer.decode(found[0])


def test_gemma3_says_what_it_says_under_hugging_face_beyond_its_window(gemma3_folder: Path) -> None:
    everything = exactness_prompts(AutoTokenizer.from_pretrained(gemma3_folder), long_tokens=560)
    prompts = [everything[n] for n in (6, 44)]
    assert max(map(len, prompts)) > 512 + NUM_TOKENS, "longer than its sliding window"
    engine = _engine(gemma3_folder, token_budget=128, layers_per_group=6)
    num_tokens = NUM_TOKENS if THOROUGH else 8  # each of 262,144 logits
    _check_against_hugging_face(engine, gemma3_folder, prompts, num_tokens, guessed=not THOROUGH)


# --- any weights ---


def test_little_memory_changes_no_token(llama: SmallModel) -> None:
    prompts = random_prompts(range(3, 51, 3))
    roomy = _generate(_engine(llama.folder), prompts, [greedy()] * 16)
    tight_engine = _engine(llama.folder, kv_blocks=24, block_size=4, token_budget=20)
    tight = _generate(tight_engine, prompts, [greedy()] * 16)
    assert tight_engine.scheduler.num_preemptions > 0
    found = _tokens(roomy)
    assert _tokens(tight) == found
    assert found == [llama.hugging_face(prompt, 24, guess=guess) for prompt, guess in zip(prompts, found, strict=True)]


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_a_preemption(llama: SmallModel) -> None:
    """With penalties, which look at what was generated before the preemption."""
    prompts = random_prompts(range(4, 36))
    params = [
        SamplingParams(
            max_tokens=24, seed=n, temperature=1.1, top_k=40, min_p=0.01, frequency_penalty=0.7, ignore_eos=True
        )
        for n in range(32)
    ]
    alone = [_tokens(_generate(_engine(llama.folder), [prompts[n]], [params[n]]))[0] for n in (0, 9, 31)]
    together = _tokens(_generate(_engine(llama.folder), prompts, params))
    tight_engine = _engine(llama.folder, kv_blocks=30, block_size=4)
    tight = _tokens(_generate(tight_engine, prompts, params))
    assert tight_engine.scheduler.num_preemptions > 0
    assert [together[n] for n in (0, 9, 31)] == alone
    assert tight == together
    assert len({tuple(tokens) for tokens in together}) == 32


def test_prompt_logprobs_are_the_same_whole_in_chunks_and_under_pressure(llama: SmallModel) -> None:
    prompts = random_prompts([40, 31, 22, 13, 1])
    params = [greedy(20, prompt_logprobs=1)] * 5
    whole = _generate(_engine(llama.folder), prompts, params)
    engine = _engine(llama.folder, kv_blocks=18, block_size=4, token_budget=7)
    pieces = _generate(engine, prompts, params)
    assert engine.scheduler.num_preemptions > 0
    for prompt, one, other in zip(prompts, whole, pieces, strict=True):
        first, again = one[0].prompt_logprobs or [], other[0].prompt_logprobs or []
        assert len(first) == len(again) == len(prompt) - 1
        assert [p.logprob for p in again] == pytest.approx([p.logprob for p in first], abs=1e-4)
        assert all(emission.prompt_logprobs is None for emission in (*one[1:], *other[1:]))


def test_sequences_may_come_at_any_time(llama: SmallModel) -> None:
    engine = _engine(llama.folder, max_num_seqs=3)
    prompts = random_prompts([20] * 7)
    found: dict[str, list[int]] = {f"r{n}": [] for n in range(7)}
    waiting = [_seq(n, prompt, greedy()) for n, prompt in enumerate(prompts)]
    while waiting or engine.scheduler.num_running or engine.scheduler.num_waiting:
        if waiting:
            engine.add(waiting.pop())
        for emission in engine.step():
            found[emission.seq.request_id].append(emission.token.token_id)
    assert engine.step() == []
    assert list(found.values()) == [llama.local(prompt, greedy()).tokens for prompt in prompts]


def test_the_model_s_length_ends_a_sequence_that_fills_the_memory(llama: SmallModel) -> None:
    engine = _engine(llama.folder, kv_blocks=4, block_size=4)
    (emissions,) = _generate(engine, random_prompts([10]), [greedy(100)])
    assert (len(emissions), emissions[-1].finish) == (6, "length")


@pytest.mark.parametrize(("wanted", "advice"), [(300, "made for 256"), (65, "KV memory holds 64")])
def test_a_length_that_cannot_be_had_is_refused_with_advice(llama: SmallModel, wanted: int, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        _engine(llama.folder, kv_blocks=4, block_size=16, max_model_len=wanted)


@pytest.mark.parametrize(
    ("kind", "backend", "made_for"), [("yarn", "native", 256), ("yarn", "transformers", 256), ("linear", "native", 64)]
)
def test_stretched_positions_reach_beyond_the_length_that_they_were_stretched_from(
    kind: str, backend: Backend, made_for: int, tmp_path: Path
) -> None:
    """With YaRN of itself, as whoever writes that into a config leaves `max_position_embeddings` as it was."""
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    model = SmallModel("qwen2", tmp_path, max_position_embeddings=64, rope_parameters=rope)
    config = EngineConfig(model_ref=str(tmp_path), model_name="model", backend=backend, kv_blocks=256)
    assert load_model(config).max_model_len == made_for
    engine = _engine(tmp_path, backend=backend, max_model_len=256)
    (prompt,) = random_prompts([190])
    assert _tokens(_generate(engine, [prompt], [greedy()])) == [model.hugging_face(prompt, NUM_TOKENS)]
    with pytest.raises(ValueError, match="made for 256"):
        _engine(tmp_path, backend=backend, max_model_len=257)


def test_the_tokenizer_s_own_end_ends_answers(tmp_path: Path) -> None:
    """As that of a fine-tune for chats, which left its base model's configs as they were; a gateway knows the same."""
    model = SmallModel("llama", tmp_path)
    (prompt,) = random_prompts([20])
    tokens = model.local(prompt, greedy()).tokens
    end = next(index for index, token in enumerate(tokens) if 3 <= token < 259)  # which the tokenizer can name
    name = Tokenizer(tmp_path).token_name(tokens[end])
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": name}))
    engine = _engine(tmp_path)
    (found,) = _generate(engine, [prompt], [greedy(ignore_eos=False)])
    assert ([emission.token.token_id for emission in found], found[-1].finish) == (tokens[: end + 1], "stop")
    assert Tokenizer(tmp_path).eos_token_ids == {EOS, tokens[end]}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, EOS, 1 << 20]}))
    config = EngineConfig(model_ref=str(tmp_path), model_name="model", kv_blocks=256, num_threads=1)
    assert load_model(config).eos_token_ids == {EOS, tokens[end]}


def test_chunks_of_any_size_give_the_same_tokens(llama: SmallModel) -> None:
    """Promises and the time that steps take decide where prompts are cut: here each time elsewhere."""
    config = EngineConfig(
        model_ref=str(llama.folder), model_name="model", dtype="float32", kv_blocks=600, block_size=4, num_threads=1
    )
    model, draw, now = load_model(config), random.Random(5), 0.0

    def clock() -> float:
        nonlocal now
        now += draw.uniform(0.0, 0.06)
        return now

    model.costs.seed(
        StepCost(base_s=0.01, prefill_token_s=1e-3, prefill_pair_s=1e-6, decode_s=1e-3, context_token_s=1e-6)
    )
    engine = LocalEngine(model, clock=clock)
    prompts = random_prompts([12, 150, 33, 190, 90, 170, 61])
    seqs = [_seq(number, prompt, greedy()) for number, prompt in enumerate(prompts)]
    for number, seq in enumerate(seqs):
        seq.gap_s, seq.tpot_s = (None, 0.08, 0.12)[number % 3], (0.05, None)[number % 2]
    chunks: set[int] = set()
    waiting = list(seqs)
    while waiting or engine.scheduler.num_running or engine.scheduler.num_waiting:
        if waiting:
            engine.add(waiting.pop(0))
        before = [seq.num_computed for seq in seqs]
        engine.step()
        chunks |= {seq.num_computed - had for seq, had in zip(seqs, before, strict=True)}
    assert len(chunks - {0, 1} - set(map(len, prompts))) >= 5, "prompts are cut in many places"
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert seq.output_token_ids == llama.hugging_face(prompt, NUM_TOKENS, guess=seq.output_token_ids)
