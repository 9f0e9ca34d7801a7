"""`legato serve`: a model, or a Serve config file, on this machine.

For a model a config file is made, which `--print-config` prints for whoever wants to keep and change it.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path
from typing import Any, Final

import yaml

from cluster.command.arguments import ArgumentsError
from engine.memory.control_groups import usable_cores

DEFAULT_PORT: Final = 8000
_CONFIG_SUFFIXES: Final = (".yaml", ".yml", ".json")
_OTHER_CPUS: Final = 0.6  # CPUs that a gateway and the scheduler take in Ray's books
_HEADER: Final = """\
# Made by `legato serve {what} --print-config`. `python -m cluster.config.table` explains every setting;
# `legato check FILE` says what is wrong with one, `legato serve FILE` serves it.
"""


def run(arguments: argparse.Namespace) -> int:
    # Ray reads its environment when it is imported, and importing it takes a second: only when it is needed.
    from cluster.config.load import ConfigError
    from cluster.deployment.local_cluster import StartError, serve_document

    try:
        document = document_of(arguments)
        if arguments.print_config:
            what = " ".join(arguments.target.split())
            print(_HEADER.format(what=what) + yaml.safe_dump(document, sort_keys=False, width=120), end="")
        else:
            serve_document(document, stay=not arguments.exit, dashboard=not arguments.no_dashboard)
    except (ConfigError, StartError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def document_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Read or make the contents of a Serve config file for these arguments. Raises ArgumentsError, ConfigError."""
    from cluster.config.load import http_options
    from cluster.deployment.local_cluster import read_document

    if is_config(arguments.target):
        if given := [name for name in ("prefill", "decode", "workers", "cpu") if getattr(arguments, name) is not None]:
            options = ", ".join(f"--{name}" for name in given)
            raise ArgumentsError(
                f"{arguments.target} is a configuration, which says itself what workers there are and on what; leave"
                f" out {options}, or give a model in its place"
            )
        document = read_document(arguments.target)
        return document | {"http_options": http_options(document, arguments.port)}
    require_model(arguments.target)
    if arguments.workers is not None and (arguments.prefill is not None or arguments.decode is not None):
        raise ArgumentsError("--workers stands for workers of one type and no pools: leave out --prefill and --decode")
    return model_document(
        arguments.target,
        num_prefill=1 if arguments.prefill is None else arguments.prefill,
        num_decode=1 if arguments.decode is None else arguments.decode,
        num_workers=arguments.workers,
        port=arguments.port or DEFAULT_PORT,
        num_cores=usable_cores(),
        num_gpus=0 if arguments.cpu else count_gpus(),
    )


def is_config(target: str) -> bool:
    """Whether a target names a file of settings; else it names a model."""
    return target.endswith(_CONFIG_SUFFIXES)


def require_model(ref: str) -> None:
    """Check that a target names a model. Raises ArgumentsError if it names neither a model nor a file."""
    from engine.checkpoint.builtin_models import BUILTIN_MODELS
    from engine.checkpoint.store import require_no_address

    try:
        require_no_address(ref)
    except ValueError as error:
        raise ArgumentsError(str(error)) from error
    try:
        path = Path(ref).expanduser()
    except RuntimeError as error:  # there is no such user
        raise ArgumentsError(f"{ref} is no model: {error}") from error
    if ref not in BUILTIN_MODELS and path.is_file() and path.suffix != ".gguf":
        raise ArgumentsError(
            f"{ref} is neither a Serve config file ({', '.join(_CONFIG_SUFFIXES)}) nor a GGUF file (.gguf)"
        )
    if ref in BUILTIN_MODELS or (ref and path.exists()) or "/" in ref.strip("/."):
        return
    close = difflib.get_close_matches(ref, BUILTIN_MODELS, n=1, cutoff=0.4)
    meant = f"did you mean {close[0]}?" if close else f"there are {', '.join(BUILTIN_MODELS)}."
    raise ArgumentsError(
        f"there is no model {ref!r} here: {meant} Or give a folder, a GGUF file, a hub id such as Qwen/Qwen3-0.6B, or a"
        " Serve config file (.yaml)"
    )


def count_gpus() -> int:
    """How many NVIDIA GPUs the driver shows."""
    return sum(1 for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())


def model_document(
    ref: str,
    *,
    num_prefill: int,
    num_decode: int,
    num_workers: int | None,
    port: int,
    num_cores: int,
    num_gpus: int,
) -> dict[str, Any]:
    """Make the contents of a Serve config file for a model on this machine. Each worker has a GPU of its own if there
    are enough, or else its share of the cores. `num_workers`: workers of one type, instead of pools."""
    from cluster.deployment.ray_environment import SERVE_ENVIRONMENT

    if not ref.strip("./"):  # `.`: the folder's own name is what clients will write
        ref = str(Path(ref).resolve())
    total = num_workers or num_prefill + num_decode
    pool, kv = _pool_on_gpu() if num_gpus >= total else _pool_on_cpu(total, num_cores)
    chunks = {"chunk_tokens": 8192} if "num_gpus" in pool else {}
    sequences = {"max_num_seqs": 256 if "num_gpus" in pool else 32}
    settings: dict[str, Any] = {"model": {"ref": ref}, "kv": {"decode": dict(kv)}}
    if num_workers is not None:
        settings |= {"workers": num_workers, "decode": {**pool, **sequences}}
    elif num_prefill == 0:
        settings |= {"prefill": {"replicas": 0}, "decode": {"replicas": num_decode, **pool, **sequences}}
    else:
        settings["kv"] = {"prefill": dict(kv), "decode": dict(kv)}
        settings |= {
            "prefill": {"replicas": num_prefill, **pool, **chunks},
            "decode": {"replicas": num_decode, **pool, **sequences},
        }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port, "keep_alive_timeout_s": 90},
        "logging_config": {"encoding": "JSON", "enable_access_log": False},
        "controller_options": {"runtime_env": {"env_vars": dict(SERVE_ENVIRONMENT)}},
        "applications": [
            {"name": "legato", "route_prefix": "/", "import_path": "cluster.app:build", "args": settings},
        ],
    }


def _pool_on_gpu() -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of each pool of workers with a GPU each, and of its KV."""
    return {"num_cpus": 1, "num_gpus": 1}, {"block_size": 32, "memory": "90%", "host_memory": "20%", "staging": "2GiB"}


def _pool_on_cpu(num_workers: int, num_cores: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of each pool of workers on CPUs, and of its KV. All workers' threads together are no more than there
    are cores, unless there are more workers than cores."""
    share = (num_cores - _OTHER_CPUS) / num_workers
    num_cpus = max(0.01, min(0.2, int(share * 100) / 100))
    return {"num_cpus": num_cpus, "threads": max(1, num_cores // num_workers)}, {
        "memory": "512MiB",
        "host_memory": "512MiB",
    }
