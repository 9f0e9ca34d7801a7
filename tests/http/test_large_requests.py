"""However large a request is, others go on: what one client sends never keeps the loop of a gateway for long."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import BodyTooLargeError
from cluster.http.body import MAX_VALUES, _require_few_values
from cluster.http.openai.sse import dumps, dumps_large
from tests.http.attacked_gateway import ATTACKS, TAKE_SECONDS, attack, fetch, gateway, get, request_bytes
from tests.support.waiting import wait_until

LONGEST_SILENCE_S = 0.25


@pytest.fixture(scope="module")
def port(smollm2_folder: Path) -> Iterator[int]:
    with gateway(smollm2_folder) as port:
        yield port


@pytest.mark.model
@pytest.mark.parametrize("name", ATTACKS)
def test_one_client_cannot_silence_a_gateway(port: int, name: str) -> None:
    status, make = ATTACKS[name]
    data = request_bytes(*make())
    get(port, "/silence")
    statuses = attack(port, data, 1 if name in TAKE_SECONDS else 3)
    assert set(statuses) == {status}
    assert get(port, "/silence")["longest_s"] <= LONGEST_SILENCE_S


@pytest.mark.model
def test_a_client_that_leaves_is_no_error_on_uvloop_either(port: int) -> None:
    """`gateway` looks for errors in the end."""
    _, make = ATTACKS["a prompt of 120,000 tokens"]
    path, body = make()
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(request_bytes(path, {**body, "prompt": "a", "stream": True, "max_tokens": 10_000}))
        assert sock.recv(10).startswith(b"HTTP/1.1")
    wait_until(lambda: b"legato_requests_running 0.0" in fetch(port, "/metrics"))


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
_LISTS = st.integers(0, 200).flatmap(lambda size: st.lists(st.integers(0, 9), min_size=size, max_size=size))
_CHOICES = st.lists(st.dictionaries(st.text(), _SCALARS | _LISTS, max_size=3), max_size=3)
_LONG_TEXTS = st.text(min_size=1, max_size=3).map(lambda text: text * 50_000)


@given(st.dictionaries(st.text(), _SCALARS | _LISTS | _CHOICES | _LONG_TEXTS, max_size=4))
def test_json_in_pieces_is_the_same(answer: dict[str, Any]) -> None:
    assert dumps_large(answer) == dumps(answer)


def test_values_of_a_body_are_counted_and_not_its_text() -> None:
    commas = b"," * (MAX_VALUES + 1)
    _require_few_values(b'["' + commas + rb"\"," + commas + b'"]')
    _require_few_values(b"[" + b"1," * (MAX_VALUES - 1) + b"1]")
    _require_few_values(b"{" + b'"a":1,' * (MAX_VALUES // 5 - 1) + b'"b":1}')
    for body in (
        b"[" + b"1," * MAX_VALUES + b"1]",
        b"[" * (MAX_VALUES + 1),
        commas,
        b'["",' + b'"\\\\",' * MAX_VALUES,
        b"{" + b'"a":1,' * (MAX_VALUES // 5 + 1) + b'"b":1}',
    ):
        with pytest.raises(BodyTooLargeError, match=f"more than {MAX_VALUES} JSON values"):
            _require_few_values(body)
