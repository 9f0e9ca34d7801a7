"""What any server of Legato's API must do, seen through the `openai` client and plain HTTP.

Every check takes a `Target` and asserts; `CHECKS` lists them all. Nothing here depends on what the model says, only
on the API and on one property of the server: greedy and seeded requests repeat exactly (so a real cluster under test
computes in float32). The scripted server of `test_http_api.py` and a real cluster both have to pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import httpx
import openai
import pydantic

from kv_transfer.messages import PROTOCOL_VERSION
from tests.support.thoroughness import THOROUGH
from tests.support.waiting import wait_until

PROMPT: Final = "The old lighthouse keeper climbed the stairs and"
MESSAGES: Final[list[Any]] = [{"role": "user", "content": "Tell me about the sea."}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A running server. `client` does not retry."""

    client: openai.OpenAI
    http: httpx.Client  # at the server's root
    model: str

    @property
    def strict(self) -> openai.OpenAI:
        """`client`, which raises for an answer or event that does not fit the API's own types. Those of text
        completions have none for a chunk before the last, and those of embeddings none for base64."""
        return self.client.with_options(_extra_kwargs={"_strict_response_validation": True})

    def chat(self, **fields: Any) -> Any:
        return self.strict.chat.completions.create(**{"model": self.model, "messages": MESSAGES, **fields})

    def complete(self, **fields: Any) -> Any:
        return self.client.completions.create(**{"model": self.model, "prompt": PROMPT, **fields})

    def greedy(self, **fields: Any) -> Any:
        """A text completion of fixed length, the same each time."""
        extra = {"ignore_eos": True, **fields.pop("extra_body", {})}
        return self.complete(**{"temperature": 0, "max_tokens": 16, "extra_body": extra, **fields})

    def tokenize(self, text: str) -> list[int]:
        tokens: list[int] = self.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()[
            "tokens"
        ]
        return tokens


def _streamed_text(stream: Any, index: int = 0) -> str:
    return "".join(choice.text for chunk in stream for choice in chunk.choices if choice.index == index)


def _streamed_chat(stream: Any) -> tuple[str, str | None]:
    """(text, finish reason) of the only choice."""
    text, reason = "", None
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason


def chat_answers(target: Target) -> None:
    answer = target.chat(temperature=0, max_completion_tokens=12)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == target.model
    (choice,) = answer.choices
    assert choice.index == 0 and choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length") and choice.logprobs is None
    assert 1 <= answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def chat_streams_the_same(target: Target) -> None:
    fields = {"temperature": 0, "max_tokens": 20}
    whole = target.chat(**fields).choices[0]
    assert _streamed_chat(target.chat(**fields, stream=True)) == (whole.message.content, whole.finish_reason)


def chat_stream_begins_with_the_role(target: Target) -> None:
    chunks = list(target.chat(max_tokens=4, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].object == "chat.completion.chunk"
    assert len({chunk.id for chunk in chunks}) == 1
    assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] in ("stop", "length")


def chat_takes_parts_and_roles(target: Target) -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello."}]
    roles = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]
    fields = {"temperature": 0, "max_tokens": 8}
    with_parts, with_text = target.chat(messages=roles, **fields), target.chat(messages=plain, **fields)
    assert with_parts.usage.prompt_tokens == with_text.usage.prompt_tokens
    assert with_parts.choices[0].message.content == with_text.choices[0].message.content


def chat_without_a_limit_ends(target: Target) -> None:
    answer = target.chat(stop=[" ", "\n"])
    assert answer.choices[0].finish_reason in ("stop", "length")


def completion_answers(target: Target) -> None:
    answer = target.greedy()
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == target.model
    (choice,) = answer.choices
    assert choice.text and choice.finish_reason == "length" and choice.logprobs is None
    assert answer.usage.completion_tokens == 16
    assert target.complete().usage.completion_tokens <= 16  # OpenAI's default


def completion_streams_the_same(target: Target) -> None:
    assert _streamed_text(target.greedy(stream=True)) == target.greedy().choices[0].text


def completion_takes_tokens_and_lists(target: Target) -> None:
    ids = target.http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    text = target.greedy().choices[0].text
    assert target.greedy(prompt=ids).choices[0].text == text
    assert [c.text for c in target.greedy(prompt=[PROMPT]).choices] == [text]
    both = target.greedy(prompt=[ids, ids[:-1]])
    assert [c.index for c in both.choices] == [0, 1] and both.choices[0].text == text
    assert both.usage.prompt_tokens == 2 * len(ids) - 1


def stop_strings_cut_the_text(target: Target) -> None:
    text = target.greedy(max_tokens=24).choices[0].text
    for start in range(3, len(text) - 5, 4 if THOROUGH else 12):
        stop = text[start : start + 4]
        expected = text[: text.find(stop)]
        (whole,) = target.greedy(max_tokens=24, stop=stop).choices
        assert (whole.text, whole.finish_reason) == (expected, "stop"), stop
        assert _streamed_text(target.greedy(max_tokens=24, stop=["\x00never", stop], stream=True)) == expected


def stop_token_ids_end_it(target: Target) -> None:
    (token_id,) = target.tokenize(" sea")
    extra = {"stop_token_ids": [token_id]}
    answer = target.greedy(logit_bias={str(token_id): 100}, extra_body=extra)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    assert answer.usage.completion_tokens == 1
    forced = target.greedy(logit_bias={str(token_id): 100}, extra_body={**extra, "min_tokens": 5})
    assert forced.usage.completion_tokens >= 5


def logit_bias_forces_a_token(target: Target) -> None:
    (token_id,) = target.tokenize(" sea")
    assert target.greedy(logit_bias={str(token_id): 100}, max_tokens=3).choices[0].text == " sea sea sea"


def min_tokens_holds_off_the_end(target: Target) -> None:
    answer = target.chat(max_tokens=40, temperature=0, extra_body={"min_tokens": 40})
    assert answer.usage.completion_tokens == 40


def seeds_repeat_and_differ(target: Target) -> None:
    def sample(seed: int) -> str:
        text: str = (
            target.complete(temperature=1, max_tokens=24, seed=seed, extra_body={"ignore_eos": True}).choices[0].text
        )
        return text

    assert sample(7) == sample(7)
    assert len({sample(seed) for seed in (7, 8, -1, 2**63 - 2, -(2**63))}) > 1


def n_gives_distinct_choices(target: Target) -> None:
    fields = {"temperature": 1, "max_tokens": 24, "seed": 11, "extra_body": {"ignore_eos": True}}
    answer = target.complete(n=3, **fields)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert texts[0] == target.complete(**fields).choices[0].text  # the first choice is what one alone would be
    assert answer.usage.completion_tokens == 72
    assert answer.usage.prompt_tokens == target.complete(**fields).usage.prompt_tokens
    chunks = list(target.complete(n=3, stream=True, **fields))
    assert [_streamed_text(chunks, index) for index in range(3)] == texts


def sampling_fields_are_accepted(target: Target) -> None:
    extra = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "cache_salt": "tenant-1"}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "temperature": 0.8, "top_p": 0.9}
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": False, "safety_identifier": "s"}
    answer = target.chat(max_tokens=4, extra_body=extra, **penalties, **harmless)
    assert answer.usage.completion_tokens <= 4
    assert target.complete(max_tokens=4, extra_body={"top_k": -1}, best_of=1, suffix="", user="u").choices
    assert target.chat(max_tokens=2, response_format={"type": "text"}, tools=[], tool_choice="none").choices


def service_tiers_of_openai_are_understood(target: Target) -> None:
    for asked, answered in (("auto", "default"), ("default", "default"), ("flex", "flex"), ("priority", "priority")):
        assert target.chat(max_tokens=1, service_tier=asked).service_tier == answered
        assert {part.service_tier for part in target.chat(max_tokens=2, service_tier=asked, stream=True)} == {answered}
    assert target.chat(max_tokens=1).service_tier == "default"
    body = {"model": target.model, "messages": MESSAGES, "service_tier": "no such tier"}
    refused = target.http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "service_tier"


def usage_comes_last_in_a_stream(target: Target) -> None:
    for stream in (
        target.chat(max_tokens=6, stream=True, stream_options={"include_usage": True}),
        target.complete(max_tokens=6, stream=True, stream_options={"include_usage": True}),
    ):
        *before, last = list(stream)
        assert last.choices == [] and 1 <= last.usage.completion_tokens <= 6
        assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
        assert before and all(chunk.usage is None for chunk in before)


def chat_logprobs_have_openai_shape(target: Target) -> None:
    fields = {"temperature": 0, "max_tokens": 10, "logprobs": True, "top_logprobs": 3}
    (choice,) = target.chat(**fields).choices
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == choice.message.content
    for entry in entries:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        ordered = [top.logprob for top in entry.top_logprobs]
        assert ordered == sorted(ordered, reverse=True) and entry.logprob == ordered[0]  # greedy takes the best
    streamed = [
        entry
        for chunk in target.chat(**fields, stream=True)
        for c in chunk.choices
        if c.logprobs
        for entry in c.logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    (bare,) = target.chat(temperature=0, max_tokens=3, logprobs=True).choices
    assert all(entry.top_logprobs == [] for entry in bare.logprobs.content)


def completion_logprobs_have_openai_shape(target: Target) -> None:
    (choice,) = target.greedy(logprobs=2, max_tokens=8).choices
    found = choice.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 8
    assert found.text_offset[0] == 0 and "".join(found.tokens) == choice.text
    for token, logprob, top, offset in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset, strict=True
    ):
        assert choice.text[offset:].startswith(token) and top[token] == logprob and 2 <= len(top) <= 3
    chunks = [c.logprobs for chunk in target.greedy(logprobs=2, max_tokens=8, stream=True) for c in chunk.choices]
    assert [token for found in chunks if found for token in found.tokens] == found.tokens


def logprobs_follow_the_text_to_a_stop(target: Target) -> None:
    text = target.greedy(max_tokens=24).choices[0].text
    stop = text[len(text) // 2 :][:5]
    (choice,) = target.greedy(max_tokens=24, stop=stop, logprobs=0).choices
    tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
    assert "".join(tokens).startswith(choice.text) and all(offset < len(choice.text) for offset in offsets)


def echo_repeats_the_prompt(target: Target) -> None:
    text = target.greedy().choices[0].text
    assert target.greedy(echo=True).choices[0].text == PROMPT + text
    assert _streamed_text(target.greedy(echo=True, stream=True)) == PROMPT + text
    ids = target.tokenize(PROMPT)
    assert target.greedy(prompt=ids, echo=True).choices[0].text == PROMPT + text


def echo_has_the_prompts_logprobs(target: Target) -> None:
    ids = target.http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    answer = target.greedy(echo=True, logprobs=1, max_tokens=4)
    (choice,) = answer.choices
    found = choice.logprobs
    assert len(found.tokens) == len(ids) + 4 and "".join(found.tokens) == choice.text
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert all(logprob <= 0 for logprob in found.token_logprobs[1:])
    assert found.text_offset[len(ids)] == len(PROMPT)
    chunks = [
        c.logprobs for chunk in target.greedy(echo=True, logprobs=1, max_tokens=4, stream=True) for c in chunk.choices
    ]
    assert [offset for part in chunks if part for offset in part.text_offset] == found.text_offset
    only = target.greedy(echo=True, logprobs=1, max_tokens=0)
    assert only.choices[0].text == PROMPT and len(only.choices[0].logprobs.tokens) == len(ids)
    assert only.usage.completion_tokens == 0 and only.choices[0].finish_reason == "length"


def models_are_listed(target: Target) -> None:
    assert [model.id for model in target.strict.models.list()] == [target.model]
    assert target.strict.models.retrieve(target.model).object == "model"
    try:
        target.strict.models.retrieve("no-such-model")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    else:
        raise AssertionError("an unknown model was found")


def tokens_round_trip(target: Target) -> None:
    text = "Grüße, 世界! 🦜 x = [1,  2,   33]"
    tokens = target.tokenize(text)
    assert target.http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}
    answer = target.http.post("/tokenize", json={"messages": MESSAGES}).json()
    assert answer["count"] == len(answer["tokens"]) == target.chat(max_tokens=1).usage.prompt_tokens
    assert answer["max_model_len"] > 0


def long_text_is_tokenised(target: Target) -> None:
    text = "sea " * 4_000
    assert len(target.tokenize(text)) >= 4_000


def health_and_metrics(target: Target) -> None:
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        assert target.http.request(method, path).json() == {"status": "ready"}
    for path in ("/health", "/v1/models"):
        assert (found := target.http.head(path)).status_code == 200 and not found.content
    version = target.http.get("/version").json()
    assert re.fullmatch(r"[0-9.]+|unknown", version["version"]) and version["protocol"] == PROTOCOL_VERSION
    assert target.http.get("/load").json()["server_load"] >= 0
    target.chat(max_tokens=2)
    finished = 'legato_requests_total{endpoint="/v1/chat/completions",outcome="finished"}'
    wait_until(lambda: finished in target.http.get("/metrics").text)  # it is counted after the answer's last byte
    page = target.http.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    assert "legato_time_to_first_token_seconds_count" in page.text


def token_ids_are_returned_where_asked_for(target: Target) -> None:
    fields = {"temperature": 0, "max_tokens": 12}
    body = {"model": target.model, "return_token_ids": True, **fields}
    for path, prompt in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": MESSAGES})):
        answer = target.http.post(path, json={**body, **prompt}).json()
        ids = answer["choices"][0]["token_ids"]
        assert len(ids) == answer["usage"]["completion_tokens"]
        lines = target.http.post(path, json={**body, **prompt, "stream": True}).text.split("\n\n")[:-2]
        told = [line for line in lines if not line.startswith(":")]  # a comment comes where the machine is busy
        chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in told]
        assert [token_id for chunk in chunks for token_id in chunk.get("token_ids", [])] == ids
    assert "token_ids" not in target.greedy().choices[0].model_dump()


def workers_are_shown(target: Target) -> None:
    shown = target.http.get("/cluster").json()
    assert isinstance(shown["wanted"], dict)
    workers = shown["workers"]
    assert "decode" in [worker["role"] for worker in workers]


def a_stream_is_server_sent_events(target: Target) -> None:
    body = {"model": target.model, "prompt": PROMPT, "max_tokens": 3, "stream": True}
    with target.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream") and answer.headers["x-request-id"]
        lines = [line for line in answer.iter_lines() if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["choices"] for line in lines[:-1])


class Weather(pydantic.BaseModel):
    """Every answer is short: a model that says nothing of use must come to the end of it, too."""

    model_config = pydantic.ConfigDict(extra="forbid")

    sky: Literal["clear", "clouded", "stormy"]
    degrees: Annotated[int, pydantic.Field(ge=-40, le=50)]
    winds: Annotated[list[Literal["north", "south"]], pydantic.Field(max_length=2)]


def structured_answers_parse(target: Target) -> None:
    """Drawn, greedy, streamed and of several choices; and what the client's own `parse` makes of a pydantic model."""
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": Weather.model_json_schema()}}
    for fields in ({"seed": 3, "n": 2}, {"temperature": 0}):
        answer = target.chat(response_format=schema, max_tokens=100, **fields)
        texts = [choice.message.content for choice in answer.choices]
        assert all(Weather.model_validate_json(text) for text in texts)
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
        stream = target.chat(response_format=schema, max_tokens=100, stream=True, **(fields | {"n": 1}))
        assert _streamed_chat(stream) == (texts[0], "stop")
    parsed = target.strict.chat.completions.parse(
        model=target.model, messages=MESSAGES, response_format=Weather, max_tokens=100
    )
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    with target.strict.chat.completions.stream(
        model=target.model, messages=MESSAGES, response_format=Weather, max_tokens=100
    ) as events:
        assert isinstance(events.get_final_completion().choices[0].message.parsed, Weather)
    cut = target.chat(response_format=schema, max_tokens=3)
    assert cut.choices[0].finish_reason == "length"
    sent = target.chat(response_format={"type": "json_object"}, max_tokens=5)
    assert sent.choices[0].message.content.startswith("{")


_TAG: Final = {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{1,3}"}, "end": "</n>"}


def structured_outputs_of_every_kind(target: Target) -> None:
    """vLLM's field, at both endpoints."""
    for wish, pattern in (
        ({"regex": "[ab]{3}-[0-9]"}, "[ab]{3}-[0-9]"),
        ({"choice": ["yes", "no", 'said "é"\n']}, 'yes|no|said "é"\n'),
        ({"grammar": 'start: "x" /[0-9]/ "y"'}, "x[0-9]y"),
        ({"grammar": 'root ::= "x" digit\ndigit ::= [0-9]'}, "x[0-9]"),
        ({"json": {"enum": [1, "two", None]}}, '1|"two"|null'),
        ({"structural_tag": json.dumps({"type": "structural_tag", "format": _TAG})}, "<n>[0-9]{1,3}</n>"),
    ):
        extra = {"structured_outputs": wish}
        chat = target.chat(extra_body=extra, max_tokens=60).choices[0]
        text = target.complete(extra_body={**extra, "min_tokens": 50, "ignore_eos": True}, max_tokens=60).choices[0]
        assert (chat.finish_reason, text.finish_reason) == ("stop", "stop")
        assert re.fullmatch(pattern, chat.message.content) and re.fullmatch(pattern, text.text)


def responses_answer(target: Target) -> None:
    """Whole, as the client's accumulator sees a stream, parsed, and followed where the server keeps them."""
    fields: dict[str, Any] = {"model": target.model, "input": MESSAGES, "temperature": 0}
    whole = target.strict.responses.create(**fields, max_output_tokens=12)
    assert whole.status in ("completed", "incomplete") and whole.output_text and whole.usage is not None
    chat = target.chat(temperature=0, max_tokens=12)
    assert whole.output_text == chat.choices[0].message.content
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    with target.strict.responses.stream(**fields, max_output_tokens=12) as stream:
        assert "".join(e.delta for e in stream if e.type == "response.output_text.delta") == whole.output_text
    parsed = target.strict.responses.parse(**fields, text_format=Weather, max_output_tokens=100)
    assert isinstance(parsed.output_parsed, Weather)
    if whole.to_dict()["store"]:
        followed = target.strict.responses.create(
            **{**fields, "input": "Go on.", "previous_response_id": whole.id}, max_output_tokens=4
        )
        assert followed.usage is not None and followed.usage.input_tokens > whole.usage.total_tokens


def leaving_early_harms_nobody(target: Target) -> None:
    for _ in range(5):
        stream = target.complete(max_tokens=200, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
    chat_answers(target)


def _bad_bodies(model: str) -> Iterator[tuple[str, dict[str, Any], int, str | None, str]]:
    """(path, body, status, param, what the sentence must mention)"""
    chat: dict[str, Any] = {"model": model, "messages": MESSAGES}
    text: dict[str, Any] = {"model": model, "prompt": PROMPT}
    name: str
    value: Any
    for path, good in (("/v1/chat/completions", chat), ("/v1/completions", text)):
        yield path, {**good, "model": "nothing"}, 404, "model", model
        yield path, {k: v for k, v in good.items() if k != "model"}, 400, "model", "missing"
        for name, value in (
            ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("top_p", 0), ("top_p", 1.5),
            ("top_k", -2), ("min_p", 2), ("repetition_penalty", 0), ("presence_penalty", 3), ("n", 0), ("n", 1000),
            ("frequency_penalty", -3), ("max_tokens", -1), ("max_tokens", "9"), ("max_tokens", 1.5),
            ("max_tokens", 10**30), ("seed", 2**63), ("seed", 1.5), ("min_tokens", -1), ("stop", ["a"] * 65),
            ("stop", 5), ("stop", [""]), ("stop", [5]), ("logit_bias", {"x": 1}), ("logit_bias", {"5": 101}),
            ("logit_bias", {"5": "much"}), ("logit_bias", [1]), ("logit_bias", {"999999999": 1}),
            ("stop_token_ids", [999_999_999]), ("stop_token_ids", [-1]), ("stream", "yes"),
            ("stream_options", {"include_usage": True}), ("response_format", {"type": "yaml"}),
            ("response_format", "json"), ("response_format", {"type": "json_schema"}),
            ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}),
            ("structured_outputs", {}), ("structured_outputs", {"regex": "("}), ("structured_outputs", {"choice": []}),
            ("structured_outputs", {"json": {"$ref": "http://127.0.0.1/x"}}), ("structured_outputs", {"regexp": "a"}),
        ):  # fmt: skip
            yield path, {**good, name: value}, 400, name, name
        yield path, {**good, "min_tokens": 9, "max_tokens": 3}, 400, "min_tokens", "max_tokens"
        yield path, {**good, "tempratur": 1}, 400, "tempratur", "tempratur"
        yield path, {**good, "max_tokens": 10_000_000}, 400, None, "context"
    for name, value in (
        ("tool_choice", "required"), ("audio", {"voice": "x"}),
        ("functions", [{"name": "f"}]), ("modalities", ["audio"]), ("reasoning_effort", "immense"),
        ("prediction", "x"), ("top_logprobs", 3), ("messages", []), ("messages", "hi"),
    ):  # fmt: skip
        yield "/v1/chat/completions", {**chat, name: value}, 400, name, name
    yield (
        "/v1/chat/completions",
        {**chat, "prediction": {"type": "text", "content": "x"}},
        400,
        "prediction.type",
        "content",
    )
    yield "/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "20"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    yield "/v1/chat/completions", {**chat, "messages": image}, 400, "messages[0].content", "image_url"
    yield (
        "/v1/chat/completions",
        {**chat, "messages": [{"role": "pirate", "content": "x"}]},
        400,
        "messages[0].role",
        "",
    )
    yield "/v1/chat/completions", {**chat, "messages": [{"role": "user"}]}, 400, "messages[0].content", "missing"
    prompt: Any
    for prompt in ("", [], [[]], [1, "a"], [-1], [999_999_999], 5, None, [[1], "a"], [True], {"a": 1}):
        yield "/v1/completions", {**text, "prompt": prompt}, 400, "prompt", "prompt"
    for name, value in (("suffix", "end"), ("best_of", 4), ("logprobs", 21), ("logprobs", True)):
        yield "/v1/completions", {**text, name: value}, 400, name, name
    yield "/v1/completions", {**text, "prompt": "sea " * 20_000}, 400, "prompt", "context"
    yield "/v1/completions", {**text, "max_tokens": 0}, 400, "max_tokens", "echo"
    yield "/tokenize", {}, 400, "prompt", "messages"
    yield "/tokenize", {"prompt": 5}, 400, "prompt", "prompt"
    yield "/detokenize", {"tokens": [999_999_999]}, 400, "tokens", "vocabulary"
    yield "/detokenize", {"tokens": ["a"]}, 400, "tokens[0]", "integer"


def bad_requests_are_explained(target: Target) -> None:
    for path, body, status, param, mention in _bad_bodies(target.model):
        answer = target.http.post(path, json=body)
        shown = (path, str(body)[:200], answer.text)
        assert answer.status_code == status, shown
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error", shown
        assert (param is None or error["param"] == param) and mention in error["message"], shown
        assert error["message"].endswith(".") and error["code"], shown


def broken_bodies_are_explained(target: Target) -> None:
    kind = {"content-type": "application/json"}
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        for content in (
            b"",
            b"{",
            b'"text"',
            b"[]",
            b"nul",
            b"\xff\xfe{}",
            b"[" * 100_000,
            b'{"seed": ' + b"9" * 5_000 + b"}",
        ):
            answer = target.http.post(path, content=content, headers=kind)
            assert answer.status_code == 400, (path, content[:20], answer.text)
            assert answer.json()["error"]["type"] == "invalid_request_error"
        surrogate = b'{"model": "%b", "prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}'
        answer = target.http.post(path, content=surrogate % target.model.encode(), headers=kind)
        assert answer.status_code == 400, (path, answer.text)
    form = target.http.post("/v1/completions", data={"prompt": "x"})
    assert form.status_code == 400 and "application/json" in form.json()["error"]["message"]


def unknown_places_are_explained(target: Target) -> None:
    for method, path, status in (("GET", "/v2/x", 404), ("GET", "/v1/completions", 405), ("DELETE", "/health", 405)):
        answer = target.http.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"


def every_answer_has_one_id(target: Target) -> None:
    """The client's where it sends one; whoever serves it adds no other. Anthropic's clients look elsewhere for it."""
    body: dict[str, Any] = {"model": target.model, "prompt": PROMPT, "max_tokens": 2}
    chat: dict[str, Any] = {"model": target.model, "messages": MESSAGES, "max_tokens": 2}
    for method, path, sent in (
        ("POST", "/v1/completions", body),
        ("POST", "/v1/completions", {**body, "stream": True}),
        ("POST", "/v1/embeddings", {"model": target.model, "input": "sea"}),
        ("POST", "/v1/completions", {**body, "n": 0}),
        ("POST", "/v1/messages", chat),
        ("POST", "/v1/messages", {**chat, "max_tokens": 0}),
        ("GET", "/health", None),
        ("GET", "/nowhere", None),
    ):
        for given, is_kept in (("mine-1", True), ("x" * 129, False), ("é", False), (None, False)):
            headers = [] if given is None else [(b"x-request-id", given.encode())]
            answer = target.http.request(method, path, json=sent, headers=headers)
            (name,) = answer.headers.get_list("x-request-id")
            assert name == given if is_kept else 0 < len(name) <= 128 and name != given, (path, given, name)
            named = answer.headers.get_list("request-id")
            assert named == ([name] if path == "/v1/messages" else []), (path, named)


CHECKS: Final[tuple[Callable[[Target], None], ...]] = (
    chat_answers,
    chat_streams_the_same,
    chat_stream_begins_with_the_role,
    chat_takes_parts_and_roles,
    chat_without_a_limit_ends,
    completion_answers,
    completion_streams_the_same,
    completion_takes_tokens_and_lists,
    stop_strings_cut_the_text,
    stop_token_ids_end_it,
    logit_bias_forces_a_token,
    min_tokens_holds_off_the_end,
    seeds_repeat_and_differ,
    n_gives_distinct_choices,
    sampling_fields_are_accepted,
    service_tiers_of_openai_are_understood,
    usage_comes_last_in_a_stream,
    chat_logprobs_have_openai_shape,
    completion_logprobs_have_openai_shape,
    logprobs_follow_the_text_to_a_stop,
    echo_repeats_the_prompt,
    echo_has_the_prompts_logprobs,
    models_are_listed,
    tokens_round_trip,
    long_text_is_tokenised,
    health_and_metrics,
    token_ids_are_returned_where_asked_for,
    workers_are_shown,
    a_stream_is_server_sent_events,
    structured_answers_parse,
    structured_outputs_of_every_kind,
    responses_answer,
    leaving_early_harms_nobody,
    bad_requests_are_explained,
    broken_bodies_are_explained,
    unknown_places_are_explained,
    every_answer_has_one_id,
)
