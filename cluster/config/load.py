"""Loading a configuration: from a YAML file or a mapping, with errors that name the setting and say what to do.

Accepts Legato's own tree, or a Serve config file whose application's `args` hold it. The rest of such a file is checked
as well, but for other applications: Ray ignores names that it does not know, and settings beside `args` with them.

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
from typing import Any, Final, NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretBytes, ValidationError
from pydantic_core import ErrorDetails

from cluster.config.settings import LegatoConfig

__all__ = [
    "ConfigError",
    "LegatoConfig",
    "cluster_secret",
    "draw_secret",
    "find_legato",
    "give_secret",
    "http_options",
    "load_config",
    "load_document",
]

_SECRET_VARIABLE: Final = "LEGATO_SECRET"
_MIN_SECRET_BYTES: Final = 16
_MERGE, _TEXT, _INTEGER, _NUMBER = (f"tag:yaml.org,2002:{kind}" for kind in ("merge", "str", "int", "float"))
IMPORT_PATH: Final = "cluster.app:build"
_OWN_MODULES: Final = "cluster."  # an import path that begins so is Legato's, or a typing error
_FOR_ANCHORS: Final = "x-"  # what begins so holds parts that the file uses again, as in files of Docker Compose

SERVE_NAMES: Final[Mapping[tuple[int | str, ...], set[str]]] = {
    (): {
        *("applications", "controller_options", "grpc_options", "http_options", "logging_config", "proxy_location"),
        *("target_capacity", "tracing_config"),
    },
    ("http_options",): {
        *("host", "keep_alive_timeout_s", "port", "request_timeout_s", "root_path"),
        *("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password"),
    },
    ("applications", 0): {
        *("args", "autoscaling_policy", "deployments", "external_scaler_enabled", "host", "import_path"),
        *("logging_config", "name", "port", "route_prefix", "runtime_env"),
    },
}
"""What Serve (2.60) heeds in these branches of a config file. It ignores any other name there without a word."""


class ConfigError(ValueError):
    """The configuration is wrong; the message has one line per problem."""


def load_config(source: str | Path | Mapping[str, Any]) -> LegatoConfig:
    """Read and check the configuration in a file or a mapping. Raises ConfigError."""
    if isinstance(source, Mapping):
        return _validated(source, "the configuration")
    return _checked(_opened(source), str(source))


def load_document(path: str | Path, *, manifests: bool = False) -> tuple[dict[str, Any], LegatoConfig]:
    """Read and check a Serve config file, and the configuration of Legato's application in it (`find_legato`).
    `manifests`: or the one in KubeRay's manifest of a RayService. Raises ConfigError."""
    file = _opened(path, manifests=manifests)
    config = _checked(file, str(path))
    if not _is_of_serve(file.document):
        raise ConfigError(
            f"{path} holds settings, but no `applications`: put them under `applications[0].args` of a Serve config"
            " file, as the files in ray_configs/ do."
        )
    return dict(file.document), config


def find_legato(document: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
    """Which application of a Serve config file is Legato, and what stands there: the only one, which may be a program
    of the user's that builds Legato, or of several the one with Legato's import path. (0, {}): none is, or several."""
    listed = document.get("applications")
    found = [(place, each) for place, each in enumerate(listed if isinstance(listed, list) else ())]
    if len(found) > 1:
        found = [each for each in found if isinstance(each[1], Mapping) and each[1].get("import_path") == IMPORT_PATH]
    return found[0] if len(found) == 1 and isinstance(found[0][1], Mapping) else (0, {})


def http_options(document: Mapping[str, Any], port: int | None = None) -> dict[str, Any]:
    """Serve's options for HTTP in a Serve config file, with Legato's defaults, and on `port` if that is given. Raises
    ConfigError."""
    given = document.get("http_options") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"http_options is {given!r}; write what Serve takes, such as {{host: 127.0.0.1, port: 8000}}")
    http = {"host": "127.0.0.1", "port": 8000, **given, **({} if port is None else {"port": port})}
    if type(http["port"]) is not int or not 0 < http["port"] < 65_536:
        raise ConfigError(f"http_options.port is {http['port']!r}; write a number from 1 to 65535")
    if not isinstance(http["host"], str):
        raise ConfigError(f"http_options.host is {http['host']!r}; write an address, such as 127.0.0.1")
    if encrypting := [name for name, value in http.items() if name.startswith("ssl_") and value]:
        raise ConfigError(
            f"http_options has {' and '.join(encrypting)}, which HAProxy, as Serve has it in front, does not heed: it"
            " would answer in plain HTTP. Leave them out, and end TLS in a proxy of your own"
        )
    return http


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


class _File(NamedTuple):
    """A file of settings: what is in it, the same as YAML's nodes, and how many lines come before it. The latter is not
    0 for a Serve config within a manifest. Where that is quoted or folded, its lines are not the file's: `is_one_line`.
    """

    document: Any
    root: yaml.Node | None
    lines_before: int = 0
    is_one_line: bool = False

    def line(self, node: yaml.Node) -> int:
        """The line of the file on which a node begins, or on which the whole configuration does."""
        return self.lines_before + 1 + (0 if self.is_one_line else node.start_mark.line)


def _opened(path: str | Path, *, manifests: bool = False) -> _File:
    """Read a file, of which every part says what it seems to say. Raises ConfigError."""
    file = _parsed(_read(Path(path)), path)
    if _is_manifest(file.document):
        file = _within_manifest(file, path, manifests=manifests)
    elif isinstance(file.document, Mapping) and "cluster_name" in file.document:
        mounts = file.document.get("file_mounts")
        found = [str(source) for source in mounts.values()] if isinstance(mounts, Mapping) else []
        named = [source for source in found if source.endswith((".yaml", ".yml"))]
        raise ConfigError(
            f"{path} is for `ray up` and says what machines there are. Legato's settings are in the configuration that"
            f" is deployed there: check {' and '.join(named) or 'that one'}."
        )
    _require_plain(file, path)
    return file


def _parsed(text: str, name: str | Path, lines_before: int = 0, *, is_one_line: bool = False) -> _File:
    try:
        roots, documents = list(yaml.compose_all(text, Loader=yaml.SafeLoader)), list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is no YAML: {error}") from error
    files = [_File(found, root, lines_before, is_one_line) for found, root in zip(documents, roots, strict=True)]
    services = [file for file in files if isinstance(file.document, Mapping) and file.document.get("kind") == _SERVICE]
    if len(services) > 1 or (len(files) > 1 and not services and not _is_manifest(files[0].document)):
        raise ConfigError(f"{name} holds {len(files)} documents, parted by ---; give each a file of its own")
    return next(iter(services or files), _File(None, None))


_SERVICE: Final = "RayService"


def _is_manifest(document: Any) -> bool:
    """Whether a document is an object of Kubernetes."""
    return isinstance(document, Mapping) and "kind" in document and "apiVersion" in document


def _within_manifest(manifest: _File, name: str | Path, *, manifests: bool) -> _File:
    """The Serve config in a manifest for Kubernetes. Raises ConfigError where there is none, or none is wanted."""
    kind = manifest.document["kind"]
    node = _child(manifest.root, "spec", "serveConfigV2")
    if kind != _SERVICE or not isinstance(node, yaml.ScalarNode):
        raise ConfigError(
            f"{name} is for `kubectl apply`, a manifest of kind {kind} without `spec.serveConfigV2`, where a {_SERVICE}"
            " has the configuration of what it serves"
        )
    if not manifests:
        raise ConfigError(
            f"{name} is for `kubectl apply`: `legato check {name}` checks the configuration in it, and to serve that"
            " elsewhere, put what is below `spec.serveConfigV2` into a file of its own"
        )
    is_literal = node.style == "|"  # its lines are the file's, from the next one on
    return _parsed(node.value, name, node.start_mark.line + is_literal, is_one_line=not is_literal)


def _require_plain(file: _File, name: str | Path) -> None:
    """Check that YAML reads everything as it seems to be meant: no mapping has a key twice, of which PyYAML would take
    the last, a key is text, and a number is not one of base 8 or 60. Raises ConfigError."""
    left, looked_at = [file.root], set[yaml.Node | None]()
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
                where = f"{name}, line {file.line(key)}"
                if isinstance(key, yaml.ScalarNode) and key.value in found and key.tag != _MERGE:
                    raise ConfigError(f"{where}: {key.value} is there twice; write all of it under one")
                if isinstance(key, yaml.ScalarNode) and key.tag not in (_TEXT, _MERGE):
                    read = yaml.safe_load(key.value)
                    raise ConfigError(
                        f"{where}: {key.value} is no text, YAML reads it as {read!r}; names of settings are text, so"
                        f' put one of your own into quotes: "{key.value}"'
                    )
                found.add(str(key.value))
        elif isinstance(node, yaml.ScalarNode) and _is_of_another_base(node):
            raise ConfigError(
                f"{name}, line {file.line(node)}: YAML reads {node.value} as {yaml.safe_load(node.value)}, of base"
                f" {60 if ':' in node.value else 8}; write the number that you mean, or, for a text,"
                f' "{node.value}"'
            )


def _is_of_another_base(node: yaml.ScalarNode) -> bool:
    is_octal = node.tag == _INTEGER and re.fullmatch("[-+]?0[0-9_]+", node.value) is not None
    return is_octal or (node.tag in (_INTEGER, _NUMBER) and ":" in node.value)


class _Lines:
    """Finds the lines of settings in a YAML file. `place`: of Legato among the applications, if it has some."""

    def __init__(self, file: _File, place: int) -> None:
        self._file, self._root = file, file.root
        self._args = _child(file.root, "applications", place, "args") or file.root

    def of(self, path: Sequence[int | str]) -> int | None:
        """The line of a setting, or of the nearest branch above it that the file has; None: the file has neither."""
        return self._nearest(self._args, path)

    def of_serve(self, path: Sequence[int | str]) -> int | None:
        """The same of what Serve itself heeds, by its path in the whole file."""
        return self._nearest(self._root, path)

    def _nearest(self, root: yaml.Node | None, path: Sequence[int | str]) -> int | None:
        found = [_child(root, *path[:length]) for length in range(1, len(path) + 1)]
        there = [node for node in found if node is not None]
        return self._file.line(there[-1]) if there else None


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


def _is_of_serve(document: Any) -> bool:
    """Whether a document is a Serve config file; else it is Legato's own tree."""
    return isinstance(document, Mapping) and not document.keys().isdisjoint(SERVE_NAMES[()])


def _checked(file: _File, name: str) -> LegatoConfig:
    """The configuration in a file. Raises ConfigError, with all that is wrong."""
    args = {} if file.document is None else file.document
    place, application = find_legato(args) if _is_of_serve(args) else (0, {})
    lines = _Lines(file, place)
    problems: list[str] = []
    if _is_of_serve(args):
        for path, sentence in _problems_for_serve(args):
            line = lines.of_serve(path)
            problems.append(f"{name}{f', line {line}' if line else ''}: {sentence}")
        args = application.get("args")
        args = args if isinstance(args, Mapping) else {}  # told above
    if not isinstance(args, Mapping):
        raise ConfigError(f"{name} must hold a mapping of settings, not a {type(args).__name__}.")
    try:
        config = _validated(args, name, lines)
    except ConfigError as error:
        raise ConfigError("\n".join([*problems, str(error)])) from error
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _problems_for_serve(document: Mapping[str, Any]) -> Iterator[tuple[tuple[int | str, ...], str]]:
    """Yields where, and what, is wrong in a Serve config file outside of Legato's own settings."""
    place, application = find_legato(document)
    where, told_where = ("applications", place), f"applications[{place}]"
    for path, told, names, branch in (
        ((), "", SERVE_NAMES[()], document),
        (("http_options",), "http_options.", SERVE_NAMES["http_options",], document.get("http_options")),
        (where, f"{told_where}.", SERVE_NAMES["applications", 0], application),
    ):
        for key in branch if isinstance(branch, Mapping) else ():
            if key not in names and (path or not key.startswith(_FOR_ANCHORS)):
                advice = _advice_for_serve(path, key, names)
                yield (*path, key), f"{told}{key} is no option of Serve's, which ignores it; {advice}"
    try:
        http_options(document)
    except ConfigError as error:
        yield ("http_options",), str(error)
    if not application:
        yield (
            ("applications",),
            "`applications` must be a list of exactly one application, Legato, or of several of which exactly one has"
            f" the import_path {IMPORT_PATH}.",
        )
        return
    given = application.get("import_path")
    if given is None or (given != IMPORT_PATH and str(given).startswith(_OWN_MODULES)):
        told = "is missing" if given is None else f"is {given}"
        yield (*where, "import_path"), f"{told_where}.import_path {told}; that of Legato is {IMPORT_PATH}"
    args = application.get("args", {})
    if args is None:
        yield (
            (*where, "args"),
            f"{told_where}.args is empty, which Serve refuses; put settings below it, indented further than `args`,"
            " or leave the line out",
        )
    elif not isinstance(args, Mapping):
        yield (*where, "args"), f"`{told_where}.args` must be a mapping of settings."


def _advice_for_serve(path: tuple[int | str, ...], key: str, names: set[str]) -> str:
    """What is probably meant by a name that Serve does not know in this branch."""
    if path != ("http_options",) and key in LegatoConfig.model_fields:
        return "it is a setting of Legato's, so put it below `args` of the application"
    close = difflib.get_close_matches(key, names, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(names))}"


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
    if detail["type"] == "extra_forbidden":
        return f"{path} is no setting; {_advice(detail['loc'])}"
    if detail["type"] == "missing":
        return f"{path} is missing; it has no default, so give it a value"
    if detail["input"] is None and path:
        return f"{path} is empty; give it a value, or leave the line out"
    if detail["type"] == "model_type":
        return f"{path}: write settings below it, of {', '.join(_fields_at(detail['loc']))}, not {detail['input']!r}"
    if detail["type"] == "tuple_type":
        example = detail["input"] if isinstance(detail["input"], str) else "..."
        return f"{path}: write a list, such as [{example}], not {detail['input']!r}"
    if detail["type"] == "dict_type":
        return f"{path}: write a mapping, such as {{NAME: ...}}, not {detail['input']!r}"
    if detail["type"] == "value_error":
        message = detail["msg"].removeprefix("Value error, ")
        return f"{path}: {message}" if path else message
    return f"{path}: {detail['msg'][0].lower()}{detail['msg'][1:]}, but it is {detail['input']!r}"


_CLOSE: Final = 0.82  # or a setting that is gone would be taken for another one that only sounds like it


def _advice(path: tuple[int | str, ...]) -> str:
    """Words that name the setting that was probably meant, or else all that there are beside it."""
    names = list(_fields_at(path[:-1]))
    close = difflib.get_close_matches(str(path[-1]), names, n=1, cutoff=_CLOSE)
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
