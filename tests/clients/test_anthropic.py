"""The client `anthropic`: messages parsed, streamed, with tools and their results, and thinking."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from pydantic import BaseModel

from tests.clients.served import BUDGET, KEY, MAX_TOKENS, MODEL, PLACE, QUESTION, TIMEOUT_S, URL

ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
TOOLS: list[Any] = [{"name": "weather", "description": "Of a place.", "input_schema": PLACE}]
FIELDS: dict[str, Any] = {"model": MODEL, "max_tokens": MAX_TOKENS}


@pytest.fixture(scope="module")
def client() -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=URL, api_key=KEY, timeout=TIMEOUT_S, max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


class Sky(BaseModel):
    """This client sends no bounds of numbers and texts, so a model that needs them may be told what it refuses."""

    sky: Literal["clear", "clouds", "rain"]
    windy: bool


def read(message: Any) -> int:
    """Tokens of the prompt, with those whose KV was there."""
    return int(message.usage.input_tokens + message.usage.cache_read_input_tokens)


def test_a_message_parsed_into_a_model(client: anthropic.Anthropic) -> None:
    parsed = client.messages.parse(messages=ASKED, output_format=Sky, **FIELDS).parsed_output
    assert isinstance(parsed, Sky)


def test_a_conversation_of_calls_and_results(client: anthropic.Anthropic) -> None:
    with client.messages.stream(messages=ASKED, tools=TOOLS, tool_choice={"type": "any"}, **FIELDS) as stream:
        kinds = {event.type for event in stream}
        first = stream.get_final_message()
    assert {"message_start", "content_block_start", "input_json", "content_block_stop", "message_stop"} <= kinds
    calls = [block for block in first.content if block.type == "tool_use"]
    assert first.stop_reason == "tool_use" and calls
    assert all(call.name == "weather" and call.input.keys() == {"place", "unit"} for call in calls)
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"} for call in calls]
    history: list[Any] = [
        *ASKED, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}
    ]  # fmt: skip
    second = client.messages.create(messages=history, tools=TOOLS, tool_choice={"type": "none"}, **FIELDS)
    assert [block.type for block in second.content] == ["text"]
    assert read(second) > client.messages.count_tokens(model=MODEL, messages=ASKED).input_tokens


def test_thinking(client: anthropic.Anthropic) -> None:
    thinks: Any = {"thinking": {"type": "enabled", "budget_tokens": BUDGET}, "extra_body": {"temperature": 0}}
    with client.messages.stream(messages=ASKED, output_format=Sky, **thinks, **FIELDS) as stream:
        kinds = {event.type for event in stream}
        first = stream.get_final_message()
    assert "thinking" in kinds and [block.type for block in first.content] == ["thinking", "text"]
    history: list[Any] = [*ASKED, {"role": "assistant", "content": first.content}, *ASKED]
    whole = client.messages.parse(messages=history, output_format=Sky, **thinks, **FIELDS)
    assert whole.content[0].type == "thinking" and whole.content[0].thinking


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASKED).input_tokens
    assert counted == read(client.messages.create(messages=ASKED, **FIELDS))


def test_errors_are_the_client_s_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="another", max_tokens=1, messages=ASKED)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(messages=ASKED, extra_body={"temperature": 2}, **FIELDS)
