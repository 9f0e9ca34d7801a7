"""A file that grows by lines, for logs that other programs read. A disk that fails costs the log and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)


class LineLog:
    """Appends; several processes of one machine may share a file.

    Lines are written whole, in one call each time, by an append that the system makes atomic on local disks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False

    def create(self, first_line: str) -> None:
        """Begin the file with that line, unless there is one."""
        self._write("xb", [first_line])

    def append(self, lines: Iterable[str]) -> None:
        self._write("ab", lines)

    def _write(self, mode: str, lines: Iterable[str]) -> None:
        """Whatever cannot be written is lost; it is said once."""
        data = "".join(f"{line}\n" for line in lines).encode()
        if not data or self._failed:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open(mode, buffering=0) as file:
                file.write(data)
        except FileExistsError:
            if mode != "xb":
                self._give_up("its folder is a file")
        except OSError as error:
            self._give_up(str(error))

    def _give_up(self, reason: str) -> None:
        self._failed = True
        logger.error("%s cannot be written, and is given up: %s", self._path, reason)
