"""A real Prometheus scrapes Ray, by the discovery file that Ray writes, while requests run on a real cluster.

Every query of every panel and rule has an answer, the figures are those of `/slo` and of who sent the requests, and a
worker that is killed is seen to go and to come back.
"""

from __future__ import annotations

import bisect
import contextlib
import ipaddress
import json
import math
import os
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.operators.prometheus import Prometheus, running_prometheus
from tests.operators.queries import BOARD, panels, recordings, series_of_alerts, variables
from tests.operators.ray_dashboard import cluster_with_dashboard
from tests.ray.served_cluster import MODEL, ServedCluster, listening_sockets

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(1800)]

WORDS = "The keeper of the lighthouse counted the ships that came by in the night and wrote them down in a book. " * 8
LONG = 600  # tokens of prompts that share nothing: decode alone would let others' tokens wait for them
PATIENCE_S = 300.0


@dataclass
class Load:
    """Streams requests until it is stopped, a few at a time, and keeps what their clients saw."""

    url: str
    seen_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # by histogram, of each request
    num_ended: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    failures: list[str] = field(default_factory=list)
    max_tokens: int = 24
    stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, client: httpx.Client, number: int) -> None:
        """`number` makes its prompt another one: of three two begin alike, and one is long and like no other."""
        drawn = random.Random(number)
        body = {
            "model": MODEL,
            "prompt": f"{WORDS}{number} " if number % 3 else [drawn.randrange(1000, 9000) for _ in range(LONG)],
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began, arrivals, usage = time.monotonic(), list[float](), None
        with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                self.failures.append(answer.read().decode())
                return
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                event = json.loads(line[6:])
                if "error" in event:
                    self.failures.append(line)
                if event.get("choices"):
                    arrivals.append(now)
                usage = event.get("usage") or usage
        if usage:
            with self._lock:
                self.num_ended += 1
                self.num_prompt_tokens += usage["prompt_tokens"]
                self.num_tokens += usage["completion_tokens"]
                self.seen_s["time_to_first_token"].append(arrivals[0] - began)
                self.seen_s["time_per_output_token"].append((arrivals[-1] - arrivals[0]) / (self.max_tokens - 1))
                self.seen_s["request_gap_p99"].append(max(after - before for before, after in pairwise(arrivals)))
                self.seen_s["request_duration"].append(time.monotonic() - began)

    @contextlib.contextmanager
    def running(self, streams: int = 3) -> Iterator[None]:
        def go_on(stream: int) -> None:
            number = stream + self.num_ended
            with httpx.Client(base_url=self.url, timeout=300) as client:
                while not self.stop.is_set():
                    self.send(client, number)
                    number += streams

        self.stop.clear()
        with ThreadPoolExecutor(streams) as threads:
            running = [threads.submit(go_on, stream) for stream in range(streams)]
            try:
                yield
            finally:
                self.stop.set()
                for one in running:
                    one.result()


@dataclass(frozen=True)
class Watched:
    cluster: ServedCluster
    prometheus: Prometheus
    load: Load
    session: Path


@pytest.fixture(scope="module")
def watched(program: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    binary = program("prometheus")
    folder = tmp_path_factory.mktemp("cluster")
    settings: dict[str, Any] = {
        "model": {"ref": MODEL},
        "kv": {
            "prefill": {"memory": "128MiB", "host_memory": "256MiB"},
            "decode": {"memory": "128MiB", "host_memory": "256MiB"},
            "disk": {"path": str(folder / "kv"), "budget": "1GiB"},
        },
        "prefill": {
            "replicas": 1,
            "num_cpus": 0.2,
            "threads": 1,
            "autoscaling": {"min_replicas": 1, "max_replicas": 1},
        },
        "decode": {"replicas": 2, "num_cpus": 0.2, "threads": 1},
        "slo": {
            "default": "chat",
            "classes": {
                "chat": {"ttft_ms": 20_000, "tpot_ms": 2000, "gap_ms": 5000, "share": 0.9},
                "batch": {"service_tiers": ["flex"]},
            },
        },
    }
    with (
        cluster_with_dashboard(settings, folder) as (cluster, session),
        running_prometheus(binary, session, tmp_path_factory.mktemp("prometheus")) as prometheus,
    ):
        yield Watched(cluster, prometheus, Load(cluster.url), session)


def patiently(holds: Callable[[], bool], told: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, told()
        time.sleep(0.5)


def _told(prometheus: Prometheus, query: str, load: Load) -> str:
    return f"{prometheus.ask(query)}, {load}"


def as_grafana_asks(query: str) -> str:
    return query.replace("$slo_class", ".*").replace("$__rate_interval", "30s")


def test_every_query_has_an_answer(watched: Watched) -> None:
    """While requests run; each query is asked until it has one."""
    asked = {name: as_grafana_asks(query) for name, query in panels().items()} | recordings() | series_of_alerts()
    asked |= {query: query.removeprefix("label_values(").partition(",")[0] for query in variables()}
    assert len(asked) > 80
    left = dict(asked)

    def all_answered() -> bool:
        for name in [name for name, query in left.items() if watched.prometheus.ask(query)]:
            del left[name]
        return not left

    with watched.load.running():
        patiently(all_answered, lambda: f"no data: {left}")
    assert not watched.load.failures


def test_figures_are_those_of_slo_and_of_who_sent_the_requests(watched: Watched) -> None:
    load, prometheus = watched.load, watched.prometheus
    with load.running():
        patiently(lambda: load.num_ended >= 60, lambda: f"{load.num_ended} requests have ended")
    _counts_are_the_loads(watched)
    # The windows slide while both are asked, so that a moment has to come when both speak of the same.
    with load.running():
        patiently(lambda: not _differences(watched), lambda: f"by /slo and by Prometheus: {_differences(watched)}")
    _counts_are_the_loads(watched)
    assert len(load.seen_s) == 4
    for name, seen_s in load.seen_s.items():
        told, between, apart = _p99s(prometheus, name, seen_s)
        assert apart <= 1, f"the P99 of {name} is {told} s by the histogram and {between} s to clients"


def _counts_are_the_loads(watched: Watched) -> None:
    """But for the first answer, that the command has shown: it is counted as well."""
    load, prometheus = watched.load, watched.prometheus
    for metric in ("ray_legato_requests_total", "ray_legato_slo_promises_total"):
        query = f"sum({metric})"
        patiently(partial(_shows, prometheus, query, load.num_ended + 1), partial(_told, prometheus, query, load))
    shown = prometheus.number("sum(ray_legato_generated_tokens_total)") - load.num_tokens
    assert 0 < shown <= 48
    assert prometheus.number("sum(ray_legato_slo_tokens_total)") == load.num_tokens + shown
    asked = prometheus.number("sum(ray_legato_prompt_tokens_total)") - load.num_prompt_tokens
    assert 0 < asked < 100


def _differences(watched: Watched) -> dict[str, tuple[float, float]]:
    """Figures of the class that are not alike, by what `/slo` says and what Prometheus says of the same moment."""
    classes = httpx.get(f"{watched.cluster.url}/slo", timeout=60).raise_for_status().json()["classes"]
    (slo,) = [row for row in classes if row["slo_class"] == "chat"]
    pairs: dict[str, float] = {
        "goodput_requests_per_second{": slo["goodput_requests_per_s"],
        "tokens_per_second{": slo["tokens_per_s"],
        "goodput_tokens_per_second{": slo["goodput_tokens_per_s"],
        'attainment{window="short",': slo["windows"]["short"]["attainment"],
        'attainment{window="long",': slo["windows"]["long"]["attainment"],
    }
    for metric, quantiles in slo["latency_ms"].items():
        for name, quantile in (("p50", "0.5"), ("p95", "0.95"), ("p99", "0.99")):
            pairs[f'latency_seconds{{metric="{metric}",quantile="{quantile}",'] = quantiles[name] / 1e3
    told = {name: watched.prometheus.number(f'max(ray_legato_slo_{name}slo_class="chat"}})') for name in pairs}
    return {
        name: (value, told[name]) for name, value in pairs.items() if not math.isclose(told[name], value, rel_tol=0.02)
    }


def _p99s(prometheus: Prometheus, name: str, seen_s: list[float]) -> tuple[float, list[float], int]:
    """As the histogram has it and as clients saw it, and how many buckets lie between. The histogram has one request
    more, the command's: by where that lies the 99th of a hundred is one of two that the clients saw."""
    buckets = f"sum by (le) (ray_legato_{name}_seconds_bucket)"
    bounds = sorted(float(dict(labels)["le"]) for labels in prometheus.ask(buckets))
    told = prometheus.number(f"histogram_quantile(0.99, {buckets})")
    last = math.ceil(0.99 * (len(seen_s) + 1))
    between = sorted(seen_s)[last - 2 : last]
    low, *_, high = [bisect.bisect_left(bounds, seconds) for seconds in (*between, between[-1])]
    bucket = bisect.bisect_left(bounds, told)
    return told, between, max(low - bucket, bucket - high, 0)


def test_what_a_gateway_tells_is_what_ray_tells(watched: Watched) -> None:
    """Every series of `/metrics` is in Ray's, and counters that stand still have the same numbers."""
    page = httpx.get(f"{watched.cluster.url}/metrics", timeout=60).text
    names = {line.partition("{")[0].partition(" ")[0] for line in page.splitlines() if not line.startswith("#")}
    names = {name for name in names if not name.endswith("_created")}

    def mirrored() -> set[str]:
        counts = watched.prometheus.ask('count by (__name__) ({__name__=~"ray_legato_.+"})')
        return {dict(labels)["__name__"].removeprefix("ray_") for labels in counts}

    patiently(lambda: names == mirrored(), lambda: str(names ^ mirrored()))
    for line in page.splitlines():
        if line.startswith(("legato_requests_total", "legato_time_to_first_token_seconds_bucket")):
            series, value = line.rsplit(" ", 1)
            patiently(partial(_shows, watched.prometheus, f"ray_{series}", float(value)), partial(str, line))


def test_a_killed_worker_is_seen_to_go_and_to_come_back(watched: Watched) -> None:
    prometheus = watched.prometheus
    serving = 'legato:pool_workers:serving{pool="decode"}'
    pending = 'ALERTS{alertname="LegatoWorkerGone", alertstate="pending", pool="decode"}'
    patiently(lambda: list(prometheus.ask(serving).values()) == [2], lambda: str(prometheus.ask(serving)))
    load = watched.load
    load.max_tokens = 2000  # so that the one that is seen to decode still does when it is killed
    watched.cluster.wait_idle()  # else what is seen may be of a request that has ended since
    with load.running(streams=1):
        patiently(lambda: bool(_decoding(watched.cluster)), lambda: "nothing is decoded")
        os.kill(_decoding(watched.cluster)[0], signal.SIGKILL)
        patiently(lambda: bool(prometheus.ask(pending)), lambda: "nobody notices")
        patiently(lambda: list(prometheus.ask(serving).values()) == [2], lambda: "nobody comes back")
        patiently(lambda: not prometheus.ask(pending), lambda: "the alert stays")
    patiently(
        lambda: prometheus.number("sum(ray_legato_retries_total)") > 0,
        lambda: str(prometheus.ask("sum by (cause) (ray_legato_retries_total)")),
    )
    assert not load.failures
    lines = [json.loads(line) for line in _gateway_log(watched.session).read_text().splitlines()]
    (ended, *_) = [line for line in lines if " ended: the worker is gone" in line["message"]]
    assert ended["request"] in ended["message"] and ended["levelname"] == "WARNING"
    assert ended["deployment"] == "legato_Gateway" and ended["replica"]


def _gateway_log(session: Path) -> Path:
    """The file that Ray's dashboard shows as the replica's log."""
    (path,) = (session / "logs" / "serve").glob("replica_legato_Gateway_*.log")
    return path


def _shows(prometheus: Prometheus, query: str, value: float) -> bool:
    return prometheus.number(query) == value


def _decoding(cluster: ServedCluster) -> list[int]:
    """The processes of decode workers that have something to decode."""
    return [w["pid"] for w in cluster.workers() if w["role"] == "decode" and w["num_running"]]


def test_the_board_lies_where_rays_grafana_finds_it(watched: Watched) -> None:
    boards = watched.session / "metrics" / "grafana" / "dashboards"
    assert (boards / "data_grafana_dashboard.json").read_text() == BOARD.read_text()
    provisioning = watched.session / "metrics" / "grafana" / "provisioning" / "dashboards" / "default.yml"
    assert str(boards) in provisioning.read_text()
    assert "Ray's dashboard: http://127.0.0.1:" in watched.cluster.log.read_text()


def test_ray_and_its_dashboard_listen_on_this_machine_alone(watched: Watched) -> None:
    listening = listening_sockets(watched.cluster.process)
    assert len(listening) > 10
    addresses = {address.removeprefix("::ffff:") for _, address, _ in listening}
    assert [address for address in addresses if not ipaddress.ip_address(address).is_loopback] == []
