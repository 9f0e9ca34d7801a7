"""The sampler as one would write it down: whole vocabulary, float64, plain loops, no shortcuts.

Also what the tests of the sampler share.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.params import SamplingParams
from engine.sampling.philox import gumbel
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence

EOS = 2
VOCAB = 307  # no multiple of four


def params_of(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "seed": 1, **changes})


def random_logits(seed: int, rows: int = 1, vocab_size: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def draw(logits: torch.Tensor, *, output: list[int] | None = None, **changes: Any) -> int:
    """One token from `logits` [1, V]."""
    sampler = Sampler(logits.shape[1], [EOS])
    [token] = sampler.sample(logits, [sequence(params_of(**changes), output=output)])
    return token.token_id


def sequence(
    params: SamplingParams, *, prompt: list[int] | None = None, output: list[int] | None = None, name: str = "r"
) -> Sequence:
    return Sequence(
        request_id=name,
        attempt=0,
        params=params,
        prompt_token_ids=[0, 1, 2] if prompt is None else prompt,
        output_token_ids=output or [],
    )


def naive_adjusted(
    row: npt.NDArray[np.float32], seq: Sequence, eos_token_ids: list[int], allowed: Collection[int] | None = None
) -> npt.NDArray[np.float64]:
    """`allowed`: by the grammar; None: there is none."""
    params, changed = seq.params, row.astype(np.float64)
    for token_id in range(len(row)):
        changed[token_id] += params.logit_bias.get(token_id, 0.0)
        if token_id in seq.prompt_token_ids or token_id in seq.output_token_ids:
            penalty = params.repetition_penalty
            changed[token_id] *= penalty if changed[token_id] < 0 else 1 / penalty
        count = seq.output_token_ids.count(token_id)
        changed[token_id] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        if allowed is not None and token_id not in allowed:
            changed[token_id] = -math.inf
    known = [*seq.prompt_token_ids, *seq.output_token_ids]
    banned = {word[-1] for word in params.bad_words if known[len(known) - len(word) + 1 :] == list(word[:-1])}
    if len(seq.output_token_ids) < params.min_tokens:
        banned |= {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    left = {token_id for token_id in range(len(row)) if changed[token_id] > -math.inf}
    left = left & set(params.allowed_token_ids or left) or left
    left = left - banned or left
    for token_id in set(range(len(row))) - left:
        changed[token_id] = -math.inf
    return changed


def naive_kept(row: npt.NDArray[np.float64], params: SamplingParams) -> set[int]:
    """Ids that survive temperature, top-k, top-p and min-p; no two logits of the row may be equal."""
    order = [int(token_id) for token_id in np.argsort(-row)]
    if params.top_k:
        order = order[: params.top_k]
    weights = {token_id: math.exp((row[token_id] - row.max()) / params.temperature) for token_id in order}
    total, before, kept = sum(weights.values()), 0.0, set()
    for token_id in order:
        if before < params.top_p * total and weights[token_id] >= params.min_p:
            kept.add(token_id)
        before += weights[token_id]
    return kept


def naive_draw(
    row: npt.NDArray[np.float32], seq: Sequence, eos_token_ids: list[int], allowed: Collection[int] | None = None
) -> int:
    params, changed = seq.params, naive_adjusted(row, seq, eos_token_ids, allowed)
    noise = gumbel(params.seed, seq.num_tokens, None, len(row))
    kept = naive_kept(changed, params)
    return max(kept, key=lambda token_id: changed[token_id] / params.temperature + noise[token_id])
