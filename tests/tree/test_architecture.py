"""The rules that hold the packages together: who imports whom, and what no product code may import."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers.utils
from packaging.version import Version

import kernels

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

HTTP = {"aiohttp", "fastapi", "http", "httpx", "requests", "starlette", "urllib", "uvicorn"}
FOREIGN = {
    "kernels": HTTP | {"ray", "socket"},
    "engine": HTTP | {"ray", "socket"},
    "kv_transfer": HTTP | {"ray"},
    "prefill_workers": HTTP | {"ray"},
    "decode_workers": HTTP | {"ray"},
}
EXCEPTIONS = {
    # Names the errors that the Hugging Face hub's client lets through.
    ("engine/checkpoint/store.py", "httpx"),
}
TRANSFORMERS_NAMES = {"AutoConfig", "AutoTokenizer"}
# Not the tokenizer's own method: that one costs seconds of imports.
CHAT_RENDERER = ("transformers.utils.chat_template_utils", "render_jinja_template")


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Every (module, name) that a file imports anywhere, lazily or for types too; name is "" for a whole module."""
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


@pytest.mark.parametrize("package", FOREIGN)
def test_no_package_knows_what_it_must_not(package: str) -> None:
    assert violations(package, FOREIGN[package]) == []


def test_imports_are_seen_wherever_they_stand() -> None:
    """The checks above find nothing, so what they look with is itself looked at."""
    seen = set(imports(Path(__file__)))
    assert {("importlib.metadata", ""), ("pathlib", "Path"), ("kernels", "")} <= seen
    assert any(module.partition(".")[0] == "ray" for module, _ in imports(ROOT / "cluster" / "worker_deployment.py"))


@pytest.mark.parametrize("package", PRODUCT)
def test_transformers_modeling_is_an_oracle_for_tests_only(package: str) -> None:
    allowed = {("transformers", name) for name in TRANSFORMERS_NAMES} | {CHAT_RENDERER}
    used = {
        (path.name, module, name)
        for path in sources(package)
        for module, name in imports(path)
        if module.partition(".")[0] == "transformers"
    }
    assert {entry for entry in used if entry[1:] not in allowed} == set()


def test_loading_a_tokenizer_loads_no_model_code(smollm2_folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from engine.text.tokenizer import Tokenizer; import engine.checkpoint.store\n"
        f"Tokenizer(Path({str(smollm2_folder)!r}))\n"
        "print([name for name in sys.modules if '.modeling_' in name and name.startswith('transformers.models.')\n"
        "       and not name.endswith('.modeling_auto')])"  # the table of names behind the Auto classes
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.stdout.strip() == "[]", result.stderr


def test_the_command_that_starts_a_cluster_waits_for_no_torch() -> None:
    """Ray is started first, and torch is loaded beside it."""
    program = "import sys, cluster.deployment.local_cluster; print({'torch', 'transformers', 'ray'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.stdout.strip() == "set()", result.stderr


@pytest.mark.parametrize("module", ["cluster.app", "cluster.config.scheduler", "engine.checkpoint.store"])
def test_who_computes_nothing_loads_no_torch(module: str) -> None:
    """Whoever starts the application, gateways and the scheduler: torch takes 1.5 s of a core, in each of them."""
    program = f"import sys, {module}; print({{'torch', 'transformers', 'huggingface_hub'}} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.stdout.strip() == "set()", result.stderr


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed() -> None:
    found = {
        ".".join(path.parent.relative_to(ROOT).parts) for package in PRODUCT for path in sources(package)
    }  # every folder that holds Python, with or without __init__.py
    assert set(pyproject()["tool"]["setuptools"]["packages"]) == found
    assert all((ROOT / package.replace(".", "/") / "__init__.py").is_file() for package in found)


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
    assert list(imports(ROOT / "kernels" / "__init__.py")) == []
