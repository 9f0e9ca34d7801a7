"""`legato serve MODEL`: the configuration that is made of a model, which a user can keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from cluster.__main__ import main
from cluster.command.serve import model_document
from cluster.config.load import load_config
from cluster.config.settings import LegatoConfig, ModelSettings
from cluster.deployment.capacity import require_room
from cluster.deployment.local_cluster import StartError, fetch_models, why_it_failed
from engine.memory.control_groups import usable_cores

ROOT = Path(__file__).parents[3]
MODEL = "smollm2-135m-instruct"


def made(**changes: Any) -> tuple[dict[str, Any], LegatoConfig]:
    choices: dict[str, Any] = {
        "num_prefill": 1,
        "num_decode": 1,
        "num_workers": None,
        "port": 8000,
        "num_cores": 2,
        "num_gpus": 0,
    }
    document = model_document(MODEL, **{**choices, **changes})
    return document, load_config(document["applications"][0]["args"])


def test_on_two_cores_it_is_the_quickstart() -> None:
    assert made()[0] == yaml.safe_load((ROOT / "ray_configs" / "quickstart.yaml").read_text())


@pytest.mark.parametrize("num_cores", [1, 2, 3, 16])
@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (3, 5), (0, 2)])
def test_it_fits_the_cores(num_cores: int, num_prefill: int, num_decode: int) -> None:
    document, config = made(num_prefill=num_prefill, num_decode=num_decode, num_cores=num_cores)
    assert (config.prefill.replicas, config.decode.replicas) == (num_prefill, num_decode)
    require_room(config, [{"CPU": num_cores}])
    threads = config.decode.threads * num_decode + config.prefill.threads * num_prefill
    assert threads <= max(num_cores, num_prefill + num_decode)
    ServeDeploySchema.model_validate(document)


def test_nothing_is_set_that_workers_know_better() -> None:
    _, config = made()
    assert "chunk_tokens" not in config.prefill.model_fields_set | config.decode.model_fields_set


def test_workers_of_one_type() -> None:
    _, config = made(num_workers=2)
    assert (config.workers, config.is_colocated, config.decode.replicas) == (2, True, 2)


def test_a_gpu_for_each_worker_where_there_are_enough() -> None:
    _, config = made(num_gpus=2)
    assert config.prefill.num_gpus == config.decode.num_gpus == 1 and str(config.kv.decode.memory) == "90%"
    _, config = made(num_gpus=1)
    assert config.prefill.num_gpus == config.decode.num_gpus == 0


def test_what_is_printed_can_be_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    line = ["legato", "serve", MODEL, "--cpu", "--port", "8123", "--workers", "2", "--print-config"]
    monkeypatch.setattr("sys.argv", line)
    assert main() == 0
    path.write_text(capsys.readouterr().out)
    config = load_config(path)
    assert config.workers == 2 and config.decode.threads == max(1, usable_cores() // 2)
    assert yaml.safe_load(path.read_text())["http_options"]["port"] == 8123
    monkeypatch.setattr("sys.argv", ["legato", "serve", str(path), "--port", "8124", "--print-config"])
    assert main() == 0
    assert yaml.safe_load(capsys.readouterr().out)["http_options"]["port"] == 8124


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("decode: {replicas: 2}\n", "put them under `applications[0].args`"),
        ("", "holds settings, but no `applications`"),
    ],
)
def test_settings_alone_cannot_be_served(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, sentence: str
) -> None:
    path = tmp_path / "tree.yaml"
    path.write_text(text)
    monkeypatch.setattr("sys.argv", ["legato", "serve", str(path)])
    assert main() == 1
    assert sentence in capsys.readouterr().err


def test_the_folder_that_one_is_in_has_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    document = model_document(".", num_prefill=1, num_decode=1, num_workers=None, port=8000, num_cores=2, num_gpus=0)
    model = load_config(document["applications"][0]["args"]).model
    assert (model.ref, model.name) == (str(tmp_path), tmp_path.name)


def test_a_start_that_fails_is_told_by_its_error() -> None:
    """As Serve tells of a worker whose constructor raised: with all that was on the stack."""
    told = (
        "The deployment failed to start 3 times in a row. Error:\n\x1b[36mray::ServeReplica:legato:DecodeWorker\n"
        '  File "/site-packages/ray/serve/_private/replica.py", line 4010, in _call_func_or_gen\n'
        "    result = await result\n             ^^^^^^^^^^^^\n"
        "ValueError: a KV cache of 1 blocks cannot hold a single token\n"
    )
    assert why_it_failed(["", told]) == "ValueError: a KV cache of 1 blocks cannot hold a single token"
    assert why_it_failed(["no room for DecodeWorker", ""]) == "no room for DecodeWorker"


def test_a_folder_without_a_model_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"config\.json is missing"):
        fetch_models(LegatoConfig(model=ModelSettings(ref=str(tmp_path))))


def test_a_folder_for_models_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGATO_CACHE", "/dev/null/cache")
    with pytest.raises(StartError, match=r"Not a directory: '/dev/null/cache.*LEGATO_CACHE.* names another one"):
        fetch_models(LegatoConfig(model=ModelSettings(ref="smollm2-135m-instruct")))
