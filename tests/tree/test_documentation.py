"""What the documentation names is there: pages, headings, files, commands, configurations and metrics."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import PARTS
from cluster.deployment.ray_environment import RAY_ENVIRONMENT, SERVE_ENVIRONMENT

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("benchmarks", "cluster", "decode_workers", "docs", "engine", "kernels", "kv_transfer", "prefill_workers")
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
# The others tell what was tried and decided once, with the names of that time.
CURRENT = [page for page in PAGES if page.name != "log.md" and page.parent.name != "decisions"]


def _names(pages: list[Path], pattern: str) -> Iterator[tuple[Path, str]]:
    for page in pages:
        for name in sorted(set(re.findall(pattern, page.read_text(encoding="utf-8")))):
            yield page, name


def _prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?) *$", _prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _told(found: Iterator[str]) -> None:
    missing = list(found)
    assert not missing, "\n".join(missing)


@pytest.fixture(scope="module")
def anchors() -> dict[Path, set[str]]:
    return {page: _anchors(page) for page in PAGES}


def test_links_lead_somewhere(anchors: dict[Path, set[str]]) -> None:
    def broken() -> Iterator[str]:
        for page in PAGES:
            for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
                name, _, anchor = link.partition("#")
                target = (page.parent / name).resolve() if name else page
                if re.match(r"\w+:", link):
                    continue
                if not target.exists() or (anchor and anchor not in anchors[target]):
                    yield f"{page.relative_to(ROOT)} links to {link}"

    _told(broken())


def test_files_that_are_named_exist() -> None:
    """By their names, or with some of the folders that they are in."""
    folders = [ROOT / name for name in (*FOLDERS, "ray_configs", "tests")]
    found = [*ROOT.iterdir(), *(path for folder in folders for path in folder.rglob("*.*"))]
    paths = [path.as_posix() for path in found]

    def missing() -> Iterator[str]:
        for page, name in _names(CURRENT, r"`((?:\w[\w.-]*/)*\w[\w.-]*\.(?:py|yaml|md))`"):
            if not any(path.endswith(f"/{name}") for path in paths):
                yield f"{page.relative_to(ROOT)} names {name}"

    _told(missing())


def test_commands_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))

    def missing() -> Iterator[str]:
        for page, module in _names(CURRENT, r"python -m ((?:benchmarks|cluster|kernels)(?:\.\w+)*)"):
            if importlib.util.find_spec(module) is None:
                yield f"{page.relative_to(ROOT)}: python -m {module}"
        for page, part in _names(CURRENT, r"python -m benchmarks (\w+)"):
            if part not in PARTS:
                yield f"{page.relative_to(ROOT)}: python -m benchmarks {part}"
        for page, target in _names(CURRENT, r"(?:`|^)make ([a-z-]+)"):
            if target not in targets:
                yield f"{page.relative_to(ROOT)}: make {target}"

    _told(missing())


@pytest.mark.parametrize("page", ["README.md", "docs/operations.md"])
def test_every_configuration_is_listed(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [path.name for path in sorted((ROOT / "ray_configs").glob("*.yaml")) if path.name not in text] == []


def test_every_page_is_listed_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").glob("*.md"))]
    assert [page for page in pages if f"]({page})" not in text] == []


def test_metrics_are_listed_and_no_others() -> None:
    told = set(re.findall(r"`(legato_\w+)", (ROOT / "docs/operations.md").read_text(encoding="utf-8")))
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "cluster").rglob("*.py"))
    made = set(re.findall(r'"(legato_\w+)"', sources))
    assert {name.removesuffix("_total") for name in told} == {name.removesuffix("_total") for name in made}


def test_variables_that_legato_sets_are_listed() -> None:
    """For clusters that others start."""
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    assert [name for name in RAY_ENVIRONMENT | SERVE_ENVIRONMENT if name not in text] == []
