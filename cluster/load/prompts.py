"""Prompts for the requests of a trace: as long as it says, and alike where it says so."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, TypeVar

from cluster.simulation.workload.traces import TraceRequest

T = TypeVar("T")

# Each word is one token to nearly every tokenizer, with a blank before it and, at a prompt's beginning, without.
_COMMON: Final = """
the of and to in is that it was for on are as with his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would
other into has more her two like him see time could no make than first been its who now people my made over did down
only way find use may water long little very after words called just where most know get through back much before go
good new write our used me man too any day same right look think also around another came come work three word must
because does part even place well such here take why things help put years different away again off went old number
great tell men say small every found still between name should home big give air line set own under read last never us
left end along while might next sound below something thought both few those always show large often together house
world going want school important until form food keep children feet land side without boy once animals life enough
sometimes four head above kind almost live page got earth need far hand high year
"""
WORDS: Final = tuple(_COMMON.split())


def prompt_of(request: TraceRequest, vocabulary: Sequence[T], salt: str = "") -> list[T]:
    """Draw as many items of the vocabulary, a range or a tuple, as the request's prompt has tokens. Equal names of
    content become equal items; tokens that no name stands for are the request's own. Another salt makes other prompts,
    which no cache knows."""
    drawn = [item for name in request.content for item in _run(name, request.content_tokens, vocabulary, salt)]
    own = random.Random(salt + request.request_id).choices(vocabulary, k=max(0, request.prompt_tokens - len(drawn)))
    return (drawn + own)[: request.prompt_tokens]


def text_of(request: TraceRequest, salt: str = "") -> str:
    """Draw the request's prompt as words of English, a token each; see `prompt_of`."""
    return " ".join(prompt_of(request, WORDS, salt))


@lru_cache(maxsize=100_000)
def _run(name: int, num_tokens: int, vocabulary: Sequence[T], salt: str) -> tuple[T, ...]:
    return tuple(random.Random(f"{salt}{name}" if salt else name).choices(vocabulary, k=num_tokens))
