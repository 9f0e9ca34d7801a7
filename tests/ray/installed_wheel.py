"""`make test-wheel`: builds the wheel, installs it into a clean environment, and serves from an empty folder.

What a user has who never saw the repository: `pip install` of the wheel, `legato doctor` on machines that lack
something, `legato serve MODEL`, `serve run` by import path, the files that the wheel brings, and, where Legato is not
installed, the wheel that Ray fetches. Takes minutes and some GB, so it is no part of `make test`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import openai
import psutil
import yaml

from cluster.deployment.ray_environment import free_port
from tests.ray.served_cluster import MODEL, end_with_its_children, heed_interrupts

ROOT = Path(__file__).parents[2]
HANGS_S = 600.0
STOPPED_S = 30.0  # within which all processes of a Ray that was stopped are gone
TORCH = "torch==2.13.0"  # as in the Makefile and the Dockerfile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, help="an environment to use and to keep; default: one made for this run")
    parser.add_argument("--wheel", type=Path, help="keep the wheel in this folder, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="legato-wheel-") as name:
        folder = Path(name)
        wheel = build_wheel(folder)
        if arguments.wheel:
            arguments.wheel.mkdir(parents=True, exist_ok=True)
            shutil.copy(wheel, arguments.wheel)
        compare_with_the_tree(wheel)
        programs = install(wheel, arguments.venv or folder / "venv")
        empty = folder / "empty"
        empty.mkdir()
        ask_the_doctor(programs, empty)
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            serve_a_model(programs, empty, signal_number)
        serve_by_import_path(programs, empty)
        serve_a_file_of_the_wheel(programs, empty)
        find_what_operators_load(programs, empty)
        serve_what_nodes_fetch(programs, wheel, empty)
    print("The wheel works.", flush=True)


def build_wheel(folder: Path) -> Path:
    """From a copy of what git knows or would add: a wheel holds what lies in `build/`, too, however old."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    source = folder / "source"
    for name in filter(None, names):
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
    run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", folder, source], folder)
    (wheel,) = folder.glob("legato-*.whl")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
    return wheel


def compare_with_the_tree(wheel: Path) -> None:
    """Every file of the packages is in it, and the guide, and nothing else but what pip writes about it."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = [ROOT / package.replace(".", "/") for package in declared["packages"]]
    wanted = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in folder.rglob("*.*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    for folder, patterns in declared["data-files"].items():
        wanted |= {f"{folder}/{path.name}" for pattern in patterns for path in ROOT.glob(pattern)}
    with zipfile.ZipFile(wheel) as archive:
        names = {re.sub(r"^legato-[^/]*\.data/data/", "", name) for name in archive.namelist()}
    held = {name for name in names if ".dist-info/" not in name}
    assert held == wanted, f"missing: {sorted(wanted - held)}; too many: {sorted(held - wanted)}"


def install(wheel: Path, venv: Path) -> Path:
    """Into a new environment, or anew into one that is there; where its programs are."""
    programs = venv / "bin"
    if not programs.exists():
        run([sys.executable, "-m", "venv", venv], ROOT)
    pip: list[str | Path] = [
        programs / "python",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        "install",
        "-q",
    ]
    run([*pip, TORCH], venv)
    run([*pip, wheel], venv)
    run([*pip, "--force-reinstall", "--no-deps", wheel], venv)
    run([programs / "python", "-m", "pip", "check"], venv)
    return programs


def ask_the_doctor(programs: Path, folder: Path) -> None:
    """What stops Legato, or makes it slow, is said with what to do."""
    nothing = folder.with_name("no-programs")
    nothing.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        doctor: list[str | Path] = [programs / "legato", "doctor", "--port", str(port)]
        told = subprocess.run(
            doctor, cwd=folder, capture_output=True, text=True, env={**environment(), "PATH": str(nothing)}
        )
    assert told.returncode == 1 and not told.stderr, told
    assert f"stop  port: 127.0.0.1:{port} cannot be listened on" in told.stdout, told.stdout
    assert "warn  C++ compiler: there is none\n      -> Install one" in told.stdout, told.stdout
    print(told.stdout, flush=True)
    if os.geteuid() == 0:  # who may mount
        small = "mount -t tmpfs -o size=16m none /dev/shm && exec"
        doctor = [programs / "legato", "doctor", "--port", str(free_port())]
        told = subprocess.run(
            ["unshare", "--mount", "sh", "-c", f'{small} "$0" "$@"', *doctor],
            cwd=folder,
            capture_output=True,
            text=True,
            env=environment(),
        )
        assert told.returncode == 0, told
        assert "warn  /dev/shm: 17 MB free of 17, and Ray's object store takes 210" in told.stdout, told.stdout
        assert "--shm-size=2g" in told.stdout, told.stdout


def serve_a_model(programs: Path, folder: Path, signal_number: signal.Signals) -> None:
    """`legato serve MODEL`, asked by OpenAI's client and ended politely: nothing of it is left."""
    command: list[str | Path] = [programs / "legato", "serve", MODEL, "--port", str(free_port())]
    with started(command, folder) as (process, log):
        url = wait_for(r"Serving on (\S+) \(Ctrl-C to stop\)", process, log)
        family = psutil.Process(process.pid).children(recursive=True)
        said = log.read_text(errors="replace")
        assert "The capital of France is Paris." in said, said
        assert re.search(r"s  (prefill|decode)-\S+: ((read|packed) \S+ of \S+ MB|all \S+ MB loaded)", said), said
        assert "Ready workers: 2 of 2: 1 prefill, 1 decode" in said, said
        show_an_answer(f"legato serve {MODEL}", url)
        blocks = shared_memory_of(family)
        assert blocks, "the workers have no host memory for KV"
        process.send_signal(signal_number)
        assert process.wait(HANGS_S) == 0, log.read_text(errors="replace")
        said = log.read_text(errors="replace")
        assert said.endswith("(Ctrl-C to stop).\nStopping.\n"), said
        _, left = psutil.wait_procs(family, timeout=STOPPED_S)
        assert not left, f"still there: {left}"
        more = [block for block in blocks if block.exists()]
        assert not more, f"left in /dev/shm: {more}"
        told = f"{signal_number.name}: {len(family)} processes and {len(blocks)} blocks of shared memory are gone"
        print(told, flush=True)


def shared_memory_of(family: list[psutil.Process]) -> set[Path]:
    """Files in /dev/shm that they have mapped."""
    blocks: set[Path] = set()
    for process in family:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
            paths = [Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if " /dev/shm/" in line]
            blocks.update(path for path in paths if path.exists())
    return blocks


def serve_by_import_path(programs: Path, folder: Path) -> None:
    """On Serve's own port, 8000, which must be free."""
    command: list[str | Path] = [programs / "serve", "run", "cluster.app:build", f"model={MODEL}"]
    serve_an_answer(command, folder, f"serve run {command[2]}")


def serve_an_answer(
    command: Sequence[str | Path], folder: Path, who: str, variables: Mapping[str, str] = MappingProxyType({})
) -> None:
    """`serve run` until it has answered; then it is interrupted, and ends."""
    with started(command, folder, variables) as (process, log):
        url = wait_for(r"Legato: serves \S+ on (\S+)", process, log)
        show_an_answer(who, url)
        process.send_signal(signal.SIGINT)
        process.wait(HANGS_S)


@contextlib.contextmanager
def started(
    command: Sequence[str | Path], folder: Path, variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process and the file of all that it says; ended in any case, with its children."""
    log = folder.with_name("serve.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment(), **variables},
            cwd=folder,
            start_new_session=True,
            preexec_fn=heed_interrupts,
        )
    children: list[psutil.Process] = []
    try:
        yield process, log
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children(recursive=True)
        end_with_its_children(process, children)


def wait_for(pattern: str, process: subprocess.Popen[bytes], log: Path) -> str:
    """What it says in the pattern's group."""
    deadline = time.monotonic() + HANGS_S
    while (found := re.search(pattern, log.read_text(errors="replace"))) is None:
        said = log.read_text(errors="replace")
        assert process.poll() is None and "cannot start" not in said, f"it did not start:\n{said}"
        assert time.monotonic() < deadline, f"it did not start in time:\n{said}"
        time.sleep(0.5)
    return found[1]


def show_an_answer(who: str, url: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="unused", timeout=HANGS_S, max_retries=0)
    question = {"role": "user", "content": "What is the capital of France?"}
    answer = client.chat.completions.create(model=MODEL, messages=[question], temperature=0)
    text = answer.choices[0].message.content or ""
    assert "Paris" in text, text
    print(f"{who}: {text}", flush=True)


def serve_a_file_of_the_wheel(programs: Path, folder: Path) -> None:
    code = "import ray_configs; print(*ray_configs.__path__)"
    where = subprocess.run(
        [programs / "python", "-c", code], cwd=folder, check=True, capture_output=True, text=True, env=environment()
    )
    file = Path(where.stdout.strip()) / "quickstart.yaml"
    assert not file.is_relative_to(ROOT), file
    command: list[str | Path] = [
        programs / "python",
        "-m",
        "cluster",
        "serve",
        file,
        "--exit",
        "--port",
        str(free_port()),
    ]
    run(command, folder)


def find_what_operators_load(programs: Path, folder: Path) -> None:
    """As docs/guide/metrics.md says; and the guide itself."""
    told = subprocess.run(
        [programs / "legato", "--help"], cwd=folder, check=True, capture_output=True, text=True, env=environment()
    )
    guide = Path(told.stdout.rpartition("The guide: ")[2].strip())
    assert not guide.is_relative_to(ROOT) and (guide / "alerts.md").is_file(), guide
    code = "import cluster; print(*cluster.__path__)"
    where = subprocess.run(
        [programs / "python", "-c", code], cwd=folder, check=True, capture_output=True, text=True, env=environment()
    )
    boards = Path(where.stdout.strip()) / "metrics" / "grafana"
    assert not boards.is_relative_to(ROOT), boards
    assert {path.name for path in boards.iterdir()} == {"legato.json", "rules.yaml"}


def serve_what_nodes_fetch(programs: Path, wheel: Path, folder: Path) -> None:
    """ray_configs/runtime_env.yaml, where everything is but Legato: Ray fetches the wheel. The environment is left
    without it."""
    run([programs / "python", "-m", "pip", "uninstall", "-q", "-y", "legato"], folder)
    look: list[str | Path] = [programs / "python", "-c", "import cluster"]
    assert subprocess.run(look, cwd=folder, capture_output=True, env=environment()).returncode, "it is there still"
    document = yaml.safe_load((ROOT / "ray_configs" / "runtime_env.yaml").read_text(encoding="utf-8"))
    document["applications"][0]["runtime_env"]["py_modules"] = [wheel.as_uri()]
    document["http_options"]["port"] = free_port()
    file = folder / "fetched.yaml"
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    command: list[str | Path] = [programs / "serve", "run", file]
    serve_an_answer(command, folder, f"serve run {file.name}, of the wheel that Ray fetches", {"PIP_NO_DEPS": "1"})


def run(command: Sequence[str | Path], folder: Path) -> None:
    words = [str(word) for word in command]
    print("$", *words, flush=True)
    subprocess.run(words, cwd=folder, check=True, timeout=3600, env=environment())


def environment() -> dict[str, str]:
    """Nothing of this repository, and no Ray of others."""
    foreign = ("RAY_", "LEGATO_SECRET", "PYTHONPATH", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


if __name__ == "__main__":
    main()
