"""OpenAI's Responses API: its routes, and answers in its shape. A thin translation of a chat and its events, and what
was answered, kept where the gateway has a folder."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from starlette.types import Send

from cluster.batch.database import CLAIM_S
from cluster.batch.files import not_in_list
from cluster.batch.stored_responses import StoredResponse
from cluster.errors import ApiError, InvalidRequestError, NotFoundError, OverloadedError
from cluster.gateway.timeline import RequestTimeline
from cluster.http.api import Api, ApiOf, Asked
from cluster.http.background import MOST_FOLLOWED, StoredResponses, response_of, told_error
from cluster.http.endpoints.batches import owner_of
from cluster.http.internal_requests import on_behalf
from cluster.http.openai.choice import Delta, TokenEntry
from cluster.http.openai.events import PLAIN, ChoiceEvents, new_call_id
from cluster.http.openai.logprobs import chat_logprobs
from cluster.http.openai.responses import Item, ResponsesBody, chat_of, in_its_own_words, new_id
from cluster.http.openai.schemas import INT64_MAX, MAX_MESSAGES, ChatBody
from cluster.http.openai.sse import AnswerShape, dumps, dumps_large
from cluster.http.openai.tools import told_tools
from cluster.http.parse import Job, prepare_chat
from cluster.http.prompts import chat_token_ids
from cluster.http.response import LAST_WORD_S, EventStream, GenerationResponse, ReadResponse
from cluster.http.server.body import JsonRoute
from engine.text.output import OutputEvent
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_PAGE: Final = 100  # items

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/responses", response_model=None)
async def create_response(body: ResponsesBody, request: Request, api: ApiOf) -> Response:
    _check(body, request, api)
    asked = await api.find_model(body.model)
    owner = "" if api.responses is None else _owner(request, api)
    past = [] if body.previous_response_id is None else await _past(body.previous_response_id, owner, api)
    body_size = len(await request.body())
    size = body_size + sum(len(each.items) + len(each.response) for each in past)
    chat = await api.turns.parsing(size, lambda: chat_of(body, _items(past)))
    timeline = asked.timeline("/v1/responses", request, chat)
    with _own_words():
        async with api.preparing(timeline.terms):
            if body.truncation == "auto":
                chat = await _fitted(chat, asked)
            job = await prepare_chat(chat, asked, timeline.terms, job_id=new_id("resp"))
    keeps = api.responses is not None and body.store is not False
    job = replace(job, stream=job.stream or bool(body.background))
    echo = body.echo(job.choices[0].spec.params)
    names = body.called_names()
    shape = ResponsesShape(job, echo, names, asked.model.tokenizer, stored=keeps, echo_size=body_size)
    if not keeps:
        return GenerationResponse(api, timeline, shape)
    kept = StoredResponse(
        id=job.id,
        owner=owner,
        previous=body.previous_response_id,
        status="queued",
        is_background=bool(body.background),
        items=await api.turns.parsing(body_size, lambda: json.dumps(body.input)),
        response="",
    )
    if not body.background:
        return StoredAnswer(api, timeline, shape, kept)
    told = await api.turns.parsing(2 * body_size, lambda: json.dumps(shape.response("queued")))
    queued = replace(kept, response=told, runs_until=time.time() + CLAIM_S)
    responses = _responses(api)
    if body.stream:
        _require_room(responses, owner)
    await responses.begin(queued, GenerationResponse(api, timeline, shape))
    if body.stream:
        return EventStream(api, responses.follow(job.id, owner, -1))
    return _json(queued.response, api)


def _check(body: ResponsesBody, request: Request, api: Api) -> None:
    """Check that the fields go together, and that this gateway can do what they ask. Raises InvalidRequestError."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "stream_options is only possible with stream: true. Leave it out, or stream.", param="stream_options"
        )
    for name in ("background", "previous_response_id"):
        if getattr(body, name) and api.responses is None:
            raise InvalidRequestError(f"{_NO_STORAGE} Until then, leave out {name}.", param=name, code="no_storage")
    if body.background and body.store is False:
        raise InvalidRequestError(
            "A response in the background is stored until it is asked for. Leave out store, or background.",
            param="background",
        )
    if body.background and on_behalf(request.scope) is not None:
        raise InvalidRequestError(
            "A batch's line is in the background already. Leave out background.", param="background"
        )


_NO_STORAGE: Final = "This server keeps no responses. Who operates it can give them a folder: gateway.storage."


def _responses(api: Api) -> StoredResponses:
    """The gateway's stored responses. Raises NotFoundError if it keeps none."""
    if api.responses is None:
        raise NotFoundError(_NO_STORAGE, code="no_storage")
    return api.responses


def _owner(request: Request, api: Api) -> str:
    _responses(api)
    assert api.batches is not None
    return owner_of(request, api, api.batches.secret)


def _require_room(responses: StoredResponses, owner: str) -> None:
    """Check that a client may follow one more response. Raises OverloadedError."""
    if not responses.may_follow(owner):
        raise OverloadedError(
            f"Many responses are followed here already: {MOST_FOLLOWED} are possible, of one client half of what others"
            " leave. Ask for this one without stream, or later.",
            retry_after_s=5.0,
        )


@contextmanager
def _own_words() -> Iterator[None]:
    """Make an ApiError that the block raises speak of this API's fields, not of a chat's."""
    try:
        yield
    except ApiError as error:
        raise in_its_own_words(error) from None


async def _past(response_id: str, owner: str, api: Api) -> Sequence[StoredResponse]:
    """The conversation up to a response and with it. Raises InvalidRequestError."""
    return await _responses(api).kept.conversation(response_id, owner)


def _items(past: Sequence[StoredResponse]) -> list[Item]:
    """The items of a conversation, inputs and outputs in order. Raises InvalidRequestError if they are too many."""
    items: list[Item] = []
    for response in past:
        items += json.loads(response.items)
        items += json.loads(response.response)["output"]
        if len(items) > MAX_MESSAGES:
            raise InvalidRequestError(
                f"The conversation has more than {MAX_MESSAGES} items. Send the last of them as input.",
                param="previous_response_id",
            )
    return items


async def _fitted(chat: ChatBody, asked: Asked) -> ChatBody:
    """The chat without its first messages, if not all of it fits the context. Messages that instruct the model stay,
    and what follows them begins with a user's message. Raises ApiError."""
    limits = asked.model.require_limits()
    messages = chat.messages
    num_kept = next(
        (index for index, message in enumerate(messages) if message.role not in ("system", "developer")), len(messages)
    )
    starts = [index for index in range(num_kept, len(messages)) if messages[index].role == "user"]
    if not starts:
        return chat

    def begun(start: int) -> ChatBody:
        return chat.model_copy(update={"messages": messages[:num_kept] + messages[start:]})

    async def fits(start: int) -> bool:
        try:
            token_ids = await chat_token_ids(begun(start).messages, chat, asked, told_tools(chat.offered_tools()))
        except InvalidRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return False
        return len(token_ids) + max(1, chat.max_completion_tokens or 1) <= limits.max_model_len

    if await fits(num_kept):
        return chat
    low, high = 0, len(starts) - 1  # find the first start that fits; if none does, take the last, which is refused
    while low < high:
        middle = (low + high) // 2
        if await fits(starts[middle]):
            high = middle
        else:
            low = middle + 1
    return begun(starts[low])


@router.get("/v1/responses/{response_id}", response_model=None)
async def retrieve_response(
    response_id: str,
    request: Request,
    api: ApiOf,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0, le=INT64_MAX)] = None,
) -> Response:
    owner, responses = _owner(request, api), _responses(api)
    found = await responses.kept.get(response_id, owner)
    if not stream:
        if starting_after is not None:
            raise InvalidRequestError(
                "starting_after is only possible with stream=true. Leave it out, or stream.", param="starting_after"
            )
        if found.runs_until is None:
            return _json(found.response, api)
        return _json(await api.turns.parsing(len(found.response), lambda: json.dumps(found.describe())), api)
    if not found.is_background:
        raise InvalidRequestError(
            "Only a response that was made with background: true can be streamed again. Leave out stream.",
            param="stream",
        )
    _require_room(responses, owner)
    return EventStream(api, responses.follow(found.id, owner, -1 if starting_after is None else starting_after))


@router.get("/v1/responses/{response_id}/input_items", response_model=None)
async def list_input_items(
    response_id: str,
    request: Request,
    api: ApiOf,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    owner = _owner(request, api)
    found = await _responses(api).kept.get(response_id, owner)
    past: Sequence[StoredResponse] = []
    if found.previous is not None:
        try:
            past = await _past(found.previous, owner, api)
        except InvalidRequestError as error:
            if error.code != "previous_response_not_found":
                raise
    size = len(found.items) + sum(len(each.items) + len(each.response) for each in past)

    def page() -> str:
        items = _items(past) + json.loads(found.items)
        if order == "desc":
            items.reverse()
        begin = 0
        if after:  # some clients send an empty one for the first page
            begin = next((at + 1 for at, item in enumerate(items) if item["id"] == after), 0)
            if not begin:
                raise not_in_list(after)
        shown = items[begin : begin + limit]
        ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": "", "last_id": ""}
        return json.dumps({"object": "list", "data": shown, **ends, "has_more": begin + limit < len(items)})

    return _json(await api.turns.parsing(size, page), api)


@router.post("/v1/responses/{response_id}/cancel", response_model=None)
async def cancel_response(response_id: str, request: Request, api: ApiOf) -> Response:
    responses = _responses(api)
    found = await responses.kept.cancel(response_id, _owner(request, api))
    responses.end(found.id)
    return _json(found.response, api)


@router.delete("/v1/responses/{response_id}", response_model=None)
async def delete_response(response_id: str, request: Request, api: ApiOf) -> dict[str, Any]:
    responses = _responses(api)
    await responses.kept.delete(response_id, _owner(request, api))
    responses.end(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


def _json(text: str, api: Api) -> Response:
    return ReadResponse.of_json(api, text.encode())


class StoredAnswer(GenerationResponse):
    """An answer that is kept before its client hears of its end, so that the client may ask for it from then on. If it
    can't be kept, the answer says so. An answer that fails is kept as failed if it had begun: by then its client has
    heard of its id."""

    def __init__(self, api: Api, timeline: RequestTimeline, shape: ResponsesShape, kept: StoredResponse) -> None:
        super().__init__(api, timeline, shape)
        self._of_response = shape
        self._kept = kept
        self._is_kept = False

    async def _last(self, size: int, make: Callable[[], bytes]) -> bytes:
        last = await super()._last(size, make)
        try:
            text = last.decode()
            kept = replace(
                self._kept,
                status=self._of_response.status,
                response=response_of(text) if self._job.stream else text,
            )
            self._is_kept = True
            await _responses(self._api).kept.add(kept)
        except (sqlite3.Error, OSError, RuntimeError):  # RuntimeError: the database is closed
            told = {"request": self._kept.id}
            logger.exception("the response %s could not be stored", self._kept.id, extra=told)
            self._of_response.stored = False
            last = await super()._last(size, make)
        return last

    async def _fail(self, send: Send, error: ApiError) -> None:
        if self._job.num_generated_tokens and not self._is_kept:
            failed = replace(self._kept, status="failed", response=json.dumps(self._of_response.failed(error)))
            try:
                async with asyncio.timeout(LAST_WORD_S):
                    await _responses(self._api).kept.add(failed)
            except (TimeoutError, sqlite3.Error, OSError, RuntimeError):
                told = {"request": self._kept.id}
                logger.exception("the response %s, which failed, could not be stored", self._kept.id, extra=told)
                self._of_response.stored = False
        await super()._fail(send, error)


class ResponsesShape(AnswerShape):
    """OpenAI's `response`: whole, or streamed as items that are opened, added to and closed one after the other. The
    stream's last event has the whole response. `names`: what `ResponsesBody.called_names` says."""

    def __init__(
        self,
        job: Job,
        echo: dict[str, Any],
        names: Mapping[str, Mapping[str, str]],
        tokenizer: Tokenizer,
        *,
        stored: bool,
        echo_size: int,
    ) -> None:
        super().__init__(job, chunk_name="response", whole_name="response")
        self.stored = stored
        self.status = "in_progress"
        self._echo, self._echo_size = echo, echo_size
        self._names = names
        self._tokenizer = tokenizer
        self._choice = ChoiceEvents(job.reading or PLAIN)
        self._output: list[Item] = []
        self._open: str | None = None  # the kind of events that the last item takes
        self._texts: list[str] = []  # the texts that were added to the last item
        self._first_text: int | None = None  # the index of the item that tells of all log probabilities
        self._entries: list[TokenEntry] = []  # those that were told
        self._waiting: list[TokenEntry] = []  # those that came since the last event of text
        self._number = 0  # the number of the next event
        self._num_bytes = 0  # about how many bytes the output has
        self._completed_at: int | None = None

    def opening(self, index: int) -> bytes:
        told = self.response("in_progress")
        return self._sent([{"type": f"response.{kind}", "response": told} for kind in ("created", "in_progress")])

    def chunk(self, index: int, delta: Delta) -> bytes:
        return self._sent(self._read(delta))

    def size(self, delta: Delta) -> int:
        """About how many bytes `chunk` makes of a delta. The events that close an item repeat all of it three times."""
        self._num_bytes += self.job.size(delta)
        may_close = self.job.reading is not None and self.job.num_output_logprobs is not None
        closes = delta.finish_reason is not None or may_close
        return 3 * self._num_bytes if closes else self.job.size(delta)

    def opening_size(self, index: int) -> int:
        return 2 * self._echo_size

    def closing_size(self) -> int:
        return self._echo_size + self._num_bytes

    def closing(self) -> bytes:
        return self._sse({"type": f"response.{self.status}", "response": self.response(self.status)}, self._number)

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """The whole response, in an answer that is not streamed."""
        if self.status == "in_progress":
            self._read(delta)
        return self.response(self.status)

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        return self.choice(0, deltas[0])

    def last_word(self, error: ApiError) -> bytes:
        failed = self.failed(error)
        said = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return self._sent([*self._closed("incomplete"), said, {"type": "response.failed", "response": failed}])

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The response if it ends with an error. Its last item, if that was open, is incomplete."""
        last = [event["item"] for event in self._ending("incomplete")[-1:]]
        output = [*self._output[: len(self._output) - len(last)], *last]
        return {**self.response("failed"), "output": output, "error": told_error(error.status, error.message)}

    def response(self, status: str) -> dict[str, Any]:
        """The response with that status, as far as it has been generated."""
        job = self.job
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": job.id,
            "object": "response",
            "created_at": job.created,
            "completed_at": self._completed_at if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            **self._echo,
            "model": job.model,
            "output": [*self._output],
            "service_tier": job.service_tier,
            "store": self.stored,
            "usage": None if status in ("queued", "in_progress") else self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        usage: Any = self.job.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"],
            },
            "total_tokens": usage["total_tokens"],
        }

    def _sent(self, events: Sequence[dict[str, Any]]) -> bytes:
        """Number events and write them."""
        first = self._number
        self._number += len(events)
        return b"".join(self._sse(event, first + at) for at, event in enumerate(events))

    def _sse(self, event: dict[str, Any], number: int) -> bytes:
        kind: str = event["type"]
        write = dumps if kind.endswith((".delta", ".added")) else dumps_large
        return b"event: %b\ndata: %b\n\n" % (
            kind.encode(),
            write({"type": kind, "sequence_number": number, **event}),
        )

    def _read(self, delta: Delta) -> list[dict[str, Any]]:
        """Take in a delta. Returns the events that tell of it."""
        told: list[dict[str, Any]] = []
        self._waiting += delta.entries
        for event in self._choice.read(delta):
            if event.kind != self._open:
                told += [*self._closed("completed"), *self._opened(event)]
            if event.kind != "call":
                told.append(self._added(event.text))
        if delta.finish_reason is None:
            return told
        if not self._output:
            told += self._opened(OutputEvent("text", ""))
        if self._open == "text" and self._waiting:
            told.append(self._added(""))
        self.status = "incomplete" if delta.finish_reason == "length" else "completed"
        self._completed_at = int(time.time())
        told += self._closed(self.status if self._open != "arguments" or self._choice.can_call else "incomplete")
        self._tell_all_entries()
        return told

    def _tell_all_entries(self) -> None:
        """Tell beside the first text, in the response itself, also of tokens that came when its item was closed."""
        if self._first_text is None or self._first_text == len(self._output) - 1:
            return
        item = self._output[self._first_text]
        part = _part("text", item["content"][0]["text"], self._logprobs([*self._entries, *self._waiting]))
        self._output[self._first_text] = {**item, "content": [part]}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _opened(self, event: OutputEvent) -> list[dict[str, Any]]:
        """Open another item, and its part if it has parts. Returns the events that tell of it."""
        item: Item
        match event.kind:
            case "text":
                item = {"id": new_id("msg"), "type": "message", "role": "assistant", "content": []}
            case "reasoning":
                item = {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": []}
            case _:
                named = self._names.get(event.text, {"name": event.text})
                called = {"call_id": new_call_id(), **named, "arguments": ""}
                item = {"id": new_id("fc"), "type": "function_call", **called}
        self._output.append({**item, "status": "in_progress"})
        self._open = "arguments" if event.kind == "call" else event.kind
        index = len(self._output) - 1
        if self._open == "text" and self._first_text is None:
            self._first_text = index
        told: list[dict[str, Any]] = [
            {"type": "response.output_item.added", "output_index": index, "item": self._output[-1]}
        ]
        if self._open != "arguments":
            part = _part(self._open, "", [])
            told.append({"type": "response.content_part.added", **self._place(), "content_index": 0, "part": part})
        return told

    def _added(self, text: str) -> dict[str, Any]:
        """Add text to the last item. Returns the event that tells of it. With text come the log probabilities of all
        tokens since the last such event."""
        assert self._open is not None
        self._texts.append(text)
        more: dict[str, Any] = {"type": f"{_KINDS[self._open]}.delta", **self._place(), "delta": text}
        if self._open != "arguments":
            more["content_index"] = 0
        if self._open == "text":
            more["logprobs"] = self._logprobs(self._waiting)
            self._entries += self._waiting
            self._waiting = []
        return more

    def _closed(self, status: str) -> list[dict[str, Any]]:
        """Close the last item, if it is open. Returns the events that tell of it."""
        if told := self._ending(status):
            self._output[-1] = told[-1]["item"]
            self._open, self._texts = None, []
        return told

    def _ending(self, status: str) -> list[dict[str, Any]]:
        """The events that would tell of the last item's end; none if it is not open.
        The last event has the whole item."""
        if self._open is None:
            return []
        text, kind, item = "".join(self._texts), _KINDS[self._open], self._output[-1]
        place = self._place()
        logprobs = self._logprobs(self._entries) if place["output_index"] == self._first_text else []
        done: dict[str, Any] = {"type": f"{kind}.done", **place}
        if self._open == "arguments":
            told = [{**done, "name": item["name"], "arguments": text}]
            members: dict[str, Any] = {"arguments": text}
        else:
            part = _part(self._open, text, logprobs)
            beside = {"logprobs": logprobs} if self._open == "text" else {}
            told = [
                {**done, "content_index": 0, "text": text, **beside},
                {"type": "response.content_part.done", **place, "content_index": 0, "part": part},
            ]
            members = {"content": [part]}
        ended = {**item, **members, "status": status}
        return [*told, {"type": "response.output_item.done", "output_index": place["output_index"], "item": ended}]

    def _logprobs(self, entries: Sequence[TokenEntry]) -> list[dict[str, Any]]:
        told = chat_logprobs(entries, self._tokenizer)
        return [] if told is None else told["content"]


_KINDS: Final = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "arguments": "response.function_call_arguments",
}


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
