"""Does an answer depend on who else is being answered? Each question is asked alone, then among 32 others.

What was asked first may be found in a prefix cache later, as it is for users; that counts as company.
"""

from __future__ import annotations

import functools
import itertools

from tokenizers import Tokenizer

from benchmarks.common.part import Json
from benchmarks.peers.engines.installation import model_folder
from benchmarks.peers.peer import Answer, Asker, Draw, Request

NUM_GREEDY, NUM_SEEDED = 36, 12
ANSWER_TOKENS = 48
TOGETHER = 16  # questions at once
NUM_OTHERS = 32
_FORMS = (
    "Write a short story about {}.",
    "Explain {} to a child in a few sentences.",
    "List five surprising facts about {} and give a reason for each.",
)
_SUBJECTS = (
    *("the sea", "a lost key", "volcanoes", "the printing press", "migrating birds", "bread", "a clock tower"),
    *("the night train", "mathematics", "honey", "an old bridge", "the first snow", "lighthouses", "tea", "a violin"),
    "the number 1729",
)


def company(asker: Asker, draw: Draw) -> Json:
    asked = questions()
    alone = [asker.wave([question])[0].text for question in asked]
    among = [text for some in _parts(asked) for text in _among_others(asker, some, draw)]
    changed = [one != other for one, other in zip(alone, among, strict=True)]
    return {
        "greedy_changed": sum(changed[:NUM_GREEDY]),
        "greedy": NUM_GREEDY,
        "seeded_changed": sum(changed[NUM_GREEDY:]),
        "seeded": NUM_SEEDED,
    }


def _among_others(asker: Asker, some: list[Request], draw: Draw) -> list[str]:
    """Others of many lengths fill up to 33 requests."""
    others = [
        Request(prompt=draw(16 + 24 * number), num_tokens=ANSWER_TOKENS) for number in range(NUM_OTHERS + 1 - len(some))
    ]
    mixed = [request for pair in itertools.zip_longest(others, some) for request in pair if request is not None]
    answers: dict[int, Answer] = {id(q): a for q, a in zip(mixed, asker.wave(mixed), strict=True)}
    return [answers[id(question)].text for question in some]


def _parts(asked: list[Request]) -> list[list[Request]]:
    return [asked[start : start + TOGETHER] for start in range(0, len(asked), TOGETHER)]


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(model_folder() / "tokenizer.json"))


def chat_prompt(text: str) -> list[int]:
    """The text as token ids in the model's chat format, so that nobody's tokenizer is part of the comparison."""
    return _tokenizer().encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids


def questions() -> list[Request]:
    texts = [form.format(subject) for subject in _SUBJECTS for form in _FORMS][: NUM_GREEDY + NUM_SEEDED]
    assert len(texts) == NUM_GREEDY + NUM_SEEDED
    return [
        Request(
            prompt=chat_prompt(text),
            num_tokens=ANSWER_TOKENS,
            seed=None if number < NUM_GREEDY else number,
        )
        for number, text in enumerate(texts)
    ]
