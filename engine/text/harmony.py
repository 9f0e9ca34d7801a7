"""Harmony, in which gpt-oss writes: an answer is a row of messages, each on a channel.

    <|channel|>analysis<|message|>It asks for the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Paris"}<|call|>

What is said on `analysis` is reasoning, on `final` the answer. On `commentary` the model says to its user what it is
about to do, or calls a function, whose name stands in the header, behind the channel's or the role's. The prompt ends
with the first `<|start|>assistant`.

`output_parser` makes the parser of a model, whether this is its format or another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Final, Literal

from engine.text.formats import ReasoningFormat, ToolFormat
from engine.text.output import EventReader, OutputParser, mark_start

_HEADER_STARTS: Final = ("<|start|>", "<|channel|>", " to=")
_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_MAX_HEADER_CHARS: Final = 256
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_TRAINED: Final = ("python", "browser")
_RECIPIENT: Final = re.compile(r"\bto=(functions\.)?([A-Za-z0-9_.-]+)")


def output_parser(
    *,
    tools: ToolFormat | None = None,
    functions: Collection[str] = (),
    single: bool = False,
    reasoning: ReasoningFormat | None = None,
    reasons: bool = False,
) -> EventReader:
    """See `OutputParser`."""
    if any(known is not None and known.body == "harmony" for known in (tools, reasoning)):
        return HarmonyParser(functions=functions, single=single, is_split=reasoning is not None, reasons=reasons)
    return OutputParser(tools=tools, functions=functions, single=single, reasoning=reasoning, reasons=reasons)


class HarmonyParser(EventReader):
    """Reads the harmony format. Without `is_split` what is on the channel of reasoning is text, too. Of a header that
    was cut off nothing is told."""

    def __init__(
        self, *, functions: Collection[str] = (), single: bool = False, is_split: bool = True, reasons: bool = False
    ) -> None:
        super().__init__()
        self._functions, self._single, self._is_split = functions, single, is_split
        self._part: Literal["header", "text", "reasoning", "arguments", "dropped"] = "header"
        self._arguments: list[str] = []  # of the last call
        self._is_past_reasoning = False
        if reasons:
            self._begin("<|channel|>analysis")

    @property
    def is_past_reasoning(self) -> bool:
        return self._is_past_reasoning

    def _end(self) -> None:
        if self._part != "header":
            self._say(self._buffer)
            self._end_message()
            self.is_cut = self._part == "arguments" and not _is_whole("".join(self._arguments))

    def _step(self) -> bool:
        return self._in_header() if self._part == "header" else self._in_body()

    def _in_header(self) -> bool:
        header, mark, rest = self._buffer.partition(_MESSAGE)
        if not mark:
            header = header[: mark_start(header, _MESSAGE)]
        if (
            not any(start.startswith(header[: len(start)]) for start in _HEADER_STARTS)
            or len(header) > _MAX_HEADER_CHARS
        ):
            self._begin("")  # a text without any
            return True
        if mark:
            self._buffer = rest
            self._begin(header)
        return bool(mark)

    def _begin(self, header: str) -> None:
        channel, addressed = _CHANNEL.search(header), _RECIPIENT.search(header)
        is_thought = channel is not None and channel[1] == "analysis"
        recipient = None if addressed is None else addressed[2]
        # A function may be called by its name alone. Other names are of tools that the model was trained with, to which
        # it thinks aloud whether it has them or not.
        if recipient is not None and addressed is not None and addressed[1] is None:
            is_trained = is_thought and recipient.partition(".")[0] in _TRAINED
            recipient = None if is_trained or recipient not in self._functions else recipient
        self._is_parted = True
        if recipient is not None and recipient in self._functions:
            self.num_calls += 1
            self._part = "dropped" if self._single and self.num_calls > 1 else "arguments"
            if self._part == "arguments":
                self._tell("call", recipient, self.num_calls - 1)
                self._arguments.clear()
        elif is_thought and self._is_split and recipient is None:
            self._part, self.has_reasoned = "reasoning", True
        else:
            self._part = "text"
            if recipient is not None:  # nobody whom this request knows
                self._say(header + _MESSAGE)
        self._is_past_reasoning |= self._part != "reasoning"

    def _in_body(self) -> bool:
        found = [(at, end) for end in _ENDS if (at := self._buffer.find(end)) >= 0]
        if found:
            at, end = min(found)
            self._say(self._buffer[:at])
            self._buffer = self._buffer[at + len(end) :]
            self._end_message()
            self._part = "header"
            return True
        at = min(mark_start(self._buffer, end) for end in _ENDS)
        self._say(self._buffer[:at])
        self._buffer = self._buffer[at:]
        return False

    def _end_message(self) -> None:
        if self._part == "arguments" and not self._arguments:
            self._say("{}")

    def _say(self, text: str) -> None:
        if not text or self._part == "header" or self._part == "dropped":
            return
        if self._part == "arguments":
            self._arguments.append(text)
        self._tell(self._part, text, self.num_calls - 1 if self._part == "arguments" else 0)


def _is_whole(arguments: str) -> bool:
    """Whether they end where the answer does: the mark behind them may be the token that ends it."""
    try:
        return isinstance(json.loads(arguments, strict=False), dict)
    except (ValueError, RecursionError):
        return False
