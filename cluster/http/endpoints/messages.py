"""Anthropic's Messages API: its routes, and answers in its shape. A thin translation of a chat and its events."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final

import jiter
from fastapi import APIRouter, Request

from cluster.errors import ApiError
from cluster.gateway.timeline import RequestTimeline
from cluster.http.anthropic import CountTokensBody, MessagesBody, chat_of
from cluster.http.api import Api, ApiOf
from cluster.http.body import JsonRoute
from cluster.http.openai.choice import Delta
from cluster.http.openai.events import ChoiceEvents, Reading
from cluster.http.openai.schemas import ChatBody
from cluster.http.openai.sse import Shape, dumps
from cluster.http.openai.tools import told_tools
from cluster.http.parse import Job, chat_token_ids, prepare_chat
from cluster.http.response import GenerationResponse
from cluster.http.terms import answered_tier, salt_of, terms_of, trace_headers
from engine.text.output import Event

router = APIRouter(route_class=JsonRoute)

_SMALL_BYTES: Final = 16 * 2**10  # of a body that is translated on the loop
_PLAIN: Final = Reading(tools=None, functions=frozenset(), single=False, reasoning=None, reasons=False)


@router.post("/v1/messages", response_model=None)
async def messages(body: MessagesBody, request: Request, api: ApiOf) -> GenerationResponse:
    chat = await _chat(body, request, api)
    terms = terms_of(request, chat, api.slo.classes, api.tenants)
    timeline = RequestTimeline(endpoint="/v1/messages", terms=terms, trace_headers=trace_headers(request))
    with api.slo.admitting(terms):
        salt = salt_of(request, None, api.tenants)
        job = await prepare_chat(chat, api, answered_tier(request, chat), salt, kind="msg")
    return GenerationResponse(api, timeline, MessagesShape(job))


@router.post("/v1/messages/count_tokens", response_model=None)
async def count_tokens(body: CountTokensBody, request: Request, api: ApiOf) -> dict[str, Any]:
    api.require_model(body.model)
    chat = await _chat(body, request, api)
    return {"input_tokens": len(await chat_token_ids(chat.messages, chat, api, told_tools(chat)))}


async def _chat(body: CountTokensBody, request: Request, api: Api) -> ChatBody:
    switches = api.tokenizer.template_reads("enable_thinking")
    size = len(await request.body())
    if size <= _SMALL_BYTES:
        return await api.turns.on_loop(lambda: chat_of(body, switches_thinking=switches))
    return await api.turns.reading(size, lambda: chat_of(body, switches_thinking=switches))


class MessagesShape(Shape):
    """Anthropic's `message`, whole, or streamed as blocks that are opened, added to and closed one after the other."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, chunk_name="message", whole_name="message")
        self._choice = ChoiceEvents(job.reading or _PLAIN)
        self._num_blocks = 0
        self._open: str | None = None  # the kind of events that the last block takes
        self._ending: dict[str, Any] = {}

    def opening(self, index: int) -> bytes:
        return _sse("message_start", message=self._message([], {"stop_reason": None, "stop_sequence": None}))

    def chunk(self, index: int, delta: Delta) -> bytes:
        sent: list[bytes] = []
        for event in self._choice.read(delta):
            if event.kind != self._open:
                sent += [*self._closed(), self._opened(event)]
            if event.kind != "call":
                sent.append(_sse("content_block_delta", index=self._num_blocks - 1, delta=_piece(event)))
        if delta.finish_reason is not None:
            sent += self._closed()
            self._ending = self._stopped(delta)
        return b"".join(sent)

    def _opened(self, event: Event) -> bytes:
        self._num_blocks += 1
        self._open = "arguments" if event.kind == "call" else event.kind
        return _sse("content_block_start", index=self._num_blocks - 1, content_block=_block(event))

    def _closed(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        return [_sse("content_block_stop", index=self._num_blocks - 1)]

    def closing(self) -> bytes:
        return _sse("message_delta", delta=self._ending, usage=self._usage()) + _sse("message_stop")

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """The whole message."""
        blocks: list[dict[str, Any]] = []
        arguments: list[list[str]] = []  # of each block
        for event in self._choice.read(delta):
            if event.kind == "arguments":
                arguments[-1].append(event.text)
            else:
                blocks.append({**_block(event), **({} if event.kind == "call" else {_MEMBER[event.kind]: event.text})})
                arguments.append([])
        whole = [_with_input(block, "".join(text)) for block, text in zip(blocks, arguments, strict=True)]
        return self._message(whole, self._stopped(delta))

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        return self.choice(0, deltas[0])

    def failure(self, error: ApiError) -> dict[str, Any]:
        return error.anthropic_body()

    def last_word(self, error: ApiError) -> bytes:
        return b"event: error\n" + super().last_word(error)

    def _message(self, content: list[dict[str, Any]], ending: dict[str, Any]) -> dict[str, Any]:
        named = {"id": self.job.id, "type": "message", "role": "assistant", "model": self.job.model}
        return {**named, "content": content, **ending, "usage": self._usage()}

    def _stopped(self, delta: Delta) -> dict[str, Any]:
        found = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        if found is not None:
            reason = "stop_sequence"
        elif delta.finish_reason == "length":
            reason = "max_tokens"
        else:
            reason = "tool_use" if self._choice.has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": found}

    def _usage(self) -> dict[str, Any]:
        num_cached = self.job.num_cached_tokens
        return {
            "input_tokens": self.job.num_prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": self.job.num_generated_tokens,
        }


_MEMBER: Final = {"text": "text", "reasoning": "thinking", "arguments": "partial_json"}
_DELTA: Final = {"text": "text_delta", "reasoning": "thinking_delta", "arguments": "input_json_delta"}


def _sse(kind: str, **members: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), dumps({"type": kind, **members}))


def _piece(event: Event) -> dict[str, str]:
    return {"type": _DELTA[event.kind], _MEMBER[event.kind]: event.text}


def _block(event: Event) -> dict[str, Any]:
    """As it begins."""
    match event.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": event.text, "input": {}}


def _with_input(block: dict[str, Any], arguments: str) -> dict[str, Any]:
    """A call with its arguments, as far as they came; what cannot be read as such is text."""
    if block["type"] != "tool_use":
        return block
    try:
        value = jiter.from_json(arguments.encode() or b"{}", partial_mode="trailing-strings")
    except ValueError:
        value = None
    if isinstance(value, dict):
        return {**block, "input": value}
    return {"type": "text", "text": f"{block['name']}({arguments})"}
