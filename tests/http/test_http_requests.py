"""One request under the glass: what operators are told of those that run and those that ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cluster.errors import OverloadedError
from engine.text.tokenizer import Tokenizer
from tests.support.http_server import MODEL, running_server
from tests.support.openai_conformance import PROMPT, Target
from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.waiting import HANGS_S, wait_until

pytestmark = pytest.mark.model


@pytest.fixture
def target(generator: ScriptedGenerator, tokenizer: Tokenizer) -> Iterator[Target]:
    with running_server(generator, tokenizer) as target:
        yield target


def listed(target: Target, **params: int) -> dict[str, Any]:
    answer = target.http.get("/cluster/requests", params=params).raise_for_status()
    return dict(answer.json())


def ended(target: Target, request_id: str) -> dict[str, Any]:
    """Its details, once it has ended: that is after the last byte."""
    path = f"/cluster/requests/{request_id}"
    wait_until(lambda: target.http.get(path).raise_for_status().json()["outcome"] != "running")
    return dict(target.http.get(path).json())


@pytest.mark.parametrize("stream", [False, True])
def test_the_parts_of_an_answer(target: Target, generator: ScriptedGenerator, stream: bool) -> None:
    generator.script = Script(delay_s=0.01, waited_s=0.005)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "stream": stream, "ignore_eos": True}
    answer = target.http.post("/v1/completions", json=body).raise_for_status()
    found = ended(target, answer.headers["x-request-id"])
    if not stream:
        assert found["id"] == answer.json()["id"]
    assert (found["outcome"], found["model"], found["tokens"], found["choices"]) == ("finished", MODEL, 4, 1)
    assert found["workers"] == ["p0", "d0"] and found["slo_class"] == "default"
    assert sum(part["seconds"] for part in found["parts"]) == pytest.approx(found["total_s"], abs=1e-6)
    assert {part["name"]: part["worker"] for part in found["parts"]}["prefill"] == "p0"
    (choice,) = found["of_choices"]
    assert (choice["end"], choice["tokens"]) == ("finished", 4)
    assert choice["attempts"] == [
        {
            "number": 0,
            "prefill": "p0",
            "decode": "d0",
            "predicted_ttft_s": 0.001,
            "tokens": 4,
            "failed": None,
            "failed_worker": None,
        }
    ]
    (row,) = listed(target)["requests"]
    assert row == {name: value for name, value in found.items() if name in row}


def test_a_request_that_runs(target: Target, generator: ScriptedGenerator) -> None:
    generator.script = Script(hang_after=2)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "stream": True, "ignore_eos": True}
    with target.http.stream("POST", "/v1/completions", json=body) as answer:
        request_id = answer.headers["x-request-id"]
        lines = answer.iter_lines()
        while not next(lines).startswith("data:"):
            pass
        with httpx.Client(base_url=target.http.base_url, timeout=HANGS_S) as other:
            wait_until(lambda: other.get(f"/cluster/requests/{request_id}").json()["tokens"] == 2)
            running = other.get(f"/cluster/requests/{request_id}").json()
            assert other.get("/load").json() == {"server_load": 1}
        assert (running["outcome"], running["kept_promise"], running["ttft_s"] is None) == ("running", None, False)
        assert running["parts"][-1]["name"] == "decode"
    assert ended(target, request_id)["outcome"] == "cancelled"
    wait_until(lambda: target.http.get("/load").json() == {"server_load": 0})


def test_a_request_is_found_by_its_clients_name(target: Target) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}
    first, newest = (
        target.http.post("/v1/completions", json=body, headers={"x-request-id": "mine"}).raise_for_status()
        for _ in range(2)
    )
    assert first.headers["x-request-id"] == "mine" and first.json()["id"] != newest.json()["id"]
    assert ended(target, "mine")["id"] == newest.json()["id"]
    assert target.http.get("/cluster/requests/other").status_code == 404


def test_one_that_was_turned_away_is_told_of_too(target: Target, generator: ScriptedGenerator) -> None:
    generator.script = Script(fail_after=0, error=OverloadedError("Full.", retry_after_s=1.0))
    body = {"model": MODEL, "prompt": PROMPT}
    answer = target.http.post("/v1/completions", json=body)
    assert answer.status_code == 429
    found = ended(target, answer.headers["x-request-id"])
    assert (found["outcome"], found["ttft_s"], found["tokens"]) == ("overloaded", None, 0)
    assert found["of_choices"][0]["end"] == "failed"


def test_only_what_is_new(target: Target) -> None:
    of_all = {"gateway": "gateway-1", "gateways": ["gateway-1"], "silent": []}
    assert listed(target) == {**of_all, "version": 0, "kept": 0, "requests": []}
    ids = []
    for _ in range(3):
        answer = target.complete(max_tokens=1)
        ended(target, answer.id)
        ids.append(answer.id)
    version = listed(target)["version"]
    assert [row["id"] for row in listed(target)["requests"]] == ids[::-1]
    assert [row["id"] for row in listed(target, limit=1)["requests"]] == ids[2:]
    assert listed(target, since=version)["requests"] == []
    new = target.complete(max_tokens=1).id
    ended(target, new)
    assert [row["id"] for row in listed(target, since=version)["requests"]] == [new]


def test_as_a_picture(target: Target) -> None:
    found = ended(target, target.complete(max_tokens=2).id)
    path = f"/cluster/requests/{found['id']}"
    told = target.http.get(path, params={"format": "text"})
    assert told.headers["content-type"].startswith("text/plain")
    assert target.http.get(path, headers={"accept": "text/plain"}).text == told.text
    lines = told.text.splitlines()
    assert lines[0] == f"{found['id']}  /v1/completions  class default"
    assert [line.split()[0] for line in lines[3:]] == [part["name"] for part in found["parts"]]
    assert (
        target.http.get(path, params={"format": "json"}, headers={"accept": "text/plain"}).json()["id"] == found["id"]
    )


def test_another_choice(target: Target) -> None:
    found = ended(target, target.complete(max_tokens=2, n=2).id)
    path = f"/cluster/requests/{found['id']}"
    assert len(found["of_choices"]) == 2
    for choice in (0, 1):
        told = target.http.get(path, params={"choice": choice}).json()
        assert told["choice"] == choice
        assert sum(part["seconds"] for part in told["parts"]) == pytest.approx(told["total_s"], abs=1e-6)
    assert target.http.get(f"{path}-1").json()["id"] == found["id"], "logs name a choice"
    assert target.http.get(path, params={"choice": 2}).json()["error"]["param"] == "choice"


def test_one_that_is_not_kept(target: Target) -> None:
    ended(target, target.complete(max_tokens=1).id)
    answer = target.http.get("/cluster/requests/cmpl-unknown")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "request_not_found", "request_id")
    assert "among the 1 that this gateway keeps" in error["message"]
    for params in ({"limit": 0}, {"limit": 1_001}, {"since": -1}, {"since": "x"}, {"scope": "world"}):
        assert target.http.get("/cluster/requests", params=params).status_code == 400
