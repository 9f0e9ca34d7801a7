"""Anthropic's Messages API: its routes, its bodies as a chat, and answers in its shape. A thin translation of a
chat and its events.

What Anthropic's API has and a chat has not is refused with a sentence, as everywhere; what makes no difference here
(`cache_control`: prefixes are always reused) is accepted.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

import jiter
from fastapi import APIRouter, Request
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from cluster.errors import ApiError, InvalidRequestError
from cluster.http.api import ApiOf, Asked
from cluster.http.error_responses import from_validation
from cluster.http.openai.choice import Delta
from cluster.http.openai.events import PLAIN, ChoiceEvents
from cluster.http.openai.fields import Harmless, Stop, Unsupported, field_error
from cluster.http.openai.schemas import INT32_MAX, INT64_MAX, MAX_MESSAGES, MAX_TOOLS, Body, ChatBody
from cluster.http.openai.sse import AnswerShape, dumps
from cluster.http.openai.structured import OutputConstraint
from cluster.http.openai.tools import bounds_thinking, told_tools
from cluster.http.parse import Job, new_job_id, prepare_chat
from cluster.http.prompts import chat_token_ids
from cluster.http.response import GenerationResponse
from cluster.http.server.body import JsonRoute
from cluster.json_text import is_finite
from engine.text.output import OutputEvent

router = APIRouter(route_class=JsonRoute)

_TEXTS: Final = {"text": "text", "thinking": "thinking"}  # blocks, and which of their members is their text
_LEFT_OUT: Final = ("redacted_thinking",)  # blocks of another model, which nothing here can read
# How the first line of Claude Code's system prompt begins, for Anthropic's bills. It says nothing to a model, and its
# hash is another one with each request: no prefix behind it would ever be found again.
_BILLING: Final = "x-anthropic-billing-header:"


def parse_blocks(value: object) -> list[dict[str, Any]]:
    """Normalise the content of a message, a text or a list of blocks, to a list of blocks, and check them."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise field_error("invalid_type", "send a text, or a list of blocks such as {'type': 'text', 'text': 'hello'}")
    for index, block in enumerate(value):
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise field_error("invalid_type", f"block {index} must be an object with a `type`")
        kind = block["type"]
        if kind in _TEXTS:
            _require_text(block, _TEXTS[kind], index)
        elif kind == "tool_use":
            _require_text(block, "id", index)
            _require_text(block, "name", index)
            if not isinstance(block.get("input"), dict):
                raise field_error("invalid_type", f"block {index} must have an `input` that is an object")
        elif kind == "tool_result":
            _require_text(block, "tool_use_id", index)
        elif kind not in _LEFT_OUT:
            raise field_error(
                "unsupported_value",
                f"block {index} is of type {kind[:40]!r}; this model reads text, thinking, tool_use and tool_result",
            )
    return value


def _require_text(block: Mapping[str, Any], name: str, index: int) -> None:
    if not isinstance(block.get(name), str):
        raise field_error("invalid_type", f"block {index} must have a `{name}` that is a text")


def parse_system(value: object) -> str:
    """Normalise a system prompt, a text or a list of text blocks, to one text, without what is meant for bills."""
    blocks = parse_blocks(value)
    if any(block["type"] != "text" for block in blocks):
        raise field_error("unsupported_value", "a system prompt has text blocks only")
    return "\n\n".join(filter(None, (_without_bill(block["text"]) for block in blocks)))


def _without_bill(text: str) -> str:
    return text.partition("\n")[2].lstrip("\n") if text.startswith(_BILLING) else text


def _parse_result(value: object) -> str:
    """Normalise the content of a tool's result to one text; "" without content."""
    if value is None:
        return ""
    blocks = parse_blocks(value)
    if any(block["type"] != "text" for block in blocks):
        raise field_error("unsupported_value", "a tool_result has text blocks only")
    return "".join(block["text"] for block in blocks)


def _check_results(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**block, "content": _parse_result(block.get("content")) or ("Error" if block.get("is_error") else "")}
        if block["type"] == "tool_result"
        else block
        for block in blocks
    ]


Blocks = Annotated[
    list[dict[str, Any]], BeforeValidator(parse_blocks, json_schema_input_type=Any), AfterValidator(_check_results)
]
System = Annotated[str, BeforeValidator(parse_system, json_schema_input_type=Any)]


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: Blocks


def _only_direct(value: object) -> None:
    if value not in (None, [], ["direct"]):
        raise field_error(
            "invalid_value", "this server runs no code that could call a tool; send ['direct'], or leave it out"
        )


class MessagesTool(Body):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: Annotated[Any, AfterValidator(_only_direct)] = None
    defer_loading: Unsupported = None
    cache_control: Harmless = None
    eager_input_streaming: Harmless = None


class MessagesToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "between_tools", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, le=INT64_MAX)
    display: Harmless = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


def _no_thread(value: object) -> None:
    if value is not None:  # the code is Anthropic's: its clients go on with all messages in each request
        raise field_error(
            "thread_unsupported_request", "this server holds no conversation; send all of its messages each time"
        )


def _no_edits(value: object) -> None:
    """Refuse edits of the messages, except for the one that keeps all thinking, which is kept anyway."""
    edits = value.get("edits", []) if isinstance(value, dict) and value.keys() <= {"edits"} else value
    kept = {"type": "clear_thinking_20251015", "keep": "all"}
    if edits is not None and (not isinstance(edits, list) or any(edit != kept for edit in edits)):
        raise field_error(
            "unsupported_value", "nothing is taken out of the messages here; leave out yourself what is too much"
        )


class Metadata(Body):
    user_id: str | None = Field(None, max_length=512)


class CountTokensBody(Body):
    """`POST /v1/messages/count_tokens`"""

    model: str
    messages: list[Turn] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    system: System | None = None
    tools: list[MessagesTool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of `output_config.format`
    cache_control: Harmless = None
    context_management: Annotated[Any, AfterValidator(_no_edits)] = None
    thread: Annotated[Any, AfterValidator(_no_thread)] = None
    speed: Literal["standard"] | None = None
    compaction: Unsupported = None
    container: Unsupported = None
    diagnostics: Unsupported = None
    fallbacks: Unsupported = None
    inference_geo: Unsupported = None
    mcp_servers: Unsupported = None


class MessagesBody(CountTokensBody):
    """`POST /v1/messages`"""

    max_tokens: int = Field(ge=1, le=INT64_MAX)
    stop_sequences: Stop = Field([])
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=INT64_MAX)
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


def chat_of(body: CountTokensBody, *, switches_thinking: bool, bounds_thinking: bool) -> ChatBody:
    """Translate the body into a chat. `switches_thinking`: the model's chat template reads whether to think;
    `bounds_thinking`: a budget of its thinking can be kept. Else there is none: clients name one whatever the model is,
    and `max_tokens` bounds thinking and answer together. Raises ApiError."""
    messages = [message for turn in body.messages for message in _messages(turn)]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    chat: dict[str, Any] = {"model": body.model, "messages": messages}
    if messages and messages[-1]["role"] == "assistant":  # the answer is to continue this message
        chat["continue_final_message"] = True
    if body.tools:
        chat["tools"] = [_tool(tool) for tool in body.tools]
    if (choice := body.tool_choice) is not None:
        chat["tool_choice"] = _tool_choice(choice)
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.thinking is not None and switches_thinking:
        chat["chat_template_kwargs"] = {"enable_thinking": body.thinking.type in ("enabled", "adaptive")}
    if bounds_thinking and body.thinking is not None and body.thinking.type == "enabled":
        budget = body.thinking.budget_tokens
        chat["thinking_token_budget"] = None if budget is None else min(budget, INT32_MAX)
    if body.output_config is not None:
        chat["reasoning_effort"] = body.output_config.effort
    chat["response_format"] = _output_format(body)
    if isinstance(body, MessagesBody):
        chat |= {name: getattr(body, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
        chat["stop"] = body.stop_sequences
        chat["user"] = None if body.metadata is None else body.metadata.user_id
    try:
        return ChatBody.model_validate(chat)
    except ValidationError as error:
        raise from_validation(error) from None


def _output_format(body: CountTokensBody) -> OutputConstraint | None:
    """What the answer must be, under either name. Raises InvalidRequestError for both."""
    newer = None if body.output_config is None else body.output_config.format
    if newer is not None and body.output_format is not None:
        raise InvalidRequestError(
            "output_format is the older name of output_config.format. Send one of them.", param="output_format"
        )
    if (wanted := newer or body.output_format) is None:
        return None
    param = "output_format" if newer is None else "output_config.format"
    return OutputConstraint("json", json.dumps(wanted.json_schema), param)


def _messages(turn: Turn) -> Iterator[dict[str, Any]]:
    """Yields the messages of a chat that one turn becomes: one for each result of a call, and one for the rest."""
    texts: list[str] = []
    thoughts: list[str] = []
    members: dict[str, Any] = {}
    before = kind = ""
    content = [block for block in turn.content if block["type"] != "text" or block["text"]]
    for block in content:
        before, kind = kind, block["type"]
        if kind == "tool_result":
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": block["content"]}
        elif kind == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
            members.setdefault("tool_calls", []).append({"id": block["id"], "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(block["thinking"])
        elif kind == "text":
            texts.append("\n" + block["text"] if texts and before != "text" else block["text"])
    if thoughts:
        members["reasoning"] = "".join(thoughts)
    if texts or members or not content:
        yield {"role": turn.role, "content": "".join(texts), **members}


def _tool(tool: MessagesTool) -> dict[str, Any]:
    schema = tool.input_schema
    if tool.input_examples:  # JSON Schema's word for them, by which a model reads them where it reads the schema
        schema = {**schema, "examples": tool.input_examples}
    function = {"name": tool.name, "description": tool.description, "parameters": schema}
    return {"type": "function", "function": {**function, "strict": tool.strict}}


def _tool_choice(choice: MessagesToolChoice) -> Any:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.name}}
    return choice.type


@router.post("/v1/messages", response_model=None)
async def messages(body: MessagesBody, request: Request, api: ApiOf) -> GenerationResponse:
    asked = await api.find_model(body.model)
    chat = await _chat(body, request, asked)
    timeline = asked.timeline("/v1/messages", request, chat)
    async with api.preparing(timeline.terms):
        job = await prepare_chat(chat, asked, timeline.terms, job_id=new_job_id("msg"))
    return GenerationResponse(api, timeline, MessagesShape(job))


@router.post("/v1/messages/count_tokens", response_model=None)
async def count_tokens(body: CountTokensBody, request: Request, api: ApiOf) -> dict[str, Any]:
    asked = await api.find_model(body.model)
    chat = await _chat(body, request, asked)
    return {"input_tokens": len(await chat_token_ids(chat.messages, chat, asked, told_tools(chat.offered_tools())))}


async def _chat(body: CountTokensBody, request: Request, asked: Asked) -> ChatBody:
    """Translate a body into a chat, in a thread if it is large. Raises ApiError."""
    tokenizer = asked.model.tokenizer
    switches = tokenizer.template_reads("enable_thinking")
    bounds = bounds_thinking(asked.model.formats.reasoning, tokenizer)
    work = partial(chat_of, body, switches_thinking=switches, bounds_thinking=bounds)
    return await asked.api.turns.parsing(len(await request.body()), work)


class MessagesShape(AnswerShape):
    """Anthropic's `message`, whole, or streamed as blocks that are opened, added to and closed one after the other."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, chunk_name="message", whole_name="message")
        self._choice = ChoiceEvents(job.reading or PLAIN)
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
            self._ending = self._stopped(delta, calls=self._choice.can_call)
        return b"".join(sent)

    def _opened(self, event: OutputEvent) -> bytes:
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
        """The whole message of an answer that is not streamed: the blocks that a stream would open, with all of each.
        A call whose arguments cannot be read becomes a text."""
        blocks: list[tuple[dict[str, Any], list[str]]] = []  # each as it is opened, and what it then gets
        for event in self._choice.read(delta):
            if event.kind != self._open:
                self._open = "arguments" if event.kind == "call" else event.kind
                blocks.append((_block(event), []))
            if event.kind != "call":
                blocks[-1][1].append(event.text)
        whole = [_filled(block, "".join(texts)) for block, texts in blocks]
        calls = self._choice.can_call and any(block["type"] == "tool_use" for block in whole)
        return self._message(whole, self._stopped(delta, calls=calls))

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        return self.choice(0, deltas[0])

    def failure(self, error: ApiError) -> dict[str, Any]:
        return error.anthropic_body()

    def last_word(self, error: ApiError) -> bytes:
        return b"event: error\n" + super().last_word(error)

    def _message(self, content: list[dict[str, Any]], ending: dict[str, Any]) -> dict[str, Any]:
        named = {"id": self.job.id, "type": "message", "role": "assistant", "model": self.job.model}
        return {**named, "content": content, **ending, "usage": self._usage()}

    def _stopped(self, delta: Delta, *, calls: bool) -> dict[str, Any]:
        found = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        if found is not None:
            reason = "stop_sequence"
        elif delta.finish_reason == "length":
            reason = "max_tokens"
        else:
            reason = "tool_use" if calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": found}

    def _usage(self) -> dict[str, Any]:
        num_cached = self.job.num_cached_tokens
        return {
            "input_tokens": self.job.num_prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": self.job.num_generated_tokens,
        }


_MEMBER: Final = {"text": "text", "reasoning": "thinking", "arguments": "partial_json"}  # of a delta, by its event
_DELTA: Final = {"text": "text_delta", "reasoning": "thinking_delta", "arguments": "input_json_delta"}


def _sse(kind: str, **members: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), dumps({"type": kind, **members}))


def _piece(event: OutputEvent) -> dict[str, str]:
    return {"type": _DELTA[event.kind], _MEMBER[event.kind]: event.text}


def _block(event: OutputEvent) -> dict[str, Any]:
    """The block of a message that an event opens, as it begins."""
    match event.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": event.text, "input": {}}


def _filled(block: dict[str, Any], text: str) -> dict[str, Any]:
    """A block with all that it got: its text, or a call's arguments as far as they came."""
    kind: str = block["type"]
    if kind in _TEXTS:
        return {**block, _TEXTS[kind]: text}
    try:
        value = jiter.from_json(text.encode() or b"{}", allow_inf_nan=False, partial_mode="trailing-strings")
    except ValueError:
        value = None
    if isinstance(value, dict) and is_finite(value):
        return {**block, "input": value}
    return {"type": "text", "text": f"{block['name']}({text})"}
