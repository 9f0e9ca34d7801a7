"""The board in a real browser, over a real cluster: a prompt sent from the page goes on when its worker is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.config.settings import GatewaySettings
from cluster.http.app import create_app
from cluster.slo.classes import SloConfig
from engine.text.tokenizer import Tokenizer
from tests.operators.browser import Seen, barriers
from tests.ray.served_cluster import MODEL, ServedCluster, served_cluster
from tests.support.clusters.worker_reports import worker_info, worker_snapshot
from tests.support.http_server import scripted_api
from tests.support.scripted_generator import Script, ScriptedGenerator

pytestmark = pytest.mark.model

WAIT_MS = 120_000  # for what takes seconds on a machine that is busy
CONFIG: dict[str, Any] = {
    "model": {"ref": MODEL, "dtype": "bfloat16", "max_model_len": 2_048},
    "prefill": {"replicas": 1, "num_cpus": 0.5, "threads": 1},
    "decode": {"replicas": 2, "num_cpus": 0.5, "threads": 1},
    "gateway": {"num_cpus": 0.2},
    "kv": {
        "prefill": {"memory": "96MiB", "host_memory": "128MiB"},
        "decode": {"memory": "96MiB", "host_memory": "128MiB"},
    },
    "slo": {
        "default": "interactive",
        "classes": {
            "interactive": {"ttft_ms": 4_000, "tpot_ms": 400, "share": 0.9},
            "voice": {"ttft_ms": 2_500, "gap_ms": 1_500, "share": 0.9},
            "batch": {},
        },
    },
}


@contextmanager
def opened(browser: Any, url: str, width: int = 1600, scheme: str = "light") -> Iterator[tuple[Any, Seen]]:
    """The board, once it is live."""
    context = browser.new_context(viewport={"width": width, "height": 1000}, color_scheme=scheme)
    page, seen = context.new_page(), Seen()
    page.set_default_timeout(WAIT_MS)
    seen.watch(page)
    page.goto(url)
    try:
        yield page, seen
    finally:
        context.close()


def until(page: Any, holds: str, argument: object = None) -> None:
    """Until the script is true of the page, whose policy lets playwright's own way of waiting not in."""
    deadline = time.monotonic() + WAIT_MS / 1e3
    while not page.evaluate(holds, argument):
        assert time.monotonic() < deadline, f"never: {holds}"
        page.wait_for_timeout(50)


@contextmanager
def load(url: str, num_streams: int) -> Iterator[None]:
    """So many streams at a time, until the end of the block."""
    over = threading.Event()
    classes = ("interactive", "batch", "voice")

    def stream(n: int) -> None:
        body = {"model": MODEL, "prompt": "A word about the sea. " * (4 + 9 * n), "max_tokens": 60 + 30 * n}
        body |= {"stream": True, "ignore_eos": True, "seed": n}
        while not over.is_set():
            with httpx.stream(
                "POST", f"{url}/v1/completions", json=body, headers={"x-slo-class": classes[n % 3]}, timeout=300
            ) as answer:
                for _ in answer.iter_lines():
                    if over.is_set():
                        break

    with ThreadPoolExecutor(num_streams) as pool:
        streams = [pool.submit(stream, n) for n in range(num_streams)]
        try:
            yield
        finally:
            over.set()
    for each in streams:
        each.result()


def test_a_prompt_goes_on_where_its_worker_is_killed(
    browser: Any, tmp_path: Path, pictures: Path, program: Callable[[str], str]
) -> None:
    with served_cluster(CONFIG, tmp_path) as cluster:
        cluster.wait_for_workers(prefill=1, decode=2)
        with opened(browser, cluster.url) as (page, seen), load(cluster.url, 4):
            page.get_by_text("live", exact=True).wait_for()
            until(page, "document.querySelectorAll('.worker.up').length === 3")
            until(page, "document.querySelectorAll('#plane .bar').length >= 12")  # so that there is something to see
            _look_at_a_glance(page)
            page.focus("#prompt")
            page.keyboard.press("Control+A")
            page.keyboard.type("Tell a long story about a lighthouse, and do not stop.")
            page.fill("#tokens", "600")
            page.focus("#prompt")
            page.keyboard.press("Control+Enter")
            until(page, "!!(own && picture.requests[own] && picture.requests[own].tokens > 12)")
            before = page.text_content("#answer")
            name = _kill_worker_of_the_answer(cluster, page)
            until(
                page, "name => [...document.querySelectorAll('.worker.lost b')].some(b => b.textContent === name)", name
            )
            until(
                page,
                "name => document.getElementById('happening-list').textContent.includes(`${name} was lost.`)",
                name,
            )
            until(page, "document.getElementById('facts').textContent.includes('attempt 2')")
            until(page, "before => document.getElementById('answer').textContent.length > before.length + 40", before)
            assert page.text_content("#answer").startswith(before), "the answer goes on behind what was there"
            assert page.locator(".bar .notch").count() >= 1
            until(page, "before => document.getElementById('answer').textContent.length > before.length + 300", before)
            page.screenshot(path=pictures / "board.png", clip={"x": 0, "y": 0, "width": 1600, "height": 800})
            page.get_by_role("button", name="Stop").click()
            page.locator("#fall tr").get_by_text("placed again").first.wait_for()
            _look_at_a_request_by_keyboard(page)
            assert barriers(page) == []
        assert seen.errors == []
        assert seen.hosts == {cluster.url.removeprefix("http://")}
        cluster.wait_for_workers(prefill=1, decode=2)
        for width, scheme in ((390, "dark"), (390, "light"), (1600, "dark")):
            with opened(browser, f"{cluster.url}/board", width, scheme) as (page, seen), load(cluster.url, 3):
                until(page, "document.querySelectorAll('.worker.up').length === 3")
                until(page, "document.querySelectorAll('#plane .bar').length >= 3")
                assert barriers(page) == []
                assert page.evaluate("document.documentElement.scrollWidth") <= width, "it would scroll sideways"
                if (width, scheme) == (390, "dark"):
                    page.wait_for_timeout(6_000)  # for bars to have grown
                    page.screenshot(
                        path=pictures / "board-narrow.png", clip={"x": 0, "y": 0, "width": 390, "height": 1000}
                    )
            assert (seen.errors, len(seen.hosts)) == ([], 1)


def _look_at_a_glance(page: Any) -> None:
    """Lanes with what fills their workers' tiers, each class by its P99s and its budget, bars in the classes' colours,
    and decisions."""
    until(page, "[...document.querySelectorAll('.pool h3')].map(head => head.textContent).join() === 'Prefill,Decode'")
    fills = "tube => [...tube.children].some(part => part.style.width !== '0%')"
    until(page, f"[...document.querySelectorAll('.pool')].every(p => [...p.querySelectorAll('.tube')].some({fills}))")
    told = "name => [...document.querySelectorAll('.promise')].find(p => p.querySelector('h3').textContent === name)"
    for name, what in (
        ("interactive", r"first token\s+\d\S* m?s\s+of 4\.00 s"),
        ("interactive", r"kept of 90 % promised[^]*error budget left"),
        ("voice", r"gap\s+\d\S* m?s\s+of 1\.50 s"),
        ("batch", r"no promise"),
    ):
        until(page, f"name => /{what}/.test(({told})(name).innerText)", name)
    colour = "one => getComputedStyle(one).getPropertyValue('--c')"
    for kind in (".promise", "#plane .bar"):
        until(page, f"kind => new Set([...document.querySelectorAll(kind)].map({colour})).size === 3", kind)
    for phase in ("queue", "prefill", "decode"):
        until(page, "phase => document.querySelector(`#plane .seg.${phase}`) !== null", phase)
    decided = r"(is computed by prefill \d+ and goes on in|runs on) decode \d+"
    until(page, f"/{decided}/.test(document.getElementById('decision-list').innerText)")


def _kill_worker_of_the_answer(cluster: ServedCluster, page: Any) -> str:
    """The one that decodes it; its name on the board."""
    marks = page.evaluate("picture.requests[own].marks")
    worker_id = [worker for _, phase, worker in marks if phase in ("decode", "handoff", "gap")][-1]
    name: str = page.evaluate("id => picture.workers[id].name", worker_id)
    [pid] = [worker["pid"] for worker in cluster.workers() if worker["worker_id"] == worker_id]
    os.kill(pid, signal.SIGKILL)
    return name


def _look_at_a_request_by_keyboard(page: Any) -> None:
    page.focus('#plane .bar[tabindex="0"]')
    page.keyboard.press("Home")
    first = page.evaluate("document.activeElement.dataset.id")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.id") != first
    page.keyboard.press("Enter")
    page.locator("#detail td").get_by_text("prefill").first.wait_for()


# A gateway of scripted tokens behind something that asks for a key.


class _Guard:
    """Lets everybody have the page, and asks for a key for all else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        open_to_all = scope["path"] in ("/", "/board") or (b"authorization", b"Bearer sesame") in scope["headers"]
        if open_to_all:
            await self._app(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", loop="uvloop", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)


def test_behind_a_key_and_with_hostile_text(browser: Any, smollm2_folder: Path) -> None:
    hostile = "<img src=http://elsewhere.example/x onerror=alert(1)><script>alert(2)</script>"
    tokenizer = Tokenizer(smollm2_folder)
    generator = ScriptedGenerator(tokenizer)
    worker = "decode-<b>x</b>-1"
    generator.script = Script(reply=hostile, workers=[(worker_info(worker), worker_snapshot(worker))])
    app = create_app(scripted_api(generator, tokenizer, GatewaySettings(), SloConfig()))
    with served(_Guard(app)) as url, opened(browser, url, 390) as (page, seen):
        page.get_by_text("a key is needed").wait_for()
        assert page.locator(".worker").count() == 0
        page.get_by_label("Key, if what stands").fill("sesame")
        page.keyboard.press("Enter")
        page.get_by_text("live", exact=True).wait_for()
        page.get_by_role("button", name="Send").click()
        until(page, "hostile => document.getElementById('answer').textContent === hostile", hostile)
        page.locator("#fall td").get_by_text("prefill").first.wait_for()
        assert page.locator("#answer *").count() == 0 and page.locator(".worker b b").count() == 0
        assert barriers(page) == []
        assert seen.hosts == {url.removeprefix("http://")}
        assert [error for error in seen.errors if "401" not in error] == []


def test_texts_of_what_happened_at_one_time_do_not_lie_on_each_other(browser: Any, smollm2_folder: Path) -> None:
    """Of a worker that is silent for a moment, then answers, while another one comes: one text is read of them."""
    tokenizer = Tokenizer(smollm2_folder)
    generator = ScriptedGenerator(tokenizer)
    workers = [(worker_info(f"decode-x-{n}"), worker_snapshot(f"decode-x-{n}")) for n in (1, 2)]
    generator.script = Script(workers=workers[:1])
    app = create_app(scripted_api(generator, tokenizer, GatewaySettings(), SloConfig()))
    with served(app) as url, opened(browser, url) as (page, seen):
        page.get_by_text("live", exact=True).wait_for()
        until(page, "document.querySelectorAll('.worker.up').length === 1")
        generator.script.connection_states = {"decode-x-1": "silent"}
        until(page, "document.querySelectorAll('.flag.lost').length === 1")
        generator.script.connection_states, generator.script.workers = {}, workers
        until(page, "document.querySelectorAll('.flag.came').length === 2")
        is_read = "text => getComputedStyle(text).visibility !== 'hidden'"
        texts = f"[...document.querySelectorAll('.flag span')].filter({is_read})"
        boxes = page.evaluate(f"{texts}.map(text => text.getBoundingClientRect()).map(box => [box.left, box.right])")
        boxes.sort()
        assert all(right <= left for (_, right), (left, _) in pairwise(boxes)), boxes
        assert "decode 1 is silent" in page.evaluate(f"{texts}.map(text => text.textContent)")
        assert seen.errors == []
