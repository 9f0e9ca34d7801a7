"""The rules that hold the tree together: who imports whom, and what no product code may import."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers.utils
from packaging.version import Version

import kernels
from cluster.deployment.local_cluster import BOARDS

ROOT = Path(__file__).parent.parent.parent

# Each package, and the packages of ours that it may import.
ARROWS = {
    "kernels": set[str](),
    "engine": {"kernels"},
    "kv_transfer": {"kernels", "engine"},
    "prefill_workers": {"kernels", "engine", "kv_transfer"},
    "decode_workers": {"kernels", "engine", "kv_transfer"},
    "cluster": {"kernels", "engine", "kv_transfer", "prefill_workers", "decode_workers"},
    "benchmarks": {"kernels", "engine", "kv_transfer", "prefill_workers", "decode_workers", "cluster"},
}
PRODUCT = [package for package in ARROWS if package != "benchmarks"]
OURS = {*ARROWS, "tests"}

# Folders of one package, and those of the same package that they do not import: what stands above them.
ABOVE = {
    "kernels.cpu": {"kernels.native", "kernels.triton"},
    "kernels.native": {"kernels.triton"},
    "engine.text": {"engine.kv", "engine.model", "engine.sampling", "engine.steps"},
    "engine.kv": {"engine.cost_model", "engine.model", "engine.parallel", "engine.sampling", "engine.steps"},
    "engine.sampling": {"engine.kv", "engine.model", "engine.parallel", "engine.steps"},
    "engine.model": {"engine.cost_model", "engine.offload", "engine.parallel", "engine.sampling", "engine.steps"},
    "engine.cost_model": {"engine.kv", "engine.parallel", "engine.steps"},
    "engine.offload": {"engine.parallel", "engine.steps"},
    "engine.parallel": {"engine.cost_model", "engine.offload", "engine.sampling", "engine.steps"},
    "kv_transfer.messages": {
        "kv_transfer.handoff",
        "kv_transfer.tiers",
        "kv_transfer.transports",
        "kv_transfer.worker",
    },
    "kv_transfer.connections": {"kv_transfer.handoff", "kv_transfer.tiers", "kv_transfer.worker"},
    "kv_transfer.transports": {"kv_transfer.handoff", "kv_transfer.tiers", "kv_transfer.worker"},
    "kv_transfer.handoff": {"kv_transfer.tiers", "kv_transfer.worker"},
    "cluster.slo": {"cluster.config", "cluster.deployment", "cluster.http", "cluster.scheduler"},
    "cluster.scheduler": {"cluster.config", "cluster.deployment", "cluster.http"},
    "cluster.gateway": {"cluster.autoscaling", "cluster.config", "cluster.deployment", "cluster.http"},
    "cluster.http": {"cluster.autoscaling", "cluster.deployment", "cluster.scheduler"},
}
# And benchmarks: no other file imports the simulator.
SIMULATION = {"cluster/simulation/", "cluster/command/", "cluster/load/", "cluster/__main__.py"}
COMMANDS = {"cluster/command/", "cluster/load/", "cluster/__main__.py"}

HTTP = {"aiohttp", "fastapi", "http", "httpx", "httpx2", "requests", "starlette", "urllib", "uvicorn"}
FOREIGN = {
    "kernels": HTTP | {"ray", "socket"},
    "engine": HTTP | {"ray", "socket"},
    "kv_transfer": HTTP | {"ray"},
    "prefill_workers": HTTP | {"ray"},
    "decode_workers": HTTP | {"ray"},
}
EXCEPTIONS = {
    # Names the errors that the Hugging Face hub's client lets through.
    ("engine/checkpoint/store.py", "httpx2"),
}
TRANSFORMERS_NAMES = {"AutoConfig", "AutoTokenizer", "PreTrainedTokenizerFast"}
# Not the tokenizer's own method: that one costs seconds of imports.
CHAT_RENDERER = ("transformers.utils.chat_template_utils", "render_jinja_template")


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@functools.cache  # asked of most files a dozen times
def imports(path: Path) -> frozenset[tuple[str, str]]:
    """Every (module, name) that a file imports anywhere, lazily or for types too; name is "" for a whole module."""
    return frozenset(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


def violations(package: str, forbidden: set[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources(package)
        for module in sorted({module for module, _ in imports(path)})
        if (top := module.partition(".")[0]) in forbidden and (path.relative_to(ROOT).as_posix(), top) not in EXCEPTIONS
    ]


@pytest.mark.parametrize("package", ARROWS)
def test_arrows_point_one_way(package: str) -> None:
    assert sources(package), f"{package}/ holds no Python"
    assert violations(package, OURS - ARROWS[package] - {package}) == []


@pytest.mark.parametrize("folder", ABOVE)
def test_a_floor_stands_on_those_below(folder: str) -> None:
    found = sources(folder.replace(".", "/"))
    assert found, f"{folder} holds no Python"
    assert [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in found
        for module in sorted({f"{module}.{name}" for module, name in imports(path)})
        if any(module.startswith(f"{above}.") for above in ABOVE[folder])
    ] == []


def test_the_product_runs_without_the_simulator() -> None:
    for path in (path for package in PRODUCT for path in sources(package)):
        if not path.relative_to(ROOT).as_posix().startswith(tuple(SIMULATION)):
            assert not any(f"{module}.{name}".startswith("cluster.simulation.") for module, name in imports(path)), path


def test_the_product_runs_without_its_commands() -> None:
    """What is served needs neither the command line nor the load generator."""
    for path in (path for package in PRODUCT for path in sources(package)):
        if not path.relative_to(ROOT).as_posix().startswith(tuple(COMMANDS)):
            found = {f"{module}.{name}" for module, name in imports(path)}
            assert not any(name.startswith(("cluster.command.", "cluster.load.")) for name in found), path


@pytest.mark.parametrize("package", FOREIGN)
def test_no_package_knows_what_it_must_not(package: str) -> None:
    assert violations(package, FOREIGN[package]) == []


def test_imports_are_seen_wherever_they_stand() -> None:
    """The checks above find nothing, so what they look with is itself looked at."""
    seen = imports(Path(__file__))
    assert {("importlib.metadata", ""), ("pathlib", "Path"), ("kernels", "")} <= seen
    assert any(
        module.partition(".")[0] == "ray" for module, _ in imports(ROOT / "cluster" / "deployment" / "worker.py")
    )


@pytest.mark.parametrize("package", PRODUCT)
def test_transformers_modeling_is_the_backend_of_that_name_and_an_oracle_for_tests(package: str) -> None:
    """Legato's own models have nothing of it."""
    backend = {"hugging_face.py", "architectures.py"}
    allowed = {("transformers", name) for name in TRANSFORMERS_NAMES} | {CHAT_RENDERER}
    used = {
        (path.name, module, name)
        for path in sources(package)
        if path.name not in backend
        for module, name in imports(path)
        if module.partition(".")[0] == "transformers"
    }
    assert {entry for entry in used if entry[1:] not in allowed} == set()


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed() -> None:
    found = {
        ".".join(path.parent.relative_to(ROOT).parts) for package in PRODUCT for path in sources(package)
    }  # every folder that holds Python, with or without __init__.py
    assert set(pyproject()["tool"]["setuptools"]["packages"]) == found | {"ray_configs"}
    assert all((ROOT / package.replace(".", "/") / "__init__.py").is_file() for package in found)


def test_every_other_file_is_listed() -> None:
    """What the packages hold besides Python, and the files of `ray_configs/`, is in the wheel."""
    listed = {
        path
        for package, patterns in pyproject()["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package).glob(pattern)
    }
    found = {path for package in (*PRODUCT, "ray_configs") for path in (ROOT / package).rglob("*.*") if path.is_file()}
    missing = {path for path in found - listed if path.suffix != ".py" and path.parent.name != "__pycache__"}
    assert {path.relative_to(ROOT).as_posix() for path in missing} == set()


def test_what_operators_load_is_in_a_package() -> None:
    """So that it is in the wheel, by the test above."""
    assert {path.name for path in BOARDS.iterdir()} == {"legato.json", "rules.yaml"}
    assert BOARDS.is_relative_to(ROOT / "cluster")


def test_version_stays_below_what_transformers_takes_for_hugging_face_kernels() -> None:
    declared = Version(pyproject()["project"]["version"])
    assert declared < Version("0.9")
    assert Version(importlib.metadata.version("legato")) < Version("0.9")


def test_our_kernels_is_not_taken_for_the_one_of_hugging_face() -> None:
    installed = {distribution.metadata["Name"].lower() for distribution in importlib.metadata.distributions()}
    assert "kernels" not in installed, "the Hugging Face package `kernels` hides ours: uninstall it"
    assert kernels.__file__ is not None
    assert Path(kernels.__file__).is_relative_to(ROOT)
    assert not transformers.utils.is_kernels_available()


def test_kernels_package_itself_imports_nothing() -> None:
    assert kernels.__version__ == "0.0.0"
    assert imports(ROOT / "kernels" / "__init__.py") == frozenset()
