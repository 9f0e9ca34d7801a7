"""A `Generator` without a model: what it says is fixed by the request, and what happens to it is recorded.

Where a request has a grammar, and no reply is scripted, it draws any token that the grammar allows.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from cluster.errors import GenerationError
from cluster.gateway.generator import AnswerGateway, ConnectionState, ServingLimits, Tokens
from cluster.gateway.timeline import SequenceTimeline
from cluster.slo.classes import RequestTerms
from engine.sampling.grammar import allowed_by, grammar_tokenizer
from engine.text.tokenizer import Tokenizer
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import RequestSpec, TokenEvent
from kv_transfer.messages.scheduling import Placement
from kv_transfer.messages.workers import KnownWorker, LoadingReport
from tests.support.waiting import eventually, wait_until

_WORDS: Final = (
    "the",
    "sea",
    "was",
    "calm;",
    "night",
    "fell,",
    "and",
    "she",
    "said:",
    "«été»",
    "世界",
    "🦜",
    "12",
    "miles.\n",
)
MAX_MODEL_LEN: Final = 2_048
EMBEDDING_SIZE: Final = 8


@dataclass(slots=True, kw_only=True)
class Script:
    """How the generator behaves; tests change it. A request follows to its end the one that it began with."""

    reply: str | tuple[str, ...] | None = (
        None  # a tuple: one for each choice; None: words drawn by the request's seed (greedy: by its prompt)
    )
    delay_s: float = 0.0  # before each token
    waited_s: float = 0.0  # in the worker, before the first step, as it says
    handoff_s: float | None = None  # exposed, as it says before the second token
    tail_s: float = 0.0  # from the last token to the end of the iteration
    burst: int = 1  # tokens that come without a pause between them
    drafted: dict[int, tuple[str, int, int]] = field(default_factory=dict)  # by token, as the worker says
    until: Callable[[], object] = lambda: True  # what has to hold before each burst but the first
    hang_after: int | None = None  # tokens, then nothing until the stream is closed
    fail_after: int | None = None  # tokens, then `error`, or a silent end
    error: Exception | None = None
    role_error: Exception | None = None  # to any change of a worker's role
    workers: list[KnownWorker] = field(default_factory=list)
    connection_states: dict[str, ConnectionState] = field(default_factory=dict)  # of those that are not up
    loading: list[LoadingReport] = field(default_factory=list)
    decisions: list[str] | None = None  # newest first
    limits: ServingLimits | None = field(default_factory=lambda: ServingLimits(max_model_len=MAX_MODEL_LEN, ready=True))


class ScriptedGenerator:
    """Implements `cluster.gateway.generator`'s `Generator` and `ClusterView`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._eos = min(tokenizer.eos_token_ids)
        self.script = Script()
        self.requests: list[RequestSpec] = []
        self.terms: list[RequestTerms] = []  # of the same requests
        self.role_changes: list[tuple[str, Role, float]] = []
        self.num_open = 0
        self.num_cancelled = 0
        self.num_finished = 0

    @contextmanager
    def following(self, script: Script) -> Iterator[ScriptedGenerator]:
        """It follows the script inside the block, at whose beginning it knows no requests, and at whose end none is
        open."""
        self.script = script
        self.requests.clear()
        self.terms.clear()
        yield self
        self.script = Script()
        wait_until(lambda: self.num_open == 0)

    def prompts(self) -> list[str]:
        """Those of the requests, as text."""
        return [self._tokenizer.decode(asked.prompt_token_ids, skip_special_tokens=False) for asked in self.requests]

    def limits(self, model: str = "") -> ServingLimits | None:
        return self.script.limits

    @property
    def gateway(self) -> str:
        return "gateway-1"

    def answer_gateways(self, about: str, answer: AnswerGateway) -> None:
        pass

    async def ask_gateways(
        self, about: str, question: bytes, *, one_is_enough: bool = False
    ) -> dict[str, bytes | None]:
        return {}

    async def decisions(self, limit: int, *, as_text: bool) -> list[str]:
        if self.script.decisions is not None:
            return self.script.decisions[:limit]
        return [f"table {n}" if as_text else f'{{"request_id": "r{n}"}}' for n in range(limit)]

    def describe_workers(self) -> list[dict[str, object]]:
        return [{"worker_id": "scripted", "role": "decode"}]

    def reports(self) -> list[KnownWorker]:
        return self.script.workers

    def connection_states(self) -> dict[str, ConnectionState]:
        names = [info.worker_id for info, _ in self.script.workers]
        return {name: self.script.connection_states.get(name, "up") for name in names}

    @property
    def pools(self) -> dict[str, dict[Role, int]]:
        return {"": {"decode": 3}}

    @property
    def loading(self) -> list[LoadingReport]:
        return self.script.loading

    async def change_role(self, worker_id: str, role: Role, drain_s: float, model: str = "") -> None:
        if self.script.role_error is not None:
            raise self.script.role_error
        self.role_changes.append((worker_id, role, drain_s))

    async def generate(
        self, request: RequestSpec, timeline: SequenceTimeline | None = None
    ) -> AsyncGenerator[Tokens, None]:
        script = self.script
        timeline = timeline or SequenceTimeline()
        self.requests.append(request)
        self.terms.append(timeline.terms)
        timeline.placed(self._placement(request))
        timeline.started()
        timeline.waited(script.waited_s)
        self.num_open += 1
        finished = False
        try:
            tokens: Tokens = []
            for index, token_id in enumerate(self._token_ids(request, script)):
                fails, hangs = script.fail_after == index, script.hang_after == index
                if tokens and (fails or hangs or index % script.burst == 0):
                    yield tokens
                    tokens = []
                if hangs:
                    await asyncio.get_running_loop().create_future()
                if fails:
                    if script.error is None:
                        return
                    raise script.error
                if index % script.burst == 0:
                    if index:
                        await eventually(script.until)
                    await asyncio.sleep(script.delay_s)
                event = self._event(request, script, index, token_id)
                tokens.append(event)
                if index == 1 and script.handoff_s is not None:
                    timeline.handed_off(request.attempt, script.handoff_s)
                if event.drafted is not None:
                    timeline.drafted(*event.drafted)
                timeline.token(time.monotonic())
                if event.finish_reason is not None:
                    yield tokens
                    await asyncio.sleep(script.tail_s)
                    finished = True
                    return
        except GenerationError:
            finished = True
            timeline.ended("failed")
            raise
        finally:
            timeline.ended("finished" if finished else "cancelled")
            self.num_finished += finished
            self.num_cancelled += not finished
            self.num_open -= 1  # the last of all: whoever waits for it, in another thread, looks at the others then

    def _placement(self, request: RequestSpec) -> Placement:
        return Placement(
            request_id=request.request_id, attempt=request.attempt, prefill="p0", decode="d0", ttft_s=0.001
        )

    def _token_ids(self, request: RequestSpec, script: Script) -> Iterable[int]:
        params = request.params
        if params.grammar is not None and script.reply is None:
            return self._allowed(request)
        if request.pooling is not None:
            return [0]
        forced = [token_id for token_id, bias in params.logit_bias.items() if bias >= 100]
        if forced:
            return forced[:1] * params.max_tokens
        ids = [*_encoded(self._tokenizer, _text(request, script))]
        if params.ignore_eos or params.min_tokens > len(ids):
            ids *= 1 + params.max_tokens // len(ids)
        else:
            ids.append(self._eos)
        return ids

    def _allowed(self, request: RequestSpec) -> Iterator[int]:
        tokenizer = self._tokenizer
        draw = random.Random(sum(request.prompt_token_ids) if request.params.is_greedy else request.params.seed)
        llg = grammar_tokenizer(tokenizer.json, tokenizer.vocab_size, tuple(tokenizer.eos_token_ids))
        matcher = LLMatcher(llg, request.params.grammar or "")
        while True:
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
            token_id = int(draw.choice(np.flatnonzero(allowed_by(bits, tokenizer.vocab_size))))
            yield token_id
            assert matcher.consume_token(token_id), matcher.get_error()

    def _event(self, request: RequestSpec, script: Script, index: int, token_id: int) -> TokenEvent:
        if request.pooling is not None:
            return TokenEvent(
                request_id=request.request_id,
                attempt=request.attempt,
                index=0,
                token_id=0,
                finish_reason="stop",
                num_cached_tokens=0,
                embedding=scripted_embedding(request.prompt_token_ids).tobytes(),
            )
        params = request.params
        ends = token_id == self._eos and not params.ignore_eos
        ends = (ends or token_id in params.stop_token_ids) and index + 1 >= params.min_tokens
        ends = ends or (params.grammar is not None and token_id == self._eos)
        is_last = index + 1 == params.max_tokens
        logprobs = self._logprobs(token_id, params.logprobs)
        asked = params.prompt_logprobs if index == 0 else None
        return TokenEvent(
            request_id=request.request_id,
            attempt=request.attempt,
            index=index,
            token_id=token_id,
            finish_reason="stop" if ends else "length" if is_last else None,
            logprob=None if logprobs is None else logprobs[0],
            top_logprobs=None if logprobs is None else logprobs[1],
            num_cached_tokens=len(request.prompt_token_ids) // 2 if index == 0 else None,
            drafted=script.drafted.get(index),
            prompt_logprobs=None
            if asked is None
            else [_opinion(token_id, asked) for token_id in request.prompt_token_ids[1:]],
        )

    def _logprobs(self, token_id: int, num_top: int | None) -> tuple[float, list[tuple[int, float]]] | None:
        return None if num_top is None else _opinion(token_id, num_top)


def _text(request: RequestSpec, script: Script) -> str:
    if isinstance(script.reply, tuple):
        return script.reply[int(request.request_id.rpartition("-")[2])]
    if script.reply is not None:
        return script.reply
    seed = sum(request.prompt_token_ids) if request.params.is_greedy else request.params.seed
    words = random.Random(seed).choices(_WORDS, k=30)
    return " ".join(["So", *words])  # the first token is a word: a part of a character would show nothing


def scripted_embedding(token_ids: list[int]) -> npt.NDArray[np.float32]:
    """Of length 1, and different for every prompt."""
    vector = np.random.default_rng(token_ids).standard_normal(EMBEDDING_SIZE)
    scaled: npt.NDArray[np.float32] = (vector / np.linalg.norm(vector)).astype("<f4")
    return scaled


@lru_cache(maxsize=100)  # so that a fixed reply is as quick as one that comes from a worker
def _encoded(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@lru_cache(maxsize=100_000)  # as quick as one that comes ready from a worker
def _opinion(token_id: int, num_top: int) -> tuple[float, list[tuple[int, float]]]:
    """The token itself is likeliest; its successors in the vocabulary follow."""
    return -0.5, [((token_id + rank) % 40_000, -0.5 - rank) for rank in range(num_top)]
