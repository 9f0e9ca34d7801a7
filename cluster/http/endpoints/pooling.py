"""The routes that answer with vectors or what is made of them: embeddings, scores, ranks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import numpy as np
from fastapi import APIRouter, Request
from starlette.types import Send

from cluster.errors import FailedError, InvalidRequestError
from cluster.gateway.timeline import RequestTimeline
from cluster.http.api import Api, ApiOf, Asked
from cluster.http.openai.fields import Prompt
from cluster.http.openai.pooling import (
    MAX_NUMBERS,
    EmbeddingsBody,
    PoolingJob,
    RerankBody,
    ScoreBody,
    Vectors,
    embeddings_answer,
    rerank_answer,
    score_answer,
)
from cluster.http.openai.schemas import ServedBody
from cluster.http.openai.sse import dumps_large
from cluster.http.parse import prompts_token_ids
from cluster.http.response import Answer
from cluster.http.server.body import JsonRoute
from cluster.http.server.unread import Outbox
from cluster.http.terms import salt_of
from engine.sampling.params import SamplingParams
from kv_transfer.messages.requests import RequestSpec

router = APIRouter(route_class=JsonRoute)

_AT_ONCE: Final = 64  # inputs of one request on the workers: they fill some steps, and leave room for others'
_NUMBER_BYTES: Final = 20  # of JSON, for a number of a vector
_RESULT_BYTES: Final = 80
_NOTHING_SAMPLED: Final = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


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
        job_id = f"{kind}-{secrets.token_hex(12)}"
        salt = salt_of(request, None, api.tenants)
        specs = [
            RequestSpec(
                request_id=f"{job_id}-{index}",
                attempt=0,
                prompt_token_ids=ids,
                params=_NOTHING_SAMPLED,
                cache_salt=salt,
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
