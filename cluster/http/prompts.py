"""From messages, texts and ids to the token ids of prompts, and back to text, with what depends on the model checked.

What works on long texts does it off the event loop. `cluster.http.parse` makes jobs of prompts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from cluster.errors import InvalidRequestError
from cluster.http.api import Asked
from cluster.http.openai.fields import Prompt
from cluster.http.openai.schemas import ChatMessage, CompletionBody, GenerationBody, TemplateBody
from cluster.http.openai.tools import has_one_call_each, told_calls, with_tools
from engine.text.formats import HERMES, Message, with_hermes_tools

# Bounds of a request, whatever the model, as those of `cluster.http.parse`.
MAX_PROMPT_TOKENS: Final = 2**22  # of all choices together: every choice brings its prompt to its workers
MAX_TOKENIZED: Final = 2**20  # tokens in an answer of /tokenize
# Calls × messages, where each call is a message: for each call gpt-oss's template looks at all messages behind it, at
# a microsecond for each.
MAX_LOOKS_BEHIND_CALLS: Final = 2**21
LONG_TEXT_CHARS: Final = 2_000  # longer texts are tokenised off the event loop, which they would hold for over 1 ms
MANY_TOKENS: Final = 10_000  # more ids are turned into text, or checked, off the event loop, for the same reason
_MESSAGE_CHARS: Final = 20  # a message costs as much as so many characters besides its own, roughly

T = TypeVar("T")
TokenPrompt = tuple[list[int], str | None]
"""A prompt's token ids, and what the answer's text begins with (completions' `echo`); None: no echo is wanted."""


async def chat_token_ids(
    messages: list[ChatMessage], template: TemplateBody, asked: Asked, tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """The token ids of messages in the form that the model was trained on, ending where its answer begins. Raises
    InvalidRequestError."""
    calls = [len(message.tool_calls or ()) for message in messages]
    num_messages = sum(max(1, each) for each in calls)  # as some templates are given them, each with one call at most
    if num_messages > _context(asked):
        raise _too_long(f"{num_messages} messages, one for each call,", asked, "messages")
    num_looks = sum(calls) * num_messages if has_one_call_each(asked.model.formats) else 0
    if num_looks > MAX_LOOKS_BEHIND_CALLS:
        raise InvalidRequestError(
            f"These messages have {sum(calls)} calls, which comes to {num_looks} for {num_messages} messages, one for"
            f" each call. {MAX_LOOKS_BEHIND_CALLS} are possible. Leave out the oldest calls and their results.",
            param="messages",
            code="request_too_large",
        )
    plain = [_plain_message(message, index) for index, message in enumerate(messages)]
    variables = _template_variables(template, asked)
    num_chars = sum(len(text) for message in plain for text in message.values() if text is not None)
    rendering: Callable[..., list[int]] = _chat_token_ids
    if tools or any(message.tool_calls or message.tool_call_id for message in messages):
        num_chars += len(json.dumps(tools)) + sum(map(_call_chars, messages))
        rendering = partial(_with_calls, messages, tools)
    num_chars += sum(len(text) for document in template.documents for text in document.values())
    _require_chars_fit(num_chars, asked, "messages")
    size = num_chars + _MESSAGE_CHARS * (num_messages + len(template.documents)) + num_looks
    try:
        return await _off_loop_if_long(size, asked, rendering, plain, variables, template, asked)
    except (ValueError, RecursionError) as error:  # such as arguments of a call in a thousand lists
        raise InvalidRequestError(f"These messages make no prompt: {error}.", param="messages") from error


def _call_chars(message: ChatMessage) -> int:
    return sum(len(call.function.name) + len(call.function.arguments) for call in message.tool_calls or ())


def _with_calls(
    messages: list[ChatMessage],
    tools: Sequence[Mapping[str, Any]],
    plain: list[Message],
    variables: dict[str, Any],
    template: TemplateBody,
    asked: Asked,
) -> list[int]:
    """The token ids of messages with tools, or with calls in them; `plain` are these messages without either."""
    called: dict[str, str] = {}
    for told, message in zip(plain, messages, strict=True):
        called.update((call.id, call.function.name) for call in message.tool_calls or ())
        told.update(told_calls(message, asked.model.formats, called))
    formats = asked.model.formats
    shown, of_tools = with_tools(plain, tools, formats)
    try:
        return _chat_token_ids(shown, {**variables, **of_tools}, template, asked)
    except ValueError:
        if not (of_tools and formats.apart and formats.tools is HERMES):
            raise
    # Such as Hermes 3's own template, which writes schemas as Python's types and has no end at some. The other template
    # takes the same tools in words, and the answer is read alike.
    return _chat_token_ids(with_hermes_tools(plain, tools), variables, template, asked)


def _plain_message(message: ChatMessage, index: int) -> Message:
    """A message, without its calls, as chat templates know it. Raises InvalidRequestError."""
    reasonings = {text for text in (message.reasoning, message.reasoning_content) if text is not None}
    if reasonings and message.role != "assistant":
        raise InvalidRequestError(
            "Only an assistant's message has a reasoning. Leave it out.", param=f"messages[{index}].reasoning"
        )
    if len(reasonings) > 1:
        raise InvalidRequestError(
            "reasoning and reasoning_content differ; they are one thing under two names. Send one of them.",
            param=f"messages[{index}].reasoning",
        )
    return {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.content,
        "reasoning_content": next(iter(reasonings), None),
    }


def _template_variables(template: TemplateBody, asked: Asked) -> dict[str, Any]:
    """What the chat template is told besides the messages. Raises InvalidRequestError for what the model's template
    does not read: it would change nothing."""
    if template.continue_final_message and template.add_generation_prompt:
        raise InvalidRequestError(
            "The prompt ends either inside the final message or with the mark of a new one. Leave out either"
            " continue_final_message or add_generation_prompt.",
            param="continue_final_message",
        )
    names = dict.fromkeys(template.chat_template_kwargs, "chat_template_kwargs")
    if template.documents:
        names["documents"] = "documents"
    for name, param in names.items():
        if asked.model.tokenizer.has_chat_template and not asked.model.tokenizer.template_reads(name):
            raise InvalidRequestError(
                f"This model's chat template does not read {name}, so it would change nothing. Leave it out.",
                param=param,
                code="unsupported_value",
            )
    variables = dict(template.chat_template_kwargs)
    if template.documents:
        variables["documents"] = template.documents
    if template.reasoning_effort == "none":  # templates that have a switch in place of degrees call it so
        variables.setdefault("enable_thinking", False)
    for name in ("reasoning_effort", "verbosity"):
        if (value := getattr(template, name)) is not None:
            variables[name] = value
    return {**asked.model.chat_template_kwargs, **variables}


def _chat_token_ids(plain: list[Message], variables: dict[str, Any], template: TemplateBody, asked: Asked) -> list[int]:
    """The token ids of messages as the chat template has them. One that takes roles in turns only, as Gemma's and
    Mistral's do, gets messages of one role side by side as one: clients that know nothing of templates send several
    system messages, or what a user says in two. No more of them than it takes are joined."""
    continues, opens = bool(template.continue_final_message), template.add_generation_prompt

    def applied(messages: list[Message]) -> list[int]:
        return asked.model.tokenizer.apply_chat_template(
            messages,
            variables,
            add_generation_prompt=not continues if opens is None else opens,
            continue_final_message=continues,
            max_chars=_context(asked) * asked.model.tokenizer.longest_token_chars,
        )

    refusal: ValueError | None = None
    tried: list[list[Message]] = []
    ways: Sequence[Callable[[list[Message]], list[Message]]]
    ways = (list, partial(_joined, roles=("system",)), _joined, _with_one_system)
    for way in ways:
        if (messages := way(plain)) not in tried:
            tried.append(messages)
            try:
                return applied(messages)
            except ValueError as error:
                refusal = refusal or error
    assert refusal is not None
    raise refusal


def _joined(messages: Sequence[Message], roles: Collection[str] = ("system", "user", "assistant")) -> list[Message]:
    """The messages, with those of one of these roles side by side as one. What follows calls stays apart."""
    groups: list[list[Message]] = []
    for message in messages:
        last = groups[-1][-1] if groups else {}
        if message["role"] in roles and message["role"] == last.get("role") and not last.get("tool_calls"):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [_as_one(group) if len(group) > 1 else group[0] for group in groups]


def _with_one_system(messages: Sequence[Message]) -> list[Message]:
    """The messages joined, with system messages behind others as a user's: such templates know one at the beginning."""
    num_first = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return _joined(
        [
            {**message, "role": "user"} if at > num_first and message["role"] == "system" else message
            for at, message in enumerate(messages)
        ]
    )


def _as_one(group: Sequence[Message]) -> Message:
    content, reasoning = (
        "\n\n".join(filter(None, (message.get(name) for message in group))) for name in ("content", "reasoning_content")
    )
    return {**group[-1], "content": content, "reasoning_content": reasoning or None}


async def prediction_token_ids(body: GenerationBody, asked: Asked) -> list[int]:
    """The token ids of the client's prediction, as the model would generate them; [] without one. It is only a guess,
    so ids outside of the vocabulary are left out. Raises InvalidRequestError if it is too long."""
    if body.prediction is None:
        return []
    text = body.prediction.content
    _require_chars_fit(len(text), asked, "prediction")
    token_ids = await _off_loop_if_long(len(text), asked, asked.model.tokenizer.encode, text, False)
    if len(token_ids) > _context(asked):
        raise _too_long(f"{len(token_ids)} tokens", asked, "prediction")
    return [token_id for token_id in token_ids if token_id < asked.model.tokenizer.vocab_size]


async def text_token_ids(text: str, asked: Asked, *, add_special_tokens: bool = True) -> list[int]:
    """The token ids of any text, whether or not it fits the context.
    Raises InvalidRequestError for more than `MAX_TOKENIZED`."""
    token_ids = await _off_loop_if_long(len(text), asked, asked.model.tokenizer.encode, text, add_special_tokens)
    if len(token_ids) > MAX_TOKENIZED:
        raise InvalidRequestError(
            f"The text has {len(token_ids)} tokens; one answer holds at most {MAX_TOKENIZED}. Send it in parts.",
            param="prompt",
        )
    return token_ids


async def prompts_token_ids(prompts: Sequence[Prompt], asked: Asked, param: str) -> list[list[int]]:
    """The token ids of prompts: texts as the model reads them, ids as they are. Raises InvalidRequestError if one is
    empty or too long, or if there are too many together."""
    for prompt in prompts:
        require_fits(prompt, asked, param)
    found = await _off_loop_if_long(sum(map(len, prompts)), asked, _prompts_token_ids, prompts, asked, param)
    for token_ids in found:
        if not token_ids:
            raise InvalidRequestError(f"{param} has an empty text. Send at least one token each.", param=param)
        if len(token_ids) > _context(asked):
            raise _too_long(f"{len(token_ids)} tokens", asked, param)
    if (num_tokens := sum(map(len, found))) > MAX_PROMPT_TOKENS:
        raise InvalidRequestError(
            f"This request comes to {num_tokens} tokens and {MAX_PROMPT_TOKENS} are possible. Send it in parts.",
            param=param,
            code="request_too_large",
        )
    return found


def _prompts_token_ids(prompts: Sequence[Prompt], asked: Asked, param: str) -> list[list[int]]:
    found = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_token_ids(prompt, asked, param)
        found.append(asked.model.tokenizer.encode(prompt, True) if isinstance(prompt, str) else prompt)
    return found


async def token_text(token_ids: list[int], asked: Asked) -> str:
    """The text of token ids, special tokens included. Raises InvalidRequestError for ids outside of the vocabulary."""
    size = LONG_TEXT_CHARS * len(token_ids) // MANY_TOKENS
    return await _off_loop_if_long(size, asked, _text_of, token_ids, asked)


def _text_of(token_ids: list[int], asked: Asked) -> str:
    check_token_ids(token_ids, asked, "tokens")
    return asked.model.tokenizer.decode(token_ids, skip_special_tokens=False)


async def _off_loop_if_long(num_chars: int, asked: Asked, function: Callable[..., T], *args: Any) -> T:
    """Call `function` on the event loop, or in a thread if it works on more than `LONG_TEXT_CHARS` characters."""
    if num_chars <= LONG_TEXT_CHARS:
        return await asked.api.turns.on_loop(function, *args)
    return await asked.api.turns.reading(num_chars, function, *args)


def _context(asked: Asked) -> int:
    """How many tokens a prompt may have at most; `MAX_TOKENIZED` while no worker is known."""
    limits = asked.model.limits()
    return MAX_TOKENIZED if limits is None else limits.max_model_len


def require_fits(prompt: Prompt, asked: Asked, param: str) -> None:
    """Refuse a prompt that is too long whatever it says, before anything is made of it. Raises InvalidRequestError."""
    if isinstance(prompt, str):
        _require_chars_fit(len(prompt), asked, param)
    elif len(prompt) > _context(asked):
        raise _too_long(f"{len(prompt)} tokens", asked, param)


def _require_chars_fit(num_chars: int, asked: Asked, param: str) -> None:
    if num_chars > _context(asked) * asked.model.tokenizer.longest_token_chars:
        raise _too_long(f"{num_chars} characters, more than {_context(asked)} tokens can stand for,", asked, param)


def _too_long(what: str, asked: Asked, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The model's context is {_context(asked)} tokens, but {what} were sent. Shorten the {param}.",
        param=param,
        code="context_length_exceeded",
    )


def check_token_ids(token_ids: list[int], asked: Asked, param: str) -> None:
    """Check that all ids are in the vocabulary. Raises InvalidRequestError."""
    largest = max(token_ids, default=0)
    if largest >= asked.model.tokenizer.vocab_size or min(token_ids, default=0) < 0:
        raise InvalidRequestError(
            f"{param} has a token id outside the vocabulary. Ids must lie in [0, {asked.model.tokenizer.vocab_size}).",
            param=param,
        )


async def completion_prompts(body: CompletionBody, max_tokens: int, asked: Asked) -> list[TokenPrompt]:
    """The token ids of a completion's prompts, and their echoes. Raises InvalidRequestError."""
    size = sum(len(prompt) for prompt in body.prompt)
    return await _off_loop_if_long(size, asked, _completion_prompts, body, max_tokens, asked)


def _completion_prompts(body: CompletionBody, max_tokens: int, asked: Asked) -> list[TokenPrompt]:
    return [_completion_prompt(prompt, body, max_tokens, asked) for prompt in body.prompt]


def _completion_prompt(prompt: Prompt, body: CompletionBody, max_tokens: int, asked: Asked) -> TokenPrompt:
    if isinstance(prompt, str):
        whole = asked.model.tokenizer.encode(prompt, True)
    else:
        check_token_ids(prompt, asked, "prompt")
        whole = prompt
    token_ids = truncated(whole, body, max_tokens, asked)
    if not body.echo:
        return token_ids, None
    if isinstance(prompt, str) and token_ids is whole:
        return token_ids, prompt
    return token_ids, asked.model.tokenizer.decode(token_ids, body.skip_special_tokens is not False)


def truncated(token_ids: list[int], body: GenerationBody, max_tokens: int | None, asked: Asked) -> list[int]:
    """The prompt's last tokens, as many as `truncate_prompt_tokens` allows; the same list if that is all of them.
    Raises InvalidRequestError if it is 0."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return token_ids
    if limit == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens is 0, which leaves no prompt. Send 1 or more, or -1 for what fits.",
            param="truncate_prompt_tokens",
        )
    if limit == -1:
        limit = max(1, _context(asked) - max(1, max_tokens or 1))
    return token_ids if len(token_ids) <= limit else token_ids[-limit:]
