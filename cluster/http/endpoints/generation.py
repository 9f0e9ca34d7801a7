"""`POST /v1/completions`: the route and the shape of its answers, with the prompt echoed where asked for."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from cluster.gateway.timeline import RequestTimeline
from cluster.http.api import ApiOf
from cluster.http.body import JsonRoute
from cluster.http.openai.choice import Delta
from cluster.http.openai.logprobs import CompletionLogprobs
from cluster.http.openai.schemas import CompletionBody
from cluster.http.openai.sse import Shape, dumps, dumps_large
from cluster.http.parse import Job, prepare_completion
from cluster.http.response import GenerationResponse
from cluster.http.terms import answered_tier, terms_of
from engine.text.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionBody, request: Request, api: ApiOf) -> GenerationResponse:
    terms = terms_of(request, body, api.slo.classes, api.tenants)
    timeline = RequestTimeline(endpoint="/v1/completions", terms=terms)
    with api.slo.admitting(terms):
        salt = api.tenants.salt(request.headers, body.cache_salt)
        job = await prepare_completion(body, api, answered_tier(request, body), salt)
    return GenerationResponse(api, timeline, CompletionShape(job, api.tokenizer))


class CompletionShape(Shape):
    """OpenAI's `text_completion`, streamed or not. An echo opens each choice, together with the prompt's logprobs."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        super().__init__(job, chunk_name="text_completion", whole_name="text_completion")
        self._tokenizer = tokenizer

    def opening(self, index: int) -> bytes:
        echo = self.job.choices[index].echo
        if not echo:
            return b""
        return self._event(index, b'"text":' + dumps_large(echo), self._of_prompt(index).as_json(), None)

    def chunk(self, index: int, delta: Delta) -> bytes:
        logprobs = None
        if delta.entries:
            known = CompletionLogprobs(self._tokenizer)
            known.add(delta.entries, len(self.job.choices[index].echo))
            logprobs = known.as_json()
        return self._event(index, b'"text":' + dumps(delta.text), logprobs, delta)

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        echo = self.job.choices[index].echo
        logprobs = self._of_prompt(index)
        logprobs.add(delta.entries, len(echo))
        return {"text": echo + delta.text, "logprobs": logprobs.as_json()}

    def _of_prompt(self, index: int) -> CompletionLogprobs:
        """Those of the echoed prompt, where they were asked for."""
        logprobs = CompletionLogprobs(self._tokenizer)
        choice = self.job.choices[index]
        if choice.echo and choice.spec.params.prompt_logprobs is not None:
            assert choice.prompt_logprobs is not None, "the first token came without the prompt's logprobs"
            logprobs.add_prompt(choice.spec.prompt_token_ids, choice.prompt_logprobs)
        return logprobs
