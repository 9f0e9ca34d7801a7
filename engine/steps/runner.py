"""Executes step plans: builds the batch, runs the model over it, samples.

Reads sequences and never writes them; the only state it changes is the KV of the tokens it was told to compute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.checkpoint.weights import Weights
from engine.kv.cache import KVCache, KVLayout, SequenceKV
from engine.model.batch import Batch, build_batch
from engine.model.config import DecoderConfig, ModelConfig
from engine.model.transformer import LayerHooks, Model
from engine.offload.staging import StagedTiers, Staging, StoredLayers, ThreadStaging, TransferStats
from engine.offload.staging_plan import StagingConfig, StagingPlan
from engine.offload.stream_staging import StagingStreams, StreamedStep, StreamStaging
from engine.parallel.leader import GroupLeader, GroupModel
from engine.sampling.grammar import GrammarMasks
from engine.sampling.pending_output import (
    NO_DRAFTS,
    Drafts,
    KnownTokens,
    PendingOutput,
    Rows,
    SampledTokens,
    joined,
    nothing_to_check,
)
from engine.sequence import (
    DraftedSequence,
    ScheduledSequence,
    Sequence,
    StepOutput,
    StepPlan,
    TokenLogprobs,
    TokensSoFar,
)
from engine.steps.decode_graphs import DecodeGraphLimits, DecodeGraphs, Record, record_for
from engine.steps.threads import StepThreads
from kernels.interface import GraphKernels, Kernels
from kernels.ops import kernels_for

if TYPE_CHECKING:
    from engine.model.hugging_face import HuggingFaceModel


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """Nothing in it changes with the plan's sequences any more."""

    plan: StepPlan
    batch: Batch | None  # None: it only copies
    staging_plan: StagingPlan | None  # of what rests in host memory

    @property
    def sampled_by(self) -> dict[Sequence, int]:
        """Which of the tokens that the step samples is whose."""
        items = () if self.batch is None else self.batch.sampling_items
        return {self.plan.items[index].seq: position for position, index in enumerate(items)}


logger = logging.getLogger(__name__)


class TokenSampler(Protocol):
    """What the runner needs of `engine.sampling.sampler.Sampler`, and who drafts by the grammars that it follows."""

    @property
    def masks(self) -> GrammarMasks | None: ...

    def begin(self, logits: Tensor, rows: Rows, drafts: Drafts = NO_DRAFTS) -> SampledTokens:
        """`logits [B, V]`, one for each row; B is not 0. `drafts`: of some rows, by their index, what the next
        row was computed for; where this row's token is another one, that of the next is not needed."""
        ...

    def prompt_logprobs(self, logits: Tensor, next_token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
        """`logits [T, V]`: the log-probability of the token that does follow each row."""
        ...


class ModelRunner:
    """One model, its KV caches and its sampler. Takes the tensors out of `weights`; where these are a model already, it
    computes with that one.

    With a `group`, `weights` and `kv_cache` are rank 0's parts of the model and of the KV.

    `kernels` None: those of the device.

    At most `logit_rows` rows have logits at a time, which take most of the memory of a step with many of them: 256 rows
    of a vocabulary of 150,000 are 150 MB. What more rows need is worked out in pieces.

    With a `ring`, sequences may rest in `host_cache` (see `Sequence.host_groups`), and the ring is the last blocks
    of `kv_cache`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights | HuggingFaceModel,
        kv_cache: KVCache,
        *,
        sampler: TokenSampler,
        host_cache: KVCache | None = None,
        ring: StagingConfig | None = None,
        group: GroupLeader | None = None,
        kernels: Kernels | None = None,
        threads: StepThreads | None = None,
        logit_rows: int = 256,
    ) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.sampler = sampler
        self._threads = threads
        self._logit_rows = logit_rows
        self._sampled: SampledTokens = KnownTokens([])  # by the step that ran last, in its batch's order
        # Draws a plan's undrawn drafts, and returns the seconds that it took.
        self.draw: Callable[[StepPlan], float] = lambda plan: 0.0
        # Told, before they sample, of the final hidden states `[R, E]` that items of a step sample from, one and one
        # for each of their drafts; good as long as the step.
        self.keep_hidden: Callable[[list[ScheduledSequence], Tensor], None] = lambda items, hidden: None
        self.group = group
        self._check = nothing_to_check if group is None else group.check
        self.model: Model | GroupModel | HuggingFaceModel
        if isinstance(weights, dict):
            self.weight_bytes = sum(weight.nbytes for weight in weights.values())
            self.model = _native_model(config, weights, kernels or kernels_for(kv_cache.device), group)
        else:
            self.weight_bytes = weights.weight_bytes
            self.model = weights
        self.graphs: DecodeGraphs | None = None
        assert self.model.dtype == kv_cache.layout.dtype, "weights and KV cache must be of one type"
        self.staging = self._stage(host_cache, ring)

    def keep_kv_in(self, kv_cache: KVCache, host_cache: KVCache | None, ring: StagingConfig | None) -> None:
        """Keep KV here in place of where it was kept so far, and forget that: before the runner is put to use."""
        assert self.staging is None, "what is staged belongs to a cache"
        assert self.graphs is None, "what is recorded belongs to a cache"
        self.kv_cache = kv_cache
        self.staging = self._stage(host_cache, ring)

    @torch.inference_mode()
    def record_decode(self, kernels: GraphKernels, limits: DecodeGraphLimits, record: Record | None = None) -> None:
        """Record steps of decode alone within these limits, to be replayed from now on. `kernels` are the runner's own.

        After `keep_kv_in`, for a runner without a group; `record` None: the device's.
        """
        assert isinstance(self.model, Model), "the ranks of a group are told of each step"
        record = record or record_for(self.kv_cache.device)
        self.graphs = DecodeGraphs(self.model, self.kv_cache, kernels, limits, record)

    def forget_recordings(self) -> None:
        self.graphs = None

    def _stage(self, host_cache: KVCache | None, ring: StagingConfig | None) -> Staging | None:
        assert ring is None or host_cache is not None, "a staging ring needs a host cache to fetch from"
        if host_cache is None:
            return None
        windows = _group_windows(self.config, self.kv_cache.layout)
        return staging_for(StagedTiers(kv_cache=self.sequence_kv, host_cache=host_cache, ring=ring, windows=windows))

    @property
    def host_cache(self) -> KVCache | None:
        return None if self.staging is None else self.staging.tiers.host_cache

    @property
    def num_pool_blocks(self) -> int:
        """Blocks of the device cache that sequences may own: all but the ring's."""
        return self.kv_cache.num_blocks if self.staging is None else self.staging.tiers.num_pool_blocks

    @property
    def staging_columns(self) -> int:
        """Block columns that all host-resident sequences of a step may have together; 0: none can be computed."""
        ring = None if self.staging is None else self.staging.tiers.ring
        return 0 if ring is None else ring.num_blocks

    @property
    def transfer_stats(self) -> TransferStats | None:
        """Counts of what moves between the tiers; None without host memory."""
        return None if self.staging is None else self.staging.stats

    @property
    def sequence_kv(self) -> SequenceKV:
        """The KV of all heads; `kv_cache` is what this process's part of the model computes with."""
        return self.kv_cache if self.group is None else self.group.kv_cache

    @property
    def devices(self) -> list[torch.device]:
        """The devices on which the model computes: one for each rank of a group."""
        return [self.kv_cache.device] if self.group is None else self.group.devices

    @property
    def is_healthy(self) -> bool:
        """False: no step will succeed any more."""
        return self.group is None or self.group.is_healthy

    def close(self) -> None:
        """End what copies and the group's other processes. Nothing may be executed after."""
        if self.staging is not None:
            self.staging.close()
        if self.group is not None:
            self.group.close()

    def execute(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        """Compute the plan and do its copies; all are done, or will not be, when this returns or raises.

        `on_layer(l)` is called when layer l's KV of all items stands where it rests, in the order of the layers: from
        this thread, or, where an item rests on the host, from the one that copies. On a device it is always this one,
        and the KV may not stand yet: see `StoredLayers`. Raises ValueError if the plan's host-resident sequences exceed
        `staging_columns`. A plan with undrawn drafts is for this alone, not for `prepare`.
        """
        drawing_s = self.draw(plan)
        output = self.run(self.prepare(plan), on_layer).output()
        return replace(output, drawing_s=drawing_s) if drawing_s else output

    @torch.inference_mode()
    def prepare(self, plan: StepPlan, after: PreparedStep | None = None) -> PreparedStep:
        """Whatever of a step can be done while the one before it, `after`, runs in another thread.

        Tokens that `after` samples may be unknown still. Raises ValueError as `execute` does.
        """
        staging_plan = None if self.staging is None else self.staging.tiers.plan_staging(plan)
        if not plan.items:
            return PreparedStep(plan, None, staging_plan)
        tables = {} if staging_plan is None else staging_plan.tables
        batch = build_batch(plan, self.kv_cache, tables, {} if after is None else after.sampled_by)
        return PreparedStep(plan, batch, staging_plan)

    @torch.inference_mode()
    def run(
        self,
        step: PreparedStep,
        on_layer: Callable[[int], None] | None = None,
        before_sampling: Callable[[], None] = lambda: None,
    ) -> PendingOutput:
        """Compute a prepared step; see `execute`. A step that was prepared after another one must run right after it.

        `before_sampling` returns when the sequences are as the step before left them: sampling reads their tokens. What
        the step brings may be waited for while the next one runs; where layers are staged by streams of their own, that
        includes their copies.
        """
        with self._computing(step), self._hooks(step.plan, step.staging_plan, on_layer) as hooks:
            output = self._compute(step, hooks, before_sampling)
        return replace(output, copies=hooks) if isinstance(hooks, StreamedStep) else output

    def _computing(self, step: PreparedStep) -> AbstractContextManager[None]:
        if self._threads is None or step.batch is None:
            return nullcontext()
        return self._threads.computing(len(step.batch.token_ids))

    def _compute(
        self, step: PreparedStep, hooks: LayerHooks | None, before_sampling: Callable[[], None]
    ) -> PendingOutput:
        if step.batch is None:
            return PendingOutput(prompt_logprobs=[])
        if len(step.batch.awaited_rows):
            sampled = self._sampled.token_ids.to(self.kv_cache.device)
            awaited = sampled[step.batch.awaited_from].clamp_(min=0)  # -1: its step fails, and so will this
            step.batch.token_ids[step.batch.awaited_rows] = awaited
        hidden = self._forward(step.batch, hooks)
        self._before_sampling(before_sampling)
        return self._sample(step.plan, step.batch, hidden)

    def _forward(self, batch: Batch, hooks: LayerHooks | None) -> Tensor:
        if self.graphs is not None and hooks is None and self.graphs.takes(batch):
            return self.graphs.forward(batch)
        return self.model.forward(batch, self.kv_cache, hooks)

    def _before_sampling(self, wait: Callable[[], None]) -> None:
        try:
            wait()
        except BaseException:
            if self.kv_cache.device.type == "cuda":  # nothing of a step may be computed after it has ended
                torch.cuda.synchronize(self.kv_cache.device)
            raise

    def _hooks(
        self, plan: StepPlan, staging_plan: StagingPlan | None, on_layer: Callable[[int], None] | None
    ) -> AbstractContextManager[LayerHooks | None]:
        if self.staging is not None and (plan.copies or staging_plan is not None):
            return self.staging.step(plan, staging_plan, on_layer)
        assert not plan.copies, "copies between tiers were planned for a runner without host memory"
        assert self.staging or not any(item.seq.host_groups for item in plan.items), "there is no host memory"
        return nullcontext(None if on_layer is None else StoredLayers(on_layer))

    def _sample(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> PendingOutput:
        num_samples = batch.num_sampled_rows
        prompt_logprobs = self._prompt_logprobs(plan, batch, hidden[num_samples:])
        pooled = _pooled(plan, batch, hidden)
        if not num_samples:
            return PendingOutput(prompt_logprobs=prompt_logprobs, pooled=pooled, check=self._check)
        items = [plan.items[index] for index in batch.sampling_items]
        self.keep_hidden(items, hidden[:num_samples])
        rows, drafts = _sampled_rows(items)
        tokens = self._sample_in_pieces(hidden[:num_samples], rows, drafts)
        self._sampled = tokens
        return PendingOutput(
            prompt_logprobs=prompt_logprobs,
            sampling_items=batch.sampling_items,
            tokens=tokens,
            drafts=drafts,
            pooled=pooled,
            check=self._check,
        )

    def _sample_in_pieces(self, hidden: Tensor, rows: list[TokensSoFar], drafts: Drafts) -> SampledTokens:
        parts = []
        for piece in _pieces(len(rows), drafts, self._logit_rows):
            own = {row - piece.start: draft for row, draft in drafts.items() if piece.start <= row < piece.stop}
            parts.append(self.sampler.begin(self.model.logits(hidden[piece]), rows[piece], own))
        return joined(parts)

    def _prompt_logprobs(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> list[list[TokenLogprobs] | None]:
        found: list[list[TokenLogprobs] | None] = [None] * len(plan.items)
        for item, next_token_ids in batch.prompt_spans:
            count = len(next_token_ids)
            num_top = plan.items[item].seq.params.prompt_logprobs or 0
            found[item] = self._logprobs_of(hidden[:count], next_token_ids, num_top)
            hidden = hidden[count:]
        return found

    def _logprobs_of(self, hidden: Tensor, next_token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
        logprobs: list[TokenLogprobs] = []
        for piece in _pieces(len(next_token_ids), NO_DRAFTS, self._logit_rows):
            # Nobody keeps a piece's logits while the next one's are worked out.
            logprobs += self.sampler.prompt_logprobs(self.model.logits(hidden[piece]), next_token_ids[piece], num_top)
        return logprobs


def _pieces(num_rows: int, drafts: Drafts, most: int) -> Iterator[slice]:
    """Cut rows into pieces of at most `most`, but never between a draft and the row that it was computed for: whether
    that row is sampled is decided before it."""
    first = stop = 0
    for row in range(num_rows):
        if row in drafts:
            continue
        if row >= first + most and stop > first:
            yield slice(first, stop)
            first = stop
        stop = row + 1
    if stop > first:
        yield slice(first, stop)


def _native_model(
    config: DecoderConfig, weights: Weights, kernels: Kernels, group: GroupLeader | None
) -> Model | GroupModel:
    assert isinstance(config, ModelConfig), "only Legato's own models are built from their weights here"
    with torch.inference_mode():
        model = Model(config, weights, kernels, None if group is None else group.ranks)
    return model if group is None else GroupModel(group, model)


def _sampled_rows(items: list[ScheduledSequence]) -> tuple[list[TokensSoFar], Drafts]:
    """An entry for each row that is sampled: its sequence, or that with the drafts before the row appended. And by row
    the draft that the next row was computed for."""
    rows: list[TokensSoFar] = []
    drafts: dict[int, int] = {}
    for item in items:
        rows.append(item.seq)
        for count, draft in enumerate(item.drafts, 1):
            drafts[len(rows) - 1] = draft
            rows.append(DraftedSequence(item.seq, item.drafts[:count]))
    return rows, drafts


def _pooled(plan: StepPlan, batch: Batch, hidden: Tensor) -> dict[int, npt.NDArray[np.float64]]:
    """For each item, the sum over those of its rows of `hidden` `[R, E]` that are pooled, in float64: however a prompt
    is cut into chunks, it comes to the same. Waits for the device. Raises FloatingPointError where a vector is none."""
    found: dict[int, npt.NDArray[np.float64]] = {}
    at = len(hidden) - sum(count for _, count in batch.pooled_spans)
    for item, count in batch.pooled_spans:
        found[item] = hidden[at : at + count].sum(0, dtype=torch.float64).cpu().numpy()
        at += count
        if not np.isfinite(found[item]).all():
            raise FloatingPointError(
                f"the hidden states of request {plan.items[item].seq.request_id} hold NaN or infinity: the weights or"
                " the KV cache of this worker are broken for it; fail this request and check the weights"
            )
    return found


def _group_windows(config: DecoderConfig, layout: KVLayout) -> tuple[int | None, ...]:
    """How far back any layer of each group sees, in tokens; None: to the start."""
    windows = []
    for first in range(0, config.num_layers, layout.layers_per_group):
        of_layers = config.layer_windows[first : first + layout.layers_per_group]
        bounded = [window for window in of_layers if window is not None]
        windows.append(max(bounded) if len(bounded) == len(of_layers) else None)
    return tuple(windows)


def staging_for(tiers: StagedTiers) -> Staging:
    """The staging between these tiers: by a thread, or by the device's streams."""
    device = tiers.kv_cache.device
    return StreamStaging(tiers, StagingStreams.of(device)) if device.type == "cuda" else ThreadStaging(tiers)
