"""JSON schemas: each keyword enforced or refused, never ignored; and what is made of them for llguidance.

`cluster.http.openai.structured` and `structural_tags` call `enforceable` for every schema, and last `for_llguidance`;
between them `cluster.http.openai.bounded_schemas` may give one bounds.
"""

from __future__ import annotations

import contextlib
import marshal
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final
from urllib.parse import unquote

from pydantic_core import PydanticSerializationError, to_json

MAX_DEPTH: Final = 64  # of schemas within schemas

Schema = dict[str, Any] | bool


class UnsupportedGrammarError(ValueError):
    """A schema or grammar cannot be enforced, or makes no sense. The text is a whole sentence."""


def enforceable(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without what changes nothing, if llguidance enforces the rest or refuses it by itself.

    Raises UnsupportedGrammarError, with the place in the schema, for what would be ignored.
    """
    return _Schemas().kept(schema)


# llguidance refuses by itself what it knows and lacks, except where it is told to be lenient. It would not see these.
_REFUSED: Final = frozenset({"extends", "disallow", "divisibleBy", "$dynamicRef", "$recursiveRef"})
_LACKING: Final = frozenset(
    {"not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains", "minContains"}
    | {"maxContains", "propertyNames", "uniqueItems", "unevaluatedProperties", "unevaluatedItems"}
)
_MARKED: Final = _REFUSED | _LACKING | {"multipleOf", "minProperties"}
# These change nothing by the standard, whatever they say.
_ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "$dynamicAnchor", "$recursiveAnchor", "x-guidance"}
)
_WITHOUT_EFFECT: Final = {"uniqueItems": False, "unevaluatedProperties": True, "unevaluatedItems": True}
_LOOKED_AT: Final = _ANNOTATIONS | _WITHOUT_EFFECT.keys() | {"format"}
_FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
# llguidance's own rules for formats let some values through that do not exist, such as the 29th of February of any
# year. These rules leave out some that do: years before 1000, leap seconds, names with two hyphens in a row.
_DATE: Final = (
    r"(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29)"
)
_TIME: Final = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL: Final = r"[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,31}"  # 63 characters at most
_EXACT_FORMATS: Final = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL}){{0,3}}$",
}
_OF_ONE: Final = frozenset({"items", "additionalItems", "additionalProperties"})
_OF_SEVERAL: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_OF_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_WITHIN: Final = _OF_ONE | _OF_SEVERAL | _OF_NAMED
_OLD_DRAFT: Final = re.compile("draft-0[3-7]")
_READ: Final = _MARKED | _LOOKED_AT | _WITHIN | {"$ref", "$anchor"}  # a schema without these is kept as it is


class _Schemas:
    """Goes through one schema and all within it: drops what changes nothing, and refuses what would be ignored."""

    def __init__(self) -> None:
        self._root: dict[str, Any] = {}
        self._places: dict[str, Schema] = {}  # what is kept of the schema at each place, inner ones first
        self._references: list[str] = []
        self._one_of: list[tuple[dict[str, Any], str]] = []  # what is kept of schemas with branches, and where

    def kept(self, schema: dict[str, Any]) -> dict[str, Any]:
        """What is kept of a whole schema. Raises UnsupportedGrammarError, which names the place."""
        self._root = schema
        kept = self._at(schema, "#", 0)
        for reference in self._references:
            if (unquote(reference) if "%" in reference else reference) not in self._places:
                raise UnsupportedGrammarError(
                    f"The reference {reference[:100]!r} leads to no part of the schema. References must begin with #"
                    " and lead to a schema within, such as #/$defs/name; nothing is fetched from elsewhere."
                )
        assert isinstance(kept, dict)
        proof = _Proof(self._places, draft_4="draft-04" in str(schema.get("$schema")))
        for inner, place in self._one_of:
            with contextlib.suppress(TypeError):  # llguidance refuses values of a wrong kind
                proof.prefer_any_of(inner, place)
        if _OLD_DRAFT.search(str(schema.get("$schema"))):
            self._require_told_apart()
        return kept

    def _require_told_apart(self) -> None:
        """Refuse a `oneOf` that is left, where a reference has neighbours: in drafts up to 7 these mean nothing, and
        llguidance may tell the branches apart by them. Raises UnsupportedGrammarError."""
        for inner, place in self._one_of:
            if "oneOf" in inner and any(
                isinstance(one, dict) and "$ref" in one and not one.keys() <= _WITH_REFERENCES
                for one in self._places.values()
            ):
                raise UnsupportedGrammarError(
                    f"At {place}: oneOf cannot be enforced, since in this draft what stands beside a $ref means"
                    " nothing: write that and the $ref into an allOf, or leave it out."
                )

    def _at(self, schema: object, place: str, depth: int) -> Schema:
        if isinstance(schema, dict):
            if depth > MAX_DEPTH:
                raise UnsupportedGrammarError(f"The schema is nested deeper than {MAX_DEPTH} levels.")
            if not _READ.isdisjoint(schema):
                schema = self._kept(schema, place, depth)
        elif not isinstance(schema, bool):
            raise UnsupportedGrammarError(f"At {place}: a schema must be an object, true or false.")
        self._places[place] = schema
        return schema

    def _kept(self, schema: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        if not _MARKED.isdisjoint(schema):  # of nearly all schemas it is
            if "propertyNames" in schema:
                schema = self._with_possible_names(schema, place)
            _require_enforced(schema, place)
        if isinstance(reference := schema.get("$ref"), str):
            self._references.append(reference)
        kept: dict[str, Any] = {}
        for name, value in schema.items():
            if name in _ANNOTATIONS:
                continue
            if name not in _WITHIN:
                if name not in _LOOKED_AT or not _is_annotation(name, value):
                    kept[name] = value
            elif name in _OF_NAMED and isinstance(value, dict):
                at = f"{place}/{name}/"
                kept[name] = {key: self._at(inner, at + _escaped(key), depth + 1) for key, inner in value.items()}
            elif name in _OF_SEVERAL and isinstance(value, list):
                at = f"{place}/{name}/"
                kept[name] = [self._at(inner, at + str(number), depth + 1) for number, inner in enumerate(value)]
            elif name in _OF_ONE:
                kept[name] = self._at(value, f"{place}/{name}", depth + 1)
            else:
                kept[name] = value
        if "format" in kept:
            kept = _with_exact_format(kept)
        if isinstance(kept.get("oneOf"), list):
            self._one_of.append((kept, place))
        if isinstance(anchor := schema.get("$anchor"), str):
            self._places[f"#{anchor}"] = kept
        return kept

    def _with_possible_names(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        """The schema without `propertyNames`, if all texts are possible names, or if it lists them or has a pattern, in
        a schema that says nothing of single names itself, and nothing refers to what changes its place."""
        names = schema["propertyNames"]
        if isinstance(names, dict) and isinstance(reference := names.get("$ref"), str) and len(names) == 1:
            if any(map(_has_a_name, _directly_within(self._root))):
                return schema  # a reference may be of a part's own
            with contextlib.suppress(_StaysAsItIsError):
                names = _target_of(unquote(reference), self._root)
        said = {} if names is True else names
        if not isinstance(said, dict):
            return schema
        said = {name: value for name, value in said.items() if name not in _ANNOTATIONS}
        if said.get("type") == "string":
            del said["type"]
        rest = {name: value for name, value in schema.items() if name != "propertyNames"}
        if not said:
            return rest
        moved = (f"{place}/additionalProperties", f"{place}/propertyNames")
        if len(said) > 1 or not _OF_VALUES.isdisjoint(rest):
            return schema
        if any(reference.startswith(moved) for reference in _referred_to(self._root)):
            return schema
        of_each = rest.pop("additionalProperties", True)
        if isinstance(pattern := said.get("pattern"), str):
            return rest | {"patternProperties": {pattern: of_each}, "additionalProperties": False}
        listed = [said["const"]] if "const" in said else said.get("enum")
        if isinstance(listed, list):
            return rest | {"properties": dict.fromkeys(_texts(listed), of_each), "additionalProperties": False}
        return schema


def _has_a_name(schema: Any) -> bool:
    """Whether a schema or one within has a URI of its own, which its references begin at."""
    return isinstance(schema, dict) and (
        not schema.keys().isdisjoint({"$id", "id"}) or any(map(_has_a_name, _directly_within(schema)))
    )


def _referred_to(value: object) -> Iterator[str]:
    """All places that references in a JSON value lead to."""
    if isinstance(value, dict):
        if isinstance(reference := value.get("$ref"), str):
            yield unquote(reference)
        value = [*value.values()]
    if isinstance(value, list):
        for inner in value:
            yield from _referred_to(inner)


def _is_annotation(name: str, value: object) -> bool:
    if name == "format":
        return isinstance(value, str) and value not in _FORMATS
    return name in _ANNOTATIONS or (name in _WITHOUT_EFFECT and value is _WITHOUT_EFFECT[name])


def _with_exact_format(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with a pattern in place of a format that llguidance does not check exactly."""
    pattern = _EXACT_FORMATS.get(str(schema["format"])) if "format" in schema else None
    if pattern is None:
        return schema
    rest = {name: value for name, value in schema.items() if name != "format"}
    if "pattern" not in rest:
        return rest | {"pattern": pattern}
    also = rest.get("allOf", [])
    return rest | {"allOf": [*also, {"pattern": pattern}]} if isinstance(also, list) else schema


def _require_enforced(schema: dict[str, Any], place: str) -> None:
    """Refuse keywords that would be ignored. Raises UnsupportedGrammarError."""
    for name, value in schema.items():
        if name in _REFUSED or (name in _LACKING and not _is_annotation(name, value)):
            raise UnsupportedGrammarError(f"At {place}: the keyword {name!r} cannot be enforced.")
    multiple = schema.get("multipleOf", 1)
    if not isinstance(multiple, int | float) or isinstance(multiple, bool) or multiple <= 0:
        raise UnsupportedGrammarError(f"At {place}: multipleOf must be a number above 0.")
    # The name of a property may come twice, and then counts once.
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    if isinstance(least, int) and isinstance(required, list) and least > max(1, len(set(_texts(required)))):
        raise UnsupportedGrammarError(
            f"At {place}: minProperties cannot be enforced beyond the number of required properties."
        )


def _texts(values: list[object]) -> Iterator[str]:
    return (value for value in values if isinstance(value, str))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1") if "~" in name or "/" in name else name


def with_each(schema: dict[str, Any], place: str, change: Callable[[str, Any, str], Any]) -> dict[str, Any]:
    """The schema with each schema directly within it replaced by `change(keyword, schema, place)`."""
    changed = dict(schema)
    for name, value in schema.items():
        if name not in _WITHIN:
            continue
        at = f"{place}/{name}"
        if name in _OF_NAMED and isinstance(value, dict):
            changed[name] = {key: change(name, inner, f"{at}/{_escaped(key)}") for key, inner in value.items()}
        elif name in _OF_SEVERAL and isinstance(value, list):
            changed[name] = [change(name, inner, f"{at}/{number}") for number, inner in enumerate(value)]
        elif name in _OF_ONE:
            changed[name] = change(name, value, at)
    return changed


_KINDS: Final = ("null", "boolean", "number", "string", "array", "object")


_ALL_KINDS: Final = frozenset(_KINDS)
_NO_KINDS: Final = frozenset[str]()
_KINDS_OF_TYPE: Final = {kind: frozenset({kind}) for kind in _KINDS} | {"integer": frozenset({"number"})}


def types_of(schema: dict[str, Any]) -> list[str]:
    """The types that a schema names; without any, all kinds of values."""
    types = schema.get("type", _KINDS)
    return [types] if isinstance(types, str) else [*types]


# --- oneOf ---

_MAX_STEPS: Final = 4_000  # of all proofs in one schema; each step takes microseconds
_MAX_PROOF_DEPTH: Final = 12
_LIMITS: Final = {
    "number": ("minimum", "maximum"),
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}
_WORDS: Final = {
    "null": frozenset[str](),
    "boolean": frozenset[str](),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "array": frozenset({"items", "prefixItems", "additionalItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "patternProperties", "additionalProperties", "required", "minProperties"})
    | {"maxProperties"},
}


class _Proof:
    """Proves that the branches of a `oneOf` have no instance in common, so that `anyOf` says the same.

    A proof holds by the standard and by drafts of any age: what stands beside a `$ref`, and formats, prove nothing.
    """

    def __init__(self, places: dict[str, Schema], *, draft_4: bool) -> None:
        self._places = places
        self._draft_4 = draft_4  # in this draft `const` means nothing
        self._steps = _MAX_STEPS

    def prefer_any_of(self, schema: dict[str, Any], place: str) -> None:
        """Replace a schema's `oneOf` by `anyOf`, if that is proven to say the same. Otherwise it stays, and llguidance
        proves it or refuses it. Raises UnsupportedGrammarError if it allows nothing."""
        impossible = self._kinds_of_no_branch_alone(schema)
        if impossible is None:
            return
        types = [name for name in types_of(schema) if _kind_of_type(name) not in impossible] if impossible else None
        if types == []:
            raise UnsupportedGrammarError(f"At {place}: oneOf allows nothing, since its branches allow the same.")
        _rename_one_of(schema)
        if types is not None:
            schema["type"] = types

    def _kinds_of_no_branch_alone(self, schema: dict[str, Any]) -> set[str] | None:
        """The kinds of which several branches of a `oneOf` allow all instances, so that none of them is in one branch
        alone. None: of some other kind it is not proven that no two branches have an instance in common."""
        beside = {name: value for name, value in schema.items() if name != "oneOf"} if len(schema) > 1 else {}
        around = self._parts(beside) if beside else []
        own = [self._parts(branch) for branch in schema["oneOf"]]
        kinds = [self._kinds([*parts, *around] if around else parts) for parts in own]
        found = set()
        for kind in sorted(_in_several(kinds)):
            takers = [parts for parts, possible in zip(own, kinds, strict=True) if kind in possible]
            pairs = ((one, other) for number, one in enumerate(takers) for other in takers[:number])
            if all(self._are_disjoint_in(kind, [*one, *around], [*other, *around], 0) for one, other in pairs):
                continue
            if not all(_takes_all(kind, parts) for parts in takers):
                return None
            found.add(kind)
        return found

    def _are_disjoint(self, one: Schema, other: Schema, depth: int) -> bool:
        """Whether it is proven that no instance follows both schemas."""
        left, right = self._parts(one), self._parts(other)
        shared = self._kinds(left) & self._kinds(right)
        return all(self._are_disjoint_in(kind, left, right, depth) for kind in shared)

    def _parts(self, schema: Schema, depth: int = 0) -> list[dict[str, Any]]:
        """Schemas that an instance of this schema follows, too:
        the schema itself, what it refers to, and its `allOf`."""
        if not isinstance(schema, dict) or depth > _MAX_PROOF_DEPTH:
            return [{"type": []}] if schema is False else []
        if isinstance(reference := schema.get("$ref"), str):
            parts = self._parts(self._places.get(unquote(reference), True), depth + 1)
            return [*parts, {"$ref": reference}] if len(schema) > 1 else parts
        if "allOf" not in schema:
            return [schema]
        return [schema, *(part for one in schema["allOf"] for part in self._parts(one, depth + 1))]

    def _kinds(self, parts: list[dict[str, Any]]) -> frozenset[str]:
        """The kinds of instances that can follow all of these schemas."""
        kinds = _ALL_KINDS
        for part in parts:
            if "type" in part:
                types = part["type"]
                kinds &= (
                    _KINDS_OF_TYPE.get(types, _NO_KINDS) if isinstance(types, str) else set(map(_kind_of_type, types))
                )
            if ("enum" in part or "const" in part) and (values := self._values(part)) is not None:
                kinds &= {_kind_of(value) for value in values}
        return kinds

    def _values(self, part: dict[str, Any]) -> list[Any] | None:
        """The only values that a schema allows; None: it does not list them."""
        if "const" in part and not self._draft_4:
            return [part["const"]]
        values = part.get("enum")
        return values if isinstance(values, list) else None

    def _are_disjoint_in(self, kind: str, left: list[dict[str, Any]], right: list[dict[str, Any]], depth: int) -> bool:
        """Whether it is proven that no instance of the kind follows all of `left` and all of `right`."""
        self._steps -= 1
        if self._steps < 0 or depth > _MAX_PROOF_DEPTH:
            return False
        pairs = [(one, other) for one in left for other in right]
        if any(self._values_are_disjoint(kind, one, other) for one, other in pairs):
            return True
        if kind == "object":
            required = {name for part in (*left, *right) for name in _texts(part.get("required", []))}
            for name in sorted(required):
                if any(
                    self._are_disjoint(_property(one, name), _property(other, name), depth + 1) for one, other in pairs
                ):
                    return True
        return self._split(kind, left, right, depth) or self._split(kind, right, left, depth)

    def _split(self, kind: str, left: list[dict[str, Any]], right: list[dict[str, Any]], depth: int) -> bool:
        """Whether some schema of `left` has an `anyOf` or `oneOf` whose options are all proven to be apart from
        `right`."""
        for part in left:
            for options in (part.get("anyOf"), part.get("oneOf")):
                if isinstance(options, list) and all(
                    kind not in self._kinds(parts) or self._are_disjoint_in(kind, parts, right, depth + 1)
                    for parts in map(self._parts, options)
                ):
                    return True
        return False

    def _values_are_disjoint(self, kind: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
        """Whether two schemas have no instance of the kind in common by their values or their limits alone."""
        values = self._values(one), self._values(other)
        if values[0] is not None and values[1] is not None:
            known = [_comparable(value) for value in values[1]]
            return not any(_kind_of(value) == kind and _comparable(value) in known for value in values[0])
        if kind not in _LIMITS:
            return False
        least, most = _LIMITS[kind]
        return _is_below(one.get(most), other.get(least)) or _is_below(other.get(most), one.get(least))


def _in_several(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    """What is in more than one of them."""
    seen = shared = _NO_KINDS
    for each in sets:
        shared |= seen & each
        seen |= each
    return shared


def _rename_one_of(schema: dict[str, Any]) -> None:
    """Make `anyOf` of a schema's `oneOf`, in its place, or in an `allOf` where it has an `anyOf` already."""
    if "anyOf" in schema:
        schema["allOf"] = [*schema.get("allOf", []), {"anyOf": schema.pop("oneOf")}]
        return
    members = {"anyOf" if name == "oneOf" else name: value for name, value in schema.items()}
    schema.clear()
    schema.update(members)


def _takes_all(kind: str, parts: list[dict[str, Any]]) -> bool:
    """Whether all instances of the kind follow all of these schemas."""
    words = _WORDS[kind] | {"enum", "const", "anyOf", "oneOf", "$ref"}
    return all(kind in types_of(part) and not part.keys() & words for part in parts)


def _property(part: dict[str, Any], name: str) -> Schema:
    """The schema that a part gives to a property. Where patterns may say more of it, True."""
    named = part.get("properties")
    if isinstance(named, dict) and name in named:
        return named[name]  # type: ignore[no-any-return]
    return True if part.get("patternProperties") else part.get("additionalProperties", True)


def _kind_of_type(name: str) -> str:
    return "number" if name == "integer" else name


def _kind_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _comparable(value: Any) -> Any:
    """A value that compares as JSON values do: 1 equals 1.0, but not true."""
    if isinstance(value, bool):
        return "boolean", value
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    return {name: _comparable(inner) for name, inner in value.items()} if isinstance(value, dict) else value


def _is_below(most: object, least: object) -> bool:
    numbers = isinstance(most, int | float) and isinstance(least, int | float)
    return numbers and most < least  # type: ignore[operator]


# --- the text for llguidance ---

_OF_ITS_OWN: Final = frozenset({"$id", "id", "$schema", "$anchor"})
NEUTRAL: Final = _OF_ITS_OWN | {"$defs", "definitions"}
"""Keywords that say nothing of instances."""
_WITH_REFERENCES: Final = NEUTRAL | {"$ref"}
_MATTERING: Final = _WITHIN | _OF_ITS_OWN | {"$ref"}
_OF_VALUES: Final = frozenset({"properties", "patternProperties"})
_LIMITING: Final = frozenset().union(*_WORDS.values(), {"enum", "const", "allOf", "required"}) - {
    "items", "prefixItems", "additionalItems", "properties", "patternProperties", "additionalProperties"
}  # fmt: skip
_MAX_WRITTEN_OUT: Final = 24  # levels of schemas; the library reads JSON of 128 levels
_MAX_GROWTH: Final = 2_048  # characters that the text of one schema may have more than before
_SHARED_FOR_NOTHING: Final = 160  # bytes of `_said` (five for two characters, or fewer) that always make up for it
# Definitions, which move as they are; their names are no longer afterwards (numbers have four digits).
_MOVED: Final = re.compile(r"#(?:/definitions/[^/]+|/\$defs/[^/]{4,})+")
_ONE_NAME: Final = re.compile(r"\^(?:([A-Za-z0-9_-]+)|\(([A-Za-z0-9_-]+)\))\$")
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,32}")
_COMPACT_JSON: Final = {"whitespace_flexible": False}
_IN_ONE_SPELLING: Final = _COMPACT_JSON | {"json_allowed_escapes": 'nrbtf\\"'}
# Control characters that JSON can only write as a number, `_AS_NUMBERS`; and where the text of a schema may name some.
_AS_NUMBERS: Final = frozenset(chr(code) for code in (*range(0x20), 0x7F) if chr(code) not in "\b\t\n\f\r")
_MAY_NAME: Final = re.compile(r"\\(?:u00[01]|\\[avxuU])")  # or the character 127
# Of a pattern: an escape, with the number of the character that it means, or a character; and a class, or an escape.
_ITEM: Final = re.compile(
    r"\\(?:[xuU]\{([0-9a-fA-F]+)\}|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))|\\.|[^\\]", re.DOTALL
)
_ESCAPES: Final = {r"\a": "\a", r"\v": "\v"}
_CLASS: Final = re.compile(r"\\.|\[(\^?)(\]?(?:\\.|[^\]\\])*)\]", re.DOTALL)
_SET_OPERATION: Final = re.compile(r"&&|--|~~")


def for_llguidance(schema: dict[str, Any]) -> str:
    """The text that llguidance reads, of a schema that `enforceable` gave. Takes the schema over, and changes it.

    The text says the same, in a form that takes the library less time. What is said of values in several places is one
    part that these refer to, since it is compiled anew in each (a type in 10 us, a format's pattern in half a
    millisecond). Definitions are such parts, once for all that say the same; others are left out. A pattern that
    matches one name alone is that name, which so comes once, and in its order as all names do. JSON is written without
    white space.
    """
    form = _Form(schema)
    try:
        form.look()
    except _StaysAsItIsError:
        return _text_of(schema)
    before = _text_of(schema) if form.may_multiply() else None
    form.change()
    text = _text_of(schema)
    return text if before is None or len(text) <= len(before) + _MAX_GROWTH else before


def _text_of(schema: dict[str, Any]) -> str:
    """The schema as text, with what llguidance is told of JSON in `x-guidance`.

    Instances write no character as its number: in the names of an open object llguidance would take `\\u0061` for
    another name than `a`, and readers of JSON take both for one. It would also leave out, without a word, characters
    that only a number writes. Raises UnsupportedGrammarError where a schema has both.
    """
    text = _text({**schema, "x-guidance": _IN_ONE_SPELLING})
    if not (_MAY_NAME.search(text) or "\x7f" in text) or not _names_control(schema):
        return text
    if _is_open_with_names(schema):
        raise UnsupportedGrammarError(
            "A control character in the schema cannot be enforced together with an object that names some properties"
            " and allows others: set additionalProperties to false there, or leave the character out."
        )
    return _text({**schema, "x-guidance": _COMPACT_JSON})


def _text(schema: Any) -> str:
    try:
        return to_json(schema).decode()
    except PydanticSerializationError as error:
        raise UnsupportedGrammarError(
            "The schema has half of a character, or values within more values than JSON can be read with."
        ) from error


def _directly_within(schema: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    with_each(schema, "#", lambda _, inner, __: found.append(inner))
    return found


def _names_control(schema: Schema) -> bool:
    """Whether a name, a value or a pattern in a schema has a character of `_AS_NUMBERS` that nothing may stand for."""
    if not isinstance(schema, dict):
        return False
    named, matched = schema.get("properties"), schema.get("patternProperties")
    said = [schema.get("const"), schema.get("enum"), schema.get("required"), [*named] if isinstance(named, dict) else 0]
    patterns = _texts([schema.get("pattern"), *(matched if isinstance(matched, dict) else ())])
    return (
        not _AS_NUMBERS.isdisjoint(_all_texts(said))
        or any(map(_needs_control, patterns))
        or any(map(_names_control, _directly_within(schema)))
    )


def _needs_control(pattern: str) -> bool:
    """Whether a pattern has a character of `_AS_NUMBERS` outside of classes of several: these are only made smaller."""
    return not _AS_NUMBERS.isdisjoint(_characters(_CLASS.sub(_unless_several, pattern)))


def _unless_several(found: re.Match[str]) -> str:
    """What `_CLASS` found; nothing if it is plain that several characters match it, one of which JSON can write or none
    at all."""
    is_negated, body = found[1], found[2]
    if body is None or _SET_OPERATION.search(body):
        return found[0]
    characters = {*_characters(body)} - {"-"}
    several = max(characters, default="") < chr(0x10FFFF) if is_negated else len(characters) > 1
    return "" if several else found[0]


def _characters(pattern: str) -> list[str]:
    """The characters of a pattern, and what its escapes mean where that is one character."""
    found = []
    for item in _ITEM.finditer(pattern):
        number = next(filter(None, item.groups()), None)
        code = int(number, 16) if number else 0x110000
        found.append(chr(code) if code < 0x110000 else _ESCAPES.get(item[0], item[0]))
    return found


def _all_texts(value: object) -> str:
    """All texts of a JSON value."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return "".join(map(_all_texts, value)) if isinstance(value, list) else value if isinstance(value, str) else ""


def _is_open_with_names(schema: Schema) -> bool:
    """Whether an object within says something of some names, and allows others."""
    if not isinstance(schema, dict):
        return False
    named = any(map(schema.get, ("properties", "patternProperties", "required")))
    is_open = named and schema.get("additionalProperties", True) is not False
    return is_open or any(map(_is_open_with_names, _directly_within(schema)))


class _StaysAsItIsError(Exception):
    """A schema might say something else in another form."""


@dataclass(slots=True)
class _Part:
    """What is said in some places of a schema."""

    schema: Schema
    values: list[tuple[dict[str, Any], str]] = field(default_factory=list)  # objects, and the key in each
    references: list[str] = field(default_factory=list)  # that lead to it


class _Form:
    """Finds what one schema says several times or refers to, and says it once.

    Parts that say the same are the same unless there are references within: llguidance refuses some circles of these,
    and fewer parts might make one.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        # By what they say, as bytes, which takes a third of the time of text; with references within, by the one that
        # leads there.
        self._parts: dict[bytes | str, _Part] = {}
        # Schemas that have a `$ref`, by where it leads, without percent signs.
        self._references: dict[str, list[dict[str, Any]]] = {}
        # References whose targets are to be looked at, and how deep they would stand if all of these were written out.
        self._pending: list[tuple[str, int]] = []
        self._deepest = 0
        self._shallow: set[str] = set()  # references that may be written out
        self._joins = False  # a reference is joined with what stands beside it, or leads to the whole
        self._named: list[tuple[dict[str, Any], list[str]]] = []  # schemas whose patterns are names, and these
        self._defining: list[dict[str, Any]] = []  # schemas that have definitions

    def look(self) -> None:
        """Go through the schema. Raises _StaysAsItIsError: llguidance looks for what tells the branches of a `oneOf`
        apart, and not behind references; and references may be of a part's own."""
        self._look(self._schema, 0)
        for reference, depth in self._pending:  # grows meanwhile
            target = _target_of(reference, self._schema)
            self._deepest = depth
            said = reference if self._look(target, depth) else _said(target)
            self._part_of(target, said).references.append(reference)
            if self._deepest <= _MAX_WRITTEN_OUT and _MOVED.fullmatch(reference):
                self._shallow.add(reference)

    def _look(self, schema: Schema, depth: int) -> bool:
        """Go through a schema within. Returns whether there are references in it."""
        found = False
        if depth > self._deepest:
            self._deepest = depth
        if not isinstance(schema, dict) or _MATTERING.isdisjoint(schema):
            return found
        for name, value in schema.items():
            if name not in _MATTERING:
                continue
            if name == "$ref":
                found = True
                self._follow(value, schema, depth)
                self._joins |= not schema.keys() <= _WITH_REFERENCES
            elif name in _OF_VALUES and isinstance(value, dict):
                for key, inner in value.items():
                    found |= self._look_at_value(inner, value, key, depth + 1)
                if name == "patternProperties" and (names := _names_for_patterns(schema)):
                    self._named.append((schema, names))
            elif name in _OF_ONE and isinstance(value, dict):
                found |= self._look_at_value(value, schema, name, depth + 1)
            elif name == "oneOf" or (name in _OF_ITS_OWN and schema is not self._schema):
                raise _StaysAsItIsError
            elif name in _OF_SEVERAL and isinstance(value, list):
                within = False
                for inner in value:
                    within |= self._look(inner, depth + 1)
                found |= within
                self._joins |= within and (name == "allOf" or len(schema) > 1)
            elif name in _OF_NAMED:
                self._defining.append(schema)
        return found

    def _look_at_value(self, schema: Schema, holder: dict[str, Any], key: str, depth: int) -> bool:
        if not schema or not isinstance(schema, dict):
            return False
        if not _MATTERING.isdisjoint(schema) and self._look(schema, depth):
            return True
        self._part_of(schema, _said(schema)).values.append((holder, key))
        return False

    def _part_of(self, schema: Schema, said: bytes | str) -> _Part:
        part = self._parts.get(said)
        if part is None:
            part = self._parts[said] = _Part(schema)
        return part

    def _follow(self, reference: object, schema: dict[str, Any], depth: int) -> None:
        if not isinstance(reference, str):
            return
        reference = unquote(reference)  # each place has many spellings
        if reference == "#":
            schema["$ref"] = reference
            self._joins = True
            return
        if reference not in self._references:
            self._references[reference] = []
            self._pending.append((reference, depth))
        self._references[reference].append(schema)

    def may_multiply(self) -> bool:
        """Whether references lead to places that stay where they are as well. Such places may be within each other."""
        return not all(map(_MOVED.fullmatch, self._references))

    def change(self) -> None:
        """Say once what was found in the schema several times, or behind references. The text grows by `_MAX_GROWTH`
        at most unless it `may_multiply`."""
        for schema in self._defining:
            for name in ("$defs", "definitions"):
                schema.pop(name, None)
        parts: dict[str, Schema] = {}
        growth = len('"$defs":{},')
        written_out: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for said, part in self._parts.items():
            least = 1 if part.references else 2
            values = part.values if len(part.values) >= least and _is_possible(part.schema) else []
            if not values and not part.references:
                continue
            holder = None if part.values else self._only_holder_of(part)
            if holder is not None and isinstance(part.schema, dict):
                written_out.append((holder, part.schema))
                continue
            name = self._definition_of(part, parts)
            reference = f"#/$defs/{name}"
            instead = {"$ref": reference}
            if values and len(said) < _SHARED_FOR_NOTHING:
                own = len(_text(part.schema))
                grows = len(values) * (len(_text(instead)) - own)
                if not part.references:
                    grows += own + len(name) + 4  # the definition
                if growth + grows <= _MAX_GROWTH:
                    growth += max(0, grows)
                else:
                    values = []
            if not values and not part.references:
                continue
            parts[name] = part.schema
            for old in part.references:
                for schema in self._references[old]:
                    schema["$ref"] = reference
            for holder, key in values:
                holder[key] = instead
        if parts:
            self._schema["$defs"] = parts  # where any draft's reader finds them; beside a `$ref` they are nothing to it
        for schema, names in self._named:
            inner = schema.pop("patternProperties", {}).values()  # none: it was looked at from two places
            schema["properties"] = {**schema.get("properties", {}), **dict(zip(names, inner, strict=False))}
        for holder, target in reversed(written_out):  # what is within comes first, as it was found last
            del holder["$ref"]
            holder.update(target)

    def _only_holder_of(self, part: _Part) -> dict[str, Any] | None:
        """The schema that is a reference to a part and nothing else, if no other place refers to that."""
        if self._joins or len(part.references) != 1:
            return None
        (reference,) = part.references
        holders = self._references[reference] if reference in self._shallow else []
        return holders[0] if len(holders) == 1 and len(holders[0]) == 1 else None

    def _definition_of(self, part: _Part, taken: dict[str, Schema]) -> str:
        """The name of a definition, if the library's messages and URIs can have it; or else a number."""
        if part.references:
            name = min((reference.rpartition("/")[2] for reference in part.references), key=len)
            if _PLAIN_NAME.fullmatch(name) and name not in taken:
                return name
        return next(name for number in count(len(taken)) if (name := str(number)) not in taken)


def _said(schema: Schema) -> bytes:
    """The same for schemas that say the same in the same order. 1, 1.0 and true are three things."""
    return marshal.dumps(schema, 2)  # the last form without notes of which objects are the same ones


def _is_possible(schema: Schema) -> bool:
    """Whether it is plain that some value follows a schema without references. Of a value that is impossible llguidance
    leaves out the property, or the branch; behind a reference it refuses all."""
    if not isinstance(schema, dict):
        return schema
    limits = schema.keys() & _LIMITING
    values, branches, required = (schema.get(name) for name in ("enum", "anyOf", "required"))
    if "anyOf" in schema:  # whatever stands beside it may contradict each branch
        return schema.keys() == {"anyOf"} and isinstance(branches, list) and any(map(_is_possible, branches))
    if len(limits) > 1 or schema.get("type") == []:
        return False
    if isinstance(values, list):
        plain = schema.keys().isdisjoint(_WITHIN)
        return plain and any(schema.get("type", kind) == kind for kind in map(_kind_of, values))
    named = schema.get("properties", {})
    if isinstance(required, list) and isinstance(named, dict) and "patternProperties" not in schema:
        return all(name in named and _is_possible(named[name]) for name in _texts(required))
    return not limits & {"enum", "required", "allOf", "const", "minItems", "minProperties"}


def _target_of(reference: str, schema: Any) -> Schema:
    """What a reference to a place in a schema, without percent signs, leads to.
    Raises _StaysAsItIsError if that is none, as an anchor is."""
    root, *path = reference.split("/")
    try:
        for step in path:
            if "~" in step:
                step = step.replace("~1", "/").replace("~0", "~")
            schema = schema[int(step) if isinstance(schema, list) else step]
    except (LookupError, TypeError, ValueError):
        root = ""
    if root != "#" or not isinstance(schema, dict | bool):
        raise _StaysAsItIsError
    return schema


def _names_for_patterns(schema: dict[str, Any]) -> list[str] | None:
    """The names that its patterns match, if each matches one alone, of which nothing else is said."""
    patterns, named = schema["patternProperties"], schema.get("properties", {})
    counted = "minProperties" in schema or "maxProperties" in schema  # llguidance counts few forms of objects
    if counted or not isinstance(named, dict):
        return None
    found = [_ONE_NAME.fullmatch(pattern) for pattern in patterns]
    names = [one[1] or one[2] for one in found if one]
    return names if len({*names} - named.keys()) == len(patterns) else None
