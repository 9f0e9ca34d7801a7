"""The board over real HTTP: its page, and the stream of pictures that the page draws."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from cluster.gateway.timeline import RequestTimeline, SequenceTimeline
from cluster.http.api import Api, HttpLimits
from cluster.http.app import create_app
from cluster.http.board import board
from cluster.http.board.board import difference
from cluster.http.board.picture import MAX_REQUESTS, Observer
from cluster.http.openai.sse import dumps
from cluster.slo.classes import RequestTerms, SloClass, SloConfig
from engine.sampling.params import SamplingParams
from engine.text.tokenizer import Tokenizer
from kv_transfer.messages.requests import RequestSpec
from kv_transfer.messages.scheduling import Placement
from kv_transfer.messages.workers import KnownWorker, TierBlocks, TiersReport
from tests.cluster.http.test_board_picture import merged
from tests.support.clusters.worker_reports import REPORT, worker_info, worker_snapshot
from tests.support.http_server import MODEL, running_server, scripted_api
from tests.support.openai_conformance import PROMPT, Target
from tests.support.processor_time import Stepped, turn_s
from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.waiting import HANGS_S, eventually, wait_until

pytestmark = pytest.mark.model

CLASSES = SloConfig(
    classes=(SloClass(name="chat", ttft_s=600.0, tpot_s=600.0, share=0.9), SloClass(name="batch")), default="chat"
)
MILLISECOND = 50_000  # in turns of a loop, on a machine that takes 20 ns for one


def worker(name: str, **changes: Any) -> KnownWorker:
    tiers = TiersReport(blocks={"device": TierBlocks(free=60, cached=30, held=10)})
    return worker_info(name), worker_snapshot(name, **{"step_cost": REPORT, "tiers": tiers, **changes})


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No heartbeat comes in a picture's place because this machine is busy."""
    monkeypatch.setattr(board, "BEAT_S", HANGS_S)


@pytest.fixture
def generator(tokenizer: Tokenizer) -> ScriptedGenerator:
    generator = ScriptedGenerator(tokenizer)
    generator.script = Script(workers=[worker("p0"), worker("d0")])
    return generator


@pytest.fixture
def target(generator: ScriptedGenerator, tokenizer: Tokenizer) -> Iterator[Target]:
    with running_server(generator, tokenizer, slo=CLASSES) as target:
        yield target


class Viewer:
    """Somebody who looks at the board: `picture` is the newest that was put together from what came."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self.picture: dict[str, Any] = {}
        self.names: list[str] = []

    def read(self) -> str:
        """The next event's name, or "" for a heartbeat."""
        name = next(self._lines).removeprefix("event: ")
        if name.startswith(":"):
            assert next(self._lines) == ""
            return ""
        data = json.loads(next(self._lines).removeprefix("data: "))
        assert next(self._lines) == ""
        self.names.append(name)
        self.picture = data if name == "picture" else merged(self.picture, data)
        return name

    def until(self, condition: Any) -> dict[str, Any]:
        """The first picture that it holds of; each comes within seconds, or a heartbeat does."""
        for _ in range(400):
            if self.picture and condition(self.picture):
                return self.picture
            self.read()
        raise AssertionError(self.picture)


@contextmanager
def viewing(target: Target) -> Iterator[Viewer]:
    with target.http.stream("GET", "/cluster/events") as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "text/event-stream"
        yield Viewer(answer.iter_lines())


def said(picture: dict[str, Any]) -> list[str]:
    return [row["text"] for row in picture["happenings"].values()]


# The stream.


def test_a_whole_picture_comes_first_then_what_is_different(target: Target, generator: ScriptedGenerator) -> None:
    with viewing(target) as viewer:
        assert viewer.read() == "picture"
        first = viewer.picture
        assert set(first["workers"]) == {"p0", "d0"} and first["pools"] == {"decode": {"wanted": 3}}
        assert first["workers"]["d0"]["tiers"] == {"device": [10, 30, 60]}
        assert first["workers"]["d0"]["step_ms"] == pytest.approx(11.0)
        assert first["workers"]["p0"]["prompt_tokens_s"] == 1000
        assert first["classes"]["chat"]["ttft"] == {"target": 6e5}
        assert (first["models"], first["ready"], first["requests"], said(first)) == ([MODEL], True, {}, [])
        generator.script.workers = [worker("p0"), worker("d0", num_running=3), worker("d1")]
        newest = viewer.until(lambda picture: "d1" in picture["workers"])
        assert newest["workers"]["d0"]["running"] == 3 and said(newest) == ["d1 has joined."]
        assert viewer.names[1:] == ["change"] * len(viewer.names[1:])
        with viewing(target) as other:  # who comes later sees the same
            other.read()
            assert {**other.picture, "now": 0} == {**newest, "now": 0}


def test_a_request_runs_through_its_phases(target: Target, generator: ScriptedGenerator) -> None:
    more = threading.Event()
    generator.script.until, generator.script.handoff_s = more.is_set, 0.0
    with viewing(target) as viewer:
        viewer.read()
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "stream": True, "ignore_eos": True}
        with target.http.stream("POST", "/v1/completions", json=body) as answer:
            name = answer.headers["x-request-id"]
            running = viewer.until(lambda picture: picture["requests"].get(name, {}).get("tokens") == 1)["requests"][
                name
            ]
            assert (running["class"], running["attempts"], running["choices"]) == ("chat", 1, 1)
            assert "end" not in running
            more.set()
            assert answer.read()
        ended = viewer.until(lambda picture: "end" in picture["requests"][name])
        row = ended["requests"][name]
        assert (row["outcome"], row["tokens"]) == ("finished", 4)
        marks = [(phase, worker) for _, phase, worker in row["marks"]]
        assert marks[0] == ("queue", "") and marks[-1] == ("decode", "d0") and ("prefill", "p0") in marks
        times = [at for at, *_ in row["marks"]]
        assert row["at"] == times[0] and times == sorted(times) and times[-1] <= row["end"]
        assert PROMPT.split()[2] not in json.dumps(ended), "a picture holds no prompt"
        chat = viewer.until(lambda picture: "attainment" in picture["classes"]["chat"])["classes"]["chat"]
        assert (chat["attainment"], chat["budget_left"]) == (1.0, 1.0) and chat["ttft"]["p99"] > 0


def test_a_worker_that_dies_and_one_that_leaves(target: Target, generator: ScriptedGenerator) -> None:
    generator.script.hang_after = 2
    with viewing(target) as viewer:
        viewer.read()
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 9, "stream": True, "ignore_eos": True}
        with target.http.stream("POST", "/v1/completions", json=body) as answer:
            name = answer.headers["x-request-id"]
            viewer.until(lambda picture: picture["requests"].get(name, {}).get("tokens") == 2)
            generator.script.workers = [worker("p0", draining=True)]
            lost = viewer.until(lambda picture: picture["workers"]["d0"]["state"] == "lost")
            assert "d0 was lost. 1 request goes on elsewhere." in said(lost)
            viewer.until(lambda picture: picture["workers"]["p0"]["state"] == "draining")
            generator.script.workers = []
            left = viewer.until(lambda picture: picture["workers"]["p0"]["state"] == "left")
            assert said(left)[-1] == "p0 has left in order."


def test_a_silent_worker(target: Target, generator: ScriptedGenerator) -> None:
    with viewing(target) as viewer:
        viewer.read()
        generator.script.connection_states = {"d0": "silent"}
        viewer.until(lambda picture: picture["workers"]["d0"]["state"] == "silent")
        generator.script.connection_states = {}
        answers = viewer.until(lambda picture: picture["workers"]["d0"]["state"] == "up")
        assert said(answers) == ["d0 is silent. Its requests go on elsewhere.", "d0 answers again."]


def test_decisions_are_told_once_each_the_newest_last(target: Target, generator: ScriptedGenerator) -> None:
    def line(name: str, at: float = 0.0) -> str:
        asked = {"time": at, "request_id": name, "attempt": 0, "num_tokens": 7, "slo_class": "chat", "retry_after_s": 2}
        return json.dumps({**asked, "outcome": "rejected", "reason": "it is full", "candidates": []})

    generator.script.decisions = [line("r1"), "{}, of another version", line("r0")]
    with viewing(target) as viewer:
        viewer.read()
        generator.script.decisions = [line("r2"), line("r1", at=1e-6), line("r0", at=-1e-6)]  # by a clock read anew
        told = viewer.until(lambda picture: len(picture["decisions"]) == 3)["decisions"]
        texts = [told[number]["text"] for number in sorted(told, key=int)]
        assert texts == [
            f"chat …r{n} (7 tokens) was turned away: it is full; it may come back in 2 s." for n in range(3)
        ]


def test_where_nothing_happens_a_heartbeat_comes(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "BEAT_S", 0.3)
    with viewing(target) as viewer:
        viewer.read()
        wait_until(lambda: viewer.read() == "", what="no heartbeat came")


def test_so_many_may_look_and_who_leaves_makes_room(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "MAX_VIEWERS", 2)
    with viewing(target) as one:
        with viewing(target) as other:
            assert one.read() == other.read() == "picture"
            refused = target.http.get("/cluster/events")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
            assert refused.headers["retry-after"] == "10"
        wait_until(lambda: room(target), what="who left still counts")


def room(target: Target) -> bool:
    with target.http.stream("GET", "/cluster/events") as answer:
        return answer.status_code == 200


async def test_nothing_is_looked_at_while_nobody_looks(generator: ScriptedGenerator, tokenizer: Tokenizer) -> None:
    looks: board.Board = create_app(scripted_api(generator, tokenizer)).state.board

    def is_looking() -> bool:
        return "board" in {task.get_name() for task in asyncio.all_tasks()}

    for _ in range(2):
        with looks.viewing():
            version, news = await looks.news(0)
            assert (version, news[:14]) == (1, b"event: picture")
            with looks.viewing():
                assert await looks.news(0) == (version, news)
            assert is_looking()
        await eventually(lambda: not is_looking(), what="the board goes on without viewers")


async def test_a_viewer_that_missed_a_difference_gets_a_whole_picture(
    generator: ScriptedGenerator, tokenizer: Tokenizer
) -> None:
    looks: board.Board = create_app(scripted_api(generator, tokenizer)).state.board
    with looks.viewing():
        version, _ = await looks.news(0)
        for n in (1, 2):
            generator.script.workers = [worker(f"d{n}")]
            newest, change = await looks.news(version + n - 1)
            assert (newest, change[:13]) == (version + n, b"event: change")
        newest, whole = await looks.news(version)
        assert newest == version + 2 and whole.startswith(b"event: picture")


async def test_viewers_are_not_all_told_in_one_turn(
    generator: ScriptedGenerator, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for a time of its own, so that no token of a stream waits for messages to all of them."""
    looks: board.Board = create_app(scripted_api(generator, tokenizer)).state.board
    waits = iter([0.0, HANGS_S, HANGS_S])
    monkeypatch.setattr(board, "BEAT_S", 2 * HANGS_S)
    with looks.viewing(), looks.viewing(), looks.viewing():
        version, _ = await looks.news(0)
        monkeypatch.setattr(random, "uniform", lambda low, high: next(waits))
        told = [asyncio.create_task(looks.news(version)) for _ in range(3)]
        await asyncio.sleep(0)
        generator.script.workers = [worker("d1")]
        done, others = await asyncio.wait(told, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result()[0] for task in done] == [version + 1] and len(others) == 2
        for task in others:
            task.cancel()


def test_who_does_not_read_is_cut_off(
    generator: ScriptedGenerator, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "MAX_VIEWERS", 1)
    generator.script.workers = [worker(f"d{n}") for n in range(2_000)]  # more than the buffers on the way hold
    limits = HttpLimits(unread_timeout_s=0.2)
    with (
        running_server(generator, tokenizer, send_buffer_bytes=16 * 2**10, limits=limits) as target,
        socket.socket() as sock,
    ):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 2**10)
        sock.connect((target.http.base_url.host, target.http.base_url.port or 0))
        sock.sendall(b"GET /cluster/events HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sock.recv(5) == b"HTTP/", "it looks"
        wait_until(lambda: room(target), what="it is not cut off")
        sock.settimeout(HANGS_S)
        with pytest.raises(ConnectionResetError):
            while sock.recv(2**16):
                pass


def test_a_server_that_stops_does_not_wait_for_who_looks(
    generator: ScriptedGenerator, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`running_server` fails where the server does not stop."""
    monkeypatch.setattr(board, "BEAT_S", 0.3)
    with socket.socket() as sock:
        with running_server(generator, tokenizer) as target:
            sock.settimeout(HANGS_S)
            sock.connect((target.http.base_url.host, target.http.base_url.port or 0))
            sock.sendall(b"GET /cluster/events HTTP/1.1\r\nhost: x\r\n\r\n")
            assert sock.recv(5) == b"HTTP/"
        received = b""
        while data := sock.recv(2**16):
            received += data
        assert received.endswith(b"0\r\n\r\n"), "it ended in order"


async def test_a_picture_holds_the_loop_for_short_turns_only(
    generator: ScriptedGenerator, tokenizer: Tokenizer
) -> None:
    """Of the most requests that are shown, each of which has new tokens, by processor time. So that no token waits for
    more than a millisecond or so, and four pictures a second take a small part of a core."""
    api = scripted_api(generator, tokenizer, slo=CLASSES)
    generator.script.workers = [worker(f"{role}{n}") for role in "pd" for n in range(8)]
    streams = [streaming(api, f"cmpl-{n}") for n in range(MAX_REQUESTS)]
    observer, picture = Observer(api), dict[str, Any]()

    async def show() -> None:
        nonlocal picture
        newest = await observer.observe()
        assert len(newest["requests"]) == MAX_REQUESTS
        dumps(difference(picture, newest))
        picture = newest

    pictures = []
    await show()  # the first one is whole, and asks the scheduler
    for _ in range(25):
        for sequence in streams:
            sequence.token_times.extend([time.monotonic()] * 5)
        pictures.append(Stepped(show()))
        await pictures[-1]
    unit_s = turn_s()
    turns = [(max(one.steps_s) / unit_s, sum(one.steps_s) / unit_s) for one in pictures]
    assert min(longest for longest, _ in turns) < 2 * MILLISECOND, turns  # all at once it takes ten
    assert min(whole for _, whole in turns) * board.PER_S < 0.05 * 1_000 * MILLISECOND, turns


def streaming(api: Api, name: str) -> SequenceTimeline:
    """A request of this gateway that has been tried twice and has 200 tokens."""
    timeline = RequestTimeline(endpoint="/v1/completions", terms=RequestTerms(slo=CLASSES.classes[0]))
    params = SamplingParams(max_tokens=10_000, seed=0)
    timeline.parsed([RequestSpec(request_id=f"{name}-0", attempt=0, prompt_token_ids=[1], params=params)], 1, name)
    (sequence,) = timeline.sequences
    for number in range(2):
        sequence.placed(Placement(request_id=f"{name}-0", attempt=number, prefill="p0", decode=f"d{number}"))
        sequence.started()
        sequence.token_times.extend([time.monotonic()] * 100)
        if number == 0:
            sequence.failed("fault", "d0")
    timeline.sent([0])
    api.slo.follow(timeline)
    api.recent.began(timeline)
    return sequence


# The page.


@pytest.fixture
def page(target: Target) -> httpx.Response:
    return target.http.get("/").raise_for_status()


def test_the_page_runs_nothing_but_its_own_script(page: httpx.Response, target: Target) -> None:
    assert target.http.get("/board").text == page.text
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert (policy["default-src"], policy["connect-src"], policy["base-uri"]) == ("'none'", "'self'", "'none'")
    assert (policy["frame-ancestors"], policy["form-action"]) == ("'none'", "'none'")
    for tag in ("script", "style"):
        [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", page.text, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert "unsafe" not in page.headers["content-security-policy"]


def test_the_page_needs_no_other_host_and_writes_no_markup(page: httpx.Response) -> None:
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?:https?:|//)|url\(|@import|\bimport\(""", page.text)
    allowed = {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"https?://[^\s\"'<>)]+", page.text)) <= allowed
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function| on\w+=\"", page.text
    )
    assert " style=" not in page.text, "the policy would refuse it"


def test_the_page_has_the_elements_that_its_script_asks_for(page: httpx.Response) -> None:
    ids = re.findall(r'\bid="([\w-]+)"', page.text)
    assert len(ids) == len(set(ids))
    asked = set(re.findall(r'byId\("([\w-]+)"\)', page.text))
    named = {
        name for found in re.findall(r'(?:aria-labelledby|for|href)="#?([\w-]+)"', page.text) for name in found.split()
    }
    assert asked | (named - {"data"}) <= set(ids)
    assert len(asked) > 20
