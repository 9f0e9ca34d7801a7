"""Bodies that nobody should send: made by the schemas of the application's own OpenAPI description, and then broken.

And an application called without a server, thousands of times a second.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from fastapi import FastAPI
from hypothesis import strategies as st
from starlette.types import Message

from tests.support.http_server import MODEL
from tests.support.waiting import HANGS_S

Headers = list[tuple[bytes, bytes]]
JSON: Final[Headers] = [(b"content-type", b"application/json")]

# --- whole bodies ---

TEXTS: Final = st.text(max_size=12)
ANYTHING: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
TOKEN_IDS: Final = st.lists(st.integers(0, 40_000), min_size=1, max_size=8)
# Of a conversation in the Responses API.
SAID: Final[st.SearchStrategy[Any]] = TEXTS | st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["input_text", "output_text", "refusal", "input_image"]),
                           "text": TEXTS}, optional={"annotations": st.just([])}), max_size=2,
)  # fmt: skip
ITEMS: Final = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXTS | SAID})
    | st.fixed_dictionaries({"type": st.just("reasoning"), "summary": SAID, "content": SAID | st.none()})
    | st.fixed_dictionaries({"type": st.just("function_call"), "call_id": st.just("c"), "name": st.just("f"),
                             "arguments": TEXTS | st.just("{}")})
    | st.fixed_dictionaries({"type": st.just("function_call_output"), "call_id": st.just("c"), "output": TEXTS | SAID}),
    min_size=1, max_size=4,
)  # fmt: skip

# Where a schema allows more than makes sense, so that many of the bodies are good ones before they are broken.
SENSIBLE: Final[dict[str, st.SearchStrategy[Any]]] = {
    "model": st.just(MODEL),
    "prompt": st.just("hello") | st.text(min_size=1) | TOKEN_IDS | st.lists(TOKEN_IDS, min_size=1, max_size=2),
    "content": TEXTS | st.just([{"type": "text", "text": "hello"}]),
    "tokens": TOKEN_IDS,
    "stop_token_ids": TOKEN_IDS,
    "stop": st.lists(st.text(min_size=1, max_size=4), max_size=4),
    "logit_bias": st.dictionaries(st.integers(0, 40_000).map(str), st.floats(-100, 100), max_size=3),
    "n": st.integers(1, 3),
    "max_tokens": st.integers(1, 30),
    "max_completion_tokens": st.integers(1, 30),
    "max_output_tokens": st.integers(1, 30),
    "min_tokens": st.integers(0, 3),
    "input": st.text(min_size=1, max_size=12) | TOKEN_IDS | st.lists(TOKEN_IDS, min_size=1, max_size=2) | ITEMS,
    "text_1": st.just("hello"),
    "text_2": st.just("sea") | st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=3),
    "query": st.just("hello") | st.text(min_size=1, max_size=12),
    "dimensions": st.integers(1, 8),
    "service_tier": st.sampled_from(["auto", "default"]),
    "chat_template_kwargs": st.just({}),
    "documents": st.just([{"text": "hello"}]),  # of a template, or to be ranked
}
# Schemas, some of which mean something, and what else says how an answer must look.
_WORDS: Final = st.sampled_from(["string", "integer", "number", "object", "array", "boolean", "null", "text", ""])
_PATTERNS: Final = (
    st.sampled_from(["a+", "(", "^[a-z]{1,5}$", r"\d", "a{9999}", "[", r"\p{L}", "(?=a)", "^$", "*"]) | TEXTS
)
_COUNTS: Final = st.integers(-1, 5) | st.just(2**63) | st.just(0.5)
_PLACES: Final = st.sampled_from(["#", "#/$defs/a", "#/properties/a", "http://127.0.0.1/x", "#/%zz", ""])


def _keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.sampled_from(["a", "b", "é", ""]), inner, max_size=2)
    several = st.lists(inner, max_size=2)
    of = {
        "type": _WORDS | st.lists(_WORDS, max_size=2), "enum": st.lists(ANYTHING, max_size=3), "const": ANYTHING,
        "properties": named, "patternProperties": named, "$defs": named, "required": st.lists(TEXTS, max_size=2),
        "items": inner | several, "prefixItems": several, "additionalProperties": inner, "propertyNames": inner,
        "anyOf": several, "oneOf": several, "allOf": several, "not": inner, "if": inner, "then": inner, "$ref": _PLACES,
        "pattern": _PATTERNS, "format": st.sampled_from(["date", "email", "ipv4", "uuid", "none", "regex"]),
        "minLength": _COUNTS, "maxLength": _COUNTS, "minItems": _COUNTS, "maxItems": _COUNTS, "minimum": _COUNTS,
        "exclusiveMaximum": _COUNTS, "multipleOf": _COUNTS, "minProperties": _COUNTS, "uniqueItems": st.booleans(),
        "title": ANYTHING, "x-guidance": ANYTHING,
    }  # fmt: skip
    return st.lists(st.sampled_from(sorted(of)), max_size=4, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({name: of[name] for name in chosen})
    )


SCHEMAS: Final = st.recursive(st.booleans() | st.just({}) | _WORDS.map(lambda word: {"type": word}), _keywords)
_OBJECTS: Final = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from(["a", "b"]), SCHEMAS, max_size=2)}
)
_NAMES: Final = st.sampled_from(["f", "g", "f", "a b", ""])


def _functions(key: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    function = st.fixed_dictionaries({"name": _NAMES, key: _OBJECTS | SCHEMAS}, optional={"strict": st.booleans()})
    return st.lists(function, max_size=2)


_CHOICES: Final = st.sampled_from(
    ["auto", "none", "required", {"type": "function", "function": {"name": "f"}},
     {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}]
)  # fmt: skip
_MARKS: Final = st.sampled_from(["<a>", "<", "</a>", "", "<|im_end|>", {"type": "token", "token": 1}])


def _formats(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    tag = st.fixed_dictionaries({"type": st.just("tag"), "begin": _MARKS, "content": inner, "end": _MARKS})
    several = {"elements": st.lists(inner, max_size=2), "tags": st.lists(tag, max_size=2), "content": inner}
    kinds = ["sequence", "or", "optional", "star", "repeat", "triggered_tags", "dispatch", "tags_with_separator"]
    return tag | st.fixed_dictionaries(
        {"type": st.sampled_from(kinds)},
        optional={**several, "triggers": st.lists(_MARKS, max_size=2), "rules": st.lists(st.tuples(_MARKS, inner)),
                  "separator": _MARKS, "at_least_one": st.booleans(), "min": _COUNTS, "max": _COUNTS},
    )  # fmt: skip


_TAGS: Final = st.recursive(
    st.just({"type": "any_text"})
    | SCHEMAS.map(lambda schema: {"type": "json_schema", "json_schema": schema})
    | _PATTERNS.map(lambda pattern: {"type": "regex", "pattern": pattern}),
    _formats,
)
_WISHES: Final = st.one_of(
    st.fixed_dictionaries({"json": SCHEMAS}),
    st.fixed_dictionaries({"regex": _PATTERNS}),
    st.fixed_dictionaries({"choice": st.lists(TEXTS, max_size=3)}),
    st.fixed_dictionaries({"structural_tag": st.fixed_dictionaries({"format": _TAGS})}),
    st.fixed_dictionaries({"grammar": st.sampled_from(['start: "a"', "root ::= [a-z]+", "start: start", "start: ("])}),
)
_ASKED: Final[dict[str, Any]] = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
_FORMATS: Final = SCHEMAS.map(lambda schema: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
CONSTRAINED: Final[dict[str, st.SearchStrategy[Any]]] = {
    "/v1/chat/completions": st.fixed_dictionaries(
        {},
        optional={
            "response_format": _FORMATS,
            "structured_outputs": _WISHES,
            "tools": _functions("parameters").map(
                lambda functions: [{"type": "function", "function": function} for function in functions]
            ),
            "tool_choice": _CHOICES,
            "parallel_tool_calls": st.booleans(),
            "thinking_token_budget": st.integers(-2, 3),
        },
    ).map(lambda fields: {**_ASKED, **fields}),
    "/v1/messages": st.fixed_dictionaries(
        {},
        optional={
            "output_config": SCHEMAS.map(lambda schema: {"format": {"type": "json_schema", "schema": schema}}),
            "tools": _functions("input_schema"),
            "tool_choice": st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "tool"]), "name": _NAMES}),
            "thinking": st.just({"type": "enabled", "budget_tokens": 1}),
        },
    ).map(lambda fields: {**_ASKED, **fields}),
    "/v1/completions": _WISHES.map(
        lambda wish: {"model": MODEL, "prompt": "hello", "max_tokens": 4, "structured_outputs": wish}
    ),
}
EITHER: Final = {"prompt", "messages"}  # where a body may have both, it makes sense with one
NEEDED: Final = {"input"}  # which a response may lack behind another one, and makes no sense without else


class Schemas:
    """Strategies of the schemas that an OpenAPI description names."""

    def __init__(self, description: dict[str, Any], **sensible: st.SearchStrategy[Any]) -> None:
        self._named = description["components"]["schemas"]
        self._sensible = SENSIBLE | sensible

    def strategy(self, schema: dict[str, Any], name: str = "") -> st.SearchStrategy[Any]:
        if (good := self._sensible.get(name)) is not None:
            return good | good | good | good | self._strategy(schema)
        return self._strategy(schema)

    def _strategy(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        if "$ref" in schema:
            return self.strategy(self._named[schema["$ref"].rpartition("/")[2]])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        if "anyOf" in schema:
            return st.one_of([self.strategy(one) for one in schema["anyOf"]])
        match schema.get("type"):
            case "object" if "properties" in schema:
                return self._object(schema["properties"], set(schema.get("required", ())))
            case "object":
                return st.dictionaries(TEXTS, ANYTHING, max_size=3)
            case "array":
                return st.lists(self.strategy(schema["items"]), min_size=schema.get("minItems", 0), max_size=3)
            case "integer":
                return st.integers(schema.get("minimum"), schema.get("maximum"))
            case "number":
                return st.floats(schema.get("minimum"), schema.get("maximum"), allow_nan=False, allow_infinity=False)
            case "string":
                return TEXTS
            case "boolean":
                return st.booleans()
            case "null":
                return st.none()
        return st.none() | st.none() | ANYTHING

    def _object(self, properties: dict[str, Any], required: set[str]) -> st.SearchStrategy[dict[str, Any]]:
        fields = {name: self.strategy(schema, name) for name, schema in properties.items()}
        required = required | fields.keys() & NEEDED
        either = sorted(EITHER) if fields.keys() - required >= EITHER else []
        optional = sorted(fields.keys() - required - set(either))

        @st.composite
        def some(draw: st.DrawFn) -> dict[str, Any]:
            chosen = draw(st.lists(st.sampled_from(optional), max_size=4, unique=True)) if optional else []
            one = [draw(st.sampled_from(either))] if either else []
            return {name: draw(fields[name]) for name in [*sorted(required), *one, *chosen]}

        return some()


# --- broken ones ---

DEEP: Final = 100_000
# What stands in the place of a value, as it is written: none of these can be told to `json.dumps`.
NASTY: Final = [
    rb'"\ud800"', rb'"\udfff\ud800"', rb'"half \ud83d"', rb'"\u0000"', rb'"\u12"', rb'"\x"', b'"\xed\xa0\x80"',
    b'"\xff"', b'"\xc0\x80"', b'"\x00"', b'"', b"'text'", b"1" * 5_000, b"-" + b"7" * 5_000, b"1" * 4_300,
    b"0." + b"3" * 5_000, b"1e400", b"-1e400", b"1e-400", b"NaN", b"Infinity", b"-Infinity", b"9223372036854775808",
    b"-9223372036854775809", b"18446744073709551616", b"01", b"1.", b"--1", b"-0", b"True", b"nul", b"[" * DEEP,
    b'{"a":' * DEEP, b"[" * DEEP + b"]" * DEEP, b"[" * 190 + b"]" * 190, b'{"a":' * 150 + b"1" + b"}" * 150, b"[1,]",
    b"{}", b"[]", b'""', b"[{}]", b"[[]]", b'{"a":1,"a":2}', b'{"\\ud800":1}', b"null", b"-1", b"0.5", b'["\\udc00"]',
    b"/* */1", b'"' + b"x" * 5_000 + b'"', '"🦜"'.encode(), b"", b"}", b",",
]  # fmt: skip
ENCODINGS: Final = ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig", "utf-7"]
CONTENT_TYPES: Final = [
    b"", b"text/plain", b"application/json; charset=utf-16", b"application/x-www-form-urlencoded",
    b"multipart/form-data", b"application/vnd.x+json", b"\xff\xfe", b"application/json; charset=\xff", b";",
    b"application/json" * 500,
]  # fmt: skip


class Sent(NamedTuple):
    body: bytes
    headers: Headers = JSON


NOTHING: Final = Sent(b"", [])


def broken(body: Any, rng: random.Random) -> Sent:
    """The body with one or two things wrong; now and then it stays right all the same."""
    written = _with_nasty_values(body, rng)
    headers = JSON
    for _ in range(rng.randrange(2)):
        how = rng.choice([_bytes_changed, _bytes_changed, _key_twice, _stranger, _encoded])
        written = how(written, rng)
    if rng.random() < 0.03:
        headers = [(b"content-type", rng.choice(CONTENT_TYPES))]
    return Sent(written, headers)


def _with_nasty_values(body: Any, rng: random.Random) -> bytes:
    body = json.loads(json.dumps(body))
    nasty = [rng.choice(NASTY) for _ in range(rng.choice([0, 0, 1, 1, 1, 2]))]
    for index in range(len(nasty)):
        places = list(_places(body))
        if not places or rng.random() < 0.05:
            body = f"@{index}@"
            continue
        holder, key = rng.choice(places)
        holder[key] = f"@{index}@"
    if isinstance(body, dict) and body and rng.random() < 0.1:
        del body[rng.choice(list(body))]
    return re.sub(rb'"@(\d)@"', lambda found: nasty[int(found[1])], json.dumps(body).encode())


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All values below this one, by what holds them."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(entries):
        yield value, key
        yield from _places(inner)


def _bytes_changed(written: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(written) + 1)
    few = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 4)))
    return rng.choice(
        [written[:at], written[at:], written[:at] + few + written[at:], written[:at] + few + written[at + len(few) :],
         written + written[:at], written[:at] + b'"' + written[at:]]
    )  # fmt: skip


def _key_twice(written: bytes, rng: random.Random) -> bytes:
    found = re.search(rb'"[^"]*":', written)
    return written if found is None else written.replace(b"{", b"{" + found[0] + rng.choice(NASTY) + b",", 1)


def _stranger(written: bytes, rng: random.Random) -> bytes:
    name = rng.choice(
        [b'"stranger"', rb'"\ud800"', b'"' + b"k" * 5_000 + b'"', b'""', '"é{}%s"'.encode(), b'"__class__"']
    )
    return written.replace(b"{", b"{" + name + b":1,", 1)


def _encoded(written: bytes, rng: random.Random) -> bytes:
    return written.decode("utf-8", errors="replace").encode(rng.choice(ENCODINGS))


# --- forms ---

_FORM_WORDS: Final = [
    b"form-data", b"attachment", b'name="file"', b'name="purpose"', b'filename="a.jsonl"', b"filename*=UTF-8''%ff",
    b'filename="\xff\x00"', b'name="' + b"n" * 5_000 + b'"', b"name=", b";", b":", b"\r\n", b"\r\n\r\n", b"--",
    b"content-type: text/plain; charset=nothing", b"content-transfer-encoding: base64", b"\xff\xfe", b"\0",
    b'name="expires_after[seconds]"', b'name="expires_after[anchor]"',
]  # fmt: skip


def form(parts: list[tuple[bytes, bytes]], boundary: bytes = b"b") -> Sent:
    """Of what stands behind `form-data; ` in each part's head, and its content."""
    written = b"".join(
        b"--%b\r\ncontent-disposition: form-data; %b\r\n\r\n%b\r\n" % (boundary, head, content)
        for head, content in parts
    )
    return Sent(written + b"--%b--\r\n" % boundary, [(b"content-type", b"multipart/form-data; boundary=" + boundary)])


def file_form(content: bytes) -> Sent:
    return form([(b'name="purpose"', b"batch"), (b'name="file"; filename="lines.jsonl"', content)])


def broken_form(rng: random.Random) -> Sent:
    """With some things wrong; now and then it stays right all the same."""
    parts = [
        (b'name="purpose"', rng.choice([b"batch", b"batch", b"batch", b"", b"fine-tune", b"\xff"])),
        (b'name="file"; filename="lines.jsonl"', bytes(rng.randrange(256) for _ in range(rng.randrange(40)))),
    ]
    for _ in range(rng.choice([0, 0, 0, 1, 2, 12])):
        parts.insert(rng.randrange(len(parts) + 1), (rng.choice(_FORM_WORDS), rng.choice([*_FORM_WORDS, b"3600"])))
    sent = form(parts, rng.choice([b"b", b"b", b"b", b"b", b"b", b"", b'"', b"x" * 5_000, b"\xff"]))
    body, headers = sent
    for _ in range(rng.choice([0, 0, 1, 2])):
        at = rng.randrange(len(body) + 1)
        word = rng.choice(_FORM_WORDS)
        body = rng.choice([body[:at], body[at:], body[:at] + word + body[at:], _bytes_changed(body, rng)])
    if rng.random() < 0.1:
        headers = [(b"content-type", rng.choice(CONTENT_TYPES))]
    return Sent(body, headers)


# --- calls ---


class Answer(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes


async def call(app: FastAPI, method: str, path: str, sent: Sent = NOTHING, query: bytes = b"") -> Answer:
    """What a server would have the application answer. The client stays until the end, or for the first of events that
    have none."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": query, "root_path": "", "headers": sent.headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    coming: list[Message] = [{"type": "http.request", "body": sent.body, "more_body": False}]
    got: list[Any] = []
    left = asyncio.Event()

    async def receive() -> Message:
        if not coming:
            await left.wait()
            return {"type": "http.disconnect"}
        return coming.pop()

    async def send(message: Any) -> None:
        got.append(message)
        if path == "/cluster/events" and "body" in message:
            left.set()

    async with asyncio.timeout(HANGS_S):
        await app(scope, receive, send)
    started, *parts = got
    return Answer(started["status"], dict(started["headers"]), b"".join(part.get("body", b"") for part in parts))


def check_refusal(answer: Answer, path: str) -> None:
    """In OpenAI's shape or Anthropic's, in a sentence, and no longer than somebody reads."""
    body = json.loads(answer.body)
    error = body["error"]
    message, kind = error["message"], error["type"]
    is_anthropics = path == "/v1/messages" or path.startswith("/v1/messages/")
    known = {"message", "type"} | ({"details"} & error.keys() if is_anthropics else {"param", "code"})
    assert error.keys() == known, error
    assert len(message) < 1_000, message
    assert message.endswith(".") and " " in message, message
    if is_anthropics:
        assert body["type"] == "error", body
        assert kind in ("invalid_request_error", "rate_limit_error", "not_found_error", "request_too_large"), error
        return
    assert kind in ("invalid_request_error", "rate_limit_error"), error
    assert isinstance(error["code"], str) and (error["param"] is None or isinstance(error["param"], str)), error
