"""Drives a `ModelRunner` by hand: sequences with blocks from a pool, and steps of any shape."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.checkpoint.weights import load_weights
from engine.kv.block_pool import BlockPool
from engine.kv.cache import KVCache, KVLayout
from engine.memory.devices import CPU
from engine.model.config import Backend, ModelConfig, read_config
from engine.sampling.params import SamplingParams
from engine.sampling.pending_output import NO_DRAFTS, Drafts, KnownTokens, Rows
from engine.sequence import BlockTable, SampledToken, ScheduledSequence, Sequence, StepPlan, TokenLogprobs
from engine.steps.runner import ModelRunner
from engine.steps.threads import StepThreads
from kernels.interface import Kernels
from kernels.ops import kernels_for

GREEDY = SamplingParams(max_tokens=64, seed=0, temperature=0.0)
GREEDY_WITH_ECHO = SamplingParams(max_tokens=64, seed=0, temperature=0.0, prompt_logprobs=0)


class RecordingSampler:
    """Greedy, and keeps the logits it saw, by request."""

    masks = None

    def __init__(self) -> None:
        self.sampled: dict[str, list[Tensor]] = {}
        self.judged: list[Tensor] = []

    def begin(self, logits: Tensor, rows: Rows, drafts: Drafts = NO_DRAFTS) -> KnownTokens:
        logits = logits.float()
        for seq, row in zip(rows, logits, strict=True):
            self.sampled.setdefault(seq.request_id, []).append(row.clone())
        return KnownTokens([SampledToken(int(token)) for token in logits.argmax(-1)])

    def prompt_logprobs(self, logits: Tensor, next_token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
        logits = logits.float()
        self.judged.append(logits.clone())
        logprobs = torch.log_softmax(logits, -1)
        return [TokenLogprobs(float(row[token]), []) for row, token in zip(logprobs, next_token_ids, strict=True)]


def recording_runner(
    folder: Path,
    *,
    layers_per_group: int | None = None,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    num_blocks: int = 600,
    kernels: Kernels | None = None,
    threads: StepThreads | None = None,
    backend: Backend = "native",
) -> tuple[ModelRunner, RecordingSampler]:
    """A runner whose KV cache is full of NaN: whatever is read that nobody wrote shows in the output."""
    config = read_config(folder, backend)
    layout = KVLayout(
        num_layers=config.num_layers,
        layers_per_group=layers_per_group or config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        latent_dim=config.latent_dim,
        block_size=block_size,
        dtype=dtype,
    )
    kv_cache = KVCache(layout, num_blocks)
    kv_cache.tensor.fill_(torch.nan)
    sampler = RecordingSampler()
    if isinstance(config, ModelConfig):
        weights = load_weights(folder, config, dtype=dtype)
        return ModelRunner(config, weights, kv_cache, sampler=sampler, kernels=kernels, threads=threads), sampler
    from engine.model.hugging_face import HuggingFaceConfig, HuggingFaceModel  # takes seconds to import

    assert isinstance(config, HuggingFaceConfig)
    with torch.inference_mode():
        model = HuggingFaceModel(config, folder, dtype=dtype, device=CPU, kernels=kernels or kernels_for(CPU))
    return ModelRunner(config, model, kv_cache, sampler=sampler), sampler


class Stepper:
    """Sequences on one runner, all their blocks from one shuffled pool."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.random = random.Random(seed)
        self.layout = runner.kv_cache.layout
        self.pool = BlockPool(runner.num_pool_blocks)
        shuffled = self.pool.lease(self.pool.num_blocks)
        self.random.shuffle(shuffled.blocks)
        self.pool.release(shuffled)

    def add(self, prompt: list[int], request_id: str = "", params: SamplingParams = GREEDY) -> Sequence:
        seq = Sequence(request_id=request_id, attempt=0, params=params, prompt_token_ids=prompt)
        seq.lease = self.pool.lease()
        seq.block_table = BlockTable(self.layout.num_layer_groups)
        return seq

    def step(self, chunks: Iterable[tuple[Sequence, int]]) -> list[SampledToken | None]:
        """Compute so many tokens of each sequence; take in what was sampled."""
        plan = StepPlan(tuple(ScheduledSequence(seq, count) for seq, count in chunks))
        for item in plan.items:
            self.reserve(item.seq, item.seq.num_computed + item.num_tokens)
        output = self.runner.execute(plan)
        for item, token in zip(plan.items, output.sampled, strict=True):
            item.seq.num_computed += item.num_tokens
            if token is not None:
                item.seq.output_token_ids.append(token.token_id)
        return output.sampled

    def generate(self, seq: Sequence, num_tokens: int, chunk: int | None = None) -> list[int]:
        """Alone, its uncomputed tokens in chunks."""
        while len(seq.output_token_ids) < num_tokens:
            self.step([(seq, min(chunk or seq.num_uncomputed, seq.num_uncomputed))])
        return seq.output_token_ids

    def generate_mixed(self, seqs: list[Sequence], num_tokens: int) -> None:
        """Together: in each step a random choice of them, in random order, by random chunks."""
        unfinished = list(seqs)
        while unfinished:
            self.random.shuffle(unfinished)
            chosen = unfinished[: self.random.randint(1, len(unfinished))]
            self.step([(seq, self.random.randint(1, min(seq.num_uncomputed, 19))) for seq in chosen])
            unfinished = [seq for seq in unfinished if len(seq.output_token_ids) < num_tokens]

    def reserve(self, seq: Sequence, num_tokens: int) -> None:
        """Blocks for the first `num_tokens` tokens."""
        assert seq.lease is not None
        assert seq.block_table is not None
        groups = self.layout.num_layer_groups
        columns = -(-num_tokens // self.layout.block_size) - seq.block_table.num_columns
        if columns > 0:
            blocks = np.array(self.pool.extend(seq.lease, groups * columns), dtype=np.int32)
            seq.block_table.append(blocks.reshape(groups, columns))
