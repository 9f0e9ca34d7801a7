"""Installs a peer once, into a folder of its own with its own virtual environment.

Everything runs in that folder: in the root of this repository, `kernels` would pass for the package of that name which
some peers import.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from benchmarks.common.part import note
from benchmarks.common.workload import MODEL
from benchmarks.peers.peer import PeerUnavailableError
from engine.checkpoint.store import resolve_model
from kernels.cache_folder import default_cache_dir

STEP_TIMEOUT_S = 3 * 3600.0
LOCK_TIMEOUT_S = 4 * 3600.0
MIXTURE = "mixture"  # instead of the default model: one of its shape with 8 experts, as random as it begins training
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class Workshop:
    """One peer's folder. What was done there once is not done again."""

    def __init__(self, name: str, root: Path | None = None) -> None:
        self.name = name
        self.folder = (root or default_cache_dir() / "peers") / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / "install.log"

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    def once(self, step: str, make: Callable[[], None]) -> None:
        """`make`, unless it succeeded before under this name: give a changed step another one."""
        done = self.folder / f".done-{step}"
        with FileLock(self.folder / ".lock", timeout=LOCK_TIMEOUT_S):
            if not done.exists():
                note(f"{self.name}: {step} (log: {self.log})")
                make()
                done.touch()

    def make_environment(self) -> None:
        self.run(sys.executable, "-m", "venv", "--clear", "venv")

    def pip(self, *arguments: str | Path) -> None:
        self.run(self.python, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments)

    def run(self, *command: str | Path, niceness: int = 15, environment: dict[str, str] | None = None) -> None:
        """Run a command at low priority, its output in the log. Raises PeerUnavailableError with its last lines."""
        words = [str(word) for word in command]
        with self.log.open("a", encoding="utf-8") as log:
            print("$", *words, file=log, flush=True)
            try:
                code = subprocess.run(
                    ["nice", "-n", str(niceness), *words],
                    cwd=self.folder,
                    env=foreign_environment() | (environment or {}),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=STEP_TIMEOUT_S,
                ).returncode
            except (OSError, subprocess.TimeoutExpired) as error:
                raise PeerUnavailableError(f"{self.name}, not installed or run: {error}") from None
        if code != 0:
            raise PeerUnavailableError(
                f"{self.name}: `{' '.join(words)[:200]}` ended with {code}: {last_lines(self.log)}"
            )


def foreign_environment() -> dict[str, str]:
    """This process's environment without what would lead another Python to Legato's packages."""
    return {name: value for name, value in os.environ.items() if name not in _OURS}


def last_lines(log: Path) -> str:
    """What it said at last, on one line: it ends up in a table."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return " / ".join(line.strip() for line in lines[-20:] if line.strip())[-400:]


@functools.cache
def model_folder(model: str = MODEL) -> Path:
    """The folder that everyone's weights come from; the mixture of experts is made once."""
    return resolve_model(MODEL) if model == MODEL else _mixture()


@functools.cache
def weights_id(model: str = MODEL) -> str:
    """Changes with the contents, so that what was converted from others is not taken for these."""
    if model == MODEL:
        return hashlib.sha256((model_folder() / "manifest.json").read_bytes()).hexdigest()[:8]
    made_by = f"{weights_id()} {importlib.metadata.version('torch')}"
    return hashlib.sha256(made_by.encode()).hexdigest()[:8]


def _mixture() -> Path:
    shop = Workshop(MIXTURE)
    folder = shop.folder / weights_id(MIXTURE)
    shop.once(f"made-{folder.name}", functools.partial(_make_mixture, folder))
    return folder


def _make_mixture(folder: Path) -> None:
    from benchmarks.engine.experts import make_mixture  # it needs torch, nothing else here does

    folder.mkdir(exist_ok=True)
    make_mixture(model_folder(), folder)
