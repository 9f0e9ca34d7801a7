"""`pydantic-ai`: agents whose output is a model, with tools that run here, over chats, responses and messages."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ThinkingPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.served import KEY, MAX_TOKENS, MODEL, QUESTION, THINKS, URL, Weather

SETTINGS: Any = {"max_tokens": MAX_TOKENS}
WAYS = ("chat", "responses", "messages")


def model(way: str) -> Any:
    if way == "messages":
        return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY))
    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
    return (OpenAIChatModel if way == "chat" else OpenAIResponsesModel)(MODEL, provider=provider)


@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_parsed_into_a_model(way: str) -> None:
    """By a call that must be made."""
    agent = Agent(model(way), output_type=ToolOutput(Weather), model_settings=SETTINGS, retries=0)
    assert isinstance((await agent.run(QUESTION)).output, Weather)
    async with agent.run_stream(QUESTION) as streamed:
        assert isinstance(await streamed.get_output(), Weather)


@pytest.mark.parametrize("way", ["chat", "responses"])
async def test_an_answer_that_follows_a_schema(way: str) -> None:
    agent = Agent(model(way), output_type=NativeOutput(Weather), model_settings=SETTINGS, retries=0)
    assert isinstance((await agent.run(QUESTION)).output, Weather)


@pytest.mark.parametrize("way", WAYS)
async def test_a_conversation_of_calls_and_results(way: str) -> None:
    """The first answer must be a call: the only choice is between a tool and the output."""
    agent = Agent(model(way), output_type=ToolOutput(Weather), model_settings=SETTINGS, retries=0)
    first = await agent.run(QUESTION)
    calls = [part for message in first.all_messages() for part in message.parts if isinstance(part, ToolCallPart)]
    results = [part for message in first.all_messages() for part in message.parts if isinstance(part, ToolReturnPart)]
    assert calls and [call.tool_call_id for call in calls] == [result.tool_call_id for result in results]
    second = await agent.run("And in Oslo?", message_history=first.all_messages())
    assert isinstance(second.output, Weather) and second.usage.input_tokens > first.usage.input_tokens


@pytest.mark.parametrize("way", WAYS)
async def test_tools_run_and_their_results_are_heard(way: str) -> None:
    """A tool must be called first, and then the output."""
    asked: list[str] = []

    def settings(context: Any) -> Any:
        return {**SETTINGS, "tool_choice": "none" if asked else "required"}

    agent = Agent(model(way), output_type=ToolOutput(Weather), model_settings=settings, retries=0)

    @agent.tool_plain
    def weather(place: str, unit: str) -> str:
        """The weather of a place."""
        asked.append(place)
        return f"18 degrees {unit}"

    result = await agent.run(QUESTION)
    returned = [part for message in result.all_messages() for part in message.parts if isinstance(part, ToolReturnPart)]
    assert isinstance(result.output, Weather) and asked
    assert [part.tool_name for part in returned][: len(asked)] == ["weather"] * len(asked)


@pytest.mark.parametrize("way", ["chat", "responses"])
async def test_an_answer_that_thinks(way: str) -> None:
    thinking = {"openai_reasoning_effort": "low", "extra_body": THINKS}
    agent = Agent(model(way), output_type=NativeOutput(Weather), model_settings={**SETTINGS, **thinking}, retries=0)
    result = await agent.run(QUESTION)
    thoughts = [part for message in result.new_messages() for part in message.parts if isinstance(part, ThinkingPart)]
    assert thoughts and isinstance(result.output, Weather)
