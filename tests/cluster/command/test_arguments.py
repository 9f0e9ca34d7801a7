"""What is typed wrongly is answered with a sentence and exit code 2, before anything is started or asked."""

from __future__ import annotations

import argparse
import importlib
import io
import re
import sys
import tomllib
from pathlib import Path

import pytest

from cluster import __main__ as commands
from cluster import build_info
from cluster.__main__ import main
from cluster.command import arguments
from kv_transfer.messages import PROTOCOL_VERSION

ROOT = Path(__file__).parents[3]


def typed(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of a command line."""
    monkeypatch.setattr("sys.argv", ["legato", *words])
    try:
        return main()
    except SystemExit as end:  # argparse's
        assert isinstance(end.code, int)
        return end.code


def test_which_legato_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed(monkeypatch, "--version") == 0
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    told = re.fullmatch(r"legato (\S+) \((?:commit ([0-9a-f]{12}), )?protocol (\d+)\)\n", capsys.readouterr().out)
    assert told is not None and (told[1], int(told[3])) == (declared, PROTOCOL_VERSION)
    assert build_info() == {"version": told[1], "protocol": int(told[3])} | ({"commit": told[2]} if told[2] else {})


def test_help_says_where_the_guide_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a checkout, and where the wheel puts it, if it is there."""
    monkeypatch.setenv("COLUMNS", "40")
    assert typed(monkeypatch, "--help") == 0 and f"{ROOT}/docs/guide\n" in capsys.readouterr().out
    monkeypatch.setattr(arguments, "__file__", "/usr/lib/python3/site-packages/cluster/command/arguments.py")
    (folder,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    assert arguments.guide() == Path(sys.prefix, folder)
    for is_there in (True, False):
        monkeypatch.setattr(Path, "is_dir", lambda path, found=is_there: found and "share" in path.parts)
        assert typed(monkeypatch, "--help") == 0
        assert (f"{sys.prefix}/{folder}\n" in capsys.readouterr().out) is is_there


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "COMMAND"),
        ("srve", "invalid choice: 'srve'"),
        ("serve", "MODEL|CONFIG"),
        ("serve smollm", "there is no model 'smollm' here: did you mean smollm2-135m-instruct?"),
        ("serve zzz", "Or give a folder, a GGUF file, a hub id"),
        ("serve smollm2-135m-instruct --prefill -1", "write a whole number of 0 or more, not '-1'"),
        ("serve smollm2-135m-instruct --decode 0", "write a whole number of 1 or more, not '0'"),
        ("serve smollm2-135m-instruct --port 70000", "a number from 1 to 65535, not '70000'"),
        ("serve smollm2-135m-instruct --workers 2 --decode 1", "leave out --prefill and --decode"),
        (f"serve {ROOT}/ray_configs/auto.yaml --workers 3", "leave out --workers, or give a model"),
        (f"serve {ROOT}/ray_configs/gpu_1p1d.yaml --prefill 0 --cpu", "leave out --prefill, --cpu, or give a model"),
        ("serve ~nobody-of-this-name/model", "~nobody-of-this-name/model is no model"),
        ("serve s3://bucket/model --print-config", "neither buckets nor web servers are read: mount it, or copy it"),
        ("check https://huggingface.co/Qwen/Qwen3-8B", "write the hub id alone: Qwen/Qwen3-8B"),
        ("top ftp://somewhere", "'ftp://somewhere' is no URL of a server. Write one such as http"),
        ("top --header nonsense", "write a name and a value"),
        ("top --every 0", "write a number above 0, not '0'"),
        ("bench", "URL"),
        ("bench http://x:y", "is no URL of a server"),
        ("bench x --rate 2 --concurrency 3", "--rate and --concurrency are two ways"),
        ("bench x --rate nan", "write a number above 0, not 'nan'"),
        ("bench x --trace nowhere.jsonl", "there is no file nowhere.jsonl"),
        ("bench x --trace pyproject.toml --rate 2", "leave out --rate"),
        ("bench x --log nowhere/a.jsonl", "there is no folder"),
        ("bench x --load 2 --rate 3", "--load, --length and --first change a trace"),
        ("bench x --burstiness 2", "say which with --rate"),
        ("bench x --header nonsense", "write a name and a value"),
        ("bench x --shared-tokens 256", "leaves nothing of --prompt-tokens 256"),
        ("check zzz", "there is no model 'zzz' here"),
        (f"check {ROOT}/pyproject.toml", "is neither a Serve config file (.yaml, .yml, .json) nor a GGUF file"),
        (f"serve {ROOT}/pyproject.toml", "is neither a Serve config file (.yaml, .yml, .json) nor a GGUF file"),
        ("plan", "name a file with --trace, or draw requests with --format synthetic"),
        ("plan --trace pyproject.toml --format synthetic", "leave it out, or --trace"),
        ("whatif --log x --layouts --decode 4 --ttft-ms 500", "leave out --decode, --ttft-ms"),
        ("plan --trace nowhere.jsonl", "there is no file nowhere.jsonl"),
        ("plan --format synthetic --max-gpus 0", "a plan needs at least one GPU (--max-gpus)"),
        ("simulate --link-gb-per-s 0", "write a number above 0, not '0'"),
        ("simulate --block-size 0", "write a whole number of 1 or more, not '0'"),
        ("simulate --devices-per-worker 0", "write a whole number of 1 or more, not '0'"),
        ("plan --format synthetic --tensor-parallel 0", "write a whole number of 1 or more, not '0'"),
        ("whatif --log x --newest -1", "write a whole number of 1 or more, not '-1'"),
        ("simulate --noise -1", "--noise: write a number of 0 or more, not '-1'"),
        ("simulate --ttft-ms nan", "--ttft-ms: write a number above 0, not 'nan'"),
        ("whatif --log x --decode -1", "--decode: write a whole number of 0 or more, not '-1'"),
        ("run-batch -i nowhere.jsonl -o out.jsonl", "nowhere.jsonl is no file"),
        ("train-heads smollm2-135m-instruct nowhere -o heads", "there is no file or folder nowhere"),
        ("train-heads smollm2-135m-instruct nowhere -o heads --heads 99", "checks 15 drafts of a sequence at most"),
        ("doctor --port here", "a number from 1 to 65535, not 'here'"),
    ],
)
def test_a_sentence_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, told: str
) -> None:
    assert typed(monkeypatch, *line.split()) == 2
    out, err = capsys.readouterr()
    assert told in err.replace("\n", " ") and out == ""


def test_ctrl_c_is_no_failure_of_ours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(arguments: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(commands._COMMANDS, "check", interrupted)
    assert typed(monkeypatch, "check", "x") == 1
    assert capsys.readouterr() == ("", "Stopped.\n")


def test_a_terminal_that_lacks_characters_gets_others(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="iso-8859-1"))
    monkeypatch.setitem(commands._COMMANDS, "check", lambda arguments: print("café … 東京", flush=True) or 0)
    assert typed(monkeypatch, "check", "x") == 0
    assert written.getvalue() == b"caf\xe9 ? ??\n"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("simulate --prefill 0 --decode 0", "decode"),
        ("simulate --trace nowhere.jsonl", "nowhere.jsonl"),
        ("simulate --acceptance nan", "acceptance is nan"),
        ("simulate --worker decode-0", "write a worker and a device, as in decode-2=l40s"),
        ("whatif --log nowhere.jsonl", "nowhere.jsonl"),
        ("plan --format synthetic --model nowhere", "nowhere"),
    ],
)
def test_a_sentence_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, told: str
) -> None:
    """For what only whoever carries it out can know."""
    assert typed(monkeypatch, *line.split()) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and told in err and len(err.splitlines()) == 1


def test_nobody_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed(monkeypatch, "top", "http://127.0.0.1:1", "--once") == 1
    assert "nothing answers at http://127.0.0.1:1 (Connection refused). Start a cluster with" in capsys.readouterr().err
    assert typed(monkeypatch, "bench", "http://127.0.0.1:1") == 1
    assert capsys.readouterr().err == "error: http://127.0.0.1:1: Connection refused\n"


def test_the_script_is_the_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`legato` and `python -m cluster` are one parser; each calls itself by the name that was typed."""
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["legato"]
    module, _, name = script.partition(":")
    assert getattr(importlib.import_module(module), name) is main
    for called, shown in (("/venv/bin/legato", "legato"), ("/src/cluster/__main__.py", "python -m cluster")):
        monkeypatch.setattr("sys.argv", [called, "--help"])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0
        assert f"usage: {shown} [-h] [--version] COMMAND" in capsys.readouterr().out
