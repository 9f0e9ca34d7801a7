"""The smaller fields of requests, of OpenAI's API and of vLLM's, with scripted tokens in place of the cluster."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from cluster.__main__ import main
from cluster.app import served_model
from cluster.config.settings import LegatoConfig
from engine.text.tokenizer import Tokenizer
from tests.cluster.config.test_config import served
from tests.support.http_server import MODEL, running_server
from tests.support.openai_conformance import MESSAGES, Target
from tests.support.scripted_generator import MAX_MODEL_LEN, Script, ScriptedGenerator
from tests.support.waiting import wait_until

pytestmark = pytest.mark.model

# Reads whatever a request may say, and says what it has read.
TEMPLATE = """
{%- for document in documents or [] %}<|source|>{{ document.title }}: {{ document.text }}{% endfor %}
{%- if reasoning_effort is defined %}effort {{ reasoning_effort }};{% endif %}
{%- if verbosity is defined %}verbosity {{ verbosity }};{% endif %}
{%- if enable_thinking is defined and enable_thinking is false %}no thoughts;{% endif %}
{%- if numbers is defined %}{{ numbers[0] // numbers[1] }}{% endif %}
{%- if repeated is defined %}{{ 'sea ' * repeated }}{% endif %}
{%- if complaint is defined %}{{ raise_exception(complaint) }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + ':' }}
{%- if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant:{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """SmolLM2's, with a template that reads more than its own."""
    return Tokenizer(with_template(tmp_path_factory.mktemp("model"), smollm2_folder))


def with_template(folder: Path, source: Path) -> Path:
    """A model as a gateway needs one, with TEMPLATE in place of its own."""
    folder.mkdir(exist_ok=True)
    for path in source.glob("*.json"):
        shutil.copy(path, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def generator(shared_generator: ScriptedGenerator) -> Iterator[ScriptedGenerator]:
    """The generator behind `target`, its script and records fresh; nothing may be left open."""
    shared_generator.script = Script()
    shared_generator.requests.clear()
    yield shared_generator
    shared_generator.script = Script()
    wait_until(lambda: shared_generator.num_open == 0)


def refused(target: Target, path: str = "/v1/chat/completions", **fields: Any) -> dict[str, Any]:
    """The error of a request that is refused with 400."""
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": MESSAGES}
    answer = target.http.post(path, json={"model": MODEL, **prompt, **fields})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["message"].endswith(".") and len(error["message"]) < 1_000
    return error


CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 2}

# What a chat template is told.


@pytest.mark.parametrize(
    ("fields", "begins"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, "no thoughts;<|im_start|>user"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "<|im_start|>user"),
        ({"chat_template_kwargs": None, "documents": None, "reasoning_effort": None}, "<|im_start|>user"),
        ({"reasoning_effort": "high", "verbosity": "low"}, "effort high;verbosity low;<|im_start|>user"),
        ({"reasoning_effort": "none"}, "effort none;no thoughts;<|im_start|>user"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "effort none;<|im_start|>"),
        ({"documents": [{"title": "Sea", "text": "Wide."}]}, "<|source|>Sea: Wide.<|im_start|>user"),
        ({"chat_template_kwargs": {"numbers": [7, 2]}}, "3<|im_start|>user"),
    ],
)
def test_what_the_chat_template_is_told(
    target: Target, generator: ScriptedGenerator, tokenizer: Tokenizer, fields: dict[str, Any], begins: str
) -> None:
    target.chat(max_tokens=1, extra_body=fields)
    (request,) = generator.requests
    prompt = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert prompt.startswith(begins) and prompt.endswith("<|im_start|>assistant:")
    told = target.http.post("/tokenize", json={"messages": MESSAGES, "return_token_strs": True, **fields}).json()
    assert told["tokens"] == request.prompt_token_ids and len(told["token_strs"]) == told["count"]
    assert told["token_strs"][-1] == ":"


TIME: dict[str, Any] = {"type": "function", "function": {"name": "time", "description": "What time it is."}}
CONTINUED = [*MESSAGES, {"role": "assistant", "content": "The sea is "}]


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({"continue_final_message": True}, "<|im_start|>assistant:The sea is "),
        ({"continue_final_message": True, "add_generation_prompt": False}, "<|im_start|>assistant:The sea is "),
        ({"add_generation_prompt": False}, "The sea is <|im_end|>"),
        ({}, "The sea is <|im_end|><|im_start|>assistant:"),
    ],
)
def test_where_the_prompt_ends(
    target: Target, generator: ScriptedGenerator, tokenizer: Tokenizer, fields: dict[str, Any], ends: str
) -> None:
    target.chat(messages=CONTINUED, max_tokens=1, extra_body=fields)
    ids = generator.requests[0].prompt_token_ids
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith(ends)
    assert target.http.post("/tokenize", json={"messages": CONTINUED, **fields}).json()["tokens"] == ids


def test_reasoning_and_refusals_of_earlier_turns(
    target: Target, generator: ScriptedGenerator, tokenizer: Tokenizer
) -> None:
    for name in ("reasoning", "reasoning_content"):
        refusal = [{"type": "refusal", "refusal": "I will not."}]
        target.chat(messages=[*MESSAGES, {"role": "assistant", "content": refusal, name: "Hm."}], max_tokens=1)
        prompt = tokenizer.decode(generator.requests.pop().prompt_token_ids, skip_special_tokens=False)
        assert "<|im_start|>assistant:<think>Hm.</think>I will not.<|im_end|>" in prompt
    for said in ({"content": None, "refusal": "I will not."}, {"refusal": "I will not."}, {"reasoning": "I will not."}):
        target.chat(messages=[*MESSAGES, {"role": "assistant", **said}], max_tokens=1)
        prompt = tokenizer.decode(generator.requests.pop().prompt_token_ids, skip_special_tokens=False)
        assert "I will not." in prompt
    wrong: dict[str, Any] = {"role": "user", "content": "x", "reasoning": "y"}
    assert refused(target, messages=[wrong])["param"] == "messages[0].reasoning"
    wrong = {"role": "assistant", "content": "x", "reasoning": "y", "reasoning_content": "z"}
    assert "differ" in refused(target, messages=[wrong])["message"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"chat_template_kwargs": {"enable_thinkng": False}}, "chat_template_kwargs", "does not read enable_thinkng"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "send an object"),
        ({"chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs", "no name"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "'tools'"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs", "'chat_template'"),
        ({"chat_template_kwargs": {"verbosity": "x" * 4_097}}, "chat_template_kwargs", "'verbosity'"),
        ({"chat_template_kwargs": {"numbers": "x" * 4_097}}, "chat_template_kwargs", "4096 characters"),
        ({"chat_template_kwargs": {"numbers": [0] * 257}}, "chat_template_kwargs", "256 values"),
        ({"chat_template_kwargs": {"numbers": [[[[[[[[1]]]]]]]]}}, "chat_template_kwargs", "8 levels"),
        ({"chat_template_kwargs": {"repeated": 10**10}}, "chat_template_kwargs", "beyond 1048576"),
        ({"chat_template_kwargs": {"repeated": 2**20}}, "messages", "makes 4194"),
        ({"chat_template_kwargs": {"numbers": [1, 0]}}, "messages", "division"),
        ({"chat_template_kwargs": {"numbers": [1]}}, "messages", "template refuses"),
        ({"chat_template_kwargs": {"numbers": {"a": 1}}}, "messages", "template refuses"),
        ({"chat_template_kwargs": {"complaint": "no " * 1_000}}, "messages", "template refuses"),
        ({"reasoning_effort": "immense"}, "reasoning_effort", "'high'"),
        ({"verbosity": "chatty"}, "verbosity", "'low'"),
        ({"documents": "sea"}, "documents", "list of objects"),
        ({"documents": [{"title": 5}]}, "documents", "document 0"),
        ({"documents": [{"title": "x"}] * 129}, "documents", "at most 128"),
        ({"documents": [{"title": "x" * 300_000}]}, "messages", "characters"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "either"),
    ],
)
def test_what_the_chat_template_is_not_told(
    target: Target, generator: ScriptedGenerator, fields: dict[str, Any], param: str, says: str
) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        error = refused(target, path, **fields)
        assert error["param"] == param and says in error["message"], error
    assert not generator.requests


def test_what_every_chat_is_told(
    shared_generator: ScriptedGenerator, tokenizer: Tokenizer, smollm2_folder: Path, tmp_path: Path
) -> None:
    """`model.chat_template_kwargs`, at every endpoint of chats, below what a request says, for that model alone."""
    folder = with_template(tmp_path / "model", smollm2_folder)
    defaults = {"enable_thinking": False, "verbosity": "low", "numbers": [7, 2]}
    settings = {"ref": str(folder), "served_name": "told", "chat_template_kwargs": defaults}
    told = served_model(LegatoConfig.model_validate({"model": settings}), shared_generator.limits)
    with running_server(shared_generator, tokenizer, others=[told], storage=tmp_path / "storage") as target:

        def prompt(path: str, **fields: Any) -> str:
            """What is generated from, up to the first message."""
            shared_generator.requests.clear()
            asked = {"input": "x", "max_output_tokens": 2} if path == "/v1/responses" else CHAT
            target.http.post(path, json={"model": "told", **asked, **fields}).raise_for_status()
            (request,) = shared_generator.requests
            whole = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
            return whole.partition("<|im_start|>")[0]

        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
            assert prompt(path) == "verbosity low;no thoughts;3"
        chat = partial(prompt, "/v1/chat/completions")
        assert chat(chat_template_kwargs={"enable_thinking": True}) == "verbosity low;3"
        assert chat(chat_template_kwargs={"numbers": [9, 2]}, verbosity="high") == "verbosity high;no thoughts;4"
        assert chat(reasoning_effort="high") == "effort high;verbosity low;no thoughts;3"
        assert prompt("/v1/messages", thinking={"type": "adaptive"}) == "verbosity low;3"
        assert prompt("/v1/chat/completions", model=MODEL) == ""
        tokens = target.http.post("/tokenize", json={"model": "told", "messages": MESSAGES}).json()["tokens"]
        assert tokenizer.decode(tokens, skip_special_tokens=False).startswith("verbosity low;no thoughts;3<|im_start|>")


def test_a_request_for_no_effort_wins_over_a_default(
    shared_generator: ScriptedGenerator, tokenizer: Tokenizer, smollm2_folder: Path, tmp_path: Path
) -> None:
    folder = with_template(tmp_path / "model", smollm2_folder)
    settings = {"ref": str(folder), "served_name": "told", "chat_template_kwargs": {"enable_thinking": True}}
    told = served_model(LegatoConfig.model_validate({"model": settings}), shared_generator.limits)
    with running_server(shared_generator, tokenizer, others=[told]) as target:
        asked = {"model": "told", "messages": MESSAGES, "reasoning_effort": "none", "return_token_strs": True}
        tokens = target.http.post("/tokenize", json=asked).json()["tokens"]
    assert tokenizer.decode(tokens, skip_special_tokens=False).startswith("effort none;no thoughts;<|im_start|>")


@pytest.mark.parametrize(
    ("defaults", "says"),
    [
        ({"enable_thinkng": False}, "no chat template that reads enable_thinkng, so it would change nothing"),
        ({"bos_token": "x"}, "the chat template gets bos_token from the model"),
    ],
)
def test_a_default_that_no_chat_could_have(
    shared_generator: ScriptedGenerator,
    smollm2_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    defaults: dict[str, Any],
    says: str,
) -> None:
    """A gateway refuses it when it starts, and `legato check` before."""
    folder = with_template(tmp_path / "model", smollm2_folder)
    settings = {"ref": str(folder), "chat_template_kwargs": defaults}
    with pytest.raises(ValueError, match=f"{says}; leave it out of model.chat_template_kwargs"):
        served_model(LegatoConfig.model_validate({"model": settings}), shared_generator.limits)
    path = tmp_path / "served.yaml"
    path.write_text(served({"model": settings}))
    monkeypatch.setattr("sys.argv", ["legato", "check", str(path)])
    assert main() == 1
    assert f"{says}; leave it out of model.chat_template_kwargs" in capsys.readouterr().err


def test_templates_are_of_chats(target: Target) -> None:
    answer = target.http.post("/tokenize", json={"prompt": "x", "documents": [{"title": "Sea"}]})
    assert answer.status_code == 400 and "only possible with messages" in answer.json()["error"]["message"]
    answer = target.http.post("/tokenize", json={"prompt": "x", "tools": [TIME]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
    assert target.http.post("/tokenize", json={"prompt": "x", "documents": None}).json()["count"] == 1


def test_tools_are_counted_as_a_chat_has_them(target: Target, generator: ScriptedGenerator) -> None:
    target.chat(tools=[TIME], max_tokens=1)
    told = target.http.post("/tokenize", json={"messages": MESSAGES, "tools": [TIME]}).json()
    assert told["tokens"] == generator.requests[0].prompt_token_ids


# How an answer ends, and what of it is shown.


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"stop": " three"}, "one two", " three"),
        ({"stop": " three", "include_stop_str_in_output": True}, "one two three", " three"),
        ({"stop": ["e t", "o thr"], "include_stop_str_in_output": True}, "one t", "e t"),
        ({"stop": [f"nothing {n}" for n in range(63)] + [" four"]}, "one two three", " four"),
        ({"stop": "nothing"}, "one two three four", None),
        ({"stop": "nothing", "include_stop_str_in_output": True}, "one two three four<|im_end|>", None),
        ({"stop": None}, "one two three four", None),
    ],
)
def test_what_ended_an_answer(
    target: Target, generator: ScriptedGenerator, fields: dict[str, Any], text: str, reason: str | None
) -> None:
    generator.script.reply = "one two three four"
    extra = {**fields, "skip_special_tokens": False, "spaces_between_special_tokens": True}
    (choice,) = target.complete(max_tokens=20, extra_body=extra, logprobs=0).choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text, "stop", reason)
    assert "".join(choice.logprobs.tokens).startswith(text)
    *chunks, last = target.chat(max_tokens=20, extra_body=extra, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in [*chunks, last]) == text
    assert last.choices[0].model_dump().get("stop_reason") == reason
    assert not any("stop_reason" in chunk.choices[0].model_dump() for chunk in chunks)


def test_the_stop_token_that_ended_it(target: Target, generator: ScriptedGenerator, tokenizer: Tokenizer) -> None:
    generator.script.reply = "one two three four"
    (three,), (eos,) = target.tokenize(" three"), tokenizer.eos_token_ids
    for extra, text, reason in (
        ({"stop_token_ids": [three]}, "one two", three),
        ({"stop_token_ids": [three], "include_stop_str_in_output": True}, "one two three", three),
        ({"stop_token_ids": [eos]}, "one two three four", None),  # the model's own end all the same
        ({"stop_token_ids": [eos], "ignore_eos": True, "logit_bias": {str(eos): 100}}, "", eos),
    ):
        (choice,) = target.complete(max_tokens=20, extra_body=extra).choices
        assert (choice.text, choice.finish_reason, choice.stop_reason) == (text, "stop", reason)


def test_special_tokens_are_text_where_asked_for(target: Target, generator: ScriptedGenerator) -> None:
    start, sea = target.tokenize("<|im_start|>sea")
    fields: dict[str, Any] = {"max_tokens": 2, "logit_bias": {str(start): 100}, "echo": True, "prompt": [start, sea]}
    shown = "<|im_start|>sea<|im_start|><|im_start|>"
    assert target.complete(**fields, extra_body={"skip_special_tokens": False}).choices[0].text == shown
    assert target.complete(**fields).choices[0].text == "sea"
    (choice,) = target.complete(**fields, logprobs=0, extra_body={"skip_special_tokens": False}).choices
    assert choice.logprobs.text_offset == [0, 12, 15, 27]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"stop": ["x"] * 65}, "stop", "at most 64"),
        ({"stop": ["x" * 1_024] * 5}, "stop", "5120 characters; at most 4096"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "leaves no prompt"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-1"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "0"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "not streamed"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens", "boolean"),
    ],
)
def test_fields_out_of_bounds(
    target: Target, generator: ScriptedGenerator, fields: dict[str, Any], param: str, says: str
) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        error = refused(target, path, **fields)
        assert error["param"] == param and says in error["message"], error
    assert not generator.requests


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"response_format": {"type": "text", "json_schema": None}}),
        ("/v1/chat/completions", {"response_format": {"type": "json_object", "json_schema": None}}),
        ("/v1/chat/completions", {"response_format": {"type": "structural_tag", "schema": None, "format": {
            "type": "plus", "content": {"type": "const_string", "value": "a", "pattern": None}, "max": None}}}),
        ("/v1/chat/completions", {"logprobs": False, "top_logprobs": 0}),
        ("/v1/chat/completions", {"logprobs": None, "top_logprobs": 0}),
        ("/v1/responses", {"text": {"format": {"type": "json_object", "schema": None}}}),
        ("/v1/responses", {"input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x", "detail": None}]}]}),
    ],
)  # fmt: skip
def test_what_asks_for_nothing_is_taken(
    target: Target, generator: ScriptedGenerator, path: str, fields: dict[str, Any]
) -> None:
    """Null in an object in a field, as clients write that have one type for several kinds of it; and 0 of what is not
    wanted."""
    asked: dict[str, Any] = {"input": "x"} if path == "/v1/responses" else {"messages": MESSAGES}
    answer = target.http.post(path, json={"model": MODEL, **asked, **fields})
    assert answer.status_code == 200, answer.text
    assert generator.requests[0].params.logprobs is None


# Token ids, log probabilities of prompts, usage.


def test_what_is_null_is_not_given(target: Target) -> None:
    """Whatever its name. One that is not known and has a value stays a mistake."""
    call = {"id": "1", "type": None, "function": {"name": "f", "arguments": "{}", "stranger": None}}
    said = {"role": "assistant", "tool_calls": [call], "stranger": None}
    chat = {"model": MODEL, "messages": [*MESSAGES, said], "max_tokens": 1}
    thought = {"type": "reasoning", "summary": None, "content": "Hm."}
    response = {"model": MODEL, "input": [thought, {"type": None, "role": "user", "content": "x", "async_": None}]}
    for path, body in (
        ("/tokenize", {"prompt": "x", "add_special_tokens": None}),
        ("/v1/chat/completions", chat),
        ("/v1/responses", {**response, "max_output_tokens": 1}),
    ):
        answer = target.http.post(path, json={**body, "stranger": None})
        assert answer.status_code == 200, answer.text
        answer = target.http.post(path, json={**body, "stranger": False})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "unknown_parameter"


def test_what_clients_add_to_an_answer_is_taken_back(target: Target, generator: ScriptedGenerator) -> None:
    """OpenAI's what it has parsed, litellm what other vendors' answers have; and it makes no difference."""
    function: dict[str, Any] = {"name": "weather", "arguments": '{"place":"Rome"}'}
    call: dict[str, Any] = {"id": "1", "type": "function", "function": function}
    said: dict[str, Any] = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "Rain."}
    target.chat(messages=[*MESSAGES, said, result], max_tokens=1)
    beside = {"provider_specific_fields": {"refusal": None}}
    function |= {"parsed_arguments": {"place": "Rome"}, **beside}
    call |= {"index": 0, "extra_content": {"google": {"thought_signature": "x"}}, **beside}
    said |= {"parsed": {"sky": "clear"}, "thinking_blocks": [{"type": "thinking"}], "reasoning_items": [], **beside}
    target.chat(messages=[*MESSAGES, said, result], max_tokens=1)
    first, second = generator.requests
    assert first.prompt_token_ids == second.prompt_token_ids
    wrong = {**said, "tool_calls": [{**call, "stranger": 1}]}
    assert refused(target, messages=[*MESSAGES, wrong, result])["param"] == "messages[1].tool_calls[0].stranger"


@pytest.mark.parametrize("strict", [True, False])
def test_parsed_messages_of_openais_client(target: Target, generator: ScriptedGenerator, strict: bool) -> None:
    """As its user appends them to the conversation."""

    class City(pydantic.BaseModel):
        name: str

    client = target.strict if strict else target.client
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES}
    generator.script.reply = '{"name":"Rome"}'
    parsed = client.chat.completions.parse(**asked, response_format=City).choices[0].message
    generator.script.reply = '<tool_call>\n{"name": "City", "arguments": {"name": "Rome"}}\n</tool_call>'
    tool = openai.pydantic_function_tool(City)
    called = client.chat.completions.parse(**asked, tools=[tool]).choices[0].message
    assert parsed.parsed == City(name="Rome") and called.tool_calls
    assert called.tool_calls[0].function.parsed_arguments == City(name="Rome")
    history: list[Any] = [*MESSAGES, parsed, *MESSAGES, called]
    history.append({"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "It is there."})
    generator.script.reply = "Yes."
    assert client.chat.completions.create(model=MODEL, messages=history).choices[0].message.content == "Yes."


def test_ids_of_prompts(target: Target, generator: ScriptedGenerator) -> None:
    extra = {"return_token_ids": True}
    answer = target.chat(max_tokens=3, n=2, extra_body=extra)
    ids = generator.requests[0].prompt_token_ids
    assert answer.prompt_token_ids == ids and len(answer.choices[1].token_ids) == 3
    first, *others = target.chat(max_tokens=3, stream=True, extra_body=extra)
    assert first.prompt_token_ids == ids and not any("prompt_token_ids" in other.model_dump() for other in others)
    prompts = [[5, 6], [7]]
    answer = target.complete(prompt=prompts, max_tokens=2, extra_body=extra)
    assert [choice.prompt_token_ids for choice in answer.choices] == prompts
    told = {}
    for chunk in target.complete(prompt=prompts, max_tokens=2, stream=True, extra_body=extra):
        (choice,) = chunk.choices
        if (of_prompt := choice.model_dump().get("prompt_token_ids")) is not None:
            assert choice.index not in told and choice.text == ""
            told[choice.index] = of_prompt
    assert told == dict(enumerate(prompts))
    assert "prompt_token_ids" not in target.complete(max_tokens=1).choices[0].model_dump()


def test_log_probabilities_by_ids(target: Target, generator: ScriptedGenerator) -> None:
    generator.script.reply = "one two"
    extra = {"return_tokens_as_token_ids": True}
    names = [f"token_id:{token_id}" for token_id in target.tokenize("one two")]
    (choice,) = target.chat(max_tokens=2, logprobs=True, top_logprobs=1, extra_body=extra).choices
    assert [entry.token for entry in choice.logprobs.content] == names
    assert [entry.top_logprobs[0].token for entry in choice.logprobs.content] == names
    assert bytes(byte for entry in choice.logprobs.content for byte in entry.bytes) == b"one two"
    (choice,) = target.complete(prompt=[900], echo=True, max_tokens=2, logprobs=1, extra_body=extra).choices
    assert choice.logprobs.tokens == ["token_id:900", *names]
    assert [list(top) for top in choice.logprobs.top_logprobs[1:]] == [[name] for name in names]


def test_log_probabilities_of_an_echo_without_text(target: Target) -> None:
    """Of special tokens, which are left out of the text."""
    asked = {"model": target.model, "prompt": [1], "echo": True, "logprobs": 1, "max_tokens": 0}
    (choice,) = target.http.post("/v1/completions", json=asked).json()["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("", ["<|im_start|>"])
    with target.http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as answer:
        first = json.loads(next(answer.iter_lines()).removeprefix("data: "))
    assert first["choices"][0]["logprobs"] == choice["logprobs"]


def test_log_probabilities_of_prompts(target: Target, generator: ScriptedGenerator, tokenizer: Tokenizer) -> None:
    def told(token_id: int, rank: int | None, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    def of(ids: list[int]) -> list[Any]:
        return [None, *({str(i): told(i, 1, -0.5), str(i + 1): told(i + 1, 2, -1.5)} for i in ids[1:])]

    extra = {"prompt_logprobs": 2}
    answer = target.chat(max_tokens=1, extra_body=extra)
    assert answer.prompt_logprobs == of(generator.requests[0].prompt_token_ids)
    prompts = [[40, 50, 60], [70]]
    answer = target.complete(prompt=prompts, max_tokens=1, echo=True, logprobs=4, extra_body=extra)
    assert [choice.prompt_logprobs for choice in answer.choices] == [of(ids) for ids in prompts]
    assert len(answer.choices[0].logprobs.top_logprobs[1]) == 4, "an echo's are what `logprobs` says"
    answer = target.complete(prompt=prompts, max_tokens=1, echo=True, extra_body=extra)
    assert answer.choices[0].logprobs is None and answer.choices[0].prompt_logprobs == of(prompts[0])
    (choice,) = target.complete(prompt=[40, 50], max_tokens=1, extra_body={"prompt_logprobs": 0}).choices
    assert choice.prompt_logprobs == [None, {"50": told(50, None, -0.5)}]
    error = refused(target, "/v1/completions", prompt=[5] * 1_000, n=20, prompt_logprobs=20)
    assert error["code"] == "request_too_large"


@pytest.mark.parametrize(("limit", "kept"), [(3, [3, 4, 5]), (5, [1, 2, 3, 4, 5]), (9, [1, 2, 3, 4, 5]), (1, [5])])
def test_prompts_cut_at_their_beginning(
    target: Target, generator: ScriptedGenerator, tokenizer: Tokenizer, limit: int, kept: list[int]
) -> None:
    extra = {"truncate_prompt_tokens": limit}
    answer = target.complete(prompt=[1, 2, 3, 4, 5], max_tokens=1, echo=True, extra_body=extra)
    assert generator.requests.pop().prompt_token_ids == kept and answer.usage.prompt_tokens == len(kept)
    assert answer.choices[0].text.startswith(tokenizer.decode(kept))
    target.chat(max_tokens=1, extra_body=extra)
    whole = target.http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    assert generator.requests.pop().prompt_token_ids == whole[-limit:]
    target.complete(prompt=[7] * 5_000, max_tokens=8, extra_body={"truncate_prompt_tokens": -1})
    assert len(generator.requests.pop().prompt_token_ids) == MAX_MODEL_LEN - 8
    (choice,) = target.complete(prompt="The sea is", max_tokens=1, echo=True, extra_body=extra).choices
    assert choice.text.startswith("The sea is"[-len(tokenizer.decode(target.tokenize("The sea is")[-limit:])) :])


def test_usage_of_each_event(target: Target, generator: ScriptedGenerator) -> None:
    chunks: list[Any] = []
    generator.script = Script(reply="one two three four", until=lambda: len(chunks) > 1, burst=2)
    options: dict[str, Any] = {"include_usage": True, "continuous_usage_stats": True}
    for chunk in target.chat(max_tokens=4, stream=True, stream_options=options):
        chunks.append(chunk)
    *events, last = [chunk.usage for chunk in chunks]
    assert [usage.completion_tokens for usage in events] == [0, 2, 4]
    assert last == events[-1] and last.completion_tokens_details.reasoning_tokens == 0
    assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in events)
    only = list(target.complete(max_tokens=2, stream=True, stream_options={"continuous_usage_stats": True}))
    assert only[-1].choices and only[-1].usage.completion_tokens == 2


# What is not to be said.


def test_words_and_tokens_that_are_banned(target: Target, generator: ScriptedGenerator) -> None:
    (sea,), (spaced,) = target.tokenize("sea"), target.tokenize(" sea")
    several = target.tokenize("a calm night")
    target.complete(max_tokens=1, extra_body={"bad_words": ["sea", " sea"], "allowed_token_ids": [sea, 5]})
    params = generator.requests.pop().params
    assert params.bad_words == ((sea,), (spaced,)) and params.allowed_token_ids == (sea, 5)
    target.chat(max_tokens=1, extra_body={"bad_words": ["a calm night"], "allowed_token_ids": None})
    params = generator.requests.pop().params
    assert params.bad_words[0] == tuple(several) and params.allowed_token_ids == ()
    assert [word[1:] for word in params.bad_words[1:]] in ([], [tuple(several[1:])])


@pytest.mark.parametrize("word", ["Danube", " Danube", "\nDanube"])
def test_a_word_is_banned_in_all_of_its_spellings(target: Target, generator: ScriptedGenerator, word: str) -> None:
    """However many tokens it has behind a space, and as it was sent."""
    plain, spaced, sent = (tuple(target.tokenize(spelt)) for spelt in ("Danube", " Danube", word))
    assert (len(plain), len(spaced)) == (2, 1)
    target.complete(max_tokens=1, extra_body={"bad_words": [word, "Danube", "7"]})
    *banned, seven = generator.requests.pop().params.bad_words
    assert banned == [plain, spaced] and any(sent[-len(form) :] == form for form in banned)
    assert seven == tuple(target.tokenize("7"))  # behind a space it is the same token: nothing more is needed


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"bad_words": "sea"}, "bad_words", "list of texts"),
        ({"bad_words": [" "]}, "bad_words", "must not be empty"),
        ({"bad_words": ["x"] * 257}, "bad_words", "at most 256"),
        ({"bad_words": ["x" * 4_097]}, "bad_words", "at most 4096"),
        ({"bad_words": ["1" * 2_000]}, None, "bad_words have 2000 tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1"),
        ({"allowed_token_ids": [999_999_999]}, "allowed_token_ids", "vocabulary"),
        ({"allowed_token_ids": [5] * 1_025}, "allowed_token_ids", "at most 1024"),
    ],
)
def test_bans_out_of_bounds(
    target: Target, generator: ScriptedGenerator, fields: dict[str, Any], param: str | None, says: str
) -> None:
    error = refused(target, "/v1/completions", **fields)
    assert error["param"] == param and says in error["message"], error
    assert not generator.requests


# What the client expects the answer to be much like.


@pytest.mark.parametrize(
    "content", ["def f():\n    pass", [{"type": "text", "text": "def f():"}, {"type": "text", "text": "\n    pass"}]]
)
def test_a_prediction_goes_to_the_workers_of_each_choice(
    target: Target, generator: ScriptedGenerator, tokenizer: Tokenizer, content: Any
) -> None:
    prediction = {"type": "content", "content": content}
    target.chat(max_tokens=2, n=2, prediction=prediction, logprobs=True, presence_penalty=1)
    target.complete(max_tokens=2, extra_body={"prediction": prediction})
    target.complete(max_tokens=2, extra_body={"prediction": None})
    *predicted, without = [request.prediction_token_ids for request in generator.requests]
    assert predicted == [tokenizer.encode("def f():\n    pass", add_special_tokens=False)] * 3 and without == []


def test_what_is_no_prediction_is_refused(target: Target, generator: ScriptedGenerator) -> None:
    def error(content: Any, **fields: Any) -> dict[str, Any]:
        return refused(target, prediction={"type": "content", "content": content, **fields})

    assert error([{"type": "image_url", "image_url": "x"}])["param"] == "prediction.content"
    assert error(5)["param"] == "prediction.content"
    assert error("x", strict=True)["code"] == "unknown_parameter"
    assert error("a" * 300_000)["code"] == error("one " * 3_000)["code"] == "context_length_exceeded"
    assert not generator.requests


def test_usage_counts_what_became_of_a_prediction(target: Target, generator: ScriptedGenerator) -> None:
    """Of all choices; whole, and streamed; not what other drafters guessed, and not as generated tokens."""
    generator.script.reply, generator.script.burst = "one two three four five six seven eight", 8
    generator.script.drafted = {2: ("prediction", 2, 5), 4: ("lookup", 1, 1), 6: ("prediction", 0, 3)}
    fields: dict[str, Any] = {"n": 2, "max_tokens": 8, "prediction": {"type": "content", "content": "x"}}
    usages = [target.chat(**fields).usage]
    usages += [list(target.chat(**fields, stream=True, stream_options={"include_usage": True}))[-1].usage]
    for usage in usages:
        details = usage.completion_tokens_details
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 16)
        assert usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("stop", "accepted", "rejected"), [("four", 3, 5), ("five", 3, 5), ("two", 1, 7), ("one", 0, 0)]
)
def test_predicted_tokens_after_a_stop_text_were_not_accepted(
    target: Target, generator: ScriptedGenerator, stop: str, accepted: int, rejected: int
) -> None:
    """A step brought `two` to `five`, of which the last was none of its eight drafts."""
    generator.script.reply, generator.script.burst = "one two three four five six", 6
    generator.script.drafted = {4: ("prediction", 3, 5)}
    details = target.chat(stop=stop, prediction={"type": "content", "content": "x"}).usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (accepted, rejected)
