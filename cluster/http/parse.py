"""From a request's body to what is generated: prompts as token ids, one `Choice` and `RequestSpec` for each answer.

Prompts are made of the body by `cluster.http.prompts`. Knows the tokenizer, not HTTP or workers.

Seeds: a client's seed may be any 64-bit integer; its lowest 63 bits are used. Choice 0 of a prompt samples with the
seed itself, choice i with a hash of the seed and i, so choices differ and each can be repeated. Every prompt of a
list samples as if it were sent alone. Without a seed each prompt draws a random one.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from cluster.errors import InvalidRequestError
from cluster.http.api import Asked
from cluster.http.openai.choice import Choice, Delta
from cluster.http.openai.events import Reading
from cluster.http.openai.schemas import ChatBody, CompletionBody, GenerationBody
from cluster.http.openai.tools import constrained, reading_of, thinking_of, told_tools
from cluster.http.prompts import (
    MAX_PROMPT_TOKENS,
    TokenPrompt,
    chat_token_ids,
    check_token_ids,
    completion_prompts,
    prediction_token_ids,
    require_fits,
    truncated,
)
from cluster.slo.classes import RequestTerms
from engine.sampling.params import SamplingParams
from kv_transfer.messages.requests import RequestSpec

DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's default of the completions endpoint
# A request's bounds, whatever the model. They keep stretches of work that nothing can interrupt well below 100 ms, and
# messages between processes well below the 16 MiB that a connection takes.
MAX_ECHOED_CHARS: Final = 2**24  # of all choices together
MAX_PROMPT_LOGPROBS: Final = 2**16  # of one choice, with its echo: a worker sends them in one message
MAX_ALL_PROMPT_LOGPROBS: Final = 2**18  # of all choices together
NO_FIELDS: Final[Mapping[str, Any]] = MappingProxyType({})
_TOKEN_ID_BYTES: Final = 6  # of JSON, for a token's id, roughly
_PROMPT_END_TOKENS: Final = 32  # the last tokens of a prompt, in which it may open the reasoning
_LOGPROB_BYTES: Final = 50  # of JSON, for a token with its log probability, roughly
_SEED_MASK: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request for text as it is answered. All choices of a prompt stand side by side."""

    id: str
    created: int
    model: str
    service_tier: str  # as the answer names it
    stream: bool
    include_usage: bool
    choices: list[Choice]
    num_choices: int  # per prompt
    num_output_logprobs: int | None  # per token of the output, and of an echo
    num_prompt_logprobs: int | None  # in vLLM's `prompt_logprobs`
    skip_special_tokens: bool
    return_token_ids: bool
    tokens_as_ids: bool  # in log probabilities
    continuous_usage: bool
    reading: Reading | None = None  # how calls and reasoning in the answers are read; None: they are text

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts. A prompt with several choices counts once."""
        return sum(len(choice.spec.prompt_token_ids) for choice in self.choices[:: self.num_choices])

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of all prompts that were found in a prefix cache. A prompt with several choices counts once."""
        return sum(choice.num_cached_tokens for choice in self.choices[:: self.num_choices])

    @property
    def num_generated_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def usage(self, num_generated: int | None = None, num_reasoning: int = 0) -> dict[str, object]:
        """OpenAI's `usage`. `num_generated`: tokens to tell of instead of those of all choices, `num_reasoning` of
        which are reasoning."""
        num_prompt = self.num_prompt_tokens
        if num_generated is None:
            num_generated = self.num_generated_tokens
            num_reasoning = sum(choice.num_reasoning_tokens for choice in self.choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": num_reasoning,
                "audio_tokens": 0,
                "accepted_prediction_tokens": sum(choice.num_accepted_predictions for choice in self.choices),
                "rejected_prediction_tokens": sum(choice.num_rejected_predictions for choice in self.choices),
            },
        }

    def opening_size(self, index: int) -> int:
        """About how many bytes of JSON choice `index` begins with: its echo, and what is told of the prompt."""
        choice = self.choices[index]
        num_logprobs = choice.spec.params.prompt_logprobs
        each = 0 if num_logprobs is None else _LOGPROB_BYTES * (num_logprobs + 1)
        each += _TOKEN_ID_BYTES if self.return_token_ids else 0
        return len(choice.echo) + each * len(choice.spec.prompt_token_ids)

    def size(self, delta: Delta) -> int:
        """About how many bytes of JSON `delta` becomes."""
        return len(delta.text) + sum(_LOGPROB_BYTES * (len(entry.top) + 1) for entry in delta.entries)


async def prepare_chat(
    body: ChatBody,
    asked: Asked,
    terms: RequestTerms,
    *,
    job_id: str | None = None,
) -> Job:
    """Make the job of a chat. `job_id` None: a new one. Raises ApiError."""
    _check_common(body, 1, asked, terms)
    max_tokens, logprobs = _chat_max_tokens(body), _chat_logprobs(body)
    token_ids = await chat_token_ids(body.messages, body, asked, told_tools(body.offered_tools()))
    token_ids = truncated(token_ids, body, max_tokens, asked)
    reading = reading_of(body, asked.model.formats, _prompt_end(token_ids, asked))
    prediction = await prediction_token_ids(body, asked)
    grammar = await _chat_grammar(body, reading, asked, terms.tenant)
    return _job(
        job_id or new_job_id("chatcmpl"),
        body,
        asked,
        terms,
        [(token_ids, None)],
        prediction,
        param="messages",
        max_tokens=max_tokens,
        grammar=grammar,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        reading=reading,
        thinking=thinking_of(body, reading, asked.model.tokenizer),
    )


def _prompt_end(token_ids: list[int], asked: Asked) -> str:
    """The last words of a chat's prompt, where its template may have begun the reasoning; "" if the model does not
    reason."""
    if asked.model.formats.reasoning is None:
        return ""
    return asked.model.tokenizer.decode(token_ids[-_PROMPT_END_TOKENS:], skip_special_tokens=False)


async def _chat_grammar(body: ChatBody, reading: Reading | None, asked: Asked, tenant: str) -> str | None:
    """The grammar of a chat's answers: of what the client wants them to be, together with the reasoning and the calls
    that they may have. None: they may be any text. Raises InvalidRequestError, OverloadedError."""
    grammars, wanted = asked.model.grammars, (body.response_format, body.structured_outputs)
    whole = constrained(body, reading, asked.model.tokenizer)
    if whole is None or None not in wanted:  # who sends both is told so
        return await grammars.grammar_for(*wanted, tenant)
    return await grammars.grammar_for(whole, None, tenant)


async def prepare_completion(body: CompletionBody, asked: Asked, terms: RequestTerms) -> Job:
    """Make the job of a text completion. Raises ApiError."""
    _check_common(body, len(body.prompt), asked, terms)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequestError(
            "best_of is supported only where it equals n. Leave it out.", param="best_of", code="unsupported_value"
        )
    for prompt in body.prompt:
        if isinstance(prompt, str) or body.truncate_prompt_tokens is None:
            require_fits(prompt, asked, "prompt")
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise InvalidRequestError("max_tokens is 0, which needs echo. Ask for at least 1 token.", param="max_tokens")
    grammar = await asked.model.grammars.grammar_for(body.response_format, body.structured_outputs, terms.tenant)
    prompts = await completion_prompts(body, max_tokens, asked)
    prediction = await prediction_token_ids(body, asked)
    return _job(
        new_job_id("cmpl"),
        body,
        asked,
        terms,
        prompts,
        prediction,
        param="prompt",
        max_tokens=max_tokens,
        grammar=grammar,
        logprobs=body.logprobs,
        prompt_logprobs=max(wanted) if (wanted := _prompt_logprobs(body)) else None,
        # As at OpenAI and in vLLM. lm-eval counts on an entry behind an echoed prompt, whatever token was generated.
        end_has_logprob=True,
    )


def _prompt_logprobs(body: CompletionBody) -> list[int]:
    """How many log probabilities of each prompt token are asked for: the values under either name that are given."""
    return [wanted for wanted in (body.prompt_logprobs, body.logprobs if body.echo else None) if wanted is not None]


def _check_common(body: GenerationBody, num_prompts: int, asked: Asked, terms: RequestTerms) -> None:
    """Check what chats and text completions have in common, before anything is tokenised. Raises ApiError."""
    asked.api.in_flight.require_room(num_prompts * (body.n or 1), terms)
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs come with an answer that is not streamed. Leave out stream, or use echo with logprobs.",
            param="prompt_logprobs",
            code="unsupported_value",
        )
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
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError(
            "top_logprobs is only possible with logprobs: true. Set it, or leave top_logprobs out.",
            param="top_logprobs",
        )
    return (body.top_logprobs or 0) if body.logprobs else None


def new_job_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"


def _job(
    job_id: str,
    body: GenerationBody,
    asked: Asked,
    terms: RequestTerms,
    prompts: Sequence[TokenPrompt],
    prediction: list[int],
    *,
    param: str,
    max_tokens: int | None,
    grammar: str | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    end_has_logprob: bool = False,
    reading: Reading | None = None,
    thinking: Mapping[str, Any] = NO_FIELDS,
) -> Job:
    """Make a job, with a choice for each seed of each prompt. Raises ApiError.

    `param`: the field that the prompt came in. The parameters after it are what the endpoints call by different names.
    `max_tokens` None: as many as fit."""
    num_choices = body.n or 1
    _require_bounded(num_choices, prompts, prediction, prompt_logprobs)
    # Others may have begun since it came.
    asked.api.in_flight.require_room(len(prompts) * num_choices, terms)
    max_model_len = asked.model.require_limits().max_model_len
    sampling = {**_sampling(body, asked), **thinking, "grammar": grammar}
    sampling |= {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    choices: list[Choice] = []
    shown = asked.model.tokenizer.special_ids_of(reading.marks) if reading is not None else frozenset()
    for token_ids, echo in prompts:
        params = _params(sampling, _max_tokens(len(token_ids), max_tokens, max_model_len, param))
        text_end = asked.model.tokenizer.text_end(token_ids)  # once for all choices
        for seed in _seeds(body.seed, num_choices):
            spec = RequestSpec(
                request_id=f"{job_id}-{len(choices)}",
                attempt=0,
                prompt_token_ids=token_ids,
                params=params.with_seed(seed),
                cache_salt=terms.salt,
                prediction_token_ids=prediction,
                adapter=asked.adapter,
                model=asked.model.name,
            )
            choices.append(
                Choice(
                    asked.model.tokenizer,
                    spec,
                    text_end,
                    echo=echo,
                    stop=body.stop,
                    include_stop=bool(body.include_stop_str_in_output),
                    end_has_logprob=end_has_logprob,
                    skip_special_tokens=body.skip_special_tokens is not False,
                    return_token_ids=bool(body.return_token_ids),
                    discard_output=max_tokens == 0,
                    shown=shown,
                    reasoning=None if reading is None else reading.reasoning,
                    reasons=reading is not None and reading.reasons,
                )
            )
    return Job(
        id=job_id,
        created=int(time.time()),
        model=body.model,
        service_tier=terms.tier,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        continuous_usage=body.stream_options is not None and bool(body.stream_options.continuous_usage_stats),
        choices=choices,
        num_choices=num_choices,
        num_output_logprobs=logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens is not False,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        return_token_ids=bool(body.return_token_ids),
        reading=reading,
    )


def _require_bounded(
    num_choices: int, prompts: Sequence[TokenPrompt], prediction: list[int], prompt_logprobs: int | None
) -> None:
    """Check that one request is not too much to send to workers, or to answer. Raises InvalidRequestError."""
    num_tokens = sum(len(token_ids) for token_ids, _ in prompts)
    num_sent = num_tokens + len(prediction) * len(prompts)
    longest = max(len(token_ids) for token_ids, _ in prompts)
    each = 0 if prompt_logprobs is None else prompt_logprobs + 1
    for what, number, limit in (
        ("tokens of prompts and prediction, of all choices,", num_choices * num_sent, MAX_PROMPT_TOKENS),
        ("characters of echoed prompts", num_choices * sum(len(echo or "") for _, echo in prompts), MAX_ECHOED_CHARS),
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
    """How many tokens to generate: as many as were asked for, or as the context has room for. Raises
    InvalidRequestError if the prompt is empty, or if there is no room for so many."""
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


def _sampling(body: GenerationBody, asked: Asked) -> Mapping[str, Any]:
    """The fields of SamplingParams that all choices share; those not given are the model's own, or left to its
    defaults. Raises InvalidRequestError for token ids outside of the vocabulary."""
    check_token_ids(list(body.logit_bias), asked, "logit_bias")
    check_token_ids(body.stop_token_ids or [], asked, "stop_token_ids")
    check_token_ids(body.allowed_token_ids or [], asked, "allowed_token_ids")
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
        "allowed_token_ids": tuple(body.allowed_token_ids or ()),
        "bad_words": _bad_words(body.bad_words, asked),
    }
    return {**asked.model.sampling, **{name: value for name, value in fields.items() if value is not None}}


def _bad_words(words: list[str], asked: Asked) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word as it begins a text, as it follows a space, which may be a part of its first token, and
    as it was sent. They may be fewer or more each time. A spelling that ends with another one is banned by that."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        forms: list[tuple[int, ...]] = []
        for spelt in dict.fromkeys((bare, " " + bare, word)):
            tokens = tuple(asked.model.tokenizer.encode(spelt, False))
            if not any(tokens[-len(form) :] == form for form in forms):
                forms.append(tokens)
        found |= dict.fromkeys(forms)
    return tuple(found)


def _params(sampling: Mapping[str, Any], max_tokens: int) -> SamplingParams:
    """The sampling parameters of all choices of a prompt, apart from their seeds. Raises InvalidRequestError."""
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
    """Yields the seed of each choice of a prompt. `seed` None: the first one is drawn."""
    base = secrets.randbits(63) if seed is None else seed & _SEED_MASK
    for choice in range(num_choices):
        yield base if choice == 0 else derived_seed(base, choice)


def derived_seed(seed: int, choice: int) -> int:
    """The seed of a choice after the first: 63 bits of BLAKE2b over both numbers, little-endian 64-bit each."""
    data = seed.to_bytes(8, "little") + choice.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") & _SEED_MASK
