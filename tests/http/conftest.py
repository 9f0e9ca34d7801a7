"""What most tests of the HTTP application begin with: SmolLM2's tokenizer, and what generates in a model's place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from engine.text.tokenizer import Tokenizer
    from tests.support.openai_conformance import Target
    from tests.support.scripted_generator import ScriptedGenerator


@pytest.fixture(scope="session")
def tokenizer(smollm2_folder: Path) -> Tokenizer:
    from engine.text.tokenizer import Tokenizer

    return Tokenizer(smollm2_folder)


@pytest.fixture(scope="session")
def llg(tokenizer: Tokenizer) -> LLTokenizer:
    from engine.sampling.grammar import grammar_tokenizer

    return grammar_tokenizer(tokenizer.json, tokenizer.vocab_size, tuple(tokenizer.eos_token_ids))


@pytest.fixture(scope="module")
def shared_generator(tokenizer: Tokenizer) -> ScriptedGenerator:
    """For one server of a whole file; whoever scripts it leaves it as it was."""
    from tests.support.scripted_generator import ScriptedGenerator

    return ScriptedGenerator(tokenizer)


@pytest.fixture(scope="module")
def target(shared_generator: ScriptedGenerator, tokenizer: Tokenizer) -> Iterator[Target]:
    """The server of a whole file, in front of `shared_generator`."""
    from tests.support.http_server import running_server

    with running_server(shared_generator, tokenizer) as target:
        yield target


@pytest.fixture
def generator(tokenizer: Tokenizer) -> ScriptedGenerator:
    """For a server of each test."""
    from tests.support.scripted_generator import ScriptedGenerator

    return ScriptedGenerator(tokenizer)
