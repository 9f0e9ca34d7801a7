"""The benchmark beside peers: what it reads, how it takes turns, and that a peer which fails is told, not skipped."""

from __future__ import annotations

import itertools
import json
import socket
import sys
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.quiet import PATIENCE_VARIABLE
from benchmarks.peers.company import ANSWER_TOKENS, company, questions
from benchmarks.peers.confirm import confirm, read_output, summed_up
from benchmarks.peers.drafts import KINDS, NUM_ANSWERS, Both, compared, with_drafts
from benchmarks.peers.engines import started as starting
from benchmarks.peers.engines.http_asker import HttpAsker, read_answer
from benchmarks.peers.engines.installation import Workshop
from benchmarks.peers.engines.started import await_listening, started
from benchmarks.peers.engines.vllm_cpu import requirements_but_torch
from benchmarks.peers.peer import Answer, Peer, PeerUnavailableError, Request
from benchmarks.peers.pieces import peers
from benchmarks.peers.report import piece_of
from benchmarks.peers.rounds import run_rounds, turns
from benchmarks.peers.stored import results
from benchmarks.peers.works import GROUPS, ONE_STREAM, START, drawing, gaps
from benchmarks.report.peers import peers_tables
from cluster.load.client import AnswerError
from engine.text.tokenizer import Tokenizer
from tests.support.http_server import MODEL, running_server
from tests.support.scripted_generator import ScriptedGenerator
from tests.support.waiting import wait_until

RUN = {
    "piece": "bf16",
    "rounds": 1,
    "date": "today",
    "commit": "abc",
    "uncommitted_changes": False,
    "load_average_before": 0.1,
}
WAITS = "import threading; threading.Event().wait()"


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATIENCE_VARIABLE, "0")


class Fake:
    """Answers at once; says how it was asked. `moody`: what it says depends on how many are asked together. `says`:
    what else it says."""

    def __init__(self, *, moody: bool = False, pace_s: float = 0.25, says: str = "") -> None:
        self.waves: list[list[Request]] = []
        self._moody = moody
        self._pace_s = pace_s
        self._says = says

    def wave(self, requests: Sequence[Request]) -> list[Answer]:
        self.waves.append(list(requests))
        company = len(requests) if self._moody else 1
        return [
            Answer(
                sent_s=10.0,
                arrivals_s=[10.5 + self._pace_s * token for token in range(request.num_tokens)],
                num_tokens=request.num_tokens,
                text=f"{request.prompt} {company}{self._says}",
            )
            for request in requests
        ]

    def steady(self, streams: Sequence[Request], prompts: Sequence[Request]) -> tuple[list[Answer], list[Answer]]:
        raise PeerUnavailableError("it has no streams")


def fake_peer(name: str, fake: Fake | None = None, works: tuple[str, ...] = GROUPS) -> Peer:
    @contextmanager
    def start() -> Iterator[Fake]:
        yield fake or Fake()

    return Peer(name=name, told=f"told of {name}", works=works, prepare=lambda: None, start=start)


def failing_peer(tmp_path: Path) -> Peer:
    """A real process that ends with 1 instead of serving."""

    @contextmanager
    def start() -> Iterator[Fake]:
        command = [sys.executable, "-c", "print('no such | weights'); raise SystemExit(1)"]
        with started("broken", command, ready="serving", folder=tmp_path):
            yield Fake()

    return Peer(name="broken", told="it fails", works=GROUPS, prepare=lambda: None, start=start)


def uninstallable_peer(tmp_path: Path) -> Peer:
    def prepare() -> None:
        shop = Workshop("absent", tmp_path)
        shop.once("made", lambda: shop.run(sys.executable, "-c", "raise SystemExit('no compiler here')"))

    return Peer(name="absent", told="it is not there", works=GROUPS, prepare=prepare, start=fake_peer("").start)


def measured(chosen: Sequence[Peer], groups: Sequence[str], num_rounds: int = 1) -> list[dict[str, Any]]:
    records: list[Any] = []
    run_rounds(chosen, groups, num_rounds, records.append)
    return records


def test_turns_go_forth_and_back() -> None:
    a, b, c = (fake_peer(name) for name in "abc")
    assert [(number, peer.name) for number, peer in turns([a, b, c], 2)] == [
        *((0, "a"), (0, "b"), (0, "c")),
        *((1, "c"), (1, "b"), (1, "a")),
    ]


def test_everyone_is_asked_the_same_and_nobody_twice() -> None:
    one, other = Fake(), Fake()
    records = measured([fake_peer("one", one), fake_peer("other", other)], ["one_stream", "prefill"], num_rounds=2)
    assert one.waves == other.waves
    prompts = [tuple(request.prompt) for wave in one.waves for request in wave if len(request.prompt) >= 128]
    warm_up = [prompt for prompt in prompts if prompts.count(prompt) > 1]
    assert set(map(len, warm_up)) == {512}  # the same one at each start
    figures = [record["figures"] for record in records if record.get("work") == ONE_STREAM]
    assert len(figures) == 2 * 2 * 2
    assert figures[0] == {"decode_tokens_per_s": pytest.approx(4.0), "ttft_ms": pytest.approx(500.0)}


def test_a_peer_that_fails_has_a_row_with_the_reason(tmp_path: Path) -> None:
    chosen = [failing_peer(tmp_path), uninstallable_peer(tmp_path), fake_peer("well")]
    records = measured(chosen, ["one_stream", "steady"])
    records.insert(0, {"run": RUN})
    found = piece_of(records, {peer.name: peer.told for peer in chosen})
    reasons = {record["peer"]: record["reason"] for record in found["failures"]}
    assert "ended with 1" in reasons["broken"] and "no such | weights" in reasons["broken"]
    assert "no compiler here" in reasons["absent"]
    assert "it has no streams" in reasons["well"]  # one work fails, the others are measured
    assert list(found["works"]) == [START, ONE_STREAM]
    page = peers_tables(results([found]))
    assert "no such / weights" in page and "| absent | everything |" in page


def test_a_step_that_failed_is_done_again(tmp_path: Path) -> None:
    shop, made = Workshop("peer", tmp_path), []
    with pytest.raises(PeerUnavailableError, match="ended with 3"):
        shop.once("made", lambda: shop.run(sys.executable, "-c", "raise SystemExit(3)"))
    for _ in range(2):
        shop.once("made", lambda: made.append(1))
    assert made == [1]


def test_a_silent_process_is_given_up_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed where it does not heed an interrupt, as what a shell has started in the background does not."""
    monkeypatch.setattr(starting, "STOP_TIMEOUT_S", 0.5)
    with (
        pytest.raises(PeerUnavailableError, match="not ready within"),
        started("mute", [sys.executable, "-c", WAITS], ready="serving", folder=tmp_path, timeout_s=0.2),
    ):
        pass


LEAVES = r"""
import mmap, os, signal, tempfile
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGINT, signal.SIG_IGN)
with open(b"name of no text \xff", "w+b") as file:
    file.write(bytes(16))
    file.flush()
    mapped = mmap.mmap(file.fileno(), 16)
memory = SharedMemory(create=True, size=16)
print("serving", memory.name, tempfile.mkdtemp(), flush=True)
signal.pause()
"""


def test_a_killed_process_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each killed vLLM left hundreds of megabytes in /dev/shm, and sockets in /tmp."""
    monkeypatch.setattr(starting, "STOP_TIMEOUT_S", 0.0)
    with started("leaves", [sys.executable, "-c", LEAVES], ready="serving", folder=tmp_path):
        _, memory, folder = (tmp_path / "server.log").read_text(encoding="utf-8").split()
        assert Path("/dev/shm", memory).exists() and Path(folder).exists()
    assert not Path("/dev/shm", memory).exists() and not Path(folder).exists()


def test_a_server_that_listens_a_little_later_is_awaited() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        with pytest.raises(PeerUnavailableError, match="late said it was ready, but does not listen"):
            await_listening("late", port, timeout_s=0.05)
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(await_listening, "late", port)
            server.listen()
            waiting.result()


@pytest.mark.model
def test_answers_that_change_in_company_are_counted() -> None:
    asker = Fake(moody=True)
    draw = drawing("company")
    assert company(asker, draw) == {"greedy_changed": 36, "greedy": 36, "seeded_changed": 12, "seeded": 12}
    assert company(Fake(), draw) == {"greedy_changed": 0, "greedy": 36, "seeded_changed": 0, "seeded": 12}
    alone, among = asker.waves[:48], asker.waves[48:]
    assert all(len(wave) == 1 for wave in alone) and [len(wave) for wave in among] == [33] * 3
    assert {request.num_tokens for wave in asker.waves for request in wave} == {ANSWER_TOKENS}
    assert len({tuple(question.prompt) for question in questions()}) == 48


@pytest.mark.model
@pytest.mark.parametrize("kind", KINDS)
def test_answers_with_drafts_are_set_beside_the_same_peers_without(kind: str) -> None:
    drafting, plain = Fake(pace_s=0.125), Fake()
    figures = compared(kind, Both(drafting, plain), drawing(kind))
    assert figures == {
        "drafts_tokens_per_s": pytest.approx(8.0),
        "plain_tokens_per_s": pytest.approx(4.0),
        "times": pytest.approx(2.0),
        "changed": 0,
        "answers": NUM_ANSWERS,
    }
    asked = [[request.prompt for (request,) in fake.waves] for fake in (drafting, plain)]
    assert asked[0] == asked[1] and len(set(map(tuple, asked[0]))) == NUM_ANSWERS
    assert compared(kind, Both(Fake(says="other"), Fake()), drawing(kind))["changed"] == NUM_ANSWERS


def test_both_are_started_warmed_up_and_ended() -> None:
    fakes = {name: Fake() for name in ("drafting", "plain")}
    running: set[str] = set()

    def peer(name: str) -> Peer:
        @contextmanager
        def start() -> Iterator[Fake]:
            running.add(name)
            yield fakes[name]
            running.remove(name)

        return Peer(name=name, told=f"told of {name}", works=(), prepare=lambda: None, start=start)

    both = with_drafts("both", peer("drafting"), peer("plain"))
    with both.start() as asker:
        assert running == {"drafting", "plain"}
        asker.wave([Request(prompt=[1], num_tokens=2)])
    assert not running and fakes["drafting"].waves == fakes["plain"].waves != []
    assert all(record["work"] != START for record in measured([both], []) if "work" in record)


def test_gaps_are_those_that_touch_the_interval() -> None:
    assert gaps([1.0, 2.0, 3.0, 5.0, 6.0], since_s=2.5, until_s=5.5) == [1.0, 2.0, 0.5]
    assert gaps([1.0], since_s=2.0, until_s=9.0) == [8.0]  # it stood still all the while


def test_streams_are_read_whatever_their_pieces() -> None:
    events = [
        {"choices": [{"text": "", "finish_reason": None}]},
        {"choices": [{"text": "Hé", "finish_reason": None}]},
        {"choices": [{"text": "llo", "finish_reason": "length"}], "usage": None},
        {"choices": [], "usage": {"completion_tokens": 2}},
    ]
    data = b"".join(b"data: " + json.dumps(event).encode() + b"\r\n\r\n" for event in events) + b"data: [DONE]\n\n"
    whole = read_answer(0.0, [(1.0, data)], 2)
    torn = read_answer(0.0, [(float(at), data[at : at + 1]) for at in range(len(data))], 2)
    assert whole.text == torn.text == "Héllo"
    assert len(torn.arrivals_s) == 2 and torn.arrivals_s[0] < torn.arrivals_s[1]
    with pytest.raises(AnswerError, match="3 tokens were asked for, 2 came"):
        read_answer(0.0, [(1.0, data)], 3)
    with pytest.raises(AnswerError, match="too long"):
        read_answer(0.0, [(1.0, b'data: {"error": {"message": "too long"}}\n\n')], 3)


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer(smollm2_folder)


@pytest.mark.model
def test_a_real_server_is_asked(tokenizer: Tokenizer) -> None:
    generator = ScriptedGenerator(tokenizer)
    with running_server(generator, tokenizer) as target:
        asker = HttpAsker(target.http.base_url.port or 0, MODEL)
        alike = Request(prompt=[2000, 3000], num_tokens=10)
        one, two, seeded = asker.wave([alike, alike, Request(prompt=[2000, 3000], num_tokens=10, seed=3)])
        assert one.text == two.text and one.num_tokens == 10
        assert one.sent_s < one.arrivals_s[0] <= one.arrivals_s[-1]
        drawn = [request.params for request in generator.requests if request.params.temperature]  # in whatever order
        assert [(params.temperature, params.seed) for params in drawn] == [(1, 3)] and len(generator.requests) == 3
        assert seeded.num_tokens == 10
        in_turn = asker.keep_open([alike] * 3, num_open=1)
        assert all(one.arrivals_s[-1] <= next_one.sent_s for one, next_one in itertools.pairwise(in_turn))
        generator.script.delay_s, generator.script.hang_after = 0.005, 1_000  # until the streams are broken off
        streams, prompts = asker.steady([Request(prompt=[7], num_tokens=2000)] * 2, [alike] * 2)
        assert streams[0].arrivals_s[0] < prompts[0].sent_s < prompts[1].sent_s < streams[1].arrivals_s[-1] + 60
        assert [prompt.num_tokens for prompt in prompts] == [10, 10]
        wait_until(lambda: generator.num_cancelled == 2, what="the streams were not broken off")


@pytest.mark.model
def test_the_requests_of_a_known_load_generator_are_answered(tokenizer: Tokenizer) -> None:
    """GuideLLM asks for usage in every event, as vLLM can; it reads the last one."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 5, "ignore_eos": True, "stop": None, "stream": True}
    with running_server(ScriptedGenerator(tokenizer), tokenizer) as target:
        answer = target.http.post("/v1/completions", json={**body, "stream_options": usage})
    assert answer.status_code == 200 and '"completion_tokens":5' in answer.text


def test_guidellm_is_believed_only_when_nothing_failed(tmp_path: Path) -> None:
    def output(errored: int) -> Path:
        metrics = {
            "request_totals": {"successful": 4, "errored": errored, "total": 4 + errored},
            "output_tokens_per_second": {"successful": {"mean": 81.5}},
            "time_to_first_token_ms": {"successful": {"median": 90.0}},
            "inter_token_latency_ms": {"successful": {"median": 12.0}},
        }
        path = tmp_path / "output.json"
        path.write_text(json.dumps({"benchmarks": [{"metrics": metrics}]}))
        return path

    assert read_output(output(0)) == {"output_tokens_per_s": 81.5, "ttft_ms": 90.0, "tpot_ms": 12.0}
    with pytest.raises(ValueError, match="1 of 5 requests failed"):
        read_output(output(1))


def test_guidellm_asks_servers_only() -> None:
    with pytest.raises(PeerUnavailableError, match="servers only"):
        confirm(1, 1, Fake(), drawing("guidellm"))


def test_a_rate_counts_from_the_first_request_to_the_last_token() -> None:
    answers = [Answer(sent_s=at, arrivals_s=[at + 0.5, at + 1.5], num_tokens=2, text="") for at in (10.0, 12.5)]
    assert summed_up(answers) == {"output_tokens_per_s": 1.0, "ttft_ms": 500.0, "tpot_ms": 1000.0}


def test_requirements_are_the_wheels_own_without_torch(tmp_path: Path) -> None:
    wanted = ["numpy>=2", "torch==2.13.0+cpu", "torchvision", 'six; python_version < "3"', 'x; extra == "y"', "a[b]<3"]
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some-1.dist-info/METADATA", "".join(f"Requires-Dist: {line}\n" for line in wanted))
    assert requirements_but_torch(wheel) == ["numpy>=2", "a[b]<3"]


def test_the_registry_is_whole() -> None:
    known = peers()
    assert len({peer.name for peer in known}) == len(known)
    assert {work for peer in known for work in peer.works} == set(GROUPS)
