"""A model's text as a stream of events: what it says, what it thinks, which functions it calls and with what.

`OutputParser` takes the text of one answer as it comes. However the text is cut into pieces, the events put together
are the same, so a streamed answer says what a whole one does. What is no call after all stays text: nothing is lost.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, TypeVar

from engine.text.formats import ReasoningFormat, ToolFormat

MAX_NAME_CHARS: Final = 128  # of a function: Anthropic's bound; OpenAI's is 64
_MAX_HELD_CHARS: Final = 2**16  # of a call whose function is not known yet; beyond, it is text
_PIECE_CHARS: Final = 4_096  # taken at once, so that a long text is not copied for each of its calls
_MAX_DEPTH: Final = 200  # of arguments, as of a request's body
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]")
_SPACE: Final = " \t\n\r"

T = TypeVar("T")
EventKind = Literal["text", "reasoning", "call", "arguments"]


@dataclass(slots=True)
class OutputEvent:
    """`text` and `reasoning`: more of either. `call`: one is opened, `text` is its function's name. `arguments`: more
    of the JSON text of that call's arguments. `index` counts the calls of an answer."""

    kind: EventKind
    text: str
    index: int = 0


class EventReader(ABC):
    """Reads one answer. `feed` takes each piece of its text, `finish` follows the last one. Texts around a call that is
    dropped are lines of one text, and so are messages of one kind in a row."""

    _holds_space: ClassVar[bool] = False  # where only space waits, more of it decides nothing

    def __init__(self) -> None:
        self._buffer = ""  # not decided yet
        self._more_space: list[str] = []  # behind it: a model may write a million spaces, and each token costs its own
        self._is_space = False  # all that waits is
        self._events: list[OutputEvent] = []
        self._last: EventKind | None = None  # what was told last
        self._is_parted = False  # what comes is apart from it: by a call that was dropped, or in a message of its own
        self.num_calls = 0
        self.is_cut = False  # the answer ended in the middle of a call's arguments, by a stop string or by itself
        self.has_reasoned = False

    @property
    @abstractmethod
    def is_past_reasoning(self) -> bool:
        """What comes from here on is none."""

    def feed(self, text: str) -> list[OutputEvent]:
        """What has become certain."""
        for at in range(0, len(text), _PIECE_CHARS):
            piece = text[at : at + _PIECE_CHARS]
            if self._is_space and not piece.strip(_SPACE):
                self._more_space.append(piece)
                continue
            self._join_space()
            self._buffer += piece
            while self._buffer and self._step():
                pass
            self._is_space = self._holds_space and bool(self._buffer) and not self._buffer.strip(_SPACE)
        return self._taken()

    def finish(self) -> list[OutputEvent]:
        """What had to wait; nothing may follow."""
        self._join_space()
        self._end()
        self._buffer = ""
        return self._taken()

    def _join_space(self) -> None:
        if self._more_space:
            self._buffer += "".join(self._more_space)
            self._more_space.clear()

    @abstractmethod
    def _step(self) -> bool:
        """Do one thing about what waits, of which there is some; False where more has to come first."""

    @abstractmethod
    def _end(self) -> None:
        """Tell of what waits: it is all."""

    def _tell(self, kind: EventKind, text: str, index: int = 0) -> None:
        if not text:
            return
        if self._is_parted and kind == self._last and kind in ("text", "reasoning"):
            text = "\n" + text
        self._last, self._is_parted = kind, False
        last = self._events[-1] if self._events else None
        if last is not None and kind != "call" and (last.kind, last.index) == (kind, index):
            last.text += text
        else:
            self._events.append(OutputEvent(kind, text, index))

    def _taken(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return events


class OutputParser(EventReader):
    """A space waits for what follows it: beside a call or a mark of reasoning it is dropped. A call that has begun
    stays as far as it came.

    Without `tools` nothing is a call; a call is one only of the `functions`. With `single` all calls but the first are
    dropped. `reasons`: the prompt ends inside the reasoning.
    """

    _holds_space = True

    def __init__(
        self,
        *,
        tools: ToolFormat | None = None,
        functions: Collection[str] = (),
        single: bool = False,
        reasoning: ReasoningFormat | None = None,
        reasons: bool = False,
    ) -> None:
        super().__init__()
        self._tools, self._functions, self._single = tools, functions, single
        self._reasoning = reasoning
        self._reasons = reasons and reasoning is not None
        self._at_start = not self._reasons  # nothing but space has been read, so reasoning may begin
        self._bare = tools is not None and tools.bare  # a call may begin here without its mark
        self._drop_space = self._reasons
        self._calls: _Calls | None = None
        self.has_reasoned = self._reasons

    @property
    def is_past_reasoning(self) -> bool:
        return not (self._reasons or self._at_start)

    def _end(self) -> None:
        if self._calls is not None:
            self.is_cut = self._calls.in_arguments
            self._leave(self._calls.cut_off(), "")
        if self._reasons:
            self._say("reasoning", self._buffer.rstrip(_SPACE))
        else:
            self._say("text", self._buffer)

    def _step(self) -> bool:
        if self._calls is not None:
            return self._in_call(self._calls)
        return self._thinking() if self._reasons else self._talking()

    def _in_call(self, calls: _Calls) -> bool:
        told, left = calls.feed(self._buffer)
        self._buffer = ""
        for name, arguments in told:
            if name is not None:
                self.num_calls += 1
            if self.num_calls == 1 or not self._single:
                self._say("call", name or "", self.num_calls - 1)
                self._say("arguments", "".join(arguments), self.num_calls - 1)
            else:
                self._is_parted = True
        if left is None:
            return False
        self._leave(*left)
        return True

    def _leave(self, text: str, left: str) -> None:
        """The calls are over, or there was none: some of what was read is text after all, some is to be read again."""
        assert self._calls is not None
        self._bare &= self._calls.num_opened > 0
        self._drop_space = self._calls.num_opened > 0
        self._calls = None
        self._say("text", text)
        self._buffer = left

    def _thinking(self) -> bool:
        assert self._reasoning is not None
        before, mark, after = self._buffer.partition(self._reasoning.closing)
        if mark:
            self._say("reasoning", before.rstrip(_SPACE))
            self._buffer, self._reasons, self._drop_space = after, False, True
            return True
        self._say("reasoning", self._certain(self._reasoning.closing))
        return False

    def _talking(self) -> bool:
        begun = self._buffer.lstrip(_SPACE)
        if self._drop_space:
            self._buffer = begun
        if not begun:
            return False  # only space: what follows decides
        if self._at_start and self._reasoning is not None:
            opening = self._reasoning.opening
            if begun.startswith(opening):
                self._buffer = begun[len(opening) :]
                self._at_start, self._reasons, self._drop_space = False, True, True
                self.has_reasoned = True
                return True
            if opening.startswith(begun):
                return False
        self._at_start = False
        if self._tools is None:
            self._say("text", self._buffer)
            self._buffer = ""
            return False
        if self._bare and self.num_calls and begun[0] == ";":  # stands between two
            self._buffer = begun[1:]
            return True
        opening = self._tools.opening
        if self._bare and begun[0] == "{":
            space = self._buffer[: -len(begun)]
            self._calls, self._buffer = _Calls(self._tools, space, self._functions), begun
            return True
        self._bare &= opening.startswith(begun[: len(opening)])
        before, mark, after = self._buffer.partition(opening)
        if mark:
            text = before.rstrip(_SPACE)
            self._say("text", text)
            self._calls, self._buffer = _Calls(self._tools, before[len(text) :] + mark, self._functions), after
            return True
        self._say("text", self._certain(opening))
        return False

    def _certain(self, mark: str) -> str:
        """What of the buffer cannot be the beginning of a mark, nor space before one; the rest stays."""
        text = self._buffer
        end = len(text[: mark_start(text, mark)].rstrip(_SPACE))
        self._buffer = text[end:]
        return text[:end]

    def _say(self, kind: EventKind, text: str, index: int = 0) -> None:
        if kind in ("text", "reasoning") and self._drop_space:
            text = text.lstrip(_SPACE)
            self._drop_space = not text
        self._tell(kind, text, index)


def mark_start(text: str, mark: str) -> int:
    """The index at which the longest beginning of `mark` that `text` ends with starts; the text's length where there is
    none."""
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0:
        if mark.startswith(text[at:]):
            return at
        at = text.find(mark[0], at + 1)
    return len(text)


class _NoCallError(Exception):
    """What was read is no call, or no longer one."""


Reader = Generator[None, str, T]
"""Is sent one character after the other, and returns what it read; it raises _NoCallError at the first wrong one."""

_MEMBERS: Final = ("name", "arguments", "parameters", "id", "type")
_ARGUMENTS: Final = ("arguments", "parameters")


class _Calls:
    """What follows an opening mark: one call up to its closing mark, or Mistral's list of calls."""

    def __init__(self, tools: ToolFormat, opening: str, functions: Collection[str]) -> None:
        self._tools = tools
        self._functions = functions
        self._held = [opening]  # that would be text if this were no call: a mark, and space before it
        self._told: list[tuple[str | None, list[str]]] = []
        self.in_arguments = False  # what is read is told as it comes
        self.num_opened = 0
        self._reader = self._body()
        next(self._reader)

    def feed(self, text: str) -> tuple[list[tuple[str | None, list[str]]], tuple[str, str] | None]:
        """(what is known now, None while more is to come). What is known: names of functions that are called, each with
        pieces of its arguments; None in place of a name: more of the last one's. At the end: what is text after all,
        and what was not read. Nothing is read twice, so the work is linear in the text."""
        end: tuple[str, str] | None = None
        for at, character in enumerate(text):
            self._held.append(character)
            try:
                self._reader.send(character)
            except StopIteration:
                end = "", text[at + 1 :]
                break
            except _NoCallError:
                del self._held[-1]
                end = "".join(self._held), text[at:]
                break
            if self.in_arguments:
                self._held.clear()
            elif len(self._held) > _MAX_HELD_CHARS:
                end = "".join(self._held), text[at + 1 :]
                break
        told, self._told = self._told, []
        return told, end

    def cut_off(self) -> str:
        """What is text after all, where nothing more comes."""
        held = "".join(self._held)
        return "" if self.num_opened and self._tools.closing.startswith(held.strip(_SPACE)) else held

    def _open(self, name: str) -> None:
        self.num_opened += 1
        self._told.append((name, []))
        self._held.clear()

    def _tell(self, arguments: str) -> None:
        if not self._told:
            self._told.append((None, []))
        self._told[-1][1].append(arguments)

    def _body(self) -> Reader[None]:
        character = yield from _after_space((yield))
        if self._tools.body == "gemma":
            yield from self._gemma(character)
            return
        if self._tools.body == "mistral" and character == "[":
            character = ","
            while character == ",":
                yield from self._object((yield from _after_space((yield))))
                character = yield from _after_space((yield))
            _require(character == "]")
        elif self._tools.body == "mistral" and character != "{":
            yield from self._named(character)
        else:
            yield from self._object(character)
        if self._tools.closing:
            yield from _literal(self._tools.closing, (yield from _after_space((yield))))

    def _object(self, character: str) -> Reader[None]:
        """`{"name": "f", "arguments": {...}}`, in any order. The call is opened as soon as name and arguments begin."""
        _require(character == "{")
        name: str | None = None
        arguments: str | None = None
        opened = False
        while character != "}":
            character = yield from _after_space((yield))
            _require(character == '"')
            key = _loaded((yield from _raw(character)))
            _require(key in _MEMBERS)
            _require((yield from _after_space((yield))) == ":")
            character = yield from _after_space((yield))
            if key in _ARGUMENTS and name is not None and character == "{":
                _require(not opened and arguments is None)
                opened = True
                yield from self._arguments(name, character)
                character = yield
            else:
                raw, character = yield from _raw_and_next(character)
                value = _loaded(raw)
                if key == "name":
                    _require(name is None and isinstance(value, str) and value in self._functions)
                    name = value
                elif key in _ARGUMENTS:
                    _require(not opened and arguments is None)
                    arguments = _arguments_text(raw, value)
            character = yield from _after_space(character)
            _require(character in ",}")
        if not opened:
            _require(name is not None)
            assert name is not None
            self._open(name)
            self._tell(arguments or "{}")
        self._held.clear()

    def _named(self, character: str) -> Reader[None]:
        """`f[CALL_ID]1234[ARGS]{...}`, of which the marks may be left out."""
        name, character = yield from _word(character)
        while character == "[":
            mark = yield from _until("]", character)
            _require(mark in self._tools.marks)
            character = yield
            if mark != "[ARGS]":
                _, character = yield from _word(character)
        character = yield from _after_space(character)
        _require(character == "{" and name in self._functions)
        yield from self._arguments(name, character)

    def _arguments(self, name: str, character: str) -> Reader[None]:
        """An object, told as it comes."""
        self._open(name)
        self.in_arguments = True
        yield from _nested(character, self._tell)
        self.in_arguments = False
        self._held.clear()

    def _gemma(self, character: str) -> Reader[None]:
        """`call:f{place:<escape>Paris<escape>,days:3}`"""
        yield from _literal("call:", character)
        name, character = yield from _word((yield))
        _require(name in self._functions)
        arguments = yield from _gemma_object(character, self._tools.quote, 0)
        if self._tools.closing:
            yield from _literal(self._tools.closing, (yield from _after_space((yield))))
        self._open(name)
        self._tell(json.dumps(arguments, ensure_ascii=False))


def _require(fits: bool) -> None:
    if not fits:
        raise _NoCallError


def _loaded(raw: str) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise _NoCallError from None


def _arguments_text(raw: str, value: Any) -> str:
    """The text of arguments that were read as a whole: an object, the JSON text of one, or null."""
    if isinstance(value, str):
        raw, value = value, _loaded(value)
    _require(value is None or isinstance(value, dict))
    return "{}" if value is None else raw


def _after_space(character: str) -> Reader[str]:
    """The next character that is no space."""
    while character in _SPACE:
        character = yield
    return character


def _literal(expected: str, character: str) -> Reader[None]:
    for at, wanted in enumerate(expected):
        if at:
            character = yield
        _require(character == wanted)


def _until(last: str, character: str) -> Reader[str]:
    """All up to and with a character."""
    read = character
    while character != last:
        _require(len(read) <= MAX_NAME_CHARS)
        character = yield
        read += character
    return read


def _word(character: str) -> Reader[tuple[str, str]]:
    """(a name, what comes after it)"""
    word = ""
    while _NAME.fullmatch(character):
        word += character
        _require(len(word) <= MAX_NAME_CHARS)
        character = yield
    return word, character


def _raw(first: str) -> Reader[str]:
    """A text, an object or a list, as it is written."""
    raw: list[str] = []
    yield from _nested(first, raw.append)
    return "".join(raw)


def _raw_and_next(character: str) -> Reader[tuple[str, str]]:
    """(any value as it is written, what comes after it)"""
    if character in '"{[':
        raw = yield from _raw(character)
        return raw, (yield)
    raw = ""
    while character not in ",}] \t\r\n":
        raw += character
        character = yield
    return raw, character


def _nested(character: str, told: Callable[[str], None]) -> Reader[None]:
    """A text, an object or a list, of which only brackets and quotes are looked at. Each character is `told`."""
    closing: list[str] = []
    while True:
        if character in "{[":
            _require(len(closing) < _MAX_DEPTH)
            closing.append("}" if character == "{" else "]")
        elif character in "}]":
            _require(closing.pop() == character)
        told(character)
        if character == '"':
            character = ""
            while character != '"':
                character = yield
                told(character)
                if character == "\\":
                    told((yield))
        if not closing:
            return
        character = yield


def _gemma_object(character: str, quote: str, depth: int) -> Reader[dict[str, Any]]:
    _require(character == "{" and depth < _MAX_DEPTH // 4)
    found: dict[str, Any] = {}
    character = yield from _after_space((yield))
    while character != "}":
        if character == quote[0]:
            key, character = yield from _gemma_text(character, quote)
        else:
            key = (yield from _until(":", character))[:-1]
            character = ":"
        _require(character == ":" and key not in found)
        found[key], character = yield from _gemma_value((yield), quote, depth)
        character = yield from _after_space(character)
        _require(character in ",}")
        if character == ",":
            character = yield from _after_space((yield))
    return found


def _gemma_value(character: str, quote: str, depth: int) -> Reader[tuple[Any, str]]:
    """Read a value: a text between `quote`s, an object, a list, or a number or word as in JSON. Returns it, and the
    character after it. `depth`: of the objects and lists around it."""
    character = yield from _after_space(character)
    if character == quote[0]:
        return (yield from _gemma_text(character, quote))
    if character == "{":
        found = yield from _gemma_object(character, quote, depth + 1)
        return found, (yield)
    if character == "[":
        items = yield from _gemma_list(quote, depth)
        return items, (yield)
    raw, character = yield from _raw_and_next(character)
    return _loaded(raw), character


def _gemma_list(quote: str, depth: int) -> Reader[list[Any]]:
    """The rest of a list, of which the bracket has been read."""
    _require(depth < _MAX_DEPTH // 4)
    items: list[Any] = []
    character = yield from _after_space((yield))
    while character != "]":
        item, character = yield from _gemma_value(character, quote, depth + 1)
        items.append(item)
        character = yield from _after_space(character)
        _require(character in ",]")
        if character == ",":
            character = yield from _after_space((yield))
    return items


def _gemma_text(character: str, quote: str) -> Reader[tuple[str, str]]:
    yield from _literal(quote, character)
    text = ""
    while not text.endswith(quote):
        text += yield
    return text.removesuffix(quote), (yield)
