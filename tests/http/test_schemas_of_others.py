"""JSONSchemaBench and the official test suite: what is served, and that nothing is ignored. See schemas/README.md."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from llguidance import LLTokenizer

from cluster.errors import InvalidRequestError
from cluster.http.openai.json_schemas import UnsupportedGrammarError
from cluster.http.openai.structured import Grammars, OutputConstraint, compiled, parse_response_format
from engine.text.tokenizer import Tokenizer
from tests.support.openai_conformance import Target
from tests.support.schema_answers import (
    JSON_SCHEMA_BENCH,
    OFFICIAL,
    drawn_answer,
    is_valid,
    schemas_of_others,
    takes,
)
from tests.support.thoroughness import THOROUGH, examples

pytestmark = [pytest.mark.model, pytest.mark.timeout(3600)]  # of a machine that does other work, too

MUST_BE_SERVED: Final = 0.9
MAX_TOKENS: Final = 150
Served = list[tuple[dict[str, Any], str]]  # lines, each with its schema's grammar
# Formats with a rule; others are annotations, as the standard has all of them.
RULED: Final = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")


def _response_format(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer) -> Served:
    """The schemas of JSONSchemaBench that a gateway serves, each with its grammar."""
    return asyncio.run(_served(tokenizer))


async def _served(tokenizer: Tokenizer) -> Served:
    grammars = Grammars(tokenizer)
    found = []
    for line in schemas_of_others(JSON_SCHEMA_BENCH):
        with contextlib.suppress(InvalidRequestError):
            wanted = parse_response_format(_response_format(line["schema"]))
            grammar = await grammars.grammar_for(wanted, None)
            assert grammar is not None
            found.append((line, grammar))
    return found


def test_most_schemas_are_served(served: Served) -> None:
    assert len(served) >= MUST_BE_SERVED * 200


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "drawn"])
def test_every_answer_that_ends_follows_its_schema(served: Served, llg: LLTokenizer, *, greedy: bool) -> None:
    """From random logits, of which marks that close something are the larger ones, so that answers end."""
    closing = np.array([llg.decode_str([token]).strip()[:1] in ('"', "}", "]") for token in range(llg.vocab_size)])
    num_ended = num_drawn = 0
    for number, (line, grammar) in enumerate(served):
        for seed in range(examples(4)):
            draw = random.Random(1000 * number + seed)
            answer = drawn_answer(grammar, llg, draw, MAX_TOKENS, favourites=closing, greedy=greedy)
            num_drawn += 1
            if answer is not None:
                num_ended += 1
                assert is_valid(line, json.loads(answer)), (line, answer)
    assert num_ended > 0.2 * num_drawn


def test_over_http(served: Served, target: Target) -> None:
    """Streamed and whole, greedy and drawn; all of them in `make test-long`, some small ones in `make test`."""
    num_ended = 0
    lines = [line for line, _ in served if THOROUGH or len(json.dumps(line)) < 800]
    lines = lines if THOROUGH else lines[:8]
    for number, line in enumerate(lines):
        for temperature in (0, 1):
            wish: dict[str, Any] = {"response_format": _response_format(line["schema"]), "max_tokens": 300}
            wish |= {"temperature": temperature, "seed": number}
            (whole,) = target.chat(**wish).choices
            chunks = [chunk.choices[0] for chunk in target.chat(**wish, stream=True) if chunk.choices]
            assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
            assert chunks[-1].finish_reason == whole.finish_reason
            if whole.finish_reason == "stop":
                num_ended += 1
                assert is_valid(line, json.loads(whole.message.content or "")), line
    assert num_ended > len(lines) / 4


def test_every_keyword_is_enforced_or_refused(llg: LLTokenizer) -> None:
    """Of the official suite: no instance that it calls invalid is an answer, and most schemas and instances are."""
    num_served = num_refused = num_taken = num_valid = 0
    for line in schemas_of_others(OFFICIAL):
        if "/format/" in line["path"] and Path(line["path"]).stem not in RULED:
            continue
        try:
            grammar = compiled(OutputConstraint("json", json.dumps(line["schema"]), "response_format"), llg)
        except UnsupportedGrammarError:
            num_refused += 1
            continue
        num_served += 1
        for instance, valid in line["tests"]:
            taken = takes(grammar, llg, instance)
            assert valid or not taken, (line["path"], line["schema"], instance)
            num_taken += taken
            num_valid += valid
    assert num_served > 0.5 * (num_served + num_refused)
    assert num_taken > 0.9 * num_valid
