"""The lines of a batch: what a file of them may say, and what is written of each that was answered.

As OpenAI's batches have them: a line is `{"custom_id", "method", "url", "body"}` in JSON.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cluster.errors import InvalidRequestError
from cluster.json_text import read_json, require_few_values

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_LINES: Final = 50_000
MAX_CUSTOM_ID: Final = 512
MAX_ERRORS: Final = 100  # errors of one file that are told
LONGEST_LINE: Final = 64 * 2**20  # bytes; a gateway that gets a line as a request has a lower bound of its own
LINE_ENVELOPE: Final = 16 * 2**10  # bytes of a line around its body: a name of 512 characters, a URL
_FIELDS: Final = {"custom_id", "method", "url", "body"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """One request of a batch. `number`: that of its line, counted from 1. `place`: the bytes before that."""

    number: int
    place: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineAnswer:
    """What became of one line. `status`: HTTP's; 0: there was no answer, and `body` says why in OpenAI's shape. `body`:
    an object in JSON, in one line, which nobody here reads: it may have many MB, and a gateway others to answer.
    `retry_after_s`: when to ask again, if the server said that."""

    status: int
    body: str
    request_id: str = ""
    retry_after_s: float | None = None

    @classmethod
    def of_http(cls, status: int, body: str, headers: Mapping[str, str]) -> LineAnswer:
        """What an HTTP answer means for its line. `headers`: by names in small letters, or in any."""
        retry_after_s = None
        with suppress(KeyError, ValueError):
            retry_after_s = float(headers["retry-after"])
        return cls(status=status, body=body, request_id=headers.get("x-request-id", ""), retry_after_s=retry_after_s)

    @property
    def has_succeeded(self) -> bool:
        return self.status == 200

    def written(self, line: BatchLine) -> str:
        """The line of this answer in a file of answers."""
        named = json.dumps({"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": line.custom_id})[:-1]
        if not self.status:
            return f'{named}, "response": null, "error": {json.dumps(json.loads(self.body)["error"])}}}'
        response = json.dumps({"status_code": self.status, "request_id": self.request_id})[:-1]
        return f'{named}, "response": {response}, "body": {self.body}}}, "error": null}}'


class LineError(InvalidRequestError):
    """Something is wrong with one line, or with the whole file (`line` None)."""

    def __init__(self, message: str, code: str, *, line: int | None = None, param: str | None = None) -> None:
        super().__init__(message, param=param, code=code)
        self.line = line

    def describe(self) -> dict[str, Any]:
        """The error as an entry of a batch's `errors`."""
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


def read_lines(path: Path, endpoint: str | None = None, longest: int = LONGEST_LINE) -> Iterator[BatchLine | LineError]:
    """Yields each line of a file that is not blank, or what is wrong with it. `endpoint`: the only one that lines may
    name; None: any of `ENDPOINTS`."""
    known: set[str] = set()
    with path.open("rb") as file:
        number = num_blank = end = 0
        while text := file.readline(longest + 1):
            number += 1
            place, end = end, end + len(text)
            if not text.strip():
                num_blank += 1
                if num_blank > MAX_LINES:  # a file may hold two hundred million
                    yield LineError(
                        f"The file has more than {MAX_LINES} blank lines. Leave them out.", "too_many_lines"
                    )
                    return
                continue
            try:
                if len(text) > longest:
                    raise LineError(f"The line is longer than {longest} bytes.", "line_too_long", line=number)
                line = _parsed(text, number, place, endpoint)
                if line.custom_id in known:
                    raise LineError(
                        f"The custom_id {line.custom_id[:100]!r} is there twice. Give each line one of its own.",
                        "duplicate_custom_id",
                        line=number,
                        param="custom_id",
                    )
                known.add(line.custom_id)
                yield line
            except LineError as error:
                yield error
                if error.code == "line_too_long":
                    return


def read_again(path: Path, line: BatchLine) -> BatchLine:
    """The line of a file that `read_lines` gave, whose body nobody has kept. Raises OSError, or LineError where the
    file is another one."""
    with path.open("rb") as file:
        file.seek(line.place)
        return _parsed(file.readline(), line.number, line.place)


def check_lines(path: Path) -> tuple[int, list[LineError]]:
    """Count the lines of a file, of any endpoints, and find what is wrong with them; stops after `MAX_ERRORS` errors or
    `MAX_LINES` lines."""
    return next(found for found in checking(path) if found is not None)


def checking(
    path: Path, endpoint: str | None = None, longest: int = LONGEST_LINE
) -> Iterator[tuple[int, list[LineError]] | None]:
    """Yields None for each line of a file that was looked at, and at last what `check_lines` returns."""
    num_lines = 0
    errors: list[LineError] = []
    for line in read_lines(path, endpoint, longest):
        yield None
        num_lines += 1
        if isinstance(line, LineError):
            errors.append(line)
        if num_lines > MAX_LINES:
            errors.append(LineError(f"A batch has at most {MAX_LINES} lines. Send several.", "too_many_lines"))
        if num_lines > MAX_LINES or len(errors) == MAX_ERRORS:
            break
    if num_lines == 0:
        errors.append(LineError("The file has no lines. Write one request of JSON in each.", "empty_file"))
    yield num_lines, errors


def _parsed(text: bytes, number: int, place: int, endpoint: str | None = None) -> BatchLine:
    """Read one line. Raises LineError if it is too long, is no JSON, or is not what a line of a batch must be."""
    try:
        require_few_values(text)
        given = read_json(text)
    except InvalidRequestError as error:
        raise LineError(error.message, "line_too_large", line=number) from None
    except ValueError as error:
        raise LineError(f"The line is no JSON: {str(error)[:200]}.", "invalid_json_line", line=number) from None
    if not isinstance(given, dict) or not given.keys() <= _FIELDS:
        raise LineError(
            f"The line must be an object with {', '.join(sorted(_FIELDS))}, and nothing else.",
            "invalid_line",
            line=number,
        )
    urls = ENDPOINTS if endpoint is None else (endpoint,)
    for name, holds, wanted in (
        ("custom_id", _is_name(given.get("custom_id")), f"a text of 1 to {MAX_CUSTOM_ID} characters"),
        ("method", given.get("method", "POST") == "POST", '"POST"'),
        ("url", given.get("url") in urls, f'"{urls[0]}", the batch\'s endpoint' if endpoint else f"one of {urls}"),
        ("body", isinstance(given.get("body"), dict), "an object: the request"),
    ):
        if not holds:
            raise LineError(f"{name} must be {wanted}.", "invalid_line", line=number, param=name)
    if given["body"].get("stream"):
        raise LineError(
            "A line's answer can't be streamed. Leave stream out.", "invalid_line", line=number, param="body.stream"
        )
    return BatchLine(number=number, place=place, custom_id=given["custom_id"], url=given["url"], body=given["body"])


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_CUSTOM_ID
