"""What was made of a checkpoint's small files, kept for the next start.

Reading them takes transformers, which brings most of torch's compilers along: seconds of every process's start. An
entry is named by a digest of all that it was made from, so it is never out of date; what is missing or damaged is made
again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from kernels.cache_folder import default_cache_dir

logger = logging.getLogger(__name__)

Json = dict[str, Any]

MAX_ENTRIES: Final = 64  # those go first that nobody has asked for longest
_LIBRARIES: Final = ("transformers", "tokenizers")


def remembered(kind: str, sources: Iterable[Path], make: Callable[[], Json]) -> Json:
    """What `make` returns, as JSON gives it back; `sources` are all files that it depends on, its own code included.

    What `make` raises is raised, and not remembered.
    """
    folder = default_cache_dir() / "checkpoints"
    path = folder / f"{kind}-{_digest(sources)}.json"
    try:
        known: Json = json.loads(path.read_text(encoding="utf-8"))
        with contextlib.suppress(OSError):  # somebody else's: it may only be read
            os.utime(path)
    except (OSError, ValueError):
        text = json.dumps(make())
        _store(folder, path, text)
        known = json.loads(text)
    return known


def _digest(sources: Iterable[Path]) -> str:
    """A digest of the files' names and contents, and of the libraries that read them; a file that does not exist counts
    as such."""
    digest = hashlib.sha256(_versions().encode())
    for path in sources:
        content = path.read_bytes() if path.is_file() else None
        size = -1 if content is None else len(content)
        digest.update(f"\n{path.name} {size}\n".encode())
        digest.update(content or b"")
    return digest.hexdigest()[:32]


@functools.cache  # each is a file to be parsed
def _versions() -> str:
    return " ".join(version(name) for name in _LIBRARIES)


def _store(folder: Path, path: Path, text: str) -> None:
    """Whole or not at all, whoever else does the same. A cache that cannot be written costs time and nothing else."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
        by_use = sorted(folder.iterdir(), key=lambda entry: entry.stat().st_mtime)
        for entry in by_use[:-MAX_ENTRIES]:
            entry.unlink()
    except OSError as error:
        logger.info("%s was not kept for the next start: %s", path.name, error)
