"""`langchain-openai`: structured output, tools whole and streamed, results, reasoning over responses, embeddings."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.clients.served import KEY, MAX_TOKENS, MODEL, QUESTION, THINKS, TIMEOUT_S, URL, Weather

SERVED: dict[str, Any] = {"base_url": f"{URL}/v1", "api_key": KEY, "model": MODEL, "max_retries": 0}


@tool
def weather(place: str, unit: str) -> str:
    """The weather of a place."""
    return f"18 degrees {unit} in {place}"


def model(**fields: Any) -> ChatOpenAI:
    return ChatOpenAI(max_completion_tokens=MAX_TOKENS, timeout=TIMEOUT_S, **SERVED, **fields)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("responses", [False, True])
def test_an_answer_parsed_into_a_model(method: Any, responses: bool) -> None:
    parsing = model(use_responses_api=responses).with_structured_output(Weather, method=method)
    assert isinstance(parsing.invoke(QUESTION), Weather)


@pytest.mark.parametrize("responses", [False, True])
def test_a_conversation_of_calls_and_results(responses: bool) -> None:
    chat = model(use_responses_api=responses)
    pieces = list(chat.bind_tools([weather], tool_choice="any").stream(QUESTION))
    first = pieces[0]
    for piece in pieces[1:]:
        first += piece
    assert isinstance(first, AIMessage) and first.tool_calls and not first.invalid_tool_calls and len(pieces) > 2
    results = [weather.invoke({**call, "type": "tool_call"}) for call in first.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    second = chat.bind_tools([weather], tool_choice="none").invoke([HumanMessage(QUESTION), first, *results])
    assert second.text and not second.tool_calls
    assert second.usage_metadata is not None and second.usage_metadata["output_tokens"] > 0


def test_a_response_that_follows_another_and_thinks() -> None:
    chat = model(use_responses_api=True, use_previous_response_id=True, output_version="responses/v1")
    first = chat.invoke(QUESTION)
    thinking = {"reasoning": {"effort": "low"}, "extra_body": THINKS}
    second = chat.invoke(
        [HumanMessage(QUESTION), first, HumanMessage("And in Oslo?")], response_format=Weather, **thinking
    )
    blocks = [block["type"] for block in second.content if isinstance(block, dict)]
    assert blocks[0] == "reasoning" and "text" in blocks
    assert second.usage_metadata is not None and first.usage_metadata is not None
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


def test_embeddings() -> None:
    vectors = OpenAIEmbeddings(check_embedding_ctx_length=False, **SERVED).embed_documents(["Rivers", "The Danube"])
    assert [len(vector) for vector in vectors] == [576, 576]
