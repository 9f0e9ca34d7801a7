"""Embeddings, scores and ranks: the routes, the bodies that ask for them, and the shapes of the answers.

Embeddings as OpenAI has them, scores as vLLM, ranks as Jina, Cohere and vLLM. Scores are cosines: vectors have length
1.

Shape legend: N inputs, E vector size.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from starlette.types import Send

from cluster.errors import FailedError, InvalidRequestError
from cluster.gateway.timeline import RequestTimeline
from cluster.http.api import Api, ApiOf, Asked
from cluster.http.openai.fields import Prompt, field_error, parse_prompts
from cluster.http.openai.schemas import INT64_MAX, ServedBody
from cluster.http.openai.sse import dumps_large
from cluster.http.parse import new_job_id
from cluster.http.prompts import prompts_token_ids
from cluster.http.response import Answer
from cluster.http.server.body import JsonRoute
from cluster.http.server.unread import Outbox
from engine.sampling.params import SamplingParams
from kv_transfer.messages.requests import RequestSpec

router = APIRouter(route_class=JsonRoute)

MAX_INPUTS: Final = 2048  # OpenAI's limit
MAX_NUMBERS: Final = 2**22  # in an answer, in which they are some 80 MB of JSON
_AT_ONCE: Final = 64  # inputs of one request on the workers: they fill some steps, and leave room for others'
_NUMBER_BYTES: Final = 20  # of JSON, for a number of a vector
_RESULT_BYTES: Final = 80
_NOTHING_SAMPLED: Final = SamplingParams(max_tokens=1, seed=0, temperature=0.0)

Vectors = npt.NDArray[np.float32]


def _require_few(inputs: Sequence[Any]) -> None:
    if len(inputs) > MAX_INPUTS:
        raise field_error("invalid_value", f"{len(inputs)} were sent; at most {MAX_INPUTS} are possible")


def parse_inputs(value: object) -> list[Prompt]:
    """Normalise inputs to a list of prompts, as `parse_prompts` does. Refuses too many, empty ones and negative ids."""
    prompts = parse_prompts(value)
    _require_few(prompts)
    if not all(prompts):
        raise field_error("invalid_value", "an input must not be empty; leave it out")
    if any(not isinstance(prompt, str) and min(prompt) < 0 for prompt in prompts):
        raise field_error("invalid_value", "token ids must be 0 or larger")
    return prompts


def parse_texts(value: object) -> list[str]:
    """Normalise a text, or a list of texts or of objects with a `text`, to a list of texts that are not empty."""
    values = value if isinstance(value, list) else [value]
    _require_few(values)
    texts: list[Any] = [
        item["text"] if isinstance(item, Mapping) and item.keys() == {"text"} else item for item in values
    ]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise field_error("invalid_type", "send a text, or a list of texts or of objects such as {'text': 'hello'}")
    if not all(texts):
        raise field_error("invalid_value", "a text must not be empty; leave it out")
    return texts


_InputForms = str | list[str] | list[int] | list[list[int]]
_TextForms = str | list[str | dict[str, str]]
Inputs = Annotated[list[Prompt], BeforeValidator(parse_inputs, json_schema_input_type=_InputForms)]
Texts = Annotated[list[str], BeforeValidator(parse_texts, json_schema_input_type=_TextForms)]


class EmbeddingsBody(ServedBody):
    """`POST /v1/embeddings`"""

    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=INT64_MAX)


class ScoreBody(ServedBody):
    """`POST /v1/score`: scores each of `text_2` against its counterpart in `text_1`, or against the only one there."""

    text_1: Texts
    text_2: Texts


class RerankBody(ServedBody):
    """`POST /v1/rerank`: scores each document against the query, and ranks them, best first."""

    query: str = Field(min_length=1)
    documents: Texts
    top_n: int | None = Field(None, ge=0, le=INT64_MAX)
    return_documents: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingJob:
    """A request for vectors, scores or ranks as it is answered. `num_bytes`: about the size of the answer.
    `shape(job, vectors [N, E])` makes the answer."""

    id: str
    model: str
    specs: list[RequestSpec]
    shape: Callable[[PoolingJob, Vectors], dict[str, Any]]
    num_bytes: int
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_tokens(self) -> int:
        return sum(len(spec.prompt_token_ids) for spec in self.specs)

    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}


@router.post("/v1/embeddings", response_model=None)
async def embeddings(body: EmbeddingsBody, request: Request, api: ApiOf) -> PoolingResponse:
    asked = await api.find_model(body.model)
    most = asked.model.pooling.size
    size = min(body.dimensions or most, most)

    def check() -> None:
        if body.dimensions is not None and body.dimensions > most:
            raise InvalidRequestError(
                f"dimensions is {body.dimensions}; this model's vectors have {most}. Ask for fewer.",
                param="dimensions",
            )
        if len(body.input) * size > MAX_NUMBERS:
            raise InvalidRequestError(
                f"The answer would hold {len(body.input)} vectors of {size} numbers, and {MAX_NUMBERS} numbers are"
                " possible. Send fewer inputs, or ask for fewer dimensions.",
                param="input",
                code="request_too_large",
            )

    shape = partial(embeddings_answer, body=body)
    num_bytes = _NUMBER_BYTES * len(body.input) * size
    return await _pooled("embd", "/v1/embeddings", body, request, asked, body.input, "input", check, shape, num_bytes)


@router.post("/score", response_model=None, include_in_schema=False)
@router.post("/v1/score", response_model=None)
async def score(body: ScoreBody, request: Request, api: ApiOf) -> PoolingResponse:
    num_first, num_second = len(body.text_1), len(body.text_2)

    def check() -> None:
        if num_first not in (1, num_second):
            raise InvalidRequestError(
                f"text_1 has {num_first} texts and text_2 {num_second}. Send one in text_1, or as many as in text_2.",
                param="text_1",
            )

    shape = partial(score_answer, num_first=num_first)
    texts = [*body.text_1, *body.text_2]
    num_bytes = _RESULT_BYTES * num_second
    asked = await api.find_model(body.model)
    return await _pooled("score", "/v1/score", body, request, asked, texts, "text_2", check, shape, num_bytes)


@router.post("/rerank", response_model=None, include_in_schema=False)
@router.post("/v1/rerank", response_model=None)
@router.post("/v2/rerank", response_model=None, include_in_schema=False)
async def rerank(body: RerankBody, request: Request, api: ApiOf) -> PoolingResponse:
    shape = partial(rerank_answer, body=body)
    texts = [body.query, *body.documents]
    num_bytes = sum(_RESULT_BYTES + len(text) for text in body.documents)
    asked = await api.find_model(body.model)
    return await _pooled("rerank", "/v1/rerank", body, request, asked, texts, "documents", _nothing, shape, num_bytes)


def _nothing() -> None:
    """Check nothing: there is nothing else to check."""


async def _pooled(
    kind: str,
    endpoint: str,
    body: ServedBody,
    request: Request,
    asked: Asked,
    inputs: Sequence[Prompt],
    param: str,
    check: Callable[[], None],
    shape: Callable[[PoolingJob, Vectors], dict[str, Any]],
    num_bytes: int,
) -> PoolingResponse:
    """Make the answer to a request for vectors. Raises ApiError.

    `endpoint`: its name in metrics; `param`: the field of the inputs; `check` raises ApiError for what is wrong with
    other fields. The rest is as in `PoolingJob`."""
    api, model = asked.api, asked.model
    timeline = asked.timeline(endpoint, request, body)
    async with api.preparing(timeline.terms):
        if model.pooling.refusal:
            raise InvalidRequestError(
                f"The model {model.name!r} gives no vectors: {model.pooling.refusal}. Use another model.",
                param="model",
                code="unsupported_value",
            )
        check()
        token_ids = await prompts_token_ids(inputs, asked, param)
        model.require_limits()
        job_id = new_job_id(kind)
        specs = [
            RequestSpec(
                request_id=f"{job_id}-{index}",
                attempt=0,
                prompt_token_ids=ids,
                params=_NOTHING_SAMPLED,
                cache_salt=timeline.terms.salt,
                pooling=model.pooling.method,
                adapter=asked.adapter,
                model=model.name,
            )
            for index, ids in enumerate(token_ids)
        ]
    job = PoolingJob(id=job_id, model=body.model, specs=specs, shape=shape, num_bytes=num_bytes)
    return PoolingResponse(api, timeline, job)


class PoolingResponse(Answer):
    """The answer to a request for vectors: it computes all of them, and then answers at once. The time to the first
    byte is that to the answer."""

    def __init__(self, api: Api, timeline: RequestTimeline, job: PoolingJob) -> None:
        super().__init__(api, timeline, job.id)
        self._job = job
        timeline.parsed(job.specs, job.num_tokens, job.id)

    async def _answer(self, send: Send) -> None:
        job = self._job
        outbox = self._api.unread.open(len(job.specs), self._on_too_much, is_readable=False)
        try:
            async with self._in_time():
                vectors = await self._vectors(outbox)
                self._timeline.sent(range(len(job.specs)))
                data = await self._make_part(job.num_bytes, lambda: dumps_large(job.shape(job, vectors)))
                outbox.resize(len(data))
                await self._send_json(send, 200, data, outbox=outbox)
        finally:
            outbox.close()

    async def _vectors(self, outbox: Outbox) -> Vectors:
        """Compute the vectors [N, E] of all inputs, some at a time. The first that fails ends the others."""
        specs = self._job.specs
        found: list[bytes] = [b""] * len(specs)
        left = iter(range(len(specs)))
        in_flight = self._api.in_flight
        num_readers = in_flight.share(min(len(specs), _AT_ONCE))
        try:
            with in_flight.enter(num_readers, self._timeline.terms):
                async with asyncio.TaskGroup() as readers:
                    for _ in range(num_readers):
                        readers.create_task(self._read(left, found, outbox))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return np.frombuffer(b"".join(found), dtype="<f4").reshape(len(specs), -1)

    async def _read(self, left: Iterator[int], found: list[bytes], outbox: Outbox) -> None:
        """Compute one input after the other into `found`, as long as `left` has any."""
        for index in left:
            stream = self._api.generator.generate(self._job.specs[index], self._timeline.sequences[index])
            async with aclosing(stream):
                async for events in stream:
                    found[index] = events[-1].embedding or b""
                    self._timeline.num_cached_tokens += events[-1].num_cached_tokens or 0
            if not found[index]:
                raise FailedError("The sequence ended before it was finished. Try again.")
            outbox.grow(len(found[index]))


def embeddings_answer(job: PoolingJob, vectors: Vectors, body: EmbeddingsBody) -> dict[str, Any]:
    """The answer to a request for embeddings: OpenAI's `CreateEmbeddingResponse`."""
    vectors = shortened(vectors, body.dimensions)
    encode = _base64 if body.encoding_format == "base64" else _numbers
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": encode(vector)} for index, vector in enumerate(vectors)
        ],
        "model": job.model,
        "usage": job.usage(),
    }


def score_answer(job: PoolingJob, vectors: Vectors, num_first: int) -> dict[str, Any]:
    """The answer to a request for scores, in vLLM's shape. The first `num_first` vectors are those of `text_1`."""
    scores = cosines(vectors[:num_first], vectors[num_first:])
    return {
        "id": job.id,
        "object": "list",
        "created": job.created,
        "model": job.model,
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
        "usage": {**job.usage(), "completion_tokens": 0},
    }


def rerank_answer(job: PoolingJob, vectors: Vectors, body: RerankBody) -> dict[str, Any]:
    """The answer to a request for ranks, in Jina's and vLLM's shape, which Cohere's clients read. The first vector is
    that of the query. Documents with equal scores keep their order."""
    scores = cosines(vectors[:1], vectors[1:])
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": body.documents[result["index"]]}
    return {"id": job.id, "model": job.model, "results": results, "usage": job.usage()}


def shortened(vectors: Vectors, size: int | None) -> Vectors:
    """Cut vectors to their first `size` numbers, and give them length 1 again. `size` None: they stay whole."""
    if size is None or size >= vectors.shape[1]:
        return vectors
    first = vectors[:, :size].astype(np.float64)
    shorter: Vectors = (first / np.maximum(np.linalg.norm(first, axis=1, keepdims=True), 1e-12)).astype(np.float32)
    return shorter


def cosines(first: Vectors, second: Vectors) -> list[float]:
    """The cosine of each vector of `second` with its counterpart in `first`, or with the only one there."""
    found: list[float] = (first.astype(np.float64) * second).sum(axis=1).clip(-1.0, 1.0).tolist()
    return found


def _numbers(vector: Vectors) -> object:
    return vector.tolist()


def _base64(vector: Vectors) -> object:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
