"""OpenVINO GenAI behind `openvino_server`, on weights that optimum-intel exports: as they are, or as INT8."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers.engines.http_asker import HttpAsker
from benchmarks.peers.engines.installation import Workshop, model_folder, weights_id
from benchmarks.peers.engines.started import started
from benchmarks.peers.peer import THREADS, Peer
from cluster.deployment.ray_environment import free_port

VERSION = "2026.4.1.0"
_EXPORTER = "2.2.0"
_BATCHED_TOKENS = 2048


def openvino(name: str, weight_format: str, works: tuple[str, ...]) -> Peer:
    """`weight_format` as the exporter calls it: fp16 (holds what bf16 holds of these weights), int8."""
    return Peer(
        name=name,
        told=f"OpenVINO GenAI {VERSION}, weights {weight_format}, computes in bf16, {THREADS} threads, prefix caching, "
        f"{_BATCHED_TOKENS} batched tokens, behind a small server of ours",
        works=works,
        prepare=functools.partial(_prepare, weight_format),
        start=functools.partial(_start, name, weight_format),
    )


def _prepare(weight_format: str) -> None:
    shop = Workshop("openvino")
    shop.once(f"environment-{VERSION}", functools.partial(_install, shop))
    shop.once(f"{weight_format}-{weights_id()}", functools.partial(_export, shop, weight_format))


def _install(shop: Workshop) -> None:
    shop.make_environment()
    shop.pip("install", "torch==2.13.0")
    shop.pip("install", "torch==2.13.0", f"openvino-genai=={VERSION}", f"optimum-intel[openvino]=={_EXPORTER}")
    shop.pip("uninstall", "-y", "torchvision")  # made for another torch, it breaks the exporter


def _export(shop: Workshop, weight_format: str) -> None:
    task = ["--task", "text-generation-with-past", "--weight-format", weight_format]
    shop.run(
        "venv/bin/optimum-cli", "export", "openvino", "--model", model_folder(), *task, _folder(shop, weight_format)
    )


def _folder(shop: Workshop, weight_format: str) -> Path:
    return shop.folder / f"{weight_format}-{weights_id()}"


@contextlib.contextmanager
def _start(name: str, weight_format: str) -> Iterator[HttpAsker]:
    shop = Workshop("openvino")
    port = free_port()
    script = Path(__file__).with_name("openvino_server.py")
    settings = [_folder(shop, weight_format), model_folder() / "tokenizer.json", port, THREADS, _BATCHED_TOKENS]
    command = [shop.python, "-P", script, *map(str, settings)]
    with started(name, command, ready="ready", folder=shop.folder):
        yield HttpAsker(port, "openvino")
