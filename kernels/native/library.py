"""Compiles the C++ kernels of `kernels/native` once for a machine and loads them; without a compiler there are none.

Knows compilers and processors, not what the functions do: who calls one declares its parameters.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from filelock import FileLock, Timeout

from kernels.cache_folder import default_cache_dir, is_private, note_compiling, private_folder
from kernels.interface import Activation

logger = logging.getLogger(__name__)

Pointer, Size, Float, Flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_bool
Function = Any  # of ctypes, which has no name for them
TYPE_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""What the functions' names end in."""

SOURCE_FOLDER = Path(__file__).parent / "src"
SWITCH = "LEGATO_NATIVE"
"""Environment variable: 0 leaves the kernels to torch, avx512 and avx2 take no more than these of the processor."""

# Contracting a product and a sum is left to the source: done here and not there, it would make a row's result depend on
# which of two loops computed it.
_OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared", "-w")
_COMPILE_DEADLINE_S = 600.0  # a quiet core takes half a minute; without these kernels bits depend on company


@dataclass(frozen=True, slots=True)
class Instructions:
    """What a processor must have, by the names of /proc/cpuinfo, for code that is compiled with these options.

    Every processor that has these runs the same code; none beyond them is used.
    """

    name: str
    flags: tuple[str, ...]
    options: tuple[str, ...]


AVX512 = Instructions(
    "AVX-512",
    ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512_bf16", "avx512_vnni", "fma", "f16c"),
    ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
)
AMX = Instructions(
    "AMX",
    (*AVX512.flags, "avx512vbmi", "amx_tile", "amx_bf16", "amx_int8"),
    (*AVX512.options, "-mavx512vbmi", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
)
"""And products of tiles, of bfloat16 (`src/tiles.h`) and of bytes (`src/quantised_tiles.h`)."""
AVX2 = Instructions("AVX2", ("avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"), ("-march=x86-64-v3",))
"""Half as wide, and a product of pairs of bfloat16 is several instructions (`src/vectors_avx2.h`)."""
_AT_MOST = {"avx512": (AVX512, AVX2), "avx2": (AVX2,)} | dict.fromkeys(("", "1", "amx"), (AMX, AVX512, AVX2))
"""By the switch's word, best first."""


class NativeUnavailableError(Exception):
    """A sentence: why this machine runs without the C++ kernels."""


def declare(library: ctypes.CDLL, name: str, parameters: list[Any], result: Any = None) -> Function:
    function = library[name]
    function.argtypes, function.restype = parameters, result
    return function


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The kernels of this machine, compiled now if they never were; None, which is logged, where there can be none."""
    try:
        return ctypes.CDLL(str(_library()))
    except (NativeUnavailableError, OSError) as error:
        logger.warning("CPU kernels are torch's own, which are slower: %s", error)
        return None


def _library() -> Path:
    """The compiled file. Raises NativeUnavailableError, OSError."""
    instructions = processor_instructions()
    compiler = find_compiler()
    target = private_folder(default_cache_dir() / "native") / f"legato-{_digest(compiler, instructions)}.so"
    if is_private(target):
        return target
    began = time.monotonic()
    try:
        with FileLock(target.with_suffix(".lock"), timeout=_COMPILE_DEADLINE_S):
            if not is_private(target):  # another process may have been faster
                compile_library(compiler, instructions, target)
    except Timeout as error:
        raise NativeUnavailableError(f"another process has been compiling {target} for too long") from error
    finally:
        note_compiling(time.monotonic() - began)
    return target


def activation_number(activation: Activation) -> int:
    """Return the number by which the C++ kernels know this activation."""
    return get_args(Activation).index(activation)


def processor_instructions() -> Instructions:
    """The best that this processor has. Raises NativeUnavailableError where it lacks what the kernels use at least, or
    the switch leaves them to torch."""
    word = os.environ.get(SWITCH, "").lower()
    if word == "0":
        raise NativeUnavailableError(f"{SWITCH}=0 asks for it")
    if word not in _AT_MOST:
        raise NativeUnavailableError(f"{SWITCH}={word} is none of amx, avx512, avx2 and 0; leave it out")
    if platform.system() != "Linux":
        raise NativeUnavailableError(f"they are compiled on Linux only, and this is {platform.system()}")
    present = _processor_flags()
    for instructions in _AT_MOST[word]:
        if present.issuperset(instructions.flags):
            return instructions
    lacking = ", ".join(flag for flag in AVX2.flags if flag not in present)
    raise NativeUnavailableError(f"this processor lacks {lacking}")


def _processor_flags() -> frozenset[str]:
    """What this process may use of the processor. The system has to be asked for tiles, once, for all threads."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("flags"):
            flags = frozenset(line.partition(":")[2].split())
            if "amx_tile" not in flags or _ask_for_tiles():
                return flags
            logger.warning("the system lets this process use no tiles (AMX): bfloat16 is slower, and of other bits")
            return flags - {"amx_tile"}
    return frozenset()


def _ask_for_tiles() -> bool:
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18  # of x86-64's system calls, arch_prctl(2)
    refused: int = ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data)
    return not refused


def find_compiler() -> str:
    """The compiler that CXX names, or one of the usual ones, but for clang++. Raises NativeUnavailableError where there
    is none."""
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    found = [path for name in names if name and (path := shutil.which(name))]
    for compiler in found:
        # Clang's loops are run by LLVM's OpenMP, and torch's would tell each of those threads that it is the first one:
        # they would write to one place.
        if "__clang__" not in _macros(compiler):
            return compiler
    lacking = f"{found[0]} is clang++, which does not share torch's threads" if found else "there is no C++ compiler"
    raise NativeUnavailableError(f"{lacking}; install g++ and start again")


@functools.cache
def _macros(compiler: str) -> str:
    """What a compiler defines by itself: who made it, and its version. Empty where it says nothing."""
    command = [compiler, "-dM", "-E", "-x", "c++", os.devnull]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_DEADLINE_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""  # compiling will say why


def _sources() -> list[Path]:
    return sorted(SOURCE_FOLDER.glob("*.cpp"))


def _digest(compiler: str, instructions: Instructions) -> str:
    """A digest of everything that the compiled file depends on: machines of several kinds may share the folder."""
    made_by = (compiler, _macros(compiler), *platform.libc_ver())
    digest = hashlib.sha256("\0".join((*made_by, *_OPTIONS, *instructions.options, *_openmp())).encode())
    for path in sorted((*_sources(), *SOURCE_FOLDER.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compile_library(compiler: str, instructions: Instructions, target: Path) -> None:
    """Make `target` of all sources, one on each core at a time, whole or not at all. Raises NativeUnavailableError with
    what the compiler said."""
    command = [compiler, *_OPTIONS, *instructions.options]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        sources = sorted(_sources(), key=lambda source: -source.stat().st_size)  # the longest first
        objects = [str(made.with_name(f"{source.stem}.o")) for source in sources]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(_run, ([*command, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True))))
        _run([*command, *objects, *_openmp(), "-o", str(made)])
        made.chmod(0o700)
        made.replace(target)


def _run(command: list[str]) -> None:
    """A compiler. Raises NativeUnavailableError with what it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"compiling them failed: {error}") from error
    if done.returncode:
        raise NativeUnavailableError(f"compiling them with {command[0]} failed: {done.stderr[-2000:]}")


def _openmp() -> list[str]:
    """torch's own library of threads: a second pool beside it would fight for the same cores."""
    folder = Path(torch.__file__).parent / "lib"
    found = sorted(folder.glob("libgomp*.so*"))
    return [str(found[0]), f"-Wl,-rpath,{folder}"] if found else []
