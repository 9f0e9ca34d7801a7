"""What the documentation names is there: pages, paths, modules, commands, settings, configurations and metrics."""

from __future__ import annotations

import ast
import importlib.util
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from fastapi.routing import APIRoute
from pydantic import BaseModel

from cluster.config.table import setting_rows
from cluster.deployment.ray_environment import RAY_ENVIRONMENT, SERVE_ENVIRONMENT
from cluster.http.app import MODULES
from cluster.http.openai.schemas import ChatBody, ChatMessage, CompletionBody, StreamOptions

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("benchmarks", "cluster", "decode_workers", "docs", "engine", "kernels", "kv_transfer", "prefill_workers")
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
# The log tells what was tried once, with the names of that time. A decision's files are named as they are called now,
# its commands and settings as they were.
NAMED = [page for page in PAGES if page.parent.name != "log"]
CURRENT = [page for page in NAMED if page.parent.name != "decisions"]
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
# What a newcomer reads: every path, module and setting that these pages name in backticks is there.
FIRST = [ROOT / "README.md", ROOT / "docs" / "README.md", ROOT / "docs" / "architecture.md", *GUIDE]
LOG = ROOT / "docs" / "log"


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


def test_pictures_are_shown_and_made_by_a_test() -> None:
    """In the guide alone, and by the tests that look at the same things (`make test-operators`)."""
    shown = {name for _, name in _names(PAGES, r"pictures/([\w-]+\.png)")}
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "operators").glob("*.py")]
    made = {name for text in sources for name in re.findall(r'pictures / "([\w-]+\.png)"', text)}
    assert {path.name for path in (ROOT / "docs" / "guide" / "pictures").iterdir()} == shown == made


def test_files_that_are_named_exist() -> None:
    """By their names, or with some of the folders that they are in."""
    folders = [ROOT / name for name in (*FOLDERS, "ray_configs", "tests")]
    found = [*ROOT.iterdir(), *(path for folder in folders for path in folder.rglob("*.*"))]
    paths = [path.as_posix() for path in found]

    def missing() -> Iterator[str]:
        for page, name in _names(NAMED, r"`((?:\w[\w.-]*/)*\w[\w.-]*\.(?:py|yaml|md))`"):
            if not any(path.endswith(f"/{name}") for path in paths):
                yield f"{page.relative_to(ROOT)} names {name}"

    _told(missing())


def test_paths_that_newcomers_read_exist() -> None:
    """From the repository's root or from the page's folder: files, and folders with a slash at their end."""

    def missing() -> Iterator[str]:
        for page, name in _names(FIRST, rf"`((?:{'|'.join((*FOLDERS, 'ray_configs', 'tests'))})/[\w./-]*)`"):
            if not (ROOT / name).exists():
                yield f"{page.relative_to(ROOT)} names {name}"

    _told(missing())


def test_every_folder_of_the_product_is_in_the_layout() -> None:
    """Those of two levels; deeper ones are rooms of theirs."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    product = [ROOT / name for name in FOLDERS if name not in ("benchmarks", "docs")]
    folders = [*product, *(path.parent for top in product for path in top.glob("*/__init__.py"))]
    names = [f"{folder.relative_to(ROOT).as_posix()}/" for folder in folders]
    assert [name for name in names if f"| `{name}` |" not in text] == []


def test_modules_that_newcomers_read_exist() -> None:
    """By their dotted names; the last part may be a class or a function of the module."""

    def missing() -> Iterator[str]:
        for page, name in _names(FIRST, rf"`((?:{'|'.join(FOLDERS)})(?:\.\w+)+)(?:\(\))?`"):
            if not re.search(r"\.(?:py|md|yaml|json)$", name) and not _is_there(name):
                yield f"{page.relative_to(ROOT)} names {name}"

    _told(missing())


def test_what_docstrings_and_comments_point_to_exists() -> None:
    """Files; modules by their dotted names, and what they name of one. Who changes something follows these."""
    modules = rf"(?:{'|'.join(FOLDERS)})(?:\.\w+)+"
    test_files = {path.name for path in (ROOT / "tests").rglob("*.py")}

    def missing() -> Iterator[str]:
        for page in [page for folder in FOLDERS for page in (ROOT / folder).rglob("*.py")]:
            told = _docstrings_and_comments(page)
            for name in re.findall(rf"`({modules})`", told):
                if not _is_there(name):
                    yield f"{page.relative_to(ROOT)} names {name}"
            for name, module in re.findall(rf"`(\w+)`\s+of\s+`({modules})`", told):
                if not _is_there(f"{module}.{name}"):
                    yield f"{page.relative_to(ROOT)} names {name} of {module}"
            for file in re.findall(r"`([\w./]+\.(?:py|cpp|md))`", told):
                if not (ROOT / file).exists() and not (page.parent / file).exists() and file not in test_files:
                    yield f"{page.relative_to(ROOT)} names {file}"

    _told(missing())


def _docstrings_and_comments(page: Path) -> str:
    source = page.read_text(encoding="utf-8")
    comments = [
        token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    docstrings = [
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return " ".join([*comments, *docstrings])


def test_messages_point_to_what_a_user_has() -> None:
    """Who installed a wheel has no docs/: a message names what can be typed."""

    def pointing() -> Iterator[str]:
        for page in [page for folder in FOLDERS if folder != "benchmarks" for page in (ROOT / folder).rglob("*.py")]:
            if "docs" not in (source := page.read_text(encoding="utf-8")):
                continue
            tree = ast.parse(source)
            docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in (node for node in ast.walk(tree) if isinstance(node, ast.Constant)):
                if node not in docstrings and "docs/" in str(node.value):
                    yield f"{page.relative_to(ROOT)}, line {node.lineno}: {node.value!r}"

    _told(pointing())


def _is_there(dotted: str) -> bool:
    """A module, what it defines, or a member of a class of its."""
    parts = dotted.split(".")
    for count in (len(parts), len(parts) - 1, len(parts) - 2):
        path = ROOT.joinpath(*parts[:count])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.exists():
            text = file.read_text(encoding="utf-8")
            return all(re.search(rf"^ *(?:(?:class|def|async def) )?{n}\b", text, re.MULTILINE) for n in parts[count:])
    return False


def test_settings_that_the_guide_names_exist() -> None:
    """A leaf of the tree, or a branch of it."""
    paths = [path for path, _, _, _ in setting_rows()]
    roots = "|".join({path.partition(".")[0] for path in paths if "." in path})

    def missing() -> Iterator[str]:
        for page, name in _names(FIRST, rf"`((?:{roots})(?:\.\w+)+)(?<!\.yaml)(?:: [^`]*)?`"):
            if not any(path == name or path.startswith(f"{name}.") for path in paths):
                yield f"{page.relative_to(ROOT)} names the setting {name}"

    _told(missing())


def test_commands_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    parts = set(re.findall(r'"(\w+)": \("benchmarks\.', (ROOT / "benchmarks" / "__main__.py").read_text()))

    def missing() -> Iterator[str]:
        for page, module in _names(CURRENT, r"python -m ((?:benchmarks|cluster|kernels)(?:\.\w+)*)"):
            if importlib.util.find_spec(module) is None:
                yield f"{page.relative_to(ROOT)}: python -m {module}"
        for page, part in _names(CURRENT, r"python -m benchmarks (\w+)"):
            if part not in parts:
                yield f"{page.relative_to(ROOT)}: python -m benchmarks {part}"
        for page, target in _names(CURRENT, r"(?:`|^)make ([a-z-]+)"):
            if target not in targets:
                yield f"{page.relative_to(ROOT)}: make {target}"

    _told(missing())


@pytest.mark.parametrize("page", ["README.md", "docs/guide/start.md"])
def test_every_configuration_is_listed(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [path.name for path in sorted((ROOT / "ray_configs").glob("*.yaml")) if path.name not in text] == []


def test_every_page_is_listed_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = [path.relative_to(ROOT).as_posix() for path in (*sorted((ROOT / "docs").glob("*.md")), *GUIDE)]
    assert [page for page in pages if f"]({page})" not in text] == []


def test_every_page_is_listed_in_the_index() -> None:
    docs = ROOT / "docs"
    text = (docs / "README.md").read_text(encoding="utf-8")
    pages = [
        path.relative_to(docs).as_posix()
        for path in (*sorted(docs.glob("*.md")), *GUIDE)
        if path.parent != docs or path.name != "README.md"
    ]
    assert [page for page in pages if f"]({page})" not in text] == []


def test_every_page_of_the_log_is_listed_and_begins_with_what_is_known() -> None:
    """Three lines, before the first entry; and the entries come newest first."""
    index = (LOG / "README.md").read_text(encoding="utf-8")
    for page in sorted(LOG.glob("*.md")):
        if page.name == "README.md":
            continue
        head, *entries = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert f"]({page.name})" in index, f"{page.name} is not in docs/log/README.md"
        assert len(re.findall(r"^\* ", head, flags=re.MULTILINE)) == 3, f"{page.name} does not begin with three lines"
        dates = [entry[:10] for entry in entries]
        assert dates and dates == sorted(dates, reverse=True), f"{page.name} is not newest first"


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
def test_what_the_guide_shows_as_yaml_is_yaml(page: Path) -> None:
    for block in re.findall(
        r"^ *```yaml\n(.*?)^ *```$", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    ):
        assert [*yaml.safe_load_all(block)] != []


def test_metrics_are_listed_and_no_others() -> None:
    told = set(re.findall(r"`(legato_\w+)", (ROOT / "docs/guide/metrics.md").read_text(encoding="utf-8")))
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "cluster").rglob("*.py"))
    made = set(re.findall(r'"(legato_\w+)"', sources))
    assert {name.removesuffix("_total") for name in told} == {name.removesuffix("_total") for name in made}


def test_variables_that_legato_sets_are_listed() -> None:
    """For clusters that others start."""
    text = (ROOT / "docs/guide/configuration.md").read_text(encoding="utf-8")
    assert [name for name in RAY_ENVIRONMENT | SERVE_ENVIRONMENT if name not in text] == []


def test_endpoints_are_listed() -> None:
    """Those of the server's schema, of which others are spellings. Files and batches have one row."""
    text = (ROOT / "docs/guide/http-api.md").read_text(encoding="utf-8")
    told = {re.sub(r"\{[^}]*\}", "{}", name) for name in re.findall(r"`([A-Z]+ /[^?`]*)[^`]*`", text)}
    made = {
        f"{method} {re.sub(r'{[^}]*}', '{}', route.path)}"
        for module in MODULES
        for route in module.router.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods or ()
    }
    assert {name for name in made - told if not re.search("/v1/(files|batches)", name)} == set()


def test_what_of_vllm_is_told_to_be_absent_is() -> None:
    text = (ROOT / "docs/guide/http-api.md").read_text(encoding="utf-8")
    (fields,) = re.findall(r"Of vLLM's fields these are unknown, .*?; in chats also", text, flags=re.DOTALL)
    unknown = set(re.findall(r"`([a-z_]+)`(?! \(but)", fields))
    assert len(unknown) > 15 and not unknown & (ChatBody.model_fields.keys() | CompletionBody.model_fields.keys())
    (endpoints,) = re.findall(r"^Of vLLM's endpoints these are absent, .*?\n\n", text, flags=re.DOTALL | re.MULTILINE)
    absent = set(re.findall(r"`(/[\w/]+)[*`]", endpoints))
    made = {route.path for module in MODULES for route in module.router.routes if isinstance(route, APIRoute)}
    assert len(absent) > 10 and not [path for path in made if path in absent or path.startswith("/v1/audio/")]


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, ChatMessage, StreamOptions])
def test_fields_of_requests_are_listed(body: type[BaseModel]) -> None:
    assert set(body.model_fields) - _words_in_backticks(ROOT / "docs/guide/http-api.md") == set()


def test_error_codes_are_listed() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "cluster").rglob("*.py"))
    codes = set(re.findall(r'\b(?:default_)?code(?:: str)? ?= ?"(\w+)"', sources))
    codes |= set(re.findall(r'\bfield_error\(\s*"(\w+)"', sources))
    general = {"not_found", "conflict"}  # never sent: what raises these errors names a code of its own
    assert codes > general
    assert codes - general - _words_in_backticks(ROOT / "docs/guide/http-api.md") == set()


def _words_in_backticks(page: Path) -> set[str]:
    return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")))))
