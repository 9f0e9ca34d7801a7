"""What a choice says as a stream of events, and OpenAI's chat answers made from it.

An answer of which calls or reasoning are to be read has a `Reading`. Its choices' deltas go through a parser each; the
events that come out (`engine.text.output.OutputEvent`) are what every API's shape is a translation of. Chats without
have no parser and no events.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from cluster.http.openai.choice import Delta
from engine.text.formats import ReasoningFormat, ToolFormat
from engine.text.harmony import output_parser
from engine.text.output import EventKind, OutputEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the choices of one request are read; `cluster.http.openai.tools` makes it. `functions`: names of functions
    that may be called; `single`: at most one call is read. `reasons`: the prompt ends inside the reasoning;
    `tells_reasoning`: it is a part of the answer."""

    tools: ToolFormat | None
    functions: frozenset[str]
    single: bool
    reasoning: ReasoningFormat | None
    reasons: bool
    tells_reasoning: bool = True

    @property
    def marks(self) -> frozenset[str]:
        """The marks whose special tokens have to reach the parser as text."""
        formats = (self.tools, self.reasoning)
        return frozenset[str]().union(*(known.marks for known in formats if known is not None))


PLAIN: Final = Reading(tools=None, functions=frozenset(), single=False, reasoning=None, reasons=False)
"""Reads answers that are plain text, for shapes that are made of events alone."""


class ChoiceEvents:
    """Makes the events of one choice out of its deltas. Takes them in order, or the sum of all at once. `one_text`: all
    texts of the choice are told as one, and all of its reasoning as one; in either, what follows something else begins
    a new line."""

    def __init__(self, reading: Reading, *, one_text: bool = False) -> None:
        self._parser = output_parser(
            tools=reading.tools,
            functions=reading.functions,
            single=reading.single,
            reasoning=reading.reasoning,
            reasons=reading.reasons,
        )
        self._tells_reasoning = reading.tells_reasoning
        self._one_text = one_text
        self._said: set[EventKind] = set()
        self._last: EventKind = "text"

    @property
    def can_call(self) -> bool:
        """Whether a client can make the calls of an answer that is over: there are some, and the last one is whole."""
        return self._parser.num_calls > 0 and not self._parser.is_cut

    def read(self, delta: Delta) -> list[OutputEvent]:
        events = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.finish()
        if self._one_text:
            self._part_texts(events)
        return events if self._tells_reasoning else [event for event in events if event.kind != "reasoning"]

    def _part_texts(self, events: Sequence[OutputEvent]) -> None:
        for event in events:
            if event.kind in ("text", "reasoning"):
                if event.kind in self._said and self._last != event.kind:
                    event.text = "\n" + event.text
                self._said.add(event.kind)
            self._last = event.kind


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def chat_members(events: Sequence[OutputEvent]) -> dict[str, Any]:
    """The members that events add to a chat's message, as OpenAI's `delta` has them.
    Calls that are opened get their ids here."""
    texts: dict[str, list[str]] = {"text": [], "reasoning": []}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if event.kind == "call":
            function = {"name": event.text, "arguments": ""}
            calls[event.index] = {"id": new_call_id(), "type": "function", "function": function}
        elif event.kind == "arguments":
            call = calls.setdefault(event.index, {"function": {"arguments": ""}})
            call["function"]["arguments"] += event.text
        else:
            texts[event.kind].append(event.text)
    members: dict[str, Any] = {}
    if texts["reasoning"]:
        members["reasoning"] = members["reasoning_content"] = "".join(texts["reasoning"])
    if texts["text"]:
        members["content"] = "".join(texts["text"])
    if calls:
        members["tool_calls"] = [{"index": index, **call} for index, call in calls.items()]
    return members


def chat_message(events: Sequence[OutputEvent], *, reasons: bool) -> dict[str, Any]:
    """A whole chat message made of a choice's events.
    `reasons`: it has a member for its reasoning, even if there is none."""
    members = chat_members(events)
    calls = members.get("tool_calls", [])
    message: dict[str, Any] = {"role": "assistant", "content": members.get("content", None if calls else "")}
    message["refusal"] = None
    if reasons:
        message["reasoning"] = message["reasoning_content"] = members.get("reasoning")
    if calls:
        message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
    return message
