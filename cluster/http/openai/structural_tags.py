"""Structural tags: answers that are text in places and follow a schema in others, as vLLM and xgrammar spell them.

A tag is a tree of formats, each a part of the answer: a fixed text, a schema, a sequence, free text in which calls
follow their schemas once their first characters stand there. It becomes rules of llguidance's Lark, and for each schema
and pattern a grammar of its own. Free text ends where the first of the marks stands that may follow it, which is what
Lark calls lazy; so it can only be the last part of what has an end, as xgrammar has it, too.

What is not known here, or could not be kept exactly, is refused. `cluster.http.openai.structured` calls `written`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeGuard

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from cluster.http.openai.json_schemas import UnsupportedGrammarError, enforceable, for_llguidance
from engine.sampling.grammar import RULES_OF_A_CLIENT

MAX_DEPTH: Final = 12  # of formats within formats; llguidance bounds the parentheses that they become
_MAX_CHARS: Final = 4096  # the most that `max_chars` may be: each character is a state of a pattern
_MAX_REPEATS: Final = 1024
_ANY: Final = r"/(.|\n)*/"

Format = Mapping[str, Any]
Mark = tuple[str | int, ...]
"""A fixed text, in pieces: texts, and the ids of special tokens between them."""


def written(text: str, tokenizer: LLTokenizer) -> str:
    """Write the grammar of a structural tag, given in JSON.
    Raises UnsupportedGrammarError, or ValueError if it is no JSON."""
    tag = json.loads(text)
    if not isinstance(tag, dict):
        raise _refused("A structural tag must be an object with a `format`")
    tag = {name: value for name, value in _given(tag).items() if name != "type" or value != "structural_tag"}
    if "format" not in tag:
        tag = {"format": _of_structures(tag)}
    _refuse_unknown_keys(tag, {"format"})
    return _Writer(tokenizer).grammar(tag["format"])


def _of_structures(tag: Format) -> Format:
    """The format of a tag in the older spelling, which knows only one."""
    _refuse_unknown_keys(tag, {"structures", "triggers"})
    structures = [_given(one) if isinstance(one, dict) else {} for one in _list(tag, "structures")]
    for structure in structures:
        if not {"begin", "schema", "end"} == set(structure):
            raise _refused("Each of the `structures` must have a `begin`, a `schema` and an `end`, and nothing else")
    return {
        "type": "triggered_tags",
        "triggers": tag.get("triggers"),
        "tags": [
            {
                "type": "tag",
                "begin": structure["begin"],
                "content": {"type": "json_schema", "json_schema": structure["schema"]},
                "end": structure["end"],
            }
            for structure in structures
        ],
    }


class _Writer:
    """Writes the grammar of one tag. Each part is written together with `ends`, the marks of which one must follow it;
    None: nothing follows it, or what follows does not matter to it."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules: list[str] = []
        self._grammars: list[dict[str, Any]] = []
        self._depth = 0
        self._num_repeats_around = 0
        self._is_ambiguous = False
        self._writers: dict[str, Callable[[Format, list[Mark] | None], str]] = {
            "const_string": self._const_string,
            "token": self._token,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._repeated,
            "star": self._repeated,
            "plus": self._repeated,
            "repeat": self._repeated,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "dispatch": self._dispatch,
            "tags_with_separator": self._tags_with_separator,
        }

    def grammar(self, tree: object) -> str:
        start = self._part(tree, None)
        lark = "\n".join([*([RULES_OF_A_CLIENT] if self._is_ambiguous else []), f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"name": "tags", "lark_grammar": lark}, *self._grammars]})

    def _part(self, part: object, ends: list[Mark] | None) -> str:
        kind = _kind(part)
        if kind not in self._writers:
            raise _refused(f"The format {kind[:40]!r} is not supported; use one of {', '.join(self._writers)}")
        if self._depth == MAX_DEPTH:
            raise _refused(f"The formats are nested deeper than {MAX_DEPTH}")
        self._depth += 1
        found = self._writers[kind](_object(part), ends)
        self._depth -= 1
        return found

    def _limited(self, part: object) -> str:
        """Write a part that must end by itself. Raises UnsupportedGrammarError for free text."""
        if _is_free(part):
            raise _refused("Free text must be the last part of an answer or of a tag: nothing else says where it ends")
        return self._part(part, None)

    def _repeating(self, parts: Iterable[object]) -> list[str]:
        """Write parts, each limited, of which there may be any number. Of repeats within a repeat a text may be any:
        `(a+)+` has as many readings as a client's own rules."""
        self._is_ambiguous |= self._num_repeats_around > 0
        self._num_repeats_around += 1
        found = [self._limited(part) for part in parts]
        self._num_repeats_around -= 1
        return found

    # --- parts that end by themselves ---

    def _const_string(self, part: Format, ends: list[Mark] | None) -> str:
        _refuse_unknown_keys(part, {"type", "value"})
        return _followed(_lark(self._mark(_text(part, "value"))), ends)

    def _token(self, part: Format, ends: list[Mark] | None) -> str:
        return _followed(_lark(self._mark(part)), ends)

    def _json_schema(self, part: Format, ends: list[Mark] | None) -> str:
        _refuse_unknown_keys(part, {"type", "json_schema", "style", "any_order"})
        if part.get("style", "json") != "json":
            raise _refused("The `style` of a json_schema can only be 'json'")
        if part.get("any_order", False) is not False:
            raise _refused("`any_order` would let required properties be left out; leave it out")
        schema = part.get("json_schema")
        if schema is not True and not isinstance(schema, dict):
            raise _refused("The `json_schema` must be an object, and allow something")
        made = LLMatcher.grammar_from_json_schema(
            for_llguidance(enforceable(schema if isinstance(schema, dict) else {}))
        )
        return _followed(self._named(json.loads(made)["grammars"][0]), ends)

    def _regex(self, part: Format, ends: list[Mark] | None) -> str:
        _refuse_unknown_keys(part, {"type", "pattern"})
        made = json.loads(LLMatcher.grammar_from_regex(_text(part, "pattern")))["grammars"][0]
        if ends is None or not all(map(_is_plain, ends)):
            return _followed(self._named(made), ends)
        # Pattern and end must be one lexeme: a pattern that allows its own end would run over it.
        return self._up_to(self._free_text({}, ends, made["lark_grammar"].removeprefix("start: ")), ends)

    def _grammar(self, part: Format, ends: list[Mark] | None) -> str:
        _refuse_unknown_keys(part, {"type", "grammar"})
        text = _text(part, "grammar")
        try:
            lark = any_to_lark(text)
        except Exception as error:  # it may be of any kind: the parser is written in Python, for good input
            raise _refused("A `grammar` is neither Lark nor GBNF") from error
        return _followed(self._named({"lark_grammar": f"{RULES_OF_A_CLIENT}\n{lark}"}), ends)

    # --- parts made of others ---

    def _sequence(self, part: Format, ends: list[Mark] | None) -> str:
        _refuse_unknown_keys(part, {"type", "elements"})
        *first, last = _list(part, "elements")
        return " ".join([*(self._limited(one) for one in first), self._part(last, ends)])

    def _or(self, part: Format, ends: list[Mark] | None) -> str:
        _refuse_unknown_keys(part, {"type", "elements"})
        return _followed(_either(self._limited(way) for way in _list(part, "elements")), ends)

    def _repeated(self, part: Format, ends: list[Mark] | None) -> str:
        kind = part["type"]
        _refuse_unknown_keys(part, {"type", "content"} | ({"min", "max"} if kind == "repeat" else set()))
        content = part.get("content")
        if kind == "optional":
            return _followed(f"({self._limited(content)})?", ends)
        [inner] = self._repeating([content])
        if kind != "repeat":
            return _followed(f"({inner}){_TIMES[kind]}", ends)
        least, most = part.get("min"), part.get("max")
        if most == -1 and _is_count(least, _MAX_REPEATS):
            return _followed(f"({inner}){{{least},}}", ends)
        if not (_is_count(least, _MAX_REPEATS) and _is_count(most, _MAX_REPEATS) and least <= most):
            raise _refused(f"`min` and `max` of a repeat must be 0 to {_MAX_REPEATS}, or `max` -1 for any number")
        return _followed(f"({inner}){{{least},{most}}}", ends)

    def _tag(self, part: Format, ends: list[Mark] | None) -> str:
        _refuse_unknown_keys(part, {"type", "begin", "content", "end"})
        return _followed(f"{_lark(self._mark(part.get('begin')))} {self._content(part)}", ends)

    def _content(self, tag: Format) -> str:
        """Write a tag without its beginning: its content and its end."""
        end = tag.get("end")
        ends = end if isinstance(end, list) and end else [end]
        return self._part(tag.get("content"), [self._mark(one) for one in ends])

    def _tags_with_separator(self, part: Format, ends: list[Mark] | None) -> str:
        _refuse_unknown_keys(part, {"type", "tags", "separator", "at_least_one", "stop_after_first"})
        either = _either(self._repeating(_tag(tag) for tag in _list(part, "tags")))
        separator = _lark(self._mark(_text(part, "separator")))
        tags = either if _flag(part, "stop_after_first") else f"{either} ({separator} {either})*"
        return _followed(f"({tags})" if _flag(part, "at_least_one") else f"({tags})?", ends)

    # --- free text ---

    def _any_text(self, part: Format, ends: list[Mark] | None) -> str:
        _refuse_unknown_keys(part, {"type", "excludes", "max_chars", "max_tokens"})
        if "max_tokens" in part:
            raise _refused("`max_tokens` of any_text is not supported; use `max_chars`")
        most = part.get("max_chars")
        if most is not None and not _is_count(most, _MAX_CHARS):
            raise _refused(f"`max_chars` must be 0 to {_MAX_CHARS}")
        pattern = _ANY if most is None else rf"/(.|\n){{0,{most}}}/"
        return self._up_to(self._free_text(part, ends or [], pattern), ends)

    def _triggered_tags(self, part: Format, ends: list[Mark] | None) -> str:
        _refuse_unknown_keys(part, {"type", "triggers", "tags", "at_least_one", "stop_after_first", "excludes"})
        behind: dict[str, list[str]] = {trigger: [] for trigger in _texts(part, "triggers")}
        for tag in map(_tag, _list(part, "tags")):
            begin = _text(tag, "begin")
            fitting = [trigger for trigger in behind if begin.startswith(trigger)]
            if len(fitting) != 1:
                raise _refused(f"The tag {begin[:40]!r} must begin with one of the triggers; {len(fitting)} fit")
            rest = _lark(self._mark(begin.removeprefix(fitting[0])))
            behind[fitting[0]].append(f"{rest} {self._content(tag)}")
        if idle := [trigger for trigger, ways in behind.items() if not ways]:
            raise _refused(f"No tag begins with the trigger {idle[0][:40]!r}")
        first, once = _flag(part, "at_least_one"), _flag(part, "stop_after_first")
        return self._dispatched(part, behind, ends, begins=first, loop=not once)

    def _dispatch(self, part: Format, ends: list[Mark] | None) -> str:
        _refuse_unknown_keys(part, {"type", "rules", "loop", "excludes"})
        behind: dict[str, list[str]] = {}
        for rule in _list(part, "rules"):
            if not isinstance(rule, list) or len(rule) != 2 or not isinstance(rule[0], str) or not rule[0]:
                raise _refused("Each of the `rules` of a dispatch must be a list of a text and a format")
            behind.setdefault(rule[0], []).append(self._limited(rule[1]))
        return self._dispatched(part, behind, ends, begins=False, loop=_flag(part, "loop", default=True))

    def _dispatched(
        self, part: Format, behind: Mapping[str, list[str]], ends: list[Mark] | None, *, begins: bool, loop: bool
    ) -> str:
        """Write free text with triggers in it: each is followed by one of the parts that are `behind` it. `begins`: the
        text must begin with a trigger. `loop`: there may be more than one."""
        marks = {trigger: self._mark(trigger) for trigger in behind}
        _tell_apart(list(marks.values()), ends or [])
        text = self._free_text(part, [*marks.values(), *(ends or [])])
        whole = _either(f"{_lark(marks[trigger])} {_either(ways)}" for trigger, ways in behind.items())
        if begins and not loop:
            return _followed(whole, ends)
        found = _either(f"{self._up_to(text, [marks[trigger]])} {_either(ways)}" for trigger, ways in behind.items())
        rest = self._up_to(text, ends)
        if not loop:
            return f"({rest} | {_followed(found, ends)})"
        return f"{whole} {found}* {rest}" if begins else f"{found}* {rest}"

    def _free_text(self, part: Format, marks: list[Mark], pattern: str = _ANY) -> str:
        """Write a terminal for text that has none of the marks in it, nor what the part excludes, and return its name.
        A text that is only lazy up to a mark would leave it to the library what stands behind the last mark."""
        excluded = [self._mark(one) for one in _texts(part, "excludes")] if part.get("excludes") else []
        if not all(map(_is_plain, excluded)):
            raise _refused("`excludes` must be texts: free text has no special tokens")
        bans = [_lark(mark) for mark in [*excluded, *marks] if _is_plain(mark)]
        name = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{name}: {pattern}" + (f" & ~({_ANY} {_either(bans)} {_ANY})" if bans else ""))
        return name

    def _up_to(self, text: str, ends: list[Mark] | None) -> str:
        """Write free text up to and with the first of the ends. Ends that are text of several bytes need a lazy rule.
        No text can go on over an end that begins with a special token or is a single byte. (Lazily up to a single byte,
        llguidance 1.9 panics right behind a number.)"""
        if ends is None:
            return text
        long = [_lark(end) for end in ends if _is_plain(end) and len(str(end[0]).encode()) > 1]
        others = [end for end in ends if not (_is_plain(end) and len(str(end[0]).encode()) > 1)]
        if not all(_is_plain(end) or (end and isinstance(end[0], int)) for end in others):
            raise _refused("What ends free text must not be empty, and have special tokens only at its beginning")
        ways = [self._lazy_rule(f"{text} {_either(long)}")] if long else []
        return _either([*ways, *(f"{text} {_lark(end)}" for end in others)])

    # --- rules ---

    def _lazy_rule(self, expression: str) -> str:
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: {expression}")
        return name

    def _named(self, grammar: Mapping[str, Any]) -> str:
        name = f"part_{len(self._grammars)}"
        self._grammars.append({**grammar, "name": name})
        return f"@{name}"

    def _mark(self, said: object) -> Mark:
        """The mark that a text, or a format `token`, stands for. Raises UnsupportedGrammarError."""
        if isinstance(said, str):
            return tuple(self._pieces(said))
        if _kind(said) != "token":
            raise _refused("Where a tag begins and ends must be said by a text, or by a format `token`")
        part = _object(said)
        _refuse_unknown_keys(part, {"type", "token"})
        token = part.get("token")
        ids = self._tokenizer.tokenize_str(token, parse_special=True) if isinstance(token, str) else [token]
        if len(ids) != 1 or not _is_count(ids[0], self._tokenizer.vocab_size - 1):
            raise _refused("A `token` must be the id of one of the model's tokens, or its text")
        return (self._without_end(ids[0]),)

    def _pieces(self, text: str) -> Iterator[str | int]:
        for token_id in self._tokenizer.tokenize_str(text, parse_special=True):
            if self._tokenizer.is_special_token(token_id):
                before, name, text = text.partition(self._tokenizer.decode_str([token_id]))
                if not name:
                    raise _refused(f"The special tokens in {text[:40]!r} cannot be told from its text")
                if before:
                    yield before
                yield self._without_end(token_id)
        if text:
            yield text

    def _without_end(self, token_id: int) -> int:
        if token_id in self._tokenizer.eos_tokens:
            raise _refused("The token that ends an answer cannot be a part of it")
        return token_id


_TIMES: Final = {"star": "*", "plus": "+"}


def _is_free(part: object) -> bool:
    """Whether a part ends in free text, so that only what follows it says where it ends."""
    kind = _kind(part)
    inner = _object(part)
    if kind == "sequence":
        return _is_free(_list(inner, "elements")[-1])
    once = inner.get("at_least_one") is True and inner.get("stop_after_first") is True
    return kind in ("any_text", "dispatch") or (kind == "triggered_tags" and not once)


def _tell_apart(triggers: list[Mark], ends: list[Mark]) -> None:
    """Check that no trigger stands within another, or within an end or around one: the shorter would hide the longer.
    Raises UnsupportedGrammarError."""
    for number, trigger in enumerate(triggers):
        for other in [*triggers[number + 1 :], *ends]:
            both = [piece for mark in (trigger, other) for piece in mark if isinstance(piece, str)]
            if trigger == other or (len(both) == 2 and (both[0] in both[1] or both[1] in both[0])):
                raise _refused(f"The trigger {_lark(trigger)[:40]} and {_lark(other)[:40]} cannot be told apart")


def _is_plain(mark: Mark) -> bool:
    return len(mark) == 1 and isinstance(mark[0], str)


def _lark(mark: Mark) -> str:
    return " ".join(json.dumps(piece) if isinstance(piece, str) else f"<[{piece}]>" for piece in mark) or '""'


def _either(ways: Iterable[str]) -> str:
    return f"({' | '.join(ways)})"


def _followed(expression: str, ends: list[Mark] | None) -> str:
    return expression if ends is None else f"{expression} {_either(map(_lark, ends))}"


# --- what clients send ---


def _refused(sentence: str) -> UnsupportedGrammarError:
    return UnsupportedGrammarError(f"{sentence}.")


def _given(part: Format) -> Format:
    """The members that are given: null stands for one that is not."""
    return {name: value for name, value in part.items() if value is not None}


def _object(part: object) -> Format:
    if not isinstance(part, dict):
        raise _refused("Each format must be an object with a `type`, such as {'type': 'any_text'}")
    return _given(part)


def _kind(part: object) -> str:
    kind = _object(part).get("type")
    if not isinstance(kind, str):
        raise _refused("Each format must have a `type`, such as 'any_text'")
    return kind


def _tag(part: object) -> Format:
    tag = {"type": "tag", **_object(part)}
    if tag["type"] != "tag":
        raise _refused("Each of the `tags` must be a format `tag`")
    _refuse_unknown_keys(tag, {"type", "begin", "content", "end"})
    return tag


def _refuse_unknown_keys(part: Format, known: set[str]) -> None:
    stranger = next((name for name in part if name not in known), None)
    if stranger is not None:
        raise _refused(f"{stranger[:40]!r} is not known in the format {str(part.get('type', 'structural_tag'))[:40]!r}")


def _text(part: Format, name: str) -> str:
    if not isinstance(part.get(name), str):
        raise _refused(f"The `{name}` of a format must be a text")
    return str(part[name])


def _list(part: Format, name: str) -> list[Any]:
    found = part.get(name)
    if not isinstance(found, list) or not found:
        raise _refused(f"The `{name}` of a format must be a list that is not empty")
    return found


def _texts(part: Format, name: str) -> list[str]:
    found = _list(part, name)
    if not all(isinstance(text, str) and text for text in found):
        raise _refused(f"The `{name}` of a format must be texts that are not empty")
    return found


def _flag(part: Format, name: str, *, default: bool = False) -> bool:
    found = part.get(name, default)
    if not isinstance(found, bool):
        raise _refused(f"The `{name}` of a format must be true or false")
    return found


def _is_count(value: object, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
