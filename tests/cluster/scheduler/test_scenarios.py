"""Stories of the scheduler, told in `scenarios/*.txt` and played with the real `GlobalScheduler` on a virtual clock.

A step is a command line, `----`, and what comes of it; a blank line ends it, and lines with `#` explain. Workers are
p1, p2... (prefill) and d1, d2... (decode): a prompt of 1000 tokens takes 1.01 s, a decode step 10 ms and 1 ms more for
each sequence. Commands (what is in brackets may be left out):

    worker NAME... [blocks=2000 max_len=10000 seqs=N group=same life=1]   they register
    report NAME [running=0 queued=0 context=0 draining=1]                 a heartbeat
    cached NAME prompt=TEXT blocks=N [tier=device]                        it holds the first blocks (16 tokens) of that
    place ID... [tokens=1000 new=100 ttft=2 tpot=0.05 gap=0.1 tenant=t prompt=TEXT exclude=d1,d2 attempt=0 prefer=d1
           waited=0]
    first ID... | end ID... [output=N]                                    first token; the end
    at SECONDS                                                            time passes; who waited is answered
    lost NAME | expire                                                    a connection ends; the silent are dropped
    running ID decode=d1 [prefill=p1 emitted=N since=S late=1]            told by a gateway: it is there already
    role NAME ROLE                                                        a change of role is asked for
    why                                                                   the newest decision's candidates
    load                                                                  what is booked where

After a change that is meant, REWRITE_SCENARIOS=1 writes what came of each step into the files: read the diff.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.scheduler.placement.worker_table import Fact
from cluster.scheduler.role_changes import RoleChanges
from cluster.scheduler.scheduler import GlobalScheduler, SchedulerPolicy
from engine.kv.prefix import HASH_BYTES
from kv_transfer.messages.blocks import BlockIndexSnapshot
from kv_transfer.messages.scheduling import Place, Placement, Queued, RoleRequest, StandingRequest, Unplaceable
from tests.support.clusters.worker_reports import REPORT, worker_info, worker_snapshot
from tests.support.stories import check_story, told_again

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
BLOCK_TOKENS = 16


class World:
    """The scheduler, its clock, and the few words that scenarios have for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.scheduler = GlobalScheduler(SchedulerPolicy())
        self.roles = RoleChanges()
        self._reports = 0

    def do(self, line: str) -> list[str]:
        name, *words = line.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        command: Callable[..., list[str]] = getattr(self, f"on_{name}")
        return command([word for word in words if "=" not in word], options) or ["ok"]

    def on_worker(self, names: list[str], options: dict[str, str]) -> list[str]:
        for name in names:
            info = worker_info(
                name,
                pid=int(options.get("life", 1)),
                num_blocks=int(options.get("blocks", 2000)),
                max_model_len=int(options.get("max_len", 10_000)),
                max_num_seqs=int(options.get("seqs", 0)),
                compatibility=options.get("group", "same"),
                chunk_tokens=2048,
            )
            self.scheduler.register(info, self._snapshot(name, step_cost=REPORT), self.now)
        return []

    def on_report(self, names: list[str], options: dict[str, str]) -> list[str]:
        snapshot = self._snapshot(
            names[0],
            num_running=int(options.get("running", 0)),
            queued_prefill_tokens=int(options.get("queued", 0)),
            context_tokens=int(options.get("context", 0)),
            draining="draining" in options,
        )
        return [] if self.scheduler.heartbeat(snapshot, self.now) else ["unknown: it has to register again"]

    def on_cached(self, names: list[str], options: dict[str, str]) -> list[str]:
        self._reports += 1
        snapshot = BlockIndexSnapshot(
            worker_id=names[0],
            epoch=self._reports,
            next_id=0,
            part=0,
            num_parts=1,
            tier=options.get("tier", "device"),  # type: ignore[arg-type]
            hashes=_hashes(options["prompt"], int(options["blocks"])),
        )
        self.scheduler.update_blocks(snapshot, self.now)
        return []

    def on_place(self, ids: list[str], options: dict[str, str]) -> list[str]:
        answers = [self.scheduler.place(_place(request_id, options), self.now) for request_id in ids]
        return [_told(answer, f"{answer.request_id} " if len(ids) > 1 else "") for answer in answers]

    def on_first(self, ids: list[str], options: dict[str, str]) -> list[str]:
        for request_id in ids:
            self.scheduler.first_token(request_id, self.now)
        return self._answers()

    def on_end(self, ids: list[str], options: dict[str, str]) -> list[str]:
        for request_id in ids:
            self.scheduler.ended(request_id, self.now, int(options["output"]) if "output" in options else None)
        return self._answers()

    def on_at(self, times: list[str], options: dict[str, str]) -> list[str]:
        until, told = float(times[0]), self._answers()
        assert until >= self.now, "time never goes back"
        while (at := self.scheduler.next_at()) is not None and at <= until:
            self.now = max(self.now, at)
            told += self._answers()
        self.now = until
        return told

    def on_lost(self, names: list[str], options: dict[str, str]) -> list[str]:
        self.roles.gone(names[0], self.now, in_order=False)
        return [] if self.scheduler.unregister(names[0], self.now) else ["unknown"]

    def on_expire(self, names: list[str], options: dict[str, str]) -> list[str]:
        return [f"{name} was silent too long" for name in self.scheduler.expire(self.now)]

    def on_running(self, ids: list[str], options: dict[str, str]) -> list[str]:
        request = StandingRequest(
            place=_place(ids[0], options),
            prefill=options.get("prefill"),
            decode=options["decode"],
            num_emitted=int(options.get("emitted", 0)),
            since_first_s=float(options.get("since", 0.0)),
            slo_probability=0.0 if "late" in options else 1.0,
        )
        self.scheduler.recovered(request, self.now)
        return []

    def on_role(self, words: list[str], options: dict[str, str]) -> list[str]:
        request = RoleRequest(ask_id=0, worker_id=words[0], role=words[1], drain_s=10.0)  # type: ignore[arg-type]
        answer = self.roles.ask(request, self.scheduler, self.scheduler, self.now)
        if answer.outcome == "ordered":  # it counts as leaving at once
            self.scheduler.heartbeat(self._snapshot(words[0], draining=True), self.now)
        return [f"{answer.outcome}: {answer.reason}" if answer.reason else answer.outcome]

    def on_why(self, words: list[str], options: dict[str, str]) -> list[str]:
        (newest,) = self.scheduler.log.newest(1)
        rows = [
            f"{row.prefill or '-':<3} {row.decode:<3} cached {row.cached_tokens:>4}  queue {row.wait_s:.2f} s"
            f"  first token {row.ttft_s:.2f} s  then {1000 * row.tpot_s:.1f} ms  P(SLO) {row.slo_probability:.2f}"
            f"  gain {row.slo_gain:.2f}"
            for row in newest.verdict.decision.rows
        ]
        return ["unattainable: its targets do not count", *rows] if newest.is_unattainable else rows

    def on_load(self, words: list[str], options: dict[str, str]) -> list[str]:
        ledger = self.scheduler.ledger
        told = []
        for row, name in enumerate(ledger.table.ids):
            computes = ", ".join(ledger.queue(name)) or "nothing"
            decodes = f", decodes {ledger.table.facts[Fact.BOOKED, row]:.0f}" if name.startswith("d") else ""
            unknown = ledger.table.facts[Fact.EXTRA_DECODES, row]
            told.append(f"{name}: computes {computes}{decodes}" + (f", {unknown:.0f} unknown" if unknown else ""))
        if self.scheduler.num_unbooked:
            told.append(f"{self.scheduler.num_unbooked} run on workers that are not known")
        return told

    def _answers(self) -> list[str]:
        at = self.scheduler.next_at()
        answers = self.scheduler.answers(self.now) if at is not None and at <= self.now else []
        return [_told(answer, f"at {self.now:.2f} s {answer.request_id} is ") for answer in answers]

    def _snapshot(self, name: str, **changes: Any) -> Any:
        self._reports += 1
        return replace(worker_snapshot(name, self._reports), **changes)


def _place(request_id: str, options: dict[str, str]) -> Place:
    tokens = int(options.get("tokens", 1000))
    return Place(
        request_id=request_id,
        attempt=int(options.get("attempt", 0)),
        num_tokens=tokens,
        max_new_tokens=int(options.get("new", 100)),
        exclude=options["exclude"].split(",") if "exclude" in options else [],
        prefer_decode=options.get("prefer"),
        tenant=options.get("tenant", "t"),
        ttft_s=float(options["ttft"]) if "ttft" in options else None,
        tpot_s=float(options["tpot"]) if "tpot" in options else None,
        gap_s=float(options["gap"]) if "gap" in options else None,
        waited_s=float(options.get("waited", 0.0)),
        prefix_hashes=_hashes(options.get("prompt", request_id), (tokens - 1) // BLOCK_TOKENS),
    )


def _hashes(prompt: str, num_blocks: int) -> bytes:
    return b"".join(f"{prompt[:8]:<8}{block:>8}".encode() for block in range(num_blocks))


def _told(answer: Placement | Unplaceable | Queued, who: str) -> str:
    if isinstance(answer, Queued):
        return f"{who}waits for room, {answer.within_s:.3g} s at most"
    if isinstance(answer, Placement):
        on = f"{answer.prefill} -> {answer.decode}" if answer.prefill else f"{answer.decode} alone"
        return f"{who}placed: {on}, first token after {answer.ttft_s or 0.0:.2f} s"
    again = "never" if answer.retry_after_s is None else f"in {answer.retry_after_s:.3g} s"
    return f"{who}rejected, retry {again}: {answer.reason}"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_story_goes_as_it_is_told(path: Path) -> None:
    check_story(path, World().do)


def test_a_story_that_goes_otherwise_says_where() -> None:
    assert len(SCENARIOS) >= 20
    assert len(_hashes("a", 1)) == HASH_BYTES
    told = "worker p1 d1\n----\nok\n\nplace a\n----\nrejected\n"
    assert told_again(told, World().do) == told.replace("rejected", "placed: p1 -> d1, first token after 1.01 s")
