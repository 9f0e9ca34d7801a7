"""Fields of OpenAI's requests that take several forms, each normalised to one.

Every validator raises `PydanticCustomError(code, sentence)`. Code and sentence reach the client as they are where
`cluster.http.error_responses` knows the code; any other becomes `invalid_value`.
Knows nothing of the model (vocabulary, context): `cluster.http.parse` checks what depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from engine.sampling.params import MAX_LOGIT_BIAS

MAX_STOP_STRINGS: Final = 4
MAX_STOP_CHARS: Final = 1024  # of one

Prompt = str | list[int]


def _error(code: str, sentence: str) -> PydanticCustomError:
    # Braces would be taken for a template.
    return PydanticCustomError(code, "{sentence}", {"sentence": sentence})


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def parse_prompts(value: object) -> list[Prompt]:
    """A text, a list of texts, token ids, or a list of lists of token ids: as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise _error("invalid_type", "send a text, a list of texts, a list of token ids, or a list of those")
    if all(isinstance(item, str) for item in value):
        return value
    if _is_token_ids(value):
        return [value]
    if all(_is_token_ids(item) for item in value):
        return value
    raise _error("invalid_type", "the list must hold either texts only, token ids only, or lists of token ids only")


def parse_stop(value: object) -> list[str]:
    """None, a text, or up to four texts: as a list of non-empty texts."""
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _error("invalid_type", "send a text or a list of texts")
    if len(texts) > MAX_STOP_STRINGS:
        raise _error("invalid_value", f"{len(texts)} stop texts were sent; at most {MAX_STOP_STRINGS} are possible")
    if not all(texts):
        raise _error("invalid_value", "a stop text must not be empty; leave it out instead")
    if (longest := max(map(len, texts), default=0)) > MAX_STOP_CHARS:
        raise _error("invalid_value", f"a stop text has {longest} characters; at most {MAX_STOP_CHARS} are possible")
    return texts


def parse_content(value: object) -> str:
    """The text of a message: a text, or a list of parts of type `text`."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _error("invalid_type", "send a text, or a list of parts such as {'type': 'text', 'text': 'hello'}")
    return "".join(_text_of(part, index) for index, part in enumerate(value))


def _text_of(part: object, index: int) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise _error("invalid_type", f"part {index} must be an object with a `type`")
    if part["type"] != "text":
        kind = part["type"][:40]
        raise _error(
            "unsupported_value", f"part {index} is of type {kind!r}; this model reads parts of type 'text' only"
        )
    if not isinstance(part.get("text"), str):
        raise _error("invalid_type", f"part {index} must have a `text` that is a text")
    text: str = part["text"]
    return text


def parse_logit_bias(value: object) -> dict[int, float]:
    """Token ids (as JSON's keys: texts of digits) to numbers in [-100, 100]."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _error("invalid_type", 'send an object of token ids and numbers, such as {"50": -100}')
    if len(value) > MAX_LOGIT_BIAS:
        raise _error("invalid_value", f"{len(value)} tokens were sent; at most {MAX_LOGIT_BIAS} are possible")
    return {_token_id(key): _bias(key, bias) for key, bias in value.items()}


def _token_id(key: object) -> int:
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10:
        return int(key)
    raise _error("invalid_value", f'{str(key)[:40]!r} is no token id; keys must be token ids such as "50"')


def _bias(key: object, bias: object) -> float:
    if isinstance(bias, int | float) and not isinstance(bias, bool) and -100 <= bias <= 100:
        return float(bias)
    raise _error("invalid_value", f"the bias of token {str(key)[:40]} must be a number from -100 to 100")


def refuse(value: Any) -> None:
    """For fields of OpenAI's API that would change the answer and that Legato cannot honour."""
    if value is None or value is False or value in ([], {}, "", "none", "auto"):
        return
    raise _error("unsupported_parameter", "this parameter is not supported yet; leave it out")


def _only_text(value: Any) -> None:
    if value is not None and value != ["text"]:
        raise _error("unsupported_value", "only the modality 'text' is supported; leave this out")


def _only_text_format(value: Any) -> None:
    if value is not None and value != {"type": "text"}:
        raise _error("unsupported_value", "only {'type': 'text'} is supported yet; leave this out")


def _non_negative(value: Sequence[int]) -> Sequence[int]:
    if any(token_id < 0 for token_id in value):
        raise _error("invalid_value", "token ids must be 0 or larger")
    return value


Prompts = Annotated[list[Prompt], BeforeValidator(parse_prompts, json_schema_input_type=Any)]
Stop = Annotated[list[str], BeforeValidator(parse_stop, json_schema_input_type=str | list[str] | None)]
Content = Annotated[str, BeforeValidator(parse_content, json_schema_input_type=Any)]
LogitBias = Annotated[
    dict[int, float], BeforeValidator(parse_logit_bias, json_schema_input_type=dict[str, float] | None)
]
# The first bad item is enough: a million of them must not cost a million error reports.
TokenIds = Annotated[list[int], Field(fail_fast=True), AfterValidator(_non_negative)]
Unsupported = Annotated[Any, AfterValidator(refuse)]
TextOnly = Annotated[Any, AfterValidator(_only_text)]
TextFormat = Annotated[Any, AfterValidator(_only_text_format)]
Harmless = Any  # changes neither the answer nor its form, so it is accepted and ignored
