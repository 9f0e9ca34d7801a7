"""Functions that a model may call, as OpenAI's API has them: checked, told to the model, and read from its answers."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from cluster.errors import InvalidRequestError
from cluster.http.openai.events import Reading
from cluster.http.openai.fields import ToolChoice
from cluster.http.openai.schemas import ChatBody, ChatMessage, Tool, ToolCall
from cluster.http.openai.structured import OutputConstraint
from engine.text.formats import REASONING_FORMATS, Message, OutputFormats, ReasoningFormat, with_hermes_tools
from engine.text.tokenizer import Tokenizer

_MISTRAL_ID_CHARS: Final = 9  # its chat templates take no other number
_MAX_CALLS: Final = 8  # calls in an answer that must call
_TOKENS_OF_CALL: Final = 256  # an answer that may have few tokens may have fewer calls, so that each has so many
_DEFAULT_TOKENS: Final = 16_384  # tokens that an answer is taken to have if the client does not say


def reading_of(body: ChatBody, formats: OutputFormats, prompt_end: str) -> Reading | None:
    """How the answers to a chat are read; None: they are plain text. `prompt_end`: the end of the prompt, special
    tokens included.

    Raises InvalidRequestError if `tool_choice` cannot be followed.
    """
    choice: ToolChoice = body.tool_choice
    offered = frozenset(tool.function.name for tool in body.offered_tools())
    if choice.names is not None and (missing := choice.names - offered):
        raise _refusal(f"tool_choice names {min(missing)[:64]!r}, which is not among the tools. Send that tool, too.")
    if choice.mode == "required" and not offered:
        raise _refusal("tool_choice asks for a call, and there are no tools. Send some, or leave tool_choice out.")
    reasoning = formats.reasoning
    answer = answer_of(body)
    if answer is not None and answer.kind != "json":
        reasoning = None  # the answer is in the form that was asked for from its first character on
    if not offered and reasoning is None:
        return None
    return Reading(
        tools=formats.tools if offered else None,
        functions=offered if choice.names is None else choice.names,
        single=body.parallel_tool_calls is False or choice.once,
        reasoning=reasoning,
        reasons=reasoning is not None and prompt_end.rstrip().endswith(reasoning.opening),
        tells_reasoning=body.include_reasoning is not False,
    )


def bounds_thinking(reasoning: ReasoningFormat | None, tokenizer: Tokenizer) -> bool:
    """Whether a budget of a model's reasoning can be kept exactly: each of its marks is one token, or it does not
    reason."""
    marks = [] if reasoning is None else [reasoning.opening, reasoning.closing]
    return all(tokenizer.added_id_of(mark) is not None for mark in marks)


def thinking_of(body: ChatBody, reading: Reading | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """The fields of SamplingParams that end the reasoning at its budget; {} without a budget, or if the model does not
    reason, which keeps any budget. Raises InvalidRequestError if the budget cannot be kept exactly."""
    budget = body.thinking_token_budget
    if budget is None or budget < 0 or reading is None or reading.reasoning is None:
        return {}
    marks = [reading.reasoning.closing] if reading.reasons else [reading.reasoning.opening, reading.reasoning.closing]
    ids = [token_id for mark in marks if (token_id := tokenizer.added_id_of(mark)) is not None]
    if len(ids) < len(marks):
        raise InvalidRequestError(
            "This model has no tokens of their own for the marks of its reasoning, so a budget of it cannot be kept"
            " exactly. Leave the budget out: max_tokens bounds reasoning and answer together, and reasoning_effort says"
            " how much to think to models that heed it, as gpt-oss does.",
            param="thinking_token_budget",
            code="unsupported_value",
        )
    return {"thinking_budget": budget, "thinking_marks": tuple(ids)}


def _refusal(sentence: str, code: str = "invalid_value") -> InvalidRequestError:
    return InvalidRequestError(sentence, param="tool_choice", code=code)


def answer_of(body: ChatBody) -> OutputConstraint | None:
    """What the answer must be if it calls no function; None: any text."""
    wanted: OutputConstraint | None = body.response_format or body.structured_outputs
    return wanted


def constrained(body: ChatBody, reading: Reading | None, tokenizer: Tokenizer) -> OutputConstraint | None:
    """What an answer must be, with the reasoning and the calls that it may have. None: it must only be what `answer_of`
    says.

    Raises InvalidRequestError if no grammar can be made of what is asked for.
    """
    answer = answer_of(body)
    tools = body.callable_tools()
    forced, strict = body.tool_choice.mode == "required", any(tool.function.strict for tool in tools)
    if reading is None or not (forced or strict or answer is not None):
        return None
    if forced and answer is not None and answer.param != "structured_outputs":
        answer = None  # only calls are written, so the format does not matter; clients send both
    if tools and answer is not None and (forced or answer.kind != "json"):
        raise _refusal(
            f"A call and {answer.param} are both asked for, and one answer cannot be both. Send one of them.",
            "unsupported_value",
        )
    if answer is not None and answer.kind != "json":
        return None
    writer = _CallGrammar(reading, tokenizer, body.max_completion_tokens or body.max_tokens)
    try:
        lark = writer.free(tools) if strict and not forced and answer is None else writer.exact(tools, answer)
        text = json.dumps({"lark": lark, "schemas": writer.schemas})
    except (ValueError, RecursionError):
        return None  # the schema is a text that is no JSON; it will be refused when it is compiled by itself
    return OutputConstraint("calls", text, "tools" if answer is None else answer.param)


# At most a few spaces or lines stand between reasoning and answer: a small model would go on with them without end.
# PLAIN is a text that is not read as a call where that needs no mark.
_SPACES: Final = "TEXT: /(.|\\n)*/\nSPACE: /[ \\n]{0,4}/\nPLAIN: /[ \\t\\n\\r]*([^ \\t\\n\\r{](.|\\n)*)?/"


class _CallGrammar:
    """Writes calls in a model's own format as rules of llguidance's Lark, to be read back by the same parser."""

    def __init__(self, reading: Reading, tokenizer: Tokenizer, max_tokens: int | None) -> None:
        self._reading = reading
        self._tokenizer = tokenizer
        # A power of two, so that requests that differ little share a grammar.
        tokens = 1 << (max_tokens or _DEFAULT_TOKENS).bit_length() - 1
        self._max_calls = 1 if reading.single else min(_MAX_CALLS, max(1, tokens // _TOKENS_OF_CALL))
        self._chars = tokens // self._max_calls  # of one call: a token has one to four, and marks take some tokens, too
        self.schemas: list[tuple[Any, int | None]] = []

    def exact(self, tools: Sequence[Tool], answer: OutputConstraint | None) -> str:
        """The grammar of an answer that is either calls or `answer`, and nothing else. If the model reasons, its
        reasoning comes first."""
        ways: list[str] = []
        rules = [_SPACES]
        reasoning = self._reading.reasoning
        if tools:
            rules += self._calls(tools, forced=True)
            ways.append("calls")
        if answer is not None:
            mark = "" if reasoning is None else self._mark(reasoning.answer)
            ways.append(f"{mark} {self._json(json.loads(answer.text))}")
        start = f"({' | '.join(ways)})"
        if reasoning is not None:
            rules.append(self._up_to("thought", reasoning.closing))
            thought = f"thought {self._mark(reasoning.behind) or 'SPACE'}"
            start = (
                f"{thought} {start}"
                if self._reading.reasons
                else f"({self._mark(reasoning.opening)} {thought})? {start}"
            )
        return "\n".join([f"start: {start}", *rules])

    def free(self, tools: Sequence[Tool]) -> str:
        """The grammar of any text, behind any reasoning, in which calls to strict functions follow their schemas.
        Raises InvalidRequestError."""
        known, reasoning = self._reading.tools, self._reading.reasoning
        assert known is not None
        rules = [_SPACES, *self._calls(tools, forced=False)]
        if known.body == "harmony":
            reasoning = REASONING_FORMATS["harmony"]
            said = f"({self._mark(reasoning.opening)} | {self._mark('<|channel|>commentary<|message|>')})"
            behind = self._mark(reasoning.behind)
            start = f"({said} thought {behind})* (calls | {self._mark(reasoning.answer)} TEXT)"
            start = f"thought {behind} {start}" if self._reading.reasons else start
        else:
            text = "PLAIN" if known.bare else "TEXT"
            rules.append(self._up_to("before", known.opening, text))
            start = "(object | before object | PLAIN)" if known.bare else "(before call)* TEXT"
            # Marks that are text may stand in any text.
            if reasoning is not None and self._token_of(reasoning.closing) is not None:
                opening = self._mark(reasoning.opening)
                start = f"thought {start}" if self._reading.reasons else f"({opening} thought)? {start}"
            else:
                reasoning = None
        if reasoning is not None:
            rules.append(self._up_to("thought", reasoning.closing))
        return "\n".join([f"start: {start}", *rules])

    def _calls(self, tools: Sequence[Tool], *, forced: bool) -> list[str]:
        """The rules for calls: `calls`; `call`, which lacks the opening mark; `object`, one without any mark. If calls
        are `forced`, their arguments have bounds, so that they end.
        Raises InvalidRequestError for a format in which they cannot be forced."""
        known = self._reading.tools
        assert known is not None
        if known.body == "gemma":
            raise _refusal(
                "Calls in this model's format cannot be forced, nor made strict. Send tool_choice 'auto'.",
                "unsupported_value",
            )
        objects: list[str] = []
        key = "parameters" if known.bare else "arguments"
        for tool in tools:
            function = tool.function
            schema = function.parameters if forced or function.strict else None
            arguments = self._json({**(schema or {}), "type": "object"}, self._chars if forced else None)
            if known.body == "harmony":  # in this format an answer ends with a call
                objects.append(
                    f"{self._mark(f'{known.opening}{function.name} <|constrain|>json<|message|>')} {arguments}"
                )
                continue
            head = json.dumps(f'{{"name": "{function.name}", "{key}": ')
            objects.append(f'{head} {arguments} "}}"')
        rules = ["object: " + " | ".join(objects)]
        if known.body == "harmony":
            return [*rules, "calls: object"]
        if known.bare:
            return [*rules, "calls: object"]
        opening, several = self._mark(known.opening), f"{{0,{self._max_calls - 1}}}"
        if known.body == "mistral":
            further = f'(", " object){several}' if self._max_calls > 1 else ""
            return [*rules, f'call: "[" object {further} "]"', f"calls: {opening} call"]
        further = rf'("\n" {opening} call){several}' if self._max_calls > 1 else ""
        return [*rules, r'call: "\n" object "\n" ' + self._mark(known.closing), f"calls: {opening} call {further}"]

    def _json(self, schema: Any, chars: int | None = None) -> str:
        """The name of a rule for instances of a schema, of about `chars` characters; None: of any size."""
        self.schemas.append((schema, chars))
        return f"json_{len(self.schemas) - 1}"

    def _mark(self, mark: str) -> str:
        """The Lark expression for a mark, of which some parts may be special tokens and others text, as in
        `<|channel|>final<|message|>`."""
        parts = filter(None, re.split(r"(<\|[a-z]+\|>)", mark)) if self._token_of(mark) is None else [mark]
        found = [(part, self._token_of(part)) for part in parts]
        return " ".join(json.dumps(part) if token_id is None else f"<[{token_id}]>" for part, token_id in found)

    def _token_of(self, mark: str) -> int | None:
        """The id of a mark's token, if a grammar must name it by its id: llguidance gives no text to added tokens that
        are special or are called `<...>`, as Qwen's marks are. None: the mark is text."""
        token_id = self._tokenizer.added_id_of(mark)
        is_apart = re.fullmatch("<.*>", mark) is not None or bool(self._tokenizer.special_ids_of([mark]))
        return token_id if is_apart else None

    def _up_to(self, rule: str, mark: str, text: str = "TEXT") -> str:
        """A rule, of that name, for any text up to and with the first of these marks."""
        lazy = "[lazy]" if self._token_of(mark) is None else ""
        return f"{rule}{lazy}: {text} {self._mark(mark)}"


def told_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools that the model is told of, as chat templates know them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.function.name,
                **({} if tool.function.description is None else {"description": tool.function.description}),
                "parameters": tool.function.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def told_calls(message: ChatMessage, formats: OutputFormats, called: Mapping[str, str]) -> dict[str, Any]:
    """The members of a message that tell of calls, as chat templates know them: there, arguments are objects, and a
    result has its function's name. `called`: the functions of the calls before, by the calls' ids."""
    members: dict[str, Any] = {}
    if message.tool_calls:
        members["tool_calls"] = [_told_call(call, formats) for call in message.tool_calls]
        if formats.tools.body == "harmony" and not message.content:  # its template takes content or this, not both
            members["thinking"] = message.reasoning or message.reasoning_content
    if message.tool_call_id is not None:
        members["tool_call_id"] = _id(message.tool_call_id, formats)
        members["name"] = message.name or called.get(message.tool_call_id)
    return members


def _told_call(call: ToolCall, formats: OutputFormats) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    try:
        value = json.loads(arguments or "{}")
        arguments = value if isinstance(value, dict) else arguments
    except (ValueError, RecursionError):
        pass  # arguments that are no JSON object are told as the model wrote them
    return {
        "id": _id(call.id, formats),
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _id(call_id: str, formats: OutputFormats) -> str:
    return call_id[-_MISTRAL_ID_CHARS:] if formats.tools.body == "mistral" else call_id


def with_tools(
    messages: list[Message], tools: Sequence[Mapping[str, Any]], formats: OutputFormats
) -> tuple[list[Message], dict[str, Any]]:
    """The messages, and the variables for the chat template, that together tell a model of its tools."""
    if not formats.in_template or (formats.apart and not tools):  # calls of before are told of, too
        return with_hermes_tools(messages, tools), {}
    if formats.apart:  # Hermes 3's takes a description for granted
        functions = [{"name": tool["function"]["name"], "description": "", **tool["function"]} for tool in tools]
        tools = [{**tool, "function": function} for tool, function in zip(tools, functions, strict=True)]
    if has_one_call_each(formats):
        messages = _one_call_each(messages)
    return messages, {"tools": list(tools)} if tools else {}


def has_one_call_each(formats: OutputFormats) -> bool:
    """Whether the chat template is given messages with at most one call in each, whatever the client's have."""
    return formats.in_template and (formats.tools.bare or formats.tools.body == "harmony")


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """The messages with at most one call in each, followed by its results. Of several calls in one message Llama's
    template refuses all, and gpt-oss's tells the first. `cluster.http.prompts` bounds how many there may be."""
    groups: list[list[Message]] = [[]]  # messages that stay together
    # By the calls' ids, of the calls that no other message is behind yet. An id may come twice.
    waiting: dict[str, deque[list[Message]]] = {}
    answered: dict[str, list[Message]] = {}
    for message in messages:
        if message["role"] == "tool":
            call_id = message["tool_call_id"]
            if of_call := waiting.get(call_id):
                answered[call_id] = of_call.popleft()
            answered.get(call_id, groups[-1]).append(message)
            continue
        calls = message.get("tool_calls", [])
        parts = [{**message, "tool_calls": calls[:1]} if calls else message]
        parts += [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls[1:]]
        groups += [[part] for part in parts]
        if not calls:
            waiting, answered = {}, {}
        for call, group in zip(calls, groups[-len(parts) :], strict=False):
            waiting.setdefault(call["id"], deque()).append(group)
    return [message for group in groups for message in group]
