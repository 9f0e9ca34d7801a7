"""No input of a client's makes a gateway answer 5xx, log a traceback, fall silent or grow."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import logging
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import psutil
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.batch.lines import BatchLine, read_lines
from cluster.config.settings import GatewaySettings
from cluster.errors import ApiError
from cluster.gateway.generator import ServingLimits
from cluster.http.app import create_app
from cluster.http.endpoints.batches import running_batches
from cluster.http.openai.responses import ResponsesBody
from cluster.http.openai.schemas import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from cluster.http.server.body import checked_body
from cluster.json_text import parse_json
from engine.text.tokenizer import Tokenizer
from tests.http.http_fuzz import (
    CONSTRAINED,
    JSON,
    NOTHING,
    Answer,
    Headers,
    Schemas,
    Sent,
    broken,
    broken_form,
    call,
    check_refusal,
    file_form,
)
from tests.support.http_server import MODEL, scripted_api
from tests.support.openai_conformance import Target
from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.thoroughness import THOROUGH, examples

pytestmark = pytest.mark.model

OTHER_NAMES = {"/v1/score": ("/score",), "/v1/rerank": ("/rerank", "/v2/rerank")}  # which are not described
NUM_BODIES = examples(400)  # of each endpoint, in one run of each test
NUM_BROKEN = 9 if THOROUGH else 2  # ways that each of them is sent in, besides as it is
NUM_ODD = 240 if THOROUGH else 15  # paths, headers and queries of each endpoint
GROWTH_BYTES = 100 * 2**20


class Gateway:
    """An application, called on a loop of its own, and what it logged."""

    def __init__(self, tokenizer: Tokenizer, storage: Path) -> None:
        self.generator = ScriptedGenerator(tokenizer)
        self.generator.script = Script(reply="one two three", limits=ServingLimits(max_model_len=64, ready=True))
        settings = GatewaySettings(max_concurrent=8)
        self.app: FastAPI = create_app(scripted_api(self.generator, tokenizer, settings, storage=storage))
        self.statuses: Counter[tuple[str, int]] = Counter()
        self._runner = asyncio.Runner()
        self._running = running_batches(self.app)
        self._runner.run(self._running.__aenter__())

    @functools.cached_property
    def description(self) -> dict[str, Any]:
        """By which most bodies and paths are made; it takes a while to write."""
        return self.app.openapi()

    def call(self, method: str, path: str, sent: Sent = NOTHING, query: bytes = b"") -> Answer:
        answer = self._runner.run(call(self.app, method, path, sent, query))
        self.statuses[path, answer.status] += 1
        assert answer.status < 500, (path, query, sent, answer)
        if answer.status >= 400:
            try:
                check_refusal(answer, path)
            except Exception as error:
                raise AssertionError(f"{path} {query!r} {sent!r} got {answer}") from error
        return answer

    def upload(self) -> str:
        answer = self.call("POST", "/v1/files", file_form(b"{}\n"))
        return str(json.loads(answer.body)["id"])

    def begin(self, file_id: str) -> str:
        fields = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        return str(json.loads(self.call("POST", "/v1/batches", Sent(json.dumps(fields).encode())).body)["id"])

    def close(self) -> None:
        assert self.call("GET", "/health").status == 200
        self._runner.run(self._running.__aexit__(None, None, None))
        assert self.generator.num_open == 0
        self._runner.close()


@pytest.fixture
def gateway(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> Iterator[Gateway]:
    with caplog.at_level(logging.WARNING):
        gateway = Gateway(tokenizer, tmp_path)
        yield gateway
        gateway.close()
    assert not [record.getMessage() for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def test_no_body_breaks_an_endpoint(gateway: Gateway) -> None:
    """Of 4,000 for each endpoint that takes one, under each of its names, in `make test-long`."""
    windows = st.sampled_from(["24h", "30m", "14d"])
    schemas = Schemas(gateway.description, input_file_id=st.just(gateway.upload()), completion_window=windows)
    operations = [
        (path, operation)
        for path, methods in gateway.description["paths"].items()
        for method, operation in methods.items()
        if "requestBody" in operation
    ]
    operations += [(name, operation) for path, operation in operations for name in OTHER_NAMES.get(path, ())]
    assert len(operations) >= 17
    process, before = psutil.Process(), 0
    for path, operation in operations:
        body_of = schemas.strategy(operation["requestBody"]["content"]["application/json"]["schema"])
        send_bodies(gateway, path.replace("{worker_id}", "decode-1"), body_of)
        gc.collect()
        before = before or process.memory_info().rss  # the first endpoint's bodies warm everything up
    assert process.memory_info().rss - before < GROWTH_BYTES
    num_sent = NUM_BODIES * (1 + NUM_BROKEN)  # to each
    for path, _ in operations:
        if path.endswith("_lora_adapter"):  # this gateway has no folder for them
            continue
        path = path.replace("{worker_id}", "decode-1")
        num_good = sum(gateway.statuses[path, status] for status in (200, 202))
        assert NUM_BODIES / 10 < num_good < num_sent * 0.9, gateway.statuses


def send_bodies(gateway: Gateway, path: str, body_of: st.SearchStrategy[Any], num_broken: int = NUM_BROKEN) -> None:
    @settings(max_examples=NUM_BODIES)
    @given(body_of, st.integers(0, 2**32))
    def send(body: Any, seed: int) -> None:
        rng = random.Random(seed)
        gateway.call("POST", path, Sent(json.dumps(body).encode()))
        for _ in range(num_broken):
            gateway.call("POST", path, broken(body, rng))
        assert gateway.call("GET", "/health").status == 200

    send()


def test_no_schema_breaks_an_endpoint(gateway: Gateway) -> None:
    """Whole ones and broken ones: what is not enforced is refused."""
    for path, body_of in CONSTRAINED.items():
        send_bodies(gateway, path, body_of, num_broken=1)
        for status in (200, 400):
            assert gateway.statuses[path, status] > NUM_BODIES / 5, gateway.statuses


def test_no_form_breaks_the_files(gateway: Gateway) -> None:
    rng = random.Random(5)
    for _ in range(10 * NUM_BODIES):
        gateway.call("POST", "/v1/files", broken_form(rng))
    for status in (200, 400):
        assert gateway.statuses["/v1/files", status] > NUM_BODIES / 2, gateway.statuses


def test_no_line_breaks_a_batch(tmp_path: Path) -> None:
    """Each is one, or is told what is wrong with it."""
    rng, path = random.Random(6), tmp_path / "lines.jsonl"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": ["x"]}}
    good = 0
    for _ in range(4 * NUM_BODIES):
        path.write_bytes(broken(line, rng).body.replace(b"\n", b" "))
        for found in read_lines(path):
            good += isinstance(found, BatchLine)
            assert isinstance(found, BatchLine) or (found.message and found.line == 1)
    assert good > NUM_BODIES / 5


# What reaches an application beside a body: uvicorn gives it any bytes in a header, and a path as text.
ODD = st.sampled_from([
    b"", b"0", b"-1", b"nan", b"inf", b"1e400", b"9" * 5_000, b"\xff\xfe", b"\xed\xa0\x80", "é🦜".encode(), b"%00",
    b"%ff", b"../../etc/passwd", b"{}%s%n", b"a" * 5_000, b"[", b"x@y:z", b" ", b"1,2", b"Bearer \xff", b"interactive",
])  # fmt: skip
HEADERS = [
    b"x-slo-class", b"x-slo-ttft-ms", b"x-slo-tpot-ms", b"x-slo-gap-ms", b"x-tenant", b"authorization", b"host",
    b"content-length", b"accept", b"cookie", b"x-forwarded-for", b"x-request-id", b"traceparent", b"expect",
    b"transfer-encoding",
]  # fmt: skip


def test_no_header_query_or_path_breaks_an_endpoint(gateway: Gateway) -> None:
    paths: dict[str, dict[str, Any]] = gateway.description["paths"]
    described = [(path, method.upper(), known) for path, methods in paths.items() for method, known in methods.items()]
    names = sorted({known["name"].encode() for *_, operation in described for known in operation.get("parameters", ())})
    odd_headers = st.lists(st.tuples(st.sampled_from(HEADERS), ODD | st.binary(max_size=8)), max_size=3)
    odd_query = st.lists(st.tuples(st.sampled_from(names), ODD.map(lambda odd: quote_from_bytes(odd).encode()) | ODD))
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 2}).encode()
    stored = [{"model": MODEL, "input": "x", "background": n % 2 == 0} for n in range(6)]
    answers = [gateway.call("POST", "/v1/responses", Sent(json.dumps(asked).encode())) for asked in stored]
    ids = [json.loads(answer.body)["id"].encode() for answer in answers]

    def send(path: str, method: str, num_times: int) -> None:
        @settings(max_examples=num_times)
        @given(ODD | st.sampled_from(ids) if "{response_id}" in path else ODD, odd_headers, odd_query)
        def send(part: bytes, headers: Headers, query: list[tuple[bytes, bytes]]) -> None:
            place = re.sub(r"{.*}", lambda found: part.decode(errors="replace"), path)
            asked = b"&".join(name + b"=" + value for name, value in query)
            gateway.call(method, place, Sent(body, [*JSON, *headers]), asked)

        send()

    file_id = gateway.upload()
    real = {"{file_id}": file_id, "{batch_id}": gateway.begin(file_id)}
    for path, method, _ in described:
        if (name := next((name for name in real if name in path), None)) is not None:
            send(path.replace(name, real[name]), method, 10)
            real["{file_id}"] = gateway.upload()  # the other may be deleted by now
        send(path, method, NUM_ODD)
        send(path, "PUT" if method == "POST" else "POST", 10)
    for method in ("GET", "POST", "HEAD", "OPTIONS", "TRACE", "odd"):
        send("/{odd}", method, 30)


@pytest.mark.parametrize("query", [b"", b"accept=Bearer \xff", b"%ff"])
def test_a_slash_too_many_is_told_whatever_the_query_is(gateway: Gateway, query: bytes) -> None:
    for method, path in (("POST", "/v1/files/"), ("POST", "/v1/completions/"), ("GET", "/v1/batches/")):
        assert gateway.call(method, path, Sent(b"{}", JSON), query).status == 404
    answers = [gateway.call("GET", path, NOTHING, query) for path in ("/v1/models", "/v1/models/")]
    assert answers[0].status == 200 and answers[0].body == answers[1].body


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (rb'{"model": "M", "prompt": "hi", "user": "\ud800"}', "half of a character"),
        (rb'{"model": "M", "prompt": "hi", "safety_identifier": "\udfff"}', "half of a character"),
        (rb'{"model": "M", "prompt": "a\ud83d"}', "half of a character"),
        (rb'{"model": "M", "prompt": "a", "cache_salt": "\ud83d"}', "half of a character"),
        (rb'{"model": "M", "prompt": "a", "stop": ["\ud83d"]}', "half of a character"),
        (rb'{"model": "M", "prompt": "a", "metadata": {"\ud83d": 1}}', "half of a character"),
        (b'{"model": "M", "prompt": "hi", "seed": ' + b"1" * 5_000 + b"}", "too many digits"),
        (b'{"model": "M", "prompt": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"model": "M", "metadata": ' + b'{"a":' * 40_000, "nested too deeply"),
        (b'{"model": "M", "prompt": "hi", "n": 1, "n": 2}', "each key of an object once"),
        (b'{"model": "M", "prompt": "hi", "metadata": {"a": 1, "a": 1}}', "each key of an object once"),
        ('{"model": "M", "prompt": "hi"}'.encode("utf-16"), "must be in UTF-8"),
        ('{"model": "M", "prompt": "hi"}'.encode("utf-32-be"), "must be in UTF-8"),
        ('{"model": "M", "prompt": "hi"}'.encode("utf-8-sig"), "must be in UTF-8"),
        (b'{"model": "M", "prompt": "\xff"}', "must be in UTF-8"),
        (b'{"model": "M", "prompt": "hi", "metadata": NaN}', "Send a JSON object"),
        (b'{"model": "M", "prompt": "hi", "temperature": Infinity}', "Send a JSON object"),
        (b'{"model": "M", "prompt": "hi", "tools": [{"parameters": {"maximum": 1e999}}]}', "1.7e308"),
        (b'{"model": "M", "prompt": "hi", "temperature": -1' + b"0" * 400 + b".0}", "1.7e308"),
    ],
)
def test_what_is_wrong_with_a_body_is_said(target: Target, body: bytes, said: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
        answer = target.http.post(
            path, content=body.replace(b"M", MODEL.encode()), headers={"content-type": "application/json"}
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_json")
        assert said in error["message"], error


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionBody, {"model": MODEL, "prompt": "x", **{f"k{n}": 1 for n in range(200_000)}}),
        (CompletionBody, {"model": MODEL, "prompt": "x", "stop_token_ids": [None] * 250_000}),
        (ChatBody, {"model": MODEL, "messages": [{}] * 120_000}),
        (TokenizeBody, {"messages": [{"role": "x"}] * 120_000}),
        (DetokenizeBody, {"tokens": ["a"] * 250_000}),
        (ResponsesBody, {"model": MODEL, "input": [{}] * 120_000}),
        (ResponsesBody, {"model": MODEL, "input": "x", "tools": [{}] * 120_000}),
        (ResponsesBody, {"model": MODEL, "input": "x", "include": ["x"] * 250_000}),
        (ResponsesBody, {"model": MODEL, "input": "x", "metadata": {f"k{n}": 1 for n in range(50_000)}}),
    ],
)
def test_many_mistakes_are_reported_as_one(model: type[Body], body: dict[str, Any]) -> None:
    """A report of each would take a hundred times as long as to read them."""
    sent = json.dumps(body).encode()
    with pytest.raises(ApiError):
        checked_body(sent, model)
    with pytest.raises(ValidationError) as refused:
        model.model_validate(parse_json(sent))
    assert refused.value.error_count() <= 2
