"""What a client may ask of sampling, checked once.

The gateway builds it from a request, the wire carries it, the sampler reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Strict

MAX_LOGPROBS: Final = 20  # OpenAI's limit on `top_logprobs`
MAX_LOGIT_BIAS: Final = 1024  # entries; OpenAI's limit is 300
MAX_STOP_TOKEN_IDS: Final = 1024  # every choice brings them to its workers
MAX_GRAMMAR_CHARS: Final = 2**17  # likewise
MAX_ALLOWED_TOKEN_IDS: Final = 1024  # likewise
MAX_BAD_WORD_TOKENS: Final = 1024  # of all words together; likewise
GREEDY_BELOW: Final = 1e-5  # a lower temperature could not be told from greedy, and would overflow float32

_MAX_INT: Final = 2**31 - 1  # token ids and counts are 32 bits wide in the engine

# Where these are read from the wire, "5" or true must not pass for 5. Construction itself does not look at types.
Int = Annotated[int, Strict()]
Real = Annotated[float, Strict()]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one sequence are chosen and when it ends.

    `seed` together with a token's position fixes all randomness (see `engine.sampling.philox`), so that a sequence
    continues identically in another batch, after a preemption, or on another worker. It is part of the messages
    `Reserve` and `Start`, so a new field raises `PROTOCOL_VERSION`.

    A new one is heeded on a CPU by `logits`, where `is_adjusted` or `is_filtered` must know of it (who is neither takes
    a shortcut in C++); on a GPU by `device_sampler`, by `kernels.triton.sampling.rows`, which brings it there, and by
    the kernel beside it that edits or filters; by `engine.sequence.finish_reason` if it ends the sequence. Clients
    reach it by `cluster.http.openai.schemas` and `cluster.http.parse`, and read of it in `docs/guide/http-api.md`; a
    checkpoint may recommend what is in `_OF_CHECKPOINTS`. `sampling_twin.py`, beside the tests, says once more what it
    does; `test_sampler.py` and `test_sampling_kernels.py` draw with it. After a change of a Triton kernel run
    `python -m benchmarks.gpu.compilation`.

    Raises ValueError with advice on any value outside its range, NaN included.
    """

    max_tokens: Int
    seed: Int
    temperature: Real = 1.0  # 0 means greedy
    top_k: Int = 0  # 0 means off
    top_p: Real = 1.0
    min_p: Real = 0.0
    repetition_penalty: Real = 1.0
    presence_penalty: Real = 0.0
    frequency_penalty: Real = 0.0
    logit_bias: dict[Int, Real] = field(default_factory=dict)
    logprobs: Int | None = None  # None: no logprobs; n: the chosen token's and the n best
    prompt_logprobs: Int | None = None  # the same for each prompt token after the first (completions' `echo`)
    min_tokens: Int = 0
    ignore_eos: Flag = False
    stop_token_ids: tuple[Int, ...] = ()
    grammar: Text | None = None  # that the output must follow, as llguidance reads it: see `engine.sampling.grammar`
    allowed_token_ids: tuple[Int, ...] = ()  # no others are sampled; empty: all are
    bad_words: tuple[tuple[Int, ...], ...] = ()  # runs of tokens of which none is completed, none of them empty
    thinking_budget: Int | None = None  # tokens of reasoning, after which it ends: see `engine.sampling.grammar`
    # What opens it, unless the prompt ends within it, and what closes it, a token each.
    thinking_marks: tuple[Int, ...] = ()

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_penalties()
        self._check_token_ids()
        if self.grammar is not None and len(self.grammar) > MAX_GRAMMAR_CHARS:
            raise ValueError(f"a grammar has {len(self.grammar)} characters; at most {MAX_GRAMMAR_CHARS} are possible")
        if self.thinking_budget is not None:
            _require_within("thinking_budget", self.thinking_budget, 0, _MAX_INT)
        if len(self.thinking_marks) not in ((0,) if self.thinking_budget is None else (1, 2)):
            raise ValueError(f"there are {len(self.thinking_marks)} thinking_marks; with a thinking_budget 1 or 2")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}; it must not exceed max_tokens, {self.max_tokens}")

    def _check_ranges(self) -> None:
        _require_within("max_tokens", self.max_tokens, 1, _MAX_INT)
        _require_within("min_tokens", self.min_tokens, 0, _MAX_INT)
        _require_within("seed", self.seed, 0, 2**63 - 1)
        _require_within("temperature", self.temperature, 0.0, 2.0, advice="; 0 means greedy")
        _require_within("top_k", self.top_k, 0, _MAX_INT, advice="; 0 turns it off")
        _require_within("min_p", self.min_p, 0.0, 1.0)
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must lie in (0, 1], and 1 turns it off")
        for name, number in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if number is not None:
                _require_within(name, number, 0, MAX_LOGPROBS)

    def _check_penalties(self) -> None:
        _require_within("repetition_penalty", self.repetition_penalty, 0.01, 10.0, advice="; 1 turns it off")
        _require_within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)

    def _check_token_ids(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias names {len(self.logit_bias)} tokens; at most {MAX_LOGIT_BIAS} are possible")
        for token_id, bias in self.logit_bias.items():
            _require_within("a token id in logit_bias", token_id, 0, _MAX_INT)
            _require_within(f"the logit_bias of token {token_id}", bias, -100.0, 100.0)
        if (num_stops := len(self.stop_token_ids)) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids names {num_stops} tokens; at most {MAX_STOP_TOKEN_IDS} are possible")
        for token_id in self.stop_token_ids:
            _require_within("a token id in stop_token_ids", token_id, 0, _MAX_INT)
        if (num_allowed := len(self.allowed_token_ids)) > MAX_ALLOWED_TOKEN_IDS:
            raise ValueError(
                f"allowed_token_ids names {num_allowed} tokens; at most {MAX_ALLOWED_TOKEN_IDS} are possible"
            )
        for token_id in self.allowed_token_ids:
            _require_within("a token id in allowed_token_ids", token_id, 0, _MAX_INT)
        if (num_tokens := sum(map(len, self.bad_words))) > MAX_BAD_WORD_TOKENS:
            raise ValueError(f"bad_words have {num_tokens} tokens; at most {MAX_BAD_WORD_TOKENS} are possible")
        if not all(self.bad_words):
            raise ValueError("bad_words has a word without tokens; leave it out")
        for word in self.bad_words:
            for token_id in word:
                _require_within("a token id in bad_words", token_id, 0, _MAX_INT)
        for token_id in self.thinking_marks:
            _require_within("a token id in thinking_marks", token_id, 0, _MAX_INT)

    def with_seed(self, seed: int) -> SamplingParams:
        """These parameters with another seed, not checked again: there may be many choices, with a thousand biases
        each."""
        _require_within("seed", seed, 0, 2**63 - 1)
        other = object.__new__(SamplingParams)
        for name in _NAMES:  # a tenth of what `copy.copy` takes
            object.__setattr__(other, name, getattr(self, name))
        object.__setattr__(other, "seed", seed)
        return other

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


_NAMES: Final = tuple(each.name for each in fields(SamplingParams))


def _require_within(name: str, value: float, low: float, high: float, *, advice: str = "") -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must lie in [{low}, {high}]{advice}")


# What of generation_config.json is heeded where a request says nothing: as vLLM does, apart from `max_new_tokens`, for
# which there is a rule of each endpoint. `do_sample` is not among them there either: greedy is a temperature of 0.
_OF_CHECKPOINTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def checkpoint_defaults(folder: Path) -> dict[str, Any]:
    """Fields of `SamplingParams` that a checkpoint's generation_config.json recommends for requests that leave them
    out, as gateways read it when they start. Empty where the folder has no such file, or that says nothing of them.

    Raises ValueError, with advice, where the file cannot be read or names a value that no request could send.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    advice = "correct it there, or set model.generation_config: none"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(said, dict):
            raise ValueError("it holds no JSON object")
        named = {name: said[name] for name in _OF_CHECKPOINTS if said.get(name) is not None}
        defaults: dict[str, Any] = {name: _number(name, value) for name, value in named.items()}
        SamplingParams(max_tokens=1, seed=0, **defaults)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} cannot be used for requests that leave sampling out: {error}; {advice}") from error
    return defaults


def _number(name: str, value: object) -> float:
    """A value of generation_config.json as `SamplingParams` has it; of top_k, -1 is off as it is for clients. Raises
    ValueError for one of another type."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is {value!r}, which is no number")
    if name != "top_k":
        return float(value)
    if not isinstance(value, int):
        raise ValueError(f"top_k is {value}, which is no whole number")
    return 0 if value == -1 else value


def told_defaults(defaults: Mapping[str, Any]) -> str:
    """A sentence for operators on what `checkpoint_defaults` found; "" where that is nothing."""
    told = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    return f"Where a request leaves them out, its checkpoint's are used: {told}." if told else ""
