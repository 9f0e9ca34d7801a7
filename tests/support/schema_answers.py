"""Schemas of others, answers that a grammar allows, drawn without a model, and whether it allows one."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import jsonschema
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from engine.sampling.grammar import allowed_by, limits_of

JSON_SCHEMA_BENCH, OFFICIAL = "jsonschemabench.jsonl.gz", "official.jsonl.gz"
_FOLDER: Final = Path(__file__).parents[1] / "http/schemas"
_DRAFTS: Final = {"draft4": jsonschema.Draft4Validator, "draft7": jsonschema.Draft7Validator}  # else the newest
_PRIME: Final = 2_147_483_647


def schemas_of_others(name: str) -> Iterator[dict[str, Any]]:
    """The lines of a file that tests/http/schemas/README.md tells of."""
    with gzip.open(_FOLDER / name, "rt") as lines:
        yield from map(json.loads, lines)


def is_valid(line: dict[str, Any], instance: Any) -> bool:
    """Whether an instance follows the schema of such a line, by the draft that this names, or its folder does."""
    schema = line["schema"]
    default = _DRAFTS.get(line["path"].split("/")[1], jsonschema.Draft202012Validator)
    validator = jsonschema.validators.validator_for(schema, default=default)
    exact = jsonschema.validators.extend(validator, {"multipleOf": _is_multiple})  # type: ignore[no-untyped-call]
    return bool(exact(schema).is_valid(instance))


def _is_multiple(validator: Any, step: Any, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    """In decimals, as both are written: by floats -31.0022 is no multiple of 0.0001."""
    if validator.is_type(instance, "number") and Fraction(str(instance)) % Fraction(str(step)):
        yield jsonschema.ValidationError(f"{instance!r} is not a multiple of {step}")


def drawn_answer(
    grammar: str,
    llg: LLTokenizer,
    draw: random.Random,
    max_tokens: int,
    favourites: npt.NDArray[np.bool_] | None = None,
    *,
    greedy: bool = False,
) -> str | None:
    """Tokens of random logits; None if the grammar does not end in time. `favourites` are taken half the time where
    they are allowed. Greedy: the first of an order of all tokens that is drawn once."""
    matcher = LLMatcher(llg, grammar, log_level=0, limits=limits_of(grammar))
    tokens: list[int] = []
    order = draw.randrange(1, _PRIME)
    bits = np.zeros(-(-llg.vocab_size // 32), dtype=np.int32)
    while len(tokens) < max_tokens:
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        assert not matcher.is_error(), matcher.get_error()
        ids = np.flatnonzero(allowed_by(bits, llg.vocab_size))
        if favourites is not None and draw.random() < 0.5 and len(liked := ids[favourites[ids]]):
            ids = liked
        token = int(ids[np.argmin(ids * order % _PRIME)] if greedy else ids[draw.randrange(len(ids))])
        if token in llg.eos_tokens:
            return llg.decode_str(tokens)
        matcher.consume_token(token)
        tokens.append(token)
    return None


def takes(grammar: str, llg: LLTokenizer, instance: object) -> bool:
    """Whether the instance, as compact JSON, may be an answer."""
    return takes_text(grammar, llg, json.dumps(instance, separators=(",", ":"), ensure_ascii=False))


def takes_text(grammar: str, llg: LLTokenizer, text: str) -> bool:
    """Whether the text may be an answer."""
    matcher = LLMatcher(llg, grammar, log_level=0, limits=limits_of(grammar))
    tokens = llg.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())
