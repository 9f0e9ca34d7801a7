"""Small random models as folders that the engine loads, and what they generate, here and by Hugging Face."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decode_workers.local_engine import LocalEngine
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence, TokenLogprobs
from engine.steps.loading import DtypeName, EngineConfig, load_model, load_runner
from engine.steps.runner import ModelRunner
from tests.support.model_families import VOCAB_SIZE, build_oracle


def greedy(max_tokens: int = 24, **wishes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "seed": 0, "temperature": 0.0, "ignore_eos": True} | wishes)


def random_prompts(lengths: Iterable[int], seed: int = 0) -> list[list[int]]:
    chooser = random.Random(seed)
    return [[chooser.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def runner_of(folder: Path, **options: Any) -> ModelRunner:
    """Of a folder that need not have a tokenizer; `options` are those of `EngineConfig`."""
    defaults = {"model_ref": str(folder), "model_name": "small", "dtype": "float32", "block_size": 4}
    return load_runner(folder, EngineConfig(**(defaults | options)))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Generated:
    tokens: list[int]
    prompt_logprobs: list[TokenLogprobs] | None


class SmallModel:
    """A random model of one family, its config changed, in `folder`; `dtype` is what the local engine computes in."""

    def __init__(self, family: str, folder: Path, *, dtype: DtypeName = "float32", **changes: Any) -> None:
        self.folder = folder
        self.dtype = dtype
        self._oracle = build_oracle(family, folder, **changes)
        (folder / "tokenizer.json").write_text("{}")  # a checkpoint must have one; nothing here is text

    def local(self, prompt: list[int], params: SamplingParams) -> Generated:
        """What the local engine generates for this request alone."""
        seq = Sequence(request_id="r", attempt=0, params=params, prompt_token_ids=prompt)
        emissions = list(self._engine.run([seq]))
        return Generated([e.token.token_id for e in emissions], emissions[0].prompt_logprobs)

    def hugging_face(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Greedy tokens."""
        with torch.inference_mode():
            output = self._oracle.generate(
                torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    @functools.cached_property
    def _engine(self) -> LocalEngine:
        config = EngineConfig(
            model_ref=str(self.folder), model_name="small", dtype=self.dtype, kv_blocks=64, num_threads=1
        )
        return LocalEngine(load_model(config))
