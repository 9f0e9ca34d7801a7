"""Structured output: from `response_format` and `structured_outputs` to the grammar that workers follow.

A client says what an answer must look like by a JSON schema, a regular expression, a choice of texts, a grammar, or a
structural tag (`structural_tags`).
All become one text that llguidance reads; the engine makes masks of tokens of it (`engine.sampling.grammar`). It is
compiled once for the gateway, with the model's own tokenizer and up to its first masks, so that what cannot be followed
is refused before anything is computed; and only the finished text goes on, so that no worker reads a schema
differently. That happens in a process of its own (`grammar_process`), which bounds what one may take.

Every keyword of a schema is enforced or refused, never ignored. What the standard calls annotations (titles, examples,
formats without a rule, words that it does not know) changes nothing. JSON is written without white space.

The endpoints call `Grammars.grammar_for`; pydantic calls the two parsers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from pydantic import BeforeValidator

from cluster.errors import InvalidRequestError, OverloadedError
from cluster.http.openai import structural_tags
from cluster.http.openai.bounded_schemas import with_an_end
from cluster.http.openai.fields import field_error
from cluster.http.openai.grammar_process import CPU_S, compiler_process
from cluster.http.openai.json_schemas import UnsupportedGrammarError, enforceable, for_llguidance
from engine.sampling.grammar import RULES_OF_A_CLIENT, limits_of
from engine.sampling.params import MAX_GRAMMAR_CHARS
from engine.text.tokenizer import Tokenizer

MAX_CHOICES: Final = 1024
_NUM_TRIED: Final = 6  # masks that are tried: some grammars compile, and are too complex only behind their first tokens
MAX_KNOWN: Final = 64  # grammars, or reasons to refuse them, that are remembered
# Grammars that wait for their turn, of one tenant half of what others leave: `MAX_SLOW` where they take longer than
# `QUICK_S` in all, by what one took lately. Most take some hundredths of a second, and none more than `CPU_S`.
MAX_WAITING: Final = 512
MAX_SLOW: Final = 128
QUICK_S: Final = 2.0
_MAX_REASON_CHARS: Final = 300
_MAX_QUOTED_CHARS: Final = 60
# The library's words for a faulty regular expression: its line, one that marks the place, the fault; or that alone.
_FAULT_AT: Final = re.compile(r"\(in regex\): regex parse error:\n    (.*)\n    ( *)\^.*\nerror: (.*)")
_FAULT: Final = re.compile(r"\(in regex\): (?!regex parse error)(.*?)(?: in regex /|\n|$)")

_WISHES: Final = {"json", "regex", "choice", "grammar", "structural_tag", "json_object"}  # of vLLM's structured_outputs
_CLOSED: Final = "disable_additional_properties"
_WHITESPACE: Final = "whitespace_pattern"
_SWITCHES: Final = {"disable_any_whitespace", "disable_fallback", _CLOSED}

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag", "calls"]


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """What an answer must be, in the client's words. `text`: the JSON of a schema or of a list, or a text as it was
    sent. For `calls` it is the JSON of a Lark grammar and of the schemas of its rules `json_0`, `json_1`, ..., each
    with about how many characters its instances may have; None: any number."""

    kind: Kind
    text: str
    param: str  # the request's field that asks for it


# --- what clients send ---


def parse_response_format(value: object) -> OutputConstraint | None:
    """Read OpenAI's `response_format`, or a structural tag of vLLM's. None: any text will do."""
    if value is None or isinstance(value, OutputConstraint):
        return value
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise field_error("invalid_type", "send an object such as {'type': 'json_object'}")
    kind = value["type"]
    if kind == "structural_tag":
        return OutputConstraint("structural_tag", _compact(value), "response_format")
    if kind not in ("text", "json_object", "json_schema"):
        known = "text, json_object, json_schema or structural_tag"
        raise field_error("unsupported_value", f"the type {kind[:40]!r} is unknown; use {known}")
    _refuse_unknown_keys(value, {"type"} | ({"json_schema"} if kind == "json_schema" else set()))
    if kind == "text":
        return None
    if kind == "json_object":
        return OutputConstraint("json", '{"type":"object"}', "response_format")
    return OutputConstraint("json", _schema_text(_named_schema(value.get("json_schema"))), "response_format")


def _named_schema(wrapper: object) -> object:
    if not isinstance(wrapper, Mapping):
        raise field_error("invalid_type", "json_schema must be an object such as {'name': 'answer', 'schema': {...}}")
    _refuse_unknown_keys(wrapper, {"name", "description", "schema", "strict"})  # enforced with and without `strict`
    name = wrapper.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= 64:
        raise field_error("invalid_value", "json_schema must have a `name` of 1 to 64 characters")
    if not isinstance(wrapper.get("description", ""), str | None):
        raise field_error("invalid_type", "the `description` of json_schema must be a text")
    if not isinstance(wrapper.get("strict", False), bool | None):
        raise field_error("invalid_type", "`strict` must be true or false")
    if "schema" not in wrapper:
        raise field_error("invalid_value", "json_schema has no `schema`; send the JSON schema of the answer")
    return wrapper["schema"]


def parse_structured_outputs(value: object) -> OutputConstraint | None:
    """Read vLLM's `structured_outputs`: one of json, regex, choice, grammar, structural_tag and json_object."""
    if value is None or isinstance(value, OutputConstraint):
        return value
    if not isinstance(value, Mapping):
        raise field_error("invalid_type", "send an object such as {'regex': '[0-9]+'}")
    _refuse_unknown_keys(value, _WISHES | _SWITCHES | {_WHITESPACE})
    _refuse_other_json(value)
    given = [
        (kind, value[kind])
        for kind in value
        if kind in _WISHES and value[kind] is not None and value[kind] is not False
    ]
    if len(given) != 1:
        raise field_error("invalid_value", f"{len(given)} constraints were sent; send exactly one")
    kind, wish = given[0]
    return OutputConstraint(*_constraint(kind, wish), "structured_outputs")


def _refuse_other_json(value: Mapping[Any, Any]) -> None:
    """Check what vLLM's clients say of how JSON is written: here it has no white space, and there is no fallback."""
    for name in _SWITCHES:
        if not isinstance(value.get(name), bool | None):
            raise field_error("invalid_type", f"{name!r} must be true or false")
    if value.get(_CLOSED):
        raise field_error(
            "unsupported_value",
            f"{_CLOSED!r} is not supported; write 'additionalProperties': false into the schema's objects instead",
        )
    if value.get(_WHITESPACE) is not None:
        raise field_error("unsupported_value", f"JSON is written without white space here; leave {_WHITESPACE!r} out")


def _constraint(kind: str, wish: object) -> tuple[Kind, str]:
    if kind == "json_object" and wish is True:
        return "json", '{"type":"object"}'
    if kind == "json":
        return "json", wish if isinstance(wish, str) else _schema_text(wish)
    if kind == "choice" and isinstance(wish, list) and all(isinstance(text, str) for text in wish):
        if not 0 < len(wish) <= MAX_CHOICES:
            raise field_error("invalid_value", f"{len(wish)} choices were sent; send 1 to {MAX_CHOICES}")
        return "choice", json.dumps(wish)
    if kind == "structural_tag" and isinstance(wish, str | Mapping):
        return "structural_tag", wish if isinstance(wish, str) else _compact(wish)
    if kind == "regex" and isinstance(wish, str):
        return "regex", wish
    if kind == "grammar" and isinstance(wish, str):
        return "grammar", wish
    raise field_error("invalid_type", f"the value of {kind!r} is of the wrong type")


def _refuse_unknown_keys(value: Mapping[Any, Any], known: set[str]) -> None:
    stranger = next((name for name in value if name not in known and value[name] is not None), None)
    if stranger is not None:
        raise field_error("invalid_value", f"{str(stranger)[:40]!r} is not known here; leave it out")


def _schema_text(schema: object) -> str:
    if not isinstance(schema, Mapping | bool):
        raise field_error("invalid_type", "a JSON schema must be an object")
    return _compact(schema)


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


ResponseFormat = Annotated[Any, BeforeValidator(parse_response_format, json_schema_input_type=Any)]
StructuredOutputs = Annotated[Any, BeforeValidator(parse_structured_outputs, json_schema_input_type=Any)]


# --- grammars ---


class Grammars:
    """Gives one gateway the grammars that its requests ask for. Has them compiled one after another, tenants taking
    turns, and remembers the last ones; belongs to one event loop. Who is cancelled while waiting gives up the place."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        known = tokenizer.json, tokenizer.vocab_size, tuple(sorted(tokenizer.eos_token_ids))
        self.compiler = compiler_process(*known)
        self._free = asyncio.Lock()  # given in the order of asking
        self._turns = WeakValueDictionary[str, asyncio.Lock]()  # of tenants who ask: each has one place in that order
        self._waiting: dict[OutputConstraint, list[str]] = {}  # the tenants of all requests that wait for it
        self._took_s = 0.0  # to compile one, by those before
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._known: OrderedDict[OutputConstraint, str | UnsupportedGrammarError] = OrderedDict()

    async def grammar_for(
        self, response_format: OutputConstraint | None, structured_outputs: OutputConstraint | None, tenant: str = ""
    ) -> str | None:
        """The text for `SamplingParams.grammar`; None: the answer may be any text. Raises InvalidRequestError, and
        OverloadedError where too many others wait for theirs."""
        if response_format is not None and structured_outputs is not None:
            raise InvalidRequestError(
                "response_format and structured_outputs both say what the answer must be. Send one of them.",
                param="structured_outputs",
            )
        wanted = response_format or structured_outputs
        if wanted is None:
            return None
        if len(wanted.text) > MAX_GRAMMAR_CHARS:
            raise _refused(wanted, f"It has {len(wanted.text)} characters; at most {MAX_GRAMMAR_CHARS} are possible.")
        found = self._known.get(wanted)
        if found is None:
            turn = self._turns.setdefault(tenant, asyncio.Lock())
            with self._place_for(wanted, tenant):
                async with turn:
                    await self._free.acquire()
                    if (found := self._known.get(wanted)) is not None:
                        self._free.release()
                    else:  # is compiled, and the next one waits for it, also where who asked leaves meanwhile
                        compiling = asyncio.get_running_loop().run_in_executor(self._thread, self._compiled, wanted)
                        compiling.add_done_callback(partial(self._end, wanted))
                        found = await asyncio.shield(compiling)
        self._remember(wanted, found)
        if isinstance(found, UnsupportedGrammarError):
            raise _refused(wanted, str(found))
        return found

    @contextlib.contextmanager
    def _place_for(self, wanted: OutputConstraint, tenant: str) -> Iterator[None]:
        """Hold a place among the grammars that wait; requests for the same one share it. Raises OverloadedError."""
        if wanted not in self._waiting:
            taken, own = len(self._waiting), sum(tenants[0] == tenant for tenants in self._waiting.values())
            wait_s = taken * self._took_s
            left = (MAX_WAITING if wait_s < QUICK_S else MAX_SLOW) - taken
            if left < 1 and taken < MAX_WAITING:
                left = 1  # who has none waits also where others took all while it was quick
            if own >= left:
                raise OverloadedError(
                    f"{taken} grammars wait to be compiled here already, {own} of them yours. Try again shortly.",
                    retry_after_s=wait_s,
                )
        tenants = self._waiting.setdefault(wanted, [])
        tenants.append(tenant)
        try:
            yield
        finally:
            tenants.remove(tenant)
            if not tenants:
                del self._waiting[wanted]

    def _compiled(self, wanted: OutputConstraint) -> str | UnsupportedGrammarError:
        began_at = time.monotonic()
        answer = self.compiler.ask(wanted.kind, wanted.text)
        self._took_s += (min(time.monotonic() - began_at, CPU_S) - self._took_s) / 4
        if "grammar" in answer:
            return answer["grammar"]
        too_complex = (
            f"It is too complex: to compile it takes more than {CPU_S:.0f} s of a processor, or too much memory."
        )
        return UnsupportedGrammarError(answer.get("refused", too_complex))

    def _end(self, wanted: OutputConstraint, done: asyncio.Future[str | UnsupportedGrammarError]) -> None:
        self._free.release()
        if not done.cancelled() and done.exception() is None:
            self._remember(wanted, done.result())

    def _remember(self, wanted: OutputConstraint, found: str | UnsupportedGrammarError) -> None:
        self._known[wanted] = found
        self._known.move_to_end(wanted)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)


def _refused(wanted: OutputConstraint, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{wanted.param} cannot be followed. {reason}", param=wanted.param, code="unsupported_value"
    )


def compiled(wanted: OutputConstraint, tokenizer: LLTokenizer) -> str:
    """Write the grammar for what is wanted, and try it.
    Raises UnsupportedGrammarError unless all of it can be enforced."""
    try:
        if wanted.kind == "structural_tag":
            return _checked_grammar(structural_tags.written(wanted.text, tokenizer), tokenizer)
        regex = wanted.text if wanted.kind == "regex" else None
        return _checked_grammar(_WRITERS[wanted.kind](wanted.text), tokenizer, regex)
    except UnsupportedGrammarError:
        raise
    except (ValueError, RecursionError) as error:
        raise UnsupportedGrammarError(_as_sentence(str(error))) from error


def _checked_grammar(grammar: str, tokenizer: LLTokenizer, regex: str | None = None) -> str:
    """The grammar, if it compiles and gives its first masks. `regex`: what the client sent, if it was only that. Raises
    UnsupportedGrammarError."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise UnsupportedGrammarError(
            f"As a grammar it has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are possible."
        )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits_of(grammar))
    for _ in range(_NUM_TRIED):
        allowed = _first_allowed(matcher, tokenizer.vocab_size)
        if allowed is None:
            reason = matcher.get_error() or "no token may come next"
            raise UnsupportedGrammarError(_as_sentence(reason if regex is None else _fault_of(regex, reason)))
        if allowed in tokenizer.eos_tokens:
            break
        matcher.consume_token(allowed)
    return grammar


def _first_allowed(matcher: LLMatcher, vocab_size: int) -> int | None:
    """The first of the tokens that may come next; None: none may, or the matcher has failed."""
    bits = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    if not matcher.is_error():
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    words = np.flatnonzero(bits)
    if matcher.is_error() or not len(words):
        return None
    word = int(bits[words[0]])
    return int(words[0]) * 32 + (word & -word).bit_length() - 1


def _fault_of(regex: str, reason: str) -> str:
    """What the library says of a regular expression, about the client's own text in place of the grammar around it."""
    if (found := _FAULT_AT.search(reason)) is not None:
        pattern, before, fault = found.groups()
        at = pattern[len(before) :][:_MAX_QUOTED_CHARS].replace("\\/", "/")
        return f"{fault}, at {at!r} of the regular expression {regex[:_MAX_QUOTED_CHARS]!r}"
    if (found := _FAULT.search(reason)) is not None:
        return f"{found[1]}, of the regular expression {regex[:_MAX_QUOTED_CHARS]!r}"
    return reason


def _as_sentence(reason: str) -> str:
    """A library's words as a sentence, cut short: they may quote all of a schema."""
    line = " ".join(reason.replace("<non-verbose/>", "").split())
    return f"{line[:_MAX_REASON_CHARS].rstrip('.')}."


def _from_json(text: str) -> str:
    schema = json.loads(text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise UnsupportedGrammarError("The schema must be an object, and allow something.")
    return f'{{"grammars":[{{"json_schema":{for_llguidance(enforceable(schema))}}}]}}'


def _from_regex(text: str) -> str:
    if (len(text) - len(text.rstrip("\\"))) % 2:  # the library would take it away, and go by the rest
        raise UnsupportedGrammarError(f"It ends within an escape sequence: {text[-_MAX_QUOTED_CHARS:]!r}.")
    return str(LLMatcher.grammar_from_regex(text))


def _from_choice(text: str) -> str:
    return _from_lark("start: " + " | ".join(map(json.dumps, json.loads(text))))


def _from_grammar(text: str) -> str:
    """The grammar of a text in Lark, or in GBNF, which llama.cpp and vLLM read. Raises UnsupportedGrammarError."""
    try:
        return _from_lark(f"{RULES_OF_A_CLIENT}\n{any_to_lark(text)}")
    except Exception as error:  # it may be of any kind: the parser is written in Python, for good input
        raise UnsupportedGrammarError(f"It is neither Lark nor GBNF: {_as_sentence(str(error))}") from error


def _from_calls(text: str) -> str:
    parts = json.loads(text)
    rules = [parts["lark"]]
    for number, (schema, chars) in enumerate(parts["schemas"]):
        if not isinstance(schema, dict) and schema is not True:
            raise UnsupportedGrammarError("A schema must be an object, and allow something.")
        kept = enforceable(schema if isinstance(schema, dict) else {})
        if chars is not None:
            with contextlib.suppress(TypeError, AttributeError):  # llguidance refuses values of a wrong kind
                kept = with_an_end(kept, chars)
        rules.append(f"json_{number}: %json {for_llguidance(kept)}")
    return _from_lark("\n".join(rules))


def _from_lark(text: str) -> str:
    return str(LLMatcher.grammar_from_lark(text))


_WRITERS: Final[Mapping[Kind, Callable[[str], str]]] = {
    "json": _from_json,
    "regex": _from_regex,
    "choice": _from_choice,
    "grammar": _from_grammar,
    "calls": _from_calls,
}
