"""Text to token ids and back: whole texts, chats, and streams of tokens.

`Tokenizer` wraps the tokenizer of a checkpoint folder, and its chat template. `IncrementalDetokenizer` turns one
sequence's tokens into text as they come; `StopChecker` looks for stop strings in that text. The gateway uses all three.

Text is the concatenation of its tokens' bytes, decoded as UTF-8. That holds for the two kinds of tokenizer that the
supported model families use, and lets text be produced token by token in constant time. How they spell bytes is read
from the decoder that tokenizer.json declares:

* byte-level BPE (Llama 3, Qwen, SmolLM2): every byte is written as one printable character;
* SentencePiece-like BPE (Gemma, Llama 2, Mistral): `▁` stands for a space, `<0x0A>` for one byte.
"""

from __future__ import annotations

import codecs
import json
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import tokenizers
from jinja2 import TemplateError

from engine.checkpoint.cache import Json, remembered
from engine.checkpoint.gguf.store import GGUF_NAME

Message = dict[str, Any]

NO_VARIABLES: Final[Mapping[str, Any]] = MappingProxyType({})
# What a template's code raises on what it did not expect: its own words, or Python's of a text where a list should be,
# a division by nothing, a range that the sandbox forbids.
_REFUSALS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
_MAX_REFUSAL = 300  # characters of what it says

Spelling = Callable[[str], bytes]
"""A token as the vocabulary writes it -> the bytes it stands for."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


def read_spelling(decoder: dict[str, Any] | None) -> tuple[Spelling, bool]:
    """The spelling, and whether one space at the very start of a text is dropped.

    `decoder` is that part of tokenizer.json. Raises ValueError for one of another kind.
    """
    steps = _steps(decoder)
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return spell_byte_level, False
    replaces_space = any(
        step["type"] == "Replace" and step["pattern"] == {"String": _SPACE} and step["content"] == " " for step in steps
    )
    if replaces_space and "ByteFallback" in kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return spell_sentencepiece, "Strip" in kinds
    raise ValueError(
        f"the tokenizer decodes with {sorted(kinds) or 'nothing'}; supported are byte-level and SentencePiece-like BPE"
    )


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def spell_byte_level(token: str) -> bytes:
    """A token with a character outside the byte alphabet was added as plain text and stands for itself."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


def spell_sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return token.replace(_SPACE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """The bytes of byte-level BPE by character. Those that Latin-1 prints stand for themselves; the others follow, in
    order, from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


_MAX_CHARACTER_BYTES = 4  # of one character in UTF-8
_MAX_TAIL_TOKENS = 256  # of a prompt; it may be long and hold no text, only special tokens
_LONG_TEXT_CHARS = 1_000  # from here on a second switch of threads costs nothing beside the work


class Tokenizer:
    """The tokenizer of a checkpoint folder. Reading it takes about a second for a large vocabulary.

    `vocab_size` is the number of ids the tokenizer knows; the model's own may be larger, padded to a round number.
    `eos_token_ids` are the tokens after which the model has nothing more to say.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ValueError where the folder has no tokenizer of a supported kind."""
        known = _read_cached(folder)
        self._backend = tokenizers.Tokenizer.from_str(known["backend"])
        self._chat_templates: dict[str, str] = known["chat_templates"]
        self._special_tokens: dict[str, Any] = known["special_tokens"]
        self.response_template: dict[str, Any] | None = known["response_template"]  # how it says that it writes calls
        if self.has_chat_template:
            _chat_renderer()  # now, and not when the first chat waits for it
        self._spell, self.strips_leading_space = read_spelling(known["decoder"])
        self._bytes: dict[int, bytes] = {}  # filled as tokens come: spelling all of a large vocabulary takes a while
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self.vocab_size: int = known["vocab_size"]
        self.longest_token_chars: int = known["longest_token_chars"]  # no token stands for more characters of a text
        # An id that it lacks, such as a base model's whose vocabulary was cut, ends nothing; grammars refuse it.
        self.eos_token_ids = frozenset(end for end in eos_token_ids(folder) if 0 <= end < self.vocab_size)

    @cached_property
    def json(self) -> str:
        """The tokenizer as tokenizer.json writes one, with all added tokens."""
        text: str = self._backend.to_str()
        return text

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises ValueError for text that is no Unicode: half of a surrogate pair.

        While it works on a long text, other threads run.
        """
        try:
            if len(text) <= _LONG_TEXT_CHARS:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            else:  # the same, without the interpreter's lock
                (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
        except TypeError:
            raise ValueError("the text holds half of a surrogate pair, which is no Unicode character") from None
        return ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of the tokens; ids unknown to the tokenizer stand for nothing, invalid UTF-8 for U+FFFD."""
        kept = (i for i in token_ids if not (skip_special_tokens and i in self.special_token_ids))
        text = b"".join(map(self.token_bytes, kept)).decode(errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text. It need not be valid UTF-8: a character can be spread over tokens."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id)
            known = self._bytes[token_id] = b"" if token is None else self._spell(token)
        return known

    def token_name(self, token_id: int) -> str:
        """A token as the vocabulary writes it, its spaces marked; "" for an id that it lacks."""
        return self._backend.id_to_token(token_id) or ""

    def text_end(self, token_ids: Sequence[int]) -> list[int]:
        """Enough of the last tokens that have text to know whether it stops inside a character, or is any at all: for
        `IncrementalDetokenizer` they are as good as the whole prompt, which may be searched for long."""
        end: list[int] = []
        num_bytes = 0
        for token_id in islice(reversed(token_ids), _MAX_TAIL_TOKENS):
            if num_bytes >= _MAX_CHARACTER_BYTES:
                break
            if token_id not in self.special_token_ids:
                end.append(token_id)
                num_bytes += len(self.token_bytes(token_id))
        end.reverse()
        return end

    @property
    def chat_template(self) -> str:
        """ "": it has none."""
        return self._chat_templates.get("default", "")

    @property
    def tools_template(self) -> str:
        """The chat template of chats with tools."""
        return self._chat_templates.get(_template_name(self._chat_templates, has_tools=True), "")

    def special_ids_of(self, marks: Iterable[str]) -> frozenset[int]:
        """The ids of those marks that are special tokens, which a text lacks unless they are asked for."""
        ids = map(self._backend.token_to_id, marks)
        return self.special_token_ids.intersection(token_id for token_id in ids if token_id is not None)

    def added_id_of(self, mark: str) -> int | None:
        """The token that stands for a mark wherever that is meant; None: it is spelt by several, or in several ways."""
        found: int | None = self._added_ids.get(mark)
        return found

    def template_reads(self, name: str) -> bool:
        """Whether a chat template has a word such as `enable_thinking`: one that it lacks would change nothing."""
        templates = self.chat_template, self.tools_template
        return any(re.search(rf"\b{re.escape(name)}\b", template) for template in templates)

    def require_template_reads(self, defaults: Iterable[str]) -> None:
        """Check the names of what a chat template is to be told of every chat. Raises ValueError, with advice, for one
        that it does not read, and for one that the model sets."""
        for name in defaults:
            if name in self._special_tokens:
                why = f"the chat template gets {name} from the model"
            elif not self.template_reads(name):
                why = f"this model has no chat template that reads {name}, so it would change nothing"
            else:
                continue
            raise ValueError(f"{why}; leave it out of model.chat_template_kwargs")

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] = NO_VARIABLES,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        max_chars: int | None = None,
    ) -> list[int]:
        """The prompt of a chat, ending where the answer begins, or with the last message's content where that is to be
        continued. `variables` are what the template may ask for besides, of JSON's types.

        Raises ValueError where the model has no template, where the template refuses what it is given, and where it
        makes more than `max_chars` of it.
        """
        if not self.has_chat_template:
            raise ValueError(
                "this model has no chat template: it is a base model, made to continue text; use /v1/completions"
            )
        if taken := self._special_tokens.keys() & variables.keys():
            raise ValueError(f"the chat template gets {min(taken)!r} from the model; leave it out")
        settings = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        try:
            prompt = _render_chat(self._chat_templates, {**self._special_tokens, **variables}, messages, **settings)
        except _REFUSALS as error:
            told = str(error).split("\n")[0][:_MAX_REFUSAL]  # it may hold the whole prompt
            raise ValueError(f"the model's chat template refuses these messages: {told}") from error
        if max_chars is not None and len(prompt) > max_chars:
            raise ValueError(f"the model's chat template makes {len(prompt)} characters of them")
        # The template spells out the special tokens, the first one included.
        return self.encode(prompt, add_special_tokens=False)


def tokenizer_json(folder: Path) -> str:
    """The tokenizer of a checkpoint folder as tokenizer.json writes one, with all added tokens."""
    backend: str = _read_cached(folder)["backend"]
    return backend


def vocabulary(folder: Path) -> dict[str, int]:
    """The id of each token of a checkpoint folder, added ones included."""
    ids: dict[str, int] = tokenizers.Tokenizer.from_str(tokenizer_json(folder)).get_vocab(with_added_tokens=True)
    return ids


def _read_cached(folder: Path) -> Json:
    return remembered("tokenizer", _files(folder), lambda: _read(folder))


def _files(folder: Path) -> list[Path]:
    """All that a tokenizer is made from, and this code."""
    named = [path for path in folder.iterdir() if path.suffix in (".json", ".jinja", ".txt", ".model")]
    return [Path(__file__), *sorted(named), *sorted(folder.glob("additional_chat_templates/*.jinja"))]


def _read(folder: Path) -> Json:
    """What transformers makes of a folder."""
    # They take seconds to import: only a checkpoint's first start pays for it.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # Of a GGUF file tokenizer.json is what counts. By the config's model type AutoTokenizer chooses a model's own class
    # for some, whatever tokenizer_config.json names, and that puts rules of its own in place of the file's.
    reader = PreTrainedTokenizerFast if (folder / GGUF_NAME).exists() else AutoTokenizer
    try:
        tokenizer = reader.from_pretrained(folder, trust_remote_code=False)
    except ValueError:
        raise
    except Exception as error:  # whatever transformers raises over what a file holds
        raise ValueError(f"the tokenizer in {folder} cannot be read ({error!r}); fetch it again") from error
    if not tokenizer.is_fast:
        raise ValueError(f"{folder} has no tokenizer.json, nor anything that one can be made from")
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend, num_left_out = _within(backend, _num_embeddings(folder))
    templates = tokenizer.chat_template
    return {
        "backend": (text := backend.to_str()),
        "decoder": json.loads(text)["decoder"],
        "vocab_size": len(tokenizer) - num_left_out,
        "longest_token_chars": max(map(len, backend.get_vocab(with_added_tokens=True))),
        "eos_token_id": tokenizer.eos_token_id,
        "chat_templates": {"default": templates} if isinstance(templates, str) else templates or {},
        "special_tokens": tokenizer.special_tokens_map,
        "response_template": getattr(tokenizer, "response_template", None),
    }


def _within(backend: tokenizers.Tokenizer, num_embeddings: int | None) -> tuple[tokenizers.Tokenizer, int]:
    """The tokenizer without the added tokens that the model has no embedding of, such as a picture's in a model for
    text alone, and how many these are. A step could not compute them, so their names are text like any other."""
    if num_embeddings is None or all(token_id < num_embeddings for token_id in backend.get_added_tokens_decoder()):
        return backend, 0
    known = json.loads(backend.to_str())
    added = [token for token in known["added_tokens"] if token["id"] < num_embeddings]
    num_left_out = len(known["added_tokens"]) - len(added)
    known["added_tokens"] = added
    if isinstance(known["model"]["vocab"], dict):  # which may name them, too
        known["model"]["vocab"] = {
            token: token_id for token, token_id in known["model"]["vocab"].items() if token_id < num_embeddings
        }
    return tokenizers.Tokenizer.from_str(json.dumps(known)), num_left_out


def _num_embeddings(folder: Path) -> int | None:
    """How many tokens the model of a folder knows; None: it does not say."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    found = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return found if isinstance(found, int) else None


def eos_token_ids(folder: Path) -> frozenset[int]:
    """The tokens that end an answer, by all who name some: generation_config.json, config.json, and the tokenizer,
    whose own is all that some fine-tunes have changed. Raises ValueError where the folder has no tokenizer that can be
    read."""
    # By itself: a worker needs nothing else of it then, and all of it is megabytes.
    ids = {remembered("eos", _files(folder), lambda: {"id": _read_cached(folder)["eos_token_id"]})["id"]}
    for path in (folder / "generation_config.json", folder / "config.json"):
        stated = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        ids.update(stated if isinstance(stated, list) else [stated])
    return frozenset(ids - {None})


def _template_name(templates: Mapping[str, str], has_tools: bool) -> str:
    """As transformers chooses one."""
    return "tool_use" if has_tools and "tool_use" in templates else "default"


def _render_chat(
    templates: Mapping[str, str], variables: Mapping[str, Any], messages: Sequence[Message], **settings: bool
) -> str:
    """The text of a chat's prompt, rendered by transformers, in its sandbox: templates come with checkpoints, from
    anybody.

    `templates`: by name, "default" and perhaps others, of which "tool_use" is for chats with tools. `variables`,
    special tokens among them, are known to them by name. Members of messages that are None count as absent, as
    templates expect it. Raises ValueError, or whatever the template's code raises, where it refuses the messages.
    """
    if not messages:
        raise ValueError("there is nothing for the chat template to render: a chat needs at least one message")
    name = _template_name(templates, has_tools=variables.get("tools") is not None)
    if name not in templates:
        raise ValueError(f"the model has chat templates {sorted(templates)}, but none that is the default")
    given = [{name: value for name, value in message.items() if value is not None} for message in messages]
    (text,), _ = _chat_renderer()(conversations=[given], chat_template=templates[name], **settings, **variables)
    return str(text)


def _chat_renderer() -> Any:
    # Not at the top: it brings transformers along, and a model without a template can do without.
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


class IncrementalDetokenizer:
    """The text of one sequence's output, token by token; each call costs as much as its own token.

    No piece ends inside a character: its first bytes wait for the rest. All pieces together are what
    `Tokenizer.decode` gives for the output, except that at the border to the prompt nothing is lost: the space that
    begins the output is kept if the prompt has text, and a character that begins in the prompt is completed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """Begin after these tokens of a prompt. With `skip_special_tokens` special ones have no text, but for those
        that are `shown`."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        if shown:
            self._skipped -= shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = b"".join(map(tokenizer.token_bytes, tokenizer.text_end(prompt_token_ids)))
        self._decoder.decode(tail)
        self._strip_next = tokenizer.strips_leading_space and not tail

    def append(self, token_id: int) -> str:
        """The text that this token completes; empty for a token that is skipped, and while a character is
        incomplete."""
        if token_id in self._skipped:
            return ""
        return self._strip(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """After the last token: U+FFFD for a character that never got complete, else nothing."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._strip_next and text:
            self._strip_next = False
            return text.removeprefix(" ")
        return text


class StopChecker:
    """Finds the first of several stop strings in a text that comes in pieces.

    First is the one that ends first, and of those the longest; so how the text is cut into pieces changes nothing.
    Holds back only what could be the start of a stop string. After a match every further piece is dropped.
    `matched` is the one that was met; it is cut off, unless `include` keeps it.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        """Raises ValueError for an empty stop string."""
        if "" in stop:
            raise ValueError("a stop string must not be empty")
        self._machine = _machine(tuple(stop))
        self._state = _NOTHING
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def append(self, text: str) -> tuple[str, bool]:
        """The text that is safe to emit now, and whether a stop string was met. What follows it is cut off."""
        if self.matched is not None:
            return "", True
        num_before = len(self._held)
        text = self._held + text
        following, branches, fallback, met, num_matched = self._machine
        state = self._state
        for index in range(num_before, len(text)):
            state = _after(state, text[index], following, branches, fallback)
            if state in met:
                self.matched, self._held = (found := met[state]), ""
                return text[: index + 1 - (0 if self._include else len(found))], True
        self._state = state
        self._held = text[len(text) - num_matched[state] :]
        return text[: len(text) - num_matched[state]], False

    def flush(self) -> str:
        """After the last piece: what was held back and became no stop string."""
        held, self._held = self._held, ""
        return held


_NOTHING: Final = 0  # the state in which the text ends with no beginning of a stop string


class _Machine(NamedTuple):
    """Tells how much of any of several strings a text so far ends with (Aho and Corasick, 1975). A character takes a
    step or two however many strings there are: a client may send 64, and have 128 choices with long tokens.

    A state is a beginning of some string: the longest one that the text ends with. Nearly all are followed by the next
    one, so that a machine takes little memory. Where a string is met nothing follows, and so no state is behind that.
    """

    following: str  # the character that leads from each state to the next one; `_NONE`: none
    branches: dict[int, dict[str, int]]  # where other characters lead
    fallback: array[int]  # the longest beginning that each state ends with, but for itself
    met: dict[int, str]  # the longest string that a state ends with
    num_matched: array[int]  # characters of each state


_NONE: Final = "\ud800"  # in no text: half of a surrogate pair


def _after(
    state: int,
    character: str,
    following: Sequence[str],
    branches: Mapping[int, Mapping[str, int]],
    fallback: Sequence[int],
) -> int:
    """The state that a machine with these members is in after one more character."""
    while True:
        if following[state] == character:
            return state + 1
        if state in branches and (branch := branches[state].get(character)) is not None:
            return branch
        if state == _NOTHING:
            return _NOTHING
        state = fallback[state]


@lru_cache(maxsize=8)  # each may have a megabyte
def _machine(strings: tuple[str, ...]) -> _Machine:
    """The machine of these strings. All choices of a request share it. It is made on a gateway's loop, of 64 strings of
    1,024 characters at most."""
    following, num_matched = [_NONE], array("i", [0])
    branches: dict[int, dict[str, int]] = {}
    met: dict[int, str] = {}
    added: dict[int, list[tuple[int, int, str]]] = {}  # by length: a state, the one before it, whose beginning it is
    for string in strings:
        state = length = _NOTHING
        while state not in met and length < len(string):
            if following[state] == string[length]:
                state += 1
            elif state in branches and (branch := branches[state].get(string[length])) is not None:
                state = branch
            else:
                break
            length += 1
        if state in met:  # as soon as this one begins another one is met
            continue
        if length < len(string):
            first = len(following)
            added.setdefault(length, []).append((first, state, string))
            if first == state + 1:
                following[state] = string[length]
            else:
                branches.setdefault(state, {})[string[length]] = first
            following += [*string[length + 1 :], _NONE]
            num_matched.extend(range(length + 1, len(string) + 1))
            state = len(following) - 1
        met[state] = string
    fallback = array("i", bytes(num_matched.itemsize * len(num_matched)))
    # What grows, the shortest first, as a state falls back to a shorter one: how far its states are from their lengths,
    # its string, and what the one before falls back to.
    ends: list[tuple[int, str, int]] = []
    for length in range(max(map(len, strings), default=0)):
        ends += [(first - length, string, fallback[before]) for first, before, string in added.get(length, ())]
        going: list[tuple[int, str, int]] = []
        for offset, string, shorter in ends:
            state = offset + length
            if length:  # one character falls back to nothing
                shorter = _after(shorter, string[length], following, branches, fallback)
            if shorter:
                fallback[state] = shorter
                if shorter in met:
                    met.setdefault(state, met[shorter])
            if state not in met:
                going.append((offset, string, shorter))
        ends = going
    return _Machine("".join(following), branches, fallback, met, num_matched)
