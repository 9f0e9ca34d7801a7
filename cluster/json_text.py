"""JSON that strangers send: it is read in one way only, and within bounds, as a parser holds the interpreter's lock."""

from __future__ import annotations

import math
import re
from typing import Any, Final

import jiter

from cluster.errors import InvalidRequestError

MAX_VALUES: Final = 2**18  # in a body: the parser holds the interpreter's lock for up to 60 ms for as many
_NAMED_VALUES: Final = 5  # a member of an object counts as so many: its name costs the parser four times its value

# Matches what begins a value or parts two, and whole texts, so that their commas do not count. It matches a text
# without an end, too: else it would look for the end again from each of its quotes.
_VALUES_OR_TEXT: Final = re.compile(rb'[,\[{:]|"(?:[^"\\]++|\\.)*+"?', re.DOTALL)

_LONGEST_KEY: Final = 200  # characters of a client's words that an error repeats

# What to do about each of the parser's complaints; the others are plain mistakes of syntax.
_ADVICE: Final = {
    "recursion limit": "It is nested too deeply: at most 200 levels are read.",
    "too large a number": "Numbers up to 1.7e308 are read; send a larger one as a text.",
    "number out of range": "A number in it has too many digits: at most 4300 are read.",
    "hex escape": r"An escape such as \ud83d is half of a character: send the other half with it, or leave it out.",
    "unicode code point": "It must be in UTF-8.",
    "duplicate key": "Send each key of an object once.",
}


def require_few_values(body: bytes) -> None:
    """Check that a body holds at most `MAX_VALUES`. Raises InvalidRequestError. Counts exactly only if there are marks
    enough for more, and in Python, so that others have their turn meanwhile."""
    weights = {b",": 1, b"[": 1, b"{": 1, b":": _NAMED_VALUES - 1}
    if sum(weight * body.count(mark) for mark, weight in weights.items()) <= MAX_VALUES:
        return
    num_values = 0
    for found in _VALUES_OR_TEXT.finditer(body):
        num_values += weights.get(found[0][:1], 0)
        if num_values > MAX_VALUES:
            raise InvalidRequestError(
                f"The body holds more than {MAX_VALUES} JSON values (numbers, texts, lists, objects; one with a name"
                f" counts as {_NAMED_VALUES}). Send it in several requests, or texts in place of token ids.",
                code="body_too_large",
                status=413,
            )


def parse_json(body: bytes) -> Any:
    """Parse a body in UTF-8. Raises InvalidRequestError, also for what two readers could read in two ways or nobody
    could write again: a key that is there twice, half of a surrogate pair, NaN, 1e999, a number of 5,000 digits."""
    try:
        return read_json(body)
    except ValueError as error:
        raise InvalidRequestError(_complaint(body, str(error)), code="invalid_json") from None


def read_json(text: bytes) -> Any:
    """Parse a text in UTF-8, of which `parse_json` says what is refused. Raises ValueError."""
    value = jiter.from_json(text, allow_inf_nan=False, catch_duplicate_keys=True)
    if not is_finite(value):
        raise ValueError("too large a number")
    return value


def is_finite(value: Any) -> bool:
    """Whether JSON can be made again of what was parsed: the parser reads numbers that are too large as infinite, also
    where it takes no `Infinity`."""
    waiting = [value]
    for each in waiting:  # which grows meanwhile
        kind = type(each)
        if kind is list:
            waiting += each
        elif kind is dict:
            waiting += each.values()
        elif kind is float and math.isinf(each):
            return False
    return True


def _complaint(body: bytes, found: str) -> str:
    if body.startswith(b"\xef\xbb\xbf") or b"\0" in body[:4]:
        advice = "It must be in UTF-8, without a byte order mark."
    else:
        advice = next((advice for word, advice in _ADVICE.items() if word in found), "Send a JSON object in UTF-8.")
    what, at, where = found.rpartition(" at line ")
    return f"The body is no JSON: {what[:_LONGEST_KEY]}{at}{where}. {advice}"
