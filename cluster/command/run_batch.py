"""`legato run-batch`: a file of requests, answered by a server into another file, as vLLM's command of that name does.

Answers are appended to `OUT.partial` as they come, so whoever runs it again goes on with the rest. Once there is one to
each line, they go to `OUT`, in the order of the lines. Any OpenAI-compatible server will do.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import httpx
import uvloop

from cluster.batch.lines import BatchLine, LineAnswer, check_lines, read_lines
from cluster.batch.service import run_lines
from cluster.command.arguments import ArgumentsError, headers_of
from cluster.load.client import AnswerError, ServerAddress

_PATIENCE_S: Final = 600.0  # how long a server may answer nothing at all before it is given up
_FIRST_S: Final = 60.0  # how long it may take to say that it is there
_LINE_S: Final = 3_600.0  # how long one answer may take
_TOLD_CHARS: Final = 500  # how much of an answer that is no JSON is told
_NOT_NOW: Final = 503


class BatchFileError(Exception):
    """The batch cannot go on. Its text says why, and what to do."""


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns its exit code: 1 if lines are left without an answer."""
    source, out = arguments.input, arguments.output
    try:
        server = ServerAddress.at(arguments.url)
    except ValueError as error:
        raise ArgumentsError(str(error)) from error
    if not source.is_file():
        raise ArgumentsError(f"{source} is no file. Name one with a request of JSON in each line.")
    num_lines, errors = check_lines(source)
    if errors:
        for wrong in errors:
            place = "" if wrong.line is None else f", line {wrong.line}"
            print(f"error: {source}{place}: {wrong.message}", file=sys.stderr)
        return 1
    try:
        return _run(source, out, server, num_lines, arguments.concurrency)
    except (BatchFileError, AnswerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(source: Path, out: Path, server: ServerAddress, num_lines: int, concurrency: int) -> int:
    """Answer the lines of a checked file. Returns the exit code. Raises BatchFileError, AnswerError or OSError."""
    if out.exists():
        with out.open("rb") as file:
            if _places(file, out)[0].keys() == {line.custom_id for line in _lines(source)}:
                print(f"All {num_lines} lines are answered in {out} already.")
                return 0
        raise BatchFileError(f"{out} is there already, and has no answers to these lines. Move it, or name another.")
    server.get("/v1/models", timeout_s=_FIRST_S, headers=headers_of())  # nobody waits ten minutes for a wrong URL
    begun = time.monotonic()
    with Answers(out.with_name(f"{out.name}.partial")) as answers:
        if strangers := answers.names - {line.custom_id for line in _lines(source)}:
            raise BatchFileError(
                f"{answers.path} has answers to other lines, such as {min(strangers)!r}. Move it, or name another"
                " output."
            )
        num_before = len(answers)
        try:
            uvloop.run(_answer_all(source, answers, server, num_lines, concurrency))
        except KeyboardInterrupt:
            print(
                f"Stopped: {len(answers)} of {num_lines} lines are answered, in {answers.path}. The same command"
                " goes on.",
                file=sys.stderr,
            )
            return 1
        num_failed = answers.sort_into(out, [line.custom_id for line in _lines(source)])
    print(
        f"{num_lines - num_before} lines answered by {server.url} in {time.monotonic() - begun:.3f} s,"
        f" {num_before} before. {out} has all {num_lines}; {num_failed} of them tell of an error."
    )
    return 0


def _lines(source: Path) -> Iterator[BatchLine]:
    return (line for line in read_lines(source) if isinstance(line, BatchLine))


Places = dict[str, tuple[int, bool]]
"""Where each line of a file of answers begins, by the line's `custom_id`, and whether its answer is no error."""


def _places(file: BinaryIO, path: Path) -> tuple[Places, int]:
    """Read a file of answers: the places of its lines, and where the last whole line ends. Raises BatchFileError if it
    is no such file."""
    places: Places = {}
    place = 0
    for text in file:
        if not text.endswith(b"\n"):
            break
        try:
            row = json.loads(text)
            places[row["custom_id"]] = (place, _has_succeeded(row))
        except (ValueError, KeyError, TypeError):
            raise BatchFileError(f"{path} is no file of answers. Move it, or name another output.") from None
        place += len(text)
    return places, place


def _has_succeeded(row: dict[str, Any]) -> bool:
    return row["error"] is None and row["response"]["status_code"] == 200


class Answers:
    """A file of answers, one a line, to which more are added. The last line may be cut off: then it is dropped. One
    process at a time may have the file open.

    Raises BatchFileError if another process has it open, or if it is no such file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise BatchFileError(f"{path} is being written by another process. Wait for it.") from None
        try:
            self._file.seek(0)
            self._places, end = _places(self._file, path)
        except BaseException:
            self._file.close()
            raise
        self._file.truncate(end)  # the rest was being written when the process ended

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def names(self) -> set[str]:
        return set(self._places)

    def add(self, line: BatchLine, answer: LineAnswer) -> None:
        self._places[line.custom_id] = (self._file.seek(0, os.SEEK_END), answer.has_succeeded)
        self._file.write(answer.written(line).encode() + b"\n")
        self._file.flush()

    def sort_into(self, out: Path, names: list[str]) -> int:
        """Write the answers into `out`, in the order of `names`, and delete this file.
        Returns how many of them tell of an error."""
        sorted_path = out.with_name(f"{out.name}.sorted")
        with sorted_path.open("wb") as sorted_file:
            for name in names:
                self._file.seek(self._places[name][0])
                sorted_file.write(self._file.readline())
            sorted_file.flush()
            os.fsync(sorted_file.fileno())  # what is deleted next is all that there is besides
        sorted_path.replace(out)
        self.path.unlink()
        return sum(not succeeded for _, succeeded in self._places.values())


async def _answer_all(source: Path, answers: Answers, server: ServerAddress, num_lines: int, concurrency: int) -> None:
    """Send all lines that have no answer yet, and add their answers. Raises BatchFileError if the server answers
    nothing for `_PATIENCE_S`."""
    last_answer = time.monotonic()
    limits = httpx.Limits(max_connections=concurrency)
    timeout = httpx.Timeout(_LINE_S, connect=10.0)
    async with httpx.AsyncClient(
        base_url=server.url, headers=headers_of(), limits=limits, timeout=timeout, trust_env=False
    ) as client:

        async def send(line: BatchLine) -> LineAnswer:
            nonlocal last_answer
            try:
                answer = _line_answer(await client.post(line.url, json=line.body))
            except httpx.TransportError as error:  # the server is gone, or its answer took too long
                answer = _unreachable(repr(error))
            if answer.status != _NOT_NOW:
                last_answer = time.monotonic()
            elif time.monotonic() - last_answer > _PATIENCE_S:
                told = answer.body[:_TOLD_CHARS]
                raise BatchFileError(
                    f"{server.url} has answered nothing for {_PATIENCE_S:.0f} s: {told}. {len(answers)} of {num_lines}"
                    f" lines are answered, in {answers.path}; the same command goes on."
                )
            return answer

        async def keep(line: BatchLine, answer: LineAnswer) -> None:
            answers.add(line, answer)
            if sys.stderr.isatty():
                print(f"\r{len(answers)} of {num_lines} lines", end="", file=sys.stderr, flush=True)

        known = answers.names
        left = (line for line in _lines(source) if line.custom_id not in known)
        try:
            await run_lines(left, send, keep, num_at_once=concurrency)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            if sys.stderr.isatty():
                print(file=sys.stderr)


def _line_answer(answer: httpx.Response) -> LineAnswer:
    """What an HTTP answer means for its line."""
    try:
        body = answer.json()
        if not isinstance(body, dict):
            raise ValueError
    except ValueError:
        if answer.status_code >= 500:  # probably of a proxy in front of a server that is not there now
            return _unreachable(answer.text[:_TOLD_CHARS])
        body = {"error": {"message": answer.text[:_TOLD_CHARS], "code": "no_json"}}
    return LineAnswer.of_http(answer.status_code, json.dumps(body), answer.headers)


def _unreachable(why: str) -> LineAnswer:
    """An answer that says that the server cannot be reached, so that the line is sent again."""
    error = {"message": f"It cannot be reached: {why}.", "code": "gone"}
    return LineAnswer(status=_NOT_NOW, body=json.dumps({"error": error}))
