"""What a request leaves out is sampled as the checkpoint's generation_config.json says, at every endpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from cluster.app import served_model
from cluster.config.settings import LegatoConfig
from cluster.http.served_model import ServedModel
from engine.sampling.params import SamplingParams
from engine.text.tokenizer import Tokenizer
from tests.support.http_server import MODEL, running_server
from tests.support.openai_conformance import MESSAGES, Target
from tests.support.scripted_generator import ScriptedGenerator
from tests.support.waiting import wait_until

pytestmark = pytest.mark.model

NAMED: Final = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
PLAIN: Final = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "The sea", "max_tokens": 2},
    "/v1/responses": {"input": "The sea", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
}


def model_of(folder: Path, name: str, generator: ScriptedGenerator, **settings: Any) -> ServedModel:
    """As a gateway of the cluster reads it."""
    settings = {"ref": str(folder), "served_name": name, **settings}
    return served_model(LegatoConfig.model_validate({"model": settings}), generator.limits)


def checkpoint(folder: Path, source: Path, generation: object) -> Path:
    """A copy of a checkpoint, as a gateway needs one, whose generation_config.json has these fields, too."""
    folder.mkdir(exist_ok=True)
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path)
        elif path.is_file():
            shutil.copy(path, folder)
    if isinstance(generation, dict):
        generation = json.loads((source / "generation_config.json").read_text()) | generation
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="module")
def target(
    shared_generator: ScriptedGenerator,
    tokenizer: Tokenizer,
    smollm2_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Target]:
    """Serves SmolLM2, whose file names nothing, and beside it two models of a file that does."""
    generator, folder = shared_generator, tmp_path_factory.mktemp("models")
    storage, folder = (
        folder / "storage",
        checkpoint(folder / "named", smollm2_folder, {**NAMED, "do_sample": False, "max_new_tokens": 1}),
    )
    others = [
        model_of(folder, "named", generator),
        model_of(folder, "off", generator, generation_config="none"),
        model_of(smollm2_folder, "silent", generator),
    ]
    with running_server(generator, tokenizer, storage=storage, others=others) as target:
        yield target


@pytest.fixture
def generator(shared_generator: ScriptedGenerator) -> ScriptedGenerator:
    """The generator behind `target`, without records."""
    shared_generator.requests.clear()
    return shared_generator


def sampled(target: Target, generator: ScriptedGenerator, path: str, model: str, **fields: Any) -> dict[str, float]:
    """What one request is sampled with."""
    generator.requests.clear()
    target.http.post(path, json={"model": model, **BODIES[path], **fields}).raise_for_status()
    (request,) = generator.requests
    return shown(request.params)


def shown(params: SamplingParams) -> dict[str, float]:
    return {name: getattr(params, name) for name in NAMED}


@pytest.mark.parametrize("path", BODIES)
def test_what_is_left_out_is_the_checkpoints(target: Target, generator: ScriptedGenerator, path: str) -> None:
    assert sampled(target, generator, path, "named") == NAMED
    for model in ("off", "silent", MODEL):
        assert sampled(target, generator, path, model) == PLAIN


@pytest.mark.parametrize("path", BODIES)
def test_what_a_client_sends_wins(target: Target, generator: ScriptedGenerator, path: str) -> None:
    """Also where it is the API's default, or turns something off."""
    assert sampled(target, generator, path, "named", temperature=0) == {**NAMED, "temperature": 0.0}
    assert sampled(target, generator, path, "named", temperature=1, top_p=1) == {**NAMED, "temperature": 1, "top_p": 1}
    assert sampled(target, generator, path, "named", top_k=0) == {**NAMED, "top_k": 0}
    if path != "/v1/messages":  # which has no words for these
        all_off = {**PLAIN, "top_k": -1}
        assert sampled(target, generator, path, "named", **all_off) == PLAIN
        assert sampled(target, generator, path, "named", temperature=None, top_k=None) == NAMED


def test_a_response_says_what_it_was_sampled_with(target: Target) -> None:
    body = {"model": "named", **BODIES["/v1/responses"]}
    for sent, told in (({}, (0.6, 0.95)), ({"temperature": 0, "top_p": 1}, (0, 1))):
        answer = target.http.post("/v1/responses", json={**body, **sent}).raise_for_status().json()
        assert (answer["temperature"], answer["top_p"]) == told


def test_lines_of_a_batch(target: Target, generator: ScriptedGenerator) -> None:
    body = {"model": "named", **BODIES["/v1/chat/completions"]}
    lines = [
        {"custom_id": f"{n}", "method": "POST", "url": "/v1/chat/completions", "body": {**body, **sent}}
        for n, sent in enumerate(({}, {"temperature": 0}))
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    file = target.strict.files.create(file=("lines.jsonl", text.encode()), purpose="batch")
    batch = target.strict.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    wait_until(lambda: target.strict.batches.retrieve(batch.id).status == "completed", what="the batch does not end")
    temperatures = sorted(request.params.temperature for request in generator.requests)
    assert temperatures == [0.0, 0.6] and {request.params.top_k for request in generator.requests} == {20}


@pytest.mark.parametrize(
    ("generation", "told"),
    [
        ({"temperature": 2.5}, r"temperature is 2\.5; it must lie in \[0\.0, 2\.0\]; 0 means greedy; correct it there"),
        ({"top_p": 0.0}, r"top_p is 0\.0; it must lie in \(0, 1\]"),
        ({"top_k": 2.5}, r"top_k is 2\.5, which is no whole number"),
        ({"top_k": -2}, "top_k is -2; it must lie in"),
        ({"min_p": float("nan")}, "min_p is nan"),
        ({"repetition_penalty": True}, "repetition_penalty is True, which is no number"),
        ({"temperature": 10**400}, "too large"),
    ],
)
def test_a_value_that_no_request_could_send(
    smollm2_folder: Path, generator: ScriptedGenerator, tmp_path: Path, generation: dict[str, Any], told: str
) -> None:
    folder = checkpoint(tmp_path / "model", smollm2_folder, generation)
    with pytest.raises(ValueError, match=rf"generation_config\.json cannot be used .*{told}") as raised:
        model_of(folder, "m", generator)
    assert str(raised.value).endswith("or set model.generation_config: none")
    assert model_of(folder, "m", generator, generation_config="none").sampling == {}


def test_what_counts_as_nothing(smollm2_folder: Path, generator: ScriptedGenerator, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", smollm2_folder, {"temperature": None, "top_k": -1, "do_sample": False})
    assert model_of(folder, "m", generator).sampling == {"top_k": 0}
    (folder / "generation_config.json").unlink()
    assert model_of(folder, "m", generator).sampling == {}
