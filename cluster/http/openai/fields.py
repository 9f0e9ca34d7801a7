"""Fields of OpenAI's requests that take several forms, each normalised to one.

Every validator raises `field_error(code, sentence)`. Code and sentence reach the client as they are where
`cluster.http.error_responses` knows the code; any other becomes `invalid_value`.
Knows nothing of the model (vocabulary, context): `cluster.http.parse` and `cluster.http.prompts` check what depends on
it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from engine.sampling.params import MAX_LOGIT_BIAS

MAX_STOP_STRINGS: Final = 64
MAX_STOP_CHARS: Final = 1024  # of one stop string
MAX_ALL_STOP_CHARS: Final = 4096
MAX_BAD_WORDS: Final = 256
MAX_BAD_WORD_CHARS: Final = 4096  # of all together
# Bounds of what a chat template is given besides the messages: templates are programs that work on it.
MAX_TEMPLATE_CHARS: Final = 4_096  # of all names and texts together
MAX_TEMPLATE_VALUES: Final = 256
MAX_TEMPLATE_DEPTH: Final = 8
MAX_TEMPLATE_NUMBER: Final = 2**20  # a template may write something so many times
MAX_DOCUMENTS: Final = 128
MAX_METADATA: Final = 16
# Variables of templates that the server sets, or that a field of their own says.
SERVER_VARIABLES: Final = frozenset(
    {"messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt"}
    | {"continue_final_message", "return_assistant_tokens_mask", "reasoning_effort", "verbosity"}
)
# Those of them that a model cannot be set to tell its template where a request does not.
WITHOUT_DEFAULT: Final = SERVER_VARIABLES - {"reasoning_effort", "verbosity"}

Prompt = str | list[int]


def field_error(code: str, sentence: str) -> PydanticCustomError:
    """What a validator raises. The sentence may have braces, which would be taken for a template."""
    return PydanticCustomError(code, "{sentence}", {"sentence": sentence})


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def parse_prompts(value: object) -> list[Prompt]:
    """Normalise a text, a list of texts, token ids, or a list of lists of token ids to a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise field_error("invalid_type", "send a text, a list of texts, a list of token ids, or a list of those")
    if all(isinstance(item, str) for item in value):
        return value
    if _is_token_ids(value):
        return [value]
    if all(_is_token_ids(item) for item in value):
        return value
    raise field_error(
        "invalid_type", "the list must hold either texts only, token ids only, or lists of token ids only"
    )


def parse_stop(value: object) -> list[str]:
    """Normalise None, a text, or several to a list of non-empty texts."""
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise field_error("invalid_type", "send a text or a list of texts")
    if len(texts) > MAX_STOP_STRINGS:
        raise field_error(
            "invalid_value", f"{len(texts)} stop texts were sent; at most {MAX_STOP_STRINGS} are possible"
        )
    if not all(texts):
        raise field_error("invalid_value", "a stop text must not be empty; leave it out instead")
    if (longest := max(map(len, texts), default=0)) > MAX_STOP_CHARS:
        raise field_error(
            "invalid_value", f"a stop text has {longest} characters; at most {MAX_STOP_CHARS} are possible"
        )
    if (total := sum(map(len, texts))) > MAX_ALL_STOP_CHARS:
        raise field_error(
            "invalid_value", f"the stop texts have {total} characters; at most {MAX_ALL_STOP_CHARS} are possible"
        )
    return texts


def parse_bad_words(value: object) -> list[str]:
    """Normalise None or a list of texts to a list of non-empty texts."""
    texts = [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise field_error("invalid_type", "send a list of texts")
    if len(texts) > MAX_BAD_WORDS:
        raise field_error("invalid_value", f"{len(texts)} texts were sent; at most {MAX_BAD_WORDS} are possible")
    if not all(text.strip() for text in texts):
        raise field_error("invalid_value", "a text must not be empty; leave it out instead")
    if (total := sum(map(len, texts))) > MAX_BAD_WORD_CHARS:
        raise field_error("invalid_value", f"they have {total} characters; at most {MAX_BAD_WORD_CHARS} are possible")
    return texts


def parse_content(value: object) -> str:
    """Normalise the content of a message, a text or a list of parts of type `text`, to one text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise field_error("invalid_type", "send a text, or a list of parts such as {'type': 'text', 'text': 'hello'}")
    return "".join(_text_of(part, index) for index, part in enumerate(value))


def _text_of(part: object, index: int) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise field_error("invalid_type", f"part {index} must be an object with a `type`")
    kind = part["type"]
    if kind not in ("text", "refusal"):  # an assistant's refusal is what it said
        raise field_error(
            "unsupported_value", f"part {index} is of type {kind[:40]!r}; this model reads parts of type 'text' only"
        )
    if not isinstance(part.get(kind), str):
        raise field_error("invalid_type", f"part {index} must have a `{kind}` that is a text")
    text: str = part[kind]
    return text


def parse_template_kwargs(value: object) -> dict[str, Any]:
    """Check what a request has its chat template told besides the messages."""
    return template_kwargs(value, SERVER_VARIABLES)


def template_kwargs(value: object, taken: Collection[str]) -> dict[str, Any]:
    """Check what a chat template is told besides the messages: names, none of them `taken`, with JSON values, which
    must be few and small."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise field_error("invalid_type", 'send an object of names and values, such as {"enable_thinking": false}')
    for name in value:
        if not (name.isascii() and name.isidentifier()) or name.startswith("_") or len(name) > 64:
            raise field_error("invalid_value", f"{name[:40]!r} is no name of a template's variable")
        if name in taken:
            raise field_error(
                "invalid_value", f"{name!r} is not told in this way; if there is a field of this name, use it"
            )
    _require_small(value)
    return dict(value)


def _require_small(value: object) -> None:
    """Refuse a value that a template could work on for long."""
    num_chars = num_values = 0
    waiting = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        num_values += 1
        if isinstance(item, str):
            num_chars += len(item)
        elif isinstance(item, int | float) and abs(item) > MAX_TEMPLATE_NUMBER:
            raise field_error("invalid_value", f"a number in it is beyond {MAX_TEMPLATE_NUMBER}; send it as a text")
        elif isinstance(item, Mapping):
            num_chars += sum(map(len, item))
            waiting += [(inner, depth + 1) for inner in item.values()]
        elif isinstance(item, list):
            waiting += [(inner, depth + 1) for inner in item]
        for what, number, limit in (
            ("characters", num_chars, MAX_TEMPLATE_CHARS),
            ("values", num_values + len(waiting), MAX_TEMPLATE_VALUES),
            ("levels", depth, MAX_TEMPLATE_DEPTH),
        ):
            if number > limit:
                raise field_error("invalid_value", f"it has more than {limit} {what}; send less")


def parse_documents(value: object) -> list[dict[str, str]]:
    """Check what the chat template shows a model as its sources: objects of texts, such as a title and a text."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(document, Mapping) for document in value):
        raise field_error("invalid_type", 'send a list of objects, such as [{"title": "Sea", "text": "It is wide."}]')
    if len(value) > MAX_DOCUMENTS:
        raise field_error("invalid_value", f"{len(value)} documents were sent; at most {MAX_DOCUMENTS} are possible")
    for index, document in enumerate(value):
        if len(document) > 16 or not all(isinstance(text, str) for text in document.values()):
            raise field_error("invalid_type", f"document {index} must be an object of up to 16 texts")
    return value


def parse_metadata(value: object) -> dict[str, str] | None:
    """Check OpenAI's `metadata`: few names, each with a short text."""
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise field_error("invalid_type", "send an object of texts")
    if len(value) > MAX_METADATA:
        raise field_error("invalid_value", f"{len(value)} texts were sent; at most {MAX_METADATA} are possible")
    for name, text in value.items():
        if len(name) > 64 or len(text) > 512:
            raise field_error("invalid_value", "a name has at most 64 characters, and a text 512")
    return value


def parse_logit_bias(value: object) -> dict[int, float]:
    """Normalise a mapping of token ids (as JSON's keys: texts of digits) to numbers in [-100, 100]."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise field_error("invalid_type", 'send an object of token ids and numbers, such as {"50": -100}')
    if len(value) > MAX_LOGIT_BIAS:
        raise field_error("invalid_value", f"{len(value)} tokens were sent; at most {MAX_LOGIT_BIAS} are possible")
    return {_token_id(key): _bias(key, bias) for key, bias in value.items()}


def _token_id(key: object) -> int:
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10:
        return int(key)
    raise field_error("invalid_value", f'{str(key)[:40]!r} is no token id; keys must be token ids such as "50"')


def _bias(key: object, bias: object) -> float:
    if isinstance(bias, int | float) and not isinstance(bias, bool) and -100 <= bias <= 100:
        return float(bias)
    raise field_error("invalid_value", f"the bias of token {str(key)[:40]} must be a number from -100 to 100")


def refuse(value: Any) -> None:
    """Refuse any value that asks for something in a field of OpenAI's API that would change the answer and that Legato
    cannot honour."""
    if value is None or value is False or value in ([], {}, "", "none", "auto"):
        return
    raise field_error("unsupported_parameter", "this parameter is not supported yet; leave it out")


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether functions may be called, or must be. `names`: which of them, None: all. `once`: at most one call."""

    mode: Literal["none", "auto", "required"]
    names: frozenset[str] | None = None
    once: bool = False


def parse_tool_choice(value: object) -> ToolChoice:
    """Normalise `tool_choice`: a word; one function, which must be called; or `allowed_tools`, of which any may be
    called or some must be."""
    if value is None:
        return ToolChoice("auto")
    if value == "none" or value == "auto" or value == "required":
        return ToolChoice(value)
    if isinstance(value, Mapping) and value.get("type") == "function":
        return ToolChoice("required", frozenset([_function_name(value)]), once=True)
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
        allowed = value.get("allowed_tools")
        if isinstance(allowed, Mapping) and isinstance(allowed.get("tools"), list) and allowed["tools"]:
            mode = allowed.get("mode")
            if mode == "auto" or mode == "required":
                return ToolChoice(mode, frozenset(map(_function_name, allowed["tools"])))
        raise field_error("invalid_value", "allowed_tools needs a `mode`, 'auto' or 'required', and a list of `tools`")
    raise field_error(
        "invalid_value", "send 'none', 'auto', 'required', or {'type': 'function', 'function': {'name': 'one'}}"
    )


def _function_name(value: object) -> str:
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise field_error("invalid_value", "a function is written {'type': 'function', 'function': {'name': 'one'}}")
    return name


def parse_parameters(value: object) -> dict[str, Any] | None:
    """Check the JSON schema of a function's arguments, as far as its shape tells whether it is one."""
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type", "object") != "object":
        raise field_error(
            "invalid_type", "send a JSON schema of an object, such as {'type': 'object', 'properties': {}}"
        )
    properties, required = value.get("properties", {}), value.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(inner, dict | bool) for inner in properties.values()):
        raise field_error("invalid_type", "`properties` of the schema must be an object of schemas")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise field_error("invalid_type", "`required` of the schema must be a list of names")
    return value


def _only_text(value: Any) -> None:
    if value is not None and value != ["text"]:
        raise field_error("unsupported_value", "only the modality 'text' is supported; leave this out")


def _non_negative(value: Sequence[int]) -> Sequence[int]:
    if any(token_id < 0 for token_id in value):
        raise field_error("invalid_value", "token ids must be 0 or larger")
    return value


Prompts = Annotated[list[Prompt], BeforeValidator(parse_prompts, json_schema_input_type=Any)]
Stop = Annotated[list[str], BeforeValidator(parse_stop, json_schema_input_type=str | list[str] | None)]
Content = Annotated[str, BeforeValidator(parse_content, json_schema_input_type=Any)]
LogitBias = Annotated[
    dict[int, float], BeforeValidator(parse_logit_bias, json_schema_input_type=dict[str, float] | None)
]
BadWords = Annotated[list[str], BeforeValidator(parse_bad_words)]
TemplateKwargs = Annotated[dict[str, Any], BeforeValidator(parse_template_kwargs)]
Metadata = Annotated[
    dict[str, str] | None, BeforeValidator(parse_metadata, json_schema_input_type=dict[str, str] | None)
]
Documents = Annotated[list[dict[str, str]], BeforeValidator(parse_documents)]
# The first bad item is enough: a million of them must not cost a million error reports.
TokenIds = Annotated[list[int], Field(fail_fast=True), AfterValidator(_non_negative)]
ChosenTools = Annotated[Any, BeforeValidator(parse_tool_choice, json_schema_input_type=Any)]
Parameters = Annotated[
    dict[str, Any] | None, BeforeValidator(parse_parameters, json_schema_input_type=dict[str, Any] | None)
]
Unsupported = Annotated[Any, AfterValidator(refuse)]
TextOnly = Annotated[Any, AfterValidator(_only_text)]
Harmless = Any  # changes neither the answer nor its form, so it is accepted and ignored
