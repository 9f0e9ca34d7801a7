"""`legato doctor` on machines that lack something: each is made so in earnest."""

from __future__ import annotations

import os
import resource
import socket
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.__main__ import main
from cluster.command import doctor
from cluster.command.doctor import Finding, examine
from cluster.deployment.ray_environment import free_port
from kernels.native import library
from kernels.native.library import AMX, AVX2, SWITCH

EMPTY_FOLDER = Path("/proc")  # a file system of 0 bytes, on every Linux


def found(what: str, *, port: int | None = None, shared_memory: Path = Path("/dev/shm")) -> list[Finding]:
    return [
        finding
        for finding in examine(port or free_port(), shared_memory=shared_memory)
        if what.lower() in finding.what.lower()
    ]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def test_a_busy_port_stops_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], taken_port: int
) -> None:
    monkeypatch.setattr("sys.argv", ["legato", "doctor", "--port", str(taken_port)])
    assert main() == 1
    out = capsys.readouterr().out
    assert f"stop  port: 127.0.0.1:{taken_port} cannot be listened on (Address already in use)" in out
    assert "-> Stop what uses it, or choose another port with --port" in out
    assert "`legato serve` here." in out.splitlines()[-1]


def test_this_machine_can_serve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All of the tests would fail on one that cannot."""
    monkeypatch.setattr("sys.argv", ["legato", "doctor", "--port", str(free_port())])
    assert main() == 0
    out = capsys.readouterr().out
    assert out.endswith("`legato serve` can start here.\n") and "\nstop" not in out
    told = ("Python", "packages", "cores", "memory", "/dev/shm", "compiler", "GPUs", "port", "open files", "clock")
    for what in told:
        assert f"{what}: " in out


def test_which_nodes_answers_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "avx2")
    monkeypatch.setattr(library, "_processor_flags", lambda: frozenset((*AMX.flags, *AVX2.flags)))
    (kernels,) = found("CPU kernels")
    assert kernels.level == "ok" and kernels.told.startswith("for AVX2; ")


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    (compiler,) = found("compiler")
    assert (compiler.level, compiler.told) == ("warn", "there is none of GNU's")
    assert "Install one (apt-get install g++)" in compiler.advice and "slower" in compiler.advice
    (tmp_path / "mine").touch(mode=0o700)
    monkeypatch.setenv("CXX", str(tmp_path / "mine"))
    assert found("compiler")[0].level == "ok"


def test_without_pythons_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a machine with a GPU alone: Triton compiles with them."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(tmp_path / name))
    monkeypatch.setattr(doctor, "count_gpus", lambda: 0)
    assert not found("headers")
    monkeypatch.setattr(doctor, "count_gpus", lambda: 1)
    (headers,) = found("headers")
    assert headers.level == "stop" and headers.told.startswith(f"{tmp_path}/include/Python.h is not there")
    assert "python3-dev" in headers.advice
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    assert not found("headers")


def test_with_too_little_shared_memory() -> None:
    (shared,) = found("proc", shared_memory=EMPTY_FOLDER)
    assert shared.level == "warn" and "0 MB free of 0, and Ray's object store takes 210" in shared.told
    assert "--shm-size=2g" in shared.advice
    (gone,) = found("nowhere", shared_memory=Path("/nowhere"))
    assert gone.level == "warn" and "cannot be used: No such file" in gone.told


def test_packages_that_lack_or_are_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As pip would have installed a Legato that asks for them."""
    folder = tmp_path / "legato-0.1.0.dist-info"
    folder.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        "Name: legato",
        "Version: 0.1.0",
        "Requires-Python: >=4",
        "Requires-Dist: numpy<1",
    ]
    lines += ["Requires-Dist: no-such-package>=2", "Requires-Dist: other; extra == 'gpu'", "Requires-Dist: psutil>=1"]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    findings = {finding.what: finding for finding in examine(free_port())}
    assert findings["Python"].level == "stop" and ">=4" in findings["Python"].advice
    assert findings["numpy"].level == "warn" and "made for <1" in findings["numpy"].told
    assert findings["numpy"].advice == "pip install 'numpy<1'"
    assert findings["no-such-package"].level == "stop" and "is not installed" in findings["no-such-package"].told
    assert "other" not in findings and "psutil" not in findings and "packages" not in findings


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGATO_CACHE", "/dev/null/cache")
    (cache,) = found("cache")
    assert cache.level == "stop" and "Set LEGATO_CACHE" in cache.advice


def test_a_home_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container whose user has none: the folder for models alone is not enough."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setenv("LEGATO_CACHE", str(tmp_path))
    (token,), (storage,) = found("token"), found("storage")
    assert token.level == storage.level == "stop"
    assert token.told == "/dev/null/.ray/auth_token cannot be written" and "RAY_AUTH_TOKEN_PATH" in token.advice
    assert "gateway.storage names one" in storage.advice
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "mine" / "token"))
    assert not found("token")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not found("storage")


@pytest.mark.parametrize("cache", [True, False])
def test_no_home_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: bool) -> None:
    """As of a container's user without an entry in /etc/passwd, where nothing sets HOME."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "LEGATO_CACHE", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if cache:
        monkeypatch.setenv("LEGATO_CACHE", str(tmp_path))
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    found_all = {finding.what: finding for finding in examine(free_port())}
    stops = ["Ray's token", "gateway.storage", *([] if cache else ["cache"])]
    for what in stops:
        assert found_all[what].level == "stop" and "ome directory" in found_all[what].told
        assert found_all[what].advice.startswith("Set ")
    assert (found_all["cache"].level == "stop") is not cache


def test_a_secret_that_can_be_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGATO_SECRET", "short")
    (secret,) = found("LEGATO_SECRET")
    assert secret.level == "stop" and "openssl rand" in secret.told


def test_few_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the number is what is asked for
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 200, hard))
    try:
        (files,) = found("open files")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert files.level == "warn" and "ulimit -n" in files.advice


def test_one_core() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        (cores,) = found("cores")
    finally:
        os.sched_setaffinity(0, before)
    assert cores.level == "warn" and "--prefill 0" in cores.advice


def test_a_folder_for_models_that_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody can tell whether it is there: as with one in somebody else's home, of which root sees all."""
    folder = tmp_path / ("x" * 300)
    monkeypatch.setenv("LEGATO_CACHE", str(folder))
    (cache,) = found("cache")
    assert cache.told.startswith(str(folder))
