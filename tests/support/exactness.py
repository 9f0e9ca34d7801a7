"""The yardstick: greedy tokens of Hugging Face `generate` in float32, and how ours are held against them.

Where Hugging Face's two best logits are closer than `NEAR_TIE`, either token is right: there the log-probabilities are
compared instead, and the rest of that prompt, which then goes another way, is not. Such cases are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tests.support.thoroughness import THOROUGH

NEAR_TIE = 1e-4
LOGPROB_TOLERANCE = 1e-3

LONGEST = 47  # index of the longest of the prompts below

STORY = (
    "The lighthouse keeper climbed the narrow stairs each evening, counting them under his breath, and lit the lamp "
    "before the first boats rounded the point. "
)
FACTS = (
    "Water boils at 100 degrees Celsius at sea level.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Zürich, Genève und Basel liegen in der Schweiz. Die Hauptstadt ist",
    "東京は日本の首都です。人口は",
    "Привет! Как дела? Сегодня хорошая погода, и мы",
    "مرحبا بالعالم، اليوم نتعلم",
    "🚀🌍 To the moon and back 👩‍🚀: the crew",
    "x = [1,  2,   33]\ny = sum(x)\nprint(",
    "2026-11-21T09:48:00Z INFO started in 123.456 ms",
    "Once upon a time, in a village by the sea, there lived",
    "The three laws of thermodynamics are",
    "SELECT name, count(*) FROM orders GROUP BY",
)


def exactness_prompts(tokenizer: Any, *, long_tokens: int) -> list[list[int]]:
    """64 prompts as token ids: one token, several chunks, all lengths between, shared prefixes, many scripts.

    `long_tokens` should be several prefill chunks.
    """

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    story = ids(STORY * (1 + long_tokens // 20))
    prompts = [[token] for token in (ids("The")[0], ids("import")[0], ids("1")[0], ids("Hello")[0])]
    prompts += [ids(text) for text in FACTS]
    prompts += [ids(f"{STORY * 3}Question {n}: {text}") for n, text in enumerate(FACTS)]  # a shared prefix
    prompts += [story[:length] for length in (2, 3, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129)]
    prompts += [story[n : n + long_tokens + 13 * n] for n in range(4)]
    while len(prompts) < 64:
        n = len(prompts)
        prompts.append(ids(f"Chapter {n}. " + FACTS[n % len(FACTS)] + " " + STORY)[: 11 + n])
    return prompts


def asked_of_all(prompts: list[list[int]]) -> list[list[int]]:
    """Those of the prompts above that a whole cluster answers at once: every second one, so some of each kind and the
    longest; all in `make test-long`."""
    return prompts if THOROUGH else prompts[LONGEST % 2 :: 2]


@dataclass(frozen=True)
class Reference:
    """What Hugging Face generates, with how sure it was at each position."""

    token_ids: list[int]
    gaps: list[float]  # between the two best logits
    logprobs: list[dict[int, float]]  # of the four best tokens

    def first(self, num_tokens: int) -> Reference:
        return Reference(self.token_ids[:num_tokens], self.gaps[:num_tokens], self.logprobs[:num_tokens])


_known: dict[tuple[Path, tuple[int, ...]], Reference] = {}


def hf_reference(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    guesses: Sequence[Sequence[int]] = (),
    batch_size: int = 20,
) -> list[Reference]:
    """Greedy continuations by Hugging Face, float32, end of sequence ignored: by `generate`, but where a guess is found
    to be right by one pass over all of its tokens, in two thirds of the time.

    Expects one thread for torch: several wait for each other in loops, and on a busy machine that takes minutes.
    """
    keys = [(folder, tuple(prompt)) for prompt in prompts]

    def is_known(key: tuple[Path, tuple[int, ...]]) -> bool:
        return key in _known and len(_known[key].token_ids) >= num_tokens

    if not all(map(is_known, keys)):
        model = hf_model(folder)
        for key, guess in zip(keys, guesses, strict=False):
            if not is_known(key) and (reference := _confirmed(model, key[1], guess, num_tokens)):
                _known[key] = reference
        # Prompts of like length together: the less padding, the less work. Of the 64 above, the four long ones are
        # alone.
        left = sorted(dict.fromkeys(key for key in keys if not is_known(key)), key=lambda key: len(key[1]))
        for start in range(0, len(left), batch_size):
            some = left[start : start + batch_size]
            _known.update(zip(some, _generate(model, [prompt for _, prompt in some], num_tokens), strict=True))
    return [_known[key].first(num_tokens) for key in keys]


@lru_cache(maxsize=1)  # it takes seconds to load, and who asks it asks again
def hf_model(folder: Path) -> Any:
    """Hugging Face's, in float32, to whom no token is the end."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


def _confirmed(model: Any, prompt: tuple[int, ...], guess: Sequence[int], num_tokens: int) -> Reference | None:
    """What `generate` finds if that is the guess: each of its tokens is the best behind those before it."""
    if len(guess) != num_tokens:
        return None
    ids = torch.tensor([[*prompt, *guess[:-1]]])
    with torch.inference_mode():
        logits = model(input_ids=ids, logits_to_keep=num_tokens).logits[0]
    best = torch.log_softmax(logits.float(), dim=-1).topk(4)
    if best.indices[:, 0].tolist() != list(guess):
        return None
    return Reference(
        token_ids=list(guess),
        gaps=(best.values[:, 0] - best.values[:, 1]).tolist(),
        logprobs=[
            dict(zip(indices, values, strict=True))
            for indices, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ],
    )


def _generate(model: Any, prompts: list[tuple[int, ...]], num_tokens: int) -> list[Reference]:
    longest = max(len(p) for p in prompts)
    input_ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        output = model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    best = [torch.log_softmax(logits.float(), dim=-1).topk(4) for logits in output.logits]
    return [
        Reference(
            token_ids=output.sequences[row, longest:].tolist(),
            gaps=[float(top.values[row, 0] - top.values[row, 1]) for top in best],
            logprobs=[dict(zip(top.indices[row].tolist(), top.values[row].tolist(), strict=True)) for top in best],
        )
        for row in range(len(prompts))
    ]


def count_near_ties(
    ours: Sequence[Sequence[int]],
    references: Sequence[Reference],
    our_logprobs: Sequence[Sequence[float]] | None = None,
) -> int:
    """Assert that all tokens are Hugging Face's; the number of prompts that left it at a near-tie.

    `our_logprobs[i][t]` is our log-probability of our own token; without it no near-tie is excused.
    """
    num_ties = 0
    for number, (tokens, reference) in enumerate(zip(ours, references, strict=True)):
        assert len(tokens) == len(reference.token_ids), f"prompt {number}: {len(tokens)} tokens"
        t = next((t for t, (a, b) in enumerate(zip(tokens, reference.token_ids, strict=True)) if a != b), None)
        if t is None:
            continue
        told = f"prompt {number} leaves the reference at token {t}: {tokens[t]} instead of {reference.token_ids[t]}"
        assert reference.gaps[t] < NEAR_TIE, f"{told}, where its two best are {reference.gaps[t]:.2e} apart"
        assert our_logprobs is not None, told
        difference = abs(our_logprobs[number][t] - reference.logprobs[t][tokens[t]])
        assert difference < LOGPROB_TOLERANCE, f"{told}, and the log-probabilities differ by {difference:.2e}"
        num_ties += 1
    return num_ties
