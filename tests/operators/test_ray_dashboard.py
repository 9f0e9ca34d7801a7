"""Ray's own dashboard in a real browser: who serves and how they are, a worker that is killed, and its replacement."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from cluster.deployment.ray_environment import free_port
from tests.operators.prometheus import Prometheus, running_prometheus
from tests.operators.queries import BOARD
from tests.operators.ray_dashboard import (
    WAIT_MS,
    InPlaceOfGrafana,
    RayDashboard,
    cluster_with_dashboard,
    in_place_of_grafana,
    ray_dashboard,
)
from tests.ray.served_cluster import MODEL, ServedCluster
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(900)]

CONFIG: dict[str, Any] = {
    "model": {"ref": MODEL, "dtype": "float32", "max_model_len": 2_048},
    "prefill": {"replicas": 1, "num_cpus": 0.2, "threads": 1},
    "decode": {"replicas": 2, "num_cpus": 0.2, "threads": 1},
    "kv": {
        "prefill": {"memory": "96MiB", "host_memory": "128MiB"},
        "decode": {"memory": "96MiB", "host_memory": "128MiB"},
    },
}
REPLICAS = {"DecodeWorker": "2", "Gateway": "1", "GlobalScheduler": "1", "PrefillWorker": "1"}
APPLICATION = "/serve/applications/legato"
QUESTION = {
    "model": MODEL,
    "prompt": "The lighthouse keeper",
    "max_tokens": 1_000,
    "temperature": 0,
    "ignore_eos": True,
}


@dataclass(frozen=True)
class Watched:
    cluster: ServedCluster
    prometheus: Prometheus
    grafana: InPlaceOfGrafana
    dashboard: RayDashboard
    session: Path


@pytest.fixture(scope="module")
def watched(browser: Any, program: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    port = free_port()
    with in_place_of_grafana() as grafana:
        env = {"RAY_PROMETHEUS_HOST": f"http://127.0.0.1:{port}", "RAY_GRAFANA_HOST": grafana.url}
        folder = tmp_path_factory.mktemp("prometheus")
        with (
            cluster_with_dashboard(CONFIG, tmp_path_factory.mktemp("cluster"), env) as (cluster, session),
            running_prometheus(program("prometheus"), session, folder, port) as prometheus,
            ray_dashboard(browser, cluster) as dashboard,
        ):
            cluster.wait_for_workers(prefill=1, decode=2)
            yield Watched(cluster, prometheus, grafana, dashboard, session)


def test_deployments_and_actors_say_what_they_are_and_how(watched: Watched, pictures: Path) -> None:
    dashboard = watched.dashboard
    dashboard.show(APPLICATION)
    dashboard.until(lambda: deployments(dashboard) == dict.fromkeys(REPLICAS, "HEALTHY"))
    assert {row["Deployment name"]: row["Num replicas"] for row in dashboard.rows()} == REPLICAS
    dashboard.picture(pictures / "ray-serve.png", 880)

    dashboard.show("/actors")
    actors = {f"{name}Worker": 0 for name in ("Prefill", "Decode")} | {"Gateway": 0, "GlobalScheduler": 0}
    dashboard.until(lambda: len(replicas(dashboard)) == 5)
    for row in replicas(dashboard):
        assert row["Class"].startswith("ServeReplica:legato:") and row["State"] == "ALIVE"
        actors[row["Class"].removeprefix("ServeReplica:legato:")] += 1
    assert {name: str(number) for name, number in actors.items()} == REPLICAS
    shown = {int(row["PID"]): row["Name"] for row in replicas(dashboard)}
    for worker in watched.cluster.workers():
        before, _, replica = shown[worker["pid"]].rpartition("#")
        assert before == f"SERVE_REPLICA::legato#{worker['role'].capitalize()}Worker"
        assert replica in worker["worker_id"]


def deployments(dashboard: RayDashboard) -> dict[str, str]:
    return {row["Deployment name"]: row["Status"] for row in dashboard.rows() if "Deployment name" in row}


def replicas(dashboard: RayDashboard) -> list[dict[str, str]]:
    """Rows of the Actors page that are Legato's."""
    return [row for row in dashboard.rows() if row.get("Name", "").startswith("SERVE_REPLICA::legato#")]


@dataclass
class Stream:
    """One answer, as it comes."""

    request: str = ""
    pieces: list[str] = field(default_factory=list)
    runs: threading.Event = field(default_factory=threading.Event)

    def read(self, url: str) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=QUESTION | {"stream": True}, timeout=600) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    self.request = event["id"]
                    self.pieces.append(event["choices"][0]["text"])
                    if len(self.pieces) == 5:
                        self.runs.set()


def test_a_killed_worker_and_its_replacement(watched: Watched, pictures: Path) -> None:
    cluster, dashboard = watched.cluster, watched.dashboard
    right = httpx.post(f"{cluster.url}/v1/completions", json=QUESTION, timeout=600).raise_for_status().json()
    cluster.wait_idle()  # no worker says any more that it decodes this one
    dashboard.show(APPLICATION)
    dashboard.until(lambda: deployments(dashboard) == dict.fromkeys(REPLICAS, "HEALTHY"))
    stream = Stream()
    with ThreadPoolExecutor(1) as threads:
        streaming = threads.submit(stream.read, cluster.url)
        assert stream.runs.wait(WAIT_MS / 1e3)
        known = set(decoders(cluster))
        cluster.wait_until(lambda: len(decoding(cluster)) == 1, "a worker decodes the stream")
        (killed,) = decoding(cluster)
        os.kill(killed, signal.SIGKILL)
        with held_back(cluster, known) as replacement:
            _sees_it_dead(dashboard, killed, pictures)
        streaming.result(WAIT_MS / 1e3)
    assert cluster.metric("legato_migrations_total") >= 1
    assert "".join(stream.pieces) == right["choices"][0]["text"]
    cluster.wait_for_workers(prefill=1, decode=2)

    dashboard.show("/actors")
    dashboard.page.get_by_label("Name", exact=True).fill("DecodeWorker")
    left = known - {killed}
    states = dict.fromkeys([*map(str, left), str(replacement)], "ALIVE") | {str(killed): "DEAD"}
    dashboard.until(lambda: {row["PID"]: row["State"] for row in replicas(dashboard)} == states)
    dashboard.picture(pictures / "ray-actors.png", 620)
    dashboard.show(APPLICATION)
    dashboard.until(lambda: deployments(dashboard) == dict.fromkeys(REPLICAS, "HEALTHY"))
    assert {row["Deployment name"]: row["Num replicas"] for row in dashboard.rows()} == REPLICAS
    _its_log_tells_of_the_request(dashboard, stream.request, pictures)


def decoding(cluster: ServedCluster) -> list[int]:
    """Processes of workers that say they decode something."""
    return [worker["pid"] for worker in cluster.workers() if worker["role"] == "decode" and worker["num_running"]]


def decoders(cluster: ServedCluster) -> list[int]:
    """Processes of decode workers, also of those that only begin."""
    found = []
    for process in psutil.Process(cluster.process.pid).children(recursive=True):
        try:
            if " ".join(process.cmdline()).startswith("ray::ServeReplica:legato:DecodeWorker"):
                found.append(process.pid)
        except psutil.NoSuchProcess:
            pass
    return found


@contextmanager
def held_back(cluster: ServedCluster, known: set[int]) -> Iterator[int]:
    """Meanwhile the worker that replaces one of `known` does not come up, however quick it is; its process."""
    wait_until(lambda: set(decoders(cluster)) - known, WAIT_MS / 1e3, "no replacement is started")
    (pid,) = set(decoders(cluster)) - known
    psutil.Process(pid).suspend()
    try:
        yield pid
    finally:
        psutil.Process(pid).resume()


def _sees_it_dead(dashboard: RayDashboard, killed: int, pictures: Path) -> None:
    """The page of the application is open."""
    ill = dict.fromkeys(REPLICAS, "HEALTHY") | {"DecodeWorker": "UNHEALTHY"}
    dashboard.until(lambda: deployments(dashboard) == ill)
    dashboard.picture(pictures / "ray-serve-killed.png", 880)
    dashboard.show(f"{APPLICATION}/DecodeWorker")
    dashboard.until(lambda: sorted(row["Status"] for row in dashboard.rows()) == ["RUNNING", "STARTING"])
    dashboard.show("/actors")
    dashboard.page.get_by_label("Name", exact=True).fill("DecodeWorker")
    dashboard.until(lambda: str(killed) in [row["PID"] for row in replicas(dashboard) if row["State"] == "DEAD"])
    (dead,) = [row for row in replicas(dashboard) if row["PID"] == str(killed)]
    assert "died" in dead["Exit detail"]


def _its_log_tells_of_the_request(dashboard: RayDashboard, request: str, pictures: Path) -> None:
    """From the Logs page to the line of the gateway's that says what became of the worker's request."""
    page = dashboard.show("/logs")
    with page.expect_response(lambda answer: "/api/v0/logs?" in answer.url) as listed:
        page.get_by_role("link", name="Node ID").click()
    assert listed.value.ok, "no logs: does another Ray on this machine have port 52365, the only one of Ray's agents?"
    page.get_by_role("link", name="serve/", exact=True).click()
    page.get_by_role("link", name="replica_legato_Gateway_").first.click()
    page.get_by_label("Keyword").fill(request)
    dashboard.until(lambda: "ended: the worker is gone" in page.inner_text("body"))
    dashboard.picture(pictures / "ray-log.png", 600)
    details = page.get_by_role("button", name="Show details").first
    details.hover(force=True)  # it is there for a pointer on its line only
    details.click()
    text = page.get_by_role("dialog").inner_text()
    found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert found["request"].startswith(request) and found["deployment"] == "legato_Gateway"


def test_the_metrics_page_shows_the_board_once_there_is_a_grafana(watched: Watched) -> None:
    dashboard, grafana = watched.dashboard, watched.grafana
    page = dashboard.show("/metrics")
    page.get_by_text("Set up Prometheus and Grafana for better Ray Dashboard experience").wait_for()

    grafana.provisioning = watched.session / "metrics" / "grafana" / "provisioning"
    page = dashboard.show("/metrics")
    page.frame_locator("iframe[title='Core Dashboard']").get_by_role("heading", name="Default Dashboard").wait_for()
    page.get_by_role("tab", name="Ray Data").click()
    frame = page.frame_locator("iframe[title='Ray Data Dashboard']")
    frame.get_by_role("heading", name="Legato").wait_for()
    titles = [panel["title"] for panel in json.loads(BOARD.read_text())["panels"]]
    assert frame.locator("p").all_inner_texts() == titles
    link = page.get_by_role("link", name="View tab in Grafana").get_attribute("href")
    assert link.startswith(f"{grafana.url}/d/legato/?")

    (source,) = yaml.safe_load((grafana.provisioning / "datasources" / "default.yml").read_text())["datasources"]
    assert f"var-datasource={source['name']}" in link
    assert source["url"] == watched.prometheus.url
    dashboard.until(lambda: watched.prometheus.number('sum(ray_legato_pool_workers{state="serving"})') == 3)
