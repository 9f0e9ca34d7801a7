"""Where a model's files are: a name becomes a local folder that holds everything the engine reads.

The folder holds config.json, *.safetensors, the tokenizer, and where the model has them generation_config.json and a
chat template. Built-in models are converted once into the cache folder; local folders are used as they are; a GGUF file
gets a folder in the cache that points to it; anything like `owner/name`, or `owner/name@revision`, is fetched from the
Hugging Face hub, without a single file that could carry code, and its weights only if its config.json can be served.

    python -m engine.checkpoint.store smollm2-135m-instruct      # prints the folder
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from filelock import FileLock, Timeout

from engine.checkpoint.builtin_models import (
    BUILTIN_MODELS,
    BuiltinModel,
    ModelUnavailableError,
    build_checkpoint,
    find_fault,
)
from engine.checkpoint.gguf.store import GGUF_NAME, gguf_folder, gguf_in
from kernels.cache_folder import default_cache_dir

if TYPE_CHECKING:
    import httpx2

    from engine.model.config import Backend

DEFAULT_MODEL = "smollm2-135m-instruct"

_LOCK_DEADLINE_S = 3600.0
_HUB_ID = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w-][\w.-]*))?")
_ADDRESS: Final = "://"
_OF_THE_HUB: Final = re.compile(r"(?:https?://(?:www\.)?huggingface\.co|hf:/)/(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)/?")
_HUB_WEIGHTS: Final = "model*.safetensors"
_SMALL_HUB_FILES: Final = [
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "*_Pooling/config.json",
]


def print_progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def resolve_model(
    ref: str,
    *,
    cache_dir: Path | None = None,
    progress: Callable[[str], None] = print_progress,
    verify: bool = False,
    backend: Backend = "auto",
    with_weights: bool = True,
) -> Path:
    """The local folder of a model: a built-in name, a Hugging Face checkpoint folder, a GGUF file or the folder of one,
    or a hub id `owner/name`, `owner/name@revision` (a commit, tag or branch).

    `verify` compares the checksums of a built-in model's files, not only their sizes; a faulty folder is replaced.
    `backend`: whose code is to compute a hub model. Its weights are fetched only if that can. Not `with_weights`: who
    asks only reads config and tokenizer; of a hub model nothing else is fetched, and a folder needs nothing else. A
    built-in model is made whole all the same.
    Raises ValueError for a reference that names nothing usable and for a hub model that cannot be served,
    ModelUnavailableError when fetching it failed.
    """
    require_no_address(ref)
    if ref in BUILTIN_MODELS:
        return _resolve_builtin(BUILTIN_MODELS[ref], cache_dir or default_cache_dir(), progress, verify)
    folder = Path(ref).expanduser()
    gguf_file = gguf_in(folder) if ref else None
    if gguf_file is not None:
        return gguf_folder(gguf_file, cache_dir or default_cache_dir())
    if ref and folder.is_dir():
        return _require_checkpoint(folder, with_weights)
    if hub_id := _HUB_ID.fullmatch(ref):
        folder = _fetch_from_hub(hub_id["name"], hub_id["revision"], cache_dir, progress, backend, with_weights)
        return _require_checkpoint(folder, with_weights)
    raise ValueError(
        f"model {ref!r} is not known: give a built-in name ({', '.join(BUILTIN_MODELS)}), the path of an existing "
        "folder with a Hugging Face checkpoint, of a GGUF file, or a hub id such as Qwen/Qwen3-0.6B or"
        " Qwen/Qwen3-0.6B@main"
    )


def require_no_address(ref: str) -> None:
    """Check that a reference is no address, such as a bucket's: what is there is not fetched. Raises ValueError."""
    if _ADDRESS not in ref:
        return
    if page := _OF_THE_HUB.fullmatch(ref):
        raise ValueError(f"model {ref!r} is an address; write the hub id alone: {page['id']}")
    raise ValueError(
        f"model {ref!r} is an address, and neither buckets nor web servers are read: mount it, or copy it, to a folder"
        " that each node with a worker or a gateway has, and write the folder's path"
    )


def is_hub_id(ref: str) -> bool:
    """Whether a model of this name is fetched from the Hugging Face hub, where it is no folder and no file here."""
    return _HUB_ID.fullmatch(ref) is not None


def hub_folder(ref: str) -> Path | None:
    """The folder of a hub model as far as it has been fetched: whole, or without its weights, as of one that cannot be
    served. None: nothing of it is on this machine, or not all small files. Asks nobody."""
    from huggingface_hub import snapshot_download

    name, _, revision = ref.partition("@")
    for patterns in ([*_SMALL_HUB_FILES, _HUB_WEIGHTS], _SMALL_HUB_FILES):
        with contextlib.suppress(OSError):  # not in the hub's cache
            return Path(
                snapshot_download(name, revision=revision or None, allow_patterns=patterns, local_files_only=True)
            )
    return None


def has_weights(folder: Path) -> bool:
    """Whether a model's folder holds weights, at least some."""
    return any(folder.glob("*.safetensors")) or (folder / GGUF_NAME).exists()


def _resolve_builtin(model: BuiltinModel, cache_dir: Path, progress: Callable[[str], None], verify: bool) -> Path:
    folder = cache_dir / model.name
    if find_fault(model, folder, checksums=verify) is None:
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _lock(cache_dir / f"{model.name}.lock", model, progress):
        fault = find_fault(model, folder, checksums=verify)  # whoever held the lock before may have put it right
        if fault is not None:
            if folder.exists():
                progress(f"Replacing {folder}: {fault}")
            _install(model, folder, progress)
            progress(f"{model.name} is in {folder}")
    return folder


def _lock(path: Path, model: BuiltinModel, progress: Callable[[str], None]) -> FileLock:
    """Acquired; the operating system releases it when its holder dies, so a killed run blocks nobody."""
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        progress(f"Another process is preparing {model.name}; waiting for it")
        try:
            lock.acquire(timeout=_LOCK_DEADLINE_S)
        except Timeout:
            raise ModelUnavailableError(
                f"another process has been preparing {model.name} for {_LOCK_DEADLINE_S:.0f} s (it holds {path}); "
                "stop it, then try again"
            ) from None
    return lock


def _install(model: BuiltinModel, folder: Path, progress: Callable[[str], None]) -> None:
    """Build in a folder beside, then rename: `folder` is complete or absent, whenever this process dies."""
    prefix = f".{model.name}.partial-"
    for leftover in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as work_folder:
        built = build_checkpoint(model, Path(work_folder), progress)
        if folder.exists():
            folder.rename(Path(work_folder) / "replaced")
        built.rename(folder)


def _require_checkpoint(folder: Path, with_weights: bool) -> Path:
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    # Who needs no weights may find files here that are another's: of a hub model, one that somebody fetched alone.
    is_enough = not with_weights and has_tokenizer and (folder / "config.json").is_file()
    if not (is_enough or has_weights(folder)) and (found := sorted(folder.glob("*.gguf"))):
        raise ValueError(
            f"{folder} has {_count_gguf(found)} and no *.safetensors file: write the path of one that is to be the"
            f" model, such as {found[0].absolute()}"
        )
    _require_config(folder)
    if with_weights and not has_weights(folder):
        raise ValueError(f"{folder} has no *.safetensors file; weights of other kinds can carry code and are not read")
    if not has_tokenizer:
        raise ValueError(f"{folder} has no tokenizer: tokenizer.json, tokenizer.model or vocab.json must be there")
    return folder


def _require_config(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no Hugging Face checkpoint: config.json is missing")


def _count_gguf(files: Sequence[object]) -> str:
    return "one GGUF file" if len(files) == 1 else f"{len(files)} GGUF files"


def _require_no_gguf(name: str, revision: str) -> None:
    """Check that a hub model, which lacks config.json or weights, has no GGUF files, as far as the hub says. Raises
    ValueError."""
    import httpx2
    from huggingface_hub import HfApi

    found: list[str] = []
    with contextlib.suppress(OSError, httpx2.HTTPError):
        files = HfApi().model_info(name, revision=revision).siblings or ()
        found = sorted(file.rfilename for file in files if file.rfilename.endswith(".gguf"))
    if found:
        raise ValueError(
            f"{name} has {_count_gguf(found)} and no *.safetensors checkpoint, and of the hub only those are fetched:"
            f" fetch the file that is to be the model, such as by `hf download {name} {shlex.quote(found[0])}`, which"
            " prints its path, and write that"
        )


def _fetch_from_hub(
    name: str,
    revision: str | None,
    cache_dir: Path | None,
    progress: Callable[[str], None],
    backend: Backend,
    with_weights: bool,
) -> Path:
    """Fetch the small files, and then, if they are wanted, the weights of the same commit, unless the config cannot be
    served: that is told before tens of gigabytes have come. Raises ValueError if it cannot, ModelUnavailableError."""
    import httpx2  # both take half a second, which processes that fetch nothing need not spend
    from huggingface_hub import get_session, snapshot_download

    # Certificates or a proxy may let no client be made: who asks the hub is told so then, and nobody is asked for a
    # commit that is there.
    with contextlib.suppress(OSError, ImportError, ValueError):
        if _limit_silence not in (hooks := get_session().event_hooks["request"]):
            hooks.append(_limit_silence)
    ref = name if revision is None else f"{name}@{revision}"
    fetch = partial(snapshot_download, name, cache_dir=cache_dir and cache_dir / "hub")
    all_files = [*_SMALL_HUB_FILES, _HUB_WEIGHTS]
    progress(f"Fetching {ref} from the Hugging Face hub")
    failed = "is no local folder and could not be fetched from the Hugging Face hub"
    try:
        folder = Path(fetch(revision=revision, allow_patterns=_SMALL_HUB_FILES))
        if not (folder / "config.json").is_file():
            _require_no_gguf(name, folder.name)
        if not with_weights:
            return folder
        if not has_weights(folder):  # else they were begun, by who had looked
            _require_servable(folder, backend)
        failed = f"is in {folder}, but its weights have not been fetched, nor could they be from the Hugging Face hub"
        folder = Path(fetch(revision=folder.name, allow_patterns=all_files))
        if not has_weights(folder):
            _require_no_gguf(name, folder.name)
        return folder
    except (OSError, httpx2.HTTPError) as error:
        raise ModelUnavailableError(
            f"{ref!r} {failed}. Check the name, the network, and for a gated model that HF_TOKEN is set; "
            "HF_HUB_OFFLINE=1 takes what is on this machine and asks nobody, HF_HUB_ETAG_TIMEOUT=60 waits longer for a "
            f"slow hub. The hub's client says: {error}"
        ) from error


def _limit_silence(request: httpx2.Request) -> None:
    """Let a request of the hub's client that has no limit of time fail where the hub is silent for as long as those
    that have one wait (HF_HUB_ETAG_TIMEOUT): it asks for a name's commit without any, and a hub that took the
    connection and answered nothing would hold a start for ever. Then what is on this machine is taken."""
    from huggingface_hub import constants

    limits = request.extensions.get("timeout", {})
    if all(limit is None for limit in limits.values()):
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write"), constants.HF_HUB_ETAG_TIMEOUT)


def _require_servable(folder: Path, backend: Backend) -> None:
    """Check a model by its config alone, as whoever loads it does. Raises ValueError if it cannot be served."""
    from engine.model.config import read_config  # takes seconds to import

    _require_config(folder)
    read_config(folder, backend)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a model available locally and print its folder.")
    parser.add_argument("ref", nargs="?", default=DEFAULT_MODEL, help="built-in name, folder or hub id (%(default)s)")
    parser.add_argument("--verify", action="store_true", help="compare checksums, not only sizes")
    arguments = parser.parse_args()
    try:
        print(resolve_model(arguments.ref, verify=arguments.verify))
    except (ValueError, ModelUnavailableError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
