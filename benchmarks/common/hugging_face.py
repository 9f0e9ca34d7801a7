"""The peer: Hugging Face `generate` on the same weights, in this process, on a batch of all requests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.workload import Load, Wave, draw_prompts
from cluster.load.timing import RequestTiming


class _FirstToken:
    """A streamer that only notes when `generate` brought its first token."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self._num_puts = 0

    def put(self, value: object) -> None:
        self._num_puts += 1  # the first brings the prompt
        if self._num_puts == 2:
            self.at_s = time.perf_counter()

    def end(self) -> None:
        pass


class HuggingFace:
    """One model in its own default settings: its fused attention, its dynamic cache, greedy, no early end."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._model.eval()
        self._model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], num_tokens: int, **options: object) -> Any:
        """Prompts are padded on the left to the longest."""
        longest = max(map(len, prompts))
        return self._model.generate(
            input_ids=torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]),
            attention_mask=torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            **options,
        )

    @torch.inference_mode()
    def prefill_s(self, prompt: list[int]) -> float:
        """Seconds until the prompt's next token is known; the output layer runs for that one only."""
        input_ids = torch.tensor([prompt])
        started = time.perf_counter()
        logits = self._model(input_ids=input_ids, use_cache=True, logits_to_keep=1).logits
        int(logits[0, -1].argmax())
        return time.perf_counter() - started

    def wave(self, load: Load) -> Wave:
        """Answer all requests by one `generate`. When single tokens of a larger batch came, nobody could see."""
        prompts = draw_prompts(load.num_requests, load.prompt_tokens)
        first = _FirstToken()
        options = {"streamer": first} if load.num_requests == 1 else {}
        started = time.perf_counter()
        self.generate(prompts, load.output_tokens, **options)
        ended = time.perf_counter()
        timing = RequestTiming(sent_s=started, first_s=first.at_s or ended, last_s=ended, num_tokens=load.output_tokens)
        return Wave((timing,) * load.num_requests)
