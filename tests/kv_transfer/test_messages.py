"""Every message survives the wire; nothing else does, and refusing it is cheap."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import msgpack
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.prefix import HASH_BYTES
from engine.sampling.params import MAX_LOGIT_BIAS, SamplingParams
from kv_transfer import messages
from kv_transfer.messages import KINDS, PROTOCOL_VERSION, MalformedMessageError, Message, decode, encode
from kv_transfer.messages.connections import Ping
from kv_transfer.messages.requests import Reserve
from tests.support.processor_time import in_loop_turns
from tests.support.thoroughness import THOROUGH

_KINDS: tuple[type[Any], ...] = tuple(KINDS.values())

_TOKEN_IDS = st.integers(0, 2**31 - 1)
_PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(50, 2**31 - 1),
    seed=st.integers(0, 2**63 - 1),
    temperature=st.floats(0, 2),
    top_k=st.integers(0, 100),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 10),
    logit_bias=st.dictionaries(_TOKEN_IDS, st.floats(-100, 100), max_size=4),
    logprobs=st.none() | st.integers(0, 20),
    min_tokens=st.integers(0, 50),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(_TOKEN_IDS, max_size=3).map(tuple),
    grammar=st.none() | st.text(max_size=8),
    allowed_token_ids=st.lists(_TOKEN_IDS, max_size=3).map(tuple),
    bad_words=st.lists(st.lists(_TOKEN_IDS, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)


def _strategy(hint: Any) -> st.SearchStrategy[Any]:
    """Values that a field's type allows."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _constrained(arguments[0], arguments[1].metadata)
    if origin in (Union, types.UnionType):
        return st.one_of([_strategy(argument) for argument in arguments])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is dict:
        return st.dictionaries(*map(_strategy, arguments), max_size=3)
    if origin is tuple:
        return st.tuples(*[_strategy(argument) for argument in arguments])
    if hint is SamplingParams:
        return _PARAMS
    return st.none() if hint is types.NoneType else _built(hint)


def _constrained(base: Any, constraints: list[Any]) -> st.SearchStrategy[Any]:
    names = ("ge", "gt", "le", "lt", "min_length", "max_length")
    bounds = {name: getattr(c, name) for c in constraints for name in names if hasattr(c, name)}
    if base is int:
        return st.integers(bounds["ge"], bounds.get("le", bounds.get("lt", 0) - 1))
    if base is float:
        least, most = bounds.get("ge", bounds.get("gt")), bounds.get("lt")
        return st.floats(
            least, most, exclude_min="gt" in bounds, exclude_max="lt" in bounds, allow_nan=False, allow_infinity=False
        )
    if typing.get_origin(base) is list:
        least = bounds.get("min_length", 0)
        return st.lists(_strategy(typing.get_args(base)[0]), min_size=least, max_size=max(least, 3))
    hashes = st.lists(st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES), max_size=3).map(b"".join)
    return {str: st.text(max_size=8), bool: st.booleans(), bytes: hashes}[base]


def _built(kind: type[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{field.name: _strategy(hints[field.name]) for field in dataclasses.fields(kind)})


_STRATEGIES = {kind: _built(kind) for kind in _KINDS}
_MESSAGES = st.one_of(list(_STRATEGIES.values()))


@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.__name__)
def test_every_message_survives_the_wire(kind: type[Any]) -> None:
    @settings(max_examples=30 if THOROUGH else 15, deadline=None)
    @given(_STRATEGIES[kind])
    def survives(message: Message) -> None:
        received = decode(memoryview(encode(message)))
        assert type(received) is kind
        assert received == message

    survives()


def test_every_process_knows_every_message() -> None:
    """All that is one is registered; `test_new_interpreters` asks a new one what it knows."""
    folder = Path(messages.__file__).parent
    modules = [importlib.import_module(f"{messages.__name__}.{path.stem}") for path in folder.glob("[a-z]*.py")]
    defined = {kind for module in modules for kind in vars(module).values() if _is_message(kind)}
    assert defined == set(_KINDS)


def _is_message(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Message) and kind is not Message


def _sample(hint: Any) -> Any:
    """One value of a field's type, always the same."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _sample(arguments[0])
    if origin in (Union, types.UnionType):
        return _sample(arguments[0])
    if origin is Literal:
        return arguments[-1]
    if origin is dict:
        return {_sample(arguments[0]): _sample(arguments[1])}
    if origin is list:
        return [_sample(arguments[0])] * 2
    if origin is tuple:
        return tuple(map(_sample, arguments))
    if hint is SamplingParams:
        return SamplingParams(
            max_tokens=300,
            seed=7,
            logit_bias={5: 1.5},
            stop_token_ids=(2,),
            grammar="start: /a/",
            allowed_token_ids=(3,),
            bad_words=((4, 5),),
            thinking_budget=6,
            thinking_marks=(7, 8),
        )
    plain = {int: 70_000, float: 0.25, str: "é", bool: True, bytes: b"\x07" * HASH_BYTES}
    if hint in plain:
        return plain[hint]
    hints = typing.get_type_hints(hint, include_extras=True)
    return hint(**{field.name: _sample(hints[field.name]) for field in dataclasses.fields(hint)})


# What processes of one protocol version say to each other: the version, and of each kind a digest of its `_sample`.
_ENCODINGS = Path(__file__).with_name("encodings.json")


def test_the_bytes_of_messages_are_those_of_the_protocol_version() -> None:
    """Who changes a message raises PROTOCOL_VERSION; then REWRITE_ENCODINGS=1 writes the file anew."""
    told = {
        "PROTOCOL_VERSION": PROTOCOL_VERSION,
        **{kind.__name__: xxhash.xxh3_64_hexdigest(encode(_sample(kind))) for kind in _KINDS},
    }
    if os.environ.get("REWRITE_ENCODINGS"):
        _ENCODINGS.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")
    assert told == json.loads(_ENCODINGS.read_text())


# What no field of any message takes: a map is only ever a nested message, and this one is of none.
_JUNK = {"junk": 1}


@settings(max_examples=300 if THOROUGH else 150, deadline=None)
@given(_MESSAGES, st.data())
def test_a_field_of_the_wrong_type_is_refused_by_name(message: Message, data: st.DataObject) -> None:
    tag, fields = msgpack.unpackb(encode(message), strict_map_key=False)
    path = _draw_path(fields, data)
    if not path:
        return
    holder = fields
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = data.draw(st.sampled_from([_JUNK, *_unlike(holder[path[-1]])]))
    with pytest.raises(MalformedMessageError, match=rf"^{tag}\."):
        decode(msgpack.packb([tag, fields]))


def _draw_path(node: Any, data: st.DataObject) -> list[Any]:
    """The way to some value inside a message's fields."""
    path: list[Any] = []
    while isinstance(node, (dict, list)) and node:
        step = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        path.append(step)
        node = node[step]
        if data.draw(st.booleans()):
            break
    return path


def _unlike(value: Any) -> list[Any]:
    """Values that a lenient decoder would convert to the type of `value`, or that no field may have."""
    if isinstance(value, bool):
        return [0, 1, "true", "no"]
    if isinstance(value, int):
        return [str(value), float(value) + 0.5, -(2**62), True]
    if isinstance(value, float):
        return [str(value), math.nan, math.inf, -math.inf, True]
    if isinstance(value, str):
        return [7, value.encode(), [value]]
    return ["text", 7] if isinstance(value, (dict, list)) else []


@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.__name__)
def test_missing_and_unknown_fields_are_refused(kind: type[Any]) -> None:
    @settings(max_examples=3, deadline=None)
    @given(_STRATEGIES[kind])
    def refused(message: Message) -> None:
        tag, fields = msgpack.unpackb(encode(message), strict_map_key=False)
        required = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]
        altered = [{k: v for k, v in fields.items() if k != name} for name in required]
        for bad in [*altered, {**fields, "unknown": 1}, {**fields, 5: 1}]:
            with pytest.raises(MalformedMessageError):
                decode(msgpack.packb([tag, bad]))

    refused()


def _decode_or_refuse(data: bytes) -> None:
    """Whatever is accepted must be a message that survives the wire itself."""
    try:
        message = decode(data)
    except MalformedMessageError as error:
        assert str(error)
        assert len(str(error)) < 500
    else:
        assert decode(encode(message)) == message


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    _decode_or_refuse(data)


@settings(max_examples=500 if THOROUGH else 250, deadline=None)
@given(_MESSAGES, st.data())
def test_mutated_messages(message: Message, data: st.DataObject) -> None:
    encoded = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(encoded)))
        stop = data.draw(st.integers(start, min(len(encoded), start + 4)))
        encoded[start:stop] = data.draw(st.binary(max_size=4))
    _decode_or_refuse(bytes(encoded))


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner),
    max_leaves=8,
)


@settings(max_examples=300 if THOROUGH else 150, deadline=None)
@given(_VALUES, st.sampled_from(_KINDS))
def test_well_formed_msgpack_of_anything(value: Any, kind: type[Any]) -> None:
    for frame in (value, [kind.__name__, value], [value, {}], [kind.__name__, {"request_id": value, "fence": value}]):
        _decode_or_refuse(msgpack.packb(frame))


def _reserve(**changes: Any) -> bytes:
    request = {"request_id": "r", "attempt": 0, "prompt_token_ids": [1], "params": {"max_tokens": 1, "seed": 0}}
    return bytes(msgpack.packb(["Reserve", {"request": {**request, **changes}}]))


def _list_of(num_items: int, rest: bytes) -> bytes:
    return b"\xdd" + num_items.to_bytes(4, "big") + rest


_MIB = 1 << 20
_HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "two messages": lambda: encode(Ping()) * 2,
    "not text": lambda: b"\x92\xa4\xff\xfe\xfd\xfc\x80",
    "unhashable tag": lambda: msgpack.packb([["Ping"], {}]),
    "unhashable key": lambda: b"\x92\xa4Ping\x81\x91\x01\x01",
    "unknown tag": lambda: msgpack.packb(["x" * _MIB, {}]),
    "a list of fields": lambda: msgpack.packb(["Ping", []]),
    "a time as fields": lambda: msgpack.packb(["Ping", msgpack.Timestamp(1, 2)]),
    "an extension as fields": lambda: msgpack.packb(["Ping", msgpack.ExtType(5, b"x")]),
    "deep lists": lambda: b"\x91" * _MIB,
    "deep maps": lambda: b"\x81\x01" * _MIB,
    "a declared length beyond the data": lambda: _list_of(2**32 - 1, b"\x01"),
    "a declared text beyond the data": lambda: b"\xdb\xff\xff\xff\xffabc",
    "a declared map beyond the data": lambda: b"\xdf\xff\xff\xff\xff\x01\x01",
    "long lists within long lists": lambda: _list_of(_MIB, b"") * 300 + b"\x01" * 4 * _MIB,
    "a million bad token ids": lambda: _reserve(prompt_token_ids=["x"] * _MIB),
    "a million bad token events": lambda: msgpack.packb(["StepFrame", {"tokens": [{}] * _MIB}]),
    "a million unknown fields": lambda: msgpack.packb(["Ping", {str(i): 1 for i in range(_MIB)}]),
    "a million biases": lambda: _reserve(params={"max_tokens": 1, "seed": 0, "logit_bias": dict.fromkeys(range(_MIB))}),
    "a long field name": lambda: msgpack.packb(["Ping", {"k" * _MIB: 1}]),
    "a token id of 64 bits": lambda: _reserve(prompt_token_ids=[2**64 - 1]),
    "a temperature that is no number": lambda: _reserve(params={"max_tokens": 1, "seed": 0, "temperature": math.nan}),
    "parameters out of range": lambda: _reserve(params={"max_tokens": 0, "seed": 0}),
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_hostile_bytes_are_refused_quickly(name: str) -> None:
    data = _HOSTILE[name]()
    told: list[str] = []

    def refuse() -> None:
        with pytest.raises(MalformedMessageError) as caught:
            decode(data)
        told.append(str(caught.value))

    assert in_loop_turns(refuse) < 25e6  # half a second where an honest megabyte takes a tenth of one
    assert 0 < len(told[0]) < 500


def test_a_refusal_says_where() -> None:
    with pytest.raises(MalformedMessageError, match=r"Reserve\.request\.prompt_token_ids\.1: .*valid integer"):
        decode(_reserve(prompt_token_ids=[5, "6"]))
    with pytest.raises(MalformedMessageError, match="another protocol version"):
        decode(msgpack.packb(["Teleport", {}]))


def test_the_largest_honest_requests_are_accepted() -> None:
    biases = dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)
    params = {"max_tokens": 1, "seed": 0, "logit_bias": biases}
    message = decode(_reserve(prompt_token_ids=list(range(1_000_000)), params=params))
    assert isinstance(message, Reserve)
    assert len(message.request.prompt_token_ids) == 1_000_000
    assert message.request.params.logit_bias == biases
