"""What both kinds of answers have in common: the pieces that a streamed chunk is put together from.

A chunk costs two byte concatenations and one `json.dumps` of its text; everything that stays the same during a
request is encoded once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

from cluster.http.openai.choice import Delta
from cluster.http.parse import Job

SYSTEM_FINGERPRINT: Final = "legato"
DONE: Final = b"data: [DONE]\n\n"


class Shape(Protocol):
    """How one endpoint writes its answers."""

    def opening(self, index: int) -> bytes:
        """Sent before anything else of choice `index`; may be empty."""
        ...

    def chunk(self, index: int, delta: Delta) -> bytes:
        """One server-sent event."""
        ...

    def closing(self, usage: dict[str, object] | None) -> bytes:
        """After every choice has ended; `usage` where the client asked for it."""
        ...

    def whole(self, deltas: Sequence[Delta], usage: dict[str, object]) -> dict[str, Any]:
        """The answer that is not streamed; `deltas[i]` is all of choice i."""
        ...


# Made once: `json.dumps` with settings of its own makes an encoder for each call.
_encode: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_LIST_PIECE: Final = 64  # items
_TEXT_PIECE: Final = 64 * 1024  # characters


def dumps(value: object) -> bytes:
    """Compact JSON, ASCII only."""
    return _encode(value).encode()


def dumps_large(value: object) -> bytes:
    """The same, piece by piece, so that other threads go on meanwhile."""
    return b"".join(_pieces(value, 0))


def _pieces(value: object, depth: int) -> Iterator[bytes]:
    match value:
        case str() if len(value) > _TEXT_PIECE:
            yield b'"'
            for at in range(0, len(value), _TEXT_PIECE):
                yield dumps(value[at : at + _TEXT_PIECE])[1:-1]
            yield b'"'
        case [dict(), *_] if depth == 1:  # choices, each of which may be large
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


def token_ids_member(job: Job, delta: Delta) -> dict[str, Any]:
    """What a whole choice has besides OpenAI's members, where the client asked for it."""
    return {"token_ids": delta.token_ids} if job.return_token_ids else {}


class ChunkFrame:
    """The parts of a server-sent event around a choice's content."""

    def __init__(self, job: Job, object_name: str) -> None:
        self._job = job
        self._object_name = object_name
        head = dumps(self.envelope(object_name))
        self._head = b"data: " + head[:-1] + b',"choices":[{"index":'
        self._tail = b'}],"usage":null}\n\n' if job.include_usage else b"}]}\n\n"

    def envelope(self, object_name: str) -> dict[str, Any]:
        """The fields that every object of this answer has."""
        return {
            "id": self._job.id,
            "object": object_name,
            "created": self._job.created,
            "model": self._job.model,
            "service_tier": self._job.service_tier,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }

    def chunk(self, index: int, content: bytes, logprobs: dict[str, Any] | None, delta: Delta | None) -> bytes:
        """`content` is JSON of a member, such as b'"text":"hello"'; None for `delta`: nothing has been generated."""
        finish_reason = None if delta is None else delta.finish_reason
        if delta is not None and self._job.return_token_ids:
            content += b',"token_ids":' + dumps(delta.token_ids)
        ending = b',"logprobs":%b,"finish_reason":%b' % (
            b"null" if logprobs is None else dumps_large(logprobs) if delta is None else dumps(logprobs),
            b"null" if finish_reason is None else b'"%b"' % finish_reason.encode(),
        )
        return self._head + b"%d," % index + content + ending + self._tail

    def closing(self, usage: dict[str, object] | None) -> bytes:
        if usage is None:
            return DONE
        last = {**self.envelope(self._object_name), "choices": [], "usage": usage}
        return b"data: " + dumps(last) + b"\n\n" + DONE
