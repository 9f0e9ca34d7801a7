"""`instructor`: models parsed in each of its modes that Legato is asked by, whole, in part and many at a time."""

from __future__ import annotations

from typing import Any

import anthropic
import instructor
import openai
import pytest

from tests.clients.served import KEY, MAX_TOKENS, MODEL, QUESTION, TIMEOUT_S, URL, Weather

ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
MODES = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)


def client(mode: instructor.Mode) -> instructor.Instructor:
    served = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=TIMEOUT_S, max_retries=0)
    return instructor.from_openai(served, mode=mode)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_an_answer_parsed_into_a_model(mode: instructor.Mode) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": ASKED, "max_tokens": MAX_TOKENS, "max_retries": 0}
    assert isinstance(client(mode).create(response_model=Weather, **fields), Weather)
    parts = list(client(mode).create_partial(response_model=Weather, **fields))
    assert len(parts) > 1 and Weather.model_validate(parts[-1].model_dump())


def test_responses() -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": ASKED, "max_output_tokens": MAX_TOKENS, "max_retries": 0}
    found = client(instructor.Mode.RESPONSES_TOOLS).responses.create(response_model=Weather, **fields)
    assert isinstance(found, Weather)


def test_in_anthropic_s_way() -> None:
    served = anthropic.Anthropic(base_url=URL, api_key=KEY, timeout=TIMEOUT_S, max_retries=0)
    fields: dict[str, Any] = {"model": MODEL, "messages": ASKED, "max_tokens": MAX_TOKENS, "max_retries": 0}
    found = instructor.from_anthropic(served).create(response_model=Weather, **fields)
    assert isinstance(found, Weather)
