"""What is made of schemas before they are compiled: arguments of calls that must be made have an end."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any, Final

import jsonschema
import pytest
from llguidance import LLTokenizer

from cluster.http.openai.bounded_schemas import with_an_end
from cluster.http.openai.json_schemas import UnsupportedGrammarError, enforceable, for_llguidance
from cluster.http.openai.structured import OutputConstraint, compiled
from tests.support.schema_answers import drawn_answer, takes, takes_text

pytestmark = pytest.mark.model

GUIDANCE: Final = {"whitespace_flexible": False, "json_allowed_escapes": 'nrbtf\\"'}  # what llguidance is told of JSON
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
    "not named, of others": {"additionalProperties": {"type": "string"}, "required": ["a", "b"]},
    "others beside": {"properties": {"c": {}}, "additionalProperties": {"type": "array"}, "required": ["a", "c"]},
    "patterns": {"patternProperties": {"^[a-c]$": {"type": "string"}}},
}
SCHEMAS: Final = {name: {"type": "object"} | schema for name, schema in OTHERS.items()} | {
    name: {"type": "object", "$defs": {"p": PERSON}, "properties": properties, "required": list(properties)}
    for name, properties in ENDLESS.items()
}


def _compiled(schema: object, llg: LLTokenizer) -> str:
    return compiled(OutputConstraint("json", json.dumps(schema), "tools"), llg)


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


@pytest.mark.parametrize("word", ["$ref", "anyOf", "allOf"])
def test_definitions_beside_what_refers_to_them_describe_no_object_with_it(llg: LLTokenizer, word: str) -> None:
    """As pydantic writes a model that refers to itself, or a union."""
    reference = {"$ref": "#/$defs/p"}
    schema = {"$defs": {"p": PERSON}} | (reference if word == "$ref" else {word: [reference]})
    grammar = _compiled(with_an_end(enforceable(schema), 256), llg)
    assert takes(grammar, llg, {"name": "x"})
    assert not takes(grammar, llg, {"name": "x", "age": 3}), "it is open, and a small model writes on for ever"


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


def _tagged(kind: str, **properties: Any) -> dict[str, Any]:
    properties = {"kind": {"const": kind}, **properties}
    return {"type": "object", "properties": properties, "required": ["kind"], "additionalProperties": False}


CAT, DOG = _tagged("cat", lives={"type": "integer"}), _tagged("dog", tail={"type": "boolean"})
DEFS: Final[dict[str, Any]] = {
    "cat": CAT,
    "dog": DOG,
    "pet": {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]},
    "text": {"type": "string"},
    "short": {"type": "string", "maxLength": 2},
    "long": {"type": "string", "minLength": 3},
    "name": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    "number": {"type": "object", "required": ["number"], "additionalProperties": False,
               "properties": {"number": {"type": "integer"}}},
    "tree": {"oneOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/tree"}}]},
}  # fmt: skip


def _one_of(*branches: str | dict[str, Any], **beside: Any) -> dict[str, Any]:
    named = [{"$ref": f"#/$defs/{branch}"} if isinstance(branch, str) else branch for branch in branches]
    return {"$defs": DEFS, **beside, "oneOf": named}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (_one_of("cat", "dog"), {"kind": "dog", "tail": True}, {"kind": "cat", "tail": True}),
        (_one_of("pet", {"type": "null"}), None, {"kind": "fox"}),
        (_one_of("pet", "text", {"type": "array", "items": {"$ref": "#/$defs/pet"}}), [{"kind": "cat"}], [None]),
        (_one_of("short", "long"), "abc", 1),
        (_one_of("name", "number", properties={"name": {"type": "string"}}), {"number": 3}, {"number": "x"}),
        (_one_of({"enum": [1, "a"]}, {"enum": [2, True]}), 1, "b"),
        (_one_of({"type": "integer", "maximum": 3}, {"type": "number", "minimum": 3.5}), 4.25, 3.25),
        (_one_of({"allOf": [{"$ref": "#/$defs/text"}, {"minLength": 1}]}, {"type": "boolean"}), "a", ""),
        ({"$defs": DEFS, "$ref": "#/$defs/tree"}, [None, []], [1]),
        # Several branches say nothing of what is no object: nothing else follows just one of them.
        (
            _one_of({"required": ["a"], "properties": {"a": {"enum": [1]}}},
                    {"required": ["a"], "properties": {"a": {"enum": [2]}}}),
            {"a": 2},
            5,
        ),
        # Which property tells the branches apart is said beside them.
        (
            _one_of({"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}},
                    type="object", required=["a"]),
            {"a": 1},
            {"a": 3},
        ),
        (_one_of("short", "long", anyOf=[{"pattern": "^a"}, {"pattern": "^b"}]), "abc", "cab"),
    ],
    ids=lambda case: json.dumps(case)[-60:],
)  # fmt: skip
def test_one_of_branches_that_share_nothing_is_any_of_them(
    llg: LLTokenizer, schema: dict[str, Any], good: object, bad: object
) -> None:
    grammar = _compiled(schema, llg)
    assert takes(grammar, llg, good)
    assert not takes(grammar, llg, bad)
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(good)
    assert not validator.is_valid(bad)
    assert '"oneOf"' not in grammar


@pytest.mark.parametrize(
    "schema",
    [
        _one_of("text", "short"),
        _one_of("name", {"type": "object"}),
        _one_of({"type": "integer"}, {"type": "number"}),
        _one_of({"enum": [1]}, {"enum": [1.0]}),
        _one_of({"enum": [True]}, {"enum": [1]}, {"enum": [[1]]}, {"enum": [[1.0]]}),
        _one_of({"type": "string", "format": "date"}, {"type": "string", "format": "ipv4"}),  # an annotation, for many
        _one_of({"$ref": "#/$defs/text", "maxLength": 2}, {"$ref": "#/$defs/text", "minLength": 3}),  # not by draft 7
        _one_of(CAT, DOG, **{"$schema": "http://json-schema.org/draft-04/schema#"}),  # which knows no const
        _one_of({"required": ["a"]}, {"required": ["b"]}),
        _one_of("tree", "tree"),
        _one_of({}, {}, {"type": "null"}),
    ],
    ids=lambda case: json.dumps(case)[-60:],
)
def test_one_of_branches_that_may_share_something_is_not_any_of_them(schema: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedGrammarError):
        assert "oneOf" in enforceable(schema)
        raise UnsupportedGrammarError


def test_proofs_end() -> None:
    """Many branches, and recursion on both sides: given up, and left to llguidance."""
    many = [{"type": "object", "required": ["a"], "properties": {"a": {"minimum": n}}} for n in range(300)]
    assert "oneOf" in enforceable({"oneOf": many})
    lists = [{"type": "object", "required": ["n"], "properties": {"n": {"$ref": f"#/$defs/{name}"}}} for name in "ab"]
    assert "oneOf" in enforceable({"$defs": dict(zip("ab", lists, strict=True)), "oneOf": lists})


MAIL: Final = {"type": "string", "pattern": "^[a-z]+@[a-z.]+$"}
LINKS: Final = {
    "type": "object",
    "properties": {"from": MAIL, "to": {"type": "array", "items": MAIL}, "own": {"$ref": "#/properties/from"}},
    "patternProperties": {"^reply_to$": MAIL, "^(cc)$": {"type": "array", "items": {"type": "string"}}},
    "additionalProperties": {"type": "array", "items": {"type": "string"}},
}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"type": 5}, "type must be"),
        ({"type": [["string"]]}, "type must be"),
        ({"required": 5}, "'required'"),
        ({"allOf": 5}, "allOf must be"),
    ],
)
def test_values_of_a_wrong_kind_in_or_beside_branches_are_named(
    llg: LLTokenizer, wrong: dict[str, Any], words: str
) -> None:
    for schema in (_one_of(wrong, "text"), _one_of("number", "name", **wrong)):
        with pytest.raises(UnsupportedGrammarError, match=words):
            _compiled(schema, llg)


@pytest.mark.parametrize(
    ("instance", "follows"),
    [
        ({"from": "a@b.de", "to": ["a@b.de"], "own": "c@d.de", "reply_to": "a@b.de", "cc": ["x"], "x": ["y"]}, True),
        ({"from": "a"}, False),
        ({"to": ["a"]}, False),
        ({"own": "a"}, False),
        ({"reply_to": "a"}, False),
        ({"reply_to": ["a"]}, False),
        ({"cc": "x"}, False),
        ({"x": 1}, False),
    ],
)
def test_what_is_said_of_several_values_is_said_once(llg: LLTokenizer, instance: object, follows: bool) -> None:
    """And a pattern that one name alone matches is that name."""
    grammar = _compiled(LINKS, llg)
    assert grammar.count("@") == 1
    assert "patternProperties" not in grammar
    assert takes(grammar, llg, instance) == follows == jsonschema.Draft202012Validator(LINKS).is_valid(instance)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": MAIL, "b": {"oneOf": [MAIL, {"type": "string"}]}}},  # told apart where they stand
        {"properties": {"a": MAIL, "b": {"$id": "http://x/b", "type": "array", "items": MAIL}}},  # `#` means b there
        {"properties": {"a": MAIL, "b": MAIL, "c": {"$ref": "#mail"}}, "$defs": {"d": {**MAIL, "$anchor": "mail"}}},
        {"properties": {"a": MAIL, "b": {"items": MAIL, "$schema": "http://json-schema.org/draft-04/schema#"}}},
        {"properties": {"a": {"const": 1}, "b": {"const": True}, "c": {"const": 1.0}}},  # three things
        {"properties": {str(n): {"type": "string"} for n in range(4_500)}},  # a reference would be longer
    ],
)
def test_what_may_mean_something_else_elsewhere_stays_there(schema: dict[str, Any]) -> None:
    written = json.loads(for_llguidance(enforceable(schema)))
    assert written.pop("x-guidance") == GUIDANCE
    assert written == schema


NODE: Final = {"type": "object", "properties": {"a": MAIL, "b": MAIL, "kid": {"$ref": "#"}}}


@pytest.mark.parametrize(
    "draft", ["https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"]
)
def test_what_is_said_once_is_no_neighbour_of_a_reference(llg: LLTokenizer, draft: str) -> None:
    """Beside which llguidance would take it for a second condition, and recursion for endless."""
    defs = {"part-0": {"type": "null"}, "n": NODE, "o": {"anyOf": [{"$ref": "#/$defs/part-0"}, {"$ref": "#/$defs/n"}]}}
    grammar = _compiled({"$schema": draft, "$ref": "#/$defs/n", "$defs": defs}, llg)
    assert grammar.count("@") == 1
    assert takes(grammar, llg, {"a": "a@b.de", "kid": {"b": "a@b.de"}})
    assert not takes(grammar, llg, {"a": "a@b.de", "kid": {"b": "a"}})


TEXT_OR_NOT: Final = {"anyOf": [{"type": "string"}, {"type": "null"}]}
# As generators write them: definitions within definitions, one for each property.
GENERATED: Final = {
    "type": "object",
    "properties": {
        "owner": {"$ref": "#/definitions/User"},
        "group": {"$ref": "#/definitions/Group"},
        "path": {"$ref": "#/definitions/a~1b%20%25/items"},
        "yes": {"$ref": "#/definitions/yes"},
        "own": {"$ref": "#/patternProperties/%5Enick_name$"},
    },
    "patternProperties": {"^nick_name$": {"type": "string", "maxLength": 3}},
    "definitions": {
        "User": {
            "type": "object",
            "properties": {
                "name": {"$ref": "#/definitions/User/definitions/name"},
                "mail": {"$ref": "#/definitions/User/definitions/mail"},
                "boss": {"$ref": "#/definitions/User"},
                "top": {"$ref": "#"},
            },
            "definitions": {"name": TEXT_OR_NOT, "mail": TEXT_OR_NOT},
            "additionalProperties": False,
        },
        "Group": {
            "properties": {"name": {"$ref": "#/definitions/Group/definitions/name"}},
            "definitions": {"name": {"type": "integer"}},
        },
        "a/b %": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        "yes": True,
        "unused": {"type": "object", "properties": {"a": MAIL}},
    },
}


@pytest.mark.parametrize(
    ("instance", "follows"),
    [
        ({"owner": {"name": None, "mail": "x", "boss": {"mail": "y"}, "top": {"own": "abc"}}, "path": [1]}, True),
        ({"group": {"name": 1}, "yes": [1], "nick_name": "abc", "other": 1}, True),
        ({"owner": {"name": 1}}, False),
        ({"owner": {"mail": 1}}, False),
        ({"group": {"name": None}}, False),
        ({"owner": {"boss": {"mail": 1}}}, False),
        ({"owner": {"top": {"own": "abcd"}}}, False),
        ({"owner": {"nick": "x"}}, False),
        ({"path": ["x"]}, False),
        ({"path": [[1]]}, False),
        ({"own": "abcd"}, False),
        ({"nick_name": "abcd"}, False),
    ],
)
def test_definitions_that_say_the_same_are_one_and_unused_ones_none(
    llg: LLTokenizer, instance: object, follows: bool
) -> None:
    written = json.loads(for_llguidance(enforceable(GENERATED)))
    assert json.dumps(written).count("null") == 1
    assert set(written["$defs"]) > {"User", "name", "items", "yes"}
    assert "definitions" not in json.dumps(written) and "@" not in json.dumps(written)
    taken = takes(_compiled(GENERATED, llg), llg, instance)
    assert taken == follows == jsonschema.Draft202012Validator(GENERATED).is_valid(instance)


def test_definitions_with_references_stay_apart(llg: LLTokenizer) -> None:
    """llguidance refuses a circle of references if it comes back to one that has a condition beside it."""
    first = {"type": "object", "properties": {"x": {"$ref": "#/$defs/between"}}}
    back = {"type": "object", "properties": {"y": {"$ref": "#/$defs/again", "required": ["x"]}}}
    grammar = _compiled({"$ref": "#/$defs/one", "$defs": {"one": first, "again": first, "between": back}}, llg)
    assert takes(grammar, llg, {"x": {"y": {"x": {}}}})
    assert not takes(grammar, llg, {"x": {"y": {}}})


def _text(schema: dict[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": GUIDANCE}, separators=(",", ":"))


def test_definitions_that_one_place_refers_to_are_written_out(llg: LLTokenizer) -> None:
    """Of a chain of them only some: JSON may have 128 levels."""
    chain = {f"list{n}": {"type": "array", "items": {"$ref": f"#/$defs/list{n + 1}"}} for n in range(200)}
    schema = {"$ref": "#/$defs/list0", "$defs": {**chain, "list200": {"type": "null"}}}
    text = json.loads(for_llguidance(enforceable(schema)))
    assert text["type"] == "array"
    assert 100 < len(text["$defs"]) < 200
    grammar = _compiled(schema, llg)
    instance: object = None
    for _ in range(200):
        instance = [instance]
    assert takes(grammar, llg, instance)
    assert not takes(grammar, llg, [instance])


def test_a_definition_that_is_deep_itself_is_not_written_out(llg: LLTokenizer) -> None:
    """Two texts of JSON that the library reads would be one that it does not."""

    def nested(within: Any, levels: int) -> Any:
        for _ in range(levels):
            within = {"type": "object", "properties": {"a": within}, "required": ["a"]}
        return within

    schema = nested({"$ref": "#/$defs/deep"}, 12) | {"$defs": {"deep": nested({"type": "null"}, 54)}}
    grammar = _compiled(schema, llg)
    assert takes(grammar, llg, json.loads('{"a":' * 66 + "null" + "}" * 66))
    assert not takes(grammar, llg, json.loads('{"a":' * 65 + "null" + "}" * 65))


JOINED: Final = [  # each was refused with its definitions written out, as a circle with a sibling
    {"$ref": "#/definitions/r", "definitions": {"p": {"properties": {"c": {"$ref": "#/definitions/q"}}},
                                                "q": {"allOf": [{"$ref": "#"}]},
                                                "r": {"$ref": "#/definitions/p", "maxLength": 3}}},
    {"properties": {"c": {"$ref": "#/definitions/r"}, "d": {"$ref": "#/definitions/q"}},
     "definitions": {"q": {"properties": {"b": {"$ref": "#"}}},
                     "r": {"allOf": [{"maxLength": 3}, {"$ref": "#/definitions/q"}]}}},
]  # fmt: skip


@pytest.mark.parametrize("schema", JOINED)
def test_definitions_stay_where_a_reference_has_a_neighbour(llg: LLTokenizer, schema: dict[str, Any]) -> None:
    assert "$defs" in json.loads(for_llguidance(enforceable(json.loads(json.dumps(schema)))))
    assert takes(_compiled(schema, llg), llg, {})


def test_places_within_places_are_not_written_again_each(llg: LLTokenizer) -> None:
    """As zod-to-json-schema refers to what it has written before: each place has the next one within."""
    schema: dict[str, Any] = {"enum": ["end"]}
    for level in reversed(range(30)):
        own = "#" + "/properties/next" * level
        others = {f"{level}_{number}_{'x' * 16}": {"type": "null"} for number in range(20)}
        schema = {"type": "object", "properties": {"next": schema, "again": {"$ref": own}, **others}}
    plain = _text(schema)
    assert len(plain) < 40_000
    grammar = _compiled(schema, llg)
    assert len(grammar) < len(plain) + 2_100
    assert takes(grammar, llg, {"next": {"next": {"again": {"next": {"again": {}}}}}})
    assert not takes(grammar, llg, {"next": {"next": {"again": {"next": {"again": 1}}}}})


def test_a_place_is_one_however_it_is_spelled(llg: LLTokenizer) -> None:
    spellings = map("".join, itertools.product(*((letter, f"%{ord(letter):02x}") for letter in "persons")))
    person = {"type": "object", "properties": {"mail": MAIL, "boss": {"$ref": "#/properties/persons"}}}
    properties = {"persons": person} | {
        str(number): {"$ref": f"#/properties/{name}"} for number, name in enumerate(spellings)
    }
    grammar = _compiled({"type": "object", "properties": properties, "additionalProperties": False}, llg)
    assert grammar.count("@") == 1
    assert grammar.count("boss") == 2  # where it stands, and where references lead
    for number in ("0", "77", "127"):
        assert takes(grammar, llg, {number: {"boss": {"mail": "a@b.de"}}})
        assert not takes(grammar, llg, {number: {"boss": {"mail": "a"}}})


def test_the_whole_is_one_however_it_is_spelled(llg: LLTokenizer) -> None:
    grammar = _compiled({"type": "object", "properties": {"kid": {"$ref": "%23"}, "n": {"type": "integer"}}}, llg)
    assert takes(grammar, llg, {"kid": {"kid": {"n": 1}}})
    assert not takes(grammar, llg, {"kid": {"kid": {"n": "x"}}})


def test_definitions_that_say_the_same_have_the_shortest_of_their_names() -> None:
    names = ["longest" * 4, *["short"] * 3_000]
    schema = {
        "properties": {str(number): {"$ref": f"#/$defs/{name}"} for number, name in enumerate(names)},
        "$defs": {name: {"type": "string", "maxLength": 5} for name in names},
    }
    assert len(for_llguidance(enforceable(schema))) <= len(_text(schema))


@pytest.mark.parametrize(
    ("values", "definition"),
    [
        ([{"type": "null"}] * 3_000, {"type": "null"}),  # the definition's name is longer than they are
        ([{"enum": list(range(10))}] * 3_000, {"enum": list(range(10))}),
        ([{"type": "string", "maxLength": number // 2} for number in range(1_000, 3_000)], {"type": "null"}),
    ],
)
def test_the_text_hardly_grows(values: list[object], definition: object) -> None:
    """Though the first values are said once."""
    properties: dict[str, object] = {"a": MAIL, "b": MAIL, "c": {"$ref": f"#/$defs/{'x' * 32}"}}
    properties |= {str(number): value for number, value in enumerate(values)}
    schema = {"properties": properties, "$defs": {"x" * 32: definition}}
    plain = _text(schema)
    text = for_llguidance(enforceable(schema))
    assert len(text) <= len(plain) + 2_048
    assert text.count("@") == 1


def test_a_property_that_cannot_be_is_left_out_beside_a_definition_that_says_the_same(llg: LLTokenizer) -> None:
    """Which llguidance takes for a second condition where something stands beside the reference."""
    nothing = {"type": "string", "enum": [1]}
    properties = {"a": nothing, "b": {"type": "string", "$ref": "#/$defs/nothing"}, "c": {"type": "null"}}
    grammar = _compiled({"type": "object", "properties": properties, "$defs": {"nothing": nothing}}, llg)
    assert takes(grammar, llg, {"c": None})
    for name in "ab":
        assert not takes(grammar, llg, {name: "x"})


@pytest.mark.parametrize(
    "nothing",
    [
        {"type": "string", "enum": []},
        {"type": "string", "enum": [1]},
        {"type": "string", "minLength": 9, "maxLength": 8},
        {"allOf": [{"type": "string"}, {"type": "null"}]},
        {"anyOf": [{"enum": []}, {"enum": []}]},
        {"type": "string", "anyOf": [{"type": "number"}, {"type": "null"}]},
        {"type": []},
        {"type": "object", "properties": {"a": False}, "anyOf": [{"required": ["a"], "properties": {"a": {}}}]},
        {"type": "object", "properties": {"a": False}, "enum": [{"a": 1}]},
        {"type": "array", "items": False, "enum": [[1]]},
        {"type": "object", "required": ["a"], "properties": {"a": {}}, "patternProperties": {"^a": False}},
        {"type": "array", "minItems": 1, "items": False},
        {"type": "object", "required": ["a"], "properties": {"a": {"enum": []}}},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"type": "object", "minProperties": 1, "additionalProperties": False},
    ],
    ids=json.dumps,
)
def test_a_property_that_cannot_be_is_left_out_wherever_it_stands(llg: LLTokenizer, nothing: dict[str, Any]) -> None:
    """And so is a second one that says the same."""
    grammar = _compiled({"type": "object", "properties": {"a": nothing, "b": nothing, "c": {"type": "null"}}}, llg)
    assert takes(grammar, llg, {"c": None})
    assert not takes(grammar, llg, {"a": "x"})


@pytest.mark.parametrize(
    "schema",
    [
        {"patternProperties": {"^a": MAIL}},
        {"patternProperties": {"^a$|b": MAIL}},
        {"patternProperties": {"^a.$": MAIL}},
        {"patternProperties": {"^a$": MAIL, "^b+$": MAIL}},
        {"patternProperties": {"^a$": MAIL, "^(a)$": {"maxLength": 9}}},
        {"patternProperties": {"^a$": MAIL}, "properties": {"a": {"maxLength": 9}}},
        {"patternProperties": {"^a$": MAIL}, "minProperties": 1},
    ],
)
def test_other_patterns_stay(schema: dict[str, Any]) -> None:
    assert "patternProperties" in json.loads(for_llguidance(enforceable(schema)))


OPEN: Final = {"properties": {"a": {"type": "integer"}, "b/c": True}, "additionalProperties": {"type": "string"}}


@pytest.mark.parametrize(
    ("schema", "text", "taken"),
    [
        (OPEN, r'{"a":1,"b/c":2,"d":"x"}', True),
        (OPEN, r'{"a":1,"\u0061":"x"}', False),
        (OPEN, r'{"a":1,"\u0041":"x"}', False),
        (OPEN, r'{"a":1,"b\/c":"x"}', False),
        (OPEN, r'{"\n\t\b\f\r\"\\":"\n"}', True),
        ({"properties": {"a": {"type": "integer"}}}, r'{"\u0061":"x"}', False),
        ({"required": ["a"]}, r'{"\u0061":1,"a":1}', False),
        ({"patternProperties": {"^[ab]": {"type": "integer"}}}, r'{"b":1,"\u0061":"x"}', False),
        ({"items": {"anyOf": [{"type": "null"}, OPEN]}}, r'[{"\u0061":"x"}]', False),
        ({"properties": {"é": {"type": "integer"}}}, r'{"\u00e9":"x"}', False),
    ],
)
def test_a_name_has_one_spelling(llg: LLTokenizer, schema: dict[str, Any], text: str, taken: bool) -> None:
    """Else an open object's value for another name would be one for a name that has a schema of its own."""
    assert takes_text(_compiled({"type": ["object", "array"], **schema}, llg), llg, text) == taken


CONTROL: Final[list[dict[str, Any]]] = [
    {"const": "a\x01b"},
    {"enum": [{"a": ["a\x7fb"]}]},
    {"type": "string", "pattern": "^a\x01b$"},
    {"type": "string", "pattern": r"^a\x01b$"},
    {"type": "string", "pattern": r"^a\u0001b$"},
    {"type": "string", "pattern": r"^a\x7Fb$"},
    {"type": "string", "pattern": r"^a\ab$"},
    {"type": "string", "pattern": r"^a[\x01]b$"},
    {"type": "string", "pattern": r"^a[\x01-\x01]b$"},
    {"type": "string", "pattern": "^a[\x01-\x01]b$"},
    {"type": "string", "pattern": r"^a\vb$"},
    {"type": "object", "patternProperties": {r"^a\x01$": {"type": "null"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a\x01": {}}, "required": ["a\x01"], "additionalProperties": False},
]


@pytest.mark.parametrize("schema", CONTROL)
def test_control_characters_are_written(llg: LLTokenizer, schema: dict[str, Any]) -> None:
    grammar = _compiled(schema, llg)
    for seed in range(3):
        answer = drawn_answer(grammar, llg, random.Random(seed), max_tokens=100)
        if answer is not None:
            jsonschema.Draft202012Validator(schema).validate(json.loads(answer))
    assert not takes(grammar, llg, "ab")


@pytest.mark.parametrize(
    "schema",
    [
        *CONTROL,
        *(
            {"pattern": pattern}
            for pattern in (r"^a\u{1}b$", r"^a\x{0001}b$", r"^a-\x01b$", r"\[\x01\]]", r"[\x01&&\x01]")
        ),
    ],
)
def test_control_characters_are_refused_beside_an_open_object(llg: LLTokenizer, schema: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedGrammarError, match="set additionalProperties to false"):
        _compiled({"type": "object", "properties": {"it": schema}}, llg)
    _compiled({"type": "object", "properties": {"it": schema}, "additionalProperties": False}, llg)


@pytest.mark.parametrize("text", ["C:\\apps", "\\u0001", "é\n", "\U0001f600", "\u2028"])
def test_other_characters_are_no_reason_to_refuse(llg: LLTokenizer, text: str) -> None:
    grammar = _compiled({"type": "object", "properties": {"it": {"const": text}}, "required": ["it"]}, llg)
    assert takes(grammar, llg, {"it": text})
    assert not takes(grammar, llg, {"it": text[1:]})


@pytest.mark.parametrize(
    ("pattern", "text", "other"),
    [
        (r"^[\u4e00-\u9fa5\xa0]$", "\u4e00", ""),
        (r"^[\x00-\x7f\u4e00]$", "\u4e00", ""),
        (r"^[^\x00-\x1f\x7f-\x9f]$", "\u4e00", ""),
        ("^[^\x00-\x1f]$", "a", ""),
        ("^[^\u0000-\u007f]$", "é", "a"),
        (r"^[^\x00]*$", "ab", 1),
        (r"^[^\x00-\x08\x0b\x0c\x0e-\x1f]*$", "a\nb", "a\fb"),
        (r"^[\x09\x0A\x0D\x20-\x7E]*$", "a\tb", "é"),
        (r"^[^\x0a\x0d]+$", "ab", "a\nb"),
        (r"^a\x0ab$", "a\nb", "ab"),
        (r"^C:\\apps$", "C:\\apps", "C:apps"),
        (r"^\\\\vserver$", r"\\vserver", "vserver"),
        (r"^[\u{1F300}-\u{1F5FF}]$", "\U0001f300", ""),
        (r"^\x{41}$", "A", ""),
        (r"^[\s\v]b$", " b", "b"),
    ],
)
def test_what_only_leaves_control_characters_out_is_served(
    llg: LLTokenizer, pattern: str, text: str, other: object
) -> None:
    schema = {"type": "object", "properties": {"it": {"type": "string", "pattern": pattern}}, "required": ["it"]}
    grammar = _compiled(schema, llg)
    assert takes(grammar, llg, {"it": text})
    assert not takes(grammar, llg, {"it": other})


def test_values_of_a_wrong_kind_beside_a_control_character_are_refused(llg: LLTokenizer) -> None:
    for name in ("properties", "patternProperties", "required", "enum", "pattern"):
        with pytest.raises(UnsupportedGrammarError):
            _compiled({"anyOf": [{"const": "\x01"}, {name: 5}]}, llg)
