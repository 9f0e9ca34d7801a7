"""A model that writes as gpt-oss does, over HTTP: its channels are reasoning, calls and answers of OpenAI's API."""

from __future__ import annotations

from typing import Any, Final

import pytest
from llguidance import LLMatcher

from engine.sampling.grammar import grammar_tokenizer
from engine.text.tokenizer import Tokenizer
from tests.support.http_server import MODEL
from tests.support.openai_conformance import MESSAGES, Target
from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.thinker import harmonist

pytestmark = pytest.mark.model

PLACE: Final = {"type": "string", "enum": ["Paris", "Oslo"]}
WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"place": PLACE},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
TOOLS: Final[list[Any]] = [WEATHER]
THOUGHT: Final = "<|channel|>analysis<|message|>Is it rain? <b><|end|><|start|>assistant"
CALL: Final = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"place":"Oslo"}'
SAID: Final = "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"
FINAL: Final = "<|channel|>final<|message|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Which formats the model writes is seen in its chat template."""
    return Tokenizer(harmonist(tmp_path_factory.mktemp("harmony") / "model"))


@pytest.mark.parametrize("said_before", ["", SAID])
def test_reasoning_and_a_call(target: Target, shared_generator: ScriptedGenerator, said_before: str) -> None:
    shared_generator.script = Script(reply=THOUGHT + said_before + CALL)
    (whole,) = target.chat(tools=TOOLS).choices
    with target.strict.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=TOOLS) as stream:
        (streamed,) = stream.get_final_completion().choices
    for answer in (whole, streamed):
        assert answer.finish_reason == "tool_calls"
        assert (answer.message.content or "") == ("I will look." if said_before else "")
        assert answer.message.tool_calls is not None
        (call,) = answer.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", '{"place":"Oslo"}')
    assert whole.message.reasoning == "Is it rain? <b>"


def test_a_budget_in_anthropics_way(target: Target, shared_generator: ScriptedGenerator) -> None:
    """Which cannot be kept, as the opening mark is three tokens: a client that knows nothing of that is answered."""
    shared_generator.script = Script(reply=f"{THOUGHT}{FINAL}It rains.")
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Oslo?"}], "max_tokens": 100}
    thinking = {"type": "enabled", "budget_tokens": 1_024}
    answer = target.http.post("/v1/messages", json={**asked, "thinking": thinking})
    assert [block["type"] for block in answer.json()["content"]] == ["thinking", "text"]
    refused = target.http.post("/v1/chat/completions", json={**asked, "thinking_token_budget": 1_024})
    assert refused.json()["error"]["param"] == "thinking_token_budget"
    assert "reasoning_effort" in refused.json()["error"]["message"], "which it heeds"


def test_an_answer(target: Target, shared_generator: ScriptedGenerator, tokenizer: Tokenizer) -> None:
    """Its tokens of reasoning are counted with the marks up to where the answer begins."""
    shared_generator.script = Script(reply=f"{THOUGHT}{FINAL}It rains.", burst=1)
    answer = target.chat()
    message = answer.choices[0].message
    assert (message.content, message.reasoning) == ("It rains.", "Is it rain? <b>")
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(tokenizer.encode(THOUGHT + FINAL))


def test_what_is_said_and_thought_in_several_messages_is_lines(
    target: Target, shared_generator: ScriptedGenerator
) -> None:
    """In a chat, which has one content and one reasoning; as in vLLM."""
    shared_generator.script = Script(reply=f"{THOUGHT}{SAID}{THOUGHT}{SAID}{FINAL}It rains.")
    (whole,) = target.chat().choices
    with target.strict.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        (streamed,) = stream.get_final_completion().choices
    for answer in (whole, streamed):
        assert answer.message.content == "I will look.\nI will look.\nIt rains."
    assert whole.message.reasoning == "Is it rain? <b>\nIs it rain? <b>"


def test_a_conversation_of_calls_and_results(
    target: Target, shared_generator: ScriptedGenerator, tokenizer: Tokenizer
) -> None:
    shared_generator.script = Script(reply=f"{FINAL}It rains.")
    shared_generator.requests.clear()
    asked = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"place":"Oslo"}'}}
    target.chat(
        tools=[WEATHER],
        messages=[
            {"role": "user", "content": "Oslo?"},
            {"role": "assistant", "content": None, "tool_calls": [asked], "reasoning": "hm"},
            {"role": "tool", "tool_call_id": "1", "name": "weather", "content": "rain"},
        ],
    )
    prompt = tokenizer.decode(shared_generator.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith(
        "<|start|>user<|message|>Oslo?<|end|><|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"place": "Oslo"}<|call|>'
        "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>rain<|end|><|start|>assistant"
    )
    assert "type weather = " in prompt


def test_what_must_be_said(target: Target, shared_generator: ScriptedGenerator, tokenizer: Tokenizer) -> None:
    """A call, or an answer by a schema, on its own channel, behind reasoning or not; by the marks' own tokens."""
    llg = grammar_tokenizer(tokenizer.json, tokenizer.vocab_size, tuple(sorted(tokenizer.eos_token_ids)))

    def takes(text: str) -> bool:
        grammar = shared_generator.requests[-1].params.grammar
        assert grammar is not None
        matcher = LLMatcher(llg, grammar)
        ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    shared_generator.script = Script(reply=CALL)
    target.chat(tools=[WEATHER], tool_choice="required")
    assert takes(CALL) and takes(THOUGHT + CALL)
    assert not takes(CALL.replace("Oslo", "Rome")) and not takes(f"{FINAL}Hello.") and not takes(THOUGHT)
    wish: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    target.chat(response_format=wish)
    assert takes(f'{FINAL}"Oslo"') and takes(f'{THOUGHT}{FINAL}"Paris"')
    assert not takes('"Oslo"') and not takes(f'{FINAL}"Rome"') and not takes(CALL)
    target.chat(response_format=wish, tools=[WEATHER])
    assert takes(f'{FINAL}"Oslo"') and takes(THOUGHT + CALL)
    strict: dict[str, Any] = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    target.chat(tools=[strict])
    for text in (f"{FINAL}Hello.", THOUGHT + FINAL, CALL, THOUGHT + SAID + CALL, SAID + THOUGHT + f"{FINAL}Hi."):
        assert takes(text), text
    assert not takes(CALL.replace("Oslo", "Rome")) and not takes(THOUGHT + SAID + CALL.replace("place", "city"))
    shared_generator.script = Script(reply=f'{THOUGHT}{FINAL}"Oslo"')
    assert target.chat(response_format=wish).choices[0].message.content == '"Oslo"'
