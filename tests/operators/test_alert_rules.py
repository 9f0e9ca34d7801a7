"""The rules, by promtool: they are well formed, and every alert fires where it should and nowhere else."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import yaml

from tests.operators.queries import RULES, panels, rules

CASES = Path(__file__).with_name("rules_test.yaml")


def test_rules_are_well_formed(program: Callable[[str], str]) -> None:
    subprocess.run([program("promtool"), "check", "rules", str(RULES)], check=True, timeout=60)


def test_alerts_fire_where_they_should(program: Callable[[str], str]) -> None:
    subprocess.run([program("promtool"), "test", "rules", str(CASES)], check=True, timeout=120)


def test_every_alert_is_seen_to_fire() -> None:
    cases = yaml.safe_load(CASES.read_text())["tests"]
    fired = {one["alertname"] for case in cases for one in case.get("alert_rule_test", ()) if one.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in rules("alert")}


def test_the_board_adds_models_up_and_not_gateways(program: Callable[[str], str], tmp_path: Path) -> None:
    """Rates of a class are those of all models together; each gateway tells of all of them."""
    told = {"Goodput: {{slo_class}}": "goodput_requests", "Tokens: {{slo_class}} all": "tokens"}
    told["Tokens: {{slo_class}} in time"] = "goodput_tokens"
    series = [
        {
            "series": f'ray_legato_slo_{name}_per_second{{slo_class="chat", model="{model}", WorkerId="{gateway}"}}',
            "values": f"{rate}x5",
        }
        for name in told.values()
        for model, rate in (("a", 2), ("b", 3))
        for gateway in (1, 2)
    ]
    queries = [
        {
            "expr": panels()[panel].replace("$slo_class", ".*"),
            "eval_time": "3m",
            "exp_samples": [{"labels": '{slo_class="chat"}', "value": 5}],
        }
        for panel in told
    ]
    case = tmp_path / "board.yaml"
    case.write_text(
        yaml.safe_dump({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": queries}]})
    )
    subprocess.run([program("promtool"), "test", "rules", str(case)], check=True, timeout=60)
