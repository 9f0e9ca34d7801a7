"""The client `openai`: chats and responses, parsed, streamed, with calls and their results, followed by id; embeddings.

It validates strictly: an answer or event that does not fit the API's own types fails.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.clients.served import BUDGET, KEY, MAX_TOKENS, MODEL, PLACE, QUESTION, THINKS, TIMEOUT_S, URL, Weather

ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
FUNCTION: dict[str, Any] = {"name": "weather", "parameters": PLACE}
CHAT: dict[str, Any] = {"model": MODEL, "max_completion_tokens": MAX_TOKENS}
RESPONSE: dict[str, Any] = {"model": MODEL, "max_output_tokens": MAX_TOKENS}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{URL}/v1", api_key=KEY, timeout=TIMEOUT_S, max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_chat_parsed_into_a_model(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(messages=ASKED, response_format=Weather, **CHAT).choices[0].message.parsed
    assert isinstance(parsed, Weather)
    with client.chat.completions.stream(messages=ASKED, response_format=Weather, **CHAT) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert {"chunk", "content.delta", "content.done"} <= kinds and isinstance(streamed, Weather)


def test_a_chat_of_calls_and_results(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather, name="report")
    with client.chat.completions.stream(messages=ASKED, tools=[tool], tool_choice="required", **CHAT) as stream:
        pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        (choice,) = stream.get_final_completion().choices
    calls = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls" and calls and len(pieces) > 1
    assert all(isinstance(call.function.parsed_arguments, Weather) for call in calls)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Noted."} for call in calls]
    history: list[Any] = [*ASKED, choice.message, *results]  # with what the client has parsed
    # In a format, as free text may be longer than its bound, which this client raises for.
    fields: dict[str, Any] = {**CHAT, "tools": [tool], "tool_choice": "none", "response_format": Weather}
    again = client.chat.completions.parse(messages=history, **fields).choices[0]
    assert isinstance(again.message.parsed, Weather) and not again.message.tool_calls
    history += [again.message, {"role": "user", "content": "And in Oslo?"}]
    assert client.chat.completions.parse(messages=history, **fields).choices[0].message.parsed


def test_a_chat_that_thinks(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {**CHAT, "extra_body": THINKS, "messages": ASKED, "reasoning_effort": "low"}
    whole = client.chat.completions.parse(response_format=Weather, **fields)
    assert isinstance(whole.choices[0].message.parsed, Weather)
    assert whole.choices[0].message.to_dict()["reasoning"]
    details = None if whole.usage is None else whole.usage.completion_tokens_details
    assert details is not None and 0 < (details.reasoning_tokens or 0) <= BUDGET + 2
    schema: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": Weather.model_json_schema()}}
    stream: Any = client.chat.completions.create(stream=True, response_format=schema, **fields)
    assert "".join(str(chunk.choices[0].delta.to_dict().get("reasoning", "")) for chunk in stream if chunk.choices)


def test_a_response_parsed_into_a_model(client: openai.OpenAI) -> None:
    assert isinstance(client.responses.parse(input=QUESTION, text_format=Weather, **RESPONSE).output_parsed, Weather)
    with client.responses.stream(input=QUESTION, text_format=Weather, **RESPONSE) as stream:
        events = list(stream)
        assert isinstance(stream.get_final_response().output_parsed, Weather)
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_response_that_follows_a_call_by_its_id(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", "strict": True, **FUNCTION}]
    with client.responses.stream(input=QUESTION, tools=tools, tool_choice="required", **RESPONSE) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls and all(json.loads(call.arguments).keys() == {"place", "unit"} for call in calls)
    results: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"} for call in calls
    ]
    second = client.responses.create(input=results, previous_response_id=first.id, **RESPONSE)
    third = client.responses.create(input="And in Oslo?", previous_response_id=second.id, **RESPONSE)
    assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)
    assert third.usage is not None and second.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens
    assert client.responses.retrieve(third.id) == third
    kept = {item.type for item in client.responses.input_items.list(third.id)}
    assert {"message", "function_call", "function_call_output"} <= kept
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_response_that_thinks(client: openai.OpenAI) -> None:
    response = client.responses.parse(
        input=QUESTION, text_format=Weather, reasoning={"effort": "low"}, **RESPONSE, extra_body=THINKS
    )
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.usage is not None and response.usage.output_tokens_details.reasoning_tokens > 0


def test_a_response_in_the_background(client: openai.OpenAI) -> None:
    queued = client.responses.create(input=QUESTION, background=True, **RESPONSE)
    events: list[Any] = list(client.responses.retrieve(queued.id, stream=True))
    assert events[-1].response.id == queued.id and client.responses.retrieve(queued.id) == events[-1].response


def test_embeddings(client: openai.OpenAI) -> None:
    """As floats, and as the client asks by itself: in base64, which it decodes only where it isn't strict."""
    asked: dict[str, Any] = {"model": MODEL, "input": ["Rivers of Europe", "The Danube"]}
    floats = client.embeddings.create(encoding_format="float", **asked)
    assert [len(each.embedding) for each in floats.data] == [576, 576] and floats.usage.prompt_tokens > 0
    with openai.OpenAI(base_url=client.base_url, api_key=KEY, timeout=TIMEOUT_S, max_retries=0) as lenient:
        decoded = lenient.embeddings.create(**asked)
    assert [each.embedding for each in decoded.data] == [pytest.approx(each.embedding) for each in floats.data]


def test_errors_are_the_client_s_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=ASKED)
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(messages=ASKED, temperature=3, **CHAT)
    assert error.value.param == "temperature"
