"""A GGUF file as a checkpoint folder: its config and tokenizer beside a link to the file, which stays where it is.

Folders are kept in the cache, one for each file, tokenizer beside it and time of their last change, and for what is
made of files.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

GGUF_NAME = "model.gguf"
"""What a GGUF file is called in a checkpoint folder whose weights are in it."""

_VERSION: Final = 4
"""Raise it when a folder is given other files than before: those that were made earlier are not used any more."""
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
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
    tokenizer_files, gguf_file = _tokenizer_files(gguf_file.parent), gguf_file.resolve()
    folder = cache_dir / "gguf" / f"{gguf_file.stem}-{_digest(gguf_file, *tokenizer_files)}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as work:
        made = Path(work) / "folder"
        made.mkdir()
        _describe(gguf_file, made, tokenizer_files)
        (made / GGUF_NAME).symlink_to(gguf_file)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            if not folder.exists():
                raise
    return folder


def _tokenizer_files(folder: Path) -> list[Path]:
    """The model's own tokenizer beside a GGUF file, and what belongs to it; nothing without tokenizer.json."""
    found = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    return found if found and found[0].name == _TOKENIZER_FILES[0] else []


def _digest(*files: Path) -> str:
    stats = [(path, path.stat()) for path in files]
    known = "".join(f"{path} {stat.st_size} {stat.st_mtime_ns} " for path, stat in stats)
    return hashlib.sha256(f"{known}{_VERSION}".encode()).hexdigest()[:12]


def _describe(gguf_file: Path, folder: Path, tokenizer_files: Sequence[Path]) -> None:
    from engine.checkpoint.gguf.checkpoint import (
        describe_gguf,  # takes seconds to import, and is needed once for a file
    )

    with _in_words(gguf_file):
        describe_gguf(gguf_file, folder, tokenizer_files)


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
