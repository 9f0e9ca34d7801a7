"""The folder that adapters are in: what clients name as `model` beside the model itself.

It is all there is to know, and is looked at whenever an adapter is named. So what is put there, replaced or taken away
is so from the next request on, at every gateway that sees the folder, and after a restart. An adapter is a folder below
it, or a link to one elsewhere, which is what `register` makes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, ParamSpec, TypeVar

from engine.checkpoint.adapters import CONFIG_NAME, WEIGHTS_NAME, AdapterReader, adapter_digest
from engine.model.config import Backend, ModelConfig, read_config
from kv_transfer.messages.requests import AdapterRef

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

MAX_NAME: Final = 200  # bytes: names of files have at most 255
_MOST_KNOWN: Final = 10_000  # digests that are remembered
_THREADS: Final = 4  # for a folder's calls
_WATCHED_EVERY_S: Final = 2.0
_SHARE_OF_WATCHING: Final = 0.1  # of one core, at most

_Identity = tuple[tuple[int, int, int, int], ...]
"""Of an adapter's files, as far as can be told without reading them."""


class ListedAdapter(NamedTuple):
    """An adapter that is in the folder, whether or not it can be computed."""

    name: str
    folder: str
    changed_at: int  # in seconds since 1970


class AdapterFolder:
    """Adapters of one model. May be used by several threads: all of it waits for a disk. `in_thread` does so for an
    event loop."""

    def __init__(self, folder: Path, model: ModelConfig, *, max_rank: int) -> None:
        """Makes the folder where there is none. Raises OSError."""
        self._folder = folder
        self._reader = AdapterReader(model, max_rank)
        self._known: dict[Path, tuple[_Identity, str]] = {}  # what was checked, with its digest
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="adapters")
        folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def of(cls, folder: str, model_folder: Path, backend: Backend, max_rank: int) -> AdapterFolder:
        """Raises ValueError where the model is not computed by Legato's own code."""
        config = read_config(model_folder, backend)
        if not isinstance(config, ModelConfig):
            raise ValueError(
                f"the model in {model_folder} is computed by transformers' {config.architecture}, for which adapters is"
                " not built; leave adapters.folder out, or use a model with the backend native"
            )
        return cls(Path(folder).expanduser().absolute(), config, max_rank=max_rank)

    def watch(self) -> None:
        """From now on, in a thread that ends with the process, work out the digest of whatever is put into the folder,
        so that the first request that names it need not wait for that."""
        threading.Thread(target=self._watch, name="adapters-watch", daemon=True).start()

    def _watch(self) -> None:
        while True:
            adapters: list[ListedAdapter] = []
            with contextlib.suppress(OSError):  # `listed` tells of it, when somebody asks
                adapters = self._all()
            for adapter in adapters:
                began = time.thread_time()
                with contextlib.suppress(ValueError, OSError):  # whoever names it is told
                    self._digest(Path(adapter.folder))
                time.sleep((time.thread_time() - began) / _SHARE_OF_WATCHING)
            time.sleep(_WATCHED_EVERY_S)

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call one of the methods below in a thread. The threads are this folder's own: where it lies on a server that
        does not answer, each call takes one for ever, and requests that name no adapter need threads, too."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **kwargs))

    def find(self, name: str) -> AdapterRef | None:
        """The adapter of this name as it is now; None: there is none. Raises ValueError for one that cannot be
        computed, OSError for one that cannot be read."""
        if not _is_name(name) or not (self._folder / name).is_dir():
            return None
        folder = (self._folder / name).resolve()
        return AdapterRef(name=name, digest=self._digest(folder), folder=str(folder))

    def listed(self) -> list[ListedAdapter]:
        """The adapters in the folder that can be read, by name. Empty, and logged, where the folder itself cannot be:
        models are listed with them."""
        try:
            return self._all()
        except OSError as error:
            logger.warning("No adapters are listed: %s", error)
            return []

    def _all(self) -> list[ListedAdapter]:
        names = sorted(entry.name for entry in self._folder.iterdir())
        return [told for name in names if (told := self.look(name)) is not None]

    def look(self, name: str) -> ListedAdapter | None:
        """The adapter of this name as it lies there. None: what has this name is no adapter, cannot be read, or has
        just gone."""
        folder = self._folder / name
        try:
            if not _is_name(name) or not (folder / CONFIG_NAME).is_file():
                return None
            return ListedAdapter(name, os.path.realpath(folder), int(folder.stat().st_mtime))
        except OSError:
            return None

    def has(self, name: str) -> bool:
        """Whether something lies there under that name, which need be no adapter that can be computed."""
        return _is_name(name) and os.path.lexists(self._folder / name)

    def register(self, name: str, folder: Path, *, replace: bool) -> None:
        """The adapter in a folder elsewhere is named so from now on. Raises ValueError where it cannot be, or where
        there is one of the name and it is not to be replaced."""
        if not _is_name(name):
            raise ValueError(
                f"{name[:MAX_NAME]!r} is no name for an adapter: write up to {MAX_NAME} bytes without a slash, of which"
                " the first is no dot"
            )
        if not folder.is_absolute() or not folder.is_dir():
            raise ValueError(f"{folder} is no folder on the gateway's machine; give an absolute path")
        link, folder = self._folder / name, folder.resolve()
        self._digest(folder)
        if replace and link.is_symlink():
            self._exchange(link, folder)
            return
        try:
            link.symlink_to(folder)  # of several gateways that are told the same name at once, one makes it
        except FileExistsError:
            if replace and link.is_symlink():  # another gateway has made it since
                self._exchange(link, folder)
                return
            raise ValueError(
                f"there is an adapter {name!r} already"
                + (", a folder that was put there by hand; replace that by hand" if not link.is_symlink() else "")
            ) from None

    def _exchange(self, link: Path, folder: Path) -> None:
        """A link in the place of the one that there is, at once: nobody finds none."""
        new = self._folder / f".{secrets.token_hex(8)}"
        new.symlink_to(folder)
        try:
            new.replace(link)
        except OSError:
            new.unlink()
            raise

    def unregister(self, name: str) -> bool:
        """Nobody can name it any more; False: nobody could. Raises ValueError for one that was put there by hand."""
        if not self.has(name):
            return False
        path = self._folder / name
        if not path.is_symlink() and path.exists():  # or another gateway, told the same, has just removed it
            raise ValueError(f"the adapter {name!r} is a folder that was put into {self._folder}; take it out by hand")
        path.unlink(missing_ok=True)  # another gateway may have been told the same
        return True

    def _digest(self, folder: Path) -> str:
        """Raises ValueError for what cannot be computed."""
        identity = _identity(folder)
        known = self._known.get(folder)
        if known is not None and known[0] == identity:
            return known[1]
        self._reader.check(folder)
        digest = adapter_digest(folder)
        if _identity(folder) != identity:
            raise ValueError(f"the adapter in {folder} is being written; ask again when it is whole")
        with self._lock:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[folder] = identity, digest
        return digest


def _is_name(name: str) -> bool:
    return name.isprintable() and 0 < len(name.encode()) <= MAX_NAME and "/" not in name and name[0] != "."


def _identity(folder: Path) -> _Identity:
    """Raises ValueError for what is no adapter."""
    found = []
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        try:
            stat = (folder / name).stat()
        except OSError:
            adapter_digest(folder)  # says what lacks
            raise ValueError(f"{folder / name} is there again by now; ask again") from None
        found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return tuple(found)
