"""`make test-fast` is quick: what its folders hold needs no cluster, weights, processes or interpreter."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tree.test_architecture import ROOT, imports, sources

MAKEFILE = (ROOT / "Makefile").read_text()
FAST = re.findall(r"\S+", re.findall(r"^FAST := (.*)$", MAKEFILE, flags=re.MULTILINE)[0])
SLOW_MODULES = {
    "multiprocessing",
    "subprocess",
    "torch.multiprocessing",
    "cluster.gateway.layout_study",  # simulates in a process of its own
    "tests.support.interpreted",
    "tests.support.clusters.mini_cluster",
    "tests.support.small_models",
}
SLOW_FIXTURES = {"llama", "llama_folder", "smollm2_folder", "gemma3_folder"}
EXCEPTIONS = {
    ("tests/engine/parallel/test_rank_watch.py", "multiprocessing"): "a pipe within one process",
    ("tests/cluster/deployment/test_ray_access.py", "subprocess"): "a shell script of milliseconds",
    ("tests/cluster/deployment/test_local_nodes.py", "subprocess"): "bare interpreters that end each other",
    ("tests/cluster/deployment/test_cluster_files.py", "subprocess"): "a shell's echo, and what `make` would do",
}


def is_slow(module: str) -> bool:
    """Also every module in a folder of tests that is not quick."""
    if any(module == slow or module.startswith(f"{slow}.") for slow in SLOW_MODULES):
        return True
    parts = module.split(".")
    return parts[0] == "tests" and len(parts) > 2 and parts[1] != "support" and f"tests/{parts[1]}" not in FAST


def reached(path: Path, seen: set[Path]) -> Iterator[str]:
    """The slow modules that a file of tests imports, itself or through other files of tests."""
    seen.add(path)
    for module, name in imports(path):
        for candidate in (module, f"{module}.{name}"):
            if is_slow(candidate):
                yield candidate
            other = ROOT / (candidate.replace(".", "/") + ".py")
            if candidate.startswith("tests.") and other not in seen and other.is_file():
                yield from reached(other, seen)


def fixtures(path: Path) -> set[str]:
    """What functions of a file take."""
    return {node.arg for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.arg)}


@pytest.mark.parametrize("folder", FAST)
def test_quick_tests_need_nothing_slow(folder: str) -> None:
    assert sources(folder), f"{folder} holds no tests"
    for path in sources(folder):
        name = path.relative_to(ROOT).as_posix()
        found = {module for module in reached(path, set()) if (name, module.partition(".")[0]) not in EXCEPTIONS}
        assert not found, f"{name} needs {found}: it belongs into a folder that is named for that"
        assert not fixtures(path) & SLOW_FIXTURES, f"{name} asks for a model: it belongs into tests/with_models"


def test_what_is_slow_is_seen_however_far_away() -> None:
    """The check above finds nothing, so what it looks with is itself looked at."""
    (clusters,) = (ROOT / "tests").rglob("test_mini_cluster.py")
    assert {"tests.support.clusters.mini_cluster", "tests.support.small_models"} <= set(reached(clusters, set()))
    (ghosts,) = (ROOT / "tests").rglob("test_private_prefixes.py")  # reaches the cluster by way of another file
    assert "llama" in fixtures(clusters) and set(reached(ghosts, set()))


def test_a_file_that_skips_itself_is_left_to_the_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Else it would end the process that imports it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "test_that_skips.py").write_text("import pytest; pytest.skip('not here', allow_module_level=True)")
    of_process = SimpleNamespace(
        workerinput={"workerid": "gw0", "workercount": 1},
        args=["."],
        invocation_params=SimpleNamespace(dir=tmp_path),
        rootpath=tmp_path,
    )
    conftest: Any = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    try:
        conftest._import_in_turns(of_process)
    except pytest.skip.Exception:
        pytest.fail("it ended what imports others")
