"""The GPU check itself: its steps are there, it goes on past those that fail, and its summary is right."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.common.part import ROOT
from benchmarks.gpu import check as gpu_check
from benchmarks.gpu import steps
from benchmarks.gpu.check import StepResult, parts, run_steps, tell_summary
from benchmarks.gpu.steps import STEPS, Step, run_command
from tests.support.waiting import HANGS_S, wait_until

CPU = torch.device("cpu")
_STORES = (
    "import torch, sys; from pathlib import Path\n"
    "from benchmarks.gpu.figures import Figure, reported\n"
    "def measure(report, device): report.add(Figure(name='rate', value={value}, unit='share', at_least=0.5))\n"
    "sys.exit(reported({name!r}, measure, torch.device('cpu'), Path({folder!r})))"
)


def _step(name: str, *programs: str, stores: bool = False, minutes: float = 1.0) -> Step:
    commands = tuple(("-c", program) for program in programs)
    return Step(name=name, answers="something", minutes=minutes, commands=commands, stores=stores)


def _storing(name: str, folder: Path, value: float) -> Step:
    return _step(name, _STORES.format(name=name, folder=str(folder), value=value), stores=True)


def test_without_a_gpu_the_command_says_so_in_one_sentence() -> None:
    program = (
        "import torch; torch.cuda.is_available = lambda: False\n"
        "import sys; sys.argv = ['gpu_check']; from benchmarks.gpu.check import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("gpu-check needs a CUDA device, and torch ")
    assert done.stderr.count("\n") == 1


def test_what_its_python_lacks_is_told_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "NEEDED", ("pytest", "no_such_package"))
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu_check.main() == 2
    said = capsys.readouterr()
    assert said.err.endswith("lacks: no_such_package\n")
    assert said.out == ""


def test_what_it_asks_for_is_what_the_project_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    declared = {re.split(r"[^\w-]", line, maxsplit=1)[0].replace("-", "_") for line in lines}
    assert set(gpu_check.NEEDED) - declared == set()


def test_every_step_runs_programs_and_tests_that_exist() -> None:
    arguments = [argument for step in STEPS.values() for command in step.commands for argument in command]
    files = [argument for argument in arguments if argument.endswith(".py")]
    assert files
    assert [name for name in files if not (ROOT / name).is_file()] == []
    modules = [argument for argument in arguments if argument.startswith("benchmarks.")]
    assert len(modules) > 8
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    assert all(name == step.name for name, step in STEPS.items())


def test_every_step_is_told_of() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert [name for name in STEPS if f"`{name}`" not in text] == []


def test_parts_keep_the_order_and_the_time() -> None:
    found = parts([_step(str(minutes), minutes=minutes) for minutes in (4, 4, 2, 12, 1)], minutes=9)
    assert [[step.name for step in part] for part in found] == [["4", "4"], ["2"], ["12"], ["1"]]
    assert all(sum(step.minutes for step in part) <= 9 for part in parts(list(STEPS.values()), 9))


def test_it_goes_on_past_failures_and_stores_each_outcome(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chosen = [
        _step("red", "raise SystemExit(3)", "print('the second command ran')"),
        _storing("short", tmp_path, 0.25),
        _storing("fast", tmp_path, 0.75),
        _step("plain", ""),
    ]
    results = run_steps(chosen, CPU, tmp_path, None)
    verdicts = {"red": "RED", "short": "missed", "fast": "green", "plain": "green"}
    assert {result.step: result.verdict for result in results} == verdicts
    stored = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {name: entry["verdict"] for name, entry in stored.items()} == verdicts
    assert stored["short"]["missed"] == ["rate"]
    assert {"commit", "device", "versions"} <= stored["red"].keys()
    tell_summary(results)
    said = capfd.readouterr().out
    assert "the second command ran" in said
    assert "short  rate: 25.0% (aim: at least 50.0%; MISSED)" in said
    assert "fast  rate: 75.0% (aim: at least 50.0%)\n" in said
    # What an older run found is not taken for this one's.
    (again,) = run_steps([_step("fast", "raise SystemExit(1)", stores=True)], CPU, tmp_path, None)
    assert (again.verdict, again.figures) == ("RED", ())


def test_a_step_that_the_machine_is_too_small_for_is_neither_green_nor_red(tmp_path: Path) -> None:
    program = _STORES.format(name="pair", folder=str(tmp_path), value=0.75).replace(
        "report.add(", "report.note(needs='two GPUs') or report.add("
    )
    (result,) = run_steps([_step("pair", program, stores=True)], CPU, tmp_path, None)
    assert result.verdict == "absent"


def test_what_another_run_found_stays_beside_it(tmp_path: Path) -> None:
    run_steps([_step("first", "")], CPU, tmp_path, None)
    run_steps([_step("second", "")], CPU, tmp_path, None)
    assert list(json.loads((tmp_path / "gpu_check.json").read_text())) == ["first", "second"]


def test_a_step_that_needs_longer_than_is_left_is_not_begun(tmp_path: Path) -> None:
    soon = time.monotonic() + 60
    (result,) = run_steps([_step("long", "raise AssertionError", minutes=30)], CPU, tmp_path, soon)
    assert result.verdict == "left"


def test_what_a_command_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    told = tmp_path / "child"
    program = (
        "import subprocess, sys; from pathlib import Path\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"Path({str(told)!r}).write_text(str(child.pid))"
    )
    assert run_command(("-c", program), timeout_s=HANGS_S)
    wait_until(lambda: _has_ended(int(told.read_text())))


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_command_that_hangs_is_ended() -> None:
    assert run_command(("-c", "import time; time.sleep(600)"), timeout_s=0.5) is False


def test_one_part_runs_and_the_checkpoints_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[str] = []
    forgotten: list[bool] = []

    def run(chosen: Sequence[Step], device: torch.device, folder: Path, until_s: float | None) -> list[StepResult]:
        assert until_s is not None
        ran.extend(step.name for step in chosen)
        return [StepResult(step=step.name, verdict="green", duration_s=1.0) for step in chosen]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "_tell_device", lambda: None)
    monkeypatch.setattr(gpu_check, "run_steps", run)
    monkeypatch.setattr(gpu_check, "forget_checkpoints", lambda: forgotten.append(True))
    monkeypatch.setattr(sys, "argv", ["gpu_check", "kernels", "link", "engine", "--minutes", "5", "--part", "2"])
    assert gpu_check.main() == 0
    assert ran == ["engine"]
    assert forgotten


def test_an_unknown_step_and_an_unknown_part_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["nonsense"], ["--part", "99"]):
        monkeypatch.setattr(sys, "argv", ["gpu_check", *arguments])
        with pytest.raises(SystemExit) as refusal:
            gpu_check.main()
        assert refusal.value.code == 2


def test_outcomes_without_aims_miss_none() -> None:
    assert StepResult(step="x", verdict="green", duration_s=1.0).missed == []
    assert steps.STEPS["speed"].stores
