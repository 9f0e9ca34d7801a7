"""Anthropic's Messages API as Anthropic's own client sees it, with scripted tokens.

The client validates strictly: whatever does not fit the API's own types, whole or as an event, fails.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal

import pydantic
import pytest

from cluster.errors import FailedError, OverloadedError, UnavailableError
from cluster.http.endpoints.messages import CountTokensBody, chat_of
from cluster.http.openai.schemas import ChatBody
from engine.text.formats import REASONING_FORMATS, ReasoningFormat
from engine.text.tokenizer import Tokenizer
from tests.support.http_server import MODEL, running_server
from tests.support.openai_conformance import Target
from tests.support.processor_time import in_loop_turns
from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.waiting import HANGS_S

if TYPE_CHECKING:
    import anthropic  # some three thousand modules, which only those import that run these tests

pytestmark = pytest.mark.model

ASKED: Final[list[Any]] = [{"role": "user", "content": "Tell me about the weather."}]
WEATHER: Final[dict[str, Any]] = {
    "name": "weather",
    "description": "The weather of a place.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
CALLS: Final = (
    'I will look.\n<tool_call>\n{"name": "weather", "arguments": {"place": "Paris é🦜"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
)


class City(pydantic.BaseModel):
    name: Literal["Paris", "Rome"]


@pytest.fixture(scope="module")
def target(shared_generator: ScriptedGenerator, tokenizer: Tokenizer) -> Iterator[Target]:
    with running_server(shared_generator, tokenizer, reasoning_format="think") as target:
        yield target


@pytest.fixture(scope="module")
def client(target: Target) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(
        base_url=str(target.http.base_url),
        api_key="a key",
        max_retries=0,
        timeout=HANGS_S,
        _strict_response_validation=True,
    ) as client:
        yield client


@pytest.fixture
def generator(shared_generator: ScriptedGenerator) -> Iterator[ScriptedGenerator]:
    with shared_generator.following(Script(reply="It rains.")) as generator:
        yield generator


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": ASKED, "max_tokens": 100, **fields}


def both(client: anthropic.Anthropic, **fields: Any) -> list[Any]:
    """The answer whole, and what the client's accumulator makes of a stream."""
    whole: Any = client.messages.create(**asked(**fields))
    with client.messages.stream(**asked(**fields)) as stream:
        return [whole, stream.get_final_message()]


def test_text_whole_and_streamed(client: anthropic.Anthropic, generator: ScriptedGenerator) -> None:
    for answer in both(client):
        assert answer.id.startswith("msg") and (answer.role, answer.model, answer.type) == (
            "assistant",
            MODEL,
            "message",
        )
        assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "It rains."}]
        assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
        usage = answer.usage
        num_prompt = len(generator.requests[0].prompt_token_ids)
        assert usage.cache_read_input_tokens == num_prompt // 2 and usage.output_tokens > 1
        assert usage.input_tokens + usage.cache_read_input_tokens == num_prompt


def test_events_of_a_stream(client: anthropic.Anthropic, generator: ScriptedGenerator) -> None:
    """In the order that the API promises, and of types that the client's own models take."""
    generator.script.reply = f"<think>\nhm\n</think>\n\n{CALLS}"
    with client.messages.create(**asked(tools=[WEATHER], stream=True)) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    blocks: list[tuple[int, str]] = []
    is_open = False
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert not is_open
            blocks.append((event.index, event.content_block.type))
            is_open = True
        else:
            assert is_open and event.index == blocks[-1][0]
            is_open = event.type != "content_block_stop"
    assert not is_open
    assert blocks == [(0, "thinking"), (1, "text"), (2, "tool_use"), (3, "tool_use")]


def test_a_conversation_of_calls_and_results(client: anthropic.Anthropic, generator: ScriptedGenerator) -> None:
    generator.script.reply = f"<think>\nIs it rain?\n</think>\n\n{CALLS}"
    answers = both(client, tools=[WEATHER], tool_choice={"type": "auto"}, thinking={"type": "adaptive"})
    for answer in answers:
        thinking, text, paris, nowhere = answer.content
        assert thinking.type == "thinking" and thinking.thinking == "Is it rain?"
        assert text.type == "text" and text.text == "I will look."
        assert paris.type == nowhere.type == "tool_use" and answer.stop_reason == "tool_use"
        assert (paris.name, paris.input, nowhere.input) == ("weather", {"place": "Paris é🦜"}, {})
        assert paris.id.startswith("toolu_") and paris.id != nowhere.id
    generator.script.reply = "It rains."
    generator.requests.clear()
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": paris.id, "content": [{"type": "text", "text": "Rain."}]},
        {"type": "tool_result", "tool_use_id": nowhere.id, "content": "Where?", "is_error": True},
        {"type": "text", "text": "And now?"},
    ]
    history = [*ASKED, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    followed = client.messages.create(
        **asked(messages=history, tools=[WEATHER], system=[{"type": "text", "text": "Hi"}])
    )
    assert followed.stop_reason == "end_turn"
    (prompt,) = generator.prompts()
    assert "system\nHi\n\n# Tools" in prompt and '<tool_call>\n{"name": "weather", "arguments": {"place"' in prompt
    assert "<tool_response>\nRain.\n</tool_response>\n<tool_response>\nWhere?\n</tool_response>" in prompt
    assert prompt.endswith("user\nAnd now?<|im_end|>\n<|im_start|>assistant\n")


def test_what_is_said_around_calls_is_told_again(client: anthropic.Anthropic, generator: ScriptedGenerator) -> None:
    """Texts side by side are one; those that a call is between are lines."""
    generator.script.reply = f"{CALLS} Then I say."
    answer = client.messages.create(**asked(tools=[WEATHER]))
    content = [*answer.content, {"type": "text", "text": " And now."}]
    client.messages.create(**asked(messages=[*ASKED, {"role": "assistant", "content": content}, *ASKED]))
    assert "assistant\nI will look.\nThen I say. And now.\n<tool_call>" in generator.prompts()[-1]


def test_empty_texts_are_no_lines(client: anthropic.Anthropic, generator: ScriptedGenerator) -> None:
    call: dict[str, Any] = {"type": "tool_use", "id": "1", "name": "weather", "input": {}}
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "1", "content": "Rain."}
    for texts, told in (("", "B"), "B"), (("A", ""), "A"), (("A", "", "B"), "A\nB"):
        first, *others = ({"type": "text", "text": text} for text in texts)
        said = {"role": "assistant", "content": [first, call, *others]}
        client.messages.create(**asked(messages=[*ASKED, said, {"role": "user", "content": [result]}]))
        assert f"assistant\n{told}\n<tool_call>" in generator.prompts()[-1]


def test_a_call_that_failed_without_a_word_is_told_as_failed(
    client: anthropic.Anthropic, generator: ScriptedGenerator
) -> None:
    said = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "weather", "input": {}}]}
    some: list[tuple[dict[str, Any], str]] = [({}, "Error"), ({"content": []}, "Error"), ({"is_error": False}, "")]
    for fields, told in some:
        result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "1", "is_error": True, **fields}
        client.messages.create(**asked(messages=[*ASKED, said, {"role": "user", "content": [result]}]))
        assert f"<tool_response>\n{told}\n</tool_response>" in generator.prompts()[-1]


def test_the_thoughts_of_a_turn_are_joined_once() -> None:
    """Of thousands of blocks: with each of them all before it would be copied."""
    blocks = [{"type": "thinking", "thinking": "t" * 160}] * 20_000
    body = CountTokensBody.model_validate({"model": MODEL, "messages": [{"role": "assistant", "content": blocks}]})

    def chat() -> ChatBody:
        return chat_of(body, switches_thinking=False, bounds_thinking=False)

    assert chat().messages[0].reasoning == "t" * 160 * 20_000
    assert in_loop_turns(chat) < 10e6  # one by one: 55 million


def test_what_is_meant_for_bills_is_no_part_of_the_prompt(
    client: anthropic.Anthropic, generator: ScriptedGenerator
) -> None:
    """Claude Code's first block has another hash in each request, behind which no cached prefix would be found."""
    system: list[Any] = [{"type": "text", "text": text} for text in ("You are Claude Code.", "Be brief.")]
    for sent in ("cch=fa690", "cch=0aaa9", None):
        bill = {
            "type": "text",
            "text": f"x-anthropic-billing-header: cc_version=2.1.37.0d9; {sent};",
        }
        client.messages.create(**asked(system=system if sent is None else [bill, *system]))
    first, *others = generator.prompts()
    assert others == [first, first] and "system\nYou are Claude Code.\n\nBe brief.<" in first
    client.messages.create(**asked(system=[bill]))
    client.messages.create(**asked())
    *_, billed, plain = generator.prompts()
    assert billed == plain
    whole = f"{bill['text']}\n\nYou are Claude Code.\n\nBe brief."  # what proxies make of the blocks
    for joined in (whole, [{"type": "text", "text": whole}]):
        client.messages.create(**asked(system=joined))
        assert generator.prompts()[-1] == first


def test_examples_of_a_tool_are_told_with_its_schema(client: anthropic.Anthropic, generator: ScriptedGenerator) -> None:
    generator.script.reply = CALLS
    client.messages.create(
        **asked(tools=[{**WEATHER, "input_examples": [{"place": "Oslo"}]}], tool_choice={"type": "any"})
    )
    assert '"examples": [{"place": "Oslo"}]' in generator.prompts()[0]


def test_a_budget_of_thinking(
    target: Target, generator: ScriptedGenerator, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept where the marks are tokens of their own. Elsewhere there is none: clients that think send one always,
    and know nothing of a model's marks."""
    fields = asked(thinking={"type": "enabled", "budget_tokens": 9})
    assert target.http.post("/v1/messages", json=fields).status_code == 200
    assert generator.requests.pop().params.thinking_budget is None
    known = ReasoningFormat(opening="<issue_start>", closing="<issue_closed>", template_words=())
    monkeypatch.setitem(REASONING_FORMATS, "think", known)
    with running_server(generator, tokenizer, reasoning_format="think") as bounded:
        assert bounded.http.post("/v1/messages", json=fields).status_code == 200
    assert generator.requests.pop().params.thinking_budget == 9


def test_how_it_stopped(client: anthropic.Anthropic, generator: ScriptedGenerator) -> None:
    for answer in both(client, stop_sequences=["ra", "q"]):
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "ra")
        assert answer.content[0].to_dict()["text"] == "It "
    for answer in both(client, max_tokens=1):
        assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 1)
    generator.script.reply = CALLS
    (whole, _) = both(client, tools=[WEATHER], max_tokens=24)
    assert whole.stop_reason == "max_tokens" and whole.content[-1].type == "tool_use"


@pytest.mark.parametrize("reply", ["It rains. <", "<think>Hm. </thi", "It rains.\n<tool_call>\nnow, I say "])
def test_a_whole_answer_has_the_blocks_of_a_stream(
    client: anthropic.Anthropic, generator: ScriptedGenerator, reply: str
) -> None:
    """Also where its end might have been the beginning of a mark."""
    generator.script.reply = reply
    whole, streamed = (
        [(block.type, block.thinking if block.type == "thinking" else block.text) for block in answer.content]
        for answer in both(client, tools=[WEATHER])
    )
    assert whole == streamed and len(whole) == 1


@pytest.mark.parametrize(
    "arguments", ["{place: Paris}", '{"days": NaN}', '{"days": [-Infinity]}', '{"a": {"days": 1e999}}']
)
def test_a_call_that_cannot_be_read_is_none(
    client: anthropic.Anthropic, generator: ScriptedGenerator, arguments: str
) -> None:
    """Nor does the answer say that it waits for a result."""
    generator.script.reply = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    answer = client.messages.create(**asked(tools=[WEATHER]))
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": f"weather({arguments})"}]
    assert answer.stop_reason == "end_turn"


def test_a_function_may_have_a_long_name(client: anthropic.Anthropic, generator: ScriptedGenerator) -> None:
    """Anthropic's bound, which names of functions behind MCP come near to."""
    name = "mcp__" + "a" * 123
    generator.script.reply = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
    for answer in both(client, tools=[{**WEATHER, "name": name}]):
        assert answer.content[0].name == name


def test_what_is_generated_is_what_was_asked_for(client: anthropic.Anthropic, generator: ScriptedGenerator) -> None:
    client.messages.create(
        **asked(
            messages=[*ASKED, {"role": "assistant", "content": "In short:"}],
            metadata={"user_id": "u"},
            extra_body={"temperature": 0.5, "top_p": 0.75, "top_k": 7},
        )
    )
    (request,), (prompt,) = generator.requests, generator.prompts()
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (100, 0.5, 0.75, 7)
    assert prompt.endswith("assistant\nIn short:")  # to be continued


def test_one_key_is_one_client(client: anthropic.Anthropic, target: Target, generator: ScriptedGenerator) -> None:
    """Whose it is, and whose prefixes it may use, is the same in both APIs."""
    client.messages.create(**asked())
    target.http.post("/v1/messages", json=asked(), headers={"authorization": "Bearer a key"})
    target.http.post("/v1/messages", json=asked(), headers={"x-api-key": "another"})
    ours, same, other = generator.requests
    assert ours.cache_salt == same.cache_salt != other.cache_salt and ours.cache_salt
    tenants = [terms.tenant for terms in generator.terms]
    assert tenants[0] == tenants[1] != tenants[2]


def test_tokens_are_counted(client: anthropic.Anthropic, generator: ScriptedGenerator) -> None:
    fields: Any = {"model": MODEL, "messages": ASKED, "tools": [WEATHER], "system": "Be brief."}
    counted = client.messages.count_tokens(**fields).input_tokens
    client.messages.create(**fields, max_tokens=1)
    assert counted == len(generator.requests[0].prompt_token_ids)


def test_an_answer_of_a_schema(client: anthropic.Anthropic, generator: ScriptedGenerator) -> None:
    """By the client's own way to ask for one."""
    import anthropic

    generator.script.reply = '{"name":"Paris"}'
    assert client.messages.parse(**asked(output_format=City)).parsed_output == City(name="Paris")
    (request,) = generator.requests
    assert request.params.grammar is not None
    older = {"type": "json_schema", "schema": anthropic.transform_schema(City)}  # as in the beta
    client.messages.create(**asked(extra_body={"output_format": older}))
    assert generator.requests[1].params.grammar == request.params.grammar


def test_a_tool_runner(client: anthropic.Anthropic, generator: ScriptedGenerator) -> None:
    """It would have the server hold the conversation, and goes on without."""
    import anthropic

    @anthropic.beta_tool
    def weather(place: str) -> str:
        """The weather of a place."""
        generator.script.reply = f"In {place} it rains."
        return "Rain."

    generator.script.reply = '<tool_call>\n{"name": "weather", "arguments": {"place": "Paris"}}\n</tool_call>'
    runner = client.beta.messages.tool_runner(**asked(tools=[weather], max_iterations=3))
    (*_, last) = [message.content[0] for message in runner]
    assert last.type == "text" and last.text == "In Paris it rains."


def test_what_asks_for_nothing_is_taken(target: Target, generator: ScriptedGenerator) -> None:
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    some: list[dict[str, Any]] = [
        {"context_management": keep, "thread": None, "speed": "standard", "mcp_servers": [], "container": None},
        {"context_management": {}, "diagnostics": None, "inference_geo": None, "fallbacks": []},
        {"tools": [{**WEATHER, "defer_loading": False, "allowed_callers": ["direct"]}], "user_profile_id": None},
        {"thinking": {"type": "between_tools"}},
    ]
    for fields in some:
        answer = target.http.post("/v1/messages", json=asked(**fields), params={"beta": "true"})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (OverloadedError("Too many. Wait.", retry_after_s=3.0), 429, "rate_limit_error"),
        (UnavailableError("No worker. Wait.", retry_after_s=3.0), 503, "overloaded_error"),
        (FailedError("It failed. Try again."), 500, "api_error"),
    ],
)
def test_errors_of_the_cluster(
    client: anthropic.Anthropic, generator: ScriptedGenerator, error: Exception, status: int, kind: str
) -> None:
    import anthropic

    generator.script.error = error
    generator.script.fail_after = 0
    with pytest.raises(anthropic.APIStatusError) as failed:
        client.messages.create(**asked())
    assert failed.value.status_code == status
    assert failed.value.body == {"type": "error", "error": {"type": kind, "message": str(error)}}
    generator.script.fail_after = 2
    with pytest.raises(anthropic.APIStatusError) as failed, client.messages.stream(**asked()) as stream:
        stream.until_done()
    assert failed.value.body == {"type": "error", "error": {"type": kind, "message": str(error)}}


@pytest.mark.parametrize(
    ("fields", "mention"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stranger": 1}, "stranger"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "redacted_thinking", "data": "x"}]}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1",
          "content": [{"type": "image"}]}]}]}, "image"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]}, "input"),
        ({"system": 5}, "system"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "name"),
        ({"tools": [{**WEATHER, "name": "a" * 129}]}, "name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "not among the tools"),
        ({"temperature": 1.5}, "temperature"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format cannot"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}, "stranger": 1}}}, "format.stranger"),
        ({"output_format": {"type": "json_schema", "schema": {"not": {}}}}, "output_format cannot"),
        ({"output_format": {"type": "json_schema", "schema": {}},
          "output_config": {"format": {"type": "json_schema", "schema": {}}}}, "Send one of them"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{**WEATHER, "allowed_callers": ["direct", "code_execution_20250825"]}]}, "allowed_callers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "nothing is taken out"),
        ({"context_management": 5}, "nothing is taken out"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"speed": "fast"}, "speed"),
        ({"max_tokens": 10**9}, "context"),
    ],
)  # fmt: skip
def test_refusals(target: Target, generator: ScriptedGenerator, fields: dict[str, Any], mention: str) -> None:
    sent = {name: value for name, value in asked(**fields).items() if value is not None}
    answer = target.http.post("/v1/messages", json=sent)
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert error.keys() == {"type", "error"} and error["type"] == "error"
    assert error["error"].keys() == {"type", "message"} and error["error"]["type"] == "invalid_request_error"
    assert mention in error["error"]["message"], json.dumps(error)


def test_a_thread_is_refused_in_its_clients_words(target: Target) -> None:
    answer = target.http.post("/v1/messages", json=asked(thread={"type": "create"}))
    assert answer.status_code == 400 and "send all of its messages" in answer.json()["error"]["message"]
    details = answer.json()["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_refusals_before_a_body_is_read(target: Target) -> None:
    kinds = {
        "not_found_error": target.http.post("/v1/messages", json=asked(model="nothing")),
        "request_too_large": target.http.post("/v1/messages", content=b"[" + b"1," * 300_000 + b"1]"),
        "invalid_request_error": target.http.get("/v1/messages"),
    }
    for kind, answer in kinds.items():
        assert answer.json()["error"]["type"] == kind and answer.status_code in (404, 405, 413), answer.text
