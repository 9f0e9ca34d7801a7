"""`legato bench` and `legato top` against a real gateway over real HTTP."""

from __future__ import annotations

import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.__main__ import main
from cluster.command.top import fetch, frame, render
from cluster.config.settings import GatewaySettings
from cluster.errors import OverloadedError
from cluster.http.api import InFlight
from cluster.load.client import ServerAddress
from cluster.slo.classes import RequestTerms, SloClass, SloConfig
from engine.text.tokenizer import Tokenizer
from tests.support.http_server import MODEL, running_server
from tests.support.openai_conformance import Target
from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.threaded_server import QuietHandler, threaded_server
from tests.support.waiting import HANGS_S, wait_until

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[2]
CLASSES = SloConfig(classes=(SloClass(name="chat", ttft_s=600.0, tpot_s=600.0), SloClass(name="batch")), default="chat")
NUM_SIZES = 20_000  # of a terminal that is drawn out by its corner


@pytest.fixture
def max_concurrent() -> int:
    return 8


@pytest.fixture
def target(generator: ScriptedGenerator, tokenizer: Tokenizer, max_concurrent: int) -> Iterator[Target]:
    settings = GatewaySettings(max_concurrent=max_concurrent)
    with running_server(generator, tokenizer, settings, slo=CLASSES) as target:
        yield target


def url_of(target: Target) -> str:
    return str(target.http.base_url)


class Bench:
    """Runs `legato bench` and keeps what it says."""

    def __init__(
        self, target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
    ) -> None:
        self._target = target
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self._log = folder / "bench.jsonl"
        self.code = 0

    def run(self, *words: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The report, and the lines of the log."""
        self.out = self.table(*words, "--json", "--log", str(self._log))
        lines = [json.loads(line) for line in self._log.read_text().splitlines()]
        return json.loads(self.out), lines

    def table(self, *words: str) -> str:
        self._monkeypatch.setattr("sys.argv", ["legato", "bench", url_of(self._target), *words])
        self.code = main()
        return self._capsys.readouterr().out


@pytest.fixture
def bench(target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Bench:
    return Bench(target, monkeypatch, capsys, tmp_path)


class Batch:
    """Runs `legato run-batch` on files of its own."""

    def __init__(
        self, target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
    ) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.source, self.out, self.partial = folder / "in.jsonl", folder / "out.jsonl", folder / "out.jsonl.partial"
        self.words = ["legato", "run-batch", "-i", str(self.source), "-o", str(self.out), "--url", url_of(target)]

    def write(self, *names: str, **fields: Any) -> None:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2, **fields}
        rows = [{"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body} for name in names]
        self.source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def run(self, *words: str) -> tuple[int, str]:
        self._monkeypatch.setattr("sys.argv", [*self.words, *words])
        code = main()
        told = self._capsys.readouterr()
        return code, told.out + told.err

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(row) for row in self.out.read_text().splitlines()]


@pytest.fixture
def batch(target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Batch:
    monkeypatch.setattr("cluster.batch.service._WAIT_S", 0.01)
    return Batch(target, monkeypatch, capsys, tmp_path)


def test_a_file_is_answered(batch: Batch, generator: ScriptedGenerator) -> None:
    """In its order, what fails beside what does not; there are more lines at a time than the gateway takes."""
    names = [f"l{n}" for n in range(30)]
    batch.write(*names)
    with batch.source.open("a") as file:
        row = {"custom_id": "bad", "url": "/v1/chat/completions", "body": {"model": MODEL}}
        file.write(f"\n{json.dumps(row)}")
    code, told = batch.run("--concurrency", "20")
    assert code == 0 and "31 lines answered" in told and "1 of them tell of an error" in told
    assert [row["custom_id"] for row in batch.answers()] == [*names, "bad"] and not batch.partial.exists()
    *good, bad = batch.answers()
    assert all(row["response"]["body"]["usage"]["completion_tokens"] == 2 for row in good)
    assert bad["response"]["status_code"] == 400 and bad["response"]["request_id"] and bad["error"] is None
    asked = len(generator.requests)
    assert batch.run() == (0, f"All 31 lines are answered in {batch.out} already.\n")
    assert len(generator.requests) == asked


def test_a_file_is_gone_on_with(batch: Batch, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill in the middle of a line of answers; and a server that is gone for a while is waited for."""
    names = [f"l{n}" for n in range(12)]
    batch.write(*names)
    generator.script = Script(until=lambda: generator.num_finished < 6)  # the others stand until it is killed
    process = subprocess.Popen([sys.executable, "-m", "cluster", *batch.words[1:], "--concurrency", "2"], cwd=ROOT)
    wait_until(lambda: batch.partial.exists() and batch.partial.read_bytes().count(b"\n") >= 4)
    process.kill()
    process.wait(HANGS_S)
    answered = batch.partial.read_bytes().splitlines()
    batch.partial.write_bytes(b"\n".join([*answered[:3], answered[3][:20]]))
    wait_until(lambda: generator.num_open == 0)
    generator.script, statuses = Script(), list[int]()
    post, times = httpx.AsyncClient.post, itertools.count()

    async def fail_at_first(self: httpx.AsyncClient, url: str, **fields: Any) -> httpx.Response:
        if next(times) < 20:  # twice for each line
            raise httpx.ConnectError("All connection attempts failed")
        answer = await post(self, url, **fields)
        statuses.append(answer.status_code)
        return answer

    monkeypatch.setattr(httpx.AsyncClient, "post", fail_at_first)
    code, told = batch.run()
    assert code == 0 and "9 lines answered" in told and "3 before" in told
    assert [row["custom_id"] for row in batch.answers()] == names
    assert statuses.count(200) == 9  # not by the generator: what the killed one had sent may reach it late
    kept = {row["custom_id"]: row for row in map(json.loads, answered[:3])}
    assert [row for row in batch.answers() if row["custom_id"] in kept] == [
        kept[name] for name in names if name in kept
    ]


def test_answers_are_on_the_disk_before_the_partial_ones_go(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that loses its power then may have the name of the new file, and nothing in it."""
    synced, fsync = list[tuple[str, int, bool]](), os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        if name.startswith(batch.out.name):  # others belong to the server
            synced.append((name, os.fstat(descriptor).st_size, batch.partial.exists()))

    monkeypatch.setattr(os, "fsync", noted)
    batch.write("a", "b")
    code, told = batch.run()
    assert code == 0, told
    assert synced == [(f"{batch.out.name}.sorted", batch.out.stat().st_size, True)]


def test_files_that_cannot_be_run(batch: Batch, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    batch.write("a", "a")
    assert batch.run()[0] == 1 and "line 2" in batch.run()[1]
    batch.write("a")
    batch.out.write_text("something else")
    code, told = batch.run()
    assert code == 1 and "Move it" in told and batch.out.read_text() == "something else"
    batch.out.unlink()
    batch.partial.write_text('{"custom_id": "b", "error": {}}\n')
    assert "other lines, such as 'b'" in batch.run()[1]
    batch.partial.unlink()
    assert batch.run("--url", "ftp://x")[0] == 2
    assert batch.run("--url", "http://127.0.0.1:1")[0] == 1 and not batch.partial.exists()
    monkeypatch.setattr("cluster.command.run_batch._PATIENCE_S", 0.05)
    generator.script = Script(fail_after=0, error=OverloadedError("Full.", retry_after_s=0.01))
    monkeypatch.setattr("cluster.command.run_batch._NOT_NOW", 429)
    code, told = batch.run()
    assert code == 1 and "has answered nothing" in told


def test_what_clients_saw(bench: Bench, generator: ScriptedGenerator) -> None:
    generator.script = Script(delay_s=0.01, reply="one two three four five six seven eight")
    report, lines = bench.run("--requests", "6", "--concurrency", "3", "--output-tokens", "5", "--prompt-tokens", "40")
    assert bench.code == 0 and report["model"] == MODEL
    assert (report["requests"], report["answered"], report["refused_429"], report["failed"]) == (6, 6, 0, 0)
    assert report["output_tokens"] == 30 and report["prompt_tokens"] == 6 * 40 and report["cached_tokens"] == 6 * 20
    latency = report["latency_ms"]
    assert latency["ttft"]["p50"] >= 10 and latency["tpot"]["p50"] > 0 and latency["e2e"]["p50"] >= 50
    assert (latency["ttft"]["samples"], latency["gap"]["samples"]) == (6, 24)
    assert [len(line["arrivals_ms"]) for line in lines] == [5] * 6
    assert all(line["status"] == 200 and line["prompt_tokens"] == 40 and line["output_tokens"] == 5 for line in lines)
    assert {line["output_tokens_are"] for line in lines} == {"counted by the server"}
    for line in lines:
        assert line["ttft_ms"] == line["arrivals_ms"][0] and line["e2e_ms"] == line["arrivals_ms"][-1]
    # What the server was asked: OpenAI's own fields, prompts that differ.
    assert not any(request.params.ignore_eos for request in generator.requests)
    assert len({tuple(request.prompt_token_ids) for request in generator.requests}) == 6


def test_goodput_is_of_all_that_were_sent(bench: Bench, generator: ScriptedGenerator) -> None:
    """By the first token and the mean, and by the first token and the gaps: a stall is seen by one of them only."""
    # However late a client reads, it does not find all ten of them at once.
    generator.script = Script(delay_s=0.1, reply="one two three four five six seven eight nine ten")
    words = ("--requests", "4", "--output-tokens", "10", "--ttft-ms", "60000")
    report, _ = bench.run(*words, "--tpot-ms", "60000", "--gap-ms", "1")
    goodput = report["goodput"]
    assert goodput["ttft_and_tpot"]["share"] == 1.0 and goodput["ttft_and_gap"]["share"] == 0.0
    assert goodput["ttft_and_gap"]["output_tokens_per_s"] == 0
    report, _ = bench.run(*words, "--tpot-ms", "0.001", "--gap-ms", "60000")
    assert report["goodput"]["ttft_and_tpot"]["share"] == 0.0 and report["goodput"]["ttft_and_gap"]["share"] == 1.0


def test_refusals_are_counted_apart(
    bench: Bench, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight at a time are answered, and end only once somebody was refused beside them."""
    require_room, refusals = InFlight.require_room, list[int]()

    def noted(in_flight: InFlight, num_sequences: int, terms: RequestTerms) -> None:
        try:
            require_room(in_flight, num_sequences, terms)
        except OverloadedError:
            refusals.append(num_sequences)
            raise

    monkeypatch.setattr(InFlight, "require_room", noted)
    generator.script = Script(until=lambda: refusals)
    report, lines = bench.run("--requests", "12", "--concurrency", "12", "--output-tokens", "4", "--ignore-eos")
    assert bench.code == 0 and report["answered"] >= 8 and report["refused_429"] >= 1 and report["failed"] == 0
    assert report["answered"] + report["refused_429"] == 12
    refused = [line for line in lines if line["status"] == 429]
    assert len(refused) == report["refused_429"] and all("sequences are in flight" in line["error"] for line in refused)
    assert report["goodput"]["ttft_and_tpot"]["share"] <= round(report["answered"] / 12, 4)
    assert all(request.params.ignore_eos for request in generator.requests)  # it was asked for


def test_failures_are_told(bench: Bench, generator: ScriptedGenerator) -> None:
    generator.script = Script(fail_after=2)
    report, lines = bench.run("--requests", "2")
    assert bench.code == 1 and report["failed"] == 2 and report["answered"] == 0
    assert sum(report["errors"].values()) == 2 and all(line["error"] for line in lines)
    assert report["latency_ms"]["ttft"] is None
    told = bench.table("--requests", "2", "--model", "other")
    assert "2 failed" in told and "2 x the server answered 404: The model 'other' does not exist here." in told
    generator.script = Script(hang_after=1)
    report, _ = bench.run("--requests", "1", "--timeout", "0.2")
    assert report["errors"] == {"no end of the answer within 0.2 s": 1}
    wait_until(lambda: generator.num_open == 0, what="the client has left, and its request was not cancelled")


@pytest.mark.parametrize("when", ["--concurrency 3 --requests 9", "--rate 1000 --requests 3"])
def test_ctrl_c_tells_how_many_had_no_answer(target: Target, generator: ScriptedGenerator, when: str) -> None:
    """Whoever sent them may have been the slowest of all: they are in no percentile."""
    generator.script = Script(hang_after=1)
    command = [sys.executable, "-m", "cluster", "bench", url_of(target), *when.split()]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: generator.num_open == 3)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=HANGS_S)
    finally:
        child.kill()
        child.wait()
    assert "Interrupted; 3 requests had no whole answer yet." in err
    assert child.returncode == 1 and "no request has ended" in err


def test_a_trace_is_sent_at_its_times_and_shares_its_prefixes(
    bench: Bench, generator: ScriptedGenerator, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 30, "hash_ids": [1, 2]},
        {"timestamp": 1000, "input_length": 1024, "output_length": 20, "hash_ids": [1, 3]},
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--trace", str(trace), "--load", "10", "--length", "0.1", "--ignore-eos", "--header", "x-slo-class: batch")
    report, lines = bench.run(*words)
    assert [line["output_tokens"] for line in sorted(lines, key=lambda line: line["id"])] == [3, 2]
    assert sorted(line["due_s"] for line in lines) == [0.0, 0.1]
    assert all(line["sent_s"] >= line["due_s"] - 0.005 for line in lines) and report["late_to_send_ms"]["samples"] == 2
    first, second = (request.prompt_token_ids for request in generator.requests)
    assert len(first) == len(second) == 102 and first[:50] == second[:50] and first[52:] != second[52:]
    assert {terms.slo.name for terms in generator.terms} == {"batch"}
    trace.write_text("{}\n")
    assert bench.table("--trace", str(trace)) == "" and bench.code == 2


@pytest.mark.parametrize("max_concurrent", [512])  # a gateway that is kept from running finds many at its door
def test_duration_seed_and_chat(bench: Bench, generator: ScriptedGenerator) -> None:
    words = ("--rate", "200", "--duration", "0.2", "--output-tokens", "2", "--shared-tokens", "16", "--seed", "7")
    report, lines = bench.run(*words, "--chat")
    assert 10 <= report["requests"] <= 90 and all(line["due_s"] <= 0.2 for line in lines)
    first = [request.prompt_token_ids for request in generator.requests]
    generator.requests.clear()
    bench.run(*words, "--chat")
    assert sorted(request.prompt_token_ids for request in generator.requests) == sorted(first)
    began = time.monotonic()
    report, _ = bench.run("--concurrency", "2", "--duration", "0.2", "--output-tokens", "2", "--sigma", "0.5")
    # The report's own time begins with the first request, a little later.
    assert report["requests"] >= 2 and time.monotonic() - began >= 0.2


def test_plots(bench: Bench, tmp_path: Path) -> None:
    told = bench.table("--requests", "3", "--output-tokens", "4", "--plot", str(tmp_path / "seen.svg"))
    assert "goodput (first token within 2000 ms, 100 ms a token)" in told
    assert (tmp_path / "seen.svg").read_text().startswith("<?xml")
    told = bench.table("--requests", "1", "--output-tokens", "2", "--plot", str(tmp_path))
    assert bench.code == 1 and "goodput" in told, "the report is there all the same"


def test_top_prints_one_frame_where_there_is_no_terminal(
    target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target.complete(max_tokens=3, extra_body={"ignore_eos": True})
    server = ServerAddress.at(url_of(target))
    wait_until(lambda: (seen := fetch(server)).outcomes and not seen.running, what="the request was not counted")
    monkeypatch.setattr("sys.argv", ["legato", "top", url_of(target)])
    assert main() == 0
    out = capsys.readouterr().out
    assert "1 worker   0 requests running   ended: 1 finished" in out and "\x1b" not in out
    assert re.search(r"DECODE 1 of 3 wanted", out) and "scripted" in out
    assert re.search(r"chat +\d+(\.\d)? / 600000 +\d+(\.\d)? / 600000 .*100\.0%", out)
    assert re.search(r"batch +- / - ", out)


def test_top_of_what_is_no_legato(
    target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["legato", "top", f"{url_of(target)}/elsewhere", "--once"])
    assert main() == 1
    err = capsys.readouterr().err
    assert "/elsewhere/cluster was answered with 404" in err and err.rstrip().endswith("Is it a Legato?")


@pytest.mark.parametrize("given", ["--header", "OPENAI_API_KEY", ""])
def test_top_through_a_proxy_that_asks_for_a_key(
    target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    class Front(QuietHandler):
        def do_GET(self) -> None:
            allowed = self.headers["authorization"] == "Bearer sesame"
            body = target.http.get(self.path).content if allowed else b"No key, no answer."
            self.send_response(200 if allowed else 401)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with threaded_server(Front) as url:
        words = ["--header", "Authorization: Bearer sesame"] if given == "--header" else []
        if given == "OPENAI_API_KEY":
            monkeypatch.setenv(given, "sesame")
        monkeypatch.setattr("sys.argv", ["legato", "top", url, "--once", *words])
        assert main() == (0 if given else 1)
    out, err = capsys.readouterr()
    if given:
        assert "1 worker   0 requests running" in out and err == ""
    else:
        assert "was answered with 401: No key, no answer. Give a key: --header, or OPENAI_API_KEY." in err


def test_top_in_a_terminal(target: Target) -> None:
    """Drawn anew until Ctrl-C, also one that comes while its size is told; the terminal is left as it was."""
    terminal, its_end = pty.openpty()
    command = [sys.executable, "-m", "cluster", "top", url_of(target), "--every", "0.05"]
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    child = subprocess.Popen(command, stdin=its_end, stdout=its_end, stderr=its_end, env=environment, cwd=ROOT)
    os.close(its_end)
    said = b""
    deadline = time.monotonic() + HANGS_S

    def read() -> None:
        nonlocal said
        assert time.monotonic() < deadline, said
        if select.select([terminal], [], [], 1.0)[0]:
            said += os.read(terminal, 65_536)

    try:
        while said.count(b"\x1b[H") < 3:
            read()
        for _ in range(NUM_SIZES):  # a handler may run at any moment of the loop that draws
            child.send_signal(signal.SIGWINCH)
            if select.select([terminal], [], [], 0.0)[0]:
                read()
        child.send_signal(signal.SIGINT)
        while not said.endswith(b"\x1b[?25h\x1b[?1049l"):
            read()
        assert child.wait(HANGS_S) == 0
    finally:
        child.kill()
        child.wait()
        os.close(terminal)
    assert said.startswith(b"\x1b[?1049h\x1b[?25l") and b"\x1b[1mPROMISES, last minute\x1b[0m" in said


def test_a_frame_is_no_wider_than_the_terminal(target: Target) -> None:
    lines = frame(fetch(ServerAddress.at(url_of(target))))
    for width in (1, 20, 80, 400):
        assert all(len(render(line, width, colour=False)) <= width for line in lines)
