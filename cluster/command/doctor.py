"""`legato doctor`: what this machine has for `legato serve`, what it lacks, and what to do.

Reaches for nothing outside of it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from cluster.command.serve import count_gpus
from cluster.config.fields import format_size
from cluster.config.load import ConfigError, draw_secret
from cluster.config.settings import GatewaySettings
from cluster.deployment.local_cluster import OBJECT_STORE_BYTES, StartError, require_free_port
from cluster.deployment.ray_access import TOKEN_ADVICE, token_path
from engine.memory.control_groups import usable_cores
from kernels.cache_folder import default_cache_dir

_MEMORY_BYTES: Final = 6 * 10**9  # a small model's workers, Ray and Serve take so much together
_SHARED_BYTES: Final = OBJECT_STORE_BYTES + 2 * 512 * 2**20  # with two workers' host memory for KV, as `serve` makes it
_CACHE_BYTES: Final = 2 * 10**9  # room for a model of some hundred MB as it comes, converted and packed
_FILES: Final = 4096  # open at once: two for each client that is being answered, and Ray's own
_SLOW_CLOCKS: Final = ("hpet", "acpi_pm", "jiffies")
_NVIDIA_SMI_S: Final = 20.0

Level = Literal["ok", "warn", "stop"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one thing on this machine. `told`: what there is; `advice`: what to do about it, if
    anything. The level `stop`: `legato serve` would fail."""

    level: Level
    what: str
    told: str
    advice: str = ""


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns its exit code: 1 if something stops `legato serve`."""
    stops = 0
    for finding in examine(arguments.port):
        print(f"{finding.level:<5} {finding.what}: {finding.told}", flush=True)
        if finding.advice:
            print(f"      -> {finding.advice}", flush=True)
        stops += finding.level == "stop"
    things = "one thing stops" if stops == 1 else f"{stops} things stop"
    print(f"\n{things} `legato serve` here." if stops else "\n`legato serve` can start here.", flush=True)
    return 1 if stops else 0


def examine(port: int, *, shared_memory: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Yields all findings, one after the other.
    `shared_memory`: where processes of one machine share files in memory."""
    looks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _packages,
        _cores,
        _memory,
        lambda: _shared_memory(shared_memory),
        _kernels,
        _gpus,
        lambda: _port(port),
        _files,
        _cache,
        _token,
        _storage,
        _clock,
        _secret,
    )
    for look in looks:
        yield from look()


def _python() -> Iterator[Finding]:
    told = f"{platform.python_version()} at {sys.executable}"
    wanted = _wanted_python()
    if wanted and platform.python_version() not in SpecifierSet(wanted):
        yield Finding("stop", "Python", told, f"Legato needs {wanted}: make a virtual environment with such a Python.")
    elif sys.platform != "linux":
        yield Finding(
            "stop", "system", platform.system(), "Legato runs on Linux: use a container or a virtual machine."
        )
    else:
        yield Finding("ok", "Python", told)


def _wanted_python() -> str:
    """The versions of Python that Legato needs; "" if it is not installed."""
    try:
        return importlib.metadata.metadata("legato")["Requires-Python"]
    except (importlib.metadata.PackageNotFoundError, KeyError):
        return ""


def _packages() -> Iterator[Finding]:
    """Compare installed packages with the versions that Legato is made for."""
    try:
        lines = importlib.metadata.requires("legato") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "warn",
            "packages",
            "Legato runs from a folder and is not installed, so no versions can be compared",
            "pip install it, or `make setup` in its folder.",
        )
        return
    found: dict[str, str] = {}
    has_faults = False
    for requirement in map(Requirement, lines):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = found[requirement.name] = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            has_faults = True
            yield Finding("stop", requirement.name, "is not installed", f"pip install '{_bare(requirement)}'")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            has_faults = True
            told = f"{version}, and Legato is made for {requirement.specifier}"
            yield Finding("warn", requirement.name, told, f"pip install '{_bare(requirement)}'")
    if not has_faults:
        chief = ", ".join(f"{name} {found[name]}" for name in ("torch", "ray", "transformers") if name in found)
        yield Finding("ok", "packages", f"{chief} and {len(found) - 3} others, as Legato is made for")


def _bare(requirement: Requirement) -> str:
    """A requirement without its marker, as pip takes it."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"


def _cores() -> Iterator[Finding]:
    cores = usable_cores()
    if cores < 2:
        advice = "A prefill and a decode worker share it; `legato serve MODEL --prefill 0` starts one that does both."
        yield Finding("warn", "cores", "1", advice)
    else:
        yield Finding("ok", "cores", str(cores))


def _memory() -> Iterator[Finding]:
    total, free = _memory_bytes(), psutil.virtual_memory().available
    told = f"{total / 1e9:.1f} GB, {min(free, total) / 1e9:.1f} GB of it free"
    if min(free, total) < _MEMORY_BYTES:
        advice = (
            f"A small model's cluster takes up to {_MEMORY_BYTES / 1e9:.0f} GB, and Ray kills workers where memory runs"
            " out. Lower kv.*.memory and kv.*.host_memory (`legato check` says what a configuration takes)."
        )
        yield Finding("warn", "memory", told, advice)
    else:
        yield Finding("ok", "memory", told)


def _memory_bytes() -> int:
    """The memory of this machine, or of this container."""
    try:
        from engine.memory.host import memory_bytes  # it imports torch, which may be what is missing
    except ImportError:
        return int(psutil.virtual_memory().total)
    return memory_bytes()


def _shared_memory(folder: Path) -> Iterator[Finding]:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        yield Finding("warn", str(folder), f"cannot be used: {error.strerror}", _SHARED_ADVICE)
        return
    told = f"{usage.free / 1e6:.0f} MB free of {usage.total / 1e6:.0f}"
    if usage.free < OBJECT_STORE_BYTES:
        told += f", and Ray's object store takes {OBJECT_STORE_BYTES / 1e6:.0f}: it goes to /tmp, on the disk"
        yield Finding("warn", str(folder), told, _SHARED_ADVICE)
    elif usage.free < _SHARED_BYTES:
        told += f", and two workers with 512MiB of host memory for KV take {_SHARED_BYTES / 1e6:.0f} with Ray's store"
        yield Finding("warn", str(folder), told, _SHARED_ADVICE)
    else:
        yield Finding("ok", str(folder), told)


_SHARED_ADVICE: Final = (
    "Give the container a larger one (docker run --shm-size=2g; in Kubernetes an emptyDir of medium Memory)."
    " Without, each worker's host memory for KV is private, and prefixes are not shared on the node. KV on its way from"
    " prefill to decode needs none of it."
)


def _kernels() -> Iterator[Finding]:
    """Look for what the CPU's kernels need: torch, a processor with AVX2, a C++ compiler."""
    try:
        from kernels.native.library import SWITCH, NativeUnavailableError, find_compiler, processor_instructions
    except (ImportError, OSError) as error:
        yield Finding("stop", "torch", f"cannot be imported: {error}", "pip install torch==2.13.0")
        return
    slower = "Without, workers on CPUs compute by torch's operators: several times slower, and sums depend on batches."
    if os.environ.get(SWITCH) == "0":
        yield Finding("warn", "CPU kernels", f"{SWITCH}=0 leaves them to torch", f"Unset it. {slower}")
        return
    try:
        instructions = processor_instructions().name
        told = f"for {instructions}; answers in bfloat16 are the same to the bit on nodes that say the same"
        yield Finding("ok", "CPU kernels", told)
    except NativeUnavailableError as error:
        yield Finding("warn", "CPU kernels", str(error), f"They need AVX2. {slower}")
    try:
        yield Finding("ok", "C++ compiler", f"{find_compiler()}, for the CPU's kernels")
    except NativeUnavailableError:
        advice = f"Install one (apt-get install g++), or name one in CXX. {slower}"
        yield Finding("warn", "C++ compiler", "there is none of GNU's", advice)


def _gpus() -> Iterator[Finding]:
    num_gpus = count_gpus()
    if not num_gpus:
        yield Finding("ok", "GPUs", "none; workers compute on the CPU")
        return
    yield Finding("ok", "GPUs", _nvidia_smi() or f"{num_gpus} (nvidia-smi says nothing)")
    try:
        import torch

        if not torch.cuda.is_available():
            told = f"torch {torch.__version__} cannot use them"
            advice = "Install a torch that was built for this driver's CUDA, or serve with --cpu."
            yield Finding("stop", "torch", told, advice)
    except (ImportError, OSError):
        pass  # told above
    if importlib.util.find_spec("triton") is None:
        yield Finding("stop", "Triton", "is not installed", "pip install 'legato[gpu]', or serve with --cpu.")
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")  # where Triton looks
    if not header.is_file():
        advice = f"Install them (apt-get install python3-dev, for {sys.executable}), or serve with --cpu."
        yield Finding("stop", "Python's headers", f"{header} is not there, and Triton compiles nothing without", advice)


def _nvidia_smi() -> str:
    """Names, memory and driver of the GPUs; "" if nvidia-smi does not say."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(done.stdout.strip().splitlines())


def _port(port: int) -> Iterator[Finding]:
    try:
        require_free_port("127.0.0.1", port)
    except StartError as error:
        told, _, advice = str(error).partition(". ")
        yield Finding("stop", "port", told, advice)
    else:
        yield Finding("ok", "port", f"{port} is free")


def _files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FILES and soft != resource.RLIM_INFINITY:
        advice = f"ulimit -n {min(65_536, hard) if hard != resource.RLIM_INFINITY else 65_536}, before `legato serve`."
        told = f"{soft} at once, which many clients reach"
        yield Finding("warn", "open files", told, advice)
    else:
        yield Finding("ok", "open files", f"{soft} at once")


def _cache() -> Iterator[Finding]:
    """Look whether the folder for models and compiled kernels can be written and has room."""
    advice = "Set LEGATO_CACHE to a folder of your own: a model has to be converted into it before it is served."
    try:
        folder = default_cache_dir()
    except RuntimeError as error:  # there is no home
        yield Finding("stop", "cache", f"cannot be written: {error}", advice)
        return
    there = _nearest(folder)
    if not _can_be_written(there):
        yield Finding("stop", "cache", f"{folder} cannot be written", advice)
        return
    free = shutil.disk_usage(there).free
    if free < _CACHE_BYTES:
        advice = "Make room, or set LEGATO_CACHE to a folder on another disk: models and compiled kernels go there."
        yield Finding("warn", "cache", f"{folder} has {format_size(free // 2**20 * 2**20)} left", advice)
    else:
        yield Finding("ok", "cache", f"{folder}, {free / 1e9:.0f} GB free")


def _nearest(path: Path) -> Path:
    """The path, or what there is of its parents: where it would be made."""
    return next(each for each in (path, *path.absolute().parents) if os.access(each, os.F_OK))


def _can_be_written(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _token() -> Iterator[Finding]:
    """Look whether Ray's token is there or can be made."""
    if "RAY_AUTH_TOKEN" in os.environ or os.environ.get("RAY_AUTH_MODE", "token") != "token":
        return
    try:
        path = token_path()
        if not os.access(path, os.R_OK) and not _can_be_written(_nearest(path.parent)):
            yield Finding("stop", "Ray's token", f"{path} cannot be written", TOKEN_ADVICE)
    except (OSError, RuntimeError) as error:  # there is no home
        yield Finding("stop", "Ray's token", f"cannot be written: {error}", TOKEN_ADVICE)


def _storage() -> Iterator[Finding]:
    """Look whether gateways can keep what clients leave."""
    advice = (
        "Set HOME to a folder of your own, or serve a configuration (`legato serve MODEL --print-config`) whose"
        " gateway.storage names one; empty, it keeps nothing."
    )
    folder = Path(GatewaySettings.model_fields["storage"].default)
    try:
        folder = folder.expanduser()
        if not _can_be_written(_nearest(folder)):
            yield Finding("stop", "gateway.storage", f"{folder} cannot be written", advice)
    except (OSError, RuntimeError) as error:  # there is no home
        yield Finding("stop", "gateway.storage", f"{folder} cannot be written: {error}", advice)


def _clock() -> Iterator[Finding]:
    """Look whether the clock is right, which certificates need, and quick to read, which happens for every token."""
    installed_s = Path(__file__).stat().st_mtime
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    kind = source.read_text(encoding="utf-8").strip() if source.is_file() else ""
    if time.time() < installed_s - 86_400:
        told = f"says {time.strftime('%Y-%m-%d', time.gmtime())}, which is before Legato was installed"
        yield Finding("warn", "clock", told, "Set it: downloads fail where certificates seem not to be valid yet.")
    elif kind in _SLOW_CLOCKS:
        told = f"{kind}, which takes microseconds to read"
        yield Finding("warn", "clock", told, "Boot with clocksource=tsc if the processor's is steady.")
    else:
        yield Finding("ok", "clock", f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC{f', {kind}' * bool(kind)}")


def _secret() -> Iterator[Finding]:
    try:
        draw_secret()
    except ConfigError as error:
        yield Finding("stop", "LEGATO_SECRET", str(error))
