"""Structural tags: what may be written, what may not, what is refused; and over HTTP in both of vLLM's spellings."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from cluster.http.openai.json_schemas import UnsupportedGrammarError
from cluster.http.openai.structural_tags import MAX_DEPTH
from cluster.http.openai.structured import OutputConstraint, compiled
from tests.support.openai_conformance import Target
from tests.support.schema_answers import drawn_answer
from tests.support.scripted_generator import ScriptedGenerator

pytestmark = pytest.mark.model


def grammar_of(llg: LLTokenizer, tree: object) -> str:
    return compiled(OutputConstraint("structural_tag", json.dumps({"type": "structural_tag", "format": tree}), ""), llg)


def may_be(llg: LLTokenizer, grammar: str, text: str) -> bool:
    """Whether the text, whose special tokens are meant as such, may be a whole answer."""
    matcher = LLMatcher(llg, grammar, log_level=0)
    tokens = llg.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def schema(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def tag(begin: object, content: object, end: object) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


ANY = {"type": "any_text"}
INTEGER, PLACE = schema({"type": "integer"}), schema({"enum": ["Paris", "Oslo"]})
CALLS = {
    "type": "triggered_tags",
    "triggers": ["<function=", "<tool:"],
    "tags": [
        tag("<function=weather>", PLACE, "</function>"),
        tag("<function=sum>", INTEGER, "</function>"),
        {"begin": "<tool:", "content": INTEGER, "end": ">"},
    ],
}
WEATHER, SUM, TOOL = '<function=weather>"Oslo"</function>', "<function=sum>12</function>", "<tool:-3>"
DISPATCH = {"type": "dispatch", "rules": [["a=", INTEGER], ["b=", const("x;")], ["b=", const("y;")]]}
EITHER_TAG = {"tags": [tag("<i>", INTEGER, "</i>"), tag("<p>", PLACE, "</p>")], "separator": ", "}

# (format, texts that it allows, texts that it does not)
TREES: dict[str, tuple[Any, list[str], list[str]]] = {
    "text": (const("é\n"), ["é\n"], ["", "é", "é\nx"]),
    "any text": (ANY, ["", "any\n<thing>🦜"], []),
    "bounded text": ({**ANY, "max_chars": 3}, ["", "é🦜\n"], ["abcd"]),
    "text without": ({**ANY, "excludes": ["bad", "<"]}, ["b ad"], ["a bad one", "a<"]),
    "schema": (schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                       "additionalProperties": False}), ['{"a":1}'], ["{}", '{"a": 1}', '{"a":1}x']),
    "pattern": ({"type": "regex", "pattern": "a/b|[0-9]{2}"}, ["a/b", "12"], ["1", "a\\/b"]),
    "grammar": ({"type": "grammar", "grammar": 'root ::= ("yes" | "no")'}, ["yes", "no"], ["yesno", ""]),
    "sequence": ({"type": "sequence", "elements": [const("Answer: "), INTEGER]}, ["Answer: 4"], ["Answer: ", "4"]),
    "or": ({"type": "or", "elements": [const("yes"), INTEGER]}, ["yes", "7"], ["yes7", ""]),
    "optional": ({"type": "optional", "content": const("x")}, ["", "x"], ["xx"]),
    "star": ({"type": "star", "content": const("x")}, ["", "xxx"], ["xy"]),
    "plus": ({"type": "plus", "content": const("x")}, ["x", "xxx"], [""]),
    "repeat": ({"type": "repeat", "min": 1, "max": 2, "content": const("x")}, ["x", "xx"], ["", "xxx"]),
    "repeat on": ({"type": "repeat", "min": 2, "max": -1, "content": const("x")}, ["xx", "xxxx"], ["x"]),
    "tag": (tag("<a>", ANY, "</a>"), ["<a></a>", "<a>x</b>\n</a>"], ["<a>x", "x</a>", "<a>x</a>y"]),
    "tag with ends": (tag("<a>", ANY, ["</a>", "</b>"]), ["<a>x</b>", "<a>x</a>"], ["<a>x</a></b>"]),
    "tag of a schema": (tag("<a>", PLACE, ["</a>", ""]), ['<a>"Oslo"</a>', '<a>"Oslo"'], ['<a>"Rome"</a>']),
    "tag of a pattern": (tag("<", {"type": "regex", "pattern": ".*"}, ">"), ["<a>", "<>"], ["<a>>", "<\n>"]),
    "tags in tags": (tag("<a>", tag("<b>", ANY, "</b>"), "</a>"), ["<a><b>x</b></a>"], ["<a>x</a>", "<a><b>x</a>"]),
    "calls": (CALLS, ["", "text", WEATHER, f"a {SUM} b {WEATHER}{TOOL} c", "a <func"],
              ["<function=", f"x {SUM[:-1]}", "<function=other>", "a <tool:x>", '<function=weather>"Rome"</function>']),
    "a call at least": ({**CALLS, "at_least_one": True}, [WEATHER, f"{TOOL} a {SUM} b"], ["", f"a {SUM}"]),
    "one call": ({**CALLS, "stop_after_first": True}, ["", "text", f"text {SUM}"], [f"{SUM} b", f"{SUM}{SUM}"]),
    "just a call": ({**CALLS, "at_least_one": True, "stop_after_first": True}, [SUM, TOOL], ["", f"a {SUM}", SUM * 2]),
    "calls without": ({**CALLS, "excludes": ["bad"]}, [f"a {SUM}"], ["bad", f"{SUM} bad", f"bad{SUM}"]),
    "thought and calls": ({"type": "sequence", "elements": [tag("<think>", ANY, "</think>"), CALLS]},
                          [f"<think>{SUM[:9]}</think>a {SUM}"], [SUM, f"<think>x</think>{SUM[:10]}"]),
    "calls in a tag": (tag("<out>", CALLS, "</out>"), ["<out></out>", f"<out>a {SUM} b</out>"],
                       ["<out>", f"<out>{SUM}", "<out><function=</out>", "<out>a</out>b"]),
    "one call in a tag": (tag("<out>", {**CALLS, "stop_after_first": True}, "</out>"),
                          ["<out>a</out>", f"<out>{SUM}</out>"], [f"<out>{SUM}a</out>", "<out>"]),
    "tags apart": ({"type": "tags_with_separator", **EITHER_TAG}, ["", "<i>1</i>", '<i>1</i>, <p>"Oslo"</p>'],
                   ["<i>1</i>,", "<i>1</i><i>1</i>", "x"]),
    "a tag apart": ({"type": "tags_with_separator", **EITHER_TAG, "stop_after_first": True, "at_least_one": True},
                    ["<i>1</i>"], ["", "<i>1</i>, <i>1</i>"]),
    "dispatch": (DISPATCH, ["", "text", "a=1 b=y; b=x;"], ["a=x", "b=z;"]),
    "dispatch once": ({**DISPATCH, "loop": False}, ["a", "a a=1", "b=x;"], ["a=1 a", "b=x;b=y;"]),
    "marks of a byte": ({"type": "dispatch", "rules": [["<", const("P")], ["=", INTEGER]]}, ["=6<P", "=6a", "<P=-1"],
                        ["=6<x", "=6=x", "<x", "=", "a<"]),
    "special tokens": (tag("<|im_start|>", ANY, "<|endoftext|>!"), ["<|im_start|>x<|endoftext|>!"],
                       ["<|im_start|>x!", "<|im_start|>x<|endoftext|>", "<|im_start|>x<|im_start|><|endoftext|>!"]),
    "tokens": (tag({"type": "token", "token": "<|im_start|>"}, INTEGER, {"type": "token", "token": 104}),
               ["<|im_start|>5x"], ["5x", "<|im_start|>5y"]),
}  # fmt: skip


@pytest.mark.parametrize("case", TREES)
def test_what_may_be_written(llg: LLTokenizer, case: str) -> None:
    tree, good, bad = TREES[case]
    grammar = grammar_of(llg, tree)
    for text in good:
        assert may_be(llg, grammar, text), text
    for text in bad:
        assert not may_be(llg, grammar, text), text


OPTIONAL = ("type", "style", "any_order", "at_least_one", "stop_after_first", "loop", "excludes", "max_chars", "x")


def with_nulls(part: Any) -> Any:
    """A part in which each format has all that it lacks as null. Schemas stay as they are."""
    if isinstance(part, list):
        return [with_nulls(one) for one in part]
    if not isinstance(part, dict):
        return part
    kept = {name: value if name == "json_schema" else with_nulls(value) for name, value in part.items()}
    return {**dict.fromkeys(OPTIONAL), **kept}


@pytest.mark.parametrize("case", TREES)
def test_null_is_not_given(llg: LLTokenizer, case: str) -> None:
    tree = TREES[case][0]
    assert grammar_of(llg, with_nulls(tree)) == grammar_of(llg, tree)


def test_null_in_a_schema_is_a_value(llg: LLTokenizer) -> None:
    grammar = grammar_of(llg, schema({"enum": [None, 1]}))
    assert may_be(llg, grammar, "null") and may_be(llg, grammar, "1") and not may_be(llg, grammar, "2")


_TAG = {"type": "tag", "begin": "<a>", "content": ANY, "end": "</a>"}
REFUSED: list[tuple[Any, str]] = [
    ("any_text", "must be an object"),
    ({}, "must have a `type`"),
    ({"type": "any_tokens"}, "'any_tokens' is not supported"),
    ({"type": "any_text", "max_tokens": 5}, "max_tokens"),
    ({"type": "any_text", "max_chars": 100_000}, "max_chars"),
    ({"type": "any_text", "stop": "x"}, "'stop' is not known"),
    ({"type": "any_text", "excludes": ["<|im_start|>"]}, "special tokens"),
    ({"type": "json_schema", "json_schema": {"not": {}}}, "'not'"),
    ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "style"),
    ({"type": "json_schema", "json_schema": {}, "any_order": True}, "any_order"),
    ({"type": "json_schema", "json_schema": False}, "allow something"),
    ({"type": "regex", "pattern": "("}, "regex"),
    ({"type": "grammar", "grammar": "?? :::"}, "neither Lark nor GBNF"),
    ({"type": "sequence", "elements": [ANY, const("x")]}, "last part"),
    ({"type": "sequence", "elements": []}, "not empty"),
    ({"type": "or", "elements": [ANY, const("x")]}, "last part"),
    ({"type": "star", "content": CALLS}, "last part"),
    ({"type": "repeat", "min": 3, "max": 2, "content": const("x")}, "repeat"),
    ({"type": "repeat", "min": True, "max": 2, "content": const("x")}, "repeat"),
    ({**_TAG, "end": ""}, "must not be empty"),
    ({**_TAG, "end": None}, "must be an object"),
    ({"type": None}, "must have a `type`"),
    ({"type": "const_string", "value": None}, "must be a text"),
    ({"type": "json_schema", "json_schema": None}, "allow something"),
    ({**_TAG, "end": "x<|im_start|>"}, "only at its beginning"),
    ({**_TAG, "end": "<|im_end|>"}, "ends an answer"),
    ({**_TAG, "end": []}, "must be an object"),
    ({**_TAG, "begin": {"type": "token", "token": "two tokens"}}, "id of one"),
    ({**_TAG, "begin": {"type": "token", "token": 49_152}}, "id of one"),
    ({**_TAG, "begin": 5}, "must be an object"),
    ({**CALLS, "triggers": ["<function="]}, "0 fit"),
    ({**CALLS, "triggers": ["<function=", "<tool:", "<f"]}, "2 fit"),
    ({**CALLS, "triggers": ["<function=", "<tool:", "<other"]}, "No tag begins"),
    ({**CALLS, "triggers": "<"}, "a list"),
    ({**CALLS, "at_least_one": 1}, "true or false"),
    ({**CALLS, "tags": [ANY]}, "format `tag`"),
    (tag("<a>", {**DISPATCH, "rules": [["<", INTEGER]]}, "</a>"), "told apart"),
    ({**DISPATCH, "rules": [["ab", INTEGER], ["b", INTEGER]]}, "told apart"),
    ({**DISPATCH, "rules": [["ab"]]}, "a text and a format"),
    ({**DISPATCH, "rules": [["ab", ANY]]}, "last part"),
]


@pytest.mark.parametrize(("tree", "reason"), REFUSED, ids=lambda case: json.dumps(case)[:60])
def test_what_cannot_be_kept_is_refused(llg: LLTokenizer, tree: object, reason: str) -> None:
    with pytest.raises(UnsupportedGrammarError) as caught:
        grammar_of(llg, tree)
    assert reason in str(caught.value) and len(str(caught.value)) < 500


NO_TAGS = [
    "[]",
    "5",
    "{",
    '{"triggers": ["a"]}',
    '{"structures": [{}], "triggers": ["a"]}',
    '{"structures": [{"begin": "a", "schema": null, "end": "b"}], "triggers": ["a"]}',
    '{"format": null}',
    '{"type": "x", "format": {}}',
]


@pytest.mark.parametrize("text", [*NO_TAGS, '{"format": {"type": "any_text"}, "x": 1}'])
def test_what_is_no_tag_is_refused(llg: LLTokenizer, text: str) -> None:
    with pytest.raises(UnsupportedGrammarError):
        compiled(OutputConstraint("structural_tag", text, ""), llg)


def test_formats_are_bounded(llg: LLTokenizer) -> None:
    tree = const("x")
    for _ in range(MAX_DEPTH - 1):
        tree = {"type": "optional", "content": tree}
    assert may_be(llg, grammar_of(llg, tree), "x")
    with pytest.raises(UnsupportedGrammarError, match="deeper"):
        grammar_of(llg, {"type": "optional", "content": tree})


def test_drawn_answers_follow_the_tags(llg: LLTokenizer) -> None:
    """Where triggers are likely, read without any grammar: none stands anywhere but before what must follow it."""
    tree = {"type": "dispatch", "rules": [["=", INTEGER], ["<", PLACE]]}
    grammar, draw = grammar_of(llg, tree), random.Random(7)
    texts = [llg.decode_str([token_id]) for token_id in range(llg.vocab_size)]
    liked = np.array([token_id in llg.eos_tokens or bool(set("=<") & set(text)) for token_id, text in enumerate(texts)])
    answers = [drawn_answer(grammar, llg, draw, 200, liked) for _ in range(60)]
    ended = [answer for answer in answers if answer is not None]
    followed = re.compile(r'(?:[^=<]|=-?(?:0|[1-9][0-9]*)|<"(?:Paris|Oslo)")*')
    assert len(ended) > 20 and [answer for answer in ended if not followed.fullmatch(answer)] == []
    assert sum("=" in answer for answer in ended) > 5 and sum("<" in answer for answer in ended) > 5


STRUCTURES: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<function=sum>", "schema": {"type": "integer"}, "end": "</function>"}],
    "triggers": ["<function="],
}
FORMAT = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<function="],
        "tags": [tag("<function=sum>", INTEGER, "</function>")],
    },
}


def test_every_spelling_is_one_grammar(target: Target, shared_generator: ScriptedGenerator) -> None:
    """Of `response_format`, and of `structured_outputs`, where vLLM has it as a text."""
    shared_generator.requests.clear()
    (structure,) = STRUCTURES["structures"]
    with_nulls = {**STRUCTURES, "structures": [{**structure, "content": None}], "format": None}
    for spelling in (STRUCTURES, FORMAT, with_nulls):
        target.chat(response_format=spelling, max_tokens=3)
        target.complete(extra_body={"response_format": spelling}, max_tokens=3)
        for wish in (spelling, json.dumps(spelling)):
            target.chat(extra_body={"structured_outputs": {"structural_tag": wish}}, max_tokens=3)
    assert len(shared_generator.requests) == 12
    assert len({request.params.grammar for request in shared_generator.requests}) == 1
    assert shared_generator.requests[0].params.grammar is not None


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format", "structures"),
        ({"response_format": {**FORMAT, "strict": True}}, "response_format", "'strict' is not known"),
        ({"structured_outputs": {"structural_tag": 5}}, "structured_outputs", "wrong type"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs", "cannot be followed"),
        ({"structured_outputs": {"structural_tag": FORMAT, "regex": "a"}}, "structured_outputs", "exactly one"),
    ],
    ids=str,
)
def test_bad_tags_are_explained(target: Target, fields: dict[str, Any], param: str, reason: str) -> None:
    answer = target.http.post("/v1/completions", json={"model": target.model, "prompt": "x", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert reason in error["message"]
