"""Schemas and grammars: each keyword enforced or refused, hostile ones refused in time; what reaches the workers."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
import ray
from llguidance import LLMatcher, LLTokenizer

from cluster.config.settings import GatewaySettings
from cluster.errors import InvalidRequestError, OverloadedError
from cluster.http.openai import structured
from cluster.http.openai.json_schemas import UnsupportedGrammarError
from cluster.http.openai.structured import Grammars, OutputConstraint, compiled
from engine.sampling.grammar import grammar_tokenizer, limits_of
from engine.sampling.params import MAX_GRAMMAR_CHARS
from engine.text.tokenizer import Tokenizer
from tests.support.http_server import MODEL, clients_of, scripted_api
from tests.support.openai_conformance import Target
from tests.support.schema_answers import takes, takes_text
from tests.support.scripted_generator import ScriptedGenerator
from tests.support.waiting import HANGS_S, eventually

pytestmark = pytest.mark.model


def of_schema(schema: object) -> OutputConstraint:
    return OutputConstraint("json", json.dumps(schema), "response_format")


def follows(llg: LLTokenizer, schema: object, instance: object) -> bool:
    """Whether the instance, as compact JSON, may be an answer."""
    matcher = LLMatcher(llg, compiled(of_schema(schema), llg))
    tokens = llg.tokenize_str(json.dumps(instance, separators=(",", ":"), ensure_ascii=False))
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


AB = {"a": {"type": "integer"}, "b": {"type": "integer"}}
ONE_OF = {"oneOf": [{"type": "integer"}, {"type": "string"}]}
TREE = {
    "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "$ref": "#/$defs/tree",
}

# (schema, an instance that it allows, one that it does not)
ENFORCED: list[tuple[dict[str, Any], Any, Any]] = [
    ({"type": "integer"}, 3, "3"),
    ({"type": ["string", "null"]}, None, 1),
    ({"type": "boolean"}, True, 1),
    ({"enum": ["a", 1, {"b": [None]}]}, {"b": [None]}, {"b": []}),
    ({"enum": ["a", "abc"], "minLength": 2}, "abc", "a"),
    ({"const": "é\n"}, "é\n", "e"),
    ({"type": "string", "minLength": 2}, "ab", "a"),
    ({"type": "string", "maxLength": 2}, "🦜é", "abc"),
    ({"type": "string", "pattern": "^[a-c]+$"}, "abc", "abd"),
    ({"type": "string", "pattern": "b"}, "abc", "ac"),
    ({"type": "string", "format": "date"}, "2026-11-24", "today"),
    ({"type": "string", "format": "uuid"}, "12345678-1234-1234-1234-123456789012", "12345678"),
    ({"type": "integer", "minimum": 3}, 3, 2),
    ({"type": "integer", "maximum": 3}, -7, 4),
    ({"type": "integer", "exclusiveMinimum": 3}, 4, 3),
    ({"type": "number", "exclusiveMaximum": 0.5}, 0.25, 0.5),
    ({"type": "integer", "multipleOf": 5}, 10, 12),
    ({"type": "object", "properties": AB, "required": ["b"]}, {"b": 1}, {"a": 1}),
    ({"type": "object", "properties": AB, "additionalProperties": False}, {"a": 1}, {"c": 1}),
    ({"type": "object", "additionalProperties": {"type": "null"}}, {"c": None}, {"c": 1}),
    ({"type": "object", "patternProperties": {"^n": {"type": "integer"}}}, {"no": 1}, {"no": "1"}),
    ({"type": "object", "minProperties": 1}, {"c": 1}, {}),
    ({"type": "object", "maxProperties": 1}, {"c": 1}, {"c": 1, "d": 1}),
    ({"type": "array", "items": {"type": "integer"}}, [1, 2], ["a"]),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, [1], [1, 2]),
    ({"type": "array", "minItems": 1, "maxItems": 2}, [1, 2], []),
    ({"type": "array", "maxItems": 1}, [1], [1, 2]),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "a", None),
    (ONE_OF, "a", None),
    ({"allOf": [{"type": "string", "minLength": 2}, {"pattern": "^a"}]}, "ab", "bb"),
    (TREE, [[], [[]]], [1]),
    ({"properties": AB, "required": ["a"]}, {"a": 1}, {}),
    ({"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "minLength": 2}, "ab", "a"),
    ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}}, {"b": 1}, {"a": "x"}),
    ({"type": "object", "propertyNames": {"type": "string", "enum": ["a", 1]}}, {"a": []}, {"1": 1}),
    ({"type": "object", "propertyNames": {"const": "a"}, "required": ["a"]}, {"a": 1}, {}),
    ({"propertyNames": {"$ref": "#/$defs/c"}, "$defs": {"c": {"title": "C", "enum": ["a"]}}}, {"a": 1}, {"b": 1}),
    ({"propertyNames": {"pattern": "^n"}, "additionalProperties": {"type": "integer"}}, {"no": 1}, {"yes": 1}),
    ({"type": "object", "propertyNames": {"pattern": "^n"}, "additionalProperties": False}, {}, {"no": 1}),
    # Draft 4 and 7
    ({"definitions": {"s": {"type": "string"}}, "$ref": "#/definitions/s"}, "ab", 1),
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, 4, 3),
    ({"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, [1], [1, 1]),
    # what changes nothing
    ({"type": "integer", "title": "x", "default": 3, "x-guidance": {"lenient": True}, "made-up": 3}, 4, "4"),
    ({"type": "string", "format": "colour"}, "green", 1),
    ({"type": "array", "uniqueItems": False, "unevaluatedItems": True}, [1, 1], {}),
    ({"type": "object", "propertyNames": {"type": "string", "title": "x"}, "properties": AB}, {"c": 1}, {"a": "x"}),
    ({"type": "object", "propertyNames": True, "additionalProperties": {"type": "null"}}, {"c": None}, {"c": 1}),
    ({"type": "object", "properties": {"title": {"type": "integer"}, "not": {}}}, {"title": 1}, {"title": "x"}),
]


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED, ids=lambda case: json.dumps(case)[:60])
def test_a_keyword_is_enforced(llg: LLTokenizer, schema: dict[str, Any], good: object, bad: object) -> None:
    assert follows(llg, schema, good)
    assert not follows(llg, schema, bad)
    if "additionalItems" not in schema and schema.get("exclusiveMinimum") is not True:  # words of older drafts
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        assert validator.is_valid(good)
        assert not validator.is_valid(bad)


def test_the_librarys_errors_note_no_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it makes its first one, after which it asks no more."""
    monkeypatch.delenv("RUST_LIB_BACKTRACE", raising=False)
    with pytest.raises(ValueError, match="tokenizer"):
        grammar_tokenizer("{}", 10, (1,))
    assert os.environ["RUST_LIB_BACKTRACE"] == "0"


def test_json_is_compact(llg: LLTokenizer) -> None:
    """With free white space a model that says little of use writes that until it is cut."""
    schema = {"type": "object", "properties": {**AB, "c": {"type": "array", "items": {"type": "string"}}}}
    grammar = compiled(of_schema(schema), llg)
    for text, taken in (
        ('{"a":1,"b":2,"c":["x y","z"]}', True), ('{ "a":1}', False), ('{"a": 1}', False), ('{"a":1, "b":2}', False),
        ('{"c":["x", "y"]}', False), ('{"a":1}\n', False), (' {"a":1}', False),
    ):  # fmt: skip
        matcher, tokens = LLMatcher(llg, grammar), llg.tokenize_str(text)
        assert (matcher.try_consume_tokens(tokens) == len(tokens)) == taken, text


REFUSED: list[tuple[Any, str]] = [
    (False, "must be an object"),
    ({"not": {"type": "string"}}, "'not'"),
    ({"type": "object", "properties": {"x": {"not": {}}}}, "#/properties/x"),
    ({"if": {}, "then": {}}, "'if'"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "dependentSchemas": {"a": {}}}, "dependentSchemas"),
    ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies"),
    ({"type": "object", "propertyNames": {"maxLength": 1}}, "propertyNames"),
    ({"type": "object", "propertyNames": {"maxLength": 1, "pattern": "a"}}, "propertyNames"),
    ({"type": "object", "propertyNames": {"enum": ["a"]}, "properties": AB}, "propertyNames"),
    ({"type": "object", "propertyNames": {"type": "integer"}}, "propertyNames"),
    ({"type": "object", "propertyNames": {"$ref": "#/$defs/none"}}, "propertyNames"),
    ({"type": "object", "propertyNames": False}, "propertyNames"),
    (
        {
            "properties": {
                "m": {"$id": "http://x/y", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"enum": ["a"]}}}
            },
            "$defs": {"n": {"type": "string"}},
        },
        "propertyNames",
    ),
    (
        {
            "properties": {
                "m": {"propertyNames": {"enum": ["a"]}, "additionalProperties": {"type": "array"}},
                "n": {"$ref": "#/properties/m/additionalProperties"},
            }
        },
        "propertyNames",
    ),
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "oneOf": [{"$ref": "#/definitions/l", "type": "object"}, {"$ref": "#/definitions/o"}],
            "definitions": {"l": {"items": {}}, "o": {"properties": {"a": {}}}},
        },
        "beside a",
    ),
    ({"enum": ["\ud800"]}, "half of a character"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {}}, "contains"),
    ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
    ({"type": "array", "items": {"$dynamicRef": "#x"}}, "dynamicRef"),
    ({"type": "integer", "divisibleBy": 2}, "divisibleBy"),
    ({"type": "integer", "multipleOf": -2}, "multipleOf"),
    ({"extends": {}}, "extends"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"type": "string", "pattern": "^(?=a)b"}, "look"),
    ({"type": "string", "pattern": "("}, "regex"),
    ({"type": "string", "minLength": "3"}, "minLength"),
    ({"type": "text"}, "type"),
    ({"properties": {"a": 5}}, "#/properties/a"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
    ({"$ref": "https://example.com/schema.json"}, "nothing is fetched"),
    ({"$ref": "file:///etc/passwd"}, "nothing is fetched"),
    ({"$ref": "#/$defs/missing"}, "leads to no part"),
    ({"made-up": {"extends": {}}, "$ref": "#/made-up"}, "leads to no part"),
    ({"$ref": "#"}, ""),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=lambda case: json.dumps(case)[:60])
def test_what_cannot_be_enforced_is_refused(llg: LLTokenizer, schema: object, reason: str) -> None:
    with pytest.raises(UnsupportedGrammarError) as caught:
        compiled(of_schema(schema), llg)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 500


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def _either(names: int) -> dict[str, Any]:
    """Each of so many properties or another one: twice as many combinations with each."""
    return {
        "allOf": [
            {"anyOf": [{"type": "object", "required": [f"{letter}{number}"]} for letter in "ab"]}
            for number in range(names)
        ]
    }


@pytest.mark.parametrize(
    "wanted",
    [
        of_schema(_nested(65)),
        of_schema(_either(40)),
        of_schema({"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(3000)}}),
        of_schema({"anyOf": [{"type": "string", "pattern": f".*{chr(97 + n)}.{{{n + 400}}}"} for n in range(26)]}),
        of_schema({"type": "integer", "multipleOf": 999999937}),
        OutputConstraint("json", "[" * 100_000, "response_format"),
        OutputConstraint("json", "{", "response_format"),
        OutputConstraint("grammar", "start: /.*a.{25}/ & /.*b.{25}/ & /.*c.{30}/", "structured_outputs"),
        OutputConstraint("grammar", "?? :::", "structured_outputs"),
        OutputConstraint("grammar", "start: nothing", "structured_outputs"),
        OutputConstraint("regex", "(" * 1000, "structured_outputs"),
    ],
    ids=lambda wanted: wanted.text[:60],
)
def test_what_is_hostile_is_refused(llg: LLTokenizer, wanted: OutputConstraint) -> None:
    with pytest.raises(UnsupportedGrammarError):
        compiled(wanted, llg)


@pytest.mark.parametrize(
    ("regex", "said"),
    [
        ("a/b(c", "unclosed group, at '(c' of the regular expression 'a/b(c'."),
        ("[a-/", "invalid character class range, the start must be <= the end, at 'a-/' of the regular expression"),
        ("(?=a)b", "look-around, including look-ahead and look-behind, is not supported, at '(?=a)b' of"),
        (r"\bfoo", r"lookarounds not supported yet; WordUnicode, of the regular expression '\\bfoo'."),
        ("a\\", r"It ends within an escape sequence: 'a\\'."),
        ("x" * 5_000 + "(", "unclosed group, at '(' of the regular expression 'xxxxx"),
    ],
    ids=lambda text: text[:20],
)
def test_the_fault_of_a_regex_is_told_by_its_own_text(llg: LLTokenizer, regex: str, said: str) -> None:
    with pytest.raises(UnsupportedGrammarError) as raised:
        compiled(OutputConstraint("regex", regex, "structured_outputs"), llg)
    assert str(raised.value).startswith(said) and "start:" not in str(raised.value)


AMBIGUOUS = 'start: x\nx: "a" | x x | x x x'
OF_A_CLIENT: dict[str, Any] = {"type": "grammar", "grammar": AMBIGUOUS}
REPEATED: dict[str, Any] = {"type": "const_string", "value": "a"}
for _ in range(5):
    REPEATED = {"type": "plus", "content": {"type": "optional", "content": REPEATED}}


@pytest.mark.parametrize(
    "wanted",
    [
        OutputConstraint("grammar", AMBIGUOUS, "structured_outputs"),
        OutputConstraint("structural_tag", json.dumps({"format": OF_A_CLIENT}), "response_format"),
        OutputConstraint("structural_tag", json.dumps({"format": REPEATED}), "response_format"),
    ],
    ids=["grammar", "a part of a tag", "repeats of repeats"],
)
def test_rules_of_a_client_have_less_room(llg: LLTokenizer, wanted: OutputConstraint) -> None:
    """They may be ambiguous; then each token takes longer than the one before it. What Legato writes is not."""
    grammar = compiled(wanted, llg)
    assert limits_of(grammar).max_items_in_row < limits_of("start: /a/").max_items_in_row
    assert takes_text(grammar, llg, "a" * 30)
    assert not takes_text(grammar, llg, "a" * 250)
    wide = {"type": "object", "properties": {f"property {number}": {"type": "integer"} for number in range(200)}}
    assert takes(compiled(of_schema(wide), llg), llg, {"property 199": 1})
    texts = [f"answer {number}" for number in range(structured.MAX_CHOICES)]
    assert takes_text(compiled(OutputConstraint("choice", json.dumps(texts), ""), llg), llg, texts[-1])


def test_rules_of_a_client_have_room_for_what_is_honest(llg: LLTokenizer) -> None:
    """JSON as xgrammar's documents write it, right-recursive lists, sums, and wide schemas."""
    properties = {f"property {number}": {"type": "integer"} for number in range(120)}
    schema = json.dumps({"type": "object", "properties": properties, "additionalProperties": False})
    sums = 'start: sum\nsum: sum "+" sum | sum "-" sum | /[0-9]/'
    written = r"""
        root ::= "{" string ":" string "}"
        string ::= "\"" text "\""
        text ::= "" | [^"\\\x00-\x1F] text | "\\" ["\\/bfnrt] text
    """
    for rules, text in (
        (f'start: "x" object\nobject: %json {schema}', 'x{"property 5":1,"property 119":2}'),
        ('start: list\nlist: "a," | "a," list', "a," * 500),
        (sums, "+".join("1" * 150)),
        (written, '{"name":"a short \\"text\\""}'),
    ):
        assert takes_text(compiled(OutputConstraint("grammar", rules, "structured_outputs"), llg), llg, text)


def _patterns(number: int) -> dict[str, Any]:
    """So many patterns that must all hold, in a few hundred characters: with each, compiling takes twice as long."""
    schema: dict[str, Any] = {"type": "string"}
    for letter in range(number):
        schema = {"allOf": [schema, {"pattern": f".*{chr(97 + letter)}.*"}]}
    return schema


def _cpu_s(process: psutil.Process) -> float:
    """Of a process, of those that it waited for, and of those that still run."""
    times = process.cpu_times()
    return sum(times[:4]) + sum(_cpu_s(child) for child in process.children())


async def test_what_takes_too_long_to_compile_is_refused(tokenizer: Tokenizer) -> None:
    """For a second of a processor and no more, and nothing goes on behind it; the next one is compiled as ever."""
    grammars = Grammars(tokenizer)
    await grammars.grammar_for(of_schema({"type": "integer"}), None)
    here = psutil.Process()
    for schema in (_patterns(20), {"type": "object", "properties": {"x": _patterns(19)}}):
        before = _cpu_s(here)
        with pytest.raises(InvalidRequestError, match="more than 1 s of a processor"):
            await grammars.grammar_for(of_schema(schema), None)
        refused = _cpu_s(here)
        assert refused - before < 2.5
        await asyncio.sleep(0.5)
        assert _cpu_s(here) - refused < 0.25, "somebody is still at it"
    assert await grammars.grammar_for(of_schema({"type": "integer", "minimum": 4}), None)


async def test_the_compiler_has_the_allocator_that_ray_brings(tokenizer: Tokenizer) -> None:
    allocator = Path(ray.__file__).parent / "core/libjemalloc.so"
    assert allocator.exists()  # else Ray's package for this system has none, and compiling takes a tenth longer
    grammars = Grammars(tokenizer)
    await grammars.grammar_for(of_schema({"const": "mapped"}), None)
    maps = await asyncio.to_thread(Path(f"/proc/{grammars.compiler.pid}/maps").read_text)
    assert str(allocator.resolve()) in maps


async def test_a_compiler_that_is_gone_is_started_again(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer)
    await grammars.grammar_for(of_schema({"const": "before"}), None)
    first = grammars.compiler.pid
    assert first is not None
    for process in [psutil.Process(first), *psutil.Process(first).children()]:
        process.kill()
    assert await grammars.grammar_for(of_schema({"const": "after"}), None)
    assert grammars.compiler.pid not in (None, first)


async def test_nobody_waits_for_all_grammars_of_another_tenant(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer)
    done: list[str] = []

    async def ask(tenant: str, number: int) -> None:
        await grammars.grammar_for(of_schema({"const": f"{tenant} {number}"}), None, tenant)
        done.append(tenant)

    asked = ["many"] * 6 + ["one", "other", "one"]
    await asyncio.gather(*(ask(tenant, number) for number, tenant in enumerate(asked)))
    assert done == ["many", "one", "other", "many", "one", *["many"] * 4]


@contextmanager
def nothing_compiled(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The compiler has something that takes until the end of the block. Yields what is set once it has."""
    begun, go_on, ask = threading.Event(), threading.Event(), grammars.compiler.ask

    def wait_and_ask(kind: str, text: str) -> dict[str, str]:
        begun.set()
        go_on.wait()
        return ask(kind, text)

    monkeypatch.setattr(grammars.compiler, "ask", wait_and_ask)
    try:
        yield begun
    finally:
        go_on.set()


async def test_nobody_waits_for_a_grammar_beyond_the_deadline(
    generator: ScriptedGenerator, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = scripted_api(generator, tokenizer, GatewaySettings(request_deadline_s=0.1))
    body = {"model": MODEL, "prompt": "x", "structured_outputs": {"regex": "a"}}
    with nothing_compiled(api.models[0].grammars, monkeypatch):
        async with clients_of(api) as (_, http), asyncio.timeout(HANGS_S):
            late = await http.post("/v1/completions", json=body)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert not generator.requests


@pytest.mark.parametrize("are_quick", [True, False])
async def test_grammars_that_wait_are_bounded_and_leave_room_for_other_tenants(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, are_quick: bool
) -> None:
    grammars = Grammars(tokenizer)
    monkeypatch.setattr(structured, "MAX_WAITING", 8 if are_quick else 100)
    monkeypatch.setattr(structured, "MAX_SLOW", 100 if are_quick else 8)
    monkeypatch.setattr(structured, "QUICK_S", 1e9 if are_quick else 0.0)

    async def ask(number: int, tenant: str) -> str | None:
        return await grammars.grammar_for(of_schema({"const": number}), None, tenant)

    with nothing_compiled(grammars, monkeypatch):
        many = [asyncio.create_task(ask(number, "many")) for number in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="4 of them yours"):
            await ask(4, "many")
        shared = [asyncio.create_task(ask(3, tenant)) for tenant in ("many", "other")]
        other = asyncio.create_task(ask(5, "other"))
        many.pop(1).cancel()  # its client has left
        await asyncio.sleep(0)
        many.append(asyncio.create_task(ask(6, "many")))
        await asyncio.sleep(0)
        monkeypatch.setattr(structured, "MAX_WAITING", 100)  # what waits is slow all at once, and too much of it
        monkeypatch.setattr(structured, "MAX_SLOW", 2)
        monkeypatch.setattr(structured, "QUICK_S", -1.0)
        newcomer = asyncio.create_task(ask(7, "newcomer"))
        with pytest.raises(OverloadedError, match="1 of them yours"):
            await ask(8, "other")
    assert len(set(await asyncio.gather(*many, *shared, other, newcomer))) == 6


async def test_the_grammar_of_who_has_left_is_kept(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(tokenizer)
    with nothing_compiled(grammars, monkeypatch) as begun:
        leaving = asyncio.create_task(grammars.grammar_for(of_schema({"const": 1}), None))
        await eventually(begun.is_set)
        leaving.cancel()
        await asyncio.wait({leaving})
        again = asyncio.create_task(grammars.grammar_for(of_schema({"const": 1}), None))
        await asyncio.sleep(0)
        monkeypatch.delattr(grammars, "compiler")  # nothing is compiled any more
    assert await again


async def test_grammars_are_remembered_and_bounded(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer)

    async def ask(number: int) -> object:
        return await grammars.grammar_for(of_schema({"const": number}), None)

    found = [await ask(number) for number in range(structured.MAX_KNOWN + 3)]
    for number in (3, structured.MAX_KNOWN + 2):
        assert await ask(number) is found[number]
    for number in range(3):
        assert await ask(number) is not found[number]
    with pytest.raises(InvalidRequestError, match="characters"):
        await grammars.grammar_for(OutputConstraint("regex", "a" * (MAX_GRAMMAR_CHARS + 1), "structured_outputs"), None)
    with pytest.raises(InvalidRequestError, match="Send one of them"):
        await grammars.grammar_for(of_schema({}), of_schema({}))


def test_workers_get_the_grammar_and_nothing_else(target: Target, shared_generator: ScriptedGenerator) -> None:
    schema = {"name": "a", "schema": {"type": "integer", "maximum": 5, "minimum": 0}, "strict": True}
    target.chat(response_format={"type": "json_schema", "json_schema": schema}, n=2, max_tokens=9)
    grammars = {request.params.grammar for request in shared_generator.requests}
    (grammar,) = grammars
    assert grammar is not None
    assert json.loads(grammar)["grammars"][0]["json_schema"]["maximum"] == 5
    shared_generator.requests.clear()
    target.chat(response_format={"type": "text"}, max_tokens=2)
    target.chat(extra_body={"structured_outputs": None}, max_tokens=2)
    assert [request.params.grammar for request in shared_generator.requests] == [None, None]


@pytest.mark.parametrize(
    "wish", [{"json": {"type": "object"}}, {"json_object": True}], ids=lambda wish: next(iter(wish))
)
def test_json_has_no_white_space_where_vllm_is_asked_for_none(
    target: Target, shared_generator: ScriptedGenerator, llg: LLTokenizer, wish: dict[str, Any]
) -> None:
    options = {"disable_any_whitespace": True, "disable_fallback": True, "disable_additional_properties": False}
    target.chat(extra_body={"structured_outputs": {**wish, **options, "whitespace_pattern": None}}, max_tokens=9)
    grammar = shared_generator.requests.pop().params.grammar
    assert grammar is not None and takes_text(grammar, llg, '{"a":[1,{}],"b":2}')
    for spaced in ('{ "a":1}', '{"a": 1}', '{"a" :1}', '{"a":1, "b":2}', '{"a":1\n}', '{"a":[1, 2]}'):
        assert not takes_text(grammar, llg, spaced)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"whitespace_pattern": "[ \n]*"}, "JSON is written without white space here; leave 'whitespace_pattern' out"),
        ({"disable_additional_properties": True}, "write 'additionalProperties': false into the schema's objects"),
        ({"disable_any_whitespace": "yes"}, "'disable_any_whitespace' must be true or false"),
        ({"backend": "outlines"}, "'backend' is not known here"),
    ],
    ids=str,
)
def test_what_vllm_does_with_json_and_is_not_done_here(target: Target, option: dict[str, Any], said: str) -> None:
    fields = {"model": target.model, "prompt": "x", "structured_outputs": {"json_object": True, **option}}
    answer = target.http.post("/v1/completions", json=fields)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format"),
        ({"response_format": {"type": 5}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": []}, "structured_outputs"),
    ],
    ids=str,
)
def test_bad_wishes_are_explained(target: Target, fields: dict[str, Any], param: str) -> None:
    answer = target.http.post("/v1/completions", json={"model": target.model, "prompt": "x", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert len(error["message"]) > 20
