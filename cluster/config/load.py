"""Loading a configuration: from a YAML file or a mapping, with errors that name the setting and say what to do.

Accepts Legato's own tree, or a Serve config file whose application's `args` hold it.

The cluster secret is no part of it: Ray's dashboard shows a file's `args`, and Serve keeps the arguments of deployments
in its checkpoints. It comes by `LEGATO_SECRET`, in the environment of each of Legato's processes. Only where nobody has
given one is it drawn when the application is built, and handed on as an argument.
"""

from __future__ import annotations

import difflib
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretBytes, ValidationError
from pydantic_core import ErrorDetails

from cluster.config.settings import LegatoConfig

__all__ = ["ConfigError", "LegatoConfig", "cluster_secret", "draw_secret", "give_secret", "load_config"]

_SECRET_VARIABLE: Final = "LEGATO_SECRET"
_MIN_SECRET_BYTES: Final = 16
_MERGE: Final = "tag:yaml.org,2002:merge"  # of the key `<<`

CONSTANTS: Final = {
    "model.quantization_group": "64 inputs to a scale for int8 and 32 for int4",
    "model.quantized_activations": "EngineConfig.activation_bits: 8",
    "model.share_weights": "EngineConfig.share_weights: auto",
    "kv.layers_per_group": "EngineConfig.layers_per_group: 6 to 12 groups where LayerKV is on",
    "kv.ring_groups": "EngineConfig.ring_groups: 2",
    "kv.host_folder": "TiersConfig.host_folder: /dev/shm",
    "transfer.slab_bytes": "TransferConfig.slab_bytes: 8 MiB, and 32 MiB with GPUs",
    "transfer.num_slabs": "TransferConfig.num_slabs: 8, and 16 with GPUs",
    "transfer.num_connections": "TransferConfig.num_connections: 2, and 4 with GPUs",
    "transfer.digest": "TransferConfig.digest: auto",
    "transfer.lease_ttl_s": "DecodeWorkerConfig.lease_ttl_s: 10",
    "prefill.max_waiting": "PrefillWorkerConfig.max_waiting: 256",
    "prefill.calibration_s": "PrefillWorkerConfig.calibration_s: 2",
    "decode.max_waiting": "DecodeWorkerConfig.max_waiting: 256",
    "decode.calibration_s": "DecodeWorkerConfig.calibration_s: 2",
    "decode.reserve_wait_s": "DecodeWorkerConfig.reserve_wait_s: 60",
    "decode.overlap_steps": "DecodeWorkerConfig.overlap_steps: on a GPU",
    "decode.max_in_flight": "LayerKvConfig.max_in_flight: 256, or decode.max_num_seqs if that is more",
    "decode.cuda_graphs": "EngineConfig.decode_graphs: on a GPU",
    "gateway.body_timeout_s": "HttpLimits.body_timeout_s: 30",
    "gateway.max_arriving_bytes": "HttpLimits.max_arriving_bytes: 64 MiB, or gateway.max_body_bytes if that is more",
    "gateway.unread_timeout_s": "HttpLimits.unread_timeout_s: 30",
    "gateway.max_unread_bytes": "HttpLimits.max_unread_bytes: 256 MiB",
    "gateway.retries": "OrchestratorConfig.max_attempts: 4, which are 3 retries",
    "scheduler.num_cpus": "SCHEDULER_CPUS: 0.1",
    "scheduler.heartbeat_s": "PrefillWorkerConfig.heartbeat_s and DecodeWorkerConfig.heartbeat_s: 0.5",
    "scheduler.stale_after_s": "SchedulerPolicy.stale_after_s: 3",
}
"""Settings of earlier versions that are constants now: which ones, and their values."""


class ConfigError(ValueError):
    """The configuration is wrong; the message has one line per problem."""


def load_config(source: str | Path | Mapping[str, Any]) -> LegatoConfig:
    """Read and check the configuration in a file or a mapping. Raises ConfigError."""
    if isinstance(source, Mapping):
        return _validated(source, "the configuration")
    text = _read(Path(source))
    document = _parsed(text, source)
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    _require_keys_once(root, source)
    return _validated(_args_of(document, str(source)), str(source), _Lines(root))


def give_secret() -> None:
    """Put a secret into this process's environment if none is there, for a Ray that it is about to start and that
    inherits its environment. Raises ConfigError for a given one that can be guessed."""
    if _given_secret() is None:
        os.environ[_SECRET_VARIABLE] = secrets.token_hex(32)


def draw_secret() -> SecretBytes | None:
    """Draw a secret, for the arguments of an application's deployments. None: one is given in the environment, where
    each process finds it by itself. Raises ConfigError for a given one that can be guessed."""
    return SecretBytes(secrets.token_bytes(32)) if _given_secret() is None else None


def cluster_secret(drawn: SecretBytes | None) -> bytes:
    """The secret that Legato's processes prove to each other to know: the drawn one, or that of the environment. Raises
    ConfigError if there is neither."""
    if drawn is not None:
        return drawn.get_secret_value()
    given = _given_secret()
    if given is None:
        raise ConfigError(
            f"{_SECRET_VARIABLE} was set where the application was built, and is not on this node. Set it to the same"
            " value on every node before Ray starts there."
        )
    return given


def _given_secret() -> bytes | None:
    given = os.environb.get(_SECRET_VARIABLE.encode())
    if not given:
        return None
    if len(given) < _MIN_SECRET_BYTES:
        raise ConfigError(
            f"{_SECRET_VARIABLE} has {len(given)} bytes, few enough to be guessed; give it at least {_MIN_SECRET_BYTES}"
            " random ones, such as `openssl rand -hex 32` prints."
        )
    return given


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Give the path of a YAML file.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error


def _parsed(text: str, name: str | Path) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is no YAML: {error}") from error


def _require_keys_once(root: yaml.Node | None, name: str | Path) -> None:
    """Check that no mapping has a key twice: PyYAML takes the last, and a part of the file would be ignored without a
    word. Raises ConfigError."""
    left, looked_at = [root], set[yaml.Node | None]()
    while left:
        node = left.pop()
        if node in looked_at:  # an alias
            continue
        looked_at.add(node)
        if isinstance(node, yaml.SequenceNode):
            left += node.value
        elif isinstance(node, yaml.MappingNode):
            left += [value for _, value in node.value]
            found: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in found and key.tag != _MERGE:
                    line = key.start_mark.line + 1
                    raise ConfigError(f"{name}, line {line}: {key.value} is there twice; write all of it under one")
                found.add(str(key.value))


class _Lines:
    """Finds the lines of settings in a YAML file."""

    def __init__(self, root: yaml.Node | None) -> None:
        self._args = _child(root, "applications", 0, "args") or root

    def of(self, path: Sequence[int | str]) -> int | None:
        """The line of a setting, or of the nearest branch above it that the file has; None: the file has neither."""
        found = [_child(self._args, *path[:length]) for length in range(1, len(path) + 1)]
        there = [node for node in found if node is not None]
        return there[-1].start_mark.line + 1 if there else None


def _child(node: yaml.Node | None, *path: int | str) -> yaml.Node | None:
    """The YAML node at a path below `node`. None: there is nothing."""
    for part in path:
        if isinstance(node, yaml.MappingNode):
            node = next((value for key, value in node.value if key.value == str(part)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
        else:
            return None
    return node


def _args_of(document: Any, name: str) -> Mapping[str, Any]:
    """Legato's tree in a document:
    the `args` of a Serve config file, or the document itself if it is none. Raises ConfigError."""
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise ConfigError(f"{name} must hold a mapping of settings, not a {type(document).__name__}.")
    if "applications" not in document:
        return document
    applications = document["applications"]
    if not isinstance(applications, Sequence) or len(applications) != 1 or not isinstance(applications[0], Mapping):
        raise ConfigError(f"{name}: `applications` must be a list of exactly one application, Legato.")
    args = applications[0].get("args") or {}
    if not isinstance(args, Mapping):
        raise ConfigError(f"{name}: `applications[0].args` must be a mapping of settings.")
    return args


def _validated(tree: Mapping[str, Any], name: str, lines: _Lines | None = None) -> LegatoConfig:
    try:
        return LegatoConfig.model_validate(dict(tree))
    except ValidationError as error:
        problems = []
        for detail in error.errors(include_url=False):
            sentence = _sentence(detail)
            # What concerns several settings begins with the name of one of them.
            line = None if lines is None else lines.of(detail["loc"] or sentence.partition(" ")[0].split("."))
            problems.append(f"{name}{f', line {line}' if line else ''}: {sentence}")
        raise ConfigError("\n".join(problems)) from error


def _sentence(detail: ErrorDetails) -> str:
    """What one of pydantic's errors means, with the setting's path and what to do."""
    path = ".".join(str(part) for part in detail["loc"])
    of_one = re.sub(r"^models\.\d+\.", "", path)
    if detail["type"] == "extra_forbidden" and of_one in CONSTANTS:
        constant = CONSTANTS[of_one]
        return f"{path} is no setting any more but a constant, {constant}; leave it out, or see `tuning` for a test"
    if detail["type"] == "extra_forbidden":
        return f"{path} is no setting; {_advice(detail['loc'])}"
    if detail["type"] == "missing":
        return f"{path} is missing; it has no default, so give it a value"
    if detail["type"] == "value_error":
        message = detail["msg"].removeprefix("Value error, ")
        return f"{path}: {message}" if path else message
    return f"{path}: {detail['msg'][0].lower()}{detail['msg'][1:]}, but it is {detail['input']!r}"


def _advice(path: tuple[int | str, ...]) -> str:
    """Words that name the setting that was probably meant, or else all that there are beside it."""
    names = list(_fields_at(path[:-1]))
    close = difflib.get_close_matches(str(path[-1]), names, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"


def _fields_at(path: tuple[int | str, ...]) -> Iterator[str]:
    """Yields the names of the settings in the branch at a path."""
    node: type[BaseModel] = LegatoConfig
    parts = iter(path)
    for part in parts:
        annotation = node.model_fields[str(part)].annotation
        node = next(iter(submodels(annotation)))
        if is_named(annotation) or is_listed(annotation):
            next(parts, None)  # the name, or the place, is anybody's choice
    yield from node.model_fields


def is_named(annotation: Any) -> bool:
    """Whether a field holds several branches of one kind, each under a name that the user gives."""
    return get_origin(annotation) is dict and any(submodels(annotation))


def is_listed(annotation: Any) -> bool:
    """Whether a field holds several branches of one kind in a list."""
    return get_origin(annotation) is tuple and any(submodels(annotation))


def submodels(annotation: Any) -> Iterator[type[BaseModel]]:
    """The settings classes in a field's type: itself, the members of `X | None`, or of a mapping or a list."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            yield candidate
