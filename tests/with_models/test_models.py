"""Every family against `transformers` on the same checkpoint: logits within 1e-4, greedy tokens equal."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.sequence import Sequence
from tests.support.model_families import FAMILIES, VOCAB_SIZE, build_oracle
from tests.support.stepping import GREEDY_WITH_ECHO, RecordingSampler, Stepper, recording_runner
from tests.support.thoroughness import combined

NUM_NEW_TOKENS = 12
PROMPT_LENGTHS = (1, 2, 5, 16, 17, 40, 61)
LOGIT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Oracle:
    folder: Path
    prompts: list[list[int]]
    model: Any
    known: dict[int, tuple[list[int], Tensor]] = field(default_factory=dict)

    def answer(self, index: int, guess: list[int] | None = None) -> tuple[list[int], Tensor]:
        """How a prompt goes on, and the logits of both, `[prompt + new - 1, V]`. A right guess is found to be so by one
        pass, in a tenth of the time that it takes to generate it."""
        if index not in self.known:
            self.known[index] = _ask(self.model, self.prompts[index], guess)
        return self.known[index]


def _ask(model: Any, prompt: list[int], guess: list[int] | None) -> tuple[list[int], Tensor]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        if guess is not None and len(guess) == NUM_NEW_TOKENS:
            logits = model(torch.tensor([[*prompt, *guess[:-1]]])).logits[0]
            if logits[len(prompt) - 1 :].argmax(-1).tolist() == guess:
                return guess, logits
        tokens = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
        )
        logits = model(tokens[:, :-1]).logits[0]
    return tokens[0, len(prompt) :].tolist(), logits


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp(request.param)
    model = build_oracle(request.param, folder)
    model.generation_config.eos_token_id = None  # no early end
    generator = random.Random(request.param)
    prompts = [[generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]
    return Oracle(folder, prompts, model)


def _check(oracle: Oracle, index: int, seq: Sequence, sampler: RecordingSampler) -> None:
    """A mixed run may have gone further than the oracle: the first NUM_NEW_TOKENS are compared."""
    logits = torch.stack(sampler.sampled[seq.request_id])[:NUM_NEW_TOKENS]
    tokens = seq.output_token_ids[:NUM_NEW_TOKENS]
    expected_tokens, expected = oracle.answer(index, tokens)
    torch.testing.assert_close(logits, expected[len(oracle.prompts[index]) - 1 :], rtol=0, atol=LOGIT_TOLERANCE)
    assert tokens == expected_tokens


@pytest.mark.parametrize("oracle", ["llama"], indirect=True)
def test_what_the_oracle_says_is_no_matter_of_the_guess(oracle: Oracle) -> None:
    prompt = oracle.prompts[3]
    said, logits = _ask(oracle.model, prompt, None)
    assert _ask(oracle.model, prompt, [*said[:-1], said[-1] ^ 1])[0] == said
    found, again = _ask(oracle.model, prompt, said)
    assert found == said
    torch.testing.assert_close(again, logits, rtol=0, atol=LOGIT_TOLERANCE)


def test_whole_prompts_one_after_the_other(oracle: Oracle) -> None:
    """In groups of layers that are not equal; equal ones are below."""
    runner, sampler = recording_runner(oracle.folder, layers_per_group=3)
    stepper = Stepper(runner)
    for index, prompt in enumerate(oracle.prompts):
        seq = stepper.add(prompt, str(index))
        stepper.generate(seq, NUM_NEW_TOKENS)
        _check(oracle, index, seq, sampler)


@combined(chunk=[1, 3, 7], oracle=FAMILIES.keys(), indirect=["oracle"])
def test_chunks_of_odd_sizes(oracle: Oracle, chunk: int) -> None:
    runner, sampler = recording_runner(oracle.folder, layers_per_group=2, block_size=5)
    stepper = Stepper(runner)
    seq = stepper.add(oracle.prompts[-1], "long")
    stepper.generate(seq, NUM_NEW_TOKENS, chunk=chunk)
    _check(oracle, len(oracle.prompts) - 1, seq, sampler)


@combined(layout=[(1, 4), (2, 16), (4, 3)], oracle=FAMILIES.keys(), indirect=["oracle"])
def test_all_lengths_mixed_in_steps_of_prefill_and_decode(oracle: Oracle, layout: tuple[int, int]) -> None:
    layers_per_group, block_size = layout
    runner, sampler = recording_runner(oracle.folder, layers_per_group=layers_per_group, block_size=block_size)
    stepper = Stepper(runner, seed=block_size)
    seqs = [stepper.add(prompt, str(index)) for index, prompt in enumerate(oracle.prompts)]
    stepper.generate_mixed(seqs, NUM_NEW_TOKENS)
    for index, seq in enumerate(seqs):
        _check(oracle, index, seq, sampler)


def test_logits_at_every_position_of_a_prompt(oracle: Oracle) -> None:
    runner, sampler = recording_runner(oracle.folder)
    stepper = Stepper(runner)
    seq = stepper.add(oracle.prompts[-1], params=GREEDY_WITH_ECHO)
    stepper.step([(seq, 33)])
    stepper.step([(seq, seq.num_uncomputed)])
    logits = torch.cat(sampler.judged)
    _, expected = oracle.answer(len(oracle.prompts) - 1)
    torch.testing.assert_close(logits, expected[: seq.num_computed - 1], rtol=0, atol=LOGIT_TOLERANCE)


def test_bfloat16_stays_close(oracle: Oracle) -> None:
    """Of most prompts: where two experts are nearly level rounding chooses another one, and logits are 0.1 away."""
    runner, sampler = recording_runner(oracle.folder, dtype=torch.bfloat16)
    stepper, distances = Stepper(runner), []
    for index, prompt in enumerate(oracle.prompts):
        seq = stepper.add(prompt, f"bf16-{index}")
        stepper.generate(seq, 1, chunk=20)
        expected = oracle.answer(index)[1][len(prompt) - 1]
        distances.append(float((sampler.sampled[seq.request_id][0] - expected).norm() / expected.norm()))
    assert statistics.median(distances) < 0.05, distances
