"""`POST /v1/chat/completions`: the route and the shape of its answers."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from cluster.gateway.timeline import RequestTimeline
from cluster.http.api import ApiOf
from cluster.http.body import JsonRoute
from cluster.http.openai.choice import Delta
from cluster.http.openai.logprobs import chat_logprobs
from cluster.http.openai.schemas import ChatBody
from cluster.http.openai.sse import Shape, dumps
from cluster.http.parse import Job, prepare_chat
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
