"""The folder that one disk tier owns: its lock, and whole files written, read and removed by slot number.

Under the configured path each worker process has a subfolder, `worker-000` and so on, and holds a lock (`flock`) in it
for life, so the kernel says which are free. Their number grows with the most workers that ever ran at once; neither
subfolders nor lock files are ever removed, hence a lock always means the folder it lies in.

A file appears under its name complete or not at all: it is written under a temporary name and renamed. Without `sync` a
crash of the machine may still leave a named file with old or missing contents, which digests tell.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from itertools import count
from pathlib import Path
from typing import Final

from kv_transfer.tiers.disk.column_files import ALIGNMENT, DamagedColumnError, aligned_buffer

_LOCK: Final = "owner.lock"
_PROBE: Final = "probe.tmp"
_SUBFOLDER: Final = re.compile(r"worker-\d{3,}")
_SLOT_FILE: Final = re.compile(r"(\d{8})\.kv")
_TEMPORARY: Final = re.compile(r"\d{8}\.tmp")
MAX_SLOTS: Final = 10**8


class DiskTierError(Exception):
    """The disk tier's folder cannot be used; a sentence says why."""


class DiskFolder:
    """One locked folder. All names are looked up in the open directory, so it may be moved while in use."""

    def __init__(self, path: Path, lock_fd: int, *, sync: bool) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self._sync = sync
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._direct = self._probe_direct()
        except OSError:
            os.close(self._fd)
            raise

    @classmethod
    def take(cls, root: Path, mark: str, *, sync: bool = False) -> DiskFolder:
        """Lock a subfolder of `root`: one last used with the same `mark`, else any that is free, else a new one.

        Raises DiskTierError if the folder cannot be made or written to.
        """
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            path, lock_fd = _lock_subfolder(root, mark)
            try:
                return cls(path, lock_fd, sync=sync)
            except OSError:
                os.close(lock_fd)
                raise
        except OSError as error:
            raise DiskTierError(
                f"The disk tier cannot use the folder {root}: {error}. Choose a folder that this user may write to, or"
                " switch the disk tier off."
            ) from error

    def write(self, slot: int, file: memoryview) -> None:
        """Replace the slot's file; page-aligned bytes. After an OSError the slot has no file, or its old one."""
        name, temporary = _name(slot), _temporary(slot)
        with contextlib.suppress(FileNotFoundError):
            # The old file's room is used again: there are never more files than slots.
            os.rename(name, temporary, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        try:
            self._fill(temporary, file)
            os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._fd)
            raise
        if self._sync:
            os.fsync(self._fd)

    def read(self, slot: int, buffer: memoryview, file_bytes: int) -> None:
        """Fill `buffer` (page-aligned, whole pages) from the start of the slot's file.

        Raises OSError, or DamagedColumnError if the file has not exactly `file_bytes`.
        """
        fd = os.open(_name(slot), os.O_RDONLY | os.O_CLOEXEC | self._direct, dir_fd=self._fd)
        try:
            if os.fstat(fd).st_size != file_bytes:
                raise DamagedColumnError(f"it has {os.fstat(fd).st_size} bytes, not {file_bytes}")
            done = 0
            while done < buffer.nbytes:
                num_read = os.preadv(fd, [buffer[done:]], done)
                if num_read == 0:
                    raise DamagedColumnError(f"it ends after {done} bytes")
                done += num_read
            self._leave_page_cache(fd)
        finally:
            os.close(fd)

    def remove(self, slot: int) -> None:
        """Remove the slot's file, if there is one and that is possible: what stays is replaced by the next write."""
        self._unlink(_name(slot))

    def touch(self, slot: int) -> None:
        """Note on disk that the slot was used now; only the order of eviction after a restart depends on it."""
        with contextlib.suppress(OSError):
            os.utime(_name(slot), ns=_now_ns(), dir_fd=self._fd)

    def move(self, slot: int, to: int) -> None:
        os.rename(_name(slot), _name(to), src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def slots_by_use(self) -> list[int]:
        """The slots of the files that an earlier life has left, the last written or `touch`ed first.

        Unfinished files are removed. Files of other names are not touched.
        """
        with os.scandir(self._fd) as entries:
            names = [entry.name for entry in entries]
        used: list[tuple[int, int]] = []
        for name in names:
            if _TEMPORARY.fullmatch(name):
                self._unlink(name)
            elif match := _SLOT_FILE.fullmatch(name):
                used_ns = os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mtime_ns
                used.append((used_ns, int(match[1])))
        return [slot for _, slot in sorted(used, reverse=True)]

    def close(self) -> None:
        """Give the lock back. No other method may run or be called any more."""
        os.close(self._fd)
        os.close(self._lock_fd)

    def _fill(self, name: str, file: memoryview) -> None:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | self._direct, 0o600, dir_fd=self._fd)
        try:
            os.ftruncate(fd, file.nbytes)  # the file used again may be one that was damaged in length
            done = 0
            while done < file.nbytes:
                num_written = os.pwrite(fd, file[done:], done)
                if num_written == 0:
                    raise OSError(errno.EIO, "nothing was written", name)
                done += num_written
            os.utime(fd, ns=_now_ns())
            if self._sync:
                os.fdatasync(fd)
            self._leave_page_cache(fd)
        finally:
            os.close(fd)

    def _leave_page_cache(self, fd: int) -> None:
        """The memory belongs to the tiers above, which hold what is used often."""
        if not self._direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _probe_direct(self) -> int:
        """O_DIRECT if the file system takes it for whole pages, else 0."""
        try:
            fd = os.open(_PROBE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o600, dir_fd=self._fd)
            try:
                os.pwrite(fd, aligned_buffer(ALIGNMENT), 0)
            finally:
                os.close(fd)
        except OSError as error:
            # A full disk tells nothing, and what it holds can be read all the same.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            return 0
        finally:
            self._unlink(_PROBE)
        return os.O_DIRECT

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._fd)


def _lock_subfolder(root: Path, mark: str) -> tuple[Path, int]:
    present = sorted(path for path in root.iterdir() if _SUBFOLDER.fullmatch(path.name) and _is_ours(path))
    alike = [path for path in present if _mark_of(path) == mark]
    for path in alike + [path for path in present if path not in alike]:
        if (lock_fd := _try_lock(path, mark)) is not None:
            return path, lock_fd
    for index in count():
        path = root / f"worker-{index:03}"
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        if (lock_fd := _try_lock(path, mark)) is not None:
            return path, lock_fd
    raise AssertionError("count() does not end")


def _is_ours(path: Path) -> bool:
    """KV that another user has put there is not to be believed."""
    status = path.lstat()
    return path.is_dir() and status.st_uid == os.geteuid()


def _mark_of(path: Path) -> str:
    """Read without the lock, so that looking at a folder never keeps its last owner's heir from taking it."""
    try:
        return (path / _LOCK).read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _try_lock(path: Path, mark: str) -> int | None:
    """The descriptor of the folder's lock, held and marked as ours; None if another process holds it."""
    fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    with contextlib.suppress(OSError):  # on a full disk the mark lacks; the lock is what counts
        os.ftruncate(fd, 0)
        os.pwrite(fd, mark.encode(), 0)
    return fd


def _now_ns() -> tuple[int, int]:
    """Times of access and modification; the kernel's own are too coarse to tell the columns of a prefix apart."""
    now_ns = time.time_ns()
    return now_ns, now_ns


def _name(slot: int) -> str:
    return f"{slot:08}.kv"


def _temporary(slot: int) -> str:
    return f"{slot:08}.tmp"
