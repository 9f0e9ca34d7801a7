"""Calls of functions and reasoning over HTTP, as OpenAI's client sees them, with scripted tokens."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import openai
import pytest
from llguidance import LLMatcher
from openai.lib.streaming.chat import ChunkEvent

from cluster.errors import InvalidRequestError
from cluster.http.endpoints.messages import MessagesBody
from cluster.http.endpoints.messages import chat_of as messages_chat
from cluster.http.openai.events import Reading, new_call_id
from cluster.http.openai.responses import ResponsesBody
from cluster.http.openai.responses import chat_of as responses_chat
from cluster.http.openai.schemas import ChatBody
from cluster.http.openai.structured import compiled
from cluster.http.openai.tools import constrained, told_calls, told_tools
from cluster.http.parse import prepare_chat
from cluster.http.prompts import chat_token_ids
from cluster.slo.classes import RequestTerms
from engine.sampling.grammar import GrammarMasks, allowed_by, grammar_tokenizer
from engine.sequence import Sequence
from engine.text.formats import REASONING_FORMATS, TOOL_FORMATS, OutputFormats, ReasoningFormat
from engine.text.output import OutputParser
from engine.text.tokenizer import Tokenizer
from tests.support.http_server import MODEL, running_server, scripted_api
from tests.support.openai_conformance import MESSAGES, Target
from tests.support.scripted_generator import MAX_MODEL_LEN, Script, ScriptedGenerator
from tests.support.thinker import HARMONY_TEMPLATE, replace
from tests.support.thinker import thinker as thinker_in

pytestmark = pytest.mark.model

TERMS = RequestTerms()
WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
TIME: Final[dict[str, Any]] = {"type": "function", "function": {"name": "time"}}
TOOLS: Final[list[Any]] = [WEATHER, TIME]
PARIS, OSLO = '{"place": "Paris"}', '{"place": "Oslo é🦜"}'
CALLS: Final = (
    f'I will look.\n<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def thinker(shared_generator: ScriptedGenerator, tokenizer: Tokenizer) -> Iterator[Target]:
    """The same model, said to think between marks."""
    with running_server(shared_generator, tokenizer, reasoning_format="think") as target:
        yield target


@pytest.fixture
def generator(shared_generator: ScriptedGenerator) -> Iterator[ScriptedGenerator]:
    with shared_generator.following(Script(reply=CALLS)) as generator:
        yield generator


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def streamed(target: Target, **fields: Any) -> Any:
    """The choices that OpenAI's own accumulator makes of a stream, and all chunks."""
    chunks = []
    with target.strict.chat.completions.stream(model=MODEL, messages=MESSAGES, **fields) as stream:
        chunks += [event.chunk for event in stream if isinstance(event, ChunkEvent)]
        return stream.get_final_completion().choices, chunks


def test_calls_whole_and_streamed(target: Target, generator: ScriptedGenerator) -> None:
    (whole,) = target.chat(tools=TOOLS).choices
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", "I will look.")
    assert calls_of(whole.message) == [("weather", PARIS), ("weather", OSLO)]
    (choice,), chunks = streamed(target, tools=TOOLS)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I will look.")
    assert calls_of(choice.message) == calls_of(whole.message)
    ids = [call.id for answer in (whole, choice) for call in answer.message.tool_calls]
    assert len(set(ids)) == 4 and all(call_id.startswith("call_") for call_id in ids)
    pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [call.function.name for call in pieces if call.id] == ["weather", "weather"]
    assert not any("tool_call>" in (chunk.choices[0].delta.content or "") for chunk in chunks)


def test_texts_around_calls_are_one_content(target: Target, generator: ScriptedGenerator) -> None:
    """Not run together: each is a line."""
    generator.script.reply = f"{CALLS} Then I say.\n\n{CALLS[CALLS.index('<') :]}\nAnd now."
    (whole,) = target.chat(tools=TOOLS).choices
    (choice,), _ = streamed(target, tools=TOOLS)
    for answer in (whole, choice):
        assert answer.message.content == "I will look.\nThen I say.\nAnd now." and len(calls_of(answer.message)) == 4
    (whole,) = target.chat(tools=TOOLS, parallel_tool_calls=False).choices
    (choice,), _ = streamed(target, tools=TOOLS, parallel_tool_calls=False)
    for answer in (whole, choice):
        assert answer.message.content == "I will look.\nThen I say.\nAnd now." and len(calls_of(answer.message)) == 1


def test_arguments_are_streamed_as_they_come(target: Target, generator: ScriptedGenerator) -> None:
    generator.script.hang_after = len(target.tokenize(CALLS[: CALLS.index("Paris")]))
    stream = target.chat(tools=TOOLS, stream=True)
    arguments = ""
    for chunk in stream:
        arguments += "".join(call.function.arguments or "" for call in chunk.choices[0].delta.tool_calls or ())
        if arguments.startswith('{"place":'):
            break
    stream.close()


def test_the_model_is_told_of_its_tools(target: Target, generator: ScriptedGenerator, tokenizer: Tokenizer) -> None:
    """SmolLM2's template knows none, so they are in its system message."""

    def prompt(**fields: Any) -> str:
        generator.requests.clear()
        target.chat(**fields)
        return tokenizer.decode(generator.requests[0].prompt_token_ids, skip_special_tokens=False)

    asked = prompt(tools=TOOLS)
    assert "<tools>" in asked and "The weather of a place." in asked and '"name": "time"' in asked
    plain = prompt()
    assert "tool" not in plain and plain == prompt(tools=TOOLS, tool_choice="none") == prompt(tools=[])
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": PARIS}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    ]
    told = prompt(tools=TOOLS, messages=history)
    assert f'assistant\n<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>' in told
    assert "user\n<tool_response>\nRain.\n</tool_response>" in told


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of a model that thinks. Read once: a second or so goes into each."""
    return Tokenizer(thinker_in(tmp_path_factory.mktemp("thinker") / "model"))


class TemplatedTokenizer(Tokenizer):
    """Another one with a chat template of its own. Notes the threads in which chats are rendered."""

    def __init__(self, like: Tokenizer, template: str) -> None:
        vars(self).update(vars(like), _chat_templates={"default": template})
        self.threads: set[threading.Thread] = set()

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> list[int]:
        self.threads.add(threading.current_thread())
        return super().apply_chat_template(*args, **kwargs)


async def prompt_of(messages: list[Any], tokenizer: Tokenizer) -> str:
    asked = await scripted_api(ScriptedGenerator(tokenizer), tokenizer).find_model(MODEL)
    body = ChatBody.model_validate({"model": MODEL, "tools": TOOLS, "messages": messages})
    job = await prepare_chat(body, asked, TERMS)
    return tokenizer.decode(job.choices[0].spec.prompt_token_ids, skip_special_tokens=False)


# In what Hermes 3's template for tools takes for granted: a description, and types that it knows.
APART: Final = """{%- macro kind(schema) -%}
{%- set names = {"string": "str", "integer": "int"} -%}
{%- if names[schema.type] is defined -%}{{ names[schema.type] }}
{%- elif schema.type is iterable -%}{% for one in schema.type %}{{ kind({"type": one}) }}|{% endfor %}
{%- else -%}any{%- endif -%}
{%- endmacro -%}
<|im_start|>system
{% for tool in tools %}{% set f = tool.function %}
{%- for name, schema in f.parameters.properties.items() %}{{ f.name }}({{ name }}: {{ kind(schema) }}){% endfor %}
{{- f.name + " - " + f.description }}
{% endfor %}<tool_call><|im_end|>
{% for message in messages %}{% if message.tool_calls is defined %}{{ message.tool_calls[0].function.name }} was called
{% else %}{{ message.role + ": " + message.content }}
{% endif %}{% endfor %}"""
CHATML: Final = """{% for message in messages %}{{ "<|im_start|>" + message["role"] + "\n" + message["content"] }}
{%- endfor %}"""


async def test_a_template_for_tools_alone_has_the_default_one_behind_it(tmp_path: Path) -> None:
    """In Hermes' words: for chats without tools that have had some, and for tools that it refuses."""
    folder = thinker_in(tmp_path / "hermes")
    replace(folder / "chat_template.jinja", CHATML)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(APART)
    tokenizer = Tokenizer(folder)
    asked = await scripted_api(ScriptedGenerator(tokenizer), tokenizer).find_model(MODEL)

    async def prompt(messages: list[Any], **fields: Any) -> str:
        body = ChatBody.model_validate({"model": MODEL, "messages": messages, **fields})
        job = await prepare_chat(body, asked, TERMS)
        return tokenizer.decode(job.choices[0].spec.prompt_token_ids, skip_special_tokens=False)

    history = [*MESSAGES, calling(("1", "time")), result("1", "noon")]
    told = await prompt(history, tools=TOOLS)
    assert "weather(place: str)weather - The weather of a place.\ntime - \n" in told
    assert "time was called\ntool: noon\n" in told and "# Tools" not in told
    called = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    silent = {**calling(("1", "time")), "content": ""}
    for chat, fields in (
        (history, {}),
        (history, {"tools": TOOLS, "tool_choice": "none"}),
        ([*MESSAGES, silent, result("1", "noon")], {}),
    ):
        bare = await prompt(chat, **fields)
        assert f"assistant\n{called}" in bare and "<tool_response>\nnoon" in bare and "# Tools" not in bare
    schema = {"type": "object", "properties": {"place": {"type": ["string", "null"]}}}
    odd = {"type": "function", "function": {"name": "odd", "parameters": schema}}
    refused = await prompt(history, tools=[odd])
    assert "# Tools" in refused and '"name": "odd"' in refused and called in refused


IN_TURNS: Final = """{%- if messages[0].role == "system" %}{{ messages[0].content + "|" }}
{%- set messages = messages[1:] %}{% endif %}
{%- for message in messages %}
{%- if (message.role == "user") != (loop.index0 % 2 == 0) %}
{{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}{% endif %}
{{- message.role + ": " + message.content + "|" }}
{%- endfor %}"""


async def test_a_template_that_takes_roles_in_turns_gets_messages_of_one_role_as_one(thinking: Tokenizer) -> None:
    """As Gemma's and Mistral's do, whatever the API. Another one gets the messages as they came."""
    tokenizer = TemplatedTokenizer(thinking, IN_TURNS)
    asked = await scripted_api(ScriptedGenerator(tokenizer), tokenizer).find_model(MODEL)

    async def prompt(chat: ChatBody) -> str:
        token_ids = await chat_token_ids(chat.messages, chat, asked, told_tools(chat.offered_tools()))
        return tokenizer.decode(token_ids, skip_special_tokens=False)

    def chat(*messages: tuple[str, str], **fields: Any) -> ChatBody:
        told = [{"role": role, "content": content} for role, content in messages]
        return ChatBody.model_validate({"model": MODEL, "messages": told, **fields})

    told = [("system", "S"), ("developer", "D"), ("user", "1"), ("user", "2"), ("assistant", "A"), ("user", "3")]
    assert await prompt(chat(*told)) == "S\n\nD|user: 1\n\n2|assistant: A|user: 3|"
    amid = chat(("user", "1"), ("system", "S"), ("assistant", "A"), ("user", "2"))  # as Claude Code reminds a model
    assert await prompt(amid) == "user: 1\n\nS|assistant: A|user: 2|"
    begun = chat(*told[2:4], ("assistant", "A"), ("assistant", "B"), continue_final_message=True)
    assert await prompt(begun) == "user: 1\n\n2|assistant: A\n\nB"
    item = {"type": "message", "role": "developer", "content": "D"}
    said = [{"role": "user", "content": content} for content in ("1", "2")]
    response = ResponsesBody.model_validate({"model": MODEL, "instructions": "S", "input": [item, *said]})
    assert await prompt(responses_chat(response, [])) == "S\n\nD|user: 1\n\n2|"
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "time", "input": {}}]}
    noon = {"type": "tool_result", "tool_use_id": "1", "content": "noon"}
    turns = [*said, called, {"role": "user", "content": [noon, {"type": "text", "text": "3"}]}, said[0]]
    messages = MessagesBody.model_validate({"model": MODEL, "max_tokens": 9, "messages": turns})
    assert await prompt(messages_chat(messages, switches_thinking=False, bounds_thinking=False)) == (
        'user: 1\n\n2|assistant: <tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>|'
        "user: <tool_response>\nnoon\n</tool_response>\n\n3\n\n1|"
    )
    with pytest.raises(InvalidRequestError, match="must alternate"):
        await prompt(chat(("assistant", "A"), ("user", "1"), ("user", "2")))


async def test_a_template_that_takes_one_system_message_gets_the_users_as_they_came(thinking: Tokenizer) -> None:
    """A user's messages side by side are joined only where the template refuses them."""
    template = """{%- for message in messages %}
{%- if message.role == "system" and not loop.first %}{{ raise_exception("System message must be at the beginning.") }}
{%- endif %}{{- message.role + ": " + message.content + "|" }}
{%- endfor %}"""
    tokenizer = TemplatedTokenizer(thinking, template)
    asked = await scripted_api(ScriptedGenerator(tokenizer), tokenizer).find_model(MODEL)
    told = [("system", "S"), ("system", "T"), ("user", "1"), ("user", "2")]
    chat = ChatBody.model_validate(
        {"model": MODEL, "messages": [{"role": role, "content": content} for role, content in told]}
    )
    token_ids = await chat_token_ids(chat.messages, chat, asked, [])
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "system: S\n\nT|user: 1|user: 2|"


def calling(*calls: tuple[str, str], **said: str) -> dict[str, Any]:
    """An assistant's message that calls functions, each by an id."""
    told = [{"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}} for id, name in calls]
    return {"role": "assistant", "content": None, "tool_calls": told, **said}


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


# As FunctionGemma's, which refuses a result without a name. No client of OpenAI's sends one.
NAMED_RESULTS: Final = """{{ tools | length }}<start_function_call>
{%- for message in messages if message.role == "tool" %}
{%- if message.name is not defined %}{{ raise_exception("Invalid tool response: 'name' must be provided.") }}{% endif %}
{{- message.name }} said {{ message.content }};
{%- endfor %}"""


async def test_a_result_has_its_functions_name(thinking: Tokenizer) -> None:
    """That of the newest call with this id, or the client's own word."""
    messages = [
        *MESSAGES,
        calling(("1", "weather"), ("2", "time")),
        result("2", "noon"),
        {**result("1", "rain"), "name": "sky"},
        calling(("1", "time")),
        result("1", "dusk"),
    ]
    prompt = await prompt_of(messages, TemplatedTokenizer(thinking, NAMED_RESULTS))
    assert prompt.endswith("time said noon;sky said rain;time said dusk;")


# As Llama's, in what it refuses and how it writes.
ONE_CALL: Final = """{{ tools | length }}<|python_tag|>
{%- for message in messages %}
{%- if message.tool_calls and message.tool_calls | length != 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}{% endif %}
{{- message.role }} {{ message.tool_calls[0].function.name if message.tool_calls else message.content }};
{%- endfor %}"""


async def test_calls_side_by_side_are_told_one_by_one(thinking: Tokenizer) -> None:
    """Where templates take one in a message, or tell one: each before its results, whatever their order."""
    messages = [
        {"role": "user", "content": "Now?"},
        calling(("1", "weather"), ("2", "time"), ("3", "weather")),
        result("2", "noon"),
        result("1", "rain"),
        result("none", "what?"),
        {"role": "assistant", "content": "Rain."},
        result("2", "late"),
        calling(("2", "time")),
        result("2", "dusk"),
    ]
    prompt = await prompt_of(messages, TemplatedTokenizer(thinking, ONE_CALL))
    assert prompt == (
        "2<|python_tag|>user Now?;assistant weather;tool rain;assistant time;tool noon;assistant weather;tool what?;"
        "assistant Rain.;tool late;assistant time;tool dusk;"
    )
    messages.remove(result("2", "late"))  # gpt-oss's refuses a result behind the answer
    prompt = await prompt_of(messages, TemplatedTokenizer(thinking, HARMONY_TEMPLATE))
    assert told_in_harmony(prompt) == [
        ("weather", "call"), ("weather", "rain"), ("time", "call"), ("time", "noon"), ("weather", "call"),
        ("weather", "what?"), ("time", "call"), ("time", "dusk"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "messages",
    [
        [calling(("1", "weather"), ("1", "time")), result("1", "rain"), result("1", "noon")],
        [calling(("1", "weather")), calling(("2", "time")), result("1", "rain"), result("2", "noon")],
        [calling(("1", "weather")), calling(("1", "time")), result("1", "rain"), result("1", "noon")],
        [calling(("1", "weather"), ("2", "time")), result("2", "noon"), calling(("3", "sky")), result("1", "rain"),
         result("3", "blue")],
        [calling(("1", "weather")), result("1", "rain"), calling(("1", "time")), result("1", "noon")],
        [calling(("1", "weather")), *MESSAGES, calling(("1", "time")), result("1", "noon")],
        [calling(("1", "weather")), calling(("2", "time")), result("1", "rain"), result("1", "hail"),
         result("2", "noon")],
    ],
)  # fmt: skip
async def test_a_result_stands_behind_its_own_call(thinking: Tokenizer, messages: list[Any]) -> None:
    """Where an id comes twice, and where results come behind calls of several messages, too."""
    prompt = await prompt_of([*MESSAGES, *messages], TemplatedTokenizer(thinking, HARMONY_TEMPLATE))
    own = {"rain": "weather", "hail": "weather", "noon": "time", "blue": "sky"}
    told = told_in_harmony(prompt)
    results = [(name, text) for name, text in told if text != "call"]
    assert len(results) == sum(message["role"] == "tool" for message in messages)
    assert all(own[text] == name for name, text in results), told


def told_in_harmony(prompt: str) -> list[tuple[str, str]]:
    """The calls and results of a prompt, in their order: each function, with `call` or the result's text."""
    call, told = r"assistant to=functions\.(\w+)<", r"functions\.(\w+) to=assistant<[^<]*<\|message\|>([^<]*)<"
    return [(of or name, "call" if of else text) for of, name, text in re.findall(f"{call}|{told}", prompt)]


async def test_many_calls_of_a_chat_are_told_in_a_thread_or_refused(thinking: Tokenizer) -> None:
    """gpt-oss's template looks for each call at all messages behind it, however few characters a client sends."""
    tokenizer = TemplatedTokenizer(thinking, HARMONY_TEMPLATE)
    say: dict[str, Any] = {"role": "user", "content": "x"}
    await prompt_of([say, calling(("1", "time"))], tokenizer)
    assert tokenizer.threads == {threading.current_thread()}
    tokenizer.threads.clear()
    prompt = await prompt_of([say, calling(*[("1", "time")] * 50)], tokenizer)
    assert prompt.count("to=functions.time") == 50
    assert tokenizer.threads and threading.current_thread() not in tokenizer.threads
    many = calling(*[("1", "time")] * 128)  # the most that one message may have
    for messages, said in (
        ([say, *[many] * 16], f"but {MAX_MODEL_LEN + 1} messages, one for each call,"),
        ([say, *[many] * 12], "Leave out the oldest calls"),
        ([*[many] * 9, *[say] * 800], "Leave out the oldest calls"),
    ):
        tokenizer.threads.clear()
        with pytest.raises(InvalidRequestError, match=said) as refused:
            await prompt_of(messages, tokenizer)
        assert refused.value.param == "messages" and not tokenizer.threads


def test_without_tools_nothing_is_a_call(target: Target, generator: ScriptedGenerator) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = target.chat(**fields).choices
        assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", CALLS, None)


def test_what_is_no_call_stays_content(target: Target, generator: ScriptedGenerator) -> None:
    for reply in ('<tool_call>{"name": "unknown"}</tool_call>', "a <tool_call", '<tool_call>\n{"name": weather}'):
        generator.script.reply = reply
        (whole,) = target.chat(tools=TOOLS).choices
        (choice,), _ = streamed(target, tools=TOOLS)
        for answer in (whole, choice):
            assert (answer.message.content, answer.finish_reason) == (reply, "stop")
            assert not answer.message.tool_calls


def test_a_call_that_is_cut_off(target: Target, generator: ScriptedGenerator) -> None:
    num_tokens = len(target.tokenize(CALLS[: CALLS.index("Paris")]))
    (whole,) = target.chat(tools=TOOLS, max_tokens=num_tokens).choices
    assert whole.finish_reason == "length" and PARIS.startswith(calls_of(whole.message)[0][1])
    (whole,) = target.chat(tools=TOOLS, stop=["Paris"]).choices
    (choice,), _ = streamed(target, tools=TOOLS, stop=["Paris"])
    for answer in (whole, choice):  # nothing to be called: who does would fail to read the arguments
        assert (calls_of(answer.message), answer.finish_reason) == ([("weather", '{"place": "')], "stop")
    generator.script.reply = CALLS[: CALLS.index("Paris")]
    assert [choice.finish_reason for choice in target.chat(tools=TOOLS).choices] == ["stop"]
    generator.script.reply = f"{CALLS} Observation"
    assert [choice.finish_reason for choice in target.chat(tools=TOOLS, stop=[" Obs"]).choices] == ["tool_calls"]


def test_one_call_where_parallel_ones_are_unwanted(target: Target, generator: ScriptedGenerator) -> None:
    (whole,) = target.chat(tools=TOOLS, parallel_tool_calls=False).choices
    (choice,), _ = streamed(target, tools=TOOLS, parallel_tool_calls=False)
    assert calls_of(whole.message) == calls_of(choice.message) == [("weather", PARIS)]


STRICT: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"enum": ["Paris", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": "weather"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
            {"type": "function", "function": {"name": "weather"}}]}},
    ],
    ids=["required", "named", "allowed"],
)  # fmt: skip
def test_calls_that_must_be_made(target: Target, generator: ScriptedGenerator, choice: Any) -> None:
    """The model says anything that the grammar allows, and it is a call each time."""
    generator.script.reply = None
    tools = [STRICT, {"type": "function", "function": {"name": "time", "parameters": {"additionalProperties": False}}}]
    choices = target.chat(tools=tools, tool_choice=choice, n=6, seed=3, parallel_tool_calls=False).choices
    for answer in choices:
        ((name, arguments),) = calls_of(answer.message)
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        if name == "weather":
            said = json.loads(arguments)
            assert said["place"] in ("Paris", "Oslo") and 1 <= said["days"] <= 9 and len(said) == 2
    names = {calls_of(answer.message)[0][0] for answer in choices}
    assert names == ({"weather", "time"} if choice == "required" else {"weather"})
    several = [calls_of(answer.message) for answer in target.chat(tools=tools, tool_choice=choice, n=6, seed=3).choices]
    assert all(several)
    named = isinstance(choice, dict) and choice["type"] == "function"  # one call, by OpenAI's API
    assert max(map(len, several)) == 1 if named else 1 < max(map(len, several)) <= 8


def matcher_of(generator: ScriptedGenerator, tokenizer: Tokenizer) -> Callable[[str], bool]:
    """Whether the grammar of the last request takes a text, and may end there."""
    return taken_by(generator.requests[-1].params.grammar, tokenizer)


def taken_by(grammar: str | None, tokenizer: Tokenizer) -> Callable[[str], bool]:
    llg = grammar_tokenizer(tokenizer.json, tokenizer.vocab_size, tuple(sorted(tokenizer.eos_token_ids)))
    assert grammar is not None

    def takes(text: str) -> bool:
        matcher = LLMatcher(llg, grammar)
        ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return takes


def test_strict_functions(target: Target, generator: ScriptedGenerator, tokenizer: Tokenizer) -> None:
    """Text is free, and calls in it follow their schema; others' follow none."""
    target.chat(tools=[STRICT, TIME])
    takes = matcher_of(generator, tokenizer)
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    assert takes("Hello.") and takes("<tool") and takes("Well. " + call % ("weather", '{"place":"Oslo","days":3}'))
    assert takes(call % ("time", '{"x":1}') + "\nBye.")
    for arguments in NO_WEATHER:
        assert not takes(call % ("weather", arguments)), arguments


NO_WEATHER: Final = ('{"place":"Rome","days":3}', '{"place":"Oslo"}', '{"place":"Oslo","days":0}', "{}")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("mistral", '[TOOL_CALLS][{"name": "%s", "arguments": %s}]'),
        ("llama", '{"name": "%s", "parameters": %s}'),
        ("llama", 'Well. <|python_tag|>{"name": "%s", "parameters": %s}'),
    ],
)
def test_strict_functions_in_other_formats(name: str, call: str, tokenizer: Tokenizer) -> None:
    """Text is free, and what is read as a call follows its schema."""
    functions = frozenset(("weather", "time"))
    reading = Reading(tools=TOOL_FORMATS[name], functions=functions, single=False, reasoning=None, reasons=False)
    body = ChatBody.model_validate({"model": MODEL, "messages": MESSAGES, "tools": [STRICT, TIME]})
    wanted = constrained(body, reading, tokenizer)
    assert wanted is not None
    llg = grammar_tokenizer(tokenizer.json, tokenizer.vocab_size, tuple(sorted(tokenizer.eos_token_ids)))
    takes = taken_by(compiled(wanted, llg), tokenizer)
    for text in ("", "Hello.", "\n I say {}.", "[1]", 'f("a")', call % ("weather", '{"place":"Oslo","days":3}')):
        assert takes(text), text
    assert takes(call % ("time", '{"x":1}'))
    for arguments in NO_WEATHER:
        for space in ("", "\n", "\t", " \r\n"):  # before a mark, and before a call without one, it is not read
            assert not takes(space + call % ("weather", arguments)), (space, arguments)


async def test_strict_functions_of_a_model_that_thinks(thinking: Tokenizer) -> None:
    """By the marks' own tokens, whoever opens the reasoning; what it thinks of calling is no call."""
    api = scripted_api(ScriptedGenerator(thinking), thinking, reasoning_format="think")
    call = '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>'
    good = call % '{"place":"Oslo","days":3}'
    for effort, opening in (("low", ""), (None, "<think>\n")):
        fields = {"model": MODEL, "messages": MESSAGES, "tools": [STRICT], "reasoning_effort": effort}
        job = await prepare_chat(ChatBody.model_validate(fields), await api.find_model(MODEL), TERMS)
        takes = taken_by(job.choices[0].spec.params.grammar, thinking)
        for text in ("hm</think>Hello.", f"hm\n</think>\n\n{good}", f"{call % '{}'}?</think>It rains. {good}"):
            assert takes(opening + text), text
        assert takes("Hello.") == takes(good) == (effort is None)
        for arguments in NO_WEATHER:
            assert not takes(f"{opening}hm</think>{call % arguments}"), arguments


def test_an_answer_by_a_schema_or_a_call(
    target: Target, thinker: Target, generator: ScriptedGenerator, tokenizer: Tokenizer
) -> None:
    """With `response_format` beside tools either is possible, behind reasoning where the model reasons."""
    schema = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    wish = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    call = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    target.chat(tools=[TIME], response_format=wish)
    takes = matcher_of(generator, tokenizer)
    assert takes('{"x":5}') and takes(call) and not takes("Hello.") and not takes("<think>hm</think>")
    thinker.chat(tools=[TIME], response_format=wish)
    takes = matcher_of(generator, tokenizer)
    assert takes('{"x":5}') and takes('<think>\nhm\n</think>\n\n{"x":5}') and takes(f"<think>hm</think>{call}")
    thinker.chat(response_format=wish, messages=[*MESSAGES, {"role": "assistant", "content": "<think>\n"}],
                 extra_body={"continue_final_message": True})  # fmt: skip
    takes = matcher_of(generator, tokenizer)
    assert takes('hm\n</think>{"x":5}') and not takes('{"x":5}') and not takes(f"hm</think>{call}")


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama"])
def test_forced_calls_are_read_back(name: str, tokenizer: Tokenizer) -> None:
    """What a family's grammar allows is a call to its parser, whatever is drawn."""
    known = TOOL_FORMATS[name]
    functions = frozenset(("weather", "time"))
    reading = Reading(tools=known, functions=functions, single=False, reasoning=None, reasons=False)
    zone = {"type": "object", "properties": {"a": {"type": "string"}}}
    tools = [STRICT, {"type": "function", "function": {"name": "time", "parameters": zone}}]
    body = ChatBody.model_validate({"model": MODEL, "messages": MESSAGES, "tools": tools, "tool_choice": "required"})
    wanted = constrained(body, reading, tokenizer)
    assert wanted is not None
    llg = grammar_tokenizer(tokenizer.json, tokenizer.vocab_size, tuple(sorted(tokenizer.eos_token_ids)))
    grammar = compiled(wanted, llg)
    for call in (("weather", '{"place":"Oslo","days":3}'), ("time", '{"a":"]}"}')):
        key = "parameters" if known.bare else "arguments"
        text = f'{{"name": "{call[0]}", "{key}": {call[1]}}}'
        text = {"hermes": f"<tool_call>\n{text}\n</tool_call>", "mistral": f"[TOOL_CALLS][{text}]", "llama": text}[name]
        matcher = LLMatcher(llg, grammar)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting(), matcher.get_error()
        parser = OutputParser(tools=known, functions=functions)
        events = parser.feed(text) + parser.finish()
        assert [(event.kind, event.text) for event in events] == [("call", call[0]), ("arguments", call[1])]


def test_choices_and_logprobs(target: Target, generator: ScriptedGenerator) -> None:
    """Each choice is read by itself, and every token of it keeps its log probability."""
    generator.script.reply = (CALLS, "Nothing to call.", CALLS.replace("weather", "time"))
    whole = target.chat(tools=TOOLS, n=3, logprobs=True, top_logprobs=1)
    choices, _ = streamed(target, tools=TOOLS, n=3, logprobs=True, top_logprobs=1)
    for answers in (whole.choices, sorted(choices, key=lambda choice: choice.index)):
        assert [choice.finish_reason for choice in answers] == ["tool_calls", "stop", "tool_calls"]
        assert [calls_of(choice.message)[:1] for choice in answers] == [[("weather", PARIS)], [], [("time", PARIS)]]
        for choice, reply in zip(answers, generator.script.reply, strict=True):
            assert b"".join(bytes(entry.bytes) for entry in choice.logprobs.content).decode() == reply


def test_reasoning_is_apart(thinker: Target, generator: ScriptedGenerator) -> None:
    generator.script.reply = f"<think>\nIs it rain? <b>\n</think>\n\n{CALLS}"
    (whole,) = thinker.chat(tools=TOOLS).choices
    (choice,), chunks = streamed(thinker, tools=TOOLS)
    for answer in (whole, choice):
        assert answer.message.content == "I will look." and len(calls_of(answer.message)) == 2
        assert answer.message.reasoning == answer.message.reasoning_content == "Is it rain? <b>"
    assert sum(bool(getattr(chunk.choices[0].delta, "reasoning", None)) for chunk in chunks) > 1
    generator.script.reply = "Hello."
    (plain,) = thinker.chat().choices
    assert (plain.message.content, plain.message.reasoning) == ("Hello.", None)


def test_reasoning_is_left_out_where_asked_for(thinker: Target, generator: ScriptedGenerator) -> None:
    """It is generated and counted all the same."""
    generator.script.reply = f"<think>\nIs it rain?\n</think>\n\n{CALLS}"
    told = thinker.chat(tools=TOOLS).usage.completion_tokens_details.reasoning_tokens
    extra = {"include_reasoning": False}
    answer = thinker.chat(tools=TOOLS, extra_body=extra)
    (choice,), chunks = streamed(thinker, tools=TOOLS, extra_body=extra)
    for message in (answer.choices[0].message, choice.message):
        assert message.content == "I will look." and len(calls_of(message)) == 2
        assert not {"reasoning", "reasoning_content"} & message.to_dict().keys()
    assert not any("reasoning" in chunk.choices[0].delta.to_dict() for chunk in chunks)
    assert answer.usage.completion_tokens_details.reasoning_tokens == told > 0
    (same,) = thinker.chat(tools=TOOLS, extra_body={"include_reasoning": True}).choices
    assert same.message.reasoning == "Is it rain?"


def test_the_prompt_may_begin_the_reasoning(thinker: Target, generator: ScriptedGenerator) -> None:
    generator.script.reply = "hm\n</think>\nHello."
    begun = [*MESSAGES, {"role": "assistant", "content": "<think>\n"}]
    (choice,) = thinker.chat(messages=begun, extra_body={"continue_final_message": True}).choices
    assert (choice.message.content, choice.message.reasoning) == ("Hello.", "hm")


def test_tokens_of_reasoning_are_counted(thinker: Target, generator: ScriptedGenerator) -> None:
    """Its marks with it, however the text is cut; and what only looks like reasoning counts as none."""
    for reply, thought in (
        ("<think>\nhm\n</think>\n\nHello.", "<think>\nhm\n</think>"),
        ("  <think>hm", "  <think>hm"),
        ("Hello. <think>hm</think>", ""),
        ("<thin", ""),
        ("\n", ""),
    ):
        generator.script = Script(reply=reply, burst=1)
        num_tokens = len(thinker.tokenize(thought)) if thought else 0
        whole = thinker.chat(max_tokens=12).usage
        chunks = list(thinker.chat(max_tokens=12, stream=True, stream_options={"continuous_usage_stats": True}))
        told = [chunk.usage.completion_tokens_details.reasoning_tokens for chunk in chunks]
        counted = whole.completion_tokens_details.reasoning_tokens
        # The token that completes the closing mark may have more in it; one that ends the answer has no text.
        assert num_tokens <= counted <= num_tokens + 1, reply
        assert told == sorted(told) and told[-1] == counted, reply
        assert thinker.chat(max_tokens=12, n=2).usage.completion_tokens_details.reasoning_tokens == 2 * counted


def test_a_budget_of_reasoning(
    generator: ScriptedGenerator, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What workers are told: how many tokens, and which marks, of which the prompt may have the first."""
    opening, closing = "<issue_start>", "<issue_closed>"
    marks = tuple(tokenizer.added_id_of(mark) for mark in (opening, closing))
    known = ReasoningFormat(opening=opening, closing=closing, template_words=())
    monkeypatch.setitem(REASONING_FORMATS, "think", known)
    begun = [*MESSAGES, {"role": "assistant", "content": opening}]
    generator.script.reply = "Hello."
    with running_server(generator, tokenizer, reasoning_format="think") as target:
        for budget, wanted in ((0, 0), (7, 7), (-1, None), (None, None)):
            extra = {"thinking_token_budget": budget}
            target.chat(extra_body=extra)
            target.chat(messages=begun, extra_body={**extra, "continue_final_message": True})
            free, inside = (generator.requests.pop(0).params for _ in range(2))
            assert free.thinking_budget == inside.thinking_budget == wanted
            assert free.thinking_marks == (() if wanted is None else marks)
            assert inside.thinking_marks == (() if wanted is None else marks[1:])
        target.chat(extra_body={"thinking_token_budget": 3, "structured_outputs": {"regex": "[ab]"}}, max_tokens=1)
        assert generator.requests.pop().params.thinking_budget is None  # there is no reasoning


def test_a_budget_that_cannot_be_kept(thinker: Target, target: Target, generator: ScriptedGenerator) -> None:
    with pytest.raises(openai.BadRequestError, match="no tokens of their own"):
        thinker.chat(extra_body={"thinking_token_budget": 3})
    target.chat(extra_body={"thinking_token_budget": 3}, max_tokens=1)  # a model that does not reason keeps any
    assert generator.requests.pop().params.thinking_budget is None


@pytest.mark.parametrize(
    ("fields", "param", "mention"),
    [
        ({"thinking_token_budget": -2}, "thinking_token_budget", "-1"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [TIME, TIME]}, "tools", "same name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
         "tools[0].function.parameters", "schema of an object"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 1}}}}]},
         "tools[0].function.parameters", "object of schemas"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 300_000}}]}, "tools",
         "300004 characters"),
        ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]}, "tools", "128"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "required"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "not among"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice",
         "list of `tools`"),
        ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"json_object": True}}, "tool_choice",
         "both asked"),
        ({"tools": TOOLS, "structured_outputs": {"json": "{"}}, "structured_outputs", "cannot be followed"),
        ({"tools": TOOLS, "structured_outputs": {"json": "[" * 50_000}}, "structured_outputs", "cannot be followed"),
        ({"tools": TOOLS, "structured_outputs": {"json": "[]"}}, "structured_outputs", "must be an object"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
          "tool_choice": "required"}, "tools", "cannot be enforced"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f",
          "arguments": "{}"}}]}]}, "messages[0]", "assistant"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "missing"),
    ],
)  # fmt: skip
def test_refusals(target: Target, fields: dict[str, Any], param: str, mention: str) -> None:
    answer = target.http.post("/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
    assert any(words in error["message"] for words in mention.split("|")), json.dumps(error)


async def test_marks_that_are_tokens_of_their_own(tmp_path: Path) -> None:
    """Added tokens that are not special, as Qwen's: a budget ends the reasoning under a schema by the mark's token.

    And the answer begins soon."""
    tokenizer = Tokenizer(thinker_in(tmp_path / "thinker"))
    api = scripted_api(ScriptedGenerator(tokenizer), tokenizer, reasoning_format="think")
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    body = ChatBody.model_validate(
        {
            "model": MODEL,
            "messages": MESSAGES,
            "reasoning_effort": "low",
            "thinking_token_budget": 3,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        }
    )
    params = (await prepare_chat(body, await api.find_model(body.model), TERMS)).choices[0].spec.params
    masks = GrammarMasks(tmp_path / "thinker", tokenizer.vocab_size, tokenizer.eos_token_ids)
    closing = tokenizer.added_id_of("</think>")
    assert closing is not None
    seq = Sequence(request_id="thinks", attempt=0, params=params, prompt_token_ids=[1])
    (line,) = tokenizer.encode("\n")
    written = [*tokenizer.encode(" It rains there")[:3], closing, *[line] * 4, *tokenizer.encode('{"a":1}')]
    for token_id in written:
        [bits] = masks.of([seq])
        assert bits is not None
        allowed = np.flatnonzero(allowed_by(bits, tokenizer.vocab_size))
        assert token_id in allowed
        assert (len(seq.output_token_ids) == 3) == (allowed.tolist() == [closing])
        assert (len(seq.output_token_ids) >= 8) == (line not in allowed and closing not in allowed)
        seq.output_token_ids.append(token_id)


def test_mistrals_templates_are_told_of_calls_by_the_end_of_their_ids() -> None:
    """They take nine letters and digits; what ids begin with is the same for all."""
    ids = [new_call_id() for _ in range(2)]
    calls = [{"id": call_id, "type": "function", "function": {"name": "time", "arguments": "{}"}} for call_id in ids]
    results = [{"role": "tool", "tool_call_id": call_id, "content": "now"} for call_id in ids]
    body = ChatBody.model_validate({"model": MODEL, "messages": [{"role": "assistant", "tool_calls": calls}, *results]})
    for name in ("mistral", "hermes"):
        formats = OutputFormats(tools=TOOL_FORMATS[name], in_template=True, apart=False, reasoning=None)
        said, *answers = (told_calls(message, formats, dict.fromkeys(ids, "time")) for message in body.messages)
        told = [call["id"] for call in said["tool_calls"]]
        assert told == [answer["tool_call_id"] for answer in answers]
        assert told == ([call_id[-9:] for call_id in ids] if name == "mistral" else ids)
        assert name == "hermes" or all(call_id.isalnum() for call_id in told)


def test_a_call_that_must_be_made_leaves_no_room_for_a_format(target: Target, generator: ScriptedGenerator) -> None:
    """As clients send both: agents whose output is a model and who must call a tool first."""
    generator.script = Script()
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    fields = {"tools": TOOLS, "tool_choice": "required", "response_format": schema, "max_tokens": 1024, "seed": 3}
    (choice,) = target.chat(**fields).choices
    assert choice.finish_reason == "tool_calls" and not choice.message.content and choice.message.tool_calls


@pytest.mark.parametrize("what", ["schema", "arguments"])
def test_texts_that_are_nested_too_deeply(target: Target, generator: ScriptedGenerator, what: str) -> None:
    """Python reads JSON a few levels deeper than it writes it."""
    generator.script.reply = "Hello."
    for depth in range(900, 1_000, 3):
        nested = '{"a":' * depth + "1" + "}" * depth
        called = {"id": "1", "type": "function", "function": {"name": "time", "arguments": nested}}
        told = [
            {"role": "assistant", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "1", "content": "now"},
        ]
        body = {
            "model": MODEL,
            "max_tokens": 1,
            "tools": TOOLS,
            "messages": [*MESSAGES, *(told if what == "arguments" else [])],
            **({"structured_outputs": {"json": nested}} if what == "schema" else {}),
        }
        answer = target.http.post("/v1/chat/completions", json=body)
        assert answer.status_code in (200, 400), (depth, answer.text[:300])
