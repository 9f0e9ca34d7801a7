"""How model families write calls of functions and reasoning into their text, as data; and which of them a checkpoint
uses.

`engine.text.output` reads text in these formats. A new family is an entry of `TOOL_FORMATS` or `REASONING_FORMATS`,
and a test of its own text in `tests/engine/text/test_output.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """What stands around a call and in it. `opening` may be left out at an answer's start where `bare`; a `closing` of
    "" means that the call's own end is its end.

    Bodies: `json`: an object of `name` and `arguments` (or `parameters`). `mistral`: a list of such objects, or a name
    and the arguments' object. `gemma`: `call:name{key:value}`, whose texts stand in `quote`. `harmony`: see
    `engine.text.harmony`.
    """

    opening: str
    closing: str = ""
    body: Literal["json", "mistral", "gemma", "harmony"] = "json"
    bare: bool = False
    quote: str = ""
    template_words: tuple[str, ...]  # one of which a chat template has that writes this format
    foreign_words: tuple[str, ...] = ()  # that it must not have

    @property
    def marks(self) -> frozenset[str]:
        """Tokens that carry the format, which a tokenizer may count as special."""
        if self.body == "harmony":
            return HARMONY_MARKS
        inside = ("[ARGS]", "[CALL_ID]") if self.body == "mistral" else ()
        return frozenset(filter(None, (self.opening, self.closing, self.quote, *inside)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The marks around what a model thinks before it answers. What stands `behind` it before anything else comes, and
    before an `answer` that is no call, is written in `harmony` alone."""

    opening: str
    closing: str
    behind: str = ""
    answer: str = ""
    body: Literal["text", "harmony"] = "text"
    template_words: tuple[str, ...]

    @property
    def marks(self) -> frozenset[str]:
        return HARMONY_MARKS if self.body == "harmony" else frozenset((self.opening, self.closing))


HARMONY_MARKS: Final = frozenset(
    {"<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"}
)


HERMES: Final = ToolFormat(
    opening="<tool_call>",
    closing="</tool_call>",
    template_words=("<tool_call>",),
    foreign_words=("<function=", "<arg_key>"),  # Qwen3-Coder's and GLM's, between the same marks
)
TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    "hermes": HERMES,  # also Qwen 2.5 and Qwen 3
    "mistral": ToolFormat(opening="[TOOL_CALLS]", body="mistral", template_words=("[TOOL_CALLS]",)),
    "gemma": ToolFormat(
        opening="<start_function_call>",
        closing="<end_function_call>",
        body="gemma",
        quote="<escape>",
        template_words=("<start_function_call>",),
    ),
    "llama": ToolFormat(
        opening="<|python_tag|>",
        bare=True,
        template_words=("<|python_tag|>", '{"name": function name, "parameters":'),
    ),
    "harmony": ToolFormat(  # gpt-oss
        opening="<|channel|>commentary to=functions.",
        closing="<|call|>",
        body="harmony",
        template_words=("<|channel|>commentary",),
    ),
}
REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    "think": ReasoningFormat(opening="<think>", closing="</think>", template_words=("<think>", "</think>")),
    "mistral": ReasoningFormat(opening="[THINK]", closing="[/THINK]", template_words=("[THINK]",)),
    "harmony": ReasoningFormat(
        opening="<|channel|>analysis<|message|>",
        closing="<|end|>",
        behind="<|start|>assistant",
        answer="<|channel|>final<|message|>",
        body="harmony",
        template_words=("<|channel|>analysis",),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormats:
    """How one model writes. `in_template`: its chat template is told of tools; else the prompt says it in words.
    `apart`: that template is for chats with tools alone, and the other one knows nothing of calls."""

    tools: ToolFormat
    in_template: bool
    apart: bool
    reasoning: ReasoningFormat | None


ToolFormatName = Literal["auto", "hermes", "mistral", "gemma", "llama", "harmony"]
ReasoningFormatName = Literal["auto", "none", "think", "mistral", "harmony"]


def choose_tool_format(
    name: ToolFormatName, chat_template: str, response_template: Mapping[str, Any] | None
) -> ToolFormat | None:
    """The format that was named; else what the checkpoint declares, else what its chat template writes. None: the model
    knows no tools, as far as one can see."""
    if name != "auto":
        return TOOL_FORMATS[name]
    declared = _declared(response_template, "tool_calls")
    if declared is not None and declared.get("content") == "json":
        return ToolFormat(opening=declared["open"], closing=declared["close"], template_words=())
    for known in TOOL_FORMATS.values():
        if _writes(chat_template, known):
            return known
    return None


def choose_reasoning_format(
    name: ReasoningFormatName, chat_template: str, response_template: Mapping[str, Any] | None
) -> ReasoningFormat | None:
    """Choose how reasoning is marked, as `choose_tool_format` does for calls."""
    if name != "auto":
        return REASONING_FORMATS.get(name)
    declared = _declared(response_template, "thinking")
    if declared is not None and declared.get("content", "text") == "text":
        return ReasoningFormat(opening=declared["open"], closing=declared["close"], template_words=())
    return next((known for known in REASONING_FORMATS.values() if _has_any(chat_template, known.template_words)), None)


def _declared(response_template: Mapping[str, Any] | None, field: str) -> Mapping[str, Any] | None:
    """A field of a checkpoint's response template between two plain texts. Those of regular expressions are not read:
    they would run on the gateway's loop, and come from anybody."""
    fields = (response_template or {}).get("fields")
    found = fields.get(field) if isinstance(fields, Mapping) else None
    if not isinstance(found, Mapping):
        return None
    plain = all(isinstance(found.get(key), str) and found[key] for key in ("open", "close"))
    return found if plain else None


def _writes(template: str, known: ToolFormat) -> bool:
    return _has_any(template, known.template_words) and not _has_any(template, known.foreign_words)


def _reads_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


def _has_any(text: str, words: Sequence[str]) -> bool:
    return any(word in text for word in words)


def output_formats(
    tools: ToolFormatName,
    reasoning: ReasoningFormatName,
    chat_template: str,
    tools_template: str,
    response_template: Mapping[str, Any] | None,
) -> OutputFormats:
    """The formats of a checkpoint's output, as far as the two names leave it to that. `tools_template` is the chat
    template of chats with tools."""
    chosen = choose_tool_format(tools, tools_template, response_template)
    in_template = chosen is not None and _reads_tools(tools_template)
    if chosen is HERMES and not _writes(tools_template, HERMES):  # it was named, and the template would say otherwise
        in_template = False
    return OutputFormats(
        tools=chosen or HERMES,
        in_template=in_template,
        apart=in_template and not _reads_tools(chat_template),
        reasoning=choose_reasoning_format(reasoning, chat_template, response_template),
    )


# Where a model's chat template knows no tools, the prompt says it all in Hermes' words, which most models have read.

_HERMES_TOOLS: Final = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def with_hermes_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages of a chat with the tools in its system message, calls as an assistant's text, and their results as
    a user's."""
    plain: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            response = f"<tool_response>\n{message['content']}\n</tool_response>"
            if plain and plain[-1].get("responds"):  # results of calls side by side are one turn
                plain[-1]["content"] += "\n" + response
            else:
                plain.append({"role": "user", "content": response, "responds": True})
        else:
            calls = [_hermes_call(call["function"]) for call in message.get("tool_calls") or ()]
            text = "\n".join(filter(None, (message.get("content"), *calls)))
            plain.append({**message, "content": text})
            plain[-1].pop("tool_calls", None)
    for message in plain:
        message.pop("responds", None)
    if not tools:
        return plain
    told = _HERMES_TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{told}"}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


def _hermes_call(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {written}}}\n</tool_call>'
