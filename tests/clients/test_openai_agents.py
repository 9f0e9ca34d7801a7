"""`openai-agents`: agents with tools that run here, over chats and responses, whole and streamed, followed by id.

Where `max_tokens` cuts an answer, this client raises an error of its own; what is asked here has an end.
"""

from __future__ import annotations

from typing import Any

import pytest
from agents import (
    Agent,
    AsyncOpenAI,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai.types.shared import Reasoning

from tests.clients.served import KEY, MAX_TOKENS, MODEL, QUESTION, THINKS, TIMEOUT_S, URL, Weather

WAYS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)
set_tracing_disabled(True)


class Station:
    """Counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def tool(self) -> Any:
        @function_tool
        def weather(place: str, unit: str) -> str:
            """The weather of a place."""
            self.asked.append((place, unit))
            return "18 degrees"

        return weather


def agent(way: Any, station: Station | None = None, **settings: Any) -> Agent[Any]:
    """Calls its tools where it has some, whose result ends the run; else it answers in the form of a `Weather`."""
    served = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=TIMEOUT_S, max_retries=0)
    if station is not None:
        settings["tool_choice"] = "required"
    return Agent(
        name="reporter",
        instructions="Report the weather.",
        model=way(model=MODEL, openai_client=served),
        tools=[] if station is None else [station.tool()],
        output_type=Weather,
        tool_use_behavior="stop_on_first_tool",
        model_settings=ModelSettings(max_tokens=MAX_TOKENS, **settings),
    )


@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_parsed_into_a_model(way: Any) -> None:
    assert isinstance((await Runner.run(agent(way), QUESTION)).final_output, Weather)


@pytest.mark.parametrize("way", WAYS)
async def test_tools_run_and_their_results_are_heard(way: Any) -> None:
    station = Station()
    called = await Runner.run(agent(way, station), QUESTION)
    assert station.asked and called.final_output == "18 degrees"
    streamed = Runner.run_streamed(agent(way, station), QUESTION)
    kinds = {event.type async for event in streamed.stream_events()}
    assert len(station.asked) > 1 and {"raw_response_event", "run_item_stream_event"} <= kinds
    answered = await Runner.run(agent(way), [*called.to_input_list(), {"role": "user", "content": "Report it."}])
    assert isinstance(answered.final_output, Weather)


async def test_responses_are_followed_by_their_ids() -> None:
    first = await Runner.run(agent(OpenAIResponsesModel), QUESTION)
    second = await Runner.run(agent(OpenAIResponsesModel), "And in Oslo?", previous_response_id=first.last_response_id)
    assert isinstance(second.final_output, Weather)
    before, after = first.raw_responses[0].usage, second.raw_responses[0].usage
    assert after.input_tokens > before.input_tokens


@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_that_thinks(way: Any) -> None:
    thinking: dict[str, Any] = {"reasoning": Reasoning(effort="low"), "extra_body": THINKS}
    result = await Runner.run(agent(way, **thinking), QUESTION)
    assert isinstance(result.final_output, Weather)
    assert "reasoning" in [item.type for item in result.raw_responses[0].output]
