"""The rules, by promtool: they are well formed, and every alert fires where it should and nowhere else."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import yaml

from tests.operators.queries import RULES, rules

CASES = Path(__file__).with_name("rules_test.yaml")


def test_rules_are_well_formed(program: Callable[[str], str]) -> None:
    subprocess.run([program("promtool"), "check", "rules", str(RULES)], check=True, timeout=60)


def test_alerts_fire_where_they_should(program: Callable[[str], str]) -> None:
    subprocess.run([program("promtool"), "test", "rules", str(CASES)], check=True, timeout=120)


def test_every_alert_is_seen_to_fire() -> None:
    cases = yaml.safe_load(CASES.read_text())["tests"]
    fired = {one["alertname"] for case in cases for one in case.get("alert_rule_test", ()) if one.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in rules("alert")}
