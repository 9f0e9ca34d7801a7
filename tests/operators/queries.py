"""Every query that Legato's board and rules ask, from the files that operators load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "cluster" / "metrics" / "grafana"
BOARD, RULES = FOLDER / "legato.json", FOLDER / "rules.yaml"
_SERIES = r"\b(?:ray_legato_|legato:)[\w:]+(?:\{[^}]*\})?"


def panels() -> dict[str, str]:
    """By panel and legend; `$__rate_interval` and the like are still in them."""
    board = json.loads(BOARD.read_text())
    return {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", ())
    }


def variables() -> list[str]:
    board = json.loads(BOARD.read_text())
    return [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]


def rules(kind: str) -> list[dict[str, Any]]:
    """`kind`: `record` or `alert`."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def recordings() -> dict[str, str]:
    return {f"{rule['record']} {rule.get('labels', '')}": rule["expr"] for rule in rules("record")}


def series_of_alerts() -> dict[str, str]:
    """An alert's own query has data only while it fires; what it looks at has data always."""
    return {
        f"{rule['alert']}: {series}": series for rule in rules("alert") for series in re.findall(_SERIES, rule["expr"])
    }
