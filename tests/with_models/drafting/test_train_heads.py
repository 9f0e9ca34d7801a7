"""`legato train-heads`: reads texts of every kind, holds a part of them out, goes on where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
from safetensors.torch import load_file

from cluster.__main__ import main
from cluster.command import train_heads
from engine.drafting.head_training import HeadTraining
from engine.drafting.heads import is_heads
from engine.text.tokenizer import Tokenizer
from tests.support.small_models import SmallModel


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SmallModel("llama", tmp_path_factory.mktemp("llama")).folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "plain.txt").write_text("a text that goes on and on, " * 200)
    (folder / "lines.jsonl").write_text(
        "\n".join(
            json.dumps(line)
            for line in [{"text": "short " * 90}, {"prompt": "once upon ", "completion": "a time " * 80}] * 3
        )
    )
    (folder / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (folder / ".hidden").write_text("not to be read " * 5000)
    return folder


def legato(*arguments: object) -> int:
    with mock.patch("sys.argv", ["legato", *map(str, arguments)]):
        return main()


def weights(folder: Path) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in load_file(folder / "model.safetensors").items()}


def test_heads_are_trained_measured_and_gone_on_with(
    llama: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps bring nothing that anybody could count on, whichever way it is measured."""
    out, partial = tmp_path / "heads", tmp_path / "heads.partial"
    wanted = (llama, texts, "-o", out, "--heads", 2, "--vocabulary", 40)
    code = legato("train-heads", *wanted, "--steps", 2)
    told = capsys.readouterr().out
    assert "Held out, before: loss" in told
    assert "after 2 steps of" in told
    assert "drafts  tokens per step  ms per step  times as fast" in told
    assert is_heads(out) == (code == 0)
    made = out if code == 0 else partial
    first = weights(made)
    assert len(first["token_map"]) == 40
    legato("train-heads", *wanted, "--steps", 1)
    assert f"Goes on from {made}" in capsys.readouterr().out
    made = partial if is_heads(partial) else out
    assert weights(made) != first
    assert legato("train-heads", llama, texts, "-o", out, "--heads", 3, "--steps", 1) == 1
    assert f"{made} has heads of another number" in capsys.readouterr().err


def test_ctrl_c_keeps_what_is_learnt(
    llama: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step, done = HeadTraining.step, []

    def interrupted(training: HeadTraining, *arguments: object) -> object:
        done.append(step(training, *arguments))  # type: ignore[arg-type]
        if len(done) == 3:
            raise KeyboardInterrupt
        return done[-1]

    with (
        mock.patch.object(HeadTraining, "step", interrupted),
        mock.patch.object(train_heads, "_measured", mock.Mock(side_effect=KeyboardInterrupt)),
    ):
        assert legato("train-heads", llama, texts, "-o", tmp_path / "heads", "--minutes", 60) == 1
    assert "what is learnt is measured" in capsys.readouterr().out
    assert not (tmp_path / "heads").exists()
    found = weights(tmp_path / "heads.partial")
    assert any(any(values) for name, values in found.items() if name.startswith("blocks"))


def test_each_text_is_read_once_and_a_part_held_out(
    llama: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = train_heads._tokenised(Tokenizer(llama), [texts, texts / "lines.jsonl"])
    assert "of 3 of 3 texts" in capsys.readouterr().out
    learnt, held_out = (sum(map(len, part)) for part in (found.learnt, found.held_out))
    assert learnt + held_out == pytest.approx(28 * 200 + 6 * 90 + 10 + 7 * 80, rel=0.05)
    assert held_out == pytest.approx((learnt + held_out) / 20, rel=0.3)
    assert max(map(len, found.learnt)) == 256


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("nowhere.txt",), 2, "there is no file or folder"),
        (("few.txt",), 1, "too few to learn from"),
        (("odd.jsonl",), 1, "line 2: 'prompt'; each line is an object with a text"),
        (("few.txt", "--heads", "16"), 2, "15 drafts of a sequence at most"),
        (("picture.png",), 1, "picture.png is no text in UTF-8"),
    ],
)
def test_what_cannot_be_done_is_said(
    llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    told: str,
) -> None:
    (tmp_path / "few.txt").write_text("a few words")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (tmp_path / "odd.jsonl").write_text('{"text": "a"}\n{"words": "b"}\n')
    text, *others = arguments
    assert legato("train-heads", llama, tmp_path / text, "-o", tmp_path / "heads", *others) == code
    assert told in capsys.readouterr().err


def test_a_line_of_json_may_hold_what_ends_lines_elsewhere(llama: Path, tmp_path: Path) -> None:
    """U+2028 and the like stand in texts of the web, unescaped."""
    rows = [{"text": f"one\u2028two\x85 {'and so on ' * 120}{number}"} for number in range(6)]
    (tmp_path / "web.jsonl").write_text(
        "\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8"
    )
    found = train_heads._tokenised(Tokenizer(llama), [tmp_path / "web.jsonl"])
    assert len(found.learnt) >= 6


def test_nothing_but_heads_is_ever_replaced(llama: Path, texts: Path, tmp_path: Path) -> None:
    """A folder of somebody's, whether or not it has a config.json, stays as it is; an empty one is taken."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "thesis.txt").write_text("years of work")
    assert legato("train-heads", llama, texts, "-o", kept, "--heads", 2, "--steps", 1) == 2
    (kept / "config.json").write_text("{}")
    assert legato("train-heads", llama, texts, "-o", kept, "--heads", 2, "--steps", 1) == 2
    assert legato("train-heads", llama, texts, "-o", kept / "thesis.txt", "--heads", 2, "--steps", 1) == 2
    assert (kept / "thesis.txt").read_text() == "years of work" and not (tmp_path / "kept.partial").exists()
    (tmp_path / "empty").mkdir()
    with mock.patch.object(train_heads, "_measured", return_value=1.5):
        assert legato("train-heads", llama, texts, "-o", tmp_path / "empty", "--heads", 2, "--steps", 1) == 0
    assert is_heads(tmp_path / "empty")
