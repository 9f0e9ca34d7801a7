"""Small random models as folders that the engine loads, and what they generate, here and by Hugging Face."""

from __future__ import annotations

import functools
import json
import random
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher
from safetensors.torch import load_file, save_file
from transformers import LogitsProcessor, LogitsProcessorList

from decode_workers.local_engine import LocalEngine
from engine.checkpoint.weights import load_output_layer
from engine.drafting.head_training import HeadTraining, frequent_tokens
from engine.drafting.heads import HeadsConfig, target_config
from engine.sampling.grammar import grammar_tokenizer
from engine.sampling.params import SamplingParams
from engine.sequence import Pooling, Sequence, TokenLogprobs
from engine.steps.loading import DtypeName, EngineConfig, load_model, load_runner, model_fingerprint
from engine.steps.runner import ModelRunner
from engine.text.tokenizer import tokenizer_json
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.decoders import build_decoder, logits_behind
from tests.support.model_families import FAMILIES, VOCAB_SIZE, build_oracle

EOS = 2  # of all families


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
    """A random model of one family, its config changed, in `folder`; `dtype` is what the local engine computes in.

    Of those without a native model, a family is what transformers calls `model_type`.
    """

    def __init__(self, family: str, folder: Path, *, dtype: DtypeName = "float32", **changes: Any) -> None:
        self.folder = folder
        self.dtype = dtype
        self._oracle = (build_oracle if family in FAMILIES else build_decoder)(family, folder, **changes)
        # Many ask for the same prompts.
        self._generated: dict[tuple[tuple[int, ...], int, str | None], list[int]] = {}
        self._local: dict[tuple[tuple[int, ...], str], Generated] = {}
        write_byte_tokenizer(folder)

    def local(self, prompt: list[int], params: SamplingParams) -> Generated:
        """What the local engine generates for this request alone."""
        key = tuple(prompt), repr(params)
        if key not in self._local:
            seq = Sequence(request_id="r", attempt=0, params=params, prompt_token_ids=prompt)
            emissions = list(self._engine.run([seq]))
            self._local[key] = Generated([e.token.token_id for e in emissions], emissions[0].prompt_logprobs)
        return replace(self._local[key], tokens=list(self._local[key].tokens))

    def hugging_face(
        self, prompt: list[int], num_tokens: int, grammar: str | None = None, guess: Iterable[int] = ()
    ) -> list[int]:
        """Greedy tokens; with a grammar up to the end of sequence, if that comes. A right `guess` is found to be so by
        one pass over all of it, in an eighth of the time that it takes to generate them."""
        key = tuple(prompt), num_tokens, grammar
        if key not in self._generated:
            tokens = tuple(guess)
            is_right = bool(tokens) and self._is_greedy(tokens, *key)
            self._generated[key] = list(tokens) if is_right else self._generate(*key)
        return list(self._generated[key])

    def _is_greedy(
        self, tokens: tuple[int, ...], prompt: tuple[int, ...], num_tokens: int, grammar: str | None
    ) -> bool:
        """Whether these, whole, are what would be generated."""
        if len(tokens) != num_tokens and (grammar is None or tokens[-1] != EOS):
            return False
        logits = logits_behind(self._oracle, prompt, tokens)
        if grammar is None:
            return logits.argmax(-1).tolist() == list(tokens)
        mask = self._mask(prompt, grammar)
        behind = torch.tensor([[*prompt, *tokens]])
        return EOS not in tokens[:-1] and all(
            int(mask(behind[:, : len(prompt) + n], logits[n : n + 1]).argmax()) == token
            for n, token in enumerate(tokens)
        )

    def _generate(self, prompt: tuple[int, ...], num_tokens: int, grammar: str | None) -> list[int]:
        with torch.inference_mode():
            output = self._oracle.generate(
                torch.tensor([prompt]),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None if grammar is None else EOS,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([] if grammar is None else [self._mask(prompt, grammar)]),
            )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    def _mask(self, prompt: tuple[int, ...], grammar: str) -> MaskProcessor:
        return MaskProcessor(self.folder, VOCAB_SIZE, EOS, len(prompt), grammar)

    def embedding(self, prompt: list[int], pooling: Pooling) -> npt.NDArray[np.float32]:
        """Of the last hidden states of Hugging Face's model without its head, normalised."""
        with torch.inference_mode():
            states = self._oracle.model(torch.tensor([prompt])).last_hidden_state[0].double()
        vector = states[-1] if pooling == "last" else states.mean(0)
        array: npt.NDArray[np.float32] = (vector / vector.norm()).float().numpy()
        return array

    @functools.cached_property
    def _engine(self) -> LocalEngine:
        config = EngineConfig(
            model_ref=str(self.folder), model_name="small", dtype=self.dtype, kv_blocks=64, num_threads=1
        )
        return LocalEngine(load_model(config))


def shallower(model: SmallModel, folder: Path, num_layers: int = 3) -> Path:
    """A checkpoint of the model's first layers alone, which often says the same: for drafts."""
    shutil.copytree(model.folder, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    weights = load_file(folder / "model.safetensors")
    dropped = tuple(f"model.layers.{layer}." for layer in range(num_layers, config["num_hidden_layers"]))
    kept = {name: weight for name, weight in weights.items() if not name.startswith(dropped)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def memorised(
    model: SmallModel, texts: list[list[int]], folder: Path, *, num_tokens: int = VOCAB_SIZE, num_steps: int = 150
) -> HeadTraining:
    """Three heads for the model that know these few texts by heart, also in `folder`; of `num_tokens` frequent tokens.

    Random models say what is hard to learn, so each head has several blocks. Learnt in float32, whatever the model is
    used in: where a CPU has no bfloat16, torch takes three times as long in it.
    """
    engine = EngineConfig(model_ref=str(model.folder), model_name="small", dtype="float32", block_size=4, kv_blocks=400)
    loaded = load_model(engine)
    config = loaded.runner.config
    heads = HeadsConfig(
        num_heads=3,
        num_layers=8,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_tokens=num_tokens,
        target=model_fingerprint(model.folder, None),
    )
    kept = frequent_tokens(texts, config.vocab_size, num_tokens)
    layer = load_output_layer(model.folder, target_config(config), loaded.layout.dtype)[kept]
    training = HeadTraining(loaded, heads, layer, kept, learning_rate=0.01)
    for number in range(num_steps):
        training.step(texts, number / num_steps)
    training.save(folder)
    return training


class MaskProcessor(LogitsProcessor):  # type: ignore[misc]
    """Of one prompt: the masks of a grammar, each worked out from the beginning."""

    def __init__(self, folder: Path, vocab_size: int, eos: int, num_prompt_tokens: int, grammar: str) -> None:
        self._begun = LLMatcher(grammar_tokenizer(tokenizer_json(folder), vocab_size, (eos,)), grammar)
        self._num_prompt_tokens = num_prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        matcher = self._begun.deep_copy()
        assert matcher.consume_tokens(input_ids[0, self._num_prompt_tokens :].tolist())
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        return scores.masked_fill(torch.from_numpy(allowed[: scores.shape[1]]) == 0, -torch.inf)
