"""Answers that a grammar allows, drawn without a model, and whether it allows one."""

from __future__ import annotations

import json
import random

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from engine.sampling.grammar import LIMITS, allowed_by


def drawn_answer(grammar: str, llg: LLTokenizer, draw: random.Random, max_tokens: int) -> str | None:
    """Tokens drawn as from random logits, one as likely as another; None if the grammar does not end in time."""
    matcher = LLMatcher(llg, grammar, log_level=0, limits=LIMITS)
    tokens: list[int] = []
    bits = np.zeros(-(-llg.vocab_size // 32), dtype=np.int32)
    while len(tokens) < max_tokens:
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        assert not matcher.is_error(), matcher.get_error()
        ids = np.flatnonzero(allowed_by(bits, llg.vocab_size))
        token = int(ids[draw.randrange(len(ids))])
        if token in llg.eos_tokens:
            return llg.decode_str(tokens)
        matcher.consume_token(token)
        tokens.append(token)
    return None


def takes(grammar: str, llg: LLTokenizer, instance: object) -> bool:
    """Whether the instance, as compact JSON, may be an answer."""
    matcher = LLMatcher(llg, grammar, log_level=0, limits=LIMITS)
    tokens = llg.tokenize_str(json.dumps(instance, separators=(",", ":"), ensure_ascii=False))
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())
