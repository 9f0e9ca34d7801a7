"""What is made of schemas before they are compiled: arguments of calls that must be made have an end."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
from llguidance import LLTokenizer

from cluster.http.openai.json_schemas import enforceable, with_an_end
from cluster.http.openai.structured import Wanted, compiled
from engine.sampling.grammar import grammar_tokenizer
from engine.text.tokenizer import Tokenizer
from tests.support.schema_answers import drawn_answer, takes

pytestmark = pytest.mark.model

PERSON: Final = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
# Properties, all of them required; and other schemas of objects.
ENDLESS: Final[dict[str, dict[str, Any]]] = {
    "anything": {"a": {}, "b": True},
    "free": {"a": {"type": "object"}},
    "lists": {"a": {"type": "array"}, "b": {"type": "array", "items": {"type": "array"}}},
    "least": {"a": {"type": "array", "minItems": 3, "items": {"minLength": 20}}},
    "tuples": {"a": {"type": "array", "prefixItems": [{"type": "integer"}], "minItems": 2}},
    "numbers": {"a": {"type": "number"}, "b": {"type": "number", "exclusiveMinimum": 0}},
    "references": {"a": {"type": "array", "items": {"$ref": "#/$defs/p"}}},
    "or nothing": {"a": {"anyOf": [{"$ref": "#/$defs/p"}, {"type": "null"}]}},
}
OTHERS: Final[dict[str, dict[str, Any]]] = {
    "nothing is said": {},
    "open": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]},
    "map": {"additionalProperties": {"type": "array", "items": {"type": "string"}}},
    "not named": {"properties": {"a": {"type": "null"}}, "required": ["b"]},
    "patterns": {"patternProperties": {"^[a-c]$": {"type": "string"}}},
}
SCHEMAS: Final = {name: {"type": "object"} | schema for name, schema in OTHERS.items()} | {
    name: {"type": "object", "$defs": {"p": PERSON}, "properties": properties, "required": list(properties)}
    for name, properties in ENDLESS.items()
}


@pytest.fixture(scope="module")
def llg(smollm2_folder: Path) -> LLTokenizer:
    tokenizer = Tokenizer(smollm2_folder)
    return grammar_tokenizer(tokenizer.json, tokenizer.vocab_size, tuple(tokenizer.eos_token_ids))


def _compiled(schema: object, llg: LLTokenizer) -> str:
    return compiled(Wanted("json", json.dumps(schema), "tools"), llg)


@pytest.mark.parametrize("name", SCHEMAS)
def test_arguments_of_forced_calls_have_an_end(llg: LLTokenizer, name: str) -> None:
    """Whatever a model likes to write, and it follows the schema as it was sent."""
    schema = SCHEMAS[name]
    grammar = _compiled(with_an_end(enforceable(schema), 256), llg)
    for seed in range(3):
        answer = drawn_answer(grammar, llg, random.Random(seed), max_tokens=2000)
        assert answer is not None, "it did not end"
        jsonschema.Draft202012Validator(schema).validate(json.loads(answer))


def test_schemas_that_describe_an_object_together_stay_open(llg: LLTokenizer) -> None:
    """Closed one by one, they would allow nothing."""
    other = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    for schema in (
        {"$defs": {"p": PERSON, "o": other}, "allOf": [{"$ref": "#/$defs/p"}, {"$ref": "#/$defs/o"}]},
        {"$defs": {"p": PERSON}, **other, "$ref": "#/$defs/p"},
        {"$defs": {"p": PERSON}, **other, "anyOf": [{"$ref": "#/$defs/p"}]},
        {**PERSON, "allOf": [other]},
    ):
        grammar = _compiled(with_an_end(enforceable(schema), 256), llg)
        assert takes(grammar, llg, {"name": "x", "age": 3}) or takes(grammar, llg, {"age": 3, "name": "x"})


def test_bounds_that_are_said_stay(llg: LLTokenizer) -> None:
    properties = {
        "text": {"type": "string", "maxLength": 5000},
        "list": {"type": "array", "items": {"type": "integer", "maximum": 5}, "maxItems": 40},
        "sum": {"type": "number", "multipleOf": 0.5},
    }
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    grammar = _compiled(with_an_end(enforceable(schema), 64), llg)
    assert takes(grammar, llg, {"text": "a" * 5000, "list": [5] * 40, "sum": 2.5})
    assert not takes(grammar, llg, {"text": "a" * 5001, "list": [5], "sum": 2.5})
    assert not takes(grammar, llg, {"text": "a", "list": [6], "sum": 2.5})
