"""The HTTP side over real sockets, with scripted tokens in place of the cluster."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster import build_info
from cluster.config.settings import GatewaySettings
from cluster.errors import (
    DeadlineError,
    FailedError,
    OverloadedError,
    PoisonRequestError,
    RequestTooLargeError,
    UnavailableError,
)
from cluster.gateway.generator import ServingLimits
from cluster.http import response
from cluster.http.api import HttpLimits, InFlight
from cluster.http.app import create_app
from cluster.http.parse import derived_seed
from cluster.slo.classes import RequestTerms
from engine.sampling.params import SamplingParams
from engine.text.tokenizer import Tokenizer
from kv_transfer.messages.requests import RequestSpec
from tests.support.http_server import MODEL, running_server, scripted_api
from tests.support.openai_conformance import CHECKS, MESSAGES, PROMPT, Target
from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.waiting import HANGS_S, eventually, wait_until

pytestmark = pytest.mark.model


@pytest.fixture
def generator(shared_generator: ScriptedGenerator) -> Iterator[ScriptedGenerator]:
    """The generator behind `target`, its script and records fresh; nothing may be left open."""
    shared_generator.script = Script()
    shared_generator.requests.clear()
    shared_generator.num_cancelled = shared_generator.num_finished = 0
    yield shared_generator
    shared_generator.script = Script()
    wait_until(lambda: shared_generator.num_open == 0)


def texts_of(target: Target, **fields: Any) -> list[str]:
    """The text of each streamed chunk."""
    return [choice.text for chunk in target.complete(stream=True, **fields) for choice in chunk.choices]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[Target], None], target: Target, generator: ScriptedGenerator) -> None:
    check(target)


ORIGIN = "https://chat.example.com"


def test_web_pages_of_some_origins_may_ask(target: Target, generator: ScriptedGenerator, tokenizer: Tokenizer) -> None:
    asked = {"origin": ORIGIN, "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization,content-type"
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}
    with running_server(generator, tokenizer, GatewaySettings(cors_origins=(ORIGIN,))) as open_target:
        preflight = open_target.http.options("/v1/completions", headers=asked)
        assert preflight.status_code == 200 and preflight.headers["x-request-id"]
        allowed = {name.removeprefix("access-control-allow-"): value for name, value in preflight.headers.items()}
        assert allowed["origin"] == ORIGIN and "POST" in allowed["methods"] and "authorization" in allowed["headers"]
        assert "credentials" not in allowed
        for sent, status in ((body, 200), ({**body, "stream": True}, 200), ({**body, "n": 0}, 400)):
            answer = open_target.http.post("/v1/completions", json=sent, headers={"origin": ORIGIN})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, ORIGIN)
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        other = {**asked, "origin": "https://evil.example.com"}
        assert open_target.http.options("/v1/completions", headers=other).status_code == 400
        answer = open_target.http.post("/v1/completions", json=body, headers=other)
        assert "access-control-allow-origin" not in answer.headers
    assert target.http.options("/v1/completions", headers=asked).status_code == 405  # nobody may, by default
    answer = target.http.post("/v1/completions", json=body, headers={"origin": ORIGIN})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
    for headers, status in (({}, 200), ({"origin": ORIGIN}, 400)):  # which a browser would send without asking
        answer = target.http.post("/v1/completions", content=json.dumps(body).encode(), headers=headers)
        assert answer.status_code == status, answer.text
    with pytest.raises(ValueError, match="without a path"):
        GatewaySettings(cors_origins=("https://chat.example.com/",))


# What is generated is what was asked for.


def test_sampling_fields_reach_the_generator(target: Target, generator: ScriptedGenerator) -> None:
    extra = {"top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5, "stop_token_ids": [5]}
    target.complete(
        max_tokens=9,
        temperature=0.5,
        top_p=0.75,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"17": -3.5},
        seed=5,
        logprobs=3,
        echo=True,
        extra_body={**extra, "min_tokens": 2, "ignore_eos": True},
    )
    (request,) = generator.requests
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (9, 0.5, 0.75, 5)
    assert (params.top_k, params.min_p, params.repetition_penalty) == (7, 0.25, 1.5)
    assert (params.presence_penalty, params.frequency_penalty, params.logit_bias) == (1.0, -1.0, {17: -3.5})
    assert (params.logprobs, params.prompt_logprobs, params.min_tokens, params.ignore_eos) == (3, 3, 2, True)
    assert params.stop_token_ids == (5,) and request.attempt == 0


def test_defaults_are_openais(target: Target, generator: ScriptedGenerator) -> None:
    target.complete()
    target.chat()
    completion, chat = generator.requests
    assert completion.params.max_tokens == 16 and completion.params.temperature == 1.0
    assert chat.params.max_tokens == 2_048 - len(chat.prompt_token_ids)  # what is left of the context
    assert completion.params.seed != chat.params.seed


def test_seeds(target: Target, generator: ScriptedGenerator) -> None:
    target.complete(seed=-1, n=3, max_tokens=1)
    base = 2**63 - 1
    assert [r.params.seed for r in generator.requests] == [base, derived_seed(base, 1), derived_seed(base, 2)]
    generator.requests.clear()
    target.complete(prompt=["a", "b"], n=2, seed=3, max_tokens=1)
    assert [r.params.seed for r in generator.requests] == [3, derived_seed(3, 1)] * 2
    generator.requests.clear()
    target.complete(prompt=["a", "b"], n=2, max_tokens=1)
    assert len({r.params.seed for r in generator.requests}) == 4
    assert len({r.request_id for r in generator.requests}) == 4


def test_cached_tokens_count_each_prompt_once(target: Target, generator: ScriptedGenerator) -> None:
    usage = target.complete(prompt=[[1, 2, 3, 4], [5, 6]], n=2, max_tokens=1).usage
    assert usage.prompt_tokens == 6 and usage.prompt_tokens_details.cached_tokens == 2 + 1


# Text.


def test_no_broken_characters_in_a_stream(target: Target, generator: ScriptedGenerator) -> None:
    generator.script.reply = "a🦜b👩‍👩‍👧世界é🇸🇪"
    texts = texts_of(target, max_tokens=100)
    assert "".join(texts) == generator.script.reply and "�" not in "".join(texts)


def test_an_unfinished_character_is_replaced_at_the_end(
    target: Target, generator: ScriptedGenerator, tokenizer: Tokenizer
) -> None:
    generator.script.reply = "🦜"
    assert len(tokenizer.encode("🦜", add_special_tokens=False)) > 1
    answer = target.complete(max_tokens=1)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("�", "length")


@pytest.mark.parametrize(
    ("reply", "stop", "expected"),
    [
        ("one two three four", ["three"], "one two "),
        ("one two three four", ["o t"], "one tw"),
        ("one two three four", ["four", "two"], "one "),
        ("fly 🦜🦜 away", ["🦜🦜"], "fly "),
        ("fly 🦜 away", [" away"], "fly 🦜"),
        ("aaab", ["aab"], "a"),
        ("one two", ["one"], ""),
        ("almost a stop", ["stopped"], "almost a stop"),
    ],
)
@pytest.mark.parametrize("burst", [1, 3, 100])
def test_stop_strings(
    target: Target, generator: ScriptedGenerator, reply: str, stop: list[str], expected: str, burst: int
) -> None:
    generator.script = Script(reply=reply, burst=burst)
    fields = {"max_tokens": 50, "stop": stop}
    answer = target.complete(**fields)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
    assert "".join(texts_of(target, **fields)) == expected


def test_a_stop_string_cancels_the_sequence(target: Target, generator: ScriptedGenerator) -> None:
    generator.script = Script(reply="one two three " * 50, hang_after=10)
    target.complete(max_tokens=150, stop="three")
    wait_until(lambda: generator.num_cancelled == 1 and generator.num_open == 0)


def test_the_other_choice_goes_on_after_a_stop(target: Target, generator: ScriptedGenerator) -> None:
    generator.script = Script(reply=("one three " * 50, "one " * 200), delay_s=0.01, hang_after=50)
    stream = target.complete(n=2, max_tokens=100, stop="three", stream=True)
    for chunk in stream:
        if chunk.choices[0].finish_reason == "stop":
            break
    wait_until(lambda: generator.num_cancelled == 1 and generator.num_open == 1)
    stream.close()


def test_a_finished_sequence_is_not_cancelled(target: Target, generator: ScriptedGenerator) -> None:
    generator.script = Script(reply="short", tail_s=0.05)
    target.chat(stop=["nothing"], n=3)
    wait_until(lambda: generator.num_finished == 3)
    assert generator.num_cancelled == 0


def test_stop_strings_count_from_min_tokens_on(target: Target, generator: ScriptedGenerator) -> None:
    generator.script.reply = "go stop go stop go"
    text = target.complete(max_tokens=50, stop=" stop", extra_body={"min_tokens": 3}).choices[0].text
    assert text == "go stop go"


def test_tokens_that_arrive_together_share_a_chunk(target: Target, generator: ScriptedGenerator) -> None:
    chunks: list[Any] = []
    generator.script = Script(reply="one two three four five six seven eight", burst=4, until=lambda: chunks)
    for chunk in target.complete(stream=True, max_tokens=8, logprobs=0):
        chunks.append(chunk)
    assert len(chunks) == 2
    assert [token for chunk in chunks for c in chunk.choices for token in c.logprobs.tokens] == [
        "one", " two", " three", " four", " five", " six", " seven", " eight",
    ]  # fmt: skip


def test_choices_are_interleaved(target: Target, generator: ScriptedGenerator) -> None:
    generator.script = Script(reply="one two three four five", delay_s=0.005)
    chunks = target.complete(n=3, stream=True, max_tokens=10, extra_body={"ignore_eos": True})
    indices = [choice.index for chunk in chunks for choice in chunk.choices]
    first_end = min(len(indices) - 1 - indices[::-1].index(index) for index in range(3))
    assert set(indices[:6]) == {0, 1, 2} and set(indices[:first_end]) == {0, 1, 2}


def test_logprob_of_part_of_a_character(target: Target, generator: ScriptedGenerator) -> None:
    generator.script.reply = "🦜"
    (choice,) = target.chat(logprobs=True).choices
    entries = choice.logprobs.content
    assert len(entries) > 1 and bytes(b for entry in entries for b in entry.bytes).decode() == "🦜"
    assert entries[0].token.startswith("bytes:\\xf0")
    completion = target.complete(logprobs=0)
    assert completion.choices[0].logprobs.text_offset == [0] * len(entries) + [1]


@pytest.mark.parametrize(("reply", "texts"), [("", []), ("one two", ["one", " two"])])
def test_the_ending_token_has_its_logprob(
    target: Target, generator: ScriptedGenerator, tokenizer: Tokenizer, reply: str, texts: list[str]
) -> None:
    """In text completions: of an echo with one more token lm-eval sums all entries but the last, whatever token that
    is."""
    generator.script.reply = reply
    prompt = tokenizer.encode("It rains in Rome.", add_special_tokens=False)
    asked: dict[str, Any] = {"prompt": prompt, "logprobs": 1, "max_tokens": 9, "temperature": 0}
    for echo, before in ((True, [tokenizer.decode([token_id]) for token_id in prompt]), (False, [])):
        (choice,) = target.complete(echo=echo, **asked).choices
        found = choice.logprobs
        assert found.tokens == [*before, *texts, "<|im_end|>"] and found.text_offset[-1] == len(choice.text)
        assert (choice.text, choice.finish_reason) == ("".join([*before, *texts]), "stop")
        assert found.token_logprobs[-1] == -0.5 and list(found.top_logprobs[-1]) == ["<|im_end|>"]
        chunks = [c for chunk in target.complete(echo=echo, stream=True, **asked) for c in chunk.choices]
        assert [token for c in chunks if c.logprobs for token in c.logprobs.tokens] == found.tokens
    chat = target.chat(logprobs=True).choices[0].logprobs
    assert [entry.token for entry in (chat.content if chat else ())] == texts


# Errors of the cluster.


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (OverloadedError("Full. Wait.", retry_after_s=2.5), 429, "rate_limit_error"),
        (UnavailableError("Nobody home. Wait.", retry_after_s=7), 503, "service_unavailable_error"),
        (RequestTooLargeError("Too large. Shorten it."), 400, "invalid_request_error"),
        (PoisonRequestError(), 422, "invalid_request_error"),
        (FailedError("Three attempts failed. Try again."), 500, "server_error"),
        (RuntimeError("a secret of the server"), 500, "server_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_token(
    target: Target, generator: ScriptedGenerator, error: Exception, status: int, kind: str, stream: bool
) -> None:
    generator.script = Script(fail_after=0, error=error)
    body = {"model": MODEL, "messages": MESSAGES, "stream": stream, "n": 2}
    answer = target.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == status and answer.json()["error"]["type"] == kind
    assert "secret" not in answer.text
    retry_after = {429: "3", 503: "7"}.get(status)
    assert answer.headers.get("retry-after") == retry_after


@pytest.mark.parametrize("error", [FailedError("Lost it. Try again."), RuntimeError("bug")])
def test_errors_in_a_stream(target: Target, generator: ScriptedGenerator, error: Exception) -> None:
    generator.script = Script(reply="one two three four", delay_s=0.01, fail_after=3, error=error)
    body = {"model": MODEL, "prompt": PROMPT, "stream": True}
    answer = target.http.post("/v1/completions", json=body)
    *tokens, last = [line for line in answer.text.split("\n") if line]
    assert answer.status_code == 200
    texts = (choice["text"] for line in tokens for choice in json.loads(line.removeprefix("data: "))["choices"])
    assert "".join(texts) == "one two three"
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"


def test_a_sequence_that_ends_unfinished_is_a_failure(target: Target, generator: ScriptedGenerator) -> None:
    generator.script = Script(reply="one two three four", fail_after=2, error=None)
    answer = target.http.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT})
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "generation_failed"


def test_decisions_of_the_scheduler(target: Target, generator: ScriptedGenerator) -> None:
    answer = target.http.get("/cluster/decisions", params={"limit": 2})
    assert answer.json() == {"decisions": [{"request_id": "r0"}, {"request_id": "r1"}]}
    assert target.http.get("/cluster/decisions", params={"limit": 2, "format": "text"}).text == "table 0\n\ntable 1\n"
    assert len(target.http.get("/cluster/decisions", params={"limit": 100}).json()["decisions"]) == 100
    for params in ({"limit": "0"}, {"limit": "101"}, {"limit": "many"}, {"format": "xml"}):
        refused = target.http.get("/cluster/decisions", params=params)
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


def test_nothing_known_of_the_cluster(target: Target, generator: ScriptedGenerator) -> None:
    generator.script.limits = None
    answer = target.http.post("/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES})
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert "or all are gone" in answer.json()["error"]["message"]  # a gateway cannot know whether there ever was one
    health = target.http.get("/health")
    assert health.status_code == 503 and "or all are gone" in health.json()["reason"]
    generator.script.limits = ServingLimits(max_model_len=64, ready=False, reason="The decode worker is loading.")
    health = target.http.get("/health")
    assert health.status_code == 503 and "loading" in health.json()["reason"]


async def test_the_version_is_that_of_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, generator: ScriptedGenerator, tokenizer: Tokenizer
) -> None:
    """The checkout may be at another commit by the time that somebody asks, or gone as here."""
    build_info.cache_clear()
    app = create_app(scripted_api(generator, tokenizer))
    with monkeypatch.context() as changed:
        changed.setenv("GIT_DIR", str(tmp_path))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            told = (await client.get("/version")).json()
    build_info.cache_clear()
    assert told == build_info()


def test_the_context_is_the_limit(target: Target, generator: ScriptedGenerator) -> None:
    generator.script.limits = ServingLimits(max_model_len=10, ready=True)
    assert target.complete(prompt=[1] * 9, max_tokens=1).choices
    for num_prompt, max_tokens in ((9, 2), (10, 1), (11, 1)):
        body = {"model": MODEL, "prompt": [1] * num_prompt, "max_tokens": max_tokens}
        error = target.http.post("/v1/completions", json=body).json()["error"]
        assert error["code"] == "context_length_exceeded" and "10 tokens" in error["message"]


# Clients that go away, and limits.


@pytest.mark.parametrize(
    ("path", "fields", "param", "code", "says"),
    [
        ("completions", {"prompt": "a" * 300_000}, "prompt", "context_length_exceeded", "300000 characters"),
        ("completions", {"prompt": [[1], [1] * 2_049]}, "prompt", "context_length_exceeded", "2049 tokens"),
        ("chat", {"messages": MESSAGES * 2_049}, "messages", "context_length_exceeded", "2049 messages"),
        ("chat", {"messages": MESSAGES * 16_385}, "messages", "invalid_value", "at most 16384 items"),
        ("chat", {"messages": MESSAGES * 2_000}, "messages", "context_length_exceeded", "Shorten the messages"),
        (
            "completions",
            {"prompt": [1] * 2_000, "n": 7, "echo": True, "logprobs": 20},
            "n",
            "request_too_large",
            "294000",
        ),
        ("completions", {"stop": "a" * 1_025}, "stop", "invalid_value", "1025 characters"),
        ("completions", {"stop": "a" * 1_024}, None, None, None),
        ("completions", {"stop_token_ids": [5] * 1_025}, "stop_token_ids", "invalid_value", "at most 1024"),
        (
            "completions",
            {"logit_bias": {str(i): 1 for i in range(1_025)}},
            "logit_bias",
            "invalid_value",
            "at most 1024",
        ),
    ],
)
def test_what_is_too_large_is_refused_with_what_to_do(
    target: Target,
    generator: ScriptedGenerator,
    path: str,
    fields: dict[str, Any],
    param: str | None,
    code: str | None,
    says: str | None,
) -> None:
    url = "/v1/chat/completions" if path == "chat" else "/v1/completions"
    body = {"model": MODEL, "max_tokens": 1, **({"prompt": PROMPT} if path == "completions" else {}), **fields}
    answer = target.http.post(url, json=body)
    if code is None:
        assert answer.status_code == 200
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code) and says in error["message"]
    assert not generator.requests


def test_a_stream_that_has_nothing_to_say_says_so(
    target: Target, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In comments, once its status line is sent: proxies close a connection that is silent for long."""
    monkeypatch.setattr(response, "BEAT_S", 0.01)
    num_comments = 0
    # What has come of the second word is held, as it may be the beginning of the stop text.
    generator.script = Script(reply="One two four", burst=2, until=lambda: num_comments > 2)
    body = {"model": MODEL, "prompt": PROMPT, "stream": True, "stop": " two three"}
    texts: list[str] = []
    with target.http.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            num_comments += line == ": waiting"
            if line.startswith("data: {"):
                texts += [choice["text"] for choice in json.loads(line.removeprefix("data: "))["choices"]]
    assert num_comments > 2 and texts[0] == "One" and "".join(texts) == "One two four"


def test_but_not_at_once(target: Target, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first token of all is held: some clients read no comments."""
    monkeypatch.setattr(response, "BEAT_S", HANGS_S)
    looks = count()
    generator.script = Script(reply="One two four", until=lambda: next(looks) > 2)
    body = {"model": MODEL, "prompt": PROMPT, "stream": True, "stop": "One two three"}
    answer = target.http.post("/v1/completions", json=body)
    assert '"One two four"' in answer.text and ": waiting" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("delay_s", [0.02, HANGS_S], ids=["in mid-stream", "before the first token"])
def test_a_client_that_goes_away_ends_its_sequences(
    target: Target, generator: ScriptedGenerator, stream: bool, delay_s: float
) -> None:
    generator.script = Script(delay_s=delay_s)
    body = {"model": MODEL, "prompt": PROMPT, "n": 3, "stream": stream, "max_tokens": 2_000, "ignore_eos": True}

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=str(target.http.base_url)) as client:
            request = asyncio.create_task(client.post("/v1/completions", json=body, timeout=HANGS_S))
            await asyncio.to_thread(wait_until, lambda: generator.num_open == 3)
            request.cancel()
            await asyncio.wait({request})

    asyncio.run(leave())
    wait_until(lambda: generator.num_open == 0)
    assert generator.num_cancelled == 3
    wait_until(lambda: "legato_requests_running 0.0" in target.http.get("/metrics").text)


def test_a_slow_reader_does_not_hold_the_sequence(target: Target, generator: ScriptedGenerator) -> None:
    generator.script.reply = "word " * 1_500
    body = {"model": MODEL, "prompt": PROMPT, "stream": True, "max_tokens": 1_500, "logprobs": 5}
    with target.http.stream("POST", "/v1/completions", json=body) as answer:
        wait_until(lambda: generator.num_finished == 1)
        assert answer.read().endswith(b"data: [DONE]\n\n")


SHORT = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}


def test_no_more_at_once_than_a_gateway_may(tokenizer: Tokenizer) -> None:
    generator = ScriptedGenerator(tokenizer)
    with running_server(generator, tokenizer, GatewaySettings(max_concurrent=4)) as target:
        assert target.http.post("/v1/completions", json={**SHORT, "n": 5}).json()["error"]["param"] == "n"
        generator.script = Script(delay_s=HANGS_S)

        async def come_second() -> httpx.Response:
            async with httpx.AsyncClient(base_url=target.http.base_url, timeout=HANGS_S) as client:
                first = asyncio.create_task(client.post("/v1/completions", json={**SHORT, "n": 3}))
                await eventually(lambda: generator.num_open == 3)
                answer = await client.post("/v1/completions", json={**SHORT, "n": 2})
                first.cancel()
                await asyncio.wait({first})
                return answer

        answer = asyncio.run(come_second())
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        generator.script = Script()
        # Their places are given back a little after their sequences have ended.
        wait_until(lambda: target.http.post("/v1/completions", json={**SHORT, "n": 4}).status_code == 200)


async def test_a_request_follows_the_script_that_it_began_with(tokenizer: Tokenizer) -> None:
    """Whoever waits for it to be open changes the script in another thread, at once."""

    class Watched(ScriptedGenerator):
        @property
        def num_open(self) -> int:
            return 0

        @num_open.setter
        def num_open(self, count: int) -> None:
            if count:
                self.script = Script(reply="later")

    generator = Watched(tokenizer)
    generator.script = Script(reply="sooner")
    request = RequestSpec(
        request_id="r-0", attempt=0, prompt_token_ids=[1], params=SamplingParams(max_tokens=20, seed=0)
    )
    token_ids = [event.token_id async for tokens in generator.generate(request) for event in tokens]
    assert generator.script.reply == "later" and tokenizer.decode(token_ids, skip_special_tokens=True) == "sooner"


def test_large_requests_leave_room_for_small_ones() -> None:
    in_flight, terms = InFlight(16), RequestTerms()
    with in_flight.enter(8, terms), in_flight.enter(4, terms), in_flight.enter(2, terms):
        with pytest.raises(OverloadedError), in_flight.enter(2, terms):
            pass
        with (
            in_flight.enter(1, terms),
            in_flight.enter(1, terms),
            pytest.raises(OverloadedError),
            in_flight.enter(1, terms),
        ):
            pass
    with in_flight.enter(16, terms):  # where nobody else is
        pass


def test_who_has_few_sequences_finds_room_beside_those_of_another_tenant(tokenizer: Tokenizer) -> None:
    """Which wait for their turn in the scheduler, where tenants share: who is kept from asking there never shares."""
    in_flight = InFlight(32)
    with in_flight.enter(32, RequestTerms(tenant="many")):
        with pytest.raises(OverloadedError), in_flight.enter(1, RequestTerms(tenant="many")):
            pass
        with pytest.raises(OverloadedError), in_flight.enter(1, RequestTerms(tenant="a batch", deadline=0.0)):
            pass
        with ExitStack() as held:
            for number, size in enumerate((2, 2, 2, 1, 1)):
                held.enter_context(in_flight.enter(size, RequestTerms(tenant=f"few {number}")))
                with pytest.raises(OverloadedError), in_flight.enter(3 - size, RequestTerms(tenant=f"few {number}")):
                    pass
            # a quarter more is there by now
            with pytest.raises(OverloadedError), in_flight.enter(1, RequestTerms(tenant="another")):
                pass
    with in_flight.enter(32, RequestTerms()):
        pass  # none is held any more
    with ExitStack() as held:
        for number in range(32 + 8):
            with suppress(OverloadedError):
                held.enter_context(in_flight.enter(2, RequestTerms(tenant=f"several {number}")))
        with in_flight.enter(1, RequestTerms(tenant="small")):  # several at a time do not take what is beyond, either
            pass
    generator = ScriptedGenerator(tokenizer)
    with running_server(generator, tokenizer, GatewaySettings(max_concurrent=16)) as target:
        generator.script = Script(delay_s=HANGS_S)

        async def come_second() -> list[int]:
            async with httpx.AsyncClient(base_url=target.http.base_url, timeout=HANGS_S) as client:
                many, few = ({"authorization": f"Bearer {key}"} for key in ("many", "few"))
                first = asyncio.create_task(client.post("/v1/completions", json={**SHORT, "n": 16}, headers=many))
                await eventually(lambda: generator.num_open == 16)
                generator.script = Script()
                answers = [await client.post("/v1/completions", json=SHORT, headers=key) for key in (many, few)]
                first.cancel()
                await asyncio.wait({first})
                return [answer.status_code for answer in answers]

        assert asyncio.run(come_second()) == [429, 200]


def test_a_request_ends_at_the_deadline_and_makes_room(tokenizer: Tokenizer) -> None:
    settings = GatewaySettings(max_concurrent=4, request_deadline_s=0.3)
    generator = ScriptedGenerator(tokenizer)
    generator.script = Script(delay_s=HANGS_S)
    with running_server(generator, tokenizer, settings) as target:
        for _ in range(2):
            late = target.http.post("/v1/completions", json={**SHORT, "n": 4})
            assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
        assert generator.num_open == 0


async def test_the_deadline_counts_from_the_arrival(generator: ScriptedGenerator, tokenizer: Tokenizer) -> None:
    """And not from when the request is ready: it may have waited for that."""
    deadline_s = 2 * HANGS_S
    api = scripted_api(generator, tokenizer, GatewaySettings(request_deadline_s=deadline_s))
    terms = RequestTerms(arrived_at=time.monotonic() - deadline_s)
    with pytest.raises(DeadlineError):
        async with asyncio.timeout(HANGS_S), api.in_time(terms):
            await asyncio.Event().wait()


def test_a_body_that_is_too_large_is_not_read(tokenizer: Tokenizer) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(1_000):
            yield b" " * 1_000

    with running_server(ScriptedGenerator(tokenizer), tokenizer, GatewaySettings(max_body_bytes=10_000)) as target:
        declared = target.http.post("/v1/completions", json={**SHORT, "prompt": "x" * 20_000})
        assert declared.status_code == 413 and declared.json()["error"]["code"] == "body_too_large"
        assert target.http.post("/v1/completions", content=endless()).status_code == 413


def test_a_compressed_body_is_refused_as_such(target: Target) -> None:
    body = gzip.compress(json.dumps({"model": MODEL, "prompt": "x"}).encode())
    for path in ("/v1/completions", "/v1/files", "/v1/messages"):
        answer = target.http.post(path, content=body, headers={"content-encoding": "gzip"})
        assert answer.status_code == 415 and "without Content-Encoding" in answer.json()["error"]["message"], (
            answer.text
        )
    both = target.http.post("/v1/completions", content=body, headers={"content-encoding": "identity, X-GZIP"})
    assert both.status_code == 415
    for name in ("identity", "identity, identity", "utf-8", "none", ""):
        plain = target.http.post("/v1/completions", json=SHORT, headers={"content-encoding": name})
        assert plain.status_code == 200, plain.text


def test_a_body_that_does_not_come_is_not_waited_for(tokenizer: Tokenizer) -> None:
    with running_server(ScriptedGenerator(tokenizer), tokenizer, limits=HttpLimits(body_timeout_s=0.3)) as target:
        url = target.http.base_url
        with socket.create_connection((url.host, url.port or 0), timeout=HANGS_S) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            assert sock.recv(100).startswith(b"HTTP/1.1 408")


def test_slow_uploads_together_hold_little_and_keep_nobody_out(tokenizer: Tokenizer) -> None:
    settings = GatewaySettings(max_body_bytes=64_000)
    limits = HttpLimits(max_arriving_bytes=256_000, body_timeout_s=100 * HANGS_S)
    body = json.dumps(SHORT).encode().ljust(60_000)
    with (
        running_server(ScriptedGenerator(tokenizer), tokenizer, settings, limits=limits) as target,
        ExitStack() as uploads,
    ):
        url = target.http.base_url
        socks = []
        for _ in range(20):
            sock = uploads.enter_context(socket.create_connection((url.host, url.port or 0), timeout=HANGS_S))
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n" + body[:-1])
            socks.append(sock)
            assert target.http.post("/v1/completions", json=SHORT).status_code == 200
        for sock in socks[:16]:  # four of them fit
            refusal = b"".join(iter(partial(sock.recv, 1_000), b""))
            assert refusal.startswith(b"HTTP/1.1 503") and b"retry-after: 1\r\n" in refusal
            assert b'"code":"body_gave_way"' in refusal
        for sock in socks[16:]:
            sock.sendall(body[-1:])
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        gave_way = 'legato_requests_total{endpoint="other",outcome="body_gave_way"} 16.0'
        wait_until(lambda: gave_way in target.http.get("/metrics").text, what="it is not counted")


def test_silent_connections_keep_nobody_out(target: Target, generator: ScriptedGenerator) -> None:
    url = target.http.base_url
    with ExitStack() as silent:
        for words in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ") * 200:
            sock = silent.enter_context(socket.create_connection((url.host, url.port or 0), timeout=HANGS_S))
            sock.sendall(words)
        assert httpx.post(f"{url}/v1/completions", json=SHORT, timeout=HANGS_S).status_code == 200


def test_metrics_count_outcomes(tokenizer: Tokenizer) -> None:
    generator = ScriptedGenerator(tokenizer)
    generator.script.reply = "one two three"
    with running_server(generator, tokenizer) as target:
        target.complete(max_tokens=2)
        list(target.chat(stream=True))
        target.http.post("/v1/completions", json={"model": "other", "prompt": "x"})
        target.http.get("/nowhere/" + "x" * 50)
        generator.script = Script(fail_after=0, error=OverloadedError("Full. Wait.", retry_after_s=1))
        target.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
        expected = {
            'legato_requests_total{endpoint="/v1/completions",outcome="finished"} 1.0',
            'legato_requests_total{endpoint="/v1/chat/completions",outcome="finished"} 1.0',
            'legato_requests_total{endpoint="/v1/completions",outcome="model_not_found"} 1.0',
            'legato_requests_total{endpoint="/v1/completions",outcome="overloaded"} 1.0',
            'legato_requests_total{endpoint="other",outcome="unknown_url"} 1.0',
            "legato_generated_tokens_total 6.0",  # two, then three and the end
            "legato_time_to_first_token_seconds_count 2.0",
            "legato_ttft_prediction_error_count 2.0",
            "legato_time_per_output_token_seconds_count 2.0",
            'legato_finished_sequences_total{finish_reason="length"} 1.0',
            'legato_finished_sequences_total{finish_reason="stop"} 1.0',
            "legato_sequence_prompt_tokens_count 2.0",
            "legato_sequence_generated_tokens_sum 6.0",
            'legato_sequence_generated_tokens_bucket{le="1.0"} 0.0',
            'legato_sequence_generated_tokens_bucket{le="4.0"} 2.0',
        }
        # An answer's end may be counted just after its client has read it.
        wait_until(lambda: not expected - set(target.http.get("/metrics").text.splitlines()), what=f"{expected}")


def test_metrics_count_choices_that_end(tokenizer: Tokenizer) -> None:
    """Each choice with its prompt, and up to the stop text, behind which tokens had come, too. No others: neither what
    failed amid its answer, nor vectors."""
    generator = ScriptedGenerator(tokenizer)
    with running_server(generator, tokenizer) as target:
        begun = set(target.http.get("/metrics").text.splitlines())
        assert 'legato_finished_sequences_total{finish_reason="stop"} 0.0' in begun
        generator.script = Script(reply="one two three four five", burst=8)
        usage = target.complete(n=2, stop=" three").usage
        assert usage.completion_tokens == 6
        target.http.post("/v1/embeddings", json={"model": MODEL, "input": ["x", "y"]}).raise_for_status()
        generator.script = Script(fail_after=2, error=FailedError("Broken."))
        target.http.post("/v1/completions", json=SHORT | {"stream": True})
        expected = {
            'legato_requests_total{endpoint="/v1/completions",outcome="finished"} 1.0',
            'legato_requests_total{endpoint="/v1/completions",outcome="generation_failed"} 1.0',
            'legato_requests_total{endpoint="/v1/embeddings",outcome="finished"} 1.0',
        }
        wait_until(lambda: not expected - set(target.http.get("/metrics").text.splitlines()), what=f"{expected}")
        told = set(target.http.get("/metrics").text.splitlines())
        assert told >= {
            'legato_finished_sequences_total{finish_reason="stop"} 2.0',
            'legato_finished_sequences_total{finish_reason="length"} 0.0',
            "legato_sequence_prompt_tokens_count 2.0",
            f"legato_sequence_prompt_tokens_sum {2 * usage.prompt_tokens:.1f}",
            "legato_sequence_generated_tokens_count 2.0",
            "legato_sequence_generated_tokens_sum 6.0",
        }
