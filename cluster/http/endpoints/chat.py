"""`POST /v1/chat/completions`: the route and the shape of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request

from cluster.gateway.timeline import RequestTimeline
from cluster.http.api import Api, ApiOf
from cluster.http.body import JsonRoute
from cluster.http.openai.choice import Delta
from cluster.http.openai.logprobs import chat_logprobs
from cluster.http.openai.schemas import ChatBody
from cluster.http.openai.sse import ChunkFrame, dumps, token_ids_member
from cluster.http.parse import Job, prepare_chat
from cluster.http.response import Generation, GenerationResponse
from cluster.http.terms import answered_tier, terms_of

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatBody, request: Request, api: ApiOf) -> GenerationResponse:
    terms = terms_of(request, body, api.slo.classes, api.tenants)
    timeline = RequestTimeline(endpoint="/v1/chat/completions", terms=terms)
    with api.slo.admitting(terms):
        salt = api.tenants.salt(request.headers, body.cache_salt)
        job = await prepare_chat(body, api, answered_tier(request, body), salt)
    return GenerationResponse(api, Generation(job, api, timeline), ChatShape(job, api))


class ChatShape:
    """OpenAI's `chat.completion` and `chat.completion.chunk`."""

    def __init__(self, job: Job, api: Api) -> None:
        self._tokenizer = api.tokenizer
        self._job = job
        self._frame = ChunkFrame(job, "chat.completion.chunk")

    def opening(self, index: int) -> bytes:
        return self._frame.chunk(index, b'"delta":{"role":"assistant","content":""}', None, None)

    def chunk(self, index: int, delta: Delta) -> bytes:
        content = b'"delta":{"content":%b}' % dumps(delta.text) if delta.text else b'"delta":{}'
        return self._frame.chunk(index, content, chat_logprobs(delta.entries, self._tokenizer), delta)

    def closing(self, usage: dict[str, object] | None) -> bytes:
        return self._frame.closing(usage)

    def whole(self, deltas: Sequence[Delta], usage: dict[str, object]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": delta.text, "refusal": None},
                "logprobs": chat_logprobs(delta.entries, self._tokenizer),
                "finish_reason": delta.finish_reason,
                **token_ids_member(self._job, delta),
            }
            for index, delta in enumerate(deltas)
        ]
        return {**self._frame.envelope("chat.completion"), "choices": choices, "usage": usage}
