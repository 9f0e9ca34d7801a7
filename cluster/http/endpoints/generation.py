"""The routes that answer with generated tokens, chat and text completions, and the shapes of their answers."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from cluster.gateway.timeline import RequestTimeline
from cluster.http.api import ApiOf
from cluster.http.body import JsonRoute
from cluster.http.openai.choice import Delta
from cluster.http.openai.logprobs import (
    CompletionToken,
    chat_logprobs,
    completion_logprobs,
    output_tokens,
    prompt_tokens,
)
from cluster.http.openai.schemas import ChatBody, CompletionBody
from cluster.http.openai.sse import Shape, dumps, dumps_large
from cluster.http.parse import Job, prepare_chat, prepare_completion
from cluster.http.response import GenerationResponse
from cluster.http.terms import answered_tier, terms_of
from engine.text.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatBody, request: Request, api: ApiOf) -> GenerationResponse:
    terms = terms_of(request, body, api.slo.classes, api.tenants)
    timeline = RequestTimeline(endpoint="/v1/chat/completions", terms=terms)
    with api.slo.admitting(terms):
        salt = api.tenants.salt(request.headers, body.cache_salt)
        job = await prepare_chat(body, api, answered_tier(request, body), salt)
    return GenerationResponse(api, timeline, ChatShape(job, api.tokenizer))


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionBody, request: Request, api: ApiOf) -> GenerationResponse:
    terms = terms_of(request, body, api.slo.classes, api.tenants)
    timeline = RequestTimeline(endpoint="/v1/completions", terms=terms)
    with api.slo.admitting(terms):
        salt = api.tenants.salt(request.headers, body.cache_salt)
        job = await prepare_completion(body, api, answered_tier(request, body), salt)
    return GenerationResponse(api, timeline, CompletionShape(job, api.tokenizer))


class ChatShape(Shape):
    """OpenAI's `chat.completion` and `chat.completion.chunk`."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        super().__init__(job, chunk_name="chat.completion.chunk", whole_name="chat.completion")
        self._tokenizer = tokenizer

    def opening(self, index: int) -> bytes:
        return self._event(index, b'"delta":{"role":"assistant","content":""}', None, None)

    def chunk(self, index: int, delta: Delta) -> bytes:
        content = b'"delta":{"content":%b}' % dumps(delta.text) if delta.text else b'"delta":{}'
        return self._event(index, content, chat_logprobs(delta.entries, self._tokenizer), delta)

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        return {
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": chat_logprobs(delta.entries, self._tokenizer),
        }


class CompletionShape(Shape):
    """OpenAI's `text_completion`, streamed or not. An echo opens each choice, together with the prompt's logprobs."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        super().__init__(job, chunk_name="text_completion", whole_name="text_completion")
        self._tokenizer = tokenizer

    def opening(self, index: int) -> bytes:
        echo = self.job.choices[index].echo
        if not echo:
            return b""
        logprobs = completion_logprobs(self._prompt_tokens(index), self._tokenizer)
        return self._event(index, b'"text":' + dumps_large(echo), logprobs, None)

    def chunk(self, index: int, delta: Delta) -> bytes:
        tokens = output_tokens(delta.entries, len(self.job.choices[index].echo))
        return self._event(index, b'"text":' + dumps(delta.text), completion_logprobs(tokens, self._tokenizer), delta)

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        echo = self.job.choices[index].echo
        tokens = self._prompt_tokens(index) + output_tokens(delta.entries, len(echo))
        return {"text": echo + delta.text, "logprobs": completion_logprobs(tokens, self._tokenizer)}

    def _prompt_tokens(self, index: int) -> list[CompletionToken]:
        """Those of the echoed prompt, where their log probabilities were asked for."""
        choice = self.job.choices[index]
        if not choice.echo or choice.spec.params.prompt_logprobs is None:
            return []
        assert choice.prompt_logprobs is not None, "the first token came without the prompt's logprobs"
        return prompt_tokens(choice.spec.prompt_token_ids, choice.prompt_logprobs, self._tokenizer)
