"""Files and batches over the real HTTP application, by OpenAI's client, which validates strictly."""

from __future__ import annotations

import asyncio
import encodings
import errno
import io
import json
import os
import socket
import sqlite3
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch, FileObject
from prometheus_client import generate_latest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from cluster.batch import files as stored_files
from cluster.batch import service
from cluster.batch.batches import Batch as StoredBatch
from cluster.batch.batches import KeptAnswer
from cluster.batch.database import Database
from cluster.batch.files import StoredFile
from cluster.batch.lines import MAX_LINES, check_lines
from cluster.batch.service import BatchService
from cluster.config.settings import GatewaySettings
from cluster.errors import FailedError, NotFoundError, OverloadedError, UnavailableError
from cluster.http.api import HttpLimits
from cluster.http.app import create_app
from cluster.http.endpoints import batches, generation
from cluster.http.internal_requests import BatchClient, post_inside
from cluster.http.parse import prepare_chat
from cluster.http.server import body as bodies
from cluster.http.server.body import BodyLimit
from cluster.json_text import MAX_VALUES
from cluster.slo.classes import RequestTerms, SloClass, SloConfig
from engine.text.tokenizer import Tokenizer
from tests.support.http_server import MODEL, running_server, scripted_api
from tests.support.openai_conformance import Target
from tests.support.processor_time import Stepped, turn_s
from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.waiting import HANGS_S, wait_until

pytestmark = pytest.mark.model

CLASSES = SloConfig(
    classes=(SloClass(name="chat", ttft_s=600.0), SloClass(name="night", service_tiers=("flex",))), default="chat"
)
OWNER = {"authorization": "Bearer unused"}  # as the client of these tests
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture
def target(generator: ScriptedGenerator, tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Target]:
    settings = GatewaySettings(storage_budget=150_000)  # of which records take 50,000 at least
    with running_server(generator, tokenizer, settings, slo=CLASSES, storage=tmp_path / "storage") as target:
        yield target


def line(name: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    message = {"messages": [{"role": "user", "content": f"Say {name}."}]}
    return {
        "custom_id": name,
        "method": "POST",
        "url": url,
        "body": {"model": MODEL, **({"prompt": name} if url == "/v1/completions" else message), **body},
    }


def upload(target: Target, *lines: object, client: openai.OpenAI | None = None) -> FileObject:
    text = "".join(f"{given if isinstance(given, str) else json.dumps(given)}\n" for given in lines)
    return (client or target.strict).files.create(file=("lines.jsonl", text.encode()), purpose="batch")


def begin(target: Target, *lines: object, **fields: Any) -> Batch:
    file = upload(target, *lines)
    fields = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **fields}
    return target.strict.batches.create(input_file_id=file.id, **fields)


def end(target: Target, batch: Batch) -> Batch:
    wait_until(
        lambda: target.strict.batches.retrieve(batch.id).status in ENDED, what="the batch does not end", every_s=0.02
    )
    return target.strict.batches.retrieve(batch.id)


def answers(target: Target, file_id: str | None) -> dict[str, Any]:
    """By the lines' own names."""
    if file_id is None:
        return {}
    rows = [json.loads(row) for row in target.strict.files.content(file_id).text.splitlines()]
    assert len({row["custom_id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row for row in rows}


def test_a_batch_is_answered(target: Target, generator: ScriptedGenerator) -> None:
    lines = [line(f"l{n}", max_tokens=3, temperature=0) for n in range(20)]
    batch = begin(target, *lines, metadata={"run": "7"})
    assert (batch.object, batch.metadata, batch.expires_at) == ("batch", {"run": "7"}, batch.created_at + 86_400)
    ended = end(target, batch)
    assert ended.status == "completed" and ended.request_counts is not None and ended.errors is None
    counts = ended.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 20, 0)
    assert ended.in_progress_at and ended.finalizing_at and ended.completed_at and ended.error_file_id is None
    found = answers(target, ended.output_file_id)
    assert list(found) == [given["custom_id"] for given in lines]  # in their order
    for given in lines:
        row = found[given["custom_id"]]
        alone = target.strict.chat.completions.create(**given["body"])
        assert (row["error"], row["response"]["status_code"]) == (None, 200)
        assert row["response"]["body"]["choices"][0]["message"]["content"] == alone.choices[0].message.content
        assert row["response"]["request_id"]
    assert {terms.slo.name for terms in generator.terms[:20]} == {"night"}  # they give way to who has targets
    assert len({terms.tenant for terms in generator.terms}) == 1  # and count as their client's own


def test_responses_in_a_batch(target: Target) -> None:
    """They are stored as any, for the batch's owner."""
    given = {**line("a", url="/v1/responses"), "body": {"model": MODEL, "input": "Say a.", "max_output_tokens": 3}}
    again = {**given, "custom_id": "b", "body": {**given["body"], "background": True}}
    ended = end(target, begin(target, given, again, endpoint="/v1/responses"))
    response = answers(target, ended.output_file_id)["a"]["response"]
    assert response["status_code"] == 200
    assert target.client.responses.retrieve(response["body"]["id"]).to_dict()["output"] == response["body"]["output"]
    with pytest.raises(openai.NotFoundError):
        target.client.with_options(api_key="another").responses.retrieve(response["body"]["id"])
    refused = answers(target, ended.error_file_id)["b"]["response"]["body"]["error"]
    assert refused["param"] == "background"


def test_what_fails_is_told_beside_what_does_not(target: Target) -> None:
    lines = [line("good", max_tokens=2), line("bad", temperature=9), line("other", model="none")]
    ended = end(target, begin(target, *lines))
    assert ended.status == "completed" and ended.request_counts is not None
    assert (ended.request_counts.completed, ended.request_counts.failed) == (1, 2)
    assert list(answers(target, ended.output_file_id)) == ["good"]
    failed = answers(target, ended.error_file_id)
    assert failed["bad"]["response"]["status_code"] == 400
    assert "temperature" in failed["bad"]["response"]["body"]["error"]["message"]
    assert failed["other"]["response"]["status_code"] == 404
    assert failed["bad"]["response"]["request_id"] != failed["other"]["response"]["request_id"] != ""


def test_a_line_is_asked_again_until_it_is_answered(
    target: Target, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.batch.service._WAIT_S", 0.01)
    monkeypatch.setattr("cluster.batch.service._LONGEST_WAIT_S", 0.05)  # a header has whole seconds
    generator.script = Script(fail_after=0, error=OverloadedError("Full.", retry_after_s=0.01))
    batch = begin(target, line("a", max_tokens=2))
    wait_until(lambda: len(generator.requests) > 1)
    generator.script = Script(fail_after=0, error=FailedError("It broke."))
    wait_until(lambda: target.strict.batches.retrieve(batch.id).status == "completed")
    failed = answers(target, end(target, batch).error_file_id)
    assert failed["a"]["response"]["status_code"] == 500
    asked = len(generator.requests)
    generator.script = Script()
    end(target, begin(target, line("b", max_tokens=2)))
    assert len(generator.requests) == asked + 1


def test_a_line_has_all_of_its_batchs_time(generator: ScriptedGenerator, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """And not that of a request whose client waits, which may be over while it still waits for room in a worker."""
    settings, may_end = GatewaySettings(request_deadline_s=0.3), threading.Event()
    generator.script = Script(reply="a b c d", until=may_end.is_set)
    with running_server(generator, tokenizer, settings, slo=CLASSES, storage=tmp_path / "storage") as target:
        batch = begin(target, line("a"))
        wait_until(lambda: generator.num_open == 1)
        late = target.http.post(
            "/v1/chat/completions", json=line("later")["body"]
        )  # whose time is over after the line's
        assert late.status_code == 504 and generator.num_open == 1
        may_end.set()
        ended = end(target, batch)
        assert ended.request_counts is not None and ended.request_counts.completed == 1
        # The line alone, where the other one's time was over before it was asked.
        asked = [request.prompt_token_ids for request in generator.requests]
        assert asked.count(asked[0]) == 1, "the line was asked again"


@pytest.mark.parametrize(
    ("given", "code", "param"),
    [
        ([], "empty_file", None),
        (["no json"], "invalid_json_line", None),
        ([json.dumps(line("a", x="?")).replace('"?"', "1e999")], "invalid_json_line", None),
        ([line("a"), line("a")], "duplicate_custom_id", "custom_id"),
        ([line("a", url="/v1/completions")], "invalid_line", "url"),
        ([{**line("a"), "method": "GET"}], "invalid_line", "method"),
        ([{**line("a"), "more": 1}], "invalid_line", None),
        ([line("a", stream=True)], "invalid_line", "body.stream"),
    ],
)
def test_lines_that_are_none(target: Target, given: list[object], code: str, param: str | None) -> None:
    ended = end(target, begin(target, *given))
    assert ended.status == "failed" and ended.failed_at and ended.errors is not None and ended.errors.data
    error = ended.errors.data[-1]
    assert (error.code, error.param) == (code, param) and error.message


def test_a_batch_is_cancelled(target: Target, generator: ScriptedGenerator) -> None:
    generator.script = Script(reply="a b c d", hang_after=2)
    batch = begin(target, *(line(f"l{n}") for n in range(100)))
    wait_until(lambda: generator.num_open > 0)
    assert target.strict.batches.cancel(batch.id).status == "cancelling"
    ended = end(target, batch)
    assert ended.status == "cancelled" and ended.cancelled_at and ended.request_counts is not None
    assert ended.request_counts.failed == 100
    assert {row["error"]["code"] for row in answers(target, ended.error_file_id).values()} == {"batch_cancelled"}
    wait_until(lambda: generator.num_open == 0, what="what was under way goes on")
    with pytest.raises(openai.ConflictError, match="it is cancelled"):
        target.strict.batches.cancel(batch.id)


def test_a_batch_whose_time_is_over(target: Target, generator: ScriptedGenerator) -> None:
    generator.script = Script(reply="a b c d", hang_after=2)
    ended = end(target, begin(target, line("a"), completion_window="1s"))
    assert ended.status == "expired"
    assert answers(target, ended.error_file_id)["a"]["error"]["code"] == "batch_expired"


def test_files(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    client = target.client
    files = [upload(target, line(f"l{n}")) for n in range(3)]
    assert files[0].purpose == "batch" and files[0].filename == "lines.jsonl" and files[0].expires_at is None
    assert client.files.retrieve(files[0].id) == files[0]
    assert json.loads(client.files.content(files[1].id).text) == line("l1")
    assert [file.id for file in client.files.list()] == [file.id for file in files[::-1]]
    assert [file.id for file in client.files.list(limit=1, order="asc")] == [file.id for file in files]  # its pages
    monkeypatch.setattr(batches, "MAX_PAGE", 2)
    assert [file.id for file in client.files.list(limit=10_000)] == [
        file.id for file in files[::-1]
    ]  # OpenAI's default
    assert client.files.delete(files[0].id).deleted
    with pytest.raises(openai.NotFoundError, match="no file"):
        client.files.retrieve(files[0].id)
    expiring = client.files.create(
        file=b"{}", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3_600}
    )
    assert expiring.expires_at == expiring.created_at + 3_600


def test_a_list_does_not_end_where_what_was_shown_last_is_deleted(target: Target) -> None:
    """As where a client deletes what it lists: it would take the rest for deleted as well."""
    for name in "abc":
        upload(target, line(name))
    with pytest.raises(openai.BadRequestError, match="may have been deleted") as refused:
        for file in target.client.files.list(limit=2):
            target.client.files.delete(file.id)
    assert refused.value.param == "after" and len(target.client.files.list().data) == 1
    answer = target.http.get("/v1/batches", params={"after": "batch_1"}, headers=OWNER)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


async def test_a_list_of_batches_with_many_errors_holds_up_nobody(
    generator: ScriptedGenerator, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Each of a hundred tells of a hundred errors, and others have their turn while that is written."""
    api = scripted_api(generator, tokenizer, storage=tmp_path)
    assert api.batches is not None
    app, owner = create_app(api), batches.owner_of(_asking(), api, api.batches.secret)
    errors = [{"code": "invalid_line", "line": n, "message": "m" * 200, "param": None} for n in range(100)]
    known: Any = {"owner": owner, "tenant": "", "salt": "", "endpoint": "/v1/completions", "input_file_id": "f"}
    for number in range(101):
        await api.batches.batches.create(
            StoredBatch(
                id=f"b{number}", completion_window="24h", created_at=number, expires_at=0, status="failed",
                errors=errors, **known,
            )
        )  # fmt: skip
    sent: list[Message] = []

    async def receive() -> Message:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("the client stays")

    async def send(message: Message) -> None:
        sent.append(message)

    await app({**_asking().scope, "query_string": b"limit=1"}, receive, send)  # the first one makes its layers
    sent.clear()
    asking = Stepped(app({**_asking().scope, "query_string": b"limit=1000"}, receive, send))
    await asking
    api.batches.database.close()
    listed = json.loads(b"".join(message.get("body", b"") for message in sent))
    assert [batch["id"] for batch in listed["data"]] == [f"b{number}" for number in range(100, 0, -1)]
    assert listed["has_more"] and len(listed["data"][99]["errors"]["data"]) == 100
    assert max(asking.steps_s) / turn_s() < 1e6  # it takes ten times as many to write it


def _asking() -> Request:
    """A request for the list of batches."""
    headers = [(name.encode(), value.encode()) for name, value in OWNER.items()]
    return Request({"type": "http", "method": "GET", "path": "/v1/batches", "headers": headers, "query_string": b""})


def test_who_may_see_them(target: Target) -> None:
    other = target.client.with_options(api_key="another")
    file = upload(target, line("a", max_tokens=1))
    batch = end(target, begin(target, line("a", max_tokens=1)))
    for ask in (
        lambda: other.files.retrieve(file.id),
        lambda: other.files.content(file.id),
        lambda: other.files.delete(file.id),
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    assert not list(other.files.list()) and not list(other.batches.list())
    assert [found.id for found in target.strict.batches.list()] == [batch.id]


def test_what_is_refused(target: Target) -> None:
    file = upload(target, line("a"))
    asked = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    for fields, param in (
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "90d"}, "completion_window"),
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"priority": 1}, "priority"),
    ):
        answer = target.http.post("/v1/batches", json={**asked, **fields}, headers=OWNER)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    for data, files, status in (
        ({"purpose": "fine-tune"}, {"file": b"{}"}, 400),
        ({"purpose": "batch", "more": "x"}, {"file": b"{}"}, 400),
        ({"purpose": "batch"}, None, 400),
        ({"purpose": "batch", "expires_after[anchor]": "now", "expires_after[seconds]": "1"}, {"file": b"{}"}, 400),
        ({"purpose": "batch"}, {"file": b"x" * 150_001}, 503),  # the budget
    ):
        answer = target.http.post("/v1/files", data=data, files=files)
        assert answer.status_code == status and answer.json()["error"]["message"], answer.text
    answer = target.http.post("/v1/files", content=b"nothing", headers={"content-type": "multipart/form-data"})
    assert answer.status_code == 400
    for limit in (0, 10_001):
        assert target.http.get("/v1/files", params={"limit": limit}).status_code == 400


def test_a_file_that_is_too_large_is_refused_as_it_comes(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
        for _ in range(201):
            yield bytes(2**20)

    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = target.http.post("/v1/files", content=pieces(), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_without_a_folder(generator: ScriptedGenerator, tokenizer: Tokenizer) -> None:
    with running_server(generator, tokenizer) as target:
        answer = target.http.get("/v1/files")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_storage")


def test_another_gateway_goes_on(generator: ScriptedGenerator, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """One that ends in order leaves its batches at once."""
    storage = tmp_path / "storage"
    generator.script = Script(reply="a b c d", hang_after=2)
    with running_server(generator, tokenizer, storage=storage) as target:
        batch = begin(target, *(line(f"l{n}") for n in range(3)))
        wait_until(lambda: generator.num_open == 3)
    generator.script = Script()
    with running_server(generator, tokenizer, storage=storage) as target:
        ended = end(target, batch)
        assert ended.status == "completed" and len(answers(target, ended.output_file_id)) == 3


def test_a_line_of_very_many_values_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    """A parser holds up all clients for as long as it takes."""
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(json.dumps(line(f"l{num}", x=[[] for _ in range(num)])) for num in (1, MAX_VALUES)))
    num_lines, (error,) = check_lines(path)
    assert (num_lines, error.code, error.line) == (2, "line_too_large", 2)


def test_a_file_of_blank_lines_is_not_read_to_its_end(tmp_path: Path) -> None:
    """It may have two hundred million, and who reads them holds up others."""
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"\n" * (2 * MAX_LINES) + json.dumps(line("a", url="/v1/completions")).encode())
    num_lines, (error,) = check_lines(path)
    assert (num_lines, error.code) == (1, "too_many_lines") and "blank" in error.message
    path.write_bytes(b" \n" * MAX_LINES + json.dumps(line("a", url="/v1/completions")).encode())
    assert check_lines(path) == (1, [])


def test_a_line_longer_than_any_request(generator: ScriptedGenerator, tokenizer: Tokenizer, tmp_path: Path) -> None:
    settings = GatewaySettings(max_body_bytes=10_000)
    with running_server(generator, tokenizer, settings, slo=CLASSES, storage=tmp_path / "storage") as target:
        ended = end(target, begin(target, line("l0", user="x" * 30_000)))
        (error,) = (ended.errors and ended.errors.data) or []
        assert (ended.status, error.code, error.line) == ("failed", "line_too_long", 1)


def test_a_line_may_have_as_many_bytes_as_a_request(
    generator: ScriptedGenerator, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Whichever letters they are: on its way to the application it gets no longer."""
    settings = GatewaySettings(max_body_bytes=10_000)
    given = json.dumps(line("l0", max_tokens=2, user="é" * 4_500), ensure_ascii=False)
    with running_server(generator, tokenizer, settings, slo=CLASSES, storage=tmp_path / "storage") as target:
        ended = end(target, begin(target, given))
        assert ended.request_counts is not None and ended.request_counts.completed == 1


def test_an_answer_that_there_is_no_room_for_is_refused_before_its_first_byte(
    generator: ScriptedGenerator, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """As JSON it is larger than what waited for it: of an echo, each é is six bytes in each choice."""
    given = line("a", url="/v1/completions", prompt="é " * 900, echo=True, max_tokens=2, n=32)
    limits = HttpLimits(max_unread_bytes=360_000)
    with running_server(generator, tokenizer, limits=limits, storage=tmp_path / "storage") as target:
        refused = target.http.post("/v1/completions", json=given["body"])
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unread")
        ended = end(target, begin(target, given, endpoint="/v1/completions"))
        assert answers(target, ended.output_file_id) == {}
        failed = answers(target, ended.error_file_id)
        assert failed["a"]["response"]["body"]["error"]["code"] == "unread"


async def test_below_a_route_prefix(generator: ScriptedGenerator, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Serve puts `route_prefix` before every path: files may be larger than requests, and errors have their shapes."""
    api = scripted_api(generator, tokenizer, GatewaySettings(max_body_bytes=10_000), storage=tmp_path / "storage")
    transport = httpx.ASGITransport(create_app(api), root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway/llm") as client:
        sent = {"file": ("lines.jsonl", json.dumps(line("l0", user="x" * 30_000)).encode())}
        uploaded = await client.post("/v1/files", data={"purpose": "batch"}, files=sent)
        assert uploaded.status_code == 200 and uploaded.json()["bytes"] > 30_000
        refused = await client.post("/v1/messages", json={})
        assert (refused.status_code, refused.json()["type"]) == (400, "error")


def test_a_line_that_makes_the_server_fail_does_not_hold_up_others(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def prepare(body: Any, *args: Any, **named: Any) -> Any:
        if body.messages[0].content == "Say bad.":
            raise RuntimeError("a mistake of ours")
        return await prepare_chat(body, *args, **named)

    monkeypatch.setattr(generation, "prepare_chat", prepare)
    monkeypatch.setattr(service, "_WAIT_S", 0.01)
    ended = end(target, begin(target, line("bad"), *(line(f"l{n}", max_tokens=2) for n in range(10))))
    assert ended.status == "completed" and ended.request_counts is not None
    assert (ended.request_counts.completed, ended.request_counts.failed) == (10, 1)
    assert answers(target, ended.error_file_id)["bad"]["response"]["status_code"] == 500


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_a_line_that_finds_no_room_is_not_read_first(
    generator: ScriptedGenerator, tokenizer: Tokenizer, tmp_path: Path, url: str
) -> None:
    """It comes back each second, for as long as a gateway is full. What is beyond the limit is for others."""
    api = scripted_api(generator, tokenizer, GatewaySettings(max_concurrent=32), storage=tmp_path)
    assert api.batches is not None
    whose = BatchClient("few", "", "o", time.monotonic() + HANGS_S)
    long = {"prompt": "x " * 10_000, "input": "x " * 10_000, "messages": [{"role": "user", "content": "x " * 10_000}]}
    name = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(url, "messages")
    body = {"model": MODEL, name: long[name]}
    app = create_app(api)
    assert (await post_inside(app, url, body, {}, whose)).status == 400  # it is too long, which is seen once it is read
    with api.in_flight.enter(32, RequestTerms(tenant="many")):
        answer = await post_inside(app, url, body, {}, whose)
    api.batches.database.close()
    assert answer.status == 429 and answer.headers["retry-after"] == "1"


def test_lines_that_a_batch_keeps_count_although_their_file_is_deleted(
    target: Target, generator: ScriptedGenerator
) -> None:
    generator.script = Script(hang_after=1)
    lines = [line("l0", user="x" * 60_000)]
    file = upload(target, *lines)
    batch = target.strict.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    target.strict.files.delete(file.id)
    with pytest.raises(openai.APIStatusError) as full:
        upload(target, *lines, client=target.client.with_options(max_retries=0))
    assert (full.value.status_code, full.value.code) == (503, "storage_full")
    target.strict.batches.cancel(batch.id)
    assert end(target, batch).status == "cancelled"
    wait_until(lambda: upload_fits(target, lines), what="the lines of a batch that has ended still count")


def test_the_records_of_batches_are_bounded(target: Target) -> None:
    file = upload(target, "no line")
    fields: Any = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    fields["metadata"] = {f"key {n}": "x" * 500 for n in range(16)}
    client = target.client.with_options(max_retries=0)
    with pytest.raises(openai.APIStatusError) as full:
        for _ in range(100):
            client.batches.create(**fields)
    assert (full.value.status_code, full.value.code) == (503, "storage_full")
    assert len(client.batches.list(limit=100).data) > 5


def test_a_client_leaves_room_for_the_uploads_of_others(target: Target) -> None:
    begun = (
        b"POST /v1/files HTTP/1.1\r\nhost: here\r\nauthorization: Bearer many\r\ncontent-length: 1000\r\n"
        b"content-type: multipart/form-data; boundary=b\r\n\r\n"
    )
    many, other = (target.client.with_options(api_key=key, max_retries=0) for key in ("many", "other"))

    def is_refused() -> bool:
        try:
            upload(target, line("a"), client=many)
        except openai.RateLimitError as error:
            return "8 of them by you" in error.message
        return False

    url = target.http.base_url
    with ExitStack() as uploads:
        for _ in range(8):
            uploads.enter_context(socket.create_connection((url.host, url.port))).sendall(begun)
        wait_until(is_refused, what="one client may send any number of files at once")
        assert upload(target, line("a"), client=other).status == "processed"
    wait_until(lambda: not is_refused(), what="uploads that broke off still count")


async def test_of_files_that_come_at_once_each_turn_of_the_loop_takes_a_piece(
    generator: ScriptedGenerator, tokenizer: Tokenizer
) -> None:
    """Of one of them: a route reads a form on the loop, and some bytes of a form take long to read."""
    content, pieces, turn = os.urandom(10**6), dict[str, list[bytes]](), 0
    num_in_turn = Counter[int]()
    is_read = asyncio.Event()

    async def read(scope: Scope, receive: Receive, send: Send) -> None:
        mine = pieces[scope["query_string"].decode()] = []
        while (message := await receive())["more_body"]:
            mine.append(message["body"])
            num_in_turn[turn] += 1
        mine.append(message["body"])

    async def count_turns() -> None:
        nonlocal turn
        while not is_read.is_set():
            await asyncio.sleep(0)
            turn += 1

    async def sent(name: str) -> None:
        messages = [{"type": "http.request", "body": content[at:], "more_body": at != 7} for at in (0, 7)]

        async def receive() -> Message:
            return messages.pop(0)

        async def send(message: Message) -> None:
            raise AssertionError(message)

        scope: Scope = {"type": "http", "method": "POST", "path": "/v1/files", "headers": [], "app": app}
        await limit({**scope, "query_string": name.encode()}, receive, send)

    app = create_app(scripted_api(generator, tokenizer))
    limit = BodyLimit(read, 10, 10, HANGS_S, {"/v1/files": 10**7})
    counting = asyncio.create_task(count_turns())
    await asyncio.gather(*(sent(name) for name in "abc"))
    is_read.set()
    await counting
    assert {b"".join(mine) for mine in pieces.values()} == {content + content[7:]} and len(pieces) == 3
    assert max(len(piece) for mine in pieces.values() for piece in mine) <= 2**15
    assert max(num_in_turn.values()) == 1


async def test_a_file_may_wait_for_its_turns(
    generator: ScriptedGenerator, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has thousands, of which each may take milliseconds where others have much to say: its client is not slow."""
    content, now, got = os.urandom(200_000), 0.0, bytearray()

    async def read(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["more_body"]:
            got.extend(message["body"])
        got.extend(message["body"])

    messages = [{"type": "http.request", "body": content, "more_body": more} for more in (True, True, False)]

    async def receive() -> Message:
        await asyncio.sleep(0)  # or no time is ever over
        return messages.pop(0)

    async def send(message: Message) -> None:
        raise AssertionError(message)

    async def waited(work: Any) -> None:
        nonlocal now
        now += 100.0

    app = create_app(scripted_api(generator, tokenizer))
    monkeypatch.setattr(app.state.api.turns, "on_loop", waited)
    monkeypatch.setattr(bodies, "time", SimpleNamespace(monotonic=lambda: now))
    scope: Scope = {"type": "http", "method": "POST", "path": "/v1/files", "headers": [], "app": app}
    await BodyLimit(read, 10, 10, HANGS_S, {"/v1/files": 10**7})(scope, receive, send)
    assert bytes(got) == content * 3


def upload_fits(target: Target, lines: list[Any]) -> bool:
    try:
        target.strict.files.delete(upload(target, *lines, client=target.client.with_options(max_retries=0)).id)
    except openai.APIStatusError:
        return False
    return True


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/x-www-form-urlencoded", b"purpose=batch&file=x"),
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=", b"x"),
        ("multipart/form-data; boundary=b", b"x"),
    ],
)
def test_forms_that_are_none(target: Target, content_type: str, body: bytes) -> None:
    answer = target.http.post("/v1/files", content=body, headers={"content-type": content_type})
    assert answer.status_code == 400 and "Send multipart/form-data." in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("charset", ["undefined", "nobody-knows-it", "x" * 10_000])
def test_a_form_has_no_encoding_of_its_own(target: Target, charset: str) -> None:
    """Python remembers each name that it is asked for and does not know, for as long as the gateway lives."""
    body = (
        b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="\xc3\xa9"\r\n\r\n{}\r\n--b--\r\n'
    )
    headers = {"content-type": f"multipart/form-data; boundary=b; charset={charset}"}
    answer = target.http.post("/v1/files", content=body, headers=headers)
    assert answer.status_code == 200 and answer.json()["filename"] == "é", answer.text
    assert not any(name.startswith(charset[:9]) for name in encodings._cache if name != "undefined")


@pytest.mark.parametrize(("purpose", "status"), [(b"purpose", 200), (b"purpose\\ud800", 400)])
def test_names_in_a_form_may_be_no_text(target: Target, purpose: bytes, status: int) -> None:
    body = (
        b'--b\r\ncontent-disposition: form-data; name="%b"\r\n\r\nbatch\r\n'
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="a\\ud800"\r\n\r\n{}\r\n--b--\r\n'
    )
    headers = {"content-type": "multipart/form-data; boundary=b; charset=unicode_escape"}
    answer = target.http.post("/v1/files", content=body % purpose, headers=headers)
    assert answer.status_code == status, answer.text


async def test_who_leaves_while_sending_a_file_is_no_failure(
    generator: ScriptedGenerator, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    api = scripted_api(generator, tokenizer, storage=tmp_path / "storage")
    begun = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n{'
    come: list[Message] = [
        {"type": "http.disconnect"},
        {"type": "http.request", "body": begun, "more_body": True},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return come.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"multipart/form-data; boundary=b")]
    scope = {"type": "http", "method": "POST", "path": "/v1/files", "headers": headers, "query_string": b""}
    await create_app(api)(scope, receive, send)
    assert not come and not sent
    assert b"/v1/files" not in generate_latest(api.metrics.registry)


@pytest.mark.parametrize("times", [1, 5])
async def test_who_leaves_while_a_file_is_recorded_has_no_file_without_a_content(
    generator: ScriptedGenerator, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Serve cancels what a client asked for that has left: once, or again while it ends."""
    api = scripted_api(generator, tokenizer, storage=tmp_path / "storage")
    assert api.batches is not None
    insert, loop = stored_files.insert_file, asyncio.get_running_loop()

    def leave(connection: sqlite3.Connection, file: StoredFile) -> None:
        asyncio.run_coroutine_threadsafe(cancel(), loop).result()
        insert(connection, file)

    async def cancel() -> None:
        for _ in range(times):
            uploading.cancel()
            await asyncio.sleep(0)

    monkeypatch.setattr(stored_files, "insert_file", leave)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(api)), base_url="http://x") as client:
        form: Any = {"files": {"file": ("f", b"{}")}, "data": {"purpose": "batch"}, "headers": OWNER}
        uploading = asyncio.ensure_future(client.post("/v1/files", **form))
        with pytest.raises(asyncio.CancelledError):
            await uploading
        (file,) = (await client.get("/v1/files", headers=OWNER)).json()["data"]
        assert (await client.get(f"/v1/files/{file['id']}/content", headers=OWNER)).text == "{}"
    assert len(list(api.batches.database.files.iterdir())) == 1


async def test_who_finds_a_full_disk_is_told_so(
    generator: ScriptedGenerator, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not that the server failed: by whoever writes files, batches or responses. Nothing stays."""
    api = scripted_api(generator, tokenizer, storage=tmp_path / "storage")
    assert api.batches is not None
    database = api.batches.database
    form: Any = {"files": {"file": ("f", b"{}")}, "data": {"purpose": "batch"}}
    large = {f"key {n}": "x" * 500 for n in range(16)}  # more than a page has

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(api)), base_url="http://x", headers=OWNER
    ) as client:

        async def refused(path: str, **sent: Any) -> tuple[int, str]:
            answer = await client.post(path, **sent)
            error = answer.json()["error"]
            assert error["type"] == "service_unavailable_error" and answer.headers["retry-after"], error
            return answer.status_code, error["code"]

        file: Any = (await client.post("/v1/files", **form)).json()
        window = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch: Any = {"json": {**window, "metadata": large}}
        response = {"json": {"model": MODEL, "input": "Hi.", "background": True, "metadata": large}}
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            assert await refused("/v1/files", **form) == (503, "storage_full")
        assert [path.name for path in database.files.iterdir()] == [file["id"]]
        await database.in_thread(database._connection.execute, "PRAGMA max_page_count = 1")  # no more than it has
        assert await refused("/v1/batches", **batch) == (503, "storage_full")
        assert await refused("/v1/responses", **response) == (503, "storage_full")
        await database.in_thread(database._connection.execute, "PRAGMA max_page_count = 100000")
        monkeypatch.setattr("cluster.batch.database.BUSY_S", 0.0)
        with closing(sqlite3.connect(tmp_path / "storage" / "records.sqlite", isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM files").fetchall()
            assert await refused("/v1/batches", **batch) == (503, "storage_busy")
        assert [path.name for path in database.files.iterdir()] == [file["id"]]
        assert (await client.post("/v1/batches", **batch)).status_code == 200
    database.close()


async def test_another_disk_that_is_full_is_not_told_as_the_storages(
    generator: ScriptedGenerator, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the one on which a form is kept while it comes: deleting files would give no room there."""

    class Full(tempfile.SpooledTemporaryFile[bytes]):
        def write(self, *_: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    api = scripted_api(generator, tokenizer, storage=tmp_path / "storage")
    assert api.batches is not None
    monkeypatch.setattr("starlette.formparsers.SpooledTemporaryFile", Full)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(api)), base_url="http://x", headers=OWNER
    ) as client:
        with pytest.raises(OSError, match="No space left"):
            await client.post("/v1/files", files={"file": ("f", b"{}")}, data={"purpose": "batch"})
    api.batches.database.close()


async def test_a_sweep_leaves_the_lines_of_a_batch_that_is_being_made(tmp_path: Path) -> None:
    """Those of a file that was sent long ago, between the link and the record."""
    database = Database(tmp_path)
    storage = BatchService(database, 100_000)
    file = await stored_file(storage)
    os.utime(storage.files.content(file), (0, 0))
    made = asyncio.Event()

    async def create(batch: Any) -> None:
        await storage.files.sweep(time.time())
        made.set()

    storage.batches.create = create  # type: ignore[method-assign]
    batch = stored_batch(owner="me", input_file_id=file.id)
    await storage.add(batch, file)
    assert made.is_set() and (database.files / batch.id).read_text() == "{}"
    database.close()


async def test_a_file_that_goes_while_a_batch_is_made_of_it_is_not_found(tmp_path: Path) -> None:
    database = Database(tmp_path)
    storage = BatchService(database, 100_000)
    file = await stored_file(storage)
    await storage.files.delete(file.id, "me")
    with pytest.raises(NotFoundError) as missing:
        await storage.add(stored_batch(owner="me", input_file_id=file.id), file)
    assert missing.value.code == "file_not_found"
    database.close()


async def test_files_that_come_at_the_same_time_share_what_room_there_is(tmp_path: Path) -> None:
    """One counts before all of it is there; and it is the later one that is refused, not both."""
    database = Database(tmp_path)
    files, copying, may_go_on = BatchService(database, 160_000).files, asyncio.Event(), threading.Event()
    loop, sent = asyncio.get_running_loop(), b"x" * 60_000

    class Slow(io.BytesIO):
        def read(self, *args: Any) -> bytes:
            loop.call_soon_threadsafe(copying.set)
            assert may_go_on.wait(HANGS_S)
            return super().read(*args)

    first, second = files.new_content(), files.new_content()
    slow = asyncio.ensure_future(files.copy(Slow(sent), first))
    await asyncio.wait_for(copying.wait(), HANGS_S)
    try:
        with pytest.raises(UnavailableError) as full:
            await files.copy(io.BytesIO(sent), second)
        await files.sweep(time.time() + 400.0)  # which takes no file that comes, by a clock that is ahead either
    finally:
        may_go_on.set()
    assert full.value.code == "storage_full" and not second.exists()
    await slow
    assert (await files.add(first, "me", filename="f", purpose="batch")).num_bytes == 60_000
    assert first.read_bytes() == sent
    database.close()


async def test_what_a_killed_gateway_was_copying_goes_in_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those for which another gateway sees that nothing is written. All of it counts from the beginning: for an hour
    others would have been refused."""
    database = Database(tmp_path)
    files, copying, may_end = BatchService(database, 300_000).files, asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    class Stopped(io.BytesIO):
        def read(self, *args: Any) -> bytes:
            loop.call_soon_threadsafe(copying.set)
            assert may_end.wait(HANGS_S)
            return b""

    stopped = asyncio.ensure_future(files.copy(Stopped(b"x" * 60_000), files.new_content()))
    await asyncio.wait_for(copying.wait(), HANGS_S)
    try:
        await files.sweep(time.time())
        monkeypatch.setattr(stored_files, "_PART_S", 0.0)  # they are over
        await files.sweep(time.time())
        assert not list(database.files.iterdir())
    finally:
        may_end.set()
    with pytest.raises(FileNotFoundError):
        await stopped
    database.close()


async def test_answers_count_while_their_batch_runs_and_in_its_file(tmp_path: Path) -> None:
    database = Database(tmp_path)
    storage = BatchService(database, 300_000)

    async def has_room() -> bool:
        try:
            file = await stored_file(storage)
        except UnavailableError as full:
            assert full.code == "storage_full"
            return False
        await storage.files.delete(file.id, "me")
        return True

    await storage.batches.create(stored_batch(owner="me", input_file_id="file-1"))
    batch = await storage.batches.claim()
    assert batch is not None and await has_room()
    await storage.batches.answer(batch, [KeptAnswer(1, True, "x" * 300_000)])
    assert not await has_room()
    await storage.batches.finish(batch, "completed", storage.files.new_content(), storage.files.new_content())
    assert not await has_room()
    ended = await storage.batches.get(batch.id, "me")
    assert ended.output_file_id is not None
    await storage.files.delete(ended.output_file_id, "me")
    assert await has_room(), "what is deleted counts"
    database.close()


async def test_answers_are_on_the_disk_before_they_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[str, int] = {}
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced[Path(f"/proc/self/fd/{descriptor}").readlink().name] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "fsync", noted)
    database = Database(tmp_path)
    storage = BatchService(database, 100_000)
    await storage.batches.create(stored_batch(owner="me", input_file_id="file-1"))
    batch = await storage.batches.claim()
    assert batch is not None
    await storage.batches.answer(batch, [KeptAnswer(1, True, "good"), KeptAnswer(2, False, "bad")])
    output, errors = storage.files.new_content(), storage.files.new_content()
    await storage.batches.finish(batch, "completed", output, errors)
    assert synced == {output.name: len("good\n"), errors.name: len("bad\n")}
    database.close()


async def test_others_have_their_turn_while_answers_are_written(tmp_path: Path) -> None:
    """Answers may have gigabytes, and a claim that is not renewed for so long is lost."""
    database = Database(tmp_path)
    storage = BatchService(database, 100_000)
    await storage.batches.create(stored_batch(owner="me", input_file_id="file-1"))
    batch = await storage.batches.claim()
    assert batch is not None
    await storage.batches.answer(batch, [KeptAnswer(n, True, "x" * 2**20) for n in range(60)])
    output = storage.files.new_content()
    finishing = asyncio.create_task(storage.batches.finish(batch, "completed", output, storage.files.new_content()))
    await asyncio.sleep(0)
    assert await storage.batches.renew([batch.id]) and not finishing.done()
    await finishing
    assert output.stat().st_size == 60 * (2**20 + 1)
    ended = await storage.batches.get(batch.id, "me")
    assert (ended.status, ended.output_file_id, ended.num_succeeded) == ("completed", output.name, 60)
    assert not await storage.batches.answered(batch)
    assert [path.name for path in database.files.iterdir()] == [output.name]
    database.close()


async def stored_file(storage: BatchService) -> StoredFile:
    content = storage.files.new_content()
    await storage.files.copy(io.BytesIO(b"{}"), content)
    return await storage.files.add(content, "me", filename="f", purpose="batch")


def stored_batch(**fields: Any) -> StoredBatch:
    return StoredBatch(
        tenant="",
        salt="",
        endpoint="/v1/chat/completions",
        completion_window="24h",
        expires_at=int(time.time()) + 100,
        **fields,
    )
