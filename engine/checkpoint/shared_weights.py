"""Packed weights as a file that all workers of a machine map: in memory once, and packed once for all starts.

The file is named by a digest of all that its bytes depend on: the checkpoint's files, the type, the code that reads and
packs. It is whole or not there, whoever is killed. Equal models have to ask for memory in the same order.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import struct
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import BinaryIO, Final, Literal

import torch
from filelock import FileLock, Timeout
from torch import Tensor

import kernels
from kernels.cache_folder import default_cache_dir, is_private, private_folder
from kernels.cpu.huge_pages import PackingMemory, huge_zeros, private_memory

logger = logging.getLogger(__name__)

Sharing = Literal["auto", "on", "off"]

MAX_BYTES: Final = 64 << 30  # of all files; the least recently used go first
MAX_FILES: Final = 64
_MAKING_S: Final = 600.0  # another worker may take so long to pack
_LARGE_PAGES: Final = 0.8  # the share from which a mapping is as fast as private memory in large pages
_ALIGNMENT: Final = 64
_TRAILER: Final = struct.Struct("<8sQ")
_MAGIC: Final = b"LEGATOPW"
_POPULATE_READ: Final = 22  # MADV_POPULATE_READ of Linux 5.14, which Python does not name


def packing_memory(
    folder: Path, facts: str, build: Callable[[PackingMemory], object], sharing: Sharing
) -> PackingMemory:
    """The memory that holds the packed weights of the checkpoint in `folder`, or a process's own where they cannot be
    shared.

    `facts`: all that they depend on beside the checkpoint and Legato's code. `build` asks for all memory of the model,
    in order, and is called only if nobody ever has. `auto` shares only where the machine maps the file in large pages;
    elsewhere, where each step would be slower, it is copied.
    """
    if sharing == "off":
        return private_memory
    path = default_cache_dir() / "packed" / f"{_digest(folder, facts)}.weights"
    try:
        private_folder(path.parent)
        if not _is_whole(path):
            _make(path, build)
        os.utime(path)  # used last
        return _packed_before(_mapped(path, keep_slow=sharing == "on"))
    except (OSError, Timeout) as error:
        logger.warning("Packed weights are private to this worker: %s", error)
        return private_memory


def _packed_before(packed: Tensor) -> PackingMemory:
    """Gives parts of `packed [bytes]` of uint8, in their order."""
    used = 0

    def lay_out(num_elements: int, dtype: torch.dtype, fill: Callable[[Tensor], None]) -> Tensor:
        nonlocal used
        start = used + -used % _ALIGNMENT
        used = start + num_elements * dtype.itemsize
        assert used <= len(packed), "the model asks for more than was packed"
        return packed[start:used].view(dtype)

    return lay_out


def _mapped(path: Path, *, keep_slow: bool) -> Tensor:
    """The bytes of the file in place, or a copy of them."""
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    mapped = _tensor(mapping)[: len(mapping) - _TRAILER.size]
    share = _large_pages(mapping, mapped)
    keep = share >= _LARGE_PAGES or keep_slow
    logger.info(
        "%.0f MB of packed weights %s, %.0f %% in large pages",
        len(mapped) / 1e6,
        "are shared with other workers" if keep else "are copied, since the file is mapped slowly",
        share * 100,
    )
    return mapped if keep else huge_zeros([len(mapped)], torch.uint8).copy_(mapped)


def _tensor(mapping: mmap.mmap) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nor is it written to
        return torch.frombuffer(mapping, dtype=torch.uint8)


def _large_pages(mapping: mmap.mmap, mapped: Tensor) -> float:
    """The share of it that is mapped in pages of 2 MiB, with all of it in memory."""
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
        mapping.madvise(_POPULATE_READ)
    except (OSError, AttributeError):  # an older system
        return 0.0
    inside = False
    num_bytes = 0
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            inside = int(name.partition("-")[0], 16) == mapped.data_ptr()
        elif inside and name in ("FilePmdMapped:", "ShmemPmdMapped:"):
            num_bytes += int(value.split()[0]) * 1024
    return num_bytes / len(mapping)


def _is_whole(path: Path) -> bool:
    if not is_private(path):
        return False
    try:
        with path.open("rb") as file:
            file.seek(-_TRAILER.size, os.SEEK_END)
            magic, num_bytes = _TRAILER.unpack(file.read())
            return bool(magic == _MAGIC and num_bytes == path.stat().st_size - _TRAILER.size)
    except OSError:
        return False


def _make(path: Path, build: Callable[[PackingMemory], object]) -> None:
    """Raises OSError, and Timeout where another process takes too long."""
    with FileLock(path.with_suffix(".lock"), timeout=_MAKING_S):
        if _is_whole(path):  # another process was faster
            return
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)  # a killed process may have left one
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                build(partial(_append, file))
                file.write(_TRAILER.pack(_MAGIC, file.tell()))
                file.flush()
                os.fsync(file.fileno())
                # Who maps the file reads it in large pages; what writing left in memory lies in small ones.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    _make_room(path)


def _append(file: BinaryIO, num_elements: int, dtype: torch.dtype, fill: Callable[[Tensor], None]) -> Tensor:
    """A `PackingMemory`, but for the file: writes what is packed, and keeps nothing."""
    packed = private_memory(num_elements, dtype, fill)
    file.write(bytes(-file.tell() % _ALIGNMENT))
    file.write(packed.view(torch.uint8).numpy().data)
    return packed.new_empty(0)


def _make_room(newest: Path) -> None:
    """Drops what was not used for longest. Who has a file mapped keeps it."""
    found = [entry for entry in newest.parent.iterdir() if entry != newest and entry.suffix in (".weights", ".part")]
    left = MAX_BYTES - newest.stat().st_size
    by_age = sorted(found, key=lambda entry: entry.stat().st_mtime, reverse=True)
    for number, entry in enumerate(by_age, 2):
        left -= entry.stat().st_size
        if left < 0 or number > MAX_FILES:
            entry.unlink(missing_ok=True)


def _digest(folder: Path, facts: str) -> str:
    digest = hashlib.sha256(f"{_code()} {facts} {torch.__version__}".encode())
    digest.update((folder / "config.json").read_bytes())
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*.gguf"))):
        stat = path.stat()
        identity = path.name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
        digest.update(repr(identity).encode())
    return digest.hexdigest()[:32]


@cache
def _code() -> str:
    """A digest of the code that reads and packs weights."""
    digest = hashlib.sha256()
    assert kernels.__file__ is not None
    for package in (Path(__file__).parents[1], Path(kernels.__file__).parent):
        for path in sorted(package.rglob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
