"""OpenAI's Responses API as OpenAI's own client sees it, with scripted tokens.

The client validates strictly: whatever does not fit the API's own types, whole or as an event, fails.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, closing
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import openai
import pydantic
import pytest
from openai.types.responses import ResponseFormatTextJSONSchemaConfigParam, ResponseStreamEvent
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.batch import database as storage
from cluster.batch.database import Database
from cluster.batch.stored_responses import KEPT_S, ResponseEvents, Responses, StoredResponse
from cluster.errors import ApiError, FailedError, NotFoundError, OverloadedError, RequestTooLargeError
from cluster.http import background
from cluster.http.background import StoredResponses
from cluster.http.openai.responses import ResponsesBody, chat_of
from cluster.http.server.unread import PIECE_BYTES
from engine.text.tokenizer import Tokenizer
from tests.support.http_server import MODEL, running_server
from tests.support.openai_conformance import Target
from tests.support.processor_time import in_loop_turns
from tests.support.scripted_generator import MAX_MODEL_LEN, Script, ScriptedGenerator
from tests.support.waiting import HANGS_S, eventually, wait_until

pytestmark = pytest.mark.model

ASKED: Final = "Tell me about the weather."
WEATHER: Final[Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    "strict": False,
}
CALLS: Final = (
    'I will look.\n<tool_call>\n{"name": "weather", "arguments": {"place": "Paris é🦜"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
)
LAST: Final = ("response.completed", "response.incomplete", "response.failed")
OWNER: Final = {"authorization": "Bearer unused"}  # as the client of these tests


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gateway counts as gone because this machine is busy."""
    monkeypatch.setattr(storage, "CLAIM_S", HANGS_S)


@pytest.fixture(scope="module")
def target(
    shared_generator: ScriptedGenerator, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    storage = tmp_path_factory.mktemp("responses")
    with running_server(shared_generator, tokenizer, reasoning_format="think", storage=storage) as target:
        yield target


def strict(target: Target) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=target.client.base_url,
        api_key="unused",
        max_retries=0,
        timeout=HANGS_S,
        _strict_response_validation=True,
    )


@pytest.fixture(scope="module")
def client(target: Target) -> Iterator[openai.OpenAI]:
    with strict(target) as client:
        yield client


@pytest.fixture
def generator(shared_generator: ScriptedGenerator) -> Iterator[ScriptedGenerator]:
    with shared_generator.following(Script(reply="It rains.")) as generator:
        yield generator


def create(client: openai.OpenAI, **fields: Any) -> Any:
    return client.responses.create(**{"model": MODEL, "input": ASKED, **fields})


def streamed(client: openai.OpenAI, **fields: Any) -> list[ResponseStreamEvent]:
    return checked(create(client, stream=True, **fields))


def checked(stream: Any, first: int = 0) -> list[ResponseStreamEvent]:
    """The events of a stream: numbered without a gap, and in the order that the API promises."""
    events: list[Any] = list(stream)
    assert [event.sequence_number for event in events] == list(range(first, first + len(events)))
    assert [event.type in LAST for event in events] == [False] * (len(events) - 1) + [True]
    if first > 0:
        return events
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    is_open, texts = -1, dict[int, str]()
    for event in events:
        if event.type == "response.output_item.added":
            assert is_open == -1 and event.output_index not in texts and event.item.status == "in_progress"
            is_open, texts[event.output_index] = event.output_index, ""
        elif event.type.endswith(".delta"):
            assert is_open == event.output_index
            texts[is_open] += event.delta
        elif event.type in ("response.output_text.done", "response.reasoning_text.done"):
            assert event.text == texts[is_open]
        elif event.type == "response.function_call_arguments.done":
            assert event.arguments == texts[is_open]
        elif event.type == "response.output_item.done":
            assert is_open == event.output_index and events[-1].response.output[is_open] == event.item
            is_open = -1
    assert is_open == -1 or events[-1].response.status == "failed"  # together with its gateway
    return events


def both(client: openai.OpenAI, **fields: Any) -> list[Any]:
    """The answer whole, and as the last event of a stream has it: the same but for what is drawn anew."""
    last: Any = streamed(client, **fields)[-1]
    answers = [create(client, **fields), last.response]
    plain = [answer.to_dict() for answer in answers]
    for answer in plain:
        for name in ("id", "created_at", "completed_at"):
            del answer[name]
        for item in answer["output"]:
            item.pop("call_id", None)
            del item["id"]
    assert plain[0] == plain[1]
    return answers


def ended(client: openai.OpenAI, response_id: str) -> Any:
    wait_until(lambda: client.responses.retrieve(response_id).status not in ("queued", "in_progress"))
    return client.responses.retrieve(response_id)


def test_text_whole_and_streamed(client: openai.OpenAI, generator: ScriptedGenerator) -> None:
    for answer in both(client, instructions="Be brief.", metadata={"run": "7"}, user="u", temperature=0.5):
        assert answer.id.startswith("resp_") and (answer.object, answer.model) == ("response", MODEL)
        assert (answer.status, answer.output_text) == ("completed", "It rains.") and answer.completed_at
        assert (answer.error, answer.incomplete_details, answer.previous_response_id) == (None, None, None)
        assert (answer.instructions, answer.metadata, answer.user) == ("Be brief.", {"run": "7"}, "u")
        assert (answer.temperature, answer.top_p, answer.truncation, answer.store) == (0.5, 1.0, "disabled", True)
        num_prompt = len(generator.requests[0].prompt_token_ids)
        usage = answer.usage
        assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (num_prompt, num_prompt // 2)
        assert usage.output_tokens > 1 and usage.total_tokens == num_prompt + usage.output_tokens


def test_an_answer_without_a_word(client: openai.OpenAI, generator: ScriptedGenerator) -> None:
    generator.script.reply = ""
    for answer in both(client):
        assert [item.type for item in answer.output] == ["message"] and answer.output_text == ""


def test_how_it_ended(client: openai.OpenAI, generator: ScriptedGenerator) -> None:
    for answer in both(client, max_output_tokens=1):
        assert answer.status == answer.output[0].status == "incomplete" and answer.usage.output_tokens == 1
        assert answer.incomplete_details.reason == "max_output_tokens"
    for answer in both(client, extra_body={"stop": ["ra"]}):
        assert (answer.status, answer.output_text) == ("completed", "It ")


def test_what_is_generated_is_what_was_asked_for(client: openai.OpenAI, generator: ScriptedGenerator) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "In verse."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Say "},
                                                       {"type": "input_text", "text": "hi."}]},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Again."},
    ]  # fmt: skip
    extra = {"top_k": 7, "seed": 5, "min_p": 0.1, "repetition_penalty": 1.5, "logit_bias": {"5": -2}}
    create(client, input=items, instructions="Be brief.", max_output_tokens=9, top_p=0.75, extra_body=extra)
    (request,), (prompt,) = generator.requests, generator.prompts()
    params = request.params
    assert (params.max_tokens, params.top_p, params.top_k, params.min_p) == (9, 0.75, 7, 0.1)
    assert (params.seed, params.repetition_penalty, params.logit_bias, params.logprobs) == (5, 1.5, {5: -2.0}, None)
    said = [turn.removesuffix("<|im_end|>") for turn in prompt.split("<|im_start|>")[1:]]
    assert [turn.strip() for turn in said] == [
        "system\nBe brief.<|im_end|>",
        "system\nIn verse.<|im_end|>",
        "user\nSay hi.<|im_end|>",
        "assistant\nHi.<|im_end|>",
        "user\nAgain.<|im_end|>",
        "assistant",
    ]


CODEX: Final[dict[str, Any]] = {  # what Codex CLI sends, beside its tools and texts
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be careful."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<cwd>/</cwd>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
    ],
    "tools": [WEATHER],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "detailed"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0190a1b2-0000-7000-8000-000000000000",
    "client_metadata": {"x-codex-installation-id": "5f0c"},
}


def test_a_request_of_codex(target: Target, generator: ScriptedGenerator) -> None:
    with target.http.stream("POST", "/v1/responses", json={"model": MODEL, **CODEX}) as answer:
        assert answer.status_code == 200, answer.read()
        events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["reasoning"] == {"effort": "medium", "summary": "detailed"}
    assert "user\n<cwd>/</cwd><|im_end|>\n<|im_start|>user\nFix it." in generator.prompts()[0]


def test_functions_in_namespaces(client: openai.OpenAI, generator: ScriptedGenerator) -> None:
    """Codex groups functions of an MCP server, and its own for several agents. The model knows one name of each, the
    client two."""
    inside = {"type": "namespace", "name": "mcp__sky__", "description": "Of a server.", "tools": [WEATHER]}
    spawn = {**WEATHER, "name": "spawn", "description": None}
    agents = {**inside, "name": "agents", "description": "Of agents.", "tools": [spawn, {**WEATHER, "name": "wait"}]}
    tools: list[Any] = [WEATHER, inside, agents]
    called = '<tool_call>\n{"name": "mcp__sky__weather", "arguments": {"place": "Rome"}}\n</tool_call>'
    plain = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    generator.script.reply = f"{called}\n{plain}"
    for answer in both(client, tools=tools):
        assert [tool.to_dict(exclude_unset=True) for tool in answer.tools] == tools
        first, second = (item.to_dict() for item in answer.output)
        assert (first["namespace"], first["name"], first["arguments"]) == ("mcp__sky__", "weather", '{"place": "Rome"}')
        assert second["name"] == "weather" and "namespace" not in second
    generator.script.reply = "It rains."
    results: list[Any] = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "Rain."} for item in (first, second)
    ]
    sent: list[Any] = [{"role": "user", "content": ASKED}, *answer.output, *results]
    create(client, input=sent, tools=tools)
    create(client, input=results, previous_response_id=answer.id, tools=tools)
    for chosen, name in (
        ({"name": "agents__wait"}, "agents__wait"),
        ({"namespace": "mcp__sky__", "name": "weather"}, "mcp__sky__weather"),
    ):
        one: Any = {"type": "function", **chosen}
        assert create(client, tools=tools, tool_choice=one, max_output_tokens=1).tool_choice.to_dict() == one
        assert name in (generator.requests[-1].params.grammar or "")
    *_, whole, followed, _, _ = generator.prompts()
    assert whole == followed and f"assistant\n{called}\n{plain}<|im_end|>" in whole
    described = WEATHER["description"]
    for name, told in (
        ("weather", described),
        ("mcp__sky__weather", f"Of a server.\\n\\n{described}"),
        ("agents__spawn", "Of agents."),
        ("agents__wait", described),
    ):
        assert f'"name": "{name}", "description": "{told}"' in whole


def test_items_of_an_answer_are_sent_back_as_they_are(client: openai.OpenAI, generator: ScriptedGenerator) -> None:
    """With all members that the client's types have, null or false."""
    generator.script.reply = f"<think>\nhm\n</think>\n\n{CALLS}"
    tools: list[Any] = [{**WEATHER, "async": False}]
    output = [item.model_dump() for item in create(client, tools=tools, store=False).output]
    assert {item["type"] for item in output} == {"reasoning", "message", "function_call"}
    for item in output:
        if item["type"] == "function_call":
            item["async"] = False
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "Rain."}
        for item in output
        if item["type"] == "function_call"
    ]
    generator.script.reply = "It rains."
    asked: list[Any] = [{"role": "user", "content": "Hi."}, *output, *results]
    assert create(client, input=asked, tools=tools, store=False).output_text == "It rains."


def test_what_follows_may_have_no_input(client: openai.OpenAI, target: Target, generator: ScriptedGenerator) -> None:
    """Nor what instructions alone say."""
    first = create(client)
    for fields in ({"previous_response_id": first.id}, {"previous_response_id": first.id, "input": []}):
        answer = target.http.post("/v1/responses", json={"model": MODEL, **fields}, headers=OWNER)
        assert answer.json()["output"][0]["content"][0]["text"] == "It rains.", answer.text
    assert client.responses.create(model=MODEL, instructions="Tell of Rome.").output_text == "It rains."
    _, second, third, fourth = generator.prompts()
    assert second == third and second.endswith("assistant\nIt rains.<|im_end|>\n<|im_start|>assistant\n")
    assert "system\nTell of Rome.<|im_end|>" in fourth


def test_log_probabilities(client: openai.OpenAI, generator: ScriptedGenerator) -> None:
    for fields, num_top in (({"include": ["message.output_text.logprobs"]}, 0), ({"top_logprobs": 2}, 2)):
        for answer in both(client, **fields):
            logprobs = answer.output[0].content[0].logprobs
            assert "".join(entry.token for entry in logprobs) == "It rains."
            assert [len(entry.top_logprobs) for entry in logprobs] == [num_top] * len(logprobs)
        events: list[Any] = streamed(client, **fields)
        deltas = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
        assert [entry.token for entry in deltas] == [entry.token for entry in logprobs]


@pytest.mark.parametrize("burst", [1, 3])
def test_log_probabilities_of_all_tokens_are_beside_the_first_text(
    client: openai.OpenAI, generator: ScriptedGenerator, burst: int
) -> None:
    """Streamed, too, where most of them come when that text is over; those of later texts are told as they come."""
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    said = ["<think>hm</think>I look.", f"\n{call} Then I say.", f"\n{call}"]
    generator.script = Script(reply="".join(said), burst=burst)
    fields: dict[str, Any] = {"tools": [WEATHER], "top_logprobs": 1}
    events: list[Any] = list(create(client, stream=True, **fields))
    kept: Any = client.responses.retrieve(events[-1].response.id)
    for answer in (create(client, **fields), events[-1].response, kept):
        assert [item.type for item in answer.output] == ["reasoning", *["message", "function_call"] * 2]
        first, later = (item.content[0].logprobs for item in answer.output if item.type == "message")
        assert "".join(entry.token for entry in first) == "".join(said) and later == []
    deltas = [event.logprobs for event in events if event.type == "response.output_text.delta"]
    told = "".join(entry.token for logprobs in deltas for entry in logprobs)
    assert told.startswith("".join(said[:2])) and "".join(said).startswith(told)


def test_a_conversation_of_calls_and_results(client: openai.OpenAI, generator: ScriptedGenerator) -> None:
    """Once by giving all back, and once by the id of what was answered."""
    generator.script.reply = f"<think>\nIs it rain?\n</think>\n\n{CALLS}"
    for answer in both(client, tools=[WEATHER], include=["reasoning.encrypted_content"]):
        reasoning, text, paris, nowhere = answer.output
        assert [part.text for part in reasoning.content] == ["Is it rain?"] and reasoning.summary == []
        assert text.content[0].text == "I will look." and answer.status == "completed"
        assert (paris.name, json.loads(paris.arguments)) == ("weather", {"place": "Paris é🦜"})
        assert nowhere.arguments == "{}" and paris.call_id != nowhere.call_id and paris.id != nowhere.id
    generator.script.reply = "It rains."
    generator.requests.clear()
    results: list[Any] = [
        {"type": "function_call_output", "call_id": paris.call_id, "output": "Rain."},
        {"type": "function_call_output", "call_id": nowhere.call_id,
         "output": [{"type": "input_text", "text": "Where?"}]},
    ]  # fmt: skip
    given_back = create(client, input=[{"role": "user", "content": ASKED}, *answer.output, *results], tools=[WEATHER])
    followed = create(client, input=results, tools=[WEATHER], previous_response_id=answer.id)
    assert given_back.output_text == followed.output_text == "It rains."
    assert followed.previous_response_id == answer.id
    first, second = generator.prompts()
    assert first == second
    assert f"user\n{ASKED}" in first and 'I will look.\n<tool_call>\n{"name": "weather", "arguments": ' in first
    assert "<tool_response>\nRain.\n</tool_response>\n<tool_response>\nWhere?\n</tool_response>" in first


def test_what_is_said_around_calls_is_told_again(client: openai.OpenAI, generator: ScriptedGenerator) -> None:
    generator.script.reply = f"{CALLS} Then I say."
    answer = create(client, tools=[WEATHER])
    texts = [item.content[0].text for item in answer.output if item.type == "message"]
    assert texts == ["I will look.", "Then I say."]
    create(client, input="Well?", previous_response_id=answer.id)
    assert "assistant\nI will look.\nThen I say.\n<tool_call>" in generator.prompts()[-1]


def test_events_of_calls_and_reasoning(client: openai.OpenAI, generator: ScriptedGenerator) -> None:
    generator.script.reply = f"<think>\nhm\n</think>\n\n{CALLS}"
    events = streamed(client, tools=[WEATHER])
    kinds = [event.type.removeprefix("response.") for event in events if not event.type.endswith(".delta")]
    part = ["output_item.added", "content_part.added"]
    call = ["output_item.added", "function_call_arguments.done", "output_item.done"]
    assert kinds == [
        "created",
        "in_progress",
        *part,
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        *part,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        *call,
        *call,
        "completed",
    ]
    with client.responses.stream(model=MODEL, input=ASKED, tools=[WEATHER]) as stream:  # the client's accumulator
        assert [item.type for item in stream.get_final_response().output] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
        ]


class Weather(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    sky: Literal["clear", "clouded"]


SCHEMA: Final[ResponseFormatTextJSONSchemaConfigParam] = {
    "type": "json_schema",
    "name": "weather",
    "schema": Weather.model_json_schema(),
    "strict": True,
}


def test_structured_answers(client: openai.OpenAI, generator: ScriptedGenerator) -> None:
    generator.script.reply = '{"sky":"clear"}'
    parsed = client.responses.parse(model=MODEL, input=ASKED, text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)
    with client.responses.stream(model=MODEL, input=ASKED, text_format=Weather) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Weather)
    answer = create(client, text={"format": SCHEMA, "verbosity": "low"})
    assert Weather.model_validate_json(answer.output_text) and answer.text.format.name == "weather"
    create(client, text={"format": {"type": "json_object"}})
    assert all(request.params.grammar is not None for request in generator.requests)
    generator.requests.clear()
    create(client, tools=[WEATHER], tool_choice={"type": "function", "name": "weather"}, max_output_tokens=1)
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    create(client, tools=[WEATHER], tool_choice=allowed, max_output_tokens=1)
    create(client, tools=[WEATHER], tool_choice="none", max_output_tokens=1)
    grammars = [request.params.grammar for request in generator.requests]
    assert grammars[0] and grammars[1] and grammars[2] is None
    # No text is written where a call must be: what it would have to be makes no difference.
    create(client, tools=[WEATHER], tool_choice="required", text={"format": SCHEMA}, max_output_tokens=1)
    assert generator.requests[-1].params.grammar == grammars[1]


def test_what_does_not_fit_is_left_out_where_asked_for(client: openai.OpenAI, generator: ScriptedGenerator) -> None:
    items = [{"role": "user", "content": f"({n}) " + "sea " * 200} for n in range(40)]
    items.append({"role": "user", "content": "Now."})
    with pytest.raises(openai.BadRequestError, match="context") as refused:
        create(client, input=items)
    assert (refused.value.param, refused.value.code) == ("input", "context_length_exceeded")
    answer = create(client, input=items, truncation="auto", instructions="Be brief.", max_output_tokens=50)
    assert answer.truncation == "auto"
    (request,), (prompt,) = generator.requests, generator.prompts()
    assert MAX_MODEL_LEN - 50 >= len(request.prompt_token_ids) > MAX_MODEL_LEN - 300
    assert prompt.startswith("<|im_start|>system\nBe brief.") and prompt.count("(39)") == 1 and "(3)" not in prompt
    with pytest.raises(openai.BadRequestError, match="context"):
        create(client, input="sea " * 3_000, truncation="auto")


def test_stored_responses(client: openai.OpenAI, target: Target, generator: ScriptedGenerator) -> None:
    first = create(client)
    second: Any = streamed(client, input="And now?", previous_response_id=first.id)[-1]
    third = create(client, input="Then?", previous_response_id=second.response.id)
    assert client.responses.retrieve(first.id) == first
    assert client.responses.retrieve(second.response.id) == second.response
    items: list[Any] = list(client.responses.input_items.list(third.id, order="asc", limit=2))  # its pages
    assert [item.content[0].text for item in items] == [ASKED, "It rains.", "And now?", "It rains.", "Then?"]
    assert [item.id for item in client.responses.input_items.list(third.id)] == [item.id for item in items[::-1]]
    client.responses.delete(second.response.id)
    for ask in (
        lambda: client.responses.retrieve(second.response.id),
        lambda: client.responses.delete(second.response.id),
        lambda: client.responses.cancel(second.response.id),
        lambda: client.responses.input_items.list(second.response.id),
    ):
        with pytest.raises(openai.NotFoundError, match="no response"):
            ask()
    with pytest.raises(openai.BadRequestError, match="no response") as gone:
        create(client, previous_response_id=third.id)
    assert (gone.value.code, gone.value.param) == ("previous_response_not_found", "previous_response_id")
    own: list[Any] = list(client.responses.input_items.list(third.id))
    assert [item.content[0].text for item in own] == ["Then?"]
    with pytest.raises(openai.BadRequestError, match="may have been deleted") as nowhere:
        client.responses.input_items.list(third.id, after=items[0].id)
    assert nowhere.value.param == "after"
    assert [item.id for item in client.responses.input_items.list(third.id, after="")] == [own[0].id]
    forgotten = create(client, store=False)
    assert forgotten.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(forgotten.id)


def test_an_item_is_sent_once(client: openai.OpenAI, generator: ScriptedGenerator) -> None:
    """Nor is one sent that previous_response_id brings: who pages by ids would never come to an end."""
    first = create(client)
    asked: dict[str, Any] = {"role": "user", "content": "And now?"}
    second = create(client, input=[{**asked, "id": "msg_1"}], previous_response_id=first.id)
    for items, previous in (
        ([{**asked, "id": "msg_1"}, {**asked, "id": "msg_1"}], openai.omit),
        ([*first.output, asked], second.id),
        ([{**asked, "id": "msg_1"}], second.id),
    ):
        with pytest.raises(openai.BadRequestError, match="twice") as refused:
            create(client, input=items, previous_response_id=previous)
        assert refused.value.param == "input"
    assert create(client, input=[asked, asked], previous_response_id=second.id).status == "completed"


def test_who_may_see_them(client: openai.OpenAI, generator: ScriptedGenerator) -> None:
    answer = create(client)
    other = client.with_options(api_key="another")
    for ask in (
        lambda: other.responses.retrieve(answer.id),
        lambda: other.responses.cancel(answer.id),
        lambda: other.responses.delete(answer.id),
        lambda: other.responses.input_items.list(answer.id),
        lambda: create(other, previous_response_id=answer.id),
    ):
        with pytest.raises(openai.APIStatusError, match="no response"):
            ask()
    assert client.responses.retrieve(answer.id) == answer


def test_in_the_background(client: openai.OpenAI, target: Target, generator: ScriptedGenerator) -> None:
    generator.script.reply = f"<think>hm</think>{CALLS}"
    whole = create(client, tools=[WEATHER])
    queued = create(client, tools=[WEATHER], background=True)
    assert (queued.status, queued.background, queued.output, queued.usage) == ("queued", True, [], None)
    answer = ended(client, queued.id)
    assert answer.status == "completed" and answer.output_text == whole.output_text and answer.usage == whole.usage
    events = checked(client.responses.retrieve(answer.id, stream=True))
    assert events[-1].response == answer
    for at in (0, 5, len(events) - 2):
        again = checked(client.responses.retrieve(answer.id, stream=True, starting_after=at), first=at + 1)
        assert again == events[at + 1 :]
    nothing = client.responses.retrieve(answer.id, stream=True, starting_after=len(events) - 1)
    assert list(nothing) == []
    followed = create(client, previous_response_id=answer.id)
    assert followed.status == "completed"


def test_a_stream_in_the_background_outlives_its_client(client: openai.OpenAI, generator: ScriptedGenerator) -> None:
    goes_on = False
    generator.script = Script(reply="It rains in the sea.", until=lambda: goes_on)
    stream = create(client, background=True, stream=True)
    first = next(iter(stream))
    assert first.type == "response.created" and first.response.status == "in_progress"
    assert client.responses.retrieve(first.response.id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="it is in_progress"):
        create(client, previous_response_id=first.response.id)
    stream.close()
    goes_on = True
    assert ended(client, first.response.id).output_text == "It rains in the sea."
    checked(client.responses.retrieve(first.response.id, stream=True, starting_after=0), first=1)


def test_what_is_in_the_background_is_cancelled(client: openai.OpenAI, generator: ScriptedGenerator) -> None:
    generator.script = Script(reply="a b c d", hang_after=2)
    stream = create(client, background=True, stream=True)
    events = iter(stream)
    response_id = next(events).response.id
    wait_until(lambda: generator.num_open == 1)
    for _ in range(2):  # what is cancelled stays so
        cancelled = client.responses.cancel(response_id)
        assert (cancelled.status, cancelled.id) == ("cancelled", response_id)
    wait_until(lambda: generator.num_open == 0, what="it goes on")
    last = [event.response for event in events if event.type in LAST]
    assert [response.status for response in last] == ["cancelled"]
    assert client.responses.retrieve(response_id).status == "cancelled"
    deleted = create(client, background=True)
    wait_until(lambda: generator.num_open == 1)
    client.responses.delete(deleted.id)
    wait_until(lambda: generator.num_open == 0, what="what nobody can ask for goes on")


def test_what_cannot_be_cancelled_or_streamed_again(
    client: openai.OpenAI, target: Target, generator: ScriptedGenerator
) -> None:
    answer = create(client)
    with pytest.raises(openai.BadRequestError, match="background: true"):
        client.responses.cancel(answer.id)
    with pytest.raises(openai.BadRequestError, match="background: true"):
        client.responses.retrieve(answer.id, stream=True)
    done = ended(client, create(client, background=True).id)
    with pytest.raises(openai.BadRequestError, match="it is completed"):
        client.responses.cancel(done.id)
    for query in ("starting_after=1", "stream=true&starting_after=-1", "stream=perhaps"):
        assert target.http.get(f"/v1/responses/{done.id}?{query}", headers=OWNER).status_code == 400


def test_the_texts_of_a_turn_are_joined_once() -> None:
    """Of thousands of items: with each of them all before it would be copied."""
    thoughts = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t" * 220}]}] * 15_000
    said = [{"role": "assistant", "content": "s" * 220}] * 15_000
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    for items, expected in (
        (thoughts, {"content": "", "reasoning": "t" * 220 * 15_000}),
        ([call, *said], {"content": "\n".join(["s" * 220] * 15_000), "reasoning": None}),
    ):
        body = ResponsesBody.model_validate({"model": MODEL, "input": items})
        (message,) = chat_of(body, []).messages
        assert {name: getattr(message, name) for name in expected} == expected
        assert in_loop_turns(partial(chat_of, body, [])) < 10e6  # one by one: 40 million and more


def test_who_follows_them_is_bounded(
    client: openai.OpenAI, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.http.background.MOST_FOLLOWED", 1)
    goes_on = False
    generator.script = Script(reply="It rains.", until=lambda: goes_on)
    first = create(client, background=True, stream=True)
    response_id = next(iter(first)).response.id
    for ask in (
        lambda: create(client, background=True, stream=True),
        lambda: client.responses.retrieve(response_id, stream=True),
    ):
        with pytest.raises(openai.RateLimitError, match="followed"):
            ask()
    goes_on = True
    assert [event.type in LAST for event in first][-1]
    checked(client.responses.retrieve(response_id, stream=True))


def test_who_follows_many_leaves_room_for_others(
    client: openai.OpenAI, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.http.background.MOST_FOLLOWED", 4)
    goes_on = False
    generator.script = Script(reply="It rains.", until=lambda: goes_on)
    first = create(client, background=True, stream=True)
    response_id = next(iter(first)).response.id
    second: Any = client.responses.retrieve(response_id, stream=True)
    assert next(iter(second)).response.id == response_id
    with pytest.raises(openai.RateLimitError, match="half of what others leave"):
        client.responses.retrieve(response_id, stream=True)
    third = create(client.with_options(api_key="another"), background=True, stream=True)
    assert next(iter(third)).type == "response.created"
    goes_on = True
    for stream in (first, second, third):
        assert [event.type in LAST for event in stream][-1]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (OverloadedError("Too many. Wait.", retry_after_s=3.0), 429, "rate_limit_exceeded"),
        (FailedError("It failed. Try again."), 500, "server_error"),
        (RequestTooLargeError("It is too large. Send less."), 400, "invalid_prompt"),
    ],
)
def test_errors_of_the_cluster(
    client: openai.OpenAI, generator: ScriptedGenerator, error: ApiError, status: int, code: str
) -> None:
    generator.script = Script(reply="It rains.", fail_after=0, error=error)
    with pytest.raises(openai.APIStatusError, match=str(error)) as failed:
        create(client)
    assert failed.value.status_code == status
    with pytest.raises(openai.NotFoundError):  # it had not begun
        client.responses.retrieve(failed.value.request_id or "")
    before = ended(client, create(client, background=True).id)
    generator.script = Script(reply="It rains.", fail_after=2, error=error)
    events: list[Any] = streamed(client)
    assert (events[-2].type, events[-2].code, events[-2].message) == ("error", error.code, str(error))
    kept: Any = client.responses.retrieve(events[-1].response.id)
    assert kept == events[-1].response and kept.output[0].status == "incomplete"
    with pytest.raises(openai.APIStatusError) as whole:
        create(client)
    assert whole.value.status_code == status and whole.value.request_id is not None
    unseen: Any = client.responses.retrieve(whole.value.request_id)
    after = ended(client, create(client, background=True).id)
    checked(client.responses.retrieve(after.id, stream=True))
    ends = ((before, ""), (kept, "It rains"), (unseen, ""), (after, "It rains"))
    for response, text in ends:
        assert (response.status, response.output_text) == ("failed", text)
        assert (response.error.code, response.error.message) == (code, str(error))
    with pytest.raises(openai.BadRequestError, match="it is failed"):
        create(client, previous_response_id=kept.id)


def test_another_gateway_has_them_too(generator: ScriptedGenerator, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Beside this one and after it: what it generated when it ended has failed."""
    storage = tmp_path / "storage"
    with (
        running_server(generator, tokenizer, storage=storage) as here,
        running_server(generator, tokenizer, storage=storage) as there,
        strict(there) as other,
    ):
        answer, done = create(here.client), create(here.client, background=True)
        assert other.responses.retrieve(answer.id).to_dict() == answer.to_dict()
        checked(other.responses.retrieve(done.id, stream=True))
        generator.script = Script(reply="a b c d", hang_after=2)
        hanging = create(here.client, background=True)
        assert other.responses.cancel(hanging.id).status == "cancelled"
        wait_until(lambda: generator.num_open == 0, what="the other gateway's word does not count")
        lost = create(here.client, background=True)
        wait_until(lambda: here.client.responses.retrieve(lost.id).status == "in_progress")
    generator.script = Script(reply="It rains.")
    with running_server(generator, tokenizer, storage=storage) as after, strict(after) as other:
        assert other.responses.retrieve(answer.id).to_dict() == answer.to_dict()
        followed = create(other, previous_response_id=answer.id)
        assert followed.output_text == "It rains."
        failed = other.responses.retrieve(lost.id)
        assert failed.status == "failed" and failed.error is not None and "has ended" in failed.error.message
        last: Any = checked(other.responses.retrieve(lost.id, stream=True))[-1]
        assert last.response == failed


async def test_what_is_kept(tmp_path: Path) -> None:
    """One that its gateway has given up has failed; the least used go first, of whoever has most."""
    database = Database(tmp_path)
    kept = Responses(database, budget=3_000)

    def response(name: str, **fields: Any) -> StoredResponse:
        known = {"owner": "o", "previous": None, "status": "completed", "is_background": False, "items": "[]"}
        return StoredResponse(id=name, response=json.dumps({"output": ["x" * 900]}), **{**known, **fields})

    await kept.add(response("gone", status="in_progress", is_background=True, runs_until=0.0))
    found = await kept.get("gone", "o")
    assert found.status == "failed" and found.describe()["error"]["code"] == "server_error"
    for name in "abc":
        await kept.add(response(name))
    await kept.add(response("d", previous="a"))
    await kept.conversation("d", "o")  # uses what it follows
    await kept.sweep(0.0)

    def rows(connection: sqlite3.Connection) -> list[sqlite3.Row]:
        return connection.execute("SELECT id FROM responses").fetchall()

    assert {row["id"] for row in await database.transact(rows)} == {"a", "c", "d"}
    for name in "efghi":  # of another owner, who takes from the first what is beyond a half, and no more
        await kept.add(response(name, owner="other"))
        await kept.sweep(0.0)
    names = {row["id"] for row in await database.transact(rows)}
    assert names - {"a", "d"} == {"h", "i"} and len(names) == 3
    await kept.sweep(4e9 + KEPT_S)
    assert await database.transact(rows) == []
    database.close()


async def test_a_conversation_is_found_though_nothing_can_be_written(tmp_path: Path) -> None:
    """That it was used is not noted then, and nobody waits for that."""
    database = Database(tmp_path)
    kept = Responses(database, 10**6)
    known: Any = {"owner": "o", "status": "completed", "is_background": False, "items": "[]", "response": "{}"}
    for name, previous in (("a", None), ("b", "a")):
        await kept.add(StoredResponse(id=name, previous=previous, **known))
    with closing(sqlite3.connect(tmp_path / "records.sqlite", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM responses").fetchall()
        assert [each.id for each in await kept.conversation("b", "o")] == ["a", "b"]
    (waited_ms,) = database._connection.execute("PRAGMA busy_timeout").fetchone()
    assert waited_ms < 1000 * storage.BUSY_S
    database.close()


async def test_events_count_once(tmp_path: Path) -> None:
    """A gateway writes again what it does not know to be written."""
    database = Database(tmp_path)
    kept = Responses(database, budget=10**6)
    known: Any = {"owner": "o", "previous": None, "is_background": True, "items": "[]", "response": "{}"}
    await kept.add(StoredResponse(id="r", status="queued", runs_until=time.time() + HANGS_S, **known))

    def size(connection: sqlite3.Connection) -> int:
        (found,) = connection.execute("SELECT bytes FROM responses").fetchone()
        return int(found)

    before = await database.transact(size)
    for events in (ResponseEvents(0, ("a" * 10, "b" * 100)), ResponseEvents(1, ("b" * 100, "c" * 1000))):
        assert await kept.advance({"r": events}) == {"r"}
    assert await database.transact(size) - before == 1110
    await kept.finish("r", ResponseEvents(1, ("b" * 100, "c" * 1000, "d" * 10000)), "completed", "{}")
    assert await database.transact(size) - before == 11110 + len("{}")
    found, num_events, _ = await kept.events("r", "o", -1, 10)
    assert [(number, event[0]) for number, event in found] == list(enumerate("abcd")) and num_events == 4
    database.close()


async def test_who_follows_a_response_does_not_read_what_it_was_asked_each_time(tmp_path: Path) -> None:
    """Which may have megabytes, and is asked for some times a second by each who follows one."""
    database = Database(tmp_path)
    kept = Responses(database, 2**30)
    known: Any = {"owner": "o", "previous": None, "is_background": True, "items": "[]", "response": '{"a": 1}'}
    await kept.add(StoredResponse(id="r", status="queued", runs_until=time.time() + HANGS_S, **known))
    read: set[str] = set()

    def noted(action: int, table: str | None, column: str | None, *_: str | None) -> int:
        if action == sqlite3.SQLITE_READ and table == "responses":
            read.add(column or "")
        return sqlite3.SQLITE_OK

    await database.in_thread(database._connection.set_authorizer, noted)
    assert await kept.events("r", "o", -1, 10) == ([], 0, None)
    assert read and not read & {"items", "response"}
    await kept.finish("r", ResponseEvents(0, ("a",)), "completed", "{}")
    events, num_events, ended = await kept.events("r", "o", -1, 10)
    assert events == [(0, "a")] and num_events == 1 and ended is not None and ended.response == "{}"
    with pytest.raises(NotFoundError):
        await kept.events("r", "another", -1, 10)
    database.close()


def test_a_large_event_in_the_background_is_read_once(tmp_path: Path) -> None:
    """Its pieces are small, and what came before is not looked at again with each."""
    large = json.dumps({"type": "response.completed", "response": {"output": ["x" * 2**25]}})
    event = f": waiting\n\nevent: response.completed\ndata: {large}\n\n".encode()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for at in range(0, len(event), PIECE_BYTES):
            piece, more = event[at : at + PIECE_BYTES], at + PIECE_BYTES < len(event)
            await send({"type": "http.response.body", "body": piece, "more_body": more})

    async def scenario() -> None:
        database = Database(tmp_path)
        responses = StoredResponses(database, 2**30)
        known: Any = {"owner": "o", "previous": None, "is_background": True, "items": "[]", "response": "{}"}
        async with responses.running():
            await responses.begin(
                StoredResponse(id="r", status="queued", runs_until=time.time() + HANGS_S, **known), answer
            )
            async with aclosing(responses.follow("r", "o", -1)) as followed:
                async for _ in followed:  # to its end
                    pass
            found = await responses.kept.get("r", "o")
            assert (await responses.kept.events("r", "o", -1, 10))[0] == []  # a comment is none
        assert found.status == "completed" and len(found.response) > 2**25
        database.close()

    # 8 million, and three times as many where others use the memory that all of it is copied to some times. Each piece
    # looked at with all before it: 290 million.
    assert in_loop_turns(lambda: asyncio.run(scenario())) < 80e6


async def test_a_disk_that_is_full_for_a_moment_costs_nothing_in_the_background(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the events that come meanwhile nor the response, which ends then."""
    database = Database(tmp_path)
    responses = StoredResponses(database, 2**30)
    kinds = [*["response.output_text.delta"] * 3, "response.completed"]
    events = [f"event: {kind}\ndata: {json.dumps({'type': kind, 'response': {}})}" for kind in kinds]
    events[0] += " " * 10**6  # which needs room

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for event in events:
            await send({"type": "http.response.body", "body": f"{event}\n\n".encode(), "more_body": True})

    async def limit(num_pages: int) -> None:
        await database.in_thread(database._connection.execute, f"PRAGMA max_page_count = {num_pages}")

    known: Any = {"owner": "o", "previous": None, "is_background": True, "items": "[]", "response": "{}"}
    async with responses.running():
        queued = StoredResponse(id="r", status="queued", runs_until=time.time() + HANGS_S, **known)
        await responses.begin(queued, answer)
        await limit(1)  # it keeps those that it has
        await eventually(lambda: bool(caplog.records))
        assert "tried again" in caplog.text and "lost" not in caplog.text
        await limit(2**30)
        async with aclosing(responses.follow("r", "o", -1)) as followed:
            told = b"".join([piece async for piece in followed]).decode()
        assert (await responses.kept.get("r", "o")).status == "completed"
    shown = [event for event in told.split("\n\n") if event.startswith("event: ")]  # besides comments
    assert shown[:3] == events[:3] and len(shown) == 4
    database.close()


async def test_who_reads_the_database_for_long_ends_nothing_in_the_background(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody can prolong a claim meanwhile: neither the response nor the stream of who follows it here."""
    monkeypatch.setattr(storage, "CLAIM_S", 0.0)
    monkeypatch.setattr(storage, "BUSY_S", 0.0)
    database = Database(tmp_path)
    responses, may_end = StoredResponses(database, 2**30), asyncio.Event()
    async with responses.running():
        await responses.begin(in_background("r"), answering(may_end))
        following = asyncio.ensure_future(followed(responses, "r"))
        reader = sqlite3.connect(tmp_path / "records.sqlite", isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM responses").fetchall()
        await eventually(lambda: "tried again" in caplog.text)
        for _ in range(2):  # it is looked at more than once
            assert (await responses.kept.get("r", "o")).status == "queued"
        reader.close()
        may_end.set()
        await eventually(lambda: not responses._runs)
        assert (await responses.kept.get("r", "o")).status == "completed"
        assert "response.completed" in await following
    database.close()


async def test_who_keeps_everybody_out_of_the_database_ends_no_stream_at_another_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "BUSY_S", 0.0)
    databases = [Database(tmp_path), Database(tmp_path)]
    (here, there), may_end = [StoredResponses(database, 2**30) for database in databases], asyncio.Event()
    async with here.running():
        await here.begin(in_background("r"), answering(may_end))
        following = asyncio.ensure_future(followed(there, "r"))
        with closing(sqlite3.connect(tmp_path / "records.sqlite", isolation_level=None, timeout=HANGS_S)) as other:
            other.execute("BEGIN EXCLUSIVE")
            await eventually(lambda: databases[1].failed_at > 0.0)
            assert not following.done()
        may_end.set()
        assert "response.completed" in await following
    for database in databases:
        database.close()


async def test_no_response_is_lost_by_who_keeps_its_gateway_from_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another gateway that waited for a reader as its gateway does could be first where that ends."""
    monkeypatch.setattr(storage, "CLAIM_S", 0.0)
    monkeypatch.setattr(storage, "BUSY_S", 2 * HANGS_S)
    databases = [Database(tmp_path), Database(tmp_path)]
    here, there = (Responses(database, 10**6) for database in databases)
    await here.add(in_background("r"))
    assert (await there.get("r", "o")).status == "queued"  # from here on it knows the claim
    with closing(sqlite3.connect(tmp_path / "records.sqlite", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM responses").fetchall()
        async with asyncio.timeout(HANGS_S):
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                await there.get("r", "o")
    assert await here.advance({"r": ResponseEvents(0, ("event: x",))}) == {"r"}
    assert (await there.get("r", "o")).status == "in_progress"
    assert (await there.get("r", "o")).status == "failed", "nobody prolongs it"
    for database in databases:
        database.close()


def in_background(response_id: str) -> StoredResponse:
    """One that is to be generated, by a gateway whose clock is far behind."""
    known: Any = {"owner": "o", "previous": None, "is_background": True, "items": "[]", "response": "{}"}
    return StoredResponse(id=response_id, status="queued", runs_until=5.0, **known)


def answering(may_end: asyncio.Event) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await may_end.wait()
        await send({"type": "http.response.body", "body": b'event: response.completed\ndata: {"response":{}}\n\n'})

    return answer


async def followed(responses: StoredResponses, response_id: str) -> str:
    """All that a client is told that follows a response to its end."""
    async with aclosing(responses.follow(response_id, "o", -1)) as events:
        return b"".join([piece async for piece in events]).decode()


async def test_a_claim_lasts_from_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that waited, behind writes that a reader keeps out, say. By this, gateways of older versions go."""
    monkeypatch.setattr("cluster.batch.stored_responses.CLAIM_S", HANGS_S)
    database = Database(tmp_path)
    kept, may_go_on = Responses(database, 10**6), threading.Event()
    known: Any = {"owner": "o", "previous": None, "is_background": True, "items": "[]", "response": "{}"}
    await kept.add(StoredResponse(id="r", status="queued", runs_until=time.time() + HANGS_S, **known))
    before = asyncio.ensure_future(database.in_thread(may_go_on.wait))
    advancing = asyncio.ensure_future(kept.advance({"r": ResponseEvents(0, ())}))
    await asyncio.sleep(0)
    waited_until = time.time()
    may_go_on.set()
    await asyncio.gather(before, advancing)
    found = await kept.get("r", "o")
    assert found.runs_until is not None and found.runs_until >= waited_until + HANGS_S
    database.close()


async def test_an_end_that_cannot_be_written_is_told_and_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the claim is prolonged meanwhile; and not before a second try, since the first may wait for long."""
    monkeypatch.setattr(background, "_FINISH_S", 0.0)
    database = Database(tmp_path)
    responses, tries = StoredResponses(database, 2**30), list[str]()

    async def finish(response_id: str, *args: object) -> None:
        tries.append(response_id)
        assert len(tries) <= 2
        raise sqlite3.OperationalError("database is locked")

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'event: response.completed\ndata: {"response":{}}\n\n'})

    monkeypatch.setattr(responses.kept, "finish", finish)
    known: Any = {"owner": "o", "previous": None, "is_background": True, "items": "[]", "response": "{}"}
    async with responses.running():
        queued = StoredResponse(id="r", status="queued", runs_until=time.time() + HANGS_S, **known)
        await responses.begin(queued, answer)
        await eventually(lambda: not responses._runs)
    assert tries == ["r", "r"]
    told = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert told == ["the end of r can't be written, which is tried again", "the response r is lost"]
    database.close()


def test_without_a_folder(generator: ScriptedGenerator, tokenizer: Tokenizer) -> None:
    with running_server(generator, tokenizer) as target, strict(target) as client:
        for answer in both(client):
            assert answer.output_text == "It rains." and answer.store is False
        assert create(client, store=True).store is False
        for fields in ({"background": True}, {"previous_response_id": answer.id}):
            with pytest.raises(openai.BadRequestError, match=r"gateway\.storage") as refused:
                create(client, **fields)
            assert refused.value.code == "no_storage" and refused.value.param in fields
        for ask in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match=r"gateway\.storage"):
                ask(answer.id)


def test_a_disk_that_is_full_costs_nobody_an_answer(
    client: openai.OpenAI, target: Target, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*args: Any) -> None:
        raise OSError("no space is left")

    monkeypatch.setattr(Responses, "add", full)
    for answer in both(client):
        assert (answer.output_text, answer.store) == ("It rains.", False)


@pytest.mark.parametrize(
    ("fields", "param", "mention"),
    [
        ({"input": None}, "input", "input"),
        ({"input": []}, "input", "items"),
        ({"input": [], "instructions": ""}, "input", "items"),
        ({"input": {}}, "input", "items"),
        ({"input": [5]}, "input", "item 0"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "role"),
        ({"input": [{"role": "user", "content": "x", "stranger": 1}]}, "input[0].stranger", "stranger"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content",
         "input_image"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "previous_response_id"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input", "web_search_call"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "a b", "arguments": ""}]}, "input[0].name",
         "a b"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "missing"),
        ({"model": "nothing"}, "model", MODEL),
        ({"stranger": 1}, "stranger", "stranger"),
        ({"messages": []}, "messages", "messages"),
        ({"tools": [{"type": "web_search_preview"}]}, "tools", "web_search_preview"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools", "custom"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "custom", "name": "x"}]}]}, "tools",
         "custom"),
        ({"tools": [{"type": "namespace", "name": "a b", "tools": [WEATHER]}]}, "tools[0].name", "a b"),
        ({"tools": [{"type": "namespace", "name": "a b", "tools": []}]}, "tools[0].name", "a b"),
        ({"tools": [{"type": "namespace", "name": "x", "stranger": 1, "tools": []}]}, "tools[0].stranger", "stranger"),
        ({"tools": [{**WEATHER, "namespace": {"name": "x"}}]}, "tools", "tool 0 names a namespace"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "namespace", "tools": []}]}]}, "tools",
         "namespace"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [WEATHER]}, {**WEATHER, "name": "x__weather"}]},
         "tools", "same name"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "same name"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name", "a b"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice", "not among"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather", "namespace": "x"}}, "tool_choice",
         "not among"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather", "namespace": {}}}, "tool_choice",
         "a function is written"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "file_search"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format", "yaml"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format", "followed"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary", "summary"),
        ({"tools": [{**WEATHER, "async": True}]}, "tools[0].async", "not supported"),
        ({"reasoning": {"effort": "immense"}}, "reasoning.effort", "effort"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"include": ["everything"]}, "include[0]", "include"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"max_output_tokens": 10**9}, "input", "lower max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs", "20"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "512"),
        ({"stream_options": {}}, "stream_options", "stream"),
        ({"background": True, "store": False}, "background", "store"),
        ({"previous_response_id": "resp_none"}, "previous_response_id", "resp_none"),
    ],
)  # fmt: skip
def test_refusals(
    target: Target, generator: ScriptedGenerator, fields: dict[str, Any], param: str, mention: str
) -> None:
    sent = {name: value for name, value in {"model": MODEL, "input": ASKED, **fields}.items() if value is not None}
    answer = target.http.post("/v1/responses", json=sent)
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] == param and mention in error["message"] and error["message"].endswith("."), answer.text
    assert not generator.requests
