"""The files of host segments: their names, who lives, and which may go.

A segment's owner holds an exclusive flock on its file for life. The kernel lets go of it when the process is dead, and
at no other time, so whoever gets the lock knows that there is no owner, and is the owner from then on. A file gets its
name only when it is complete and locked: nobody ever sees one that is half made, and a crash while one is being made
leaves nothing behind.

**Nobody removes a file without holding its lock**, hence never one that is in use. A lock can still be won on a file
that has just lost its name; the winner looks whether the name is there before it trusts its lock.

What is in a file beyond its header is `index`'s. Linux only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kv_transfer.tiers.host.index import HEADER_BYTES, SegmentShape, read_shape
from kv_transfer.transports.shared_memory.segment import SegmentError

_NAME: Final = re.compile(r"legato-kv-([0-9a-f]{8,128})-[0-9a-f]{16}")
_SCOPE: Final = re.compile(r"[0-9a-f]{8,128}")
# The file system cannot make files without a name.
_NO_UNNAMED_FILES: Final = {errno.EOPNOTSUPP, errno.EISDIR}


@dataclass(frozen=True, slots=True)
class LockedFile:
    """A segment's file whose lock this process holds, through `fd` and whatever is mapped from it."""

    path: Path
    fd: int

    def unlock(self) -> None:
        """Give up the ownership. Closing is not enough: a mapping duplicates the descriptor and so keeps the lock."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        os.close(self.fd)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def segment_paths(folder: Path, scope: str) -> list[Path]:
    """The segments of one application, in the order of their names."""
    return sorted(path for path, found in _all_segments(folder) if found == scope)


def open_segment(path: Path, flags: int = os.O_RDONLY) -> tuple[int, SegmentShape] | None:
    """A descriptor of a whole segment of this user, and its shape; None if the path is none, or no more."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, PermissionError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise
    shape = _trusted_shape(fd)
    if shape is None:
        os.close(fd)
        return None
    return fd, shape


def adopt(folder: Path, scope: str, shape: SegmentShape) -> LockedFile | None:
    """Take over a segment of that shape whose owner is dead, if there is one. Raises SegmentError for a bad scope."""
    _check_scope(scope)
    for path in segment_paths(folder, scope):
        # The shape first, without the lock: who only looks must not keep another from adopting.
        locked = _lock(path, shape)
        if locked is not None:
            return locked
    return None


def create(folder: Path, scope: str, shape: SegmentShape) -> LockedFile:
    """Make a segment, locked and with all its memory taken. Raises SegmentError if there is no room.

    Memory is taken now, because a file system that is full later answers a write to a mapping with SIGBUS.
    """
    _check_scope(scope)
    path = folder / f"legato-kv-{scope}-{secrets.token_hex(8)}"
    with ExitStack() as stack:
        try:
            fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, shape.num_bytes)
            os.pwrite(fd, shape.header(), 0)
            _name(fd, folder, path)
        except OSError as error:
            raise _failure(folder, shape, error) from error
        stack.pop_all()
    return LockedFile(path, fd)


def free_bytes(folder: Path) -> int:
    """What this user may still take in the folder's file system. Raises SegmentError if it cannot be asked."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise SegmentError(
            f"The folder {folder} for host KV memory cannot be used: {error.strerror}. Name one in a memory file "
            "system, such as /dev/shm."
        ) from error
    return found.f_bavail * found.f_frsize


def sweep(folder: Path, own_scope: str) -> list[Path]:
    """Remove the segments of other applications of which no process is left; returns what was removed.

    A scope goes only while *all* of its segments' locks are held here, so an application with one live owner keeps
    those of its dead workers, for adoption. What may happen meanwhile is harmless, since segments are caches:

    * one of its workers starts and makes a new segment: that is locked from before it has a name, and is not among
      those that were locked here; the others would have been adopted, and are now lost content, not wrong content;
    * one of its workers tries to adopt while the lock is held here: it takes the segment for a live one and makes its
      own. If the sweep then finds a live owner, the segment stays, readable and free to be adopted by the next;
    * one of its workers adopts first: the lock is not to be had here, so the scope stays;
    * two sweeps meet: one of them misses a lock and leaves the scope to the other, or both do, until the next sweep;
    * a reader has a removed segment mapped: the mapping stays whole until the reader drops it.
    """
    scopes = sorted({scope for _, scope in _all_segments(folder)} - {own_scope})
    return [path for scope in scopes for path in _remove_if_dead(segment_paths(folder, scope))]


def remove_dead(folder: Path, scope: str) -> list[Path]:
    """Remove the segments of an application whose owners are dead, wherever others live; returns what was removed."""
    return [removed for path in segment_paths(folder, scope) for removed in _remove_if_dead([path])]


def remove_if_last(folder: Path, scope: str) -> list[Path]:
    """Remove an application's segments if none has an owner; returns what was removed. For an owner that has left.

    It has no way to tell whether its application ends or only it does. If another owner lives, the application goes on
    here, and what killed workers left stays to be adopted. If none does, it most likely ends: what is lost otherwise is
    the cache of a worker that was killed and has not been replaced yet.
    """
    return _remove_if_dead(segment_paths(folder, scope))


def _remove_if_dead(paths: list[Path]) -> list[Path]:
    """Remove all of them, or none if one of them has an owner."""
    with ExitStack() as stack:
        locked = []
        for path in paths:
            fd = _open_to_remove(path)
            if fd is None:
                continue
            stack.callback(os.close, fd)
            if not _try_lock(fd):
                return []
            locked.append(LockedFile(path, fd))
        mine = [file for file in locked if _still_named(file.path, file.fd)]
        for file in mine:
            file.remove()
        return [file.path for file in mine]


def _lock(path: Path, shape: SegmentShape) -> LockedFile | None:
    opened = open_segment(path, os.O_RDWR)
    if opened is None:
        return None
    fd, found = opened
    if found == shape and _try_lock(fd) and _still_named(path, fd):
        return LockedFile(path, fd)
    os.close(fd)
    return None


def _open_to_remove(path: Path) -> int | None:
    """Open a segment's file of whatever format, so that segments of another version of Legato go as well. None if it is
    not there or not ours."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if _is_own_file(fd):
        return fd
    os.close(fd)
    return None


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _still_named(path: Path, fd: int) -> bool:
    try:
        named = path.lstat()
    except FileNotFoundError:
        return False
    opened = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def _trusted_shape(fd: int) -> SegmentShape | None:
    """The shape that the file states. None if it states none, is another user's, or is shorter than it says: reading
    past its end would be fatal."""
    if not _is_own_file(fd):
        return None
    shape = read_shape(os.pread(fd, HEADER_BYTES, 0))
    return shape if shape is not None and os.fstat(fd).st_size == shape.num_bytes else None


def _is_own_file(fd: int) -> bool:
    """Anyone may put files into /dev/shm; only this user's can hold this user's KV."""
    found = os.fstat(fd)
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def _name(fd: int, folder: Path, path: Path) -> None:
    """Give the unnamed file its name; fails if the name is taken."""
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # With a directory given, Python calls linkat(2), which follows the link in /proc to the file itself.
        os.link(f"/proc/self/fd/{fd}", path.name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=True)
    finally:
        os.close(directory)


def _all_segments(folder: Path) -> list[tuple[Path, str]]:
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    matches = [match for name in names if (match := _NAME.fullmatch(name))]
    return [(folder / match[0], match[1]) for match in matches]


def _check_scope(scope: str) -> None:
    if not _SCOPE.fullmatch(scope):
        raise SegmentError(f"A segment's scope is a hex digest of 8 to 128 lower-case digits, not {scope!r}.")


def _failure(folder: Path, shape: SegmentShape, error: OSError) -> SegmentError:
    if error.errno in _NO_UNNAMED_FILES:
        reason = f"{folder} is on a file system that has no unnamed files (O_TMPFILE)"
    else:
        reason = str(error.strerror)
    return SegmentError(
        f"A host KV segment of {shape.num_bytes} bytes cannot be made in {folder}: {reason}. Give the host tier less "
        "memory, make the file system larger, or name a folder in another memory file system."
    )
