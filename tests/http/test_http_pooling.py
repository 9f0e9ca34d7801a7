"""Embeddings, scores and ranks over HTTP, as their clients ask for them, with scripted vectors."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from cluster.errors import UnavailableError
from cluster.gateway.timeline import RequestTimeline
from engine.text.tokenizer import Tokenizer
from tests.support.http_server import MODEL, running_server
from tests.support.openai_conformance import Target
from tests.support.scripted_generator import EMBEDDING_SIZE, Script, ScriptedGenerator, scripted_embedding
from tests.support.waiting import wait_until

pytestmark = pytest.mark.model

DOCUMENTS = ["the sea was calm", "night fell", "12 miles", "the sea"]


@pytest.fixture(scope="module")
def generator(tokenizer: Tokenizer) -> ScriptedGenerator:
    return ScriptedGenerator(tokenizer)


@pytest.fixture(scope="module")
def ended() -> list[RequestTimeline]:
    """The requests that were answered, each as its gateway's record has it."""
    return []


@pytest.fixture(scope="module")
def target(generator: ScriptedGenerator, tokenizer: Tokenizer, ended: list[RequestTimeline]) -> Iterator[Target]:
    with running_server(generator, tokenizer, on_ended=ended.append) as target:
        yield target


def vector(tokenizer: Tokenizer, text: str) -> Any:
    return scripted_embedding(tokenizer.encode(text, True))


def post(target: Target, path: str, **body: Any) -> Any:
    return target.http.post(path, json={"model": MODEL, **body})


def test_openai_s_client_gets_its_vectors(target: Target, tokenizer: Tokenizer) -> None:
    """It asks for base64 where nothing is said."""
    for wishes in ({}, {"encoding_format": "float"}):
        answer = target.client.embeddings.create(model=MODEL, input=DOCUMENTS, **wishes)
        assert answer.object == "list"
        assert answer.model == MODEL
        assert [each.index for each in answer.data] == list(range(len(DOCUMENTS)))
        for each, text in zip(answer.data, DOCUMENTS, strict=True):
            np.testing.assert_array_equal(np.array(each.embedding, dtype=np.float32), vector(tokenizer, text))
        num_tokens = sum(len(tokenizer.encode(text, True)) for text in DOCUMENTS)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)


def test_base64_is_little_endian_float32(target: Target, tokenizer: Tokenizer) -> None:
    data = post(target, "/v1/embeddings", input="night fell", encoding_format="base64").json()["data"]
    found = np.frombuffer(base64.b64decode(data[0]["embedding"]), dtype="<f4")
    np.testing.assert_array_equal(found, vector(tokenizer, "night fell"))


@pytest.mark.parametrize("given", [[[5, 6, 7], [8]], [5, 6, 7]])
def test_token_ids_are_taken_as_they_are(target: Target, given: list[Any]) -> None:
    prompts = given if isinstance(given[0], list) else [given]
    answer = target.client.embeddings.create(model=MODEL, input=given)
    for each, prompt in zip(answer.data, prompts, strict=True):
        np.testing.assert_array_equal(np.array(each.embedding, dtype=np.float32), scripted_embedding(prompt))


def test_fewer_dimensions_are_the_first_ones_of_length_1(target: Target, tokenizer: Tokenizer) -> None:
    (each,) = target.client.embeddings.create(model=MODEL, input="night fell", dimensions=3).data
    first = vector(tokenizer, "night fell")[:3]
    np.testing.assert_allclose(each.embedding, first / np.linalg.norm(first), atol=1e-6)


def test_the_most_inputs_come_in_their_order_and_no_more_are_taken(
    target: Target, generator: ScriptedGenerator
) -> None:
    prompts = [[n + 1, 7] for n in range(2048)]
    answer = target.client.embeddings.create(model=MODEL, input=prompts)
    found = np.array([each.embedding for each in answer.data], dtype=np.float32)
    np.testing.assert_array_equal(found, np.stack([scripted_embedding(prompt) for prompt in prompts]))
    with pytest.raises(openai.BadRequestError, match="2049 were sent; at most 2048"):
        target.client.embeddings.create(model=MODEL, input=[*prompts, [1]])


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("first", ["the sea", ["a", "b", "c", "d"]])
def test_scores_are_cosines(target: Target, tokenizer: Tokenizer, path: str, first: Any) -> None:
    answer = post(target, path, text_1=first, text_2=DOCUMENTS).raise_for_status().json()
    firsts = first if isinstance(first, list) else [first] * len(DOCUMENTS)
    expected = [
        float(vector(tokenizer, one) @ vector(tokenizer, other)) for one, other in zip(firsts, DOCUMENTS, strict=True)
    ]
    assert [(each["index"], each["object"]) for each in answer["data"]] == [(n, "score") for n in range(4)]
    np.testing.assert_allclose([each["score"] for each in answer["data"]], expected, atol=1e-6)
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_ranks_are_the_best_first(target: Target, tokenizer: Tokenizer, path: str) -> None:
    documents: list[Any] = [*DOCUMENTS[:2], *({"text": text} for text in DOCUMENTS[2:])]
    answer = post(target, path, query="the sea", documents=documents, top_n=3).raise_for_status().json()
    results = answer["results"]
    assert (results[0]["index"], results[0]["document"]) == (3, {"text": "the sea"})
    assert results[0]["relevance_score"] == pytest.approx(1.0, abs=1e-6)
    scores = [each["relevance_score"] for each in results]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    bare = post(target, path, query="the sea", documents=documents, return_documents=False).json()["results"]
    assert len(bare) == 4
    assert "document" not in bare[0]


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/v1/embeddings", {"input": "x", "model": "another"}, "model", "model_not_found"),
        ("/v1/embeddings", {"input": "x", "stream": True}, "stream", "unknown_parameter"),
        ("/v1/embeddings", {"input": ""}, "input", "invalid_value"),
        ("/v1/embeddings", {"input": []}, "input", "invalid_type"),
        ("/v1/embeddings", {"input": [[1], []]}, "input", "invalid_value"),
        ("/v1/embeddings", {"input": [-1]}, "input", "invalid_value"),
        ("/v1/embeddings", {"input": [10**6]}, "input", "invalid_value"),
        ("/v1/embeddings", {"input": [1] * 3000}, "input", "context_length_exceeded"),
        ("/v1/embeddings", {"input": "word " * 3000}, "input", "context_length_exceeded"),
        ("/v1/embeddings", {"input": "x", "dimensions": EMBEDDING_SIZE + 1}, "dimensions", "invalid_value"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "invalid_value"),
        ("/v1/score", {"text_1": "a", "text_2": [{"image": "b"}]}, "text_2", "invalid_type"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query", "invalid_value"),
        ("/v1/rerank", {"query": "a", "documents": [""]}, "documents", "invalid_value"),
    ],
)
def test_what_cannot_be_done_is_said(target: Target, path: str, body: dict[str, Any], param: str, code: str) -> None:
    answer = post(target, path, **body)
    error = answer.json()["error"]
    assert answer.status_code == (404 if code == "model_not_found" else 400), error
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


def test_a_request_is_counted_and_told_of_like_any_other(
    target: Target, generator: ScriptedGenerator, ended: list[RequestTimeline]
) -> None:
    del ended[:]
    answer = target.http.post("/v1/embeddings", json={"model": MODEL, "input": DOCUMENTS}, headers={"x-tenant": "t"})
    wait_until(lambda: len(ended) == 1)
    (timeline,) = ended
    assert timeline.request_id == answer.headers["x-request-id"]
    assert (timeline.endpoint, timeline.outcome, len(timeline.sequences)) == ("/v1/embeddings", "finished", 4)
    assert timeline.num_prompt_tokens == answer.json()["usage"]["prompt_tokens"]
    assert timeline.ttft_s is not None
    assert timeline.ttft_s >= max(each.token_times[0] for each in timeline.sequences) - timeline.arrived_at
    assert [part.name for part in timeline.parts()][-1] == "finish"
    recent = target.http.get("/cluster/requests").json()
    assert timeline.request_id in str(recent)


def test_an_error_of_one_input_is_the_request_s_and_ends_the_others(
    target: Target, generator: ScriptedGenerator
) -> None:
    generator.script = Script(fail_after=0, error=UnavailableError("No worker is ready.", retry_after_s=1.0))
    try:
        answer = post(target, "/v1/embeddings", input=DOCUMENTS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        wait_until(lambda: generator.num_open == 0)
    finally:
        generator.script = Script()
