"""One Ray for all files of this folder: its start takes 12 s of the processor, a deployment in it only Legato's own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray.deployed.serve_run import ROOT, SAYS_WHERE, ServeRun, serve_run


@pytest.fixture(scope="package")
def newcomer(tmp_path_factory: pytest.TempPathFactory, smollm2_folder: Path) -> Iterator[ServeRun]:
    """What a newcomer types; it ends in order, whatever was deployed, killed and ended meanwhile."""
    with serve_run(ROOT / "ray_configs" / "quickstart.yaml", tmp_path_factory.mktemp("newcomer")) as running:
        running.wait_for(SAYS_WHERE)
        yield running


@pytest.fixture(scope="package")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, smollm2_folder: Path) -> Path:
    """A random model of four layers that reads a real tokenizer's ids, in a millisecond a step. Its weights are large,
    so that no two tokens are nearly as good."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=49_152,
        max_position_embeddings=1024,
        initializer_range=0.3,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for path in (*smollm2_folder.glob("*token*"), *smollm2_folder.glob("*template*")):
        shutil.copy(path, folder)
    return folder
