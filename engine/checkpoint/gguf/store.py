"""A GGUF file as a checkpoint folder: its config and tokenizer beside a link to the file, which stays where it is.

Folders are kept in the cache, one for each file and time of its last change, and for what is made of files.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

GGUF_NAME = "model.gguf"
"""What a GGUF file is called in a checkpoint folder whose weights are in it."""

_VERSION: Final = 2
"""Raise it when a folder is given other files than before: those that were made earlier are not used any more."""
_LONGEST_ERROR: Final = 500  # characters: some quote what they read


def gguf_in(path: Path) -> Path | None:
    """`path` itself if it is a GGUF file; the one that lies in the folder, if no other weights do."""
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if any(path.glob("*.safetensors")) or (path / "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    return found[0] if len(found) == 1 else None


def gguf_folder(gguf_file: Path, cache_dir: Path) -> Path:
    """The folder of this file, made if there is none. Raises ValueError for a file that cannot be used."""
    gguf_file = gguf_file.resolve()
    folder = cache_dir / "gguf" / f"{gguf_file.stem}-{_digest(gguf_file)}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as work:
        made = Path(work) / "folder"
        made.mkdir()
        _describe(gguf_file, made)
        (made / GGUF_NAME).symlink_to(gguf_file)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            if not folder.exists():
                raise
    return folder


def _digest(gguf_file: Path) -> str:
    stat = gguf_file.stat()
    return hashlib.sha256(f"{gguf_file} {stat.st_size} {stat.st_mtime_ns} {_VERSION}".encode()).hexdigest()[:12]


def _describe(gguf_file: Path, folder: Path) -> None:
    from engine.checkpoint.gguf.checkpoint import (
        describe_gguf,  # takes seconds to import, and is needed once for a file
    )

    with _in_words(gguf_file):
        describe_gguf(gguf_file, folder)


@contextmanager
def _in_words(gguf_file: Path) -> Iterator[None]:
    """Any error is the file's: it may come from anywhere else, and who reads it raises whatever it stumbles over, such
    as RecursionError for nested arrays, ZeroDivisionError for no heads, tokenizers' own kind of Exception."""
    try:
        yield
    except Exception as error:
        said = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
        found = " ".join(said.split())[:_LONGEST_ERROR]
        raise ValueError(f"{gguf_file} cannot be used as the GGUF file of a language model: {found}") from error
