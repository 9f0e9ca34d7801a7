"""Plots of simulations: files that hold what was asked for, and clear words where they cannot be made."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.__main__ import main

DRAWN = ("--requests", "60", "--rate", "12", "--prefill", "1", "--decode", "2")


def simulate(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["cluster", "simulate", *DRAWN, *arguments])
    return main()


def words(path: Path) -> set[str]:
    """matplotlib draws text as shapes, and says it in a comment beside them."""
    return set(re.findall(r"<!-- (.*?) -->", path.read_text()))


def test_over_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "time.svg"
    routers = ("--router", "legato", "--router", "round-robin")
    assert simulate(monkeypatch, *routers, "--plot", str(path)) == 0
    assert {"TTFT, s", "TPOT, ms", "arrival, s", "offered", "legato, P95", "round-robin, P50"} <= words(path)


def test_against_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "load.svg"
    assert simulate(monkeypatch, "--plot", str(path), "--plot-loads", "0.5", "2") == 0
    assert {"load", "legato", "legato, P50", "requests/s in time"} <= words(path)
    rates = [float(rate) for rate in re.findall(r"([\d.]+) requests/s offered", capsys.readouterr().out)]
    assert len(rates) == 2
    assert rates[1] == pytest.approx(4 * rates[0], rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--plot-loads", "1"), "name the file with --plot"),
        (("--plot", "/no/such/folder/plot.svg"), "there is no folder /no/such/folder"),
    ],
)
def test_what_cannot_be_plotted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert simulate(monkeypatch, *arguments) == 1
    out, err = capsys.readouterr()
    assert words in err
    assert not out


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find = importlib.util.find_spec

    def find_no_matplotlib(name: str, package: str | None = None) -> Any:
        return None if name == "matplotlib" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_no_matplotlib)
    assert simulate(monkeypatch, "--plot", "plot.svg") == 1
    assert "pip install 'legato[dev]'" in capsys.readouterr().err
