"""A real browser for tests: Debian's Chromium, driven by playwright, and axe, which finds what keeps people out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

import pytest

# As root Chromium runs without its sandbox only; the others keep it from looking for its makers' hosts.
_OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@dataclass
class Seen:
    """What a page did beside what it shows."""

    errors: list[str] = field(default_factory=list)  # of its console and its script
    hosts: set[str] = field(default_factory=set)  # that it asked

    def watch(self, page: Any) -> None:
        page.on("console", lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))


@contextmanager
def chromium(program: Callable[[str], str]) -> Iterator[Any]:
    """A browser, without a window. Each of its contexts is somebody else's."""
    path = program("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("playwright is missing: pip install -e '.[dev]'", pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_OPTIONS))
        try:
            yield browser
        finally:
            browser.close()


def barriers(page: Any) -> list[str]:
    """What axe finds serious or critical on the page as it is now."""
    script = resources.files("axe_playwright_python") / "axe.min.js"
    page.evaluate(script.read_text(encoding="utf-8"))
    found = page.evaluate("rules => axe.run(document, {runOnly: {type: 'tag', values: rules}})", _RULES)
    return [
        f"{rule['id']}: {node['html'][:200]} ({node['failureSummary']})"
        for rule in found["violations"]
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]
