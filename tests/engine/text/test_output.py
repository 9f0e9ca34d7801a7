"""Each family's text becomes the same events however it is cut, and what is no call stays text."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest

from engine.text.formats import (
    HERMES,
    REASONING_FORMATS,
    TOOL_FORMATS,
    choose_reasoning_format,
    choose_tool_format,
    output_formats,
    with_hermes_tools,
)
from engine.text.harmony import output_parser
from engine.text.output import EventReader, OutputEvent
from tests.support.processor_time import in_loop_turns

LLAMA, MISTRAL, GEMMA = (TOOL_FORMATS[name] for name in ("llama", "mistral", "gemma"))
THINK = REASONING_FORMATS["think"]
HARMONY: dict[str, Any] = {"tools": TOOL_FORMATS["harmony"], "reasoning": REASONING_FORMATS["harmony"]}
FUNCTIONS = {"f", "g"}

Said = list[tuple[str, str, int]]


def put_together(events: list[OutputEvent]) -> Said:
    said: Said = []
    for event in events:
        if said and event.kind != "call" and (said[-1][0], said[-1][2]) == (event.kind, event.index):
            said[-1] = (event.kind, said[-1][1] + event.text, event.index)
        else:
            said.append((event.kind, event.text, event.index))
    return said


def read(text: str, cuts: list[int], **settings: Any) -> Said:
    parser = output_parser(functions=FUNCTIONS, **settings)
    edges = [0, *sorted(cuts), len(text)]
    events = [event for start, end in pairwise(edges) for event in parser.feed(text[start:end])]
    return put_together(events + parser.finish())


def text(text: str) -> tuple[str, str, int]:
    return ("text", text, 0)


def call(index: int, name: str, arguments: str) -> Said:
    return [("call", name, index), ("arguments", arguments, index)]


@pytest.mark.parametrize(
    ("output", "settings", "expected"),
    [
        pytest.param(
            'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>\\""}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {"b": [1, {}]}}\n</tool_call>\n',
            {"tools": HERMES},
            [text("Sure."), *call(0, "f", '{"a": "}</tool_call>\\""}'), *call(1, "g", '{"b": [1, {}]}')],
            id="hermes",
        ),
        pytest.param(
            '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>',
            {"tools": HERMES, "single": True},
            call(0, "f", "{}"),
            id="one call where one is wanted",
        ),
        pytest.param(
            'A <tool_call>{"name": "f"}</tool_call> B <tool_call>{"name": "g"}</tool_call>\n\nC'
            '<tool_call>{"name": "g"}</tool_call>',
            {"tools": HERMES, "single": True},
            [text("A"), *call(0, "f", "{}"), text("B\nC")],
            id="texts around a call that is dropped are lines",
        ),
        pytest.param(
            'A <tool_call>{"name": "f"}</tool_call> <tool_call>{"name": "g"}</tool_call> C',
            {"tools": HERMES, "single": True},
            [text("A"), *call(0, "f", "{}"), text("C")],
            id="a text behind calls of which one is dropped",
        ),
        pytest.param(
            '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>',
            {"tools": HERMES},
            call(0, "f", '{"x": 1}'),
            id="arguments before the name",
        ),
        pytest.param(
            '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}',
            {"tools": HERMES},
            call(0, "f", '{"x": 1}'),
            id="arguments as a text, no closing mark",
        ),
        pytest.param(
            '<tool_call>{"name": "f", "arguments": {"x": [1',
            {"tools": HERMES},
            call(0, "f", '{"x": [1'),
            id="cut off in its arguments",
        ),
        pytest.param(
            '<tool_call>{"name": "f", "argu', {"tools": HERMES}, [text('<tool_call>{"name": "f", "argu')], id="cut off"
        ),
        pytest.param(
            '<tool_call>{"name": "unknown", "arguments": {}}</tool_call> x',
            {"tools": HERMES},
            [text('<tool_call>{"name": "unknown", "arguments": {}}</tool_call> x')],
            id="a function that nobody has",
        ),
        pytest.param(
            '<tool_call><tool_call>{"name": "f"}}</tool_call>',
            {"tools": HERMES},
            [text("<tool_call>"), *call(0, "f", "{}"), text("}</tool_call>")],
            id="marks and brackets too many",
        ),
        pytest.param(
            '<tool_call>{"name": "f", "arguments": {"x": 1]}}</tool_call>',
            {"tools": HERMES},
            [*call(0, "f", '{"x": 1'), text("]}}</tool_call>")],
            id="brackets that do not match",
        ),
        pytest.param(
            "<tool_call>call f</tool_call>", {"tools": HERMES}, [text("<tool_call>call f</tool_call>")], id="no JSON"
        ),
        pytest.param("a  < b <tool_cal \n", {"tools": HERMES}, [text("a  < b <tool_cal \n")], id="half a mark"),
        pytest.param(
            " \n<think>\nhm <tool_call>\n</think>\n\nHi </think> <think>",
            {"tools": HERMES, "reasoning": THINK},
            [("reasoning", "hm <tool_call>", 0), text("Hi </think> <think>")],
            id="reasoning",
        ),
        pytest.param(
            'hm\n</think>\n\n<tool_call>{"name":"f"}</tool_call>\nbye',
            {"tools": HERMES, "reasoning": THINK, "reasons": True},
            [("reasoning", "hm", 0), *call(0, "f", "{}"), text("bye")],
            id="the prompt began the reasoning",
        ),
        pytest.param("hm </thi", {"reasoning": THINK, "reasons": True}, [("reasoning", "hm </thi", 0)], id="thinking"),
        pytest.param(" <thin", {"reasoning": THINK}, [text(" <thin")], id="no reasoning"),
        pytest.param(
            '{"name": "f", "parameters": {"q": [1, 2]}}; {"name": "g", "parameters": {}}',
            {"tools": LLAMA},
            [*call(0, "f", '{"q": [1, 2]}'), *call(1, "g", "{}")],
            id="llama",
        ),
        pytest.param(
            '<|python_tag|>{"type": "function", "name": "f", "parameters": {"q": 1}}',
            {"tools": LLAMA},
            call(0, "f", '{"q": 1}'),
            id="llama with its mark",
        ),
        pytest.param(
            '{"answer": 3, "name": "f"}', {"tools": LLAMA}, [text('{"answer": 3, "name": "f"}')], id="just JSON"
        ),
        pytest.param('See {"name": "f"}', {"tools": LLAMA}, [text('See {"name": "f"}')], id="JSON within a text"),
        pytest.param(
            '[TOOL_CALLS] [{"name": "f", "arguments": {"q": 1}}, {"name": "g", "arguments": {}}]',
            {"tools": MISTRAL},
            [*call(0, "f", '{"q": 1}'), *call(1, "g", "{}")],
            id="mistral",
        ),
        pytest.param(
            'Yes[TOOL_CALLS]f{"q": 1}[TOOL_CALLS]g[CALL_ID]a1b2[ARGS]{"z": "{"}',
            {"tools": MISTRAL},
            [text("Yes"), *call(0, "f", '{"q": 1}'), *call(1, "g", '{"z": "{"}')],
            id="mistral's newer one",
        ),
        pytest.param(
            "<start_function_call>call:f{place:<escape>Paris, {F}<escape>,days:3,l:[<escape>a<escape>,true],o:{x:null}}"
            "<end_function_call>",
            {"tools": GEMMA},
            call(0, "f", '{"place": "Paris, {F}", "days": 3, "l": ["a", true], "o": {"x": null}}'),
            id="gemma",
        ),
        pytest.param(
            "<|channel|>analysis<|message|>Sum: <|b.<|end|><|start|>assistant<|channel|>final<|message|>It is 4.",
            HARMONY,
            [("reasoning", "Sum: <|b.", 0), text("It is 4.")],
            id="harmony",
        ),
        pytest.param(
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"q":"<|"}<|call|>',
            HARMONY,
            [("reasoning", "hm", 0), text("I look."), *call(0, "f", '{"q":"<|"}')],
            id="harmony's calls, with what is said before",
        ),
        pytest.param(
            ' to=functions.f<|channel|>commentary json<|message|>{"q":1}<|call|><|start|>assistant to=functions.g'
            "<|channel|>analysis<|message|>",
            HARMONY,
            [*call(0, "f", '{"q":1}'), *call(1, "g", "{}")],
            id="harmony's calls by the role, without arguments",
        ),
        pytest.param(
            "hm<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>"
            "<|start|>assistant<|channel|>commentary to=functions.g<|message|>{}<|call|>",
            {**HARMONY, "reasons": True, "single": True},
            [("reasoning", "hm", 0), *call(0, "f", "{}")],
            id="one of harmony's calls, the prompt began the reasoning",
        ),
        pytest.param(
            "<|channel|>commentary to=functions.f<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>B"
            "<|end|><|start|>assistant<|channel|>commentary to=functions.g<|message|>{}<|call|>"
            "<|start|>assistant<|channel|>final<|message|>C<|end|>",
            {**HARMONY, "single": True},
            [*call(0, "f", "{}"), text("B\nC")],
            id="texts around one of harmony's calls that is dropped are lines",
        ),
        pytest.param(
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
            "<|start|>assistant<|channel|>commentary<|message|>A<|end|><|start|>assistant<|channel|>final<|message|>"
            "<|end|><|start|>assistant<|channel|>final<|message|>B",
            HARMONY,
            [("reasoning", "a\nb", 0), text("A\nB")],
            id="harmony's messages in a row are lines",
        ),
        pytest.param(
            "<|channel|>commentary to=functions.h<|message|>{}<|call|>",
            HARMONY,
            [text("<|channel|>commentary to=functions.h<|message|>{}")],
            id="harmony's call of nobody",
        ),
        pytest.param(
            "<|channel|>commentary to=f <|constrain|>json<|message|>{}<|call|>"
            "<|start|>assistant<|channel|>commentary to=h<|message|>{}<|call|>",
            HARMONY,
            [*call(0, "f", "{}"), text("{}")],
            id="harmony's calls by the name alone",
        ),
        pytest.param(
            "<|channel|>analysis to=python code<|message|>print(6*7)<|end|><|start|>assistant<|channel|>analysis to=h"
            "<|message|>hm<|end|><|start|>assistant to=user<|channel|>final<|message|>42<|return|>",
            HARMONY,
            [("reasoning", "print(6*7)\nhm", 0), text("42")],
            id="harmony's thoughts that are addressed",
        ),
        pytest.param(
            "<|channel|>analysis to=f <|constrain|>json<|message|>{}<|call|>",
            HARMONY,
            call(0, "f", "{}"),
            id="harmony's call while it thinks",
        ),
        pytest.param(
            "<|channel|>analysis<|message|>hm <|en", HARMONY, [("reasoning", "hm <|en", 0)], id="harmony cut off"
        ),
        pytest.param("<|message|>hm", HARMONY, [text("hm")], id="harmony with an empty header"),
        pytest.param("<|channel|>final" + " " * 240 + "<|message|>hm", HARMONY, [text("hm")], id="a long header"),
        pytest.param("<|channel|>final<|mess", HARMONY, [], id="harmony cut off in a header"),
        pytest.param('{"a": "<|message|>"}', HARMONY, [text('{"a": "<|message|>"}')], id="harmony without a header"),
        pytest.param(
            "<|channel|>analysis<|message|>hm<|end|>",
            {"tools": TOOL_FORMATS["harmony"]},
            [text("hm")],
            id="harmony whose reasoning is not told apart",
        ),
    ],
)
def test_events(output: str, settings: dict[str, Any], expected: Said) -> None:
    rng = random.Random(5)
    assert read(output, [], **settings) == expected
    for _ in range(40):
        cuts = rng.sample(range(len(output)), rng.randrange(min(30, len(output))))
        assert read(output, cuts, **settings) == expected, cuts
    assert read(output, list(range(len(output))), **settings) == expected


def test_arguments_come_as_they_are_written() -> None:
    parser = output_parser(tools=HERMES, functions=FUNCTIONS)
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"pla') == [
        OutputEvent("call", "f", 0),
        OutputEvent("arguments", '{"pla', 0),
    ]
    assert parser.feed('ce": "Par') == [OutputEvent("arguments", 'ce": "Par', 0)]
    assert parser.feed('is"}}') == [OutputEvent("arguments", 'is"}', 0)]


def test_harmonys_arguments_come_as_they_are_written() -> None:
    parser = output_parser(functions=FUNCTIONS, **HARMONY)
    assert parser.feed("<|channel|>commentary to=functions.f ") == []
    assert parser.feed('<|constrain|>json<|message|>{"pla') == [
        OutputEvent("call", "f", 0),
        OutputEvent("arguments", '{"pla', 0),
    ]
    assert parser.feed('ce": "Par') == [OutputEvent("arguments", 'ce": "Par', 0)]
    assert parser.is_past_reasoning and not parser.has_reasoned


@pytest.mark.parametrize("settings", [{"tools": HERMES}, {"reasoning": THINK}, {"reasoning": THINK, "reasons": True}])
@pytest.mark.parametrize("begin", ["", "It says"])
def test_a_space_costs_its_own_however_many_wait(settings: dict[str, Any], begin: str) -> None:
    """What follows decides what they are. A client can have a model write nothing else, in 128 choices."""
    space = " " * 80
    for end in ("", "x", "</think>x"):
        parser = output_parser(functions=FUNCTIONS, **settings)
        events = parser.feed(begin)

        def feed(parser: EventReader = parser, events: list[OutputEvent] = events) -> None:
            for _ in range(3_000):
                events += parser.feed(space)

        assert in_loop_turns(feed) < 2e6
        events += parser.feed(end) + parser.finish()
        assert put_together(events) == read(begin + 3_000 * space + end, [], **settings)


@pytest.mark.parametrize("tools", [known for known in TOOL_FORMATS.values() if known.body != "harmony"])
def test_nothing_is_lost_of_what_is_no_call(tools: Any) -> None:
    """Whatever the text, it comes out again: no function has a name here."""
    rng = random.Random(11)
    pieces = [*sorted(tools.marks), "{", "}", "[", "]", '"name"', ":", ",", '"f"', "call:f", " ", "\n", "x", "\\", '"']
    for _ in range(300):
        output = "".join(rng.choices(pieces, k=rng.randrange(1, 30)))
        parser = output_parser(tools=tools)
        events = [event for character in output for event in parser.feed(character)] + parser.finish()
        assert {event.kind for event in events} <= {"text"}
        assert "".join(event.text for event in events) == output


def test_checkpoints_formats_are_recognised() -> None:
    templates = {
        "hermes": "{%- if tools %}... within <tool_call></tool_call> XML tags",
        "mistral": '{{ "[TOOL_CALLS]" + message.tool_calls }}',
        "gemma": "<start_function_call>call:",
        "llama": "{%- if builtin_tools %}<|python_tag|>",
        "harmony": '{{- "<|start|>assistant to=functions." + name + "<|channel|>commentary json<|message|>" }}',
    }
    for name, template in templates.items():
        assert choose_tool_format("auto", template, None) is TOOL_FORMATS[name]
    assert choose_tool_format("auto", "<tool_call>\n<function=", None) is None
    assert choose_tool_format("llama", templates["hermes"], None) is LLAMA
    assert choose_reasoning_format("auto", "content.split('</think>')", None) is THINK
    assert choose_reasoning_format("auto", "<|channel|>analysis<|message|>", None) is HARMONY["reasoning"]
    assert choose_reasoning_format("none", "<think>", None) is choose_reasoning_format("auto", "hello", None) is None


def test_a_checkpoints_own_template_comes_first() -> None:
    own = {
        "fields": {
            "thinking": {"open": "<t>", "close": "</t>"},
            "tool_calls": {"open": "<c>", "close": "</c>", "content": "json", "repeats": True},
            "content": {},
        }
    }
    tools, reasoning = choose_tool_format("auto", "<tool_call>", own), choose_reasoning_format("auto", "<think>", own)
    output = '<t>hm</t><c>{"name": "f", "arguments": {}}</c>'
    assert read(output, [], tools=tools, reasoning=reasoning) == [("reasoning", "hm", 0), *call(0, "f", "{}")]
    own["fields"]["tool_calls"] = {"open_pattern": "(a+)+", "close": "</c>", "content": "json"}
    assert choose_tool_format("auto", "<tool_call>", own) is HERMES


def test_a_format_that_is_named_has_no_template_of_another() -> None:
    """The model would be told to write its calls in a way that nobody reads."""
    hermes, other = "{{ tools }} <tool_call>", "{{ tools }} Action: <function="
    for template, is_told in ((hermes, True), (other, False), ("", False)):
        formats = output_formats("hermes", "auto", "{{ messages }}", template, None)
        assert formats.tools is HERMES and formats.in_template == formats.apart == is_told
    assert output_formats("llama", "auto", other, other, None).in_template
    assert not output_formats("auto", "auto", hermes, hermes, None).apart


def test_tools_as_text() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    asked = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"x": "é"}}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [asked, asked]},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
        {"role": "tool", "content": "6", "tool_call_id": "1"},
    ]
    system, user, assistant, results = with_hermes_tools(chat, [tool])
    assert system["role"] == "system" and json.dumps(tool) in system["content"] and user == chat[0]
    assert read(assistant["content"], [], tools=HERMES) == [*call(0, "f", '{"x": "é"}'), *call(1, "f", '{"x": "é"}')]
    assert results == {
        "role": "user",
        "content": "<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response>",
    }
    (joined, _) = with_hermes_tools([{"role": "system", "content": "Be brief."}, chat[0]], [tool])
    assert joined["content"].startswith("Be brief.\n\n# Tools")


@pytest.mark.parametrize(
    ("output", "settings", "is_cut"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": "x', {"tools": HERMES}, True),
        ('<tool_call>{"name": "f", "arguments": {"a": "x"', {"tools": HERMES}, True),
        ('<tool_call>{"name": "f", "arguments": {"a": "x"}', {"tools": HERMES}, False),
        ('<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', {"tools": HERMES}, False),
        ('<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "argum', {"tools": HERMES}, False),
        ('[TOOL_CALLS]f[ARGS]{"a": 1', {"tools": MISTRAL}, True),
        ('<|channel|>commentary to=functions.f<|message|>{"a": "x', HARMONY, True),
        ("<|channel|>commentary to=functions.f<|message|>12", HARMONY, True),
        ('<|channel|>commentary to=functions.f<|message|>{"a": 1}', HARMONY, False),
        ('<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>', HARMONY, False),
    ],
)
def test_whether_the_last_call_is_cut(output: str, settings: dict[str, Any], is_cut: bool) -> None:
    parser = output_parser(functions=FUNCTIONS, **settings)
    parser.feed(output)
    parser.finish()
    assert parser.is_cut is is_cut
