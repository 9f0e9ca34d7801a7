"""Compiles every shipped kernel for every architecture, on a machine that may have no GPU, and records what came out.

`python -m benchmarks.gpu.compilation` updates the record: it compiles what has changed since, or all with `--all`. What
is compiled is what a launch compiles: pointers aligned to 16 bytes, integers as `Shipped.aligned` says.

Must not run where TRITON_INTERPRET is set: there, kernels are no kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import pkgutil
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

import kernels.triton
from kernels.triton.shipped import Shipped

RECORD = Path(__file__).parents[1] / "results" / "kernels_compiled.json"

_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")

Json = dict[str, Any]


def all_shipped() -> list[Shipped]:
    """The kernels of every module of `kernels.triton` that ships some, by name."""
    found = [shipped for module in _modules() for shipped in getattr(module, "shipped", list)()]
    names = [shipped.name for shipped in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{', '.join(sorted(twice))}: the names of shipped kernels must differ from each other")
    return sorted(found, key=lambda shipped: shipped.name)


def _modules() -> Iterator[Any]:
    for info in pkgutil.walk_packages(kernels.triton.__path__, f"{kernels.triton.__name__}."):
        yield importlib.import_module(info.name)


def fingerprint(shipped: Shipped) -> str:
    """A hash of the kernel's source, of what it calls, and of the configuration: another one compiles to something
    else."""
    configuration = (
        sorted(shipped.signature.items()),
        sorted((name, str(value)) for name, value in shipped.constants.items()),
        (shipped.num_warps, shipped.num_stages, sorted(shipped.aligned)),
    )
    digest = hashlib.sha256(repr(configuration).encode())
    for text in _sources(shipped.kernel, set()):
        digest.update(text.encode())
    return digest.hexdigest()[:16]


def _sources(function: Any, seen: set[int]) -> Iterator[str]:
    """The text of a kernel, of the kernels of ours that it calls, and of the constants that it reads."""
    seen.add(id(function))
    yield function.src
    for name in function.fn.__code__.co_names:
        value = function.fn.__globals__.get(name)
        if isinstance(value, triton.language.constexpr):
            yield f"{name} = {value.value!r}"
        elif isinstance(value, triton.JITFunction) and id(value) not in seen:
            yield from _sources(value, seen)


def compile_for(shipped: Shipped, architecture: int) -> Json:
    """What one kernel needs of one architecture. Raises Triton's errors where it does not compile."""
    source = (GluonASTSource if isinstance(shipped.kernel, GluonJITFunction) else ASTSource)(
        shipped.kernel,
        dict(shipped.signature),
        constexprs=dict(shipped.constants),
        attrs={(index,): [["tt.divisibility", 16]] for index in _aligned(shipped)},
    )
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", architecture, 32),
            options={"num_warps": shipped.num_warps, "num_stages": shipped.num_stages},
        )
    return _understood(log.getvalue(), shipped) | {"shared_bytes": compiled.metadata.shared}


def _aligned(shipped: Shipped) -> Iterator[int]:
    for index, (name, kind) in enumerate(shipped.signature.items()):
        if kind.startswith("*") or name in shipped.aligned:
            yield index


def _understood(log: str, shipped: Shipped) -> Json:
    """What the assembler said. Its log is complete: one entry, since Triton inlines all that a kernel calls."""
    spills, registers = _SPILLS.findall(log), _REGISTERS.findall(log)
    if len(spills) != 1 or len(registers) != 1:
        raise RuntimeError(f"the assembler's log of {shipped.name} was not understood:\n{log}")
    stack, stores, loads = map(int, spills[0])
    return {
        "registers": int(registers[0]),
        "stack_bytes": stack,
        "spill_store_bytes": stores,
        "spill_load_bytes": loads,
    }


@contextlib.contextmanager
def fresh_compilation() -> Iterator[None]:
    """Compile within the block without any cache of earlier runs, so that the assembler's log can be read."""
    knobs = triton.knobs
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.nvidia.scope():
        knobs.cache.dir = folder
        knobs.nvidia.dump_ptxas_log = True
        yield


def compile_all(chosen: Iterable[Shipped]) -> Json:
    """The fingerprint of each kernel, by name, and what `compile_for` says of it, by architecture."""
    with fresh_compilation():
        return {
            shipped.name: {
                "fingerprint": fingerprint(shipped),
                **{f"sm_{arch}": compile_for(shipped, arch) for arch in shipped.architectures},
            }
            for shipped in chosen
        }


def read_record(path: Path = RECORD) -> Json:
    if not path.exists():
        return {"triton": triton.__version__, "kernels": {}}
    record: Json = json.loads(path.read_text(encoding="utf-8"))
    return record


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.compilation", description=__doc__)
    parser.add_argument("names", nargs="*", help="beginnings of names: only these; the record is left alone")
    parser.add_argument("--all", action="store_true", help="also what the record knows in its present form")
    arguments = parser.parse_args()
    everything = all_shipped()
    if arguments.names:
        for shipped in everything:
            if shipped.name.startswith(tuple(arguments.names)):
                print(json.dumps(compile_all([shipped])), flush=True)
        return
    record = read_record()
    known = {} if arguments.all or record["triton"] != triton.__version__ else record["kernels"]
    kept = {s.name: known[s.name] for s in everything if known.get(s.name, {}).get("fingerprint") == fingerprint(s)}
    new = compile_all(shipped for shipped in everything if shipped.name not in kept)
    entries = {shipped.name: (kept | new)[shipped.name] for shipped in everything}
    text = json.dumps({"triton": triton.__version__, "kernels": entries}, indent=1)
    RECORD.write_text(text + "\n", encoding="utf-8")
    print(f"{len(new)} compiled, {len(kept)} unchanged: {RECORD}")


if __name__ == "__main__":
    main()
