"""What a client may ask of sampling, checked once.

Knows nothing of tensors or of HTTP: the gateway builds it from a request, the wire carries it, the sampler reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_LOGPROBS = 20  # OpenAI's limit on `top_logprobs`


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one sequence are chosen and when it ends.

    `seed` together with a token's position fixes all randomness (see `engine.philox`), so that a sequence continues
    identically in another batch, after a preemption, or on another worker.

    Raises ValueError with advice on any value outside its range.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0  # 0 means greedy
    top_k: int = 0  # 0 means off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # None: no logprobs; n: the chosen token's and the n best
    prompt_logprobs: int | None = None  # the same for each prompt token after the first (completions' `echo`)
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        checks = (
            (self.max_tokens >= 1, f"max_tokens is {self.max_tokens}; it must be at least 1"),
            (0 <= self.seed < 2**63, f"seed is {self.seed}; it must lie in [0, 2**63)"),
            (0.0 <= self.temperature <= 2.0, f"temperature is {self.temperature}; it must lie in [0, 2]"),
            (self.top_k >= 0, f"top_k is {self.top_k}; use a positive number, or 0 to turn it off"),
            (0.0 < self.top_p <= 1.0, f"top_p is {self.top_p}; it must lie in (0, 1]"),
            (0.0 <= self.min_p <= 1.0, f"min_p is {self.min_p}; it must lie in [0, 1]"),
            (0.0 < self.repetition_penalty <= 10.0, "repetition_penalty must lie in (0, 10]"),
            (-2.0 <= self.presence_penalty <= 2.0, "presence_penalty must lie in [-2, 2]"),
            (-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty must lie in [-2, 2]"),
            (all(-100.0 <= b <= 100.0 for b in self.logit_bias.values()), "logit_bias values must lie in [-100, 100]"),
            (all(t >= 0 for t in self.logit_bias), "logit_bias keys must be token ids, 0 or larger"),
            (0 <= (self.logprobs or 0) <= MAX_LOGPROBS, f"at most {MAX_LOGPROBS} logprobs can be returned"),
            (0 <= (self.prompt_logprobs or 0) <= MAX_LOGPROBS, f"at most {MAX_LOGPROBS} logprobs can be returned"),
            (0 <= self.min_tokens <= self.max_tokens, "min_tokens must lie between 0 and max_tokens"),
        )
        for holds, advice in checks:
            if not holds:
                raise ValueError(advice)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
