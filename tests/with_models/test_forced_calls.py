"""SmolLM2, which knows no tools, where it must call: each answer is made of valid calls, and ends by itself.

500 answers in `make test-long` (the profile `random` of hypothesis), a few in `make test`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest

from cluster.http.api import Api
from cluster.http.openai.schemas import ChatBody
from cluster.http.parse import prepare_chat
from cluster.slo.classes import RequestTerms
from decode_workers.local_engine import LocalEngine
from engine.sequence import Sequence
from engine.steps.loading import EngineConfig, load_model
from engine.text.output import OutputParser
from engine.text.tokenizer import Tokenizer
from tests.support.http_server import MODEL, scripted_api
from tests.support.scripted_generator import ScriptedGenerator
from tests.support.thoroughness import THOROUGH

pytestmark = [pytest.mark.model, pytest.mark.timeout(3600)]  # of a machine that does other work, too

NUM_ANSWERS: Final = 500 if THOROUGH else 12  # each question with each tool, in one of the two ways
MAX_TOKENS: Final = 512
QUESTIONS: Final = (
    "What is the weather like in Rome?",
    "Plan my week.",
    "Tell me a long story of a fox.",
    "Who are you?",
)
NOTES: Final = {"type": ["string", "null"]}
PERSON: Final = {"properties": {"name": {"type": "string"}, "notes": NOTES}, "required": ["name"]}
# As pydantic and hand write them: nothing is closed, nothing has a largest size.
PARAMETERS: Final[dict[str, dict[str, Any]]] = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]},
    "search": {
        "properties": {"query": {"type": "string"}, "filters": {"type": "object"}, "limit": {"type": "number"},
                       "more": {}, "tags": {"type": "array", "items": {"type": "string"}}},
        "required": ["query", "tags", "limit"],
    },
    "invite": {
        "$defs": {"Person": {"type": "object", **PERSON}},
        "properties": {"people": {"type": "array", "items": {"$ref": "#/$defs/Person"}},
                       "labels": {"type": "object", "additionalProperties": {"type": "string"}}},
        "required": ["people", "labels"],
    },
}  # fmt: skip


def _tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **PARAMETERS[name]}}}


@pytest.fixture(scope="module")
def api(smollm2_folder: Path) -> Api:
    tokenizer = Tokenizer(smollm2_folder)
    return scripted_api(ScriptedGenerator(tokenizer), tokenizer)


async def test_every_call_that_must_be_made_is_valid(smollm2_folder: Path, api: Api) -> None:
    """Whether some call must be, or one of a function that is named; all together, as each step reads all weights."""
    config = EngineConfig(model_ref=str(smollm2_folder), model_name="model", kv_blocks=1024, num_threads=1)
    engine = LocalEngine(load_model(config), max_num_seqs=32, token_budget=512)
    seqs = []
    ways = ("required", "named")
    asked = ((number, way) for number in range(NUM_ANSWERS) for way in (ways if THOROUGH else ways[number % 2 :][:1]))
    for number, choice in asked:
        name = list(PARAMETERS)[number % len(PARAMETERS)]
        body = ChatBody.model_validate(
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
                "tools": [_tool(name)] if choice == "required" else [_tool(name) for name in PARAMETERS],
                "tool_choice": choice if choice == "required" else {"type": "function", "function": {"name": name}},
                "max_tokens": MAX_TOKENS,
                "temperature": float(number % 5 > 0),
                "seed": number,
            }
        )
        job = await prepare_chat(body, await api.find_model(body.model), RequestTerms())
        spec = job.choices[0].spec
        seqs.append(Sequence(request_id=f"{number}-{choice}-{name}", attempt=0, params=spec.params,
                             prompt_token_ids=list(spec.prompt_token_ids)))  # fmt: skip
    for emission in engine.run(seqs):
        if emission.finish is not None:
            text = api.models[0].tokenizer.decode(emission.seq.output_token_ids, skip_special_tokens=True)
            assert emission.finish == "stop", text
            _, choice, name = emission.seq.request_id.split("-")
            calls = _calls(api, name, text)
            assert calls, text
            assert choice == "required" or len(calls) == 1


def _calls(api: Api, name: str, text: str) -> list[Any]:
    parser = OutputParser(tools=api.models[0].formats.tools, functions=frozenset([name]))
    arguments: list[str] = []
    for event in parser.feed(text) + parser.finish():
        assert event.kind in ("call", "arguments"), text
        if event.kind == "call":
            arguments.append("")
        else:
            arguments[-1] += event.text
    values = [json.loads(one) for one in arguments]
    for value in values:
        jsonschema.Draft202012Validator({"type": "object", **PARAMETERS[name]}).validate(value)
    return values
