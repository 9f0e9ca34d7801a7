"""`legato check` of configurations: all that is wrong at once, each with its line and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cluster.__main__ import main
from cluster.config.load import IMPORT_PATH, ConfigError, load_config
from cluster.deployment.announce import describe_start
from tests.cluster.config.test_config import ROOT, served

SERVED = """\
# A comment.
applications:
  - name: legato
    import_path: cluster.app:build
    args:
      model: {ref: smollm2-135m-instruct}
      decode:
        max_num_seq: 4
        replicas: "two"
      kv:
        decode:
          memory: lots
      prefil: {}
"""


def checked(monkeypatch: pytest.MonkeyPatch, target: str) -> int:
    monkeypatch.setattr("sys.argv", ["legato", "check", target])
    return main()


def test_everything_at_once_with_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "served.yaml"
    path.write_text(SERVED)
    assert checked(monkeypatch, str(path)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    for line, told in (
        (8, "decode.max_num_seq is no setting; did you mean max_num_seqs?"),
        (9, "decode.replicas: input should be a valid integer, but it is 'two'"),
        (12, "kv.decode.memory: 'lots' is no size"),
        (13, "prefil is no setting; did you mean prefill?"),
    ):
        assert any(found.startswith(f"error: {path}, line {line}: {told}") for found in lines), (line, lines)


def test_what_concerns_several_settings_has_the_line_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "tree.yaml"
    path.write_text("model: {}\n\ndecode:\n  replicas: 5\n  autoscaling: {max_replicas: 3}\n")
    with pytest.raises(ConfigError, match=r"tree\.yaml, line 4: decode\.replicas is 5, outside decode\.autoscaling"):
        load_config(path)
    path.write_text("secret: abc\n")
    with pytest.raises(ConfigError, match=r"tree\.yaml, line 1: secret is no setting"):
        load_config(path)


def test_what_is_missing_has_the_line_of_where_it_should_be(tmp_path: Path) -> None:
    path = tmp_path / "tree.yaml"
    path.write_text("model: {}\nkv:\n  disk:\n    sync: true\n")
    with pytest.raises(ConfigError, match=r"tree\.yaml, line 4: kv\.disk\.path is missing"):
        load_config(path)


def test_a_file_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(monkeypatch, "nowhere.yaml") == 1
    assert "nowhere.yaml cannot be read" in capsys.readouterr().err


def test_a_model_that_is_not_here_is_not_fetched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("LEGATO_CACHE", str(tmp_path))
    assert checked(monkeypatch, "smollm2-135m-instruct") == 0
    out = capsys.readouterr().out
    assert "The settings are valid: smollm2-135m-instruct on 1 prefill worker, 1 decode worker" in out
    assert (
        "is not on this machine: whether it can be served, and the memory that it takes, was not looked at" in out
        and [*tmp_path.iterdir()] == []
    )


@pytest.mark.parametrize("ref", ["/nowhere/my-model", "/nowhere/my-model.gguf"])
def test_a_folder_or_a_file_that_is_not_there_cannot_be_fetched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, ref: str
) -> None:
    path = tmp_path / "served.yaml"
    path.write_text(served({"model": ref}))
    assert checked(monkeypatch, str(path)) == 1
    told = capsys.readouterr()
    assert "fetches it" not in told.out
    assert f"error: model {ref!r} is not known: give a built-in name" in told.err


@pytest.mark.parametrize(
    ("tuning", "told"),
    [
        ("DecodeWorkerConfig: {reserve_wait_s: long}", "tuning.DecodeWorkerConfig.reserve_wait_s: input should be a"),
        ("HttpLimits: {body_timeout: 5}", "tuning.HttpLimits has body_timeout, but the fields of HttpLimits are"),
        ("OrchestratorConfig: {silence_s: 0.3}", "tuning.OrchestratorConfig: silence_s is 0.3, but"),
    ],
)
def test_what_tuning_cannot_change_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, tuning: str, told: str
) -> None:
    path = tmp_path / "tree.yaml"
    path.write_text(served({"model": "nobody/has-this", "tuning": yaml.safe_load(tuning)}))
    assert checked(monkeypatch, str(path)) == 1
    assert f"error: {told}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("told", "is_noted"),
    [
        ("gateway: {replicas: 2}\nnetwork: {host: node}\n", True),
        ("gateway: {replicas: 1}\nnetwork: {host: node}\n", False),
        ("gateway: {replicas: 2}\n", False),
        ("gateway: {replicas: 2, storage: /mnt/shared}\nnetwork: {host: node}\n", False),
        ("gateway: {replicas: 2, storage: null}\nnetwork: {host: node}\n", False),
    ],
)
def test_gateways_of_several_nodes_that_each_keep_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, told: str, is_noted: bool
) -> None:
    """The model is not looked at: it is none that is here."""
    path = tmp_path / "tree.yaml"
    path.write_text(served({"model": "nobody/has-this", **yaml.safe_load(told)}))
    assert checked(monkeypatch, str(path)) == 0
    assert ("Note: network.host is node, and 2 gateways" in capsys.readouterr().out) == is_noted


def test_shipped_files_for_several_nodes_share_what_clients_leave(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(monkeypatch, str(ROOT / "ray_configs" / "gpu_autoscale.yaml")) == 0
    assert "gateway.storage" not in capsys.readouterr().out


def test_files_for_whole_clusters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(monkeypatch, str(ROOT / "ray_configs" / "kuberay.yaml")) == 0
    assert "The settings are valid: Qwen/Qwen3-8B on" in capsys.readouterr().out
    assert checked(monkeypatch, str(ROOT / "ray_configs" / "cluster.yaml")) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_serve_itself_refuses_or_heeds_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As `serve run` refuses it, and as `legato serve` does."""
    path = tmp_path / "served.yaml"
    path.write_text(served({"model": "nobody/has-this"}) + "logging_config: {encoding: XML}\n")
    assert checked(monkeypatch, str(path)) == 1
    assert "logging_config.encoding: Serve says: Value error, Got 'XML' for encoding" in capsys.readouterr().err
    assert checked(monkeypatch, str(ROOT / "ray_configs" / "runtime_env.yaml")) == 0
    assert "Note: `legato serve` refuses runtime_env of the application" in capsys.readouterr().out


def test_a_program_of_ones_own_that_builds_legato(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "served.yaml"
    path.write_text(served({"model": "nobody/has-this"}).replace(IMPORT_PATH, "mycompany.serving:build"))
    assert checked(monkeypatch, str(path)) == 0
    told = capsys.readouterr().out
    assert "Note: `legato serve` refuses import_path mycompany.serving:build of the application" in told
    assert "Note: mycompany.serving:build is not Legato's own cluster.app:build" in told


def test_a_folder_of_adapters_that_gateways_would_make(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "served.yaml"
    for folder, is_noted in ((tmp_path, False), (tmp_path / "adaptors", True)):
        path.write_text(served({"model": "nobody/has-this", "adapters": {"folder": str(folder)}}))
        assert checked(monkeypatch, str(path)) == 0
        assert (f"Note: adapters.folder is {folder}, which is not here" in capsys.readouterr().out) == is_noted
    assert not folder.exists()


def test_settings_that_nobody_heeds_are_noted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """By `serve run`, too."""
    path = tmp_path / "served.yaml"
    path.write_text(served({"model": "nobody/has-this", "workers": 2, "prefill": {"num_gpus": 1}}))
    assert checked(monkeypatch, str(path)) == 0
    told = "prefill.num_gpus: nobody heeds it, as of workers there is one type"
    assert f"Note: {told}" in capfd.readouterr().out
    describe_start(load_config(path))
    assert f"Legato: {told}" in capfd.readouterr().out
