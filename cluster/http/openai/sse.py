"""What the answers of both endpoints have in common: the pieces that a streamed chunk is put together from.

A chunk costs two byte concatenations and one `json.dumps` of its text; everything that stays the same during a
request is encoded once.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Final

from cluster.errors import ApiError
from cluster.http.openai.choice import Delta
from cluster.http.parse import Job

SYSTEM_FINGERPRINT: Final = "legato"
DONE: Final = b"data: [DONE]\n\n"


# Made once: `json.dumps` with settings of its own makes an encoder for each call.
_encode: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_LIST_PIECE: Final = 64  # items
_TEXT_PIECE: Final = 64 * 1024  # characters


def dumps(value: object) -> bytes:
    """Encode a value as compact JSON, ASCII only."""
    return _encode(value).encode()


def dumps_large(value: object) -> bytes:
    """Encode a large value as compact JSON, ASCII only, piece by piece, so that other threads go on meanwhile."""
    return b"".join(_pieces(value, 0))


def _pieces(value: object, depth: int) -> Iterator[bytes]:
    match value:
        case str() if len(value) > _TEXT_PIECE:
            yield b'"'
            for at in range(0, len(value), _TEXT_PIECE):
                yield dumps(value[at : at + _TEXT_PIECE])[1:-1]
            yield b'"'
        case [dict(), *_] if depth == 1 or len(value) <= _LIST_PIECE:  # each of which may be large
            for index, item in enumerate(value):
                yield b"," if index else b"["
                yield from _pieces(item, depth + 1)
            yield b"]"
        case list() if len(value) > _LIST_PIECE:
            for at in range(0, len(value), _LIST_PIECE):
                yield b"," if at else b"["
                yield dumps(value[at : at + _LIST_PIECE])[1:-1]
            yield b"]"
        case {**members} if members:
            for index, (name, member) in enumerate(members.items()):
                yield (b"," if index else b"{") + dumps(name) + b":"
                yield from _pieces(member, depth + 1)
            yield b"}"
        case _:
            yield dumps(value)


class AnswerShape(ABC):
    """How one endpoint writes its answers: chunks named `chunk_name`, or a whole object named `whole_name`."""

    def __init__(self, job: Job, *, chunk_name: str, whole_name: str) -> None:
        self.job = job
        self._chunk_name = chunk_name
        self._whole_name = whole_name
        head = dumps(self._envelope(chunk_name))
        self._head = b"data: " + head[:-1] + b',"choices":[{"index":'
        self._tail = b',"usage":null}\n\n' if job.include_usage else b"}\n\n"

    @abstractmethod
    def opening(self, index: int) -> bytes:
        """The events that are sent before anything else of choice `index`; may be empty."""

    @abstractmethod
    def chunk(self, index: int, delta: Delta) -> bytes:
        """The server-sent event of a delta; may be empty."""

    @abstractmethod
    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """Choice `index` in an answer that is not streamed, without the members that `whole` adds to each choice."""

    def finish_reason(self, index: int, delta: Delta) -> str | None:
        """Why a choice ended, in the answer's own word; None: it has not."""
        return delta.finish_reason

    def opening_size(self, index: int) -> int:
        """About how many bytes `opening` has."""
        return self.job.opening_size(index)

    def size(self, delta: Delta) -> int:
        """About how many bytes `chunk` makes of a delta."""
        return self.job.size(delta)

    def closing_size(self) -> int:
        """About how many bytes `closing` has."""
        return 0

    def closing(self) -> bytes:
        """The events that end a stream after every choice has ended,
        with OpenAI's `usage` if the client asked for it."""
        if not self.job.include_usage:
            return DONE
        last = {**self._envelope(self._chunk_name), "choices": [], "usage": self.job.usage()}
        return b"data: " + dumps(last) + b"\n\n" + DONE

    def failure(self, error: ApiError) -> dict[str, Any]:
        """The body of the answer to a request that failed before its answer began."""
        return error.body()

    def last_word(self, error: ApiError) -> bytes:
        """The last event of a stream that ends with an error."""
        return b"data: " + dumps(self.failure(error)) + b"\n\n"

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The answer that is not streamed; `deltas[i]` is all of choice i."""
        choices = []
        for index, delta in enumerate(deltas):
            token_ids = {"token_ids": delta.token_ids} if self.job.return_token_ids else {}
            choice = {"index": index, **self.choice(index, delta)}
            ending = {"finish_reason": self.finish_reason(index, delta), "stop_reason": delta.stop_reason}
            choices.append({**choice, **ending, **token_ids})
        return {**self._envelope(self._whole_name), "choices": choices, "usage": self.job.usage(), **self.of_prompt()}

    def of_prompt(self) -> dict[str, Any]:
        """What a whole answer tells of its prompt besides its choices."""
        return {}

    def _envelope(self, object_name: str) -> dict[str, Any]:
        """The fields that every object of this answer has."""
        return {
            "id": self.job.id,
            "object": object_name,
            "created": self.job.created,
            "model": self.job.model,
            "service_tier": self.job.service_tier,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }

    def _event(
        self, index: int, content: bytes, logprobs: dict[str, Any] | None, delta: Delta | None, beside: bytes = b""
    ) -> bytes:
        """A server-sent event with one choice. `content`: a member of the choice in JSON, such as b'"text":"hello"'.
        `beside`: a member of the event itself, with a comma before it. `delta` None: nothing has been generated."""
        finish_reason = None if delta is None else self.finish_reason(index, delta)
        if delta is not None and self.job.return_token_ids:
            content += b',"token_ids":' + dumps(delta.token_ids)
        ending = b',"logprobs":%b,"finish_reason":%b' % (
            b"null" if logprobs is None else dumps_large(logprobs) if delta is None else dumps(logprobs),
            b"null" if finish_reason is None else b'"%b"' % finish_reason.encode(),
        )
        if delta is not None and delta.stop_reason is not None:
            ending += b',"stop_reason":' + dumps(delta.stop_reason)
        tail = self._tail
        if self.job.continuous_usage:
            usage = self.job.usage(0) if delta is None else self.job.usage(delta.num_tokens, delta.num_reasoning)
            tail = b',"usage":' + dumps(usage) + b"}\n\n"
        return self._head + b"%d," % index + content + ending + b"}]" + beside + tail
