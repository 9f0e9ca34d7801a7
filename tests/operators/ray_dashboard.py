"""Ray's dashboard for tests: a cluster that has it, its pages in a browser, and what stands where a Grafana would."""

from __future__ import annotations

import html
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from cluster.deployment.ray_access import token_path
from cluster.deployment.ray_environment import SERVE_ENVIRONMENT
from tests.ray.served_cluster import ServedCluster, served_cluster
from tests.support.threaded_server import QuietHandler, threaded_server
from tests.support.waiting import wait_until

# Ray's processes report every ten seconds, and forget what is twice as old. Figures of a minute should not be so old.
SWIFT = {"RAY_metrics_report_interval_ms": "2500"}
WAIT_MS = 240_000  # for what takes seconds on a machine that is not busy
WIDTH = 1400


@contextmanager
def cluster_with_dashboard(
    settings: dict[str, Any], folder: Path, env: dict[str, str] | None = None
) -> Iterator[tuple[ServedCluster, Path]]:
    """A cluster as `serve` starts it, once its first answer is over, and the folder of Ray's session."""
    home = Path(tempfile.mkdtemp(prefix="legato-"))  # short: Ray's sockets lie in it
    env = SERVE_ENVIRONMENT | SWIFT | {"RAY_TMPDIR": str(home)} | (env or {})
    command = (sys.executable, "-m", "cluster", "serve")
    try:
        with served_cluster(settings, folder, env=env, command=command) as cluster:
            wait_until(lambda: "Serving on" in cluster.log.read_text(), WAIT_MS / 1e3, "no first answer")
            yield cluster, (home / "ray" / "session_latest").resolve()
    finally:
        shutil.rmtree(home, ignore_errors=True)


@dataclass(frozen=True)
class RayDashboard:
    """In a browser that has given Ray's token."""

    page: Any
    url: str

    def show(self, path: str) -> Any:
        """One of its pages, loaded anew."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}/#{path}")
        return self.page

    def rows(self) -> list[dict[str, str]]:
        """Of the page's table as it is now, by the columns' headings."""
        cells = "row => [...row.cells].map(cell => cell.innerText.trim())"
        heads, *rows = self.page.evaluate(f"[...document.querySelectorAll('tr')].map({cells})") or [[]]
        return [dict(zip(heads, row, strict=True)) for row in rows]

    def until(self, holds: Callable[[], bool]) -> None:
        """The page asks Ray again every few seconds."""
        deadline = time.monotonic() + WAIT_MS / 1e3
        while not holds():
            assert time.monotonic() < deadline, self.page.inner_text("body")
            self.page.wait_for_timeout(100)

    def picture(self, path: Path, height: int) -> None:
        """Of the top of the page as it is now."""
        self.page.evaluate("scrollTo(0, 0)")
        self.page.screenshot(path=path, clip={"x": 0, "y": 0, "width": WIDTH, "height": height})


@contextmanager
def ray_dashboard(browser: Any, cluster: ServedCluster) -> Iterator[RayDashboard]:
    found = re.search(r"^Ray's dashboard: (http://127\.0\.0\.1:\d+)", cluster.log.read_text(), re.MULTILINE)
    assert found, cluster.log.read_text()
    context = browser.new_context(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    try:
        page.goto(f"{found[1]}/#/serve")
        page.get_by_label("Authentication Token").and_(page.locator("input")).fill(token_path().read_text())
        with page.expect_navigation():
            page.get_by_role("button", name="Submit").click()
        yield RayDashboard(page, found[1])
    finally:
        context.close()


# There is no Grafana in Debian's packages, nor in Python's.


@dataclass
class InPlaceOfGrafana:
    """Says that it is healthy, as Grafana does, and finds boards as one would that Ray's files provision; of a board it
    shows the title and the panels' titles. It draws nothing."""

    url: str
    provisioning: Path | None = None
    """Ray's, once it is there; without, it says that it is not healthy."""

    def boards(self) -> list[dict[str, Any]]:
        assert self.provisioning is not None
        (provider,) = yaml.safe_load((self.provisioning / "dashboards" / "default.yml").read_text())["providers"]
        return [json.loads(path.read_text()) for path in sorted(Path(provider["options"]["path"]).glob("*.json"))]

    def answer(self, path: str) -> tuple[int, str, str]:
        if self.provisioning is None:
            return 503, "text/plain", "not yet"
        if path == "/api/health":
            return 200, "application/json", json.dumps({"database": "ok"})
        if path.startswith("/d/"):
            uid = path.split("/")[2]
            boards = [board for board in self.boards() if board["uid"] == uid]
            if len(boards) == 1:  # of two with one uid Grafana takes neither
                titles = "".join(f"<p>{html.escape(panel['title'])}</p>" for panel in boards[0]["panels"])
                return 200, "text/html", f"<h1>{html.escape(boards[0]['title'])}</h1>{titles}"
        return 404, "text/plain", "no such board"


@contextmanager
def in_place_of_grafana() -> Iterator[InPlaceOfGrafana]:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            status, kind, body = grafana.answer(urlsplit(self.path).path)
            self.send_response(status)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(body.encode())

    with threaded_server(Handler) as url:
        grafana = InPlaceOfGrafana(url)
        yield grafana
