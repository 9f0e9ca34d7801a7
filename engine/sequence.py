"""One sequence: its tokens, how far its KV is computed, and the blocks that hold it.

Written by the worker scheduler that holds it, but for when it began, which the step loop says; runner and sampler only
read.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from engine.kv.block_pool import BlockLease
from engine.kv.prefix import PrefixHasher
from engine.sampling.params import SamplingParams

if TYPE_CHECKING:  # these bring torch, and gateways know sequences, too
    from engine.model.adapters import AdapterSlot
    from kernels.adapters import Adapter

Pooling = Literal["last", "mean"]
"""One vector in place of tokens: the final hidden state of the last token, or the mean of all tokens'; its length is
1."""


class SequenceKey(NamedTuple):
    """What names a sequence: a later attempt of a request is another one."""

    request_id: str
    attempt: int


class BlockTable:
    """The blocks of one sequence, `[layer_groups, num_columns]`: column j holds the j-th `block_size` tokens.

    Grows by columns. `view` is what the runner reads.
    """

    __slots__ = ("_blocks", "num_columns")

    def __init__(self, num_layer_groups: int) -> None:
        self._blocks: npt.NDArray[np.int32] = np.empty((num_layer_groups, 8), dtype=np.int32)
        self.num_columns = 0

    @classmethod
    def of(cls, columns: npt.NDArray[np.int32]) -> BlockTable:
        """The table of `[layer_groups, num_columns]` block ids."""
        table = cls(len(columns))
        table.append(columns)
        return table

    @property
    def num_layer_groups(self) -> int:
        return int(self._blocks.shape[0])

    @property
    def view(self) -> npt.NDArray[np.int32]:
        """[layer_groups, num_columns]"""
        return self._blocks[:, : self.num_columns]

    def append(self, columns: npt.NDArray[np.int32]) -> None:
        """Append `[layer_groups, n]` block ids."""
        needed = self.num_columns + columns.shape[1]
        capacity = self._blocks.shape[1]
        if needed > capacity:
            grown = np.empty((self.num_layer_groups, max(needed, 2 * capacity)), dtype=np.int32)
            grown[:, : self.num_columns] = self.view
            self._blocks = grown
        self._blocks[:, self.num_columns : needed] = columns
        self.num_columns = needed


_SHORTEST = 1e-12  # a vector that is divided by its length

UNDRAWN: Final = -1
"""In place of a draft that the step itself will draw, from a model that drafts."""


@dataclass(eq=False, slots=True, weakref_slot=True, kw_only=True)
class Sequence:
    """A request as an engine sees it.

    `output_token_ids` includes tokens that an earlier attempt on another worker emitted; they count for penalties and
    for `max_tokens`, and their KV is computed like the prompt's.
    """

    request_id: str
    attempt: int
    key: SequenceKey = field(init=False)
    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int] = field(default_factory=list)
    pooling: Pooling | None = None  # in place of tokens; None: tokens are sampled
    pooled: npt.NDArray[np.float64] | None = None  # [hidden size], the sum of what is pooled of the tokens so far
    num_prior_output: int = 0  # of the output tokens, those that earlier attempts emitted
    cache_salt: str = ""
    adapter: AdapterSlot | None = None  # that it is computed with, beside the model
    tpot_s: float | None = None  # promised: mean seconds between its tokens; None: nothing
    gap_s: float | None = None  # promised: seconds between two tokens, of nearly all of its gaps; None: nothing
    lease: BlockLease | None = None
    block_table: BlockTable | None = None  # on the device; the rows of `host_groups` hold -1
    host_groups: frozenset[int] = frozenset()  # layer groups whose KV rests in host memory
    host_lease: BlockLease | None = None
    host_table: BlockTable | None = None  # in host memory; the rows of other groups hold -1
    num_computed: int = 0  # tokens whose KV is in the blocks
    num_computing: int = 0  # tokens after these that steps in flight compute
    num_awaited: int = 0  # tokens that steps in flight sample; none of them is known yet
    num_cached: int = 0  # of the prompt's, tokens found in the prefix cache (or known computed elsewhere)
    num_cached_on_host: int = 0  # of those, tokens that the host tier had and the device lacked at least a part of
    # of those, tokens that were brought to the host tier for it
    num_brought: dict[Literal["neighbours", "disk"], int] = field(default_factory=dict)
    prediction_token_ids: list[int] = field(default_factory=list)  # what its client expects its output to be much like
    prefix: PrefixHasher | None = None  # of the tokens hashed so far; tokens never change, so it is only extended
    prompt_logprobs: list[TokenLogprobs] = field(
        default_factory=list
    )  # if wanted, of the prompt tokens computed so far
    num_published: int = 0  # leading full blocks already made findable in the prefix cache
    is_part: bool = False  # of a sequence: another worker has the other tokens, too, and goes on. It samples nothing
    num_received: int = 0  # of its tokens, those that another worker computes, where it computes the rest itself
    num_alone: int = 0  # of its next tokens, those whose steps nobody shares: it may be what makes steps fail
    accepted_at: float = field(default_factory=time.monotonic)  # this and the next: seconds of `time.monotonic()`
    began_at: float | None = None  # when its first step here was planned
    waited_before_s: float | None = None  # for its first step, where another worker has computed its first part

    def __post_init__(self) -> None:
        self.key = SequenceKey(self.request_id, self.attempt)

    def begin(self) -> None:
        """A step with it is about to run; only the first one counts."""
        if self.began_at is None:
            self.began_at = time.monotonic()

    @property
    def waited_s(self) -> float:
        """Seconds from its being accepted to its first step, of the worker that began with it."""
        if self.waited_before_s is not None:
            return self.waited_before_s
        return (time.monotonic() if self.began_at is None else self.began_at) - self.accepted_at

    @property
    def has_adapter(self) -> bool:
        """Whether what it is computed with is loaded, and for it, if there is something."""
        return self.adapter is None or self.adapter.serves(self)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its prompt's log-probabilities are still wanted: they are reported with the first output token."""
        return self.params.prompt_logprobs is not None and not self.output_token_ids

    @property
    def skips_prefix(self) -> bool:
        """Whether a prefix hit can cover its first tokens: not where something is asked for of each."""
        return not self.wants_prompt_logprobs and self.pooling != "mean"

    def pool(self, start: int, part: npt.NDArray[np.float64]) -> None:
        """A step has brought the sum `[hidden size]` of what is pooled of the tokens from position `start` on. Who
        begins again from the first token, begins a new sum."""
        self.pooled = part if self.pooled is None or start == 0 else self.pooled + part

    @property
    def embedding(self) -> npt.NDArray[np.float32]:
        """`[hidden size]`, of length 1, once all tokens are computed: a mean has the direction of its sum."""
        assert self.pooled is not None, f"nothing of {self.request_id} was pooled"
        return (self.pooled / max(float(np.linalg.norm(self.pooled)), _SHORTEST)).astype(np.float32)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_uncomputed(self) -> int:
        """The number of known tokens that are not computed. What steps in flight compute counts as nothing yet."""
        return self.num_tokens - self.num_computed

    @property
    def num_tokens_ahead(self) -> int:
        """What `num_tokens` will be when all steps in flight have ended well."""
        return self.num_tokens + self.num_awaited

    @property
    def num_unplanned(self) -> int:
        """What `num_uncomputed` will be when all steps in flight have ended well."""
        return self.num_tokens_ahead - self.num_computed - self.num_computing

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions [start, stop) of prompt and output taken together."""
        num_prompt = len(self.prompt_token_ids)
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return [*self.prompt_token_ids[start:], *self.output_token_ids[: stop - num_prompt]]


class TokensSoFar(Protocol):
    """What the sampler asks of whose next token it samples: a `Sequence`, or one as if it had its `DraftedSequence`'s
    drafts."""

    @property
    def request_id(self) -> str: ...

    @property
    def params(self) -> SamplingParams: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def output_token_ids(self) -> list[int]: ...

    def tokens(self, start: int, stop: int) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class DraftedSequence:
    """A sequence as it is if these `drafts` are its next tokens: what comes after them is sampled as it would be then.

    A token is a function of logits, parameters, position and the tokens before it. So whoever samples after drafts that
    turn out right has sampled the very token that would have come without any.
    """

    seq: Sequence
    drafts: tuple[int, ...]

    @property
    def request_id(self) -> str:
        return self.seq.request_id

    @property
    def params(self) -> SamplingParams:
        return self.seq.params

    @property
    def num_tokens(self) -> int:
        return self.seq.num_tokens + len(self.drafts)

    @property
    def num_output_tokens(self) -> int:
        return len(self.seq.output_token_ids) + len(self.drafts)

    @property
    def output_token_ids(self) -> list[int]:
        return [*self.seq.output_token_ids, *self.drafts]

    def tokens(self, start: int, stop: int) -> list[int]:
        """The tokens from `start` to `stop`, as `Sequence.tokens` gives them."""
        num_known = self.seq.num_tokens
        if stop <= num_known:
            return self.seq.tokens(start, stop)
        return [
            *self.seq.tokens(start, max(start, num_known)),
            *self.drafts[max(start - num_known, 0) : stop - num_known],
        ]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position: the chosen token's and the best alternatives', best first."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class ScheduledSequence:
    """Compute the KV of `num_tokens` tokens of `seq` from position `start` on in a step.

    When that reaches the sequence's last token, the step also `samples` its next one, unless the sequence is a part of
    another worker's, or a vector is asked for in place of tokens. Of its tokens the last `num_pooled` are pooled.
    All of this is said of the sequence as it will be when the steps now in flight have ended well, and stays so
    whatever becomes of them.

    `drafts` are guesses of the tokens after the last one, which come on top of `num_tokens`: their KV is computed too,
    and the step samples after each of them as long as they are right. Those that are `UNDRAWN` are drawn when the step
    begins, and put here, or fewer than were planned.
    """

    seq: Sequence
    num_tokens: int
    drafts: tuple[int, ...] = ()
    start: int = field(init=False)
    samples: bool = field(init=False)
    num_pooled: int = field(init=False)
    adapter: Adapter | None = field(init=False)  # kept: its slot may be another's before the step is over

    def __post_init__(self) -> None:
        seq = self.seq
        assert seq.has_adapter, f"the adapter of {seq.request_id} is not loaded"
        self.adapter = None if seq.adapter is None else seq.adapter.loaded
        left = seq.num_unplanned - self.num_tokens
        assert self.num_tokens >= 1 and left >= 0, f"{self.num_tokens} tokens of {seq.request_id}"
        assert not self.drafts or (left == 0 and not seq.num_awaited), "drafts follow a token that is known"
        self.start = seq.num_computed + seq.num_computing
        self.samples = left == 0 and not seq.is_part and seq.pooling is None
        self.num_pooled = self.num_tokens if seq.pooling == "mean" else int(seq.pooling == "last" and left == 0)

    @property
    def num_rows(self) -> int:
        """Tokens that the step computes for it, right or not."""
        return self.num_tokens + len(self.drafts)

    @property
    def stop(self) -> int:
        """The position after its last row."""
        return self.start + self.num_tokens + len(self.drafts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockCopy:
    """Whole blocks of one layer group to copy between device and host memory in a step, `[n]` each.

    To the device: done before the group computes, so that a sequence of the same step may use them. To the host: of
    tokens computed in earlier steps; no sequence of the same step writes the source. Blocks at both ends stay leased
    until the step has been finished or abandoned.
    """

    group: int
    to: Literal["device", "host"]
    source: npt.NDArray[np.int32]
    destination: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one call of the runner computes, and copies between tiers."""

    items: tuple[ScheduledSequence, ...]
    copies: tuple[BlockCopy, ...] = ()
    drawing_s: float = 0.0  # predicted, for drawing the drafts that are undrawn

    @property
    def is_empty(self) -> bool:
        """Whether there is no step to make."""
        return not (self.items or self.copies)

    @property
    def has_undrawn(self) -> bool:
        return any(UNDRAWN in item.drafts for item in self.items)

    @property
    def num_tokens(self) -> int:
        """Drafts included."""
        return sum(item.num_rows for item in self.items)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Aligned with `StepPlan.items`."""

    sampled: list[SampledToken | None]  # None where the item does not sample
    # For sequences that asked for prompt logprobs: those of tokens [num_computed + 1, num_computed + num_tokens + 1)
    # that are prompt tokens, i.e. the model's opinion of each next prompt token.
    prompt_logprobs: list[list[TokenLogprobs] | None]
    # Of items that are pooled, by their index into the plan: the sum `[hidden size]` over their tokens.
    pooled: dict[int, npt.NDArray[np.float64]] = field(default_factory=dict)
    # Of items whose first drafts were right, by their index into the plan: the tokens after the one in `sampled`, one
    # for each of these drafts.
    following: dict[int, list[SampledToken]] = field(default_factory=dict)
    drawing_s: float = 0.0  # of the step, what went into drawing drafts


FinishReason = Literal["stop", "length"]


def finish_reason(
    seq: Sequence, eos_token_ids: frozenset[int], max_model_len: int | None = None
) -> FinishReason | None:
    """Why `seq` ends with its newest output token, or None if it goes on. Stop strings need text: see the gateway.

    `max_model_len` None: where the sequence goes on elsewhere, with a limit of its own.
    """
    params, num_output = seq.params, len(seq.output_token_ids)
    token = seq.output_token_ids[-1]
    if token in eos_token_ids and params.grammar is not None:
        return "stop"  # nothing may follow in the grammar
    if num_output >= params.min_tokens:
        if token in params.stop_token_ids:
            return "stop"
        if token in eos_token_ids and not params.ignore_eos:
            return "stop"
    if num_output >= params.max_tokens:
        return "length"
    return "length" if max_model_len is not None and seq.num_tokens >= max_model_len else None
