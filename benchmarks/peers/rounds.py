"""The run: rounds in which every peer is started, asked everything, and ended, so that each has the machine to itself.

Every other round goes backwards: what drifts meets all alike. Whatever fails becomes a record with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.common.part import Json, note
from benchmarks.common.quiet import QuietMachine
from benchmarks.peers.peer import Asker, Peer
from benchmarks.peers.works import START, WORKS, Work, drawing, first_token, warm_up

# What a peer that is absent, broken, slow or wrong raises here; asyncio's IncompleteReadError is an EOFError.
FAILURES = (RuntimeError, OSError, EOFError, ValueError)

Record = Callable[[Json], None]


def run_rounds(peers: Sequence[Peer], groups: Sequence[str], num_rounds: int, record: Record) -> None:
    quiet = QuietMachine()
    works = prepared_works(groups, record)
    for number, peer in turns(prepared(peers, record), num_rounds):
        note(f"round {number + 1} of {num_rounds}: {peer.name}")
        asked = [work for work in works if work.group in peer.works and not (work.once and number > 0)]
        _visit(peer, asked, number, record, quiet)
    record({"run": {"machine": quiet.report()}})


def turns(peers: Sequence[Peer], num_rounds: int) -> Iterator[tuple[int, Peer]]:
    """A B C, C B A, ..."""
    for number in range(num_rounds):
        for peer in peers if number % 2 == 0 else peers[::-1]:
            yield number, peer


def prepared(peers: Sequence[Peer], record: Record) -> list[Peer]:
    """The peers that can be installed. Called before anything is measured."""
    return [peer for peer in peers if _prepared(peer, record)]


def _prepared(peer: Peer, record: Record) -> bool:
    try:
        peer.prepare()
    except FAILURES as error:
        _fail(peer, None, error, record)
        return False
    return True


def prepared_works(groups: Sequence[str], record: Record) -> list[Work]:
    """The works that nothing is missing for."""
    works = [work for work in WORKS if work.group in groups]
    for prepare in dict.fromkeys(work.prepare for work in works):
        try:
            prepare()
        except FAILURES as error:
            lacking = [work for work in works if work.prepare == prepare]
            works = [work for work in works if work not in lacking]
            for work in lacking:
                record({"peer": "everybody", "work": work.name, "round": None, "reason": reason(error)})
    return works


def _visit(peer: Peer, works: Sequence[Work], number: int, record: Record, quiet: QuietMachine) -> None:
    began_s = time.perf_counter()
    try:
        with peer.start() as asker:
            seconds = first_token(asker, drawing(START, number)) - began_s
            if not peer.is_pair:
                record({"peer": peer.name, "work": START, "round": number, "figures": {"seconds": seconds}})
            warm_up(asker)
            for work in works:
                _measure(peer, asker, work, number, record, quiet)
    except FAILURES as error:
        _fail(peer, number, error, record)


def _measure(peer: Peer, asker: Asker, work: Work, number: int, record: Record, quiet: QuietMachine) -> None:
    for repeat in range(work.repeats):
        base: Json = {"peer": peer.name, "work": work.name, "round": number}
        try:
            # Asked again after a disturbance it must be another prompt, or a prefix cache would know it.
            draw = drawing(work.name, number, repeat)
            figures = quiet.run(lambda: work.measure(asker, draw))  # noqa: B023 - run at once
        except FAILURES as error:
            _tell(peer, work.name, error)
            record(base | {"reason": reason(error)})
            return
        record(base | {"figures": figures})


def _fail(peer: Peer, number: int | None, error: Exception, record: Record) -> None:
    _tell(peer, "not measured", error)
    record({"peer": peer.name, "work": None, "round": number, "reason": reason(error)})


def _tell(peer: Peer, what: str, error: Exception) -> None:
    note(f"{peer.name}, {what}: {reason(error)}")


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
