"""What a converted checkpoint folder must hold, written beside its files as manifest.json.

The manifest is the last file written, so a folder without one is unfinished. Knows sizes and checksums, not models.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

_MANIFEST = "manifest.json"


def write_manifest(folder: Path, *, source_sha256: str, converter_version: int) -> None:
    """Flush every file of the folder to the disk, and record size and SHA-256 of each."""
    files = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            files[path.name] = {
                "size_bytes": path.stat().st_size,
                "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
            }
            os.fsync(file.fileno())
    manifest = {"source_sha256": source_sha256, "converter_version": converter_version, "files": files}
    with (folder / _MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def find_fault(folder: Path, *, source_sha256: str, converter_version: int, checksums: bool) -> str | None:
    """The first reason not to use the folder, or None.

    Compares sizes, which takes microseconds; with `checksums`, also the SHA-256 of every file, about a second per GB.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        source = manifest["source_sha256"], manifest["converter_version"]
        files: dict[str, dict[str, Any]] = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{_MANIFEST} is missing or unreadable"
    if source != (source_sha256, converter_version):
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
