"""The real thing: Ray, Serve, a gateway, a scheduler, a prefill and a decode worker in processes of their own.

One cluster for the whole file, started as a user starts it, in float32 so that tokens can be compared, with block sizes
that differ at the two ends and a decode pool so small that sequences are preempted.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import json
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cluster.http.server.connection import ACCEPTED_PER_TURN
from engine.text.tokenizer import Tokenizer
from tests.ray.http_generation import Answer, complete_all, greedy_body, http_client, stream_events
from tests.ray.served_cluster import (
    MODEL,
    START_TIMEOUT_S,
    ServedCluster,
    listening_sockets,
    post_job,
    served_cluster,
    words_of,
)
from tests.support.exactness import LONGEST, asked_of_all, count_near_ties, exactness_prompts, hf_reference
from tests.support.openai_conformance import CHECKS, Target, structured_answers_parse
from tests.support.otlp_receiver import Receiver, assert_filled, attributes, children, otlp_receiver, roots
from tests.support.thoroughness import THOROUGH, in_test_long

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(1800)]

NUM_TOKENS = 64 if THOROUGH else 32
NUM_LINES = 1000 if THOROUGH else 200  # of a batch
CONFIG: dict[str, Any] = {
    "model": {"ref": MODEL, "dtype": "float32"},
    # The device alone: sequences that do not fit are preempted and computed again. test_ray_tiers has the other tiers.
    "kv": {
        "layerkv": "off",
        "prefill": {"block_size": 16, "memory": "256 blocks", "host_memory": 0},
        # 2,048 tokens: about twenty of the test's sequences, while up to 64 arrive.
        "decode": {"block_size": 32, "memory": "64 blocks", "host_memory": 0},
    },
    "prefill": {"threads": 1, "chunk_tokens": 96},
    "decode": {"threads": 1, "max_num_seqs": 40},
    "slo": {"default": "plain", "classes": {"plain": {}, "batch": {"service_tiers": ["flex"]}}},
    "transfer": {"transport": "shm"},
    "tuning": {
        "PrefillWorkerConfig": {"calibration_s": 0.0},
        "DecodeWorkerConfig": {"calibration_s": 0.0, "reserve_wait_s": 240.0, "lease_ttl_s": 30.0},
    },
}
SECRET = "the secret of these processes only"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, smollm2_folder: Path, receiver: Receiver
) -> Iterator[ServedCluster]:
    """Ends in order, whatever the tests did to its workers and its gateway."""
    folder = tmp_path_factory.mktemp("cluster")
    config = {**CONFIG, "gateway": {"storage": str(folder / "storage")}}
    # What clients trace is traced, and nothing else.
    tracing = {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{receiver.endpoint}/v1/traces",
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "60",  # the receiver may be kept from answering, and is to get nothing twice
    }
    with served_cluster(config, folder, env={"LEGATO_SECRET": SECRET, **tracing}) as running:
        running.wait_for_workers(prefill=1, decode=1)
        yield running
    assert running.process.returncode == 0
    last_words = running.log.read_text().split("Stopping.")[1]
    assert not re.search("fail|error|retried|not end", last_words, re.IGNORECASE), last_words


@pytest.fixture(scope="module")
def prompts(smollm2_folder: Path) -> list[list[int]]:
    return exactness_prompts(Tokenizer(smollm2_folder), long_tokens=300)


def test_first_answer_is_shown(cluster: ServedCluster) -> None:
    cluster.wait_until(lambda: "Serving on" in cluster.log.read_text(), "the first answer is shown")
    told = cluster.log.read_text()
    assert "The capital of France is Paris." in told
    # And before it what came up, in Serve's words and in the gateway's.
    progress = told.partition("Starting Legato:")[2].partition("> What is the capital")[0]
    for line in ("GlobalScheduler: 1 running", "Gateway: 1 running"):
        assert f" s  {line}\n" in progress
    assert re.search(r" s  Ready workers: .*1 decode\n", progress)  # who can serve alone while the other one loads


def test_nothing_listens_beyond_loopback(cluster: ServedCluster) -> None:
    """Ray's GCS, raylet, agents and workers, HAProxy's statistics and metrics, Serve's gRPC, Legato's own."""
    listening = listening_sockets(cluster.process)
    programs = {program for program, _, _ in listening}
    assert {"gcs_server", "raylet", "haproxy"} <= programs, programs
    assert len(listening) > 20, listening
    assert [
        found for found in listening if not ipaddress.ip_address(found[1].removeprefix("::ffff:")).is_loopback
    ] == []


def test_no_port_is_one_that_another_cluster_on_the_machine_would_have(cluster: ServedCluster) -> None:
    """By default Serve opens the same ones for each: whoever asked one cluster was answered by the other."""
    listening = listening_sockets(cluster.process)
    assert {"haproxy", "ray::ProxyActor"} <= {program for program, _, _ in listening}, listening
    assert not {port for _, _, port in listening} & {8404, 8500, 9101, 30_000}


def test_the_gateway_accepts_many_connections_in_a_turn(cluster: ServedCluster) -> None:
    """Of the one HTTP socket that Serve made, its server has as many handles."""
    handles: Counter[str] = Counter()
    for process in psutil.Process(cluster.process.pid).children(recursive=True):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended
            for file in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # it is closed by now
                    handles[f"{process.pid} {file.readlink()}"] += 1
    num_handles = [number for opened, number in handles.items() if "socket:" in opened]
    assert ACCEPTED_PER_TURN in num_handles, handles


def test_nobody_else_runs_jobs_here(cluster: ServedCluster) -> None:
    """The job agent takes a command; other users of the machine reach its port, others none."""
    elsewhere = {
        found.address
        for addresses in psutil.net_if_addrs().values()
        for found in addresses
        if found.family == socket.AF_INET and not ipaddress.ip_address(found.address).is_loopback
    }

    def is_refused() -> bool:
        refused = 0
        for _, _, port in listening_sockets(cluster.process):
            for host in elsewhere:
                with pytest.raises(httpx.ConnectError):
                    post_job(host, port)
            with contextlib.suppress(httpx.HTTPError):
                answer = post_job("127.0.0.1", port)
                assert answer.status_code >= 400, f"port {port} took the job: {answer.text}"
                refused += answer.status_code == 401
        return refused >= 1

    cluster.wait_until(is_refused, "the job agent asks for a token")


def test_the_secret_is_in_no_log_and_on_no_command_line(cluster: ServedCluster) -> None:
    """Whatever Ray, Serve and Legato have written so far, and what every user of the machine sees of processes."""
    processes = [psutil.Process(cluster.process.pid), *psutil.Process(cluster.process.pid).children(recursive=True)]
    lines = [" ".join(words_of(process)) for process in processes]
    (session,) = {found.group(1) for line in lines if (found := re.search(r"--session[-_]dir=(\S+)", line))}
    logs = [cluster.log, *(path for path in Path(session).rglob("*") if path.is_file())]
    assert {"gcs_server.out", "raylet.out"} <= {path.name for path in logs} and any("serve" in str(p) for p in logs)
    raw = SECRET.encode()
    for form in (raw, raw.hex().encode(), base64.b64encode(raw)):
        assert [path for path in logs if form in _content(path)] == []
        assert [line for line in lines if form in line.encode()] == []


def _content(path: Path) -> bytes:
    """Empty if another file has taken its place meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


def test_workers_are_separate_processes(cluster: ServedCluster) -> None:
    workers = cluster.workers()
    assert sorted(worker["role"] for worker in workers) == ["decode", "prefill"]
    pids = {worker["pid"] for worker in workers}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert all(psutil.pid_exists(pid) for pid in pids)


def test_greedy_equals_hugging_face(cluster: ServedCluster, prompts: list[list[int]], smollm2_folder: Path) -> None:
    """32 prompts x 32 tokens, twice as many of each in `make test-long`; float32, over HTTP, through two processes,
    shared memory, and preemption."""
    prompts = asked_of_all(prompts)
    bodies = [greedy_body(MODEL, prompt, NUM_TOKENS) for prompt in prompts]
    answers = asyncio.run(complete_all(cluster.url, bodies, concurrency=64))
    assert [answer.error for answer in answers] == [None] * len(answers)
    ours = [answer.token_ids for answer in answers]
    references = hf_reference(smollm2_folder, prompts, NUM_TOKENS, guesses=() if THOROUGH else ours)
    num_ties = count_near_ties(ours, references, [answer.logprobs for answer in answers])
    print(f"{num_ties} of {len(prompts)} prompts left the reference at a near-tie")
    assert num_ties <= 3
    cluster.wait_idle()


def test_shared_prefix_is_reused_and_exact(cluster: ServedCluster, prompts: list[list[int]]) -> None:
    """The same long prompt again: most of it comes from the prefill worker's prefix cache, and nothing changes."""
    body = greedy_body(MODEL, prompts[LONGEST], NUM_TOKENS)
    first, second = (asyncio.run(complete_all(cluster.url, [body], 1))[0] for _ in range(2))
    assert second.cached_tokens >= len(prompts[LONGEST]) - 32
    assert second.token_ids == first.token_ids


def test_seeded_sampling_does_not_depend_on_company(cluster: ServedCluster, prompts: list[list[int]]) -> None:
    bodies = [
        greedy_body(MODEL, prompt, 24, temperature=1.0, top_p=0.95, seed=number)
        for number, prompt in enumerate(prompts[: 32 if THOROUGH else 16])
    ]
    together = asyncio.run(complete_all(cluster.url, bodies, concurrency=32))
    alone = asyncio.run(complete_all(cluster.url, bodies[::4], concurrency=1))
    assert [answer.token_ids for answer in alone] == [answer.token_ids for answer in together[::4]]


def test_a_traced_request_is_told_with_the_parts_that_everybody_had_in_it(
    cluster: ServedCluster, receiver: Receiver, prompts: list[list[int]]
) -> None:
    """By OTLP, as a part of its client's trace; the same as `/cluster/requests` tells."""
    body, headers = greedy_body(MODEL, prompts[1], 8), {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    untraced, traced = (
        httpx.post(f"{cluster.url}/v1/completions", json=body, headers=found, timeout=300).raise_for_status().json()
        for found in ({}, headers)
    )
    (root,) = roots(receiver, 1)
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert attributes(root)["gen_ai.response.id"] == traced["id"] != untraced["id"]
    spans = children(receiver, root)
    assert_filled(root, spans)
    told = httpx.get(f"{cluster.url}/cluster/requests/{traced['id']}", timeout=60).raise_for_status().json()
    parts = [(part["name"], part["worker"]) for part in told["parts"]]
    assert [(span.name, attributes(span).get("legato.worker")) for span in spans] == parts
    assert sum(part["seconds"] for part in told["parts"]) == pytest.approx(told["total_s"], abs=1e-6)
    assert (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9 == pytest.approx(told["total_s"], abs=1e-6)
    assert {"parse", "place", "prefill", "decode"} <= {name for name, _ in parts}
    workers = {worker["worker_id"]: worker["role"] for worker in cluster.workers()}
    assert {workers[worker] for name, worker in parts if name == "decode"} == {"decode"}
    assert {worker for _, worker in parts if worker} <= workers.keys()


# By a model of a millisecond a step: tests/ray/deployed/test_ray_requests.py.
@pytest.mark.parametrize("check", (structured_answers_parse, *in_test_long(*CHECKS)), ids=lambda check: check.__name__)
def test_openai_conformance(cluster: ServedCluster, check: Any) -> None:
    with httpx.Client(base_url=cluster.url, timeout=120) as http, cluster.client() as client:
        check(Target(client=client, http=http, model=MODEL))


def test_how_promises_are_kept(cluster: ServedCluster, prompts: list[list[int]]) -> None:
    body = {"model": MODEL, "prompt": prompts[0], "max_tokens": 5, "ignore_eos": True, "service_tier": "flex"}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, headers={"x-slo-ttft-ms": "600000"}, timeout=120)
    assert answer.json()["service_tier"] == "flex" and answer.headers["x-slo-class"] == "batch"

    def figures(kind: str, **wanted: str) -> dict[str, Any]:
        rows = httpx.get(f"{cluster.url}/slo", timeout=60).json()[kind]
        return next(dict(row) for row in rows if wanted.items() <= row.items())

    cluster.wait_until(lambda: figures("classes", slo_class="batch")["counts"]["met_tokens"] >= 5, "it is counted")
    for role, metric in (("prefill", "ttft"), ("prefill", "queue"), ("decode", "gap"), ("decode", "tpot")):
        worker = figures("workers", slo_class="batch", worker=cluster.worker(role)["worker_id"])
        assert worker["latency_ms"][metric]["p50"] > 0, metric
    assert cluster.metric("legato_slo_promises_total", slo_class="batch", result="missed") == 0
    assert cluster.metric("legato_slo_attainment", slo_class="batch", window="short") == 1


def test_disconnected_client_frees_everything_at_once(cluster: ServedCluster, prompts: list[list[int]]) -> None:
    async def leave_after_a_few_tokens() -> None:
        async with http_client(cluster.url) as client:
            # Half a minute of tokens.
            async for answer in stream_events(client, greedy_body(MODEL, prompts[40], 1600), Answer()):
                if len(answer.token_ids) >= 5:
                    return

    def computed() -> float:
        """Tokens of all steps of decode, as they were told last."""
        return cluster.metric("legato_worker_step_tokens_total", role="decode")

    cluster.wait_idle()
    at_first = computed()
    asyncio.run(leave_after_a_few_tokens())
    left, when_it_left = time.monotonic(), computed()
    cluster.wait_until(lambda: computed() > at_first, "what was computed is told")
    cluster.wait_idle()
    print(f"idle {time.monotonic() - left:.2f} s after the client left")
    assert computed() - when_it_left < 1600 / 2, "it went on without its client"


def test_decode_killed_in_mid_stream(cluster: ServedCluster, prompts: list[list[int]], smollm2_folder: Path) -> None:
    """The streams go on with the same tokens once Serve has put a new worker in its place."""
    num_tokens = 96  # seconds of them
    chosen = [4, 9, 33, LONGEST]

    async def run(answers: list[Answer]) -> bool:
        """Whether the kill was in mid-stream, and not too late."""
        all_stream = asyncio.Event()
        async with http_client(cluster.url) as client:

            async def one(number: int, answer: Answer) -> None:
                async for _ in stream_events(client, greedy_body(MODEL, prompts[number], num_tokens), answer):
                    if min(len(other.token_ids) for other in answers) >= 5:
                        all_stream.set()

            tasks = [asyncio.create_task(one(*pair)) for pair in zip(chosen, answers, strict=True)]
            await asyncio.wait_for(all_stream.wait(), START_TIMEOUT_S)
            pid = (await asyncio.to_thread(cluster.worker, "decode"))["pid"]
            if in_time := max(len(answer.token_ids) for answer in answers) < num_tokens:
                os.kill(pid, signal.SIGKILL)
            await asyncio.gather(*tasks)
        return in_time

    for _ in range(5):
        answers = [Answer() for _ in chosen]
        was_killed = asyncio.run(run(answers))
        assert [answer.error for answer in answers] == [None] * len(chosen)
        asked, ours = [prompts[number] for number in chosen], [answer.token_ids for answer in answers]
        references = hf_reference(smollm2_folder, asked, num_tokens, guesses=() if THOROUGH else ours)
        for number, reference, answer in zip(chosen, references, answers, strict=True):
            assert answer.token_ids == reference.token_ids, f"prompt {number}"
        if was_killed:
            break
    assert was_killed, "it was over five times before the worker could be killed"
    cluster.wait_for_workers(prefill=1, decode=1)
    cluster.wait_idle()


def test_prefill_killed_in_the_middle_of_a_transfer(cluster: ServedCluster, smollm2_folder: Path) -> None:
    """The prompt is computed again, here by the decode worker or the prefill worker's successor: the same tokens."""
    story = exactness_prompts(Tokenizer(smollm2_folder), long_tokens=900)[LONGEST]

    async def run(prompt: list[int]) -> Answer | None:
        """None if the answer was faster than the kill."""
        answer = Answer()
        async with http_client(cluster.url) as client:

            async def read() -> None:
                async for _ in stream_events(client, greedy_body(MODEL, prompt, 16), answer):
                    pass

            task = asyncio.create_task(read())
            # About ten chunks of 96 tokens, each streamed out while the next is computed.
            await asyncio.to_thread(_wait_for_transfer, cluster, answer)
            if not (missed := bool(answer.token_ids)):
                await asyncio.to_thread(cluster.kill, "prefill")
            await task
        return None if missed else answer

    for start in range(5):  # a beginning that no worker has cached
        answer = asyncio.run(run(story[start:]))
        if answer is not None:
            break
    assert answer is not None, "the transfer was over five times before it was seen"
    (reference,) = hf_reference(smollm2_folder, [story[start:]], 16)
    assert answer.error is None
    assert answer.token_ids == reference.token_ids
    cluster.wait_for_workers(prefill=1, decode=1)
    cluster.wait_idle()


def _wait_for_transfer(cluster: ServedCluster, answer: Answer) -> None:
    """Until the prefill worker holds the sequence and the decode worker its reservation; or it is too late."""
    cluster.wait_until(
        lambda: (
            bool(answer.token_ids)
            or (cluster.worker("prefill")["num_leases"] == 1 and cluster.worker("decode")["num_leases"] == 1)
        ),
        "the transfer is under way",
    )


def test_a_batch_and_a_response_survive_workers_and_gateway(cluster: ServedCluster) -> None:
    """Each line is answered once, in order, with the tokens that it gets alone; and what was stored is followed."""
    names = [f"line-{number}" for number in range(NUM_LINES)]
    bodies = {name: {"model": MODEL, "prompt": f"{name} says", "max_tokens": 8, "temperature": 0} for name in names}
    url = "/v1/completions"
    text = "".join(f"{json.dumps({'custom_id': name, 'url': url, 'body': bodies[name]})}\n" for name in names)

    def ask(method: str, path: str, **sent: Any) -> httpx.Response:
        return httpx.request(method, f"{cluster.url}{path}", timeout=60, **sent).raise_for_status()

    file = ask("POST", "/v1/files", data={"purpose": "batch"}, files={"file": text.encode()}).json()
    fields = {"input_file_id": file["id"], "endpoint": url, "completion_window": "1h"}
    batch = ask("POST", "/v1/batches", json=fields).json()
    stored = ask("POST", "/v1/responses", json={"model": MODEL, "input": "Hello.", "max_output_tokens": 4}).json()

    def found() -> dict[str, Any]:
        return dict(ask("GET", f"/v1/batches/{batch['id']}").json())

    def wait_for(num_answered: int) -> None:
        cluster.wait_until(
            lambda: found()["request_counts"]["completed"] >= num_answered, f"{num_answered} lines are answered"
        )
        assert found()["status"] == "in_progress", "too late to kill in mid-batch"

    if THOROUGH:  # else its death is that of `test_decode_killed_in_mid_stream`
        wait_for(10)
        cluster.kill("decode")
    wait_for(NUM_LINES // 4)
    # Before the other worker: a gateway that saw both go may hold them against the line it was trying alone just then.
    cluster.kill_gateway()
    wait_for(NUM_LINES * 3 // 10)
    cluster.kill("prefill")
    cluster.wait_until(lambda: found()["status"] == "completed", "the batch is completed", timeout_s=900)
    ended = found()
    errors = ended["error_file_id"] and ask("GET", f"/v1/files/{ended['error_file_id']}/content").text
    assert not errors, errors
    assert ended["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    rows = [json.loads(row) for row in ask("GET", f"/v1/files/{ended['output_file_id']}/content").text.splitlines()]
    assert [row["custom_id"] for row in rows] == names
    for row in rows[:: NUM_LINES // 10]:
        alone = ask("POST", url, json=bodies[row["custom_id"]]).json()
        assert row["response"]["body"]["choices"] == alone["choices"]
    assert ask("GET", f"/v1/responses/{stored['id']}").json() == stored
    follows = {"model": MODEL, "input": "Go on.", "previous_response_id": stored["id"], "max_output_tokens": 4}
    answered = ask("POST", "/v1/responses", json=follows).json()
    assert answered["usage"]["input_tokens"] > stored["usage"]["total_tokens"]
    cluster.wait_for_workers(prefill=1, decode=1)
    cluster.wait_idle()
