"""`litellm`: completions as OpenAI's and as Anthropic's, streamed calls, schemas, responses, embeddings."""

from __future__ import annotations

import json
from typing import Any

import litellm

from tests.clients.served import KEY, MAX_TOKENS, MODEL, PLACE, QUESTION, THINKS, TIMEOUT_S, URL, Weather

ASKED = [{"role": "user", "content": QUESTION}]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Of a place.", "parameters": PLACE}}]
SERVED: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": KEY, "timeout": TIMEOUT_S, "max_retries": 0}
CHAT: dict[str, Any] = {"model": f"hosted_vllm/{MODEL}", "max_tokens": MAX_TOKENS, **SERVED}


def test_an_answer_parsed_into_a_model() -> None:
    answer = litellm.completion(messages=ASKED, response_format=Weather, **CHAT)
    assert Weather.model_validate_json(answer.choices[0].message.content)


def test_a_conversation_of_calls_and_results() -> None:
    chunks = list(litellm.completion(messages=ASKED, tools=TOOLS, tool_choice="required", stream=True, **CHAT))
    first = litellm.stream_chunk_builder(chunks, messages=ASKED).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.tool_calls
    for call in first.message.tool_calls:
        assert json.loads(call.function.arguments).keys() == {"place", "unit"}
    results = [{"role": "tool", "tool_call_id": call.id, "content": "18 degrees"} for call in first.message.tool_calls]
    history = [*ASKED, first.message, *results]
    second = litellm.completion(messages=history, tools=TOOLS, tool_choice="none", **CHAT).choices[0]
    assert second.message.content and not second.message.tool_calls
    history += [second.message, *ASKED]
    for vendor in ("hosted_vllm", "openai"):
        third = litellm.completion(messages=history, **{**CHAT, "model": f"{vendor}/{MODEL}"}).choices[0]
        assert third.message.content


def test_an_answer_that_thinks() -> None:
    fields = {
        **CHAT,
        "response_format": Weather,
        "reasoning_effort": "low",
        "extra_body": THINKS,
    }
    first = litellm.completion(messages=ASKED, **fields).choices[0].message
    assert first.reasoning_content
    for vendor in ("hosted_vllm", "openai"):  # each writes of the reasoning what it takes for its own
        again = litellm.completion(messages=[*ASKED, first, *ASKED], **{**fields, "model": f"{vendor}/{MODEL}"})
        assert again.choices[0].message.reasoning_content
    chunks = list(litellm.completion(messages=ASKED, stream=True, **fields))
    assert litellm.stream_chunk_builder(chunks).choices[0].message.reasoning_content


def test_responses_that_follow_each_other() -> None:
    fields: dict[str, Any] = {"model": f"openai/{MODEL}", "max_output_tokens": MAX_TOKENS, **SERVED}
    first = litellm.responses(input=QUESTION, **fields)
    events = list(litellm.responses(input="And in Oslo?", previous_response_id=first.id, stream=True, **fields))
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.usage.input_tokens > first.usage.input_tokens


def test_messages_in_anthropic_s_way() -> None:
    fields = {"model": f"anthropic/{MODEL}", "max_tokens": MAX_TOKENS, **SERVED, "api_base": URL}
    answer = litellm.completion(messages=ASKED, tools=TOOLS, tool_choice="required", **fields).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert json.loads(answer.message.tool_calls[0].function.arguments).keys() == {"place", "unit"}


def test_embeddings() -> None:
    found = litellm.embedding(model=f"hosted_vllm/{MODEL}", input=["Rivers", "The Danube"], **SERVED)
    assert [len(each["embedding"]) for each in found.data] == [576, 576]
