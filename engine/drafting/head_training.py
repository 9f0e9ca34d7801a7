"""Trains heads for a model that stays as it is: `python -m cluster train-heads` drives it, over texts.

Head k learns what the model itself says k tokens after the next one, of every token of a text: its distribution there,
not only the token that the text has (as Hydra++ does: Ankner et al., arXiv:2402.05109). The model's passes are those of
its own runner, so its hidden states are the ones that heads will read. The heads' output layer is the model's, of
the tokens that are most frequent in the texts, and is not trained; a residual block begins as the identity, as in the
paper on Medusa (see `engine.drafting.heads`), whose learning rate and weights of the heads these are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from engine.drafting.heads import HeadsConfig, target_config
from engine.model.batch import build_batch
from engine.sampling.params import SamplingParams
from engine.sequence import BlockTable, ScheduledSequence, Sequence, StepPlan
from engine.steps.loading import LoadedModel

LEARNING_RATE: Final = 1e-3
_DECAY: Final = 0.8
"""Of the heads' weights in the loss, from one to the next."""
_WARM_UP: Final = 0.05
"""Of a training, the part in which the learning rate grows."""
_READ: Final = SamplingParams(max_tokens=1, temperature=0.0, seed=0)

Tokens = list[int]


@dataclass(frozen=True, slots=True)
class HeadScores:
    """How good heads are on some texts. `divergence`: of each head from what the model says, in nats, in the mean.
    `agreement`: how often both find the same token likeliest."""

    divergence: list[float]
    agreement: list[float]

    @property
    def loss(self) -> float:
        """What is trained for."""
        weights = [_DECAY**head for head in range(len(self.divergence))]
        return sum(map(float.__mul__, weights, self.divergence)) / sum(weights)


class _Head(nn.Module):
    """A head in float32, whatever the model computes in."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(config.num_layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + functional.silu(layer(hidden))
        return hidden


def frequent_tokens(texts: Iterable[Tokens], vocab_size: int, most: int) -> Tensor:
    """`[most]` int64, sorted: those that the texts have most often, and where these are fewer, the first others."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for text in texts:
        counts += np.bincount(text, minlength=vocab_size)
    kept = np.argsort(-counts, kind="stable")[:most]
    return torch.from_numpy(np.sort(kept))


class HeadTraining:
    """Trains heads that begin as the identity, or as `begun`, the tensors of a folder. `output_layer [num_tokens,
    hidden]` are the model's rows of `token_map [num_tokens]`; both None: of all tokens.

    Nothing else may run on the model meanwhile.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: HeadsConfig,
        output_layer: Tensor,
        token_map: Tensor,
        begun: Mapping[str, Tensor] | None = None,
        *,
        learning_rate: float = LEARNING_RATE,
    ) -> None:
        self._learning_rate = learning_rate
        self.config = config
        self._model = model
        self._token_map = token_map
        self._output_layer = output_layer
        self._output = output_layer.to(model.kv_cache.device)
        self._softcap = target_config(model.runner.config).logit_softcap
        self._heads = nn.ModuleDict({"blocks": nn.ModuleList(_Head(config) for _ in range(config.num_heads))})
        if begun is not None:
            self._heads.load_state_dict({name: begun[name] for name in self._heads.state_dict()})
        self._heads.to(model.kv_cache.device)
        self._optimiser = torch.optim.AdamW(self._heads.parameters(), lr=learning_rate, weight_decay=0.0)

    def step(self, texts: list[Tokens], done: float) -> HeadScores:
        """Learn from texts once, each of more tokens than there are heads; `done`: the part of the training that is
        over, 0 to 1. Returns what the heads were like before."""
        factor = min(done / _WARM_UP, 1.0) * (0.5 + 0.5 * float(np.cos(np.pi * done))) if done < 1.0 else 0.0
        for group in self._optimiser.param_groups:
            group["lr"] = self._learning_rate * max(factor, 0.01)
        self._optimiser.zero_grad()
        scores = self._scores(texts, learn=True)
        self._optimiser.step()
        return scores

    @torch.no_grad()
    def scores(self, texts: list[Tokens]) -> HeadScores:
        """The mean over texts, which are read one by one."""
        each = [self._scores([text], learn=False) for text in texts]
        return HeadScores(
            divergence=[fmean(of_head) for of_head in zip(*(scores.divergence for scores in each), strict=True)],
            agreement=[fmean(of_head) for of_head in zip(*(scores.agreement for scores in each), strict=True)],
        )

    def _scores(self, texts: list[Tokens], *, learn: bool) -> HeadScores:
        hidden = [states.to(torch.float32, copy=True) for states in self._hidden(sorted(texts, key=len))]
        with torch.no_grad():
            said = [functional.log_softmax(self._logits(states), dim=-1) for states in hidden]
        blocks = self._heads["blocks"]
        assert isinstance(blocks, nn.ModuleList)
        divergence, agreement = [], []
        num_heads = self.config.num_heads
        total = sum(_DECAY**head for head in range(num_heads))
        for head in range(num_heads):
            ahead = head + 1
            read = torch.cat([states[:-ahead] for states in hidden])
            wanted = torch.cat([logprobs[ahead:] for logprobs in said])
            found = functional.log_softmax(self._logits(blocks[head](read)), dim=-1)
            loss = functional.kl_div(found, wanted, reduction="batchmean", log_target=True)
            if learn:  # one head after the other: their logits are most of the memory
                torch.autograd.backward(loss * (_DECAY**head / total))
            divergence.append(loss.item())
            agreement.append((found.argmax(-1) == wanted.argmax(-1)).float().mean().item())
        return HeadScores(divergence, agreement)

    def _logits(self, states: Tensor) -> Tensor:
        logits = functional.linear(states.to(self._output.dtype), self._output).float()
        cap = self._softcap
        return logits if cap is None else (logits / cap).tanh() * cap

    @torch.inference_mode()
    def _hidden(self, texts: list[Tokens]) -> list[Tensor]:
        """Final hidden states `[n, hidden]` of each of the texts, which come by their length."""
        runner, pool, layout = self._model.runner, self._model.block_pool, self._model.layout
        columns = [-(-len(text) // layout.block_size) for text in texts]
        lease = pool.lease(sum(columns) * layout.num_layer_groups)
        blocks = np.array(lease.blocks, dtype=np.int32).reshape(layout.num_layer_groups, -1)
        parts = np.split(blocks, np.cumsum(columns)[:-1], axis=1)
        try:
            seqs = [
                Sequence(
                    request_id="training",
                    attempt=0,
                    params=_READ,
                    prompt_token_ids=text,
                    lease=lease,
                    block_table=BlockTable.of(part),
                )
                for text, part in zip(texts, parts, strict=True)
            ]
            plan = StepPlan(tuple(ScheduledSequence(seq, len(seq.prompt_token_ids)) for seq in seqs))
            batch = build_batch(plan, runner.kv_cache)
            every_row = torch.arange(batch.num_tokens, device=batch.token_ids.device)
            batch = replace(batch, output_rows=every_row, num_sampled_rows=batch.num_tokens)
            hidden = runner.model.forward(batch, runner.kv_cache)
        finally:
            pool.release(lease)
        return list(torch.split(hidden, [len(text) for text in texts]))

    def save(self, folder: Path) -> None:
        """Write the heads as `engine.drafting.heads` loads them, with their config, which is written last."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: weight.detach().cpu().contiguous() for name, weight in self._heads.state_dict().items()}
        tensors["lm_head.weight"] = self._output_layer.contiguous()
        if self.config.num_tokens != self.config.vocab_size:
            tensors["token_map"] = self._token_map
        partial = folder / ".model.safetensors.partial"
        save_file(tensors, partial, {"format": "pt"})
        partial.rename(folder / "model.safetensors")
        self.config.write(folder)
