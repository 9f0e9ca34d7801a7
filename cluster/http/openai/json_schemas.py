"""JSON schemas: each keyword enforced or refused, never ignored; and what is made of them for llguidance.

`cluster.http.openai.structured` and `structural_tags` call `enforceable` for every schema, `with_an_end` for the
arguments of calls that must be made, and last `for_llguidance`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Final
from urllib.parse import unquote

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


class _Schemas:
    """Goes through one schema and all within it: drops what changes nothing, and refuses what would be ignored."""

    def __init__(self) -> None:
        self._places: dict[str, Schema] = {}  # what is kept of the schema at each place, inner ones first
        self._references: list[str] = []

    def kept(self, schema: dict[str, Any]) -> dict[str, Any]:
        """What is kept of a whole schema. Raises UnsupportedGrammarError, which names the place."""
        kept = self._at(schema, "#", 0)
        for reference in self._references:
            if unquote(reference) not in self._places:
                raise UnsupportedGrammarError(
                    f"The reference {reference[:100]!r} leads to no part of the schema. References must begin with #"
                    " and lead to a schema within, such as #/$defs/name; nothing is fetched from elsewhere."
                )
        assert isinstance(kept, dict)
        proof = _Proof(self._places, draft_4="draft-04" in str(schema.get("$schema")))
        for place, inner in self._places.items():
            if isinstance(inner, dict) and isinstance(inner.get("oneOf"), list):
                proof.prefer_any_of(inner, place)
        return kept

    def _kept(self, schema: object, place: str, depth: int) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise UnsupportedGrammarError(f"At {place}: a schema must be an object, true or false.")
        if depth > MAX_DEPTH:
            raise UnsupportedGrammarError(f"The schema is nested deeper than {MAX_DEPTH} levels.")
        _require_enforced(schema, place)
        if isinstance(reference := schema.get("$ref"), str):
            self._references.append(reference)
        kept = schema
        if not _LOOKED_AT.isdisjoint(schema):
            kept = {name: value for name, value in schema.items() if not _is_annotation(name, value)}
            kept = _with_exact_format(kept)
        kept = _with_each(kept, place, lambda _, inner, place: self._at(inner, place, depth + 1))
        if isinstance(anchor := schema.get("$anchor"), str):
            self._places[f"#{anchor}"] = kept
        return kept

    def _at(self, schema: object, place: str, depth: int) -> Schema:
        self._places[place] = kept = self._kept(schema, place, depth)
        return kept


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
    if _MARKED.isdisjoint(schema):  # true of nearly all schemas
        return
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


def _with_each(schema: dict[str, Any], place: str, change: Callable[[str, Any, str], Any]) -> dict[str, Any]:
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


def _types(schema: dict[str, Any]) -> list[str]:
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
        branches = schema["oneOf"]
        beside = {name: value for name, value in schema.items() if name != "oneOf"}
        around = self._parts(beside) if beside else []
        own = [self._parts(branch) for branch in branches]
        kinds = [self._kinds([*parts, *around]) for parts in own]
        seen, shared = set[str](), set[str]()
        for possible in kinds:
            shared |= seen & possible
            seen |= possible
        impossible = set()
        for kind in sorted(shared):
            takers = [parts for parts, possible in zip(own, kinds, strict=True) if kind in possible]
            pairs = ((one, other) for number, one in enumerate(takers) for other in takers[:number])
            if all(self._are_disjoint_in(kind, [*one, *around], [*other, *around], 0) for one, other in pairs):
                continue
            if not all(_takes_all(kind, parts) for parts in takers):
                return
            impossible.add(kind)  # several branches allow all of this kind, so no instance of it is in one branch alone
        if impossible:
            types = [name for name in _types(schema) if _kind_of_type(name) not in impossible]
            if not types:
                raise UnsupportedGrammarError(f"At {place}: oneOf allows nothing, since its branches allow the same.")
        else:
            types = []
        name_of = {"oneOf": "oneOf" if "anyOf" in schema else "anyOf"}
        members = list(schema.items())
        schema.clear()
        schema.update((name_of.get(name, name), value) for name, value in members)
        if "oneOf" in schema:
            schema["allOf"] = [*schema.get("allOf", []), {"anyOf": schema.pop("oneOf")}]
        if types:
            schema["type"] = types

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
            more = [{"$ref": reference}] if len(schema) > 1 else []
            return [*self._parts(self._places.get(unquote(reference), True), depth + 1), *more]
        inner = schema.get("allOf", [])
        return [schema, *(part for one in inner for part in self._parts(one, depth + 1))]

    def _kinds(self, parts: list[dict[str, Any]]) -> set[str]:
        """The kinds of instances that can follow all of these schemas."""
        kinds = set(_KINDS)
        for part in parts:
            if "type" in part:
                kinds.intersection_update(map(_kind_of_type, _types(part)))
            if (values := self._values(part)) is not None:
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


def _takes_all(kind: str, parts: list[dict[str, Any]]) -> bool:
    """Whether all instances of the kind follow all of these schemas."""
    words = _WORDS[kind] | {"enum", "const", "anyOf", "oneOf", "$ref"}
    return all(kind in _types(part) and not part.keys() & words for part in parts)


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

_MIN_CHARS: Final = 30  # a reference has about as many
_OF_VALUES: Final = frozenset({"properties", "patternProperties"})
_NOT_PLAIN: Final = _WITHIN | {"$ref", "$anchor", "$id", "id"}
_ONE_NAME: Final = re.compile(r"\^(?:([A-Za-z0-9_-]+)|\(([A-Za-z0-9_-]+)\))\$")


def for_llguidance(schema: dict[str, Any]) -> str:
    """The text that llguidance reads, of a schema that `enforceable` gave. Takes the schema over, and changes it.

    The text says the same, in a form that takes the library less time: what is said of values in several places is one
    part that these refer to (a format's pattern takes half a millisecond in each), and a pattern that matches one name
    alone is that name, which so comes once, and in its order as all names do. JSON is written without white space.
    """
    form = _Form()
    if form.look(schema, within=False):
        form.change(schema)
    return json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}}, separators=(",", ":"))


class _Form:
    """Finds what one schema says several times, and says it once."""

    def __init__(self) -> None:
        # Where the schema of a value has no schema within, by what it says: objects and the key in each.
        self._plain: dict[str, list[tuple[dict[str, Any], str]]] = {}
        self._named: list[dict[str, Any]] = []  # schemas whose patterns are names

    def look(self, schema: Schema, *, within: bool = True) -> bool:
        """Go through a schema. Returns False if all must stay as it is: llguidance looks for what tells the branches of
        a `oneOf` apart, and not behind references; and references may lead to a pattern, or be of a part's own."""
        if not isinstance(schema, dict):
            return True
        if "oneOf" in schema or (within and _has_parts_of_its_own(schema)):
            return False
        if "$ref" in schema and "patternProperties" in unquote(str(schema["$ref"])):
            return False
        if "patternProperties" in schema and _has_names_for_patterns(schema):
            self._named.append(schema)
        for name, value in schema.items():
            looked = True
            if name in _OF_NAMED and isinstance(value, dict):
                look = self._noted if name in _OF_VALUES else self._looked
                looked = all(look(value, key) for key in value)
            elif name in _OF_SEVERAL and isinstance(value, list):
                looked = all(self.look(inner) for inner in value)
            elif name in _OF_ONE:
                looked = self._noted(schema, name)
            if not looked:
                return False
        return True

    def _looked(self, holder: dict[str, Any], key: str) -> bool:
        return self.look(holder[key])

    def _noted(self, holder: dict[str, Any], key: str) -> bool:
        schema = holder[key]
        if not schema or not isinstance(schema, dict) or not _NOT_PLAIN.isdisjoint(schema):
            return self.look(schema)
        self._plain.setdefault(repr(schema), []).append((holder, key))
        return True

    def change(self, schema: dict[str, Any]) -> None:
        """Say once what was found in the schema several times."""
        named = schema.get(
            "$defs", {}
        )  # where any draft's reader finds them, and beside a `$ref` they are nothing to it
        if not isinstance(named, dict):
            return
        parts: dict[str, Any] = {}
        for said, holders in self._plain.items():
            if len(holders) > 1 and len(said) > _MIN_CHARS:
                name = next(name for n in count(len(parts)) if (name := f"part-{n}") not in named and name not in parts)
                for holder, key in holders:
                    parts[name] = holder[key]
                    holder[key] = {"$ref": f"#/$defs/{name}"}
        if parts:
            schema["$defs"] = named | parts
        for one in self._named:
            names = {_name_of(pattern): inner for pattern, inner in one.pop("patternProperties").items()}
            one["properties"] = {**one.get("properties", {}), **names}


def _has_parts_of_its_own(schema: dict[str, Any]) -> bool:
    return isinstance(schema.get("$id"), str) or isinstance(schema.get("id"), str)


def _name_of(pattern: str) -> str | None:
    """The only name that matches a pattern of a property; None: others may, too."""
    found = _ONE_NAME.fullmatch(pattern)
    return found and (found[1] or found[2])


def _has_names_for_patterns(schema: dict[str, Any]) -> bool:
    """Whether each pattern matches one name alone, of which nothing else is said."""
    patterns, named = schema["patternProperties"], schema.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(named, dict):
        return False
    names = {_name_of(pattern) for pattern in patterns}
    counted = "minProperties" in schema or "maxProperties" in schema  # llguidance counts few forms of objects
    return not counted and len(names) == len(patterns) and None not in names and names.isdisjoint(named)


# --- schemas whose instances end ---

_NEUTRAL: Final = frozenset({"$defs", "definitions", "$schema", "$id", "id", "$anchor"})
_LEAST_CHARS: Final = 16  # a bound of a text is never lower
_MAX_NAME_CHARS: Final = 32
_MAX_ITEMS: Final = 16
_CHARS_OF_ITEM: Final = 64  # of an item, with what stands around it: so many are left to each, or there are fewer
_MAX_FREE: Final = 8  # properties of an object whose schema names none
_MAX_NUMBER: Final = 10**15
_LEAST_NUMBER: Final = 1e-8  # the smallest step between numbers that llguidance can count in


def with_an_end(schema: dict[str, Any], chars: int) -> dict[str, Any]:
    """The schema, which `enforceable` gave, with bounds where it has none: small models write on for ever where they
    may.

    Whatever follows the result follows the schema. Objects have only the properties that are named, and texts, lists
    and numbers a largest size, so that an instance has about `chars` characters. Left open are recursion, texts with a
    pattern or a format, objects that several schemas describe together (`allOf`, or `$ref` or `anyOf` with more beside
    it), and what stands below a `oneOf` that remains.
    """
    return _Ending(schema, chars).ended(schema, chars)


class _Ending:
    """Gives one schema bounds. First looks, again and again until nothing new is found, where its references lead."""

    def __init__(self, schema: dict[str, Any], chars: int) -> None:
        # Both are of places that references lead to.
        self._joined: set[str] = set()  # those that some reference joins with other schemas
        self._chars: dict[str, int] = {}  # the fewest characters that a place which refers to it has
        while self._look(schema, "#", chars, True):
            pass

    def _look(self, schema: Schema, place: str, chars: int, whole: bool) -> bool:
        """Note what the references in a schema say of the places that they lead to. Returns whether anything is new."""
        if not isinstance(schema, dict):
            return False
        whole, chars = self._is_whole(schema, place, whole), self._of_place(place, chars)
        found = False
        if "$ref" in schema:
            target = unquote(str(schema["$ref"]))
            found = self._of_place(target, chars + 1) > chars
            self._chars[target] = self._of_place(target, chars)
            if not (whole and _stands_alone(schema, "$ref")):
                found |= target not in self._joined
                self._joined.add(target)
        share = _shares(schema, chars)
        looks: list[bool] = []
        _with_each(
            schema,
            place,
            lambda name, inner, at: looks.append(self._look(inner, at, share(name), _passed_on(schema, name, whole))),
        )
        return found or any(looks)

    def _of_place(self, place: str, chars: int) -> int:
        """How many characters instances may have at a place: `chars`, or fewer if references lead there."""
        return min(chars, self._chars.get(place, chars))

    def ended(self, schema: dict[str, Any], chars: int) -> dict[str, Any]:
        if not schema.keys() - _NEUTRAL - {"type", "properties"} and not schema.get("properties"):
            schema = {**schema, "additionalProperties": False}  # a function that says nothing of arguments has none
        ended = self._ended(schema, "#", chars, True)
        assert isinstance(ended, dict)
        return ended

    def _is_whole(self, schema: dict[str, Any], place: str, whole: bool) -> bool:
        """Whether the schema alone says what its instances are, wherever references to it stand.
        `whole`: it would, but for references."""
        return whole and place not in self._joined and "$anchor" not in schema

    def _ended(self, schema: Schema, place: str, chars: int, whole: bool) -> Schema:
        if schema is True or schema == {}:
            return _anything(chars) if whole else schema
        if not isinstance(schema, dict) or "oneOf" in schema:
            return schema
        whole, chars = self._is_whole(schema, place, whole), self._of_place(place, chars)
        share = _shares(schema, chars)
        ended = _with_each(
            schema, place, lambda name, inner, at: self._ended(inner, at, share(name), _passed_on(schema, name, whole))
        )
        if schema.keys() & {"$ref", "allOf", "anyOf", "enum", "const"}:
            return ended
        kinds = _types(schema)
        if "string" in kinds and not schema.keys() & {"maxLength", "pattern", "format"}:
            ended["maxLength"] = max(chars, _LEAST_CHARS, schema.get("minLength", 0))
        if "number" in kinds or "integer" in kinds:
            ended |= _number_bounds(schema, "number" in kinds)
        if "array" in kinds:
            ended |= _list_bounds(schema, chars)
        if "object" in kinds and whole:
            ended |= _object_bounds(ended, chars)
        return ended


def _stands_alone(schema: dict[str, Any], name: str) -> bool:
    return not schema.keys() - _NEUTRAL - {name}


def _passed_on(schema: dict[str, Any], name: str, whole: bool) -> bool:
    """Whether the schemas under a keyword alone say what their instances are. `whole`: the schema around them does."""
    if name in ("$defs", "definitions"):
        return True
    if name in ("anyOf", "oneOf"):
        return whole and _stands_alone(schema, name)
    return whole and (name != "allOf" or (_stands_alone(schema, name) and len(schema["allOf"]) == 1))


def _shares(schema: dict[str, Any], chars: int) -> Callable[[str], int]:
    """Divide the characters of a schema's instance: gives, for a keyword, how many each of the schemas under it has."""
    named = schema.get("properties")
    parts = {
        "properties": len(named) if isinstance(named, dict) else 1,
        "items": _num_items(schema, chars),
        "additionalItems": _num_items(schema, chars),
        "prefixItems": _num_items(schema, chars),
        "additionalProperties": _MAX_FREE,
        "patternProperties": _MAX_FREE,
    }
    return lambda name: chars // max(1, parts.get(name, 1))


def _num_items(schema: dict[str, Any], chars: int) -> int:
    """How many items a list may have: as many as its schema says, or a bound that suits `chars`."""
    bound = max(1, min(_MAX_ITEMS, chars // _CHARS_OF_ITEM), schema.get("minItems", 0))
    return int(schema.get("maxItems", bound))


def _number_bounds(schema: dict[str, Any], fractions: bool) -> dict[str, Any]:
    """Keywords that bound the size and, with `fractions`, the digits of a number, where its schema does not."""
    bounds: dict[str, Any] = {}
    low, high = (schema.get(name, schema.get(other)) for name, other in (
        ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
    ))  # fmt: skip
    if low is None and (high is None or high > -_MAX_NUMBER):
        bounds["minimum"] = -_MAX_NUMBER
    if high is None and (low is None or low < _MAX_NUMBER):
        bounds["maximum"] = _MAX_NUMBER
    if fractions and "multipleOf" not in schema and (low is None or high is None or high - low > 1e3 * _LEAST_NUMBER):
        bounds["multipleOf"] = _LEAST_NUMBER
    return bounds


def _list_bounds(schema: dict[str, Any], chars: int) -> dict[str, Any]:
    """Keywords that bound a list's length, and items that its schema says nothing of."""
    bounds: dict[str, Any] = {"maxItems": _num_items(schema, chars)}
    first = schema.get("prefixItems", schema.get("items"))
    last = "additionalItems" if isinstance(schema.get("items"), list) else "items"
    if last not in schema:
        enough = isinstance(first, list) and schema.get("minItems", 0) <= len(first)
        bounds[last] = not enough and _scalar(chars // bounds["maxItems"])
    return bounds


def _object_bounds(schema: dict[str, Any], chars: int) -> dict[str, Any]:
    """Keywords that bound an object's properties. Its schema's values have bounds already."""
    named, patterns = schema.get("properties", {}), schema.get("patternProperties")
    others = schema.get("additionalProperties", True)
    required = schema.get("required", [])
    bounds: dict[str, Any] = {}
    if not named:
        most = max(1, min(_MAX_FREE, chars // _CHARS_OF_ITEM), schema.get("minProperties", 0), len(required))
        bounds["maxProperties"] = min(most, schema.get("maxProperties", most))
        if others is not False and not patterns and not required:
            value = _scalar(chars // _MAX_FREE) if others is True else others
            bounds["patternProperties"] = {f"^.{{1,{_MAX_NAME_CHARS}}}$": value}
    if others is not False:
        bounds["additionalProperties"] = False
        missing = {} if patterns else {name: _scalar(chars) for name in required if name not in named}
        if missing:
            bounds["properties"] = {**named, **missing}
    return bounds


def _scalar(chars: int) -> dict[str, Any]:
    """A schema of any value but lists and objects, with bounds."""
    return {
        "type": ["string", "number", "boolean", "null"],
        "maxLength": max(chars, _LEAST_CHARS),
        **_number_bounds({}, True),
    }


def _anything(chars: int) -> dict[str, Any]:
    """A schema of any value, with bounds: lists and objects have one level, of scalars."""
    some = max(1, min(_MAX_FREE, chars // _CHARS_OF_ITEM))
    value = _scalar(chars // some)
    names = f"^.{{1,{_MAX_NAME_CHARS}}}$"
    return {
        "anyOf": [
            _scalar(chars),
            {"type": "array", "items": value, "maxItems": some},
            {"type": "object", "patternProperties": {names: value}, "additionalProperties": False,
             "maxProperties": some},
        ]
    }  # fmt: skip
