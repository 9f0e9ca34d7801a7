"""The body of OpenAI's Responses API, and what it is as a chat: the rest of the way is the same.

Items of a conversation are kept in one form, whichever of several a client sends, so that what is stored is what is
read. What the API has and a chat has not is refused with a sentence; what it has for tools that run on the server is
refused, since none do here.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from cluster.errors import ApiError, InvalidRequestError
from cluster.http.error_responses import from_validation
from cluster.http.openai.fields import (
    Harmless,
    Metadata,
    Parameters,
    TemplateKwargs,
    Unsupported,
    field_error,
    parse_tool_choice,
)
from cluster.http.openai.schemas import (
    INT32_MAX,
    INT64_MAX,
    MAX_MESSAGES,
    MAX_TOOLS,
    Body,
    ChatBody,
    FunctionName,
    SampledBody,
)
from cluster.http.openai.structured import parse_response_format
from engine.sampling.params import MAX_LOGPROBS, SamplingParams

Item = dict[str, Any]
"""An item of a conversation, as answers and lists show it: it has a `type` and an `id`."""

_MAX_ID: Final = 256

# Names of fields in a chat, and their names here.
_NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
_NAMED: Final = re.compile(rf"(^|\bthe |\b[Ll]ower )({'|'.join(_NAMES)})\b")
# Fields that are the same in a chat.
_SAME: Final = (
    *(name for name in SampledBody.model_fields if name != "logit_bias"),
    "chat_template_kwargs",
    "thinking_token_budget",
)


# --- items ---


def parse_parts(value: object) -> list[dict[str, str]]:
    """Normalise what a message or a function's result says, a text or a list of parts, to a list of parts of text."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise field_error(
            "invalid_type", "send a text, or a list of parts such as {'type': 'input_text', 'text': 'hello'}"
        )
    return [_part(part, index) for index, part in enumerate(value)]


_TEXTS: Final = ("text", "input_text", "output_text", "summary_text", "reasoning_text")


def _part(part: object, index: int) -> dict[str, str]:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise field_error("invalid_type", f"part {index} must be an object with a `type`")
    kind = part["type"]
    if kind not in (*_TEXTS, "refusal"):
        raise field_error(
            "unsupported_value",
            f"part {index} is of type {kind[:40]!r}; this model reads 'input_text' and 'output_text' only",
        )
    name = "refusal" if kind == "refusal" else "text"
    if not isinstance(part.get(name), str):
        raise field_error("invalid_type", f"part {index} must have a `{name}` that is a text")
    known = {"type", name, "annotations", "logprobs", "prompt_cache_breakpoint"}
    if stranger := next((member for member in part if member not in known and part[member] is not None), None):
        raise field_error(
            "invalid_value", f"part {index} has a member {str(stranger)[:40]!r}, which is not known here; leave it out"
        )
    return {"type": "refusal" if kind == "refusal" else "text", name: part[name]}


Parts = Annotated[list[dict[str, str]], BeforeValidator(parse_parts)]
ItemId = Annotated[str | None, Field(min_length=1, max_length=_MAX_ID)]
ItemStatus = Literal["in_progress", "completed", "incomplete"] | None


class _KeptItem(Body):
    """What every item has, whether a client sends one that it was given, with its id, or its own."""

    type: str
    id: ItemId = None
    status: ItemStatus = None

    def kept(self, prefix: str, **content: Any) -> Item:
        """The item in the form in which it is kept. `prefix`: of its id, where it has none yet."""
        named = {"id": self.id or new_id(prefix), "type": self.type}
        return {**named, **content, "status": self.status or "completed"}


class MessageItem(_KeptItem):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: Harmless = None

    def item(self) -> Item:
        if self.role == "assistant":
            content = [_said(part) for part in self.content]
        elif any(part["type"] == "refusal" for part in self.content):
            raise field_error("invalid_value", "only an assistant's message has a refusal")
        else:
            content = [{"type": "input_text", "text": part["text"]} for part in self.content]
        return self.kept("msg", role=self.role, content=content)


class _ItemOfCall(_KeptItem):
    call_id: str = Field(min_length=1, max_length=_MAX_ID)
    caller: Harmless = None
    created_by: Harmless = None


class CallItem(_ItemOfCall):
    type: Literal["function_call"]
    name: FunctionName
    namespace: FunctionName | None = None
    arguments: str
    is_async: Harmless = Field(None, alias="async")

    def item(self) -> Item:
        named = {"name": self.name} if self.namespace is None else {"namespace": self.namespace, "name": self.name}
        return self.kept("fc", call_id=self.call_id, **named, arguments=self.arguments)


class ResultItem(_ItemOfCall):
    type: Literal["function_call_output"]
    output: Parts
    name: Harmless = None
    namespace: Harmless = None

    def item(self) -> Item:
        return self.kept("fco", call_id=self.call_id, output="".join(_text(part) for part in self.output))


class ReasoningItem(_KeptItem):
    type: Literal["reasoning"]
    summary: Parts = Field([])
    content: Parts | None = None
    encrypted_content: Harmless = None  # reasoning of another model, which nothing here can read

    def item(self) -> Item:
        return self.kept(
            "rs",
            summary=[{"type": "summary_text", "text": _text(part)} for part in self.summary],
            content=[{"type": "reasoning_text", "text": _text(part)} for part in self.content or ()],
        )


_ITEMS: Final[Mapping[str, type[MessageItem | CallItem | ResultItem | ReasoningItem]]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": ResultItem,
    "reasoning": ReasoningItem,
}


def _text(part: Mapping[str, str]) -> str:
    return part.get("text", part.get("refusal", ""))


def _said(part: Mapping[str, str]) -> dict[str, Any]:
    """A part of an assistant's message, in the form in which it is kept."""
    if part["type"] == "refusal":
        return dict(part)
    return {"type": "output_text", "text": part["text"], "annotations": [], "logprobs": []}


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(24)}"


def parse_input(value: object) -> list[Item]:
    """Normalise `input`, a text or the items of a conversation, to items in the form in which they are kept; there may
    be none. Raises InvalidRequestError, besides pydantic's errors."""
    if isinstance(value, str):
        return [MessageItem(role="user", content=[{"type": "text", "text": value}]).item()]
    if not isinstance(value, list):
        raise field_error(
            "invalid_type", "send a text, or a list of items such as {'role': 'user', 'content': 'hello'}"
        )
    if len(value) > MAX_MESSAGES:
        raise field_error("invalid_value", f"{len(value)} items were sent; at most {MAX_MESSAGES} are possible")
    return [_item(item, index) for index, item in enumerate(value)]


def _item(value: object, index: int) -> Item:
    if not isinstance(value, Mapping) or not isinstance(kind := value.get("type") or "message", str):
        raise field_error("invalid_type", f"item {index} must be an object with a `type`")
    if kind == "item_reference":
        raise field_error(
            "unsupported_value",
            f"item {index} refers to one that was said before; send that one, or previous_response_id",
        )
    if kind not in _ITEMS:
        raise field_error(
            "unsupported_value", f"item {index} is of type {kind[:40]!r}; this server reads {', '.join(_ITEMS)}"
        )
    try:
        # Null means "not given", also for the type of a message.
        return _ITEMS[kind].model_validate({**value, "type": kind}).item()
    except ValidationError as error:
        raise from_validation(error, "input", index) from None


# --- the other fields ---


class Namespace(Body):
    """A name that functions have in common, as Codex groups those of an MCP server."""

    name: FunctionName
    description: str = ""


class ResponsesTool(Body):
    """A function. One in a `namespace` is told to the model under both names, and called by both."""

    type: Literal["function"]
    namespace: Namespace | None = None
    name: FunctionName
    description: str | None = None
    parameters: Parameters = None
    strict: bool | None = None
    allowed_callers: Unsupported = None
    defer_loading: Unsupported = None
    output_schema: Unsupported = None
    is_async: Unsupported = Field(None, alias="async")

    @property
    def chat_name(self) -> str:
        return _chat_name(self.name, None if self.namespace is None else self.namespace.name)


def _chat_name(name: str, namespace: str | None) -> str:
    """The name of a function in a chat, which knows no namespaces."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def _only_functions(value: object) -> object:
    return _functions(value) if isinstance(value, list) else value


def _functions(tools: list[Any], namespace: Namespace | None = None) -> list[Any]:
    """The tools, those in a namespace one by one and with it."""
    found: list[Any] = []
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind == "namespace" and isinstance(inner := tool.get("tools"), list) and namespace is None:
            found += _functions(inner, _namespace(tool, index))
        elif isinstance(kind, str) and kind != "function":
            raise field_error(
                "unsupported_value",
                f"tool {index} is {kind[:40]!r}, and this server runs no tools of its own; send functions, and run"
                " them yourself",
            )
        elif kind is not None and tool.get("namespace") is not None:
            raise field_error("invalid_value", f"tool {index} names a namespace; send it among the `tools` of one")
        else:
            found.append(tool if namespace is None or kind is None else {**tool, "namespace": namespace})
    return found


def _namespace(tool: Mapping[str, Any], index: int) -> Namespace:
    try:
        return Namespace.model_validate({key: tool[key] for key in tool.keys() - {"type", "tools"}})
    except ValidationError as error:
        raise from_validation(error, "tools", index) from None


def _distinct(tools: list[ResponsesTool]) -> list[ResponsesTool]:
    if len({tool.chat_name for tool in tools}) < len(tools):
        raise field_error("invalid_value", "two functions have the same name")
    return tools


def _chat_tool_choice(value: object) -> object:
    """The `tool_choice` of a chat that says the same."""
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
        tools = value.get("tools")
        named = [_chat_tool_choice(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": value.get("mode"), "tools": named}}
    if isinstance(value, Mapping) and value.get("type") == "function":
        name, namespace = value.get("name"), value.get("namespace")
        if namespace is not None:
            name = _chat_name(name, namespace) if isinstance(name, str) and isinstance(namespace, str) else None
        return {"type": "function", "function": {"name": name}}
    return value


def _check_tool_choice(value: object) -> object:
    if isinstance(value, Mapping) and value.get("type") not in ("function", "allowed_tools"):
        raise field_error(
            "unsupported_value",
            f"{str(value.get('type'))[:40]!r} is no function, and this server runs no tools of its own; send 'none',"
            " 'auto', 'required', or {'type': 'function', 'name': 'one'}",
        )
    parse_tool_choice(_chat_tool_choice(value))
    return value


def _chat_format(value: Mapping[str, Any]) -> object:
    if value.get("type") != "json_schema":
        return dict(value)
    return {"type": "json_schema", "json_schema": {name: member for name, member in value.items() if name != "type"}}


def _check_format(value: object) -> object:
    if not isinstance(value, Mapping | None):
        raise field_error("invalid_type", "send an object such as {'type': 'json_object'}")
    parse_response_format(None if value is None else _chat_format(value))
    return value


class TextSettings(Body):
    format: Annotated[Any, BeforeValidator(_check_format)] = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningSettings(Body):
    """The field `reasoning`. What a model thinks is shown as it is; nothing makes a `summary` of it, of any kind."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponsesStreamOptions(Body):
    include_obfuscation: Harmless = None


# Only the first has an effect: the others name things that no answer here has, such as results of the server's tools.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesBody(SampledBody):
    """`POST /v1/responses`"""

    input: Annotated[list[Item], BeforeValidator(parse_input, json_schema_input_type=Any)] = Field([])
    instructions: str | None = None
    previous_response_id: str | None = Field(None, min_length=1, max_length=_MAX_ID)
    store: bool | None = None
    background: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=INT64_MAX)
    max_tool_calls: int | None = Field(None, ge=1, le=INT64_MAX)  # limits tools that run on the server: there are none
    tools: (
        Annotated[
            list[ResponsesTool],
            Field(max_length=MAX_TOOLS, fail_fast=True),
            BeforeValidator(_only_functions),
            AfterValidator(_distinct),
        ]
        | None
    ) = None
    tool_choice: Annotated[Any, BeforeValidator(_check_tool_choice, json_schema_input_type=Any)] = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: list[Includable] | None = Field(None, max_length=16, fail_fast=True)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata = None
    client_metadata: Harmless = None  # Codex's, of its installation and turn
    chat_template_kwargs: TemplateKwargs = Field({})
    thinking_token_budget: int | None = Field(None, ge=-1, le=INT32_MAX)
    conversation: Unsupported = None
    prompt: Unsupported = None
    context_management: Unsupported = None
    background_options: Unsupported = None
    moderation: Unsupported = None
    image: Unsupported = None
    access_programs: Unsupported = None

    @property
    def num_logprobs(self) -> int | None:
        """How many log probabilities each token of the output has besides its own; None: not even its own."""
        asked = self.top_logprobs or "message.output_text.logprobs" in (self.include or ())
        return self.top_logprobs or 0 if asked else None

    def called_names(self) -> dict[str, dict[str, str]]:
        """The members of a call that name its function, by the function's name in a chat: of those in namespaces."""
        return {
            tool.chat_name: {"namespace": tool.namespace.name, "name": tool.name}
            for tool in self.tools or ()
            if tool.namespace is not None
        }

    def echo(self, params: SamplingParams) -> dict[str, Any]:
        """The members that an answer repeats of its request, and what it is sampled with."""
        text, reasoning = self.text or TextSettings(), self.reasoning or ReasoningSettings()
        return {
            "background": bool(self.background),
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "safety_identifier": self.safety_identifier,
            "temperature": params.temperature,
            "text": {"format": text.format or {"type": "text"}, "verbosity": text.verbosity or "medium"},
            "tool_choice": self.tool_choice or "auto",
            "tools": list(_told_tools(self.tools or ())),
            "top_logprobs": self.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }


def _told_tools(tools: Sequence[ResponsesTool]) -> Iterator[dict[str, Any]]:
    """Yields tools as they were sent, with those of a namespace in it."""
    for namespace, functions in groupby(tools, key=lambda tool: tool.namespace):
        told = [_told_tool(tool) for tool in functions]
        if namespace is None:
            yield from told
        else:
            yield {"type": "namespace", **namespace.model_dump(), "tools": told}


def _told_tool(tool: ResponsesTool) -> dict[str, Any]:
    described = {"description": tool.description, "parameters": tool.parameters, "strict": bool(tool.strict)}
    return {"type": "function", "name": tool.name, **described}


# --- as a chat ---


def chat_of(body: ResponsesBody, history: Sequence[Item]) -> ChatBody:
    """Translate the body into a chat, behind `history`, the items of the responses that it follows. Raises ApiError."""
    if not (body.input or history or body.instructions):
        raise InvalidRequestError(
            "input is missing. Send a text, or a list of items such as {'role': 'user', 'content': 'hello'}.",
            param="input",
            code="missing_required_parameter",
        )
    _require_distinct(history, body.input)
    chat: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    chat["messages"] = list(_messages([*history, *body.input]))
    if body.instructions is not None:
        chat["messages"].insert(0, {"role": "system", "content": body.instructions})
    chat["max_completion_tokens"] = body.max_output_tokens
    chat["logit_bias"] = {str(token_id): bias for token_id, bias in body.logit_bias.items()}
    if body.tools:
        chat["tools"] = list(_chat_tools(body.tools))
    if body.tool_choice is not None:
        chat["tool_choice"] = _chat_tool_choice(body.tool_choice)
    chat["parallel_tool_calls"] = body.parallel_tool_calls
    if (text := body.text) is not None:
        chat["verbosity"] = text.verbosity
        wanted = None if text.format is None else parse_response_format(_chat_format(text.format))
        chat["response_format"] = None if wanted is None else replace(wanted, param="text.format")
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if (num_logprobs := body.num_logprobs) is not None:
        chat |= {"logprobs": True, "top_logprobs": num_logprobs}
    try:
        return ChatBody.model_validate(chat)
    except ValidationError as error:
        raise in_its_own_words(from_validation(error)) from None


def _require_distinct(history: Sequence[Item], items: Sequence[Item]) -> None:
    """Check that an item comes once, as at OpenAI: lists of items are paged by their ids. Raises
    InvalidRequestError."""
    known = {item["id"] for item in history}
    for item in items:
        if item["id"] in known:
            raise InvalidRequestError(
                f"The item {item['id']!r} is there twice. Send each item once, and none that previous_response_id"
                " brings.",
                param="input",
            )
        known.add(item["id"])


def in_its_own_words(error: ApiError) -> ApiError:
    """Make a refusal of the chat speak of the fields that the client sent."""
    error.message = _NAMED.sub(lambda found: found[1] + _NAMES[found[2]], error.message)
    if error.param is not None:
        name, *rest = re.split(r"(?=[.\[])", error.param, maxsplit=1)
        error.param = _NAMES.get(name, name) + "".join(rest)
    return error


def _chat_tools(tools: Sequence[ResponsesTool]) -> Iterator[dict[str, Any]]:
    """Yields the tools of a chat, which has no namespaces: what is said of one is said with its first function."""
    for namespace, functions in groupby(tools, key=lambda tool: tool.namespace):
        said = "" if namespace is None else namespace.description
        for tool in functions:
            description = f"{said}\n\n{tool.description or ''}".rstrip() if said else tool.description
            function = {"name": tool.chat_name, "description": description, "parameters": tool.parameters}
            yield {"type": "function", "function": {**function, "strict": tool.strict}}
            said = ""


def _messages(items: Sequence[Item]) -> Iterator[dict[str, Any]]:
    """Yields the messages of a chat with these items.
    What an assistant thought, said and called in one turn is one message."""
    turn: dict[str, Any] = {}
    for item in items:
        kind = item["type"]
        is_more = kind == "function_call" or (kind == "message" and item["role"] == "assistant")
        if kind == "reasoning":
            is_more = not turn.keys() - {"role", "reasoning"}
        elif kind == "message" and "content" in turn and "tool_calls" not in turn:
            is_more = False
        if turn and not is_more:
            yield _told_turn(turn)
            turn = {}
        if kind == "function_call_output":
            yield {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
        elif kind == "message" and item["role"] != "assistant":
            yield {"role": item["role"], "content": "".join(map(_text, item["content"]))}
        else:
            _add_to(turn, item)
    if turn:
        yield _told_turn(turn)


def _told_turn(turn: dict[str, Any]) -> dict[str, Any]:
    """The message of an assistant's turn, of which `_add_to` made the parts."""
    thoughts = {"reasoning": "".join(turn["reasoning"])} if "reasoning" in turn else {}
    said = "\n".join(filter(None, turn.get("content", ())))  # as a chat's answer has it
    return {**turn, "content": said, **thoughts}


def _add_to(turn: dict[str, Any], item: Item) -> None:
    """Add an item to an assistant's turn. Of its texts there may be thousands, which are joined once."""
    turn["role"] = "assistant"
    if item["type"] == "reasoning":
        thought = "".join(map(_text, item.get("content") or item["summary"]))
        if thought:
            turn.setdefault("reasoning", []).append(thought)
    elif item["type"] == "function_call":
        function = {"name": _chat_name(item["name"], item.get("namespace")), "arguments": item["arguments"]}
        turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
    else:
        said = "".join(map(_text, item["content"]))
        turn.setdefault("content", []).append(said)
