"""SmolLM2 under schemas of others, lured by prompts to break them: what ends by itself follows its schema all the same.

All schemas in `make test-long`, a part in `make test`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from cluster.http.openai.json_schemas import UnsupportedGrammarError
from cluster.http.openai.structured import OutputConstraint, compiled
from decode_workers.local_engine import LocalEngine
from engine.sampling.grammar import grammar_tokenizer
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence
from engine.steps.loading import EngineConfig, load_model
from engine.text.tokenizer import Tokenizer
from tests.support.schema_answers import JSON_SCHEMA_BENCH, OFFICIAL, is_valid, schemas_of_others
from tests.support.small_models import greedy
from tests.support.thoroughness import THOROUGH

pytestmark = [pytest.mark.model, pytest.mark.timeout(3600)]  # of a machine that does other work, too

EVERY: Final = 1 if THOROUGH else 24
MAX_TOKENS: Final = 80
# Of which one breaks nearly any schema that brings no breaking instance of its own.
BREAKING: Final[tuple[Any, ...]] = ({"name": "Ann", "age": "forty"}, ["a", 1], {}, "text", 12)


def _baits(name: str, tokenizer: Tokenizer) -> list[tuple[dict[str, Any], str, str]]:
    """A part of the lines of a file whose schemas are served, each with its grammar and an instance that breaks it."""
    llg = grammar_tokenizer(tokenizer.json, tokenizer.vocab_size, tuple(sorted(tokenizer.eos_token_ids)))
    found = []
    for line in list(schemas_of_others(name))[::EVERY]:
        text = json.dumps(line["schema"])
        if r"\\p{" in text:  # which Python's own expressions do not know
            continue
        try:
            grammar = compiled(OutputConstraint("json", text, "response_format"), llg)
        except UnsupportedGrammarError:
            continue
        own = [instance for instance, valid in line.get("tests", ()) if not valid]
        bait = next((one for one in (*own, *BREAKING) if not is_valid(line, one)), None)
        if bait is not None:
            found.append((line, grammar, json.dumps(bait, separators=(",", ":"), ensure_ascii=False)))
    return found


@pytest.mark.parametrize("name", [JSON_SCHEMA_BENCH, OFFICIAL])
def test_a_breaking_instance_in_the_prompt_changes_nothing(smollm2_folder: Path, name: str) -> None:
    """Said over and over, so that the model goes on with it where nothing holds it: greedy and drawn."""
    tokenizer = Tokenizer(smollm2_folder)
    config = EngineConfig(model_ref=str(smollm2_folder), model_name="model", kv_blocks=1024, num_threads=1)
    engine = LocalEngine(load_model(config), max_num_seqs=32, token_budget=512)
    baits = _baits(name, tokenizer)
    seqs: list[Sequence] = []
    for number, (_, grammar, bait) in enumerate(baits):
        prompt = tokenizer.encode(f"{bait}\n" * 6, True)
        drawn = SamplingParams(max_tokens=MAX_TOKENS, seed=number, temperature=1.0, grammar=grammar)
        wishes = {
            "free": greedy(len(tokenizer.encode(bait, False)) + 1),
            "greedy": greedy(MAX_TOKENS, grammar=grammar),
            "drawn": drawn,
        }
        for kind, params in wishes.items():
            seqs.append(Sequence(request_id=f"{number}-{kind}", attempt=0, params=params, prompt_token_ids=prompt))
    num_lured = num_ended = 0
    for emission in engine.run(seqs):
        if emission.finish is None:
            continue
        index, kind = emission.seq.request_id.split("-")
        line, _, bait = baits[int(index)]
        text = tokenizer.decode(emission.seq.output_token_ids, skip_special_tokens=True)
        if kind == "free":
            num_lured += text.startswith(bait)
        elif emission.finish == "stop":
            num_ended += 1
            assert is_valid(line, json.loads(text)), (line, text)
    assert num_lured > len(baits) / 2, "what is to lure the model does not"
    assert num_ended > len(baits) / 2
