"""The table of every setting in `docs/guide/configuration.md`, made from the configuration's own fields.

`python -m cluster.config.table` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cluster.config.fields import KvMemory, format_budget, format_size, parse_size
from cluster.config.load import is_listed, is_named, submodels
from cluster.config.settings import LegatoConfig
from kv_transfer.tiers.config import Budget

_NAMES = {
    Budget: "size or share",
    KvMemory: "size, blocks or share",
    str: "text",
    int: "integer",
    float: "number",
    bool: "yes/no",
}


def setting_rows(node: type[BaseModel] = LegatoConfig, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yields every leaf of the tree, in its order, as path, type, default and description. A branch that is optional,
    or that may be there several times under names of the user's choice, has a row itself, and its fields follow it. A
    list of branches has a row alone: they are made of what is elsewhere in the tree."""
    for name, info in node.model_fields.items():
        path = f"{prefix}{name}"
        children = [] if is_listed(info.annotation) else list(submodels(info.annotation))
        named = is_named(info.annotation)
        if not children or info.default is None or named:
            yield path, _kind(info), _default(info), info.description or ""
        for child in children:
            yield from setting_rows(child, f"{path}.NAME." if named else f"{path}.")


def settings_table() -> str:
    """All settings as a Markdown table."""
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{path}` | {kind} | {default} | {meaning} |" for path, kind, default, meaning in setting_rows()]
    return "\n".join(lines)


def _kind(info: FieldInfo) -> str:
    if _is_size(info):
        return "size"
    kinds = [_kind_of(part) for part in _members(info.annotation) if part is not NoneType]
    return " or ".join(kinds)


def _kind_of(annotation: Any) -> str:
    if get_origin(annotation) is dict:
        return "mapping"
    if get_origin(annotation) is tuple:
        return "list"
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    return _NAMES.get(annotation, "branch")


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_size(info: FieldInfo) -> bool:
    return any(getattr(part, "func", None) is parse_size for part in info.metadata)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    if info.default is None:
        return "empty"
    if isinstance(info.default, bool):
        return "yes" if info.default else "no"
    if isinstance(info.default, Budget):
        return f"`{format_budget(info.default)}`"
    if is_named(info.annotation):
        return ", ".join(f"`{name}`" for name in info.default)
    if isinstance(info.default, tuple):
        return ", ".join(f"`{item}`" for item in info.default) or "none"
    return f"`{format_size(info.default)}`" if _is_size(info) else f"`{info.default}`"


if __name__ == "__main__":
    print(settings_table())
