"""A drafter of heads: small layers that read a model's own last hidden state and guess the tokens after the next one.

Head k says what comes k tokens after the token that is sampled from that state (Cai et al., "Medusa: Simple LLM
Inference Acceleration Framework with Multiple Decoding Heads", arXiv:2401.10774): residual blocks `x + SiLU(W x + b)`,
then an output layer. Heads have no KV and read no token, so all their drafts come of one pass over a few rows. The
output layer may know frequent tokens only, since it is most of what a pass reads (Zhao et al., "FR-Spec",
arXiv:2502.14856). They are drawn with the sequence's parameters and the noise of their positions, as those of
`engine.drafting.draft_model`.

A folder of heads has a `config.json` and `*.safetensors` under the names that vLLM reads: see `MedusaHeads`.
`python -m cluster train-heads` makes one. Where the state that a sequence's newest token was sampled from is not here,
as in its first step behind a hand-off, nothing is drafted.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from engine.drafting.drafter import Draft, DrafterName, DraftFiller, DraftingCost
from engine.model.config import DecoderConfig, ModelConfig
from engine.sequence import UNDRAWN, DraftedSequence, ScheduledSequence, Sequence
from kernels.interface import Kernels, Linear

if TYPE_CHECKING:
    from engine.sampling.grammar import GrammarMasks
    from engine.steps.runner import TokenSampler

_MODEL_TYPE: Final = "medusa"
_UNLIKELY: Final = -1e4
"""The logit of a token that the heads' output layer does not know: a number, so that it is drawn if it has to be."""
_RECENT: Final = 16
"""Draws whose median says what the next one takes: now and then a busy machine holds one up."""


def target_config(config: DecoderConfig) -> ModelConfig:
    """The config of a model that heads can be for. Raises ValueError for one whose output layer only its own code
    knows."""
    if not isinstance(config, ModelConfig):
        raise ValueError(
            f"heads draft only for models that Legato's own code computes, and {config.architecture} is computed by"
            " transformers'; leave decode.draft_model out, or name a smaller model"
        )
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsConfig:
    """What a folder of heads says of itself. `num_layers`: residual blocks of each head. `num_tokens`: that the output
    layer knows, of a vocabulary of `vocab_size`. `target`: the fingerprint of the model that they were trained for;
    None: whoever made them did not say."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_tokens: int
    target: str | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Raises ValueError where `config.json` is not that of Medusa heads."""
        raw = _read_json(folder)
        try:
            sizes = {name: int(raw[name]) for name in ("num_heads", "hidden_size", "vocab_size")}
            num_layers, num_tokens = int(raw.get("num_hidden_layers", 1)), raw.get("truncated_vocab_size")
            num_tokens = sizes["vocab_size"] if num_tokens is None else int(num_tokens)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{folder / 'config.json'} is not that of Medusa heads: {error} is missing or odd"
            ) from None
        target = raw.get("target_fingerprint")
        return cls(**sizes, num_layers=num_layers, num_tokens=num_tokens, target=target)

    def write(self, folder: Path) -> None:
        """Write the config as vLLM reads it too, but for the target's fingerprint. Whole or not at all: with it a
        folder can be used."""
        fields = {
            "model_type": _MODEL_TYPE,
            "architectures": ["MedusaModel"],
            "num_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "truncated_vocab_size": self.num_tokens,
            "original_lm_head": True,
            "medusa_fc_bias": True,
            "target_fingerprint": self.target,
        }
        partial = folder / ".config.json.partial"
        partial.write_text(json.dumps(fields, indent=2) + "\n")
        partial.rename(folder / "config.json")


def is_heads(folder: Path) -> bool:
    """Whether a folder says that it holds heads, rather than a model."""
    return (folder / "config.json").is_file() and _read_json(folder).get("model_type") == _MODEL_TYPE


def _read_json(folder: Path) -> dict[str, Any]:
    try:
        raw = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / 'config.json'} cannot be read: {error}") from None
    return raw if isinstance(raw, dict) else {}


def require_heads_fit(folder: Path, heads: HeadsConfig, *, hidden_size: int, vocab_size: int, target: str) -> None:
    """Raises ValueError where heads were made for another model than the one of these sizes and this fingerprint."""
    if (heads.hidden_size, heads.vocab_size) != (hidden_size, vocab_size):
        reason = (
            f"for hidden states of {heads.hidden_size} and {heads.vocab_size} tokens, and the model has {hidden_size}"
            f" and {vocab_size}"
        )
    elif heads.target is not None and heads.target != target:
        reason = "for a model of these sizes that has other weights"
    else:
        return
    raise ValueError(
        f"the heads in {folder} were made {reason}; train some for this model (legato train-heads), or leave"
        " decode.draft_model out"
    )


class MedusaHeads:
    """The heads' weights, laid out for a device.

    Tensors by their names: `blocks.K.layers.N.weight` `[hidden, hidden]`, and `.bias` where there are any; an output
    layer for each, `lm_heads.K.weight`, or one for all, `lm_head.weight` `[tokens, hidden]`, or none, and then
    `target_logits` (`[R, hidden] -> [R, vocabulary]`) is asked; `token_map` `[tokens]`, which tokens these are where
    they are not all. `softcap`: the target's, of logits.
    """

    def __init__(
        self,
        config: HeadsConfig,
        weights: Mapping[str, Tensor],
        kernels: Kernels,
        target_logits: Callable[[Tensor], Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        softcap: float | None = None,
    ) -> None:
        self.config = config
        self._target_logits = target_logits
        self._softcap = softcap
        left = {name.removeprefix("medusa_heads."): weight for name, weight in weights.items()}

        def taken(name: str, *shape: int) -> Tensor:
            weight = left.pop(name, None)
            if weight is None or tuple(weight.shape) != shape:
                found = "missing" if weight is None else f"of shape {list(weight.shape)}"
                raise ValueError(f"heads have a tensor {name} of shape {list(shape)}; here it is {found}")
            return weight.to(device, dtype if weight.is_floating_point() else None)

        size = config.hidden_size

        def block(name: str) -> Linear:
            bias = taken(f"{name}.bias", size) if f"{name}.bias" in left else None
            return kernels.pack_linear(taken(f"{name}.weight", size, size), bias)

        self._blocks = [
            [block(f"blocks.{head}.layers.{layer}") for layer in range(config.num_layers)]
            for head in range(config.num_heads)
        ]
        self._token_map = None
        if config.num_tokens != config.vocab_size:
            self._token_map = taken("token_map", config.num_tokens)
            if int(self._token_map.min()) < 0 or int(self._token_map.max()) >= config.vocab_size:
                raise ValueError("token_map of the heads names tokens that the model does not have")
        output: list[Linear] = []
        if "lm_head.weight" in left:
            output = [kernels.pack_linear(taken("lm_head.weight", config.num_tokens, size), None)]
        elif "lm_heads.0.weight" in left:
            each = (taken(f"lm_heads.{head}.weight", config.num_tokens, size) for head in range(config.num_heads))
            output = [kernels.pack_linear(weight, None) for weight in each]
        elif self._token_map is not None:
            raise ValueError("heads that know some tokens only need an output layer of their own, lm_head.weight")
        self._output = output
        if left:
            raise ValueError(f"heads have no tensor {min(left)}")

    def logits(self, rows: list[Tensor]) -> list[Tensor]:
        """Logits of the first heads, from hidden states `[R, hidden]` each: `[R, vocabulary]` float32."""
        states = [self._state(head, hidden) for head, hidden in enumerate(rows)]
        if len(self._output) > 1:
            return [self._spread(self._output[head](state).float()) for head, state in enumerate(states)]
        together = torch.cat(states)
        found = self._spread(self._output[0](together).float()) if self._output else self._target_logits(together)
        return list(torch.split(found.float(), [len(hidden) for hidden in rows]))

    def _state(self, head: int, hidden: Tensor) -> Tensor:
        for block in self._blocks[head]:
            hidden = hidden + functional.silu(block(hidden))
        return hidden

    def _spread(self, logits: Tensor) -> Tensor:
        """Spread the logits of the heads' own tokens over all tokens of the vocabulary."""
        cap = self._softcap
        if cap is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        if self._token_map is None:
            return logits
        spread = logits.new_full((len(logits), self.config.vocab_size), _UNLIKELY)
        return spread.index_copy_(1, self._token_map, logits)


def load_heads(
    folder: Path,
    config: HeadsConfig,
    kernels: Kernels,
    target_logits: Callable[[Tensor], Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    softcap: float | None,
) -> MedusaHeads:
    """Raises ValueError for a folder whose tensors are not those of `config`."""
    weights: dict[str, Tensor] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            weights |= load_file(path)
        return MedusaHeads(config, weights, kernels, target_logits, dtype=dtype, device=device, softcap=softcap)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"the heads in {folder} cannot be loaded: {error}") from error


@dataclass(frozen=True, slots=True)
class _Kept:
    """Final hidden states `[n, hidden]` of a sequence's tokens from position `start` on, of the last step that sampled
    after them. Those behind a wrong draft are states of what never was."""

    start: int
    hidden: Tensor

    def at(self, position: int) -> Tensor | None:
        index = position - self.start
        return self.hidden[index] if 0 <= index < len(self.hidden) else None


class HeadDrafter:
    """`keep` is called by steps, and `draw` when one begins, by whoever computes them; `propose` between steps.

    `sampler`: one of its own, since it follows sequences' grammars along drafts that may be wrong. `eos_token_ids` are
    the model's.
    """

    name: DrafterName = "heads"

    def __init__(self, heads: MedusaHeads, sampler: TokenSampler, eos_token_ids: Iterable[int]) -> None:
        self._heads = heads
        self._sampler = sampler
        self._eos_token_ids = frozenset(eos_token_ids)
        self._kept: WeakKeyDictionary[Sequence, _Kept] = WeakKeyDictionary()
        self._once_s: deque[float] = deque(maxlen=_RECENT)
        self._each_s: deque[float] = deque(maxlen=_RECENT)
        self.draw = DraftFiller("drawing from heads", self._draw)

    @property
    def masks(self) -> GrammarMasks | None:
        """By which drafts are drawn where a sequence follows a grammar."""
        return self._sampler.masks

    def keep(self, items: list[ScheduledSequence], hidden: Tensor) -> None:
        """`hidden [R, hidden]`: of the rows of `items` that a step samples from, good for as long as that step. Each
        sequence has its own copy: one that computes no more for long would hold a whole step's."""
        counts = [1 + len(item.drafts) for item in items]
        copies = [hidden.new_empty(count, hidden.shape[1]) for count in counts]
        torch.split_with_sizes_copy(hidden, counts, out=copies)
        for item, copy in zip(items, copies, strict=True):
            self._kept[item.seq] = _Kept(item.start + item.num_tokens - 1, copy)

    def propose(self, seq: Sequence, most: int) -> Draft | None:
        """Drafts to be drawn by the step, and what that will take."""
        if most < 1 or not self.draw.may_plan(seq) or self._state(seq) is None:
            return None
        costs = DraftingCost(0.0, 0.0)  # the first draw shows it
        if self._once_s:
            costs = DraftingCost(0.0, statistics.median(self._each_s), once_s=statistics.median(self._once_s))
        return Draft((UNDRAWN,) * min(most, self._heads.config.num_heads), self.name, 0, costs)

    def ended(self, seq: Sequence) -> None:
        pass  # what is kept of it goes with it

    def _state(self, seq: Sequence) -> Tensor | None:
        """The hidden state that a sequence's newest token was sampled from. The token's position says which of the rows
        of the last step it is, whatever became of that step."""
        kept = self._kept.get(seq)
        return None if kept is None else kept.at(seq.num_tokens - 2)

    @torch.inference_mode()
    def _draw(self, wanted: dict[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        began = time.perf_counter()
        states = {seq: state for seq in wanted if (state := self._state(seq)) is not None}
        if not states:
            return {}
        num_heads = max(wanted[seq] for seq in states)
        whose = [[seq for seq in states if wanted[seq] > head] for head in range(num_heads)]
        logits = self._heads.logits([torch.stack([states[seq] for seq in seqs]) for seqs in whose])
        passed = time.perf_counter()
        drafts: dict[Sequence, tuple[int, ...]] = dict.fromkeys(states, ())
        for seqs, rows in zip(whose, logits, strict=True):
            sampled = self._sampler.begin(rows, [DraftedSequence(seq, drafts[seq]) for seq in seqs]).finish()
            for seq, token in zip(seqs, sampled, strict=True):
                assert token is not None, "rows without drafts are all sampled"
                drafts[seq] += (token.token_id,)
        self._once_s.append(passed - began)
        self._each_s.append((time.perf_counter() - passed) / sum(map(len, whose)))
        return {seq: self._before_end(seq, token_ids) for seq, token_ids in drafts.items()}

    def _before_end(self, seq: Sequence, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Drop a token that would end the sequence, which the row before it samples, and what is drawn after that."""
        ends = set(seq.params.stop_token_ids) | (frozenset() if seq.params.ignore_eos else self._eos_token_ids)
        count = next((index for index, token_id in enumerate(token_ids) if token_id in ends), len(token_ids))
        return token_ids[:count]
