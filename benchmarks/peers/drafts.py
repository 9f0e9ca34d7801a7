"""What drafts without a second model bring one stream, and what they change: each question is asked of a peer that
makes some, and of the same peer without, one right after the other, at temperature 0.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.common.cluster_process import cluster_document, running_cluster
from benchmarks.common.part import Json, commit
from benchmarks.common.workload import MODEL
from benchmarks.peers.company import chat_prompt
from benchmarks.peers.engines.http_asker import HttpAsker
from benchmarks.peers.engines.installation import model_folder
from benchmarks.peers.engines.legato import COLOCATED, PLAIN_STEPS
from benchmarks.peers.peer import Answer, Asker, Draw, Peer, Request
from benchmarks.texts import CODE, QUESTIONS, TEXT

NUM_ANSWERS, ANSWER_TOKENS = 10, 64
PLAIN = "without-drafts"  # the served name of the model that makes none
_OF_A_MODEL = ("model", "kv", "prefill", "decode")


def work_of(kind: str) -> str:
    """The name of this kind of work in the report."""
    return f"{kind}, with drafts and without"


@dataclass(frozen=True, slots=True)
class Both:
    """A peer that makes drafts and the same one without, both started. A request says which of them answers it."""

    drafting: Asker
    plain: Asker

    def wave(self, requests: Sequence[Request]) -> list[Answer]:
        """What says nothing of drafts goes to both, one after the other."""
        wanted = requests[0].drafts
        answers = [] if wanted else self.plain.wave(requests)
        return answers if wanted is False else self.drafting.wave(requests)

    def steady(self, streams: Sequence[Request], prompts: Sequence[Request]) -> tuple[list[Answer], list[Answer]]:
        return self.drafting.steady(streams, prompts)


def with_drafts(name: str, drafting: Peer, plain: Peer) -> Peer:
    """The two as one peer, which is asked for nothing else."""

    def prepare() -> None:
        plain.prepare()
        drafting.prepare()

    @contextlib.contextmanager
    def start() -> Iterator[Both]:
        with plain.start() as without, drafting.start() as drafts:
            yield Both(drafts, without)

    return _pair(name, drafting.told, prepare, start)


def legato_with_drafts(name: str) -> Peer:
    """Two models of one application, the same weights: on two cores a second cluster takes from what is measured."""

    def prepare() -> None:
        model_folder(MODEL)

    @contextlib.contextmanager
    def start() -> Iterator[Both]:
        models = [_served(MODEL, COLOCATED), _served(PLAIN, PLAIN_STEPS)]
        with running_cluster({**dict.fromkeys(_OF_A_MODEL), "models": models}) as port:
            yield Both(HttpAsker(port, MODEL), HttpAsker(port, PLAIN))

    told = f"Legato {commit()}, one worker for both, over HTTP, bf16"
    return _pair(name, told, prepare, start)


def _served(name: str, settings: Json) -> Json:
    sections = cluster_document(settings)["applications"][0]["args"]
    return {section: sections[section] for section in _OF_A_MODEL} | {"model": {"ref": MODEL, "served_name": name}}


def _pair(name: str, told: str, prepare: Callable[[], None], start: Callable[[], AbstractContextManager[Both]]) -> Peer:
    told += "; beside the same without drafts, which is started too"
    return Peer(name=name, told=told, works=("drafts",), prepare=prepare, start=start, is_pair=True)


def compared(kind: str, asker: Asker, draw: Draw) -> Json:
    """Medians over the answers; `times`: of the ratios within pairs, since whatever else the machine does meets both
    of a pair. `changed`: of `answers`, those whose text is another one."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    changed = 0
    for number in range(NUM_ANSWERS):
        request = Request(prompt=chat_prompt(KINDS[kind](draw, number)), num_tokens=ANSWER_TOKENS)
        texts = set()
        for drafts in (number % 2 == 0, number % 2 == 1):
            (answer,) = asker.wave([replace(request, drafts=drafts)])
            rates[drafts].append(1 / answer.timing.tpot_s)
            texts.add(answer.text)
        changed += len(texts) > 1
    return {
        "drafts_tokens_per_s": statistics.median(rates[True]),
        "plain_tokens_per_s": statistics.median(rates[False]),
        "times": statistics.median(one / other for one, other in zip(rates[True], rates[False], strict=True)),
        "changed": changed,
        "answers": NUM_ANSWERS,
    }


def _passage(path: Path, num_chars: int, draw: Draw) -> str:
    """A passage of the text, from anywhere in it."""
    text = _read(path)
    start = draw(1)[0] % (len(text) - num_chars)
    return text[start : start + num_chars]


@functools.cache
def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _copy(draw: Draw, number: int) -> str:
    return f"Repeat this text word for word:\n{_passage(TEXT, 700, draw)}"


def _summary(draw: Draw, number: int) -> str:
    return f"Summarise this text:\n{_passage(TEXT, 1500, draw)}"


def _code(draw: Draw, number: int) -> str:
    return f"Improve this code:\n{_passage(CODE, 1200, draw)}"


def _prose(draw: Draw, number: int) -> str:
    """A question without anything to copy. The number makes it another one each time."""
    return f"{QUESTIONS[number % len(QUESTIONS)]} Begin with the number {draw(1)[0]}."


KINDS: Final[Mapping[str, Callable[[Draw, int], str]]] = {
    "copies": _copy,
    "summaries": _summary,
    "code": _code,
    "prose": _prose,
}
