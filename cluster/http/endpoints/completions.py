"""`POST /v1/completions`: the route and the shape of its answers, with the prompt echoed where asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request

from cluster.gateway.timeline import RequestTimeline
from cluster.http.api import Api, ApiOf
from cluster.http.body import JsonRoute
from cluster.http.openai.choice import Delta
from cluster.http.openai.logprobs import CompletionLogprobs
from cluster.http.openai.schemas import CompletionBody
from cluster.http.openai.sse import ChunkFrame, dumps, dumps_large, token_ids_member
from cluster.http.parse import Job, TokenPrompt, prepare_completion
from cluster.http.response import Generation, GenerationResponse
from cluster.http.terms import answered_tier, terms_of

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionBody, request: Request, api: ApiOf) -> GenerationResponse:
    terms = terms_of(request, body, api.slo.classes, api.tenants)
    timeline = RequestTimeline(endpoint="/v1/completions", terms=terms)
    with api.slo.admitting(terms):
        salt = api.tenants.salt(request.headers, body.cache_salt)
        job = await prepare_completion(body, api, answered_tier(request, body), salt)
    generation = Generation(job, api, timeline)
    return GenerationResponse(api, generation, CompletionShape(generation, api))


class CompletionShape:
    """OpenAI's `text_completion`, streamed or not. An echo opens each choice, together with the prompt's logprobs."""

    def __init__(self, generation: Generation, api: Api) -> None:
        self._tokenizer = api.tokenizer
        self._generation = generation
        self._frame = ChunkFrame(generation.job, "text_completion")

    @property
    def _job(self) -> Job:
        return self._generation.job

    def _prompt(self, index: int) -> TokenPrompt:
        return self._job.prompts[index // self._job.num_choices]

    def opening(self, index: int) -> bytes:
        echo = self._prompt(index).echo
        if not echo:
            return b""
        logprobs = CompletionLogprobs(self._tokenizer)
        self._add_prompt(logprobs, index)
        return self._frame.chunk(index, b'"text":' + dumps_large(echo), logprobs.as_json(), None)

    def chunk(self, index: int, delta: Delta) -> bytes:
        logprobs = None
        if delta.entries:
            known = CompletionLogprobs(self._tokenizer)
            known.add(delta.entries, len(self._prompt(index).echo))
            logprobs = known.as_json()
        return self._frame.chunk(index, b'"text":' + dumps(delta.text), logprobs, delta)

    def closing(self, usage: dict[str, object] | None) -> bytes:
        return self._frame.closing(usage)

    def whole(self, deltas: Sequence[Delta], usage: dict[str, object]) -> dict[str, Any]:
        choices = [self._choice(index, delta) for index, delta in enumerate(deltas)]
        return {**self._frame.envelope("text_completion"), "choices": choices, "usage": usage}

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        echo = self._prompt(index).echo
        logprobs = CompletionLogprobs(self._tokenizer)
        if echo:
            self._add_prompt(logprobs, index)
        logprobs.add(delta.entries, len(echo))
        return {
            "index": index,
            "text": echo + delta.text,
            "logprobs": logprobs.as_json(),
            "finish_reason": delta.finish_reason,
            **token_ids_member(self._job, delta),
        }

    def _add_prompt(self, logprobs: CompletionLogprobs, index: int) -> None:
        if self._job.specs[index].params.prompt_logprobs is None:
            return
        known = self._generation.choices[index].prompt_logprobs
        assert known is not None, "the first token came without the prompt's logprobs"
        logprobs.add_prompt(self._prompt(index).token_ids, known)
