"""From a request's body to what is generated: prompts as token ids, one `Choice` and `RequestSpec` for each answer.

Checks what depends on the model: its name, its vocabulary, its context. Knows the tokenizer, not HTTP or workers.

Seeds: a client's seed may be any 64-bit integer; its lowest 63 bits are used. Choice 0 of a prompt samples with the
seed itself, choice i with a hash of the seed and i, so choices differ and each can be repeated. Every prompt of a
list samples as if it were sent alone. Without a seed each prompt draws a random one.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from cluster.errors import InvalidRequestError
from cluster.http.api import Api
from cluster.http.openai.choice import Choice, Delta
from cluster.http.openai.fields import Prompt
from cluster.http.openai.schemas import ChatBody, ChatMessage, CompletionBody, GenerationBody
from engine.sampling.params import SamplingParams
from kv_transfer.messages.requests import RequestSpec

DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's default of the completions endpoint
# A request's bounds, whatever the model. They keep stretches of work that nothing can interrupt well below 100 ms, and
# messages between processes well below the 16 MiB that a connection takes.
MAX_PROMPT_TOKENS: Final = 2**22  # of all choices together: every choice brings its prompt to its workers
MAX_ECHOED_CHARS: Final = 2**24  # of all choices together
MAX_PROMPT_LOGPROBS: Final = 2**16  # that one choice gets with its echo: a worker sends them in one message
MAX_ALL_PROMPT_LOGPROBS: Final = 2**18  # of all choices together
MAX_TOKENIZED: Final = 2**20  # tokens in an answer of /tokenize

LONG_TEXT_CHARS: Final = 2_000  # longer texts are tokenised off the event loop, which they would hold for over 1 ms
MANY_TOKENS: Final = 10_000  # to turn into text, or to check, on the event loop, which they would hold for over 1 ms
_MESSAGE_CHARS: Final = 20  # that rendering and tokenising a message costs besides its own, roughly
_LOGPROB_BYTES: Final = 50  # of JSON, for a token with its log probability, roughly
_SEED_MASK: Final = 2**63 - 1

T = TypeVar("T")
TokenPrompt = tuple[list[int], str]
"""The token ids, and what the answer's text begins with (completions' `echo`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request as it is answered. All choices of a prompt stand side by side."""

    id: str
    created: int
    model: str
    service_tier: str  # as the answer names it
    stream: bool
    include_usage: bool
    choices: list[Choice]
    num_choices: int  # per prompt
    return_token_ids: bool

    @property
    def num_prompt_tokens(self) -> int:
        """A prompt with several choices counts once, here and below."""
        return sum(len(choice.spec.prompt_token_ids) for choice in self.choices[:: self.num_choices])

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in a prefix cache."""
        return sum(choice.num_cached_tokens for choice in self.choices[:: self.num_choices])

    @property
    def num_generated_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def usage(self) -> dict[str, object]:
        """OpenAI's `usage`."""
        num_prompt, num_generated = self.num_prompt_tokens, self.num_generated_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def opening_size(self, index: int) -> int:
        """About the bytes of JSON that choice `index` begins with: its echo and the log probabilities of that."""
        choice = self.choices[index]
        num_logprobs = choice.spec.params.prompt_logprobs
        each = 0 if num_logprobs is None else len(choice.spec.prompt_token_ids) * (num_logprobs + 1)
        return len(choice.echo) + _LOGPROB_BYTES * each

    def size(self, delta: Delta) -> int:
        """About the bytes of JSON that it becomes."""
        return len(delta.text) + sum(_LOGPROB_BYTES * (len(entry.top) + 1) for entry in delta.entries)


async def prepare_chat(body: ChatBody, api: Api, service_tier: str, prefix_salt: str) -> Job:
    """Raises ApiError."""
    _check_common(body, 1, api)
    max_tokens, logprobs = _chat_max_tokens(body), _chat_logprobs(body)
    token_ids = await chat_token_ids(body.messages, api)
    return _job(
        "chatcmpl",
        body,
        api,
        [(token_ids, "")],
        service_tier,
        prefix_salt,
        param="messages",
        max_tokens=max_tokens,
        logprobs=logprobs,
    )


async def prepare_completion(body: CompletionBody, api: Api, service_tier: str, prefix_salt: str) -> Job:
    """Raises ApiError."""
    _check_common(body, len(body.prompt), api)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequestError(
            "best_of is supported only where it equals n. Leave it out.", param="best_of", code="unsupported_value"
        )
    for prompt in body.prompt:
        _require_fits(prompt, api, "prompt")
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise InvalidRequestError("max_tokens is 0, which needs echo. Ask for at least 1 token.", param="max_tokens")
    size = sum(len(prompt) for prompt in body.prompt)
    prompts = await _off_loop_if_long(size, api, _completion_prompts, body.prompt, bool(body.echo), api)
    return _job(
        "cmpl",
        body,
        api,
        prompts,
        service_tier,
        prefix_salt,
        param="prompt",
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


async def chat_token_ids(messages: list[ChatMessage], api: Api) -> list[int]:
    """The messages in the form the model was trained on, ending where its answer begins."""
    if len(messages) > _context(api):
        raise _too_long(f"{len(messages)} messages", api, "messages")
    num_chars = sum(len(message.content) for message in messages)
    _require_chars_fit(num_chars, api, "messages")
    size = num_chars + _MESSAGE_CHARS * len(messages)
    try:
        return await _off_loop_if_long(size, api, _chat_token_ids, messages, api)
    except ValueError as error:
        raise InvalidRequestError(f"These messages make no prompt: {error}.", param="messages") from error


def _chat_token_ids(messages: list[ChatMessage], api: Api) -> list[int]:
    plain = [
        {"role": "system" if message.role == "developer" else message.role, "content": message.content}
        for message in messages
    ]
    return api.tokenizer.apply_chat_template(plain)


async def text_token_ids(text: str, api: Api, *, add_special_tokens: bool = True) -> list[int]:
    """Of any text, whether or not it fits the context. Raises InvalidRequestError."""
    token_ids = await _off_loop_if_long(len(text), api, api.tokenizer.encode, text, add_special_tokens)
    if len(token_ids) > MAX_TOKENIZED:
        raise InvalidRequestError(
            f"The text has {len(token_ids)} tokens; one answer holds at most {MAX_TOKENIZED}. Send it in parts.",
            param="prompt",
        )
    return token_ids


async def token_text(token_ids: list[int], api: Api) -> str:
    """Of ids in the vocabulary, special tokens included. Raises InvalidRequestError."""
    size = LONG_TEXT_CHARS * len(token_ids) // MANY_TOKENS
    return await _off_loop_if_long(size, api, _text_of, token_ids, api)


def _text_of(token_ids: list[int], api: Api) -> str:
    check_token_ids(token_ids, api, "tokens")
    return api.tokenizer.decode(token_ids, skip_special_tokens=False)


async def _off_loop_if_long(num_chars: int, api: Api, function: Callable[..., T], *args: Any) -> T:
    if num_chars <= LONG_TEXT_CHARS:
        return await api.turns.on_loop(function, *args)
    return await api.turns.reading(num_chars, function, *args)


def _context(api: Api) -> int:
    limits = api.generator.limits()
    return MAX_TOKENIZED if limits is None else limits.max_model_len


def _require_fits(prompt: Prompt, api: Api, param: str) -> None:
    """Raises InvalidRequestError for a prompt that is too long whatever it says, before anything is made of it."""
    if isinstance(prompt, str):
        _require_chars_fit(len(prompt), api, param)
    elif len(prompt) > _context(api):
        raise _too_long(f"{len(prompt)} tokens", api, param)


def _require_chars_fit(num_chars: int, api: Api, param: str) -> None:
    if num_chars > _context(api) * api.tokenizer.longest_token_chars:
        raise _too_long(f"{num_chars} characters, more than {_context(api)} tokens can stand for,", api, param)


def _too_long(what: str, api: Api, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The model's context is {_context(api)} tokens, but {what} were sent. Shorten the {param}.",
        param=param,
        code="context_length_exceeded",
    )


def check_token_ids(token_ids: list[int], api: Api, param: str) -> None:
    """Raises InvalidRequestError unless all are in the vocabulary."""
    largest = max(token_ids, default=0)
    if largest >= api.tokenizer.vocab_size or min(token_ids, default=0) < 0:
        raise InvalidRequestError(
            f"{param} has a token id outside the vocabulary. Ids must lie in [0, {api.tokenizer.vocab_size}).",
            param=param,
        )


def _completion_prompts(prompts: list[Prompt], echo: bool, api: Api) -> list[TokenPrompt]:
    return [_completion_prompt(prompt, echo, api) for prompt in prompts]


def _completion_prompt(prompt: Prompt, echo: bool, api: Api) -> TokenPrompt:
    if isinstance(prompt, str):
        return api.tokenizer.encode(prompt, True), prompt if echo else ""
    check_token_ids(prompt, api, "prompt")
    return prompt, api.tokenizer.decode(prompt) if echo else ""


def _check_common(body: GenerationBody, num_prompts: int, api: Api) -> None:
    api.require_model(body.model)
    api.in_flight.require_room(num_prompts * (body.n or 1))
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "stream_options is only possible with stream: true. Leave it out, or stream.", param="stream_options"
        )


def _chat_max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequestError(
            "max_tokens and max_completion_tokens differ. Send only max_completion_tokens.", param="max_tokens"
        )
    if old == 0:
        raise InvalidRequestError("max_tokens is 0. Ask for at least 1 token.", param="max_tokens")
    return old if new is None else new


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError(
            "top_logprobs is only possible with logprobs: true. Set it, or leave top_logprobs out.",
            param="top_logprobs",
        )
    return (body.top_logprobs or 0) if body.logprobs else None


def _job(
    kind: str,
    body: GenerationBody,
    api: Api,
    prompts: Sequence[TokenPrompt],
    service_tier: str,
    prefix_salt: str,
    *,
    param: str,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> Job:
    """What the endpoints ask for in different words comes after `param`, the field of the prompt. `max_tokens` None: as
    many as fit."""
    num_choices = body.n or 1
    _require_bounded(num_choices, prompts, prompt_logprobs)
    api.in_flight.require_room(len(prompts) * num_choices)  # others may have begun since the request came
    job_id = f"{kind}-{secrets.token_hex(12)}"
    max_model_len = api.require_limits().max_model_len
    sampling = {**_sampling(body, api), "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    choices: list[Choice] = []
    for token_ids, echo in prompts:
        params = _params(sampling, _max_tokens(len(token_ids), max_tokens, max_model_len, param))
        text_end = api.tokenizer.text_end(token_ids)  # once for all choices
        for seed in _seeds(body.seed, num_choices):
            spec = RequestSpec(
                request_id=f"{job_id}-{len(choices)}",
                attempt=0,
                prompt_token_ids=token_ids,
                params=params.with_seed(seed),
                cache_salt=prefix_salt,
            )
            choices.append(
                Choice(
                    api.tokenizer,
                    spec,
                    text_end,
                    echo=echo,
                    stop=body.stop,
                    return_token_ids=bool(body.return_token_ids),
                    discard_output=max_tokens == 0,
                )
            )
    return Job(
        id=job_id,
        created=int(time.time()),
        model=api.model_name,
        service_tier=service_tier,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        choices=choices,
        num_choices=num_choices,
        return_token_ids=bool(body.return_token_ids),
    )


def _require_bounded(num_choices: int, prompts: Sequence[TokenPrompt], prompt_logprobs: int | None) -> None:
    """Raises InvalidRequestError for what would be too much to send to workers, or to answer, in one request."""
    num_tokens = sum(len(token_ids) for token_ids, _ in prompts)
    longest = max(len(token_ids) for token_ids, _ in prompts)
    each = 0 if prompt_logprobs is None else prompt_logprobs + 1
    for what, number, limit in (
        ("prompt tokens, of all choices,", num_choices * num_tokens, MAX_PROMPT_TOKENS),
        ("characters of echoed prompts", num_choices * sum(len(echo) for _, echo in prompts), MAX_ECHOED_CHARS),
        ("log probabilities of one prompt's tokens", longest * each, MAX_PROMPT_LOGPROBS),
        (
            "log probabilities of prompts' tokens, of all choices,",
            num_choices * num_tokens * each,
            MAX_ALL_PROMPT_LOGPROBS,
        ),
    ):
        if number > limit:
            raise InvalidRequestError(
                f"This request comes to {number} {what} and {limit} are possible. Send a smaller n, fewer or shorter"
                " prompts" + (", or ask for fewer logprobs." if each else "."),
                param="n" if num_choices > 1 else "logprobs" if each else "prompt",
                code="request_too_large",
            )


def _max_tokens(num_prompt_tokens: int, wanted: int | None, max_model_len: int, param: str) -> int:
    """How many tokens to generate: what was asked for, or what the context has room for."""
    if num_prompt_tokens == 0:
        raise InvalidRequestError(f"{param} is empty. Send at least one token.", param=param)
    room = max_model_len - num_prompt_tokens
    num_tokens = room if wanted is None else max(1, wanted)
    if room < 1 or num_tokens > room:
        raise InvalidRequestError(
            f"The model's context is {max_model_len} tokens, but {num_prompt_tokens} in the {param} and "
            f"{max(1, num_tokens)} to generate were asked for. Shorten the {param} or lower max_tokens.",
            param=param,
            code="context_length_exceeded",
        )
    return num_tokens


def _sampling(body: GenerationBody, api: Api) -> Mapping[str, Any]:
    """The fields of SamplingParams that all choices share; those not given are left to its defaults."""
    check_token_ids(list(body.logit_bias), api, "logit_bias")
    check_token_ids(body.stop_token_ids or [], api, "stop_token_ids")
    fields = {
        "temperature": body.temperature,
        "top_k": None if body.top_k is None else max(0, body.top_k),
        "top_p": body.top_p,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": body.logit_bias,
        "min_tokens": body.min_tokens,
        "ignore_eos": body.ignore_eos,
        "stop_token_ids": tuple(body.stop_token_ids or ()),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _params(sampling: Mapping[str, Any], max_tokens: int) -> SamplingParams:
    """Of all choices of a prompt, but for their seeds."""
    if sampling.get("min_tokens", 0) > max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {sampling['min_tokens']}, more than the {max_tokens} tokens that are generated at most. "
            "Lower it, or raise max_tokens.",
            param="min_tokens",
        )
    try:
        return SamplingParams(seed=0, max_tokens=max_tokens, **sampling)
    except ValueError as error:
        raise InvalidRequestError(f"{error}.") from error


def _seeds(seed: int | None, num_choices: int) -> Iterator[int]:
    base = secrets.randbits(63) if seed is None else seed & _SEED_MASK
    for choice in range(num_choices):
        yield base if choice == 0 else derived_seed(base, choice)


def derived_seed(seed: int, choice: int) -> int:
    """The seed of a further choice: 63 bits of BLAKE2b over both numbers, little-endian 64-bit each."""
    data = seed.to_bytes(8, "little") + choice.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") & _SEED_MASK
