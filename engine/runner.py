"""Executes step plans: builds the batch, runs the model over it, samples.

Reads sequences and never writes them; the only state it changes is the KV of the tokens it was told to compute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import Batch, build_batch
from engine.host_memory import keep_freed_memory
from engine.kv_cache import KVCache, KVLayout
from engine.model import Model
from engine.model_config import ModelConfig
from engine.sampler import Sampler
from engine.sequence import SampledToken, Sequence, StepOutput, StepPlan, TokenLogprobs
from engine.weights import Weights, load_weights
from kernels.ops import kernels_for

logger = logging.getLogger(__name__)

# Logits of a long prompt are computed in pieces: 256 rows of a vocabulary of 150,000 are 150 MB.
_LOGIT_ROWS = 256


class TokenSampler(Protocol):
    """What the runner needs of `engine.sampler.Sampler`."""

    def sample(self, logits: Tensor, rows: list[Sequence]) -> list[SampledToken]:
        """`logits [B, V]` float32, one row for each sequence."""
        ...

    def prompt_logprobs(self, logits: Tensor, next_token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
        """`logits [T, V]` float32, each row judged by the token that does follow."""
        ...


class ModelRunner:
    """One model, its KV cache and its sampler. Takes the tensors out of `weights`."""

    def __init__(self, config: ModelConfig, weights: Weights, kv_cache: KVCache, *, sampler: TokenSampler) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.weight_bytes = sum(tensor.nbytes for tensor in weights.values())
        self._sampler = sampler
        with torch.inference_mode():
            self._model = Model(config, weights, kernels_for(kv_cache.tensor.device))
        assert self._model.dtype == kv_cache.layout.dtype, "weights and KV cache must be of one type"

    @torch.inference_mode()
    def execute(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        """Compute the plan. `on_layer(l)` is called when layer l's KV of all items stands in the cache."""
        if not plan.items:
            return StepOutput([], [])
        batch = build_batch(plan, self.kv_cache)
        hidden = self._model.forward(batch, self.kv_cache, on_layer)
        num_samples = len(batch.sampling_items)
        return StepOutput(
            self._sample(plan, batch, hidden[:num_samples]),
            self._judge_prompts(plan, batch, hidden[num_samples:]),
        )

    def _sample(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> list[SampledToken | None]:
        sampled: list[SampledToken | None] = [None] * len(plan.items)
        if batch.sampling_items:
            rows = [plan.items[index].seq for index in batch.sampling_items]
            tokens = self._sampler.sample(self._model.logits(hidden), rows)
            for index, token in zip(batch.sampling_items, tokens, strict=True):
                sampled[index] = token
        return sampled

    def _judge_prompts(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> list[list[TokenLogprobs] | None]:
        judged: list[list[TokenLogprobs] | None] = [None] * len(plan.items)
        for span in batch.prompt_spans:
            count = len(span.next_token_ids)
            num_top = plan.items[span.item].seq.params.prompt_logprobs or 0
            judged[span.item] = self._judge(hidden[:count], span.next_token_ids, num_top)
            hidden = hidden[count:]
        return judged

    def _judge(self, hidden: Tensor, next_token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
        judged: list[TokenLogprobs] = []
        for start in range(0, len(next_token_ids), _LOGIT_ROWS):
            ids = next_token_ids[start : start + _LOGIT_ROWS]
            logits = self._model.logits(hidden[start : start + len(ids)])
            judged.extend(self._sampler.prompt_logprobs(logits, ids, num_top))
        return judged


def load_runner(
    model_folder: str | Path,
    *,
    dtype: torch.dtype,
    block_size: int,
    layers_per_group: int | None = None,
    num_blocks: int | None = None,
    kv_bytes: int | None = None,
    num_threads: int | None = None,
) -> ModelRunner:
    """A runner on the CPU for the model in a folder; what it took is logged.

    `layers_per_group` None: all layers share one block table. Give either `num_blocks` or `kv_bytes`. `num_threads` is
    torch's, for the whole process. Raises ValueError for models or sizes that cannot be run.
    """
    config = ModelConfig.from_folder(model_folder)
    layout = KVLayout(
        num_layers=config.num_layers,
        layers_per_group=config.num_layers if layers_per_group is None else layers_per_group,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    kv_cache = KVCache(layout, _num_blocks(layout, num_blocks, kv_bytes))
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    keep_freed_memory()
    sampler = Sampler(config.vocab_size, config.eos_token_ids)
    runner = ModelRunner(config, load_weights(model_folder, config, dtype=dtype), kv_cache, sampler=sampler)
    logger.info(
        "%s from %s: %.0f MB of weights; %d KV blocks of %d tokens x %d layers, %.0f MB, %d tokens; %d threads",
        config.architecture,
        model_folder,
        runner.weight_bytes / 1e6,
        kv_cache.num_blocks,
        layout.block_size,
        layout.layers_per_group,
        kv_cache.num_bytes / 1e6,
        kv_cache.num_blocks // layout.num_layer_groups * layout.block_size,
        torch.get_num_threads(),
    )
    return runner


def _num_blocks(layout: KVLayout, num_blocks: int | None, kv_bytes: int | None) -> int:
    if (num_blocks is None) == (kv_bytes is None):
        raise ValueError("give the size of the KV cache either as num_blocks or as kv_bytes")
    if num_blocks is None:
        assert kv_bytes is not None
        num_blocks = kv_bytes // layout.block_bytes
    if num_blocks < layout.num_layer_groups:
        raise ValueError(
            f"a KV cache of {num_blocks} blocks cannot hold a single token: each token needs a block in each of"
            f" {layout.num_layer_groups} layer groups, {layout.num_layer_groups * layout.block_bytes} bytes in all"
        )
    return num_blocks
