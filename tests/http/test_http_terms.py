"""Classes of service over the real HTTP application: what a request is promised, and whose it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cluster.config.settings import GatewaySettings
from cluster.slo.classes import SloClass, SloConfig
from engine.text.tokenizer import Tokenizer
from tests.support.http_server import MODEL, running_server
from tests.support.openai_conformance import Target
from tests.support.scripted_generator import ScriptedGenerator

pytestmark = pytest.mark.model

CHAT = SloClass(name="chat", ttft_s=600.0, tpot_s=600.0, share=0.9, service_tiers=("priority",))
BATCH = SloClass(name="batch", service_tiers=("flex",))
CLASSES = SloConfig(classes=(CHAT, BATCH), default="chat")


@pytest.fixture(scope="module")
def asked(tokenizer: Tokenizer) -> ScriptedGenerator:
    return ScriptedGenerator(tokenizer)


@pytest.fixture(scope="module")
def shared(asked: ScriptedGenerator, tokenizer: Tokenizer) -> Iterator[Target]:
    """In front of `asked`."""
    with running_server(asked, tokenizer, slo=CLASSES) as target:
        yield target


def turned_away(target: Target) -> list[int]:
    """Requests that count as such, of each class."""
    counts = [row["counts"] for row in target.http.get("/slo").json()["classes"]]
    return [row["rejected"] + row["failed"] for row in counts]


@pytest.mark.parametrize(
    ("fields", "headers", "slo", "tier"),
    [
        ({}, {}, CHAT, "default"),
        ({"service_tier": "auto"}, {}, CHAT, "default"),
        ({"service_tier": "scale"}, {}, CHAT, "scale"),
        ({"service_tier": "flex"}, {}, BATCH, "flex"),
        ({}, {"x-slo-class": "batch"}, BATCH, "flex"),
        ({"service_tier": "flex"}, {"x-slo-class": "chat"}, CHAT, "priority"),
        (
            {"service_tier": "priority"},
            {"X-SLO-TTFT-ms": "250", "x-slo-tpot-ms": "12.5", "x-slo-gap-ms": "40"},
            replace(CHAT, ttft_s=0.25, tpot_s=0.0125, gap_s=0.04),
            "priority",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_promise_goes_with_the_request(
    shared: Target,
    asked: ScriptedGenerator,
    fields: dict[str, Any],
    headers: dict[str, str],
    slo: SloClass,
    tier: str,
    stream: bool,
) -> None:
    asked.terms.clear()
    answer = shared.chat(max_tokens=2, n=2, stream=stream, extra_headers=headers, **fields)
    assert {part.service_tier for part in (answer if stream else [answer])} == {tier}
    assert [terms is not None and terms.slo for terms in asked.terms] == [slo, slo]
    completion = shared.http.post("/v1/completions", json={"model": MODEL, "prompt": "x", **fields}, headers=headers)
    assert completion.json()["service_tier"] == tier and completion.headers["x-slo-class"] == slo.name


@pytest.mark.parametrize(
    ("fields", "headers", "param", "says"),
    [
        ({"service_tier": "turbo"}, {}, "service_tier", "There is no service tier 'turbo'"),
        ({"service_tier": 5}, {}, "service_tier", "string"),
        ({}, {"x-slo-class": "gold"}, "x-slo-class", "chat, batch"),
        ({}, {"x-slo-ttft-ms": "soon"}, "x-slo-ttft-ms", "milliseconds"),
        ({}, {"x-slo-gap-ms": "-1"}, "x-slo-gap-ms", "milliseconds"),
        ({}, {"x-tenant": "x" * 65}, "x-tenant", "1 to 64"),
    ],
)
def test_what_there_is_not_is_the_clients_mistake(
    shared: Target, asked: ScriptedGenerator, fields: dict[str, Any], headers: dict[str, str], param: str, says: str
) -> None:
    asked.requests.clear()
    answer = shared.http.post("/v1/completions", json={"model": MODEL, "prompt": "x", **fields}, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert says in error["message"] and asked.requests == []
    assert turned_away(shared) == [0, 0]


def test_whose_a_request_is(shared: Target, asked: ScriptedGenerator) -> None:
    def tenant(headers: dict[str, str], **fields: str) -> str:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1, **fields}
        shared.http.post("/v1/completions", json=body, headers=headers).raise_for_status()
        terms = asked.terms[-1]
        assert terms is not None
        return terms.tenant

    key = {"authorization": "Bearer sk-secret"}
    assert tenant({"x-tenant": "team-1", **key}, user="ann") == tenant(key)
    assert tenant({"x-tenant": "team-1"}) == ""
    assert tenant(key, user="ann") == tenant(key, user="bob") == tenant(key) != tenant({"authorization": "Bearer sk-2"})
    assert tenant({}, safety_identifier="ann", user="other") == tenant({}, user="ann") != tenant({}, user="bob")
    assert tenant({}) == ""
    assert not any(word in tenant(key) + tenant({}, user="ann") for word in ("sk", "secret", "ann"))


def test_a_trusted_proxy_says_whose_a_request_is(asked: ScriptedGenerator, tokenizer: Tokenizer) -> None:
    with running_server(asked, tokenizer, GatewaySettings(trust_tenant_header=True)) as target:

        def ask(**headers: str) -> tuple[str, str]:
            """The tenant, and the salt of its prefixes."""
            headers = {name.replace("_", "-"): value for name, value in headers.items()}
            target.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=headers)
            terms = asked.terms[-1]
            assert terms is not None
            return terms.tenant, asked.requests[-1].cache_salt

        one, other = ask(x_tenant="team-1", authorization="a"), ask(x_tenant="team-2", authorization="a")
        assert (one[0], other[0]) == ("team-1", "team-2") and one[1] != other[1]
        assert ask(x_tenant="team-1", authorization="b") == ask(x_tenant="team-1") == one
        assert ask(authorization="a") not in (one, other)


def test_with_whom_a_request_shares_prefixes(shared: Target, asked: ScriptedGenerator) -> None:
    def salt(key: str | None = None, tenant: str | None = None, **fields: str) -> str:
        headers = {"authorization": key, "x-tenant": tenant}
        given = {name: value for name, value in headers.items() if value is not None}
        for path, prompt in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            body = json.dumps({"model": MODEL, "max_tokens": 1, **prompt, **fields})
            shared.http.post(path, content=body, headers=given).raise_for_status()
        completion, chat = (request.cache_salt for request in asked.requests[-2:])
        assert completion == chat
        return completion

    assert salt() == salt(user="ann") == ""
    ways: list[dict[str, str]] = [
        {},
        {"key": "a"},
        {"key": "b"},
        {"cache_salt": "a"},
        {"tenant": "a"},
        {"key": "a", "cache_salt": "a"},
        {"key": "b", "cache_salt": "a"},
        {"key": "b", "tenant": "a"},  # its word alone brings nobody to the other's
        {"key": "a", "tenant": "b"},
        {"key": "aa"},
        {"cache_salt": salt(key="a")},
    ]
    salts = [salt(**way) for way in ways]
    assert len(set(salts)) == len(ways)
    assert salts == [salt(**way, user="ann", safety_identifier="x") for way in ways], "one key trusts itself"


def test_prefixes_shared_on_purpose(asked: ScriptedGenerator, tokenizer: Tokenizer) -> None:
    with running_server(asked, tokenizer, GatewaySettings(share_prefixes=True)) as target:
        asked.requests.clear()
        for headers, salt in ({"authorization": "a"}, ""), ({"x-tenant": "b"}, ""), ({}, "s"), ({"x-tenant": "b"}, "s"):
            body = {"model": MODEL, "prompt": "x", "max_tokens": 1, "cache_salt": salt}
            target.http.post("/v1/completions", json=body, headers=headers).raise_for_status()
        salts = [request.cache_salt for request in asked.requests]
        assert salts[0] == salts[1] == "" != salts[2] == salts[3]


def test_without_classes_there_is_one_without_targets(tokenizer: Tokenizer) -> None:
    generator = ScriptedGenerator(tokenizer)
    with running_server(generator, tokenizer) as target:
        for tier in ("auto", "default", "flex", "scale", "priority"):
            assert target.chat(service_tier=tier, max_tokens=1).choices
        assert list(target.http.get("/slo").json()["targets"]) == ["default"]
    assert all(terms is not None and not terms.slo.has_targets for terms in generator.terms)
