"""Bounds for JSON schemas, so that their instances end.

`cluster.http.openai.structured` asks for it of the arguments of calls that must be made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from urllib.parse import unquote

from cluster.http.openai.json_schemas import NEUTRAL, Schema, types_of, with_each

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
        with_each(
            schema,
            place,
            lambda name, inner, at: looks.append(self._look(inner, at, share(name), _passed_on(schema, name, whole))),
        )
        return found or any(looks)

    def _of_place(self, place: str, chars: int) -> int:
        """How many characters instances may have at a place: `chars`, or fewer if references lead there."""
        return min(chars, self._chars.get(place, chars))

    def ended(self, schema: dict[str, Any], chars: int) -> dict[str, Any]:
        if not schema.keys() - NEUTRAL - {"type", "properties"} and not schema.get("properties"):
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
        ended = with_each(
            schema, place, lambda name, inner, at: self._ended(inner, at, share(name), _passed_on(schema, name, whole))
        )
        if schema.keys() & {"$ref", "allOf", "anyOf", "enum", "const"}:
            return ended
        kinds = types_of(schema)
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
    return not schema.keys() - NEUTRAL - {name}


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
        value = _scalar(chars) if others is True or others == {} else others
        missing = {} if patterns else {name: value for name in required if name not in named}
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
