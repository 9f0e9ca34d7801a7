"""What the board shows, as one JSON object: taken several times a second while somebody looks, from what is known.

Requests come from their timelines, promises from the `SloAccount`, workers from their reports, decisions from the
scheduler's log. What has no value is left out, so that differences between two pictures are JSON merge patches
(RFC 7396), in which `null` takes a field away:

    now         seconds of the gateway's clock, as all times here
    models, ready, default_class
    gateways    how many there are; `silent`: how many of them did not say what they do
    pools       by role: `wanted` workers, where the scheduler advises
    workers     by id: role, state, load, what a step takes or how many prompt tokens a second, by the worker's own
                model, and blocks of each tier as [held, cached, free]
    classes     by name, of several models by name and model: each promise's P99 beside its target in ms, attainment,
                the share of the error budget left
    requests    by id: class, tokens, and `marks`, [time, phase, worker] where each phase began; `end` if it has ended.
                Of all gateways: of the others as of the last picture or the one before
    decisions   by number: when, and a sentence
    happenings  by number: what happened to workers and to the requests on them, as a sentence

Nothing here is a prompt, an answer, a key or a tenant.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import math
import re
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from typing import Any, Final

from cluster.errors import UnavailableError
from cluster.gateway.timeline import RequestTimeline
from cluster.http.api import Api
from cluster.http.openai.sse import dumps
from cluster.http.other_gateways import GatheredAnswers, ask
from cluster.slo.report import Metric
from cluster.slo.tracker import SeriesSnapshot
from kv_transfer.messages.fields import Role
from kv_transfer.messages.workers import WorkerInfo, WorkerSnapshot

Picture = dict[str, Any]

PHASES: Final = {
    "parse": "queue",
    "admit": "queue",
    "place": "queue",
    "reserve": "queue",
}
"""Parts of a timeline that people take for one: the phase that the board shows for each."""
MAX_REQUESTS: Final = 64
MAX_DECISIONS: Final = 8
MAX_HAPPENINGS: Final = 40
GONE_S: Final = 60.0  # how long a worker that is gone is still shown
_ROWS_PER_TURN: Final = 4
# Between the turns of one picture: a beat of all streams' tokens meets one of them and not the whole picture.
REST_S: Final = 0.004
_REQUESTS: Final = "the board's requests"  # the topic of the question that gateways ask each other
_SAME_CLOCK_S: Final = 0.01  # clocks that differ less are one clock, read by two processes
_TAIL: Final = 4  # characters of an id by which people tell things apart at a glance
SLOW_S: Final = 1.0  # between looks at what changes slowly or costs the scheduler something: promises and decisions


class Observer:
    """Takes pictures of one gateway and its cluster, and remembers the last one to tell what happened since. Only one
    task at a time may call `observe`."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._numbers = count(1)
        self._told: list[str] = []  # the scheduler's newest decisions, as it told them
        self._decisions: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MAX_DECISIONS)
        self._happenings: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MAX_HAPPENINGS)
        self._own: dict[str, dict[str, Any]] = {}  # rows of this gateway's requests, as they were last made
        self._clocks: dict[str, float] = {}  # what other gateways' times are to be moved by
        self._others = GatheredAnswers([api.cluster.gateway], [], {})  # as they answered last
        self._asking: asyncio.Task[GatheredAnswers] | None = None
        api.cluster.answer_gateways(_REQUESTS, self._tell_requests)
        self.forget()

    def forget(self) -> None:
        """Forget the last picture. After a while in which nobody looked, what is different did not happen just now."""
        self._workers: dict[str, dict[str, Any]] | None = None
        self._requests: dict[str, dict[str, Any]] = {}
        self._classes: dict[str, Any] = {}
        self._slow_at = -math.inf
        if self._asking is not None:
            self._asking.cancel()
        self._asking, self._asked_at = None, -math.inf
        self._others = GatheredAnswers([self._api.cluster.gateway], [], {})

    async def observe(self) -> Picture:
        """Take a picture. Other tasks have their turns between its parts."""
        now = time.monotonic()
        if now - self._slow_at >= SLOW_S:
            self._slow_at = now
            classes = {}
            for found in self._api.slo.totals("cluster"):
                name, row = self._class(found)
                classes[name] = row
                await asyncio.sleep(REST_S)
            self._classes = classes
            await self._ask_decisions(now)
        self._hear_others(now)
        requests = await self._look_at_requests()
        await asyncio.sleep(REST_S)
        workers = self._look_at_workers(now)
        self._tell_of_workers(workers, requests, now)
        self._tell_of_requests(requests, now)
        self._workers, self._requests = workers, requests
        limits = [model.limits() for model in self._api.models]
        wanted: Counter[Role] = Counter()
        for pools in self._api.cluster.pools.values():
            wanted.update(pools)
        return {
            "now": round(now, 3),
            "models": [model.name for model in self._api.models],
            "ready": any(found is not None and found.ready for found in limits),
            "gateways": len(self._others.asked),
            "silent": len(self._others.silent),
            "default_class": self._api.slo.classes.default,
            "pools": {role: {"wanted": number} for role, number in wanted.items()},
            "workers": workers,
            "classes": self._classes,
            "requests": requests,
            "decisions": dict(self._decisions),
            "happenings": dict(self._happenings),
        }

    # --- the parts of a picture ---

    async def _look_at_requests(self) -> dict[str, dict[str, Any]]:
        """Rows of the newest requests of all gateways, by id."""
        rows = dict(await self._look_at_own())
        for gateway, told in self._others.told.items():
            by_s = self._clocks[gateway]
            rows |= {name: row if by_s == 0.0 else moved_row(row, by_s) for name, row in told["rows"].items()}
        newest = heapq.nlargest(MAX_REQUESTS, rows, key=lambda name: rows[name]["at"])
        return {name: rows[name] for name in newest}

    async def _look_at_own(self) -> dict[str, dict[str, Any]]:
        """Rows of the newest requests of this gateway, by id."""
        rows: dict[str, dict[str, Any]] = {}
        for index, timeline in enumerate(self._api.recent.newest(MAX_REQUESTS)):
            if index % _ROWS_PER_TURN == 0:
                await asyncio.sleep(REST_S)
            known = self._own.get(timeline.request_id)
            rows[timeline.request_id] = known if known and "end" in known else request_row(timeline)
        self._own = rows
        return rows

    async def _tell_requests(self, question: bytes) -> bytes:
        """Answer another gateway, at whose board somebody looks, with the rows of this one's requests."""
        return dumps({"since_1970_s": time.time() - time.monotonic(), "rows": await self._look_at_own()})

    def _hear_others(self, now: float) -> None:
        """Take in what other gateways have answered since the last picture, and ask them for the next one. So no
        picture waits for a gateway that does not answer. If there was no other, ask only every `SLOW_S`."""
        if self._asking is not None and self._asking.done():
            self._others, self._asking = self._asking.result(), None
            since_1970_s = time.time() - time.monotonic()
            for gateway, told in self._others.told.items():
                by_s = told["since_1970_s"] - since_1970_s
                if gateway not in self._clocks or abs(self._clocks[gateway] - by_s) > _SAME_CLOCK_S:
                    self._clocks[gateway] = 0.0 if abs(by_s) <= _SAME_CLOCK_S else by_s
            self._clocks = {gateway: self._clocks[gateway] for gateway in self._others.told}
        is_due = len(self._others.asked) > 1 or now - self._asked_at >= SLOW_S
        if self._asking is None and is_due:
            self._asked_at = now
            self._asking = asyncio.create_task(ask(self._api, _REQUESTS, {}), name="board-others")

    def _look_at_workers(self, now: float) -> dict[str, dict[str, Any]]:
        """Rows of the workers that are there and, for `GONE_S`, of those that are gone."""
        cluster = self._api.cluster
        rows = {info.worker_id: worker_row(info, snapshot) for info, snapshot in cluster.reports()}
        for worker_id, state in cluster.connection_states().items():
            if state != "up" and worker_id in rows:
                rows[worker_id]["state"] = state
        for worker_id, row in (self._workers or {}).items():
            if worker_id not in rows and now - row.get("gone_at", now) < GONE_S:
                in_order = row["state"] in ("draining", "left")
                rows[worker_id] = {
                    "role": row["role"],
                    "name": row["name"],
                    "state": "left" if in_order else "lost",
                    "gone_at": row.get("gone_at", round(now, 3)),
                }
        return rows

    def _class(self, found: SeriesSnapshot) -> tuple[str, dict[str, Any]]:
        """The name and the row of a class of service; of several models each has a row for each class."""
        slo = self._api.slo.classes.named(found.key.slo_class)
        assert slo is not None, "an account has series of its own classes only"
        row: dict[str, Any] = {"share": slo.share, "tokens_s": round(found.tokens_s, 1)}
        name = slo.name
        if len(self._api.models) > 1:
            name, row["class"] = f"{slo.name} · {found.key.model}", slo.name
        for metric, target_s in ((Metric.TTFT, slo.ttft_s), (Metric.TPOT, slo.tpot_s), (Metric.GAP, slo.gap_s)):
            promise = {} if target_s is None else {"target": _ms(target_s)}
            if metric in found.latencies:
                promise |= {"p99": _ms(found.latencies[metric].p99_s), "count": found.latencies[metric].count}
            row[metric.name.lower()] = promise
        if slo.has_targets and found.long.attainment is not None:
            row |= {
                "attainment": round(found.long.attainment, 4),
                "budget_left": round(1.0 - found.long.rate, 3),
                "burn": round(found.short.rate, 2),
            }
        return name, row

    async def _ask_decisions(self, now: float) -> None:
        """Ask the scheduler for its newest decisions, and add those that are new."""
        with suppress(UnavailableError):  # keep those that are known
            lines = await self._api.cluster.decisions(MAX_DECISIONS, as_text=False)
            told = [line.partition(",")[2] for line in lines]  # without the time, which each answer reckons anew
            new = [line for line, rest in zip(lines, told, strict=True) if rest not in self._told]
            self._told = told
            for line in reversed(new):
                with suppress(
                    KeyError, TypeError, ValueError
                ):  # the scheduler may be of another version, while one rolls out
                    self._decisions.append((str(next(self._numbers)), decision_row(json.loads(line), now)))

    # --- what happened ---

    def _tell_of_workers(
        self, workers: Mapping[str, dict[str, Any]], requests: Mapping[str, dict[str, Any]], now: float
    ) -> None:
        """Add a happening for each worker whose state is another than in the last picture."""
        if self._workers is None:
            return
        for worker_id, row in workers.items():
            name, state = row["name"], row["state"]
            before = self._workers.get(worker_id, {}).get("state")
            if state == before:
                continue
            if state == "lost":
                num = sum(_is_on(worker_id, self._requests.get(name, row)) for name, row in requests.items())
                streams = f" {num} request{'s' * (num != 1)} go{'es' * (num == 1)} on elsewhere."
                self._happened(now, "lost", f"{name} was lost.{streams if num else ''}")
            elif state == "left":
                self._happened(now, "left", f"{name} has left in order.")
            elif state == "draining":
                self._happened(now, "left", f"{name} takes nothing new: it is leaving, or changing its role.")
            elif state == "silent":
                self._happened(now, "lost", f"{name} is silent. Its requests go on elsewhere.")
            elif before is None:
                self._happened(now, "came", f"{name} has joined.")
            elif before == "silent":
                self._happened(now, "came", f"{name} answers again.")

    def _tell_of_requests(self, requests: Mapping[str, dict[str, Any]], now: float) -> None:
        """Add a happening for each request that has another attempt since the last picture."""
        for request_id, row in requests.items():
            before = self._requests.get(request_id)
            if before is None or row["attempts"] <= before["attempts"] or self._workers is None:
                continue
            tokens = f" behind its {before['tokens']} tokens" if before["tokens"] else ""
            self._happened(now, "again", f"{short_request(request_id)} goes on{tokens}: attempt {row['attempts']}.")

    def _happened(self, now: float, kind: str, text: str) -> None:
        self._happenings.append((str(next(self._numbers)), {"at": round(now, 3), "kind": kind, "text": text}))


def decision_row(decision: dict[str, Any], now: float) -> dict[str, Any]:
    """The row of a decision. `decision`: a line of the scheduler's log, whose times are Unix time. Raises KeyError or
    TypeError for anything else."""
    return {
        "at": round(now + decision["time"] - time.time(), 3),
        "outcome": decision["outcome"],
        "slo_class": decision["slo_class"],
        "text": decision_sentence(decision),
    }


def worker_row(info: WorkerInfo, snapshot: WorkerSnapshot) -> dict[str, Any]:
    """The row of a worker, by what it told of itself some half a second ago."""
    row: dict[str, Any] = {
        "role": info.role,
        "name": short_worker(info.worker_id),
        "state": "draining" if snapshot.draining else "up",
        "running": snapshot.num_running,
        "waiting": snapshot.num_waiting + snapshot.num_local_waiting + snapshot.num_pending,
        "queued_tokens": snapshot.queued_prefill_tokens,
        "tiers": {tier: [blocks.held, blocks.cached, blocks.free] for tier, blocks in snapshot.tiers.blocks.items()},
    }
    if info.home not in (None, info.role):
        row["home"] = info.home
    if info.max_num_seqs:
        row["max_running"] = info.max_num_seqs
    if (cost := snapshot.step_cost) is not None:  # by the worker's own model
        if info.role == "decode":
            num_decoding = max(1, snapshot.num_running - snapshot.num_paused)
            step_s = cost.base_s + cost.decode_s * num_decoding + cost.context_token_s * snapshot.context_tokens
            row["step_ms"] = _ms(step_s)
        elif cost.prefill_token_s > 0:
            row["prompt_tokens_s"] = round(1.0 / cost.prefill_token_s)
    return row


def request_row(timeline: RequestTimeline) -> dict[str, Any]:
    """The row of a request. If it has several choices, `marks` are of the one that was sent first."""
    row: dict[str, Any] = {
        "class": timeline.terms.slo.name,
        "at": round(timeline.arrived_at, 3),
        "marks": request_marks(timeline),
        "attempts": max(1, *(len(sequence.attempts) for sequence in timeline.sequences)),
        "prompt": timeline.num_prompt_tokens,
        "tokens": timeline.num_tokens,
        "choices": len(timeline.sequences),
    }
    if timeline.ended_at is not None:
        row |= {"end": round(timeline.ended_at, 3), "outcome": timeline.outcome}
    return row


def request_marks(timeline: RequestTimeline) -> list[tuple[float, str, str]]:
    """When each phase of a request began, and on which worker. Phases are the parts of `RequestTimeline.parts`; those
    that people do not tell apart are one."""
    marks: list[tuple[float, str, str]] = []
    for part in timeline.parts():
        phase = PHASES.get(part.name, part.name)
        if phase in ("send", "finish"):  # shown as a part of the phase before it
            continue
        worker = "" if phase in ("queue", "retry") or part.worker is None else part.worker
        if not marks or marks[-1][1:] != (phase, worker):
            marks.append((round(timeline.arrived_at + part.start_s, 3), phase, worker))
    return marks


def moved_row(row: Mapping[str, Any], by_s: float) -> dict[str, Any]:
    """A request's row with all its times moved by `by_s`, to another clock."""
    times = {name: round(row[name] + by_s, 3) for name in ("at", "end") if name in row}
    marks = [(round(at + by_s, 3), phase, worker) for at, phase, worker in row["marks"]]
    return {**row, **times, "marks": marks}


def _is_on(worker_id: str, row: Mapping[str, Any]) -> bool:
    """Whether a request's newest attempt runs on that worker."""
    newest = itertools.takewhile(lambda mark: mark[1] != "retry", reversed(row["marks"]))
    return "end" not in row and any(worker == worker_id for _, _, worker in newest)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def short_request(request_id: str) -> str:
    """A short name for a request: `…cdef` for `chatcmpl-0123456789abcdef-0`.
    Choices after the first add their number."""
    job, _, index = request_id.rpartition("-")
    if not job or not index.isdigit():
        job, index = request_id, "0"
    return f"…{job[-_TAIL:]}" + (f"/{index}" if index != "0" else "")


def short_worker(worker_id: str) -> str:
    """A short name for a worker: `decode 4711` for `decode-x1y2z3ab-4711`, its role and the process that an operator
    would look for."""
    role, dash, rest = worker_id.partition("-")
    return f"{role} {rest.rpartition('-')[2]}" if dash else worker_id


def decision_sentence(decision: dict[str, Any]) -> str:
    """A sentence that says what was decided, for whom, and what is expected of it. `decision`: one line of
    `/cluster/decisions`."""
    what = _named(decision)
    candidates = decision["candidates"]
    if decision["outcome"] == "placed" and candidates:
        return f"{what} {_placed(candidates[0], decision)}{_others(candidates)}{_unattainable(decision)}."
    if decision["outcome"] == "waiting":
        return f"{what} waits for room."
    retry_s = decision["retry_after_s"]
    comes_back = "it never could be served" if retry_s is None else f"it may come back in {_time(retry_s)}"
    return f"{what} was turned away: {_readable(decision['reason'])}; {comes_back}."


def _named(decision: dict[str, Any]) -> str:
    """The words for a request: its class, short name and length, and which attempt it is."""
    attempt = f", attempt {decision['attempt'] + 1}" if decision["attempt"] else ""
    slo_class = decision["slo_class"] or "request"
    return f"{slo_class} {short_request(decision['request_id'])} ({decision['num_tokens']} tokens{attempt})"


def _placed(best: dict[str, Any], decision: dict[str, Any]) -> str:
    decode = short_worker(best["decode"])
    if best["prefill"] is None:
        where = f"runs on {decode} alone"
    elif best.get("split_at"):
        where = f"is split: {short_worker(best['prefill'])} computes {best['split_at']} tokens of it, {decode} the rest"
    else:
        where = f"is computed by {short_worker(best['prefill'])} and goes on in {decode}"
    if best["cached_tokens"]:
        where += (
            f", which knows {best['cached_tokens']} of them"
            if best["prefill"] is None
            else (f", with {best['cached_tokens']} tokens known there")
        )
    expected = [f"first token after {_time(best['ttft_s'])}"] if best["ttft_s"] is not None else []
    if best["tpot_s"] is not None:
        expected.append(f"then one every {_time(best['tpot_s'])}")
    if decision["ttft_s"] is not None or decision["tpot_s"] is not None or decision["gap_s"] is not None:
        expected.append(f"{100 * best['slo_probability']:.0f} % likely in time")
    return where + (f"; {', '.join(expected)}" if expected else "")


def _others(candidates: list[dict[str, Any]]) -> str:
    """Words that say what the next best candidate would have brought; "" without one."""
    if len(candidates) < 2 or candidates[1]["ttft_s"] is None:
        return ""
    best, other = candidates[0], candidates[1]
    name = short_worker(other["prefill"] or other["decode"])
    if name == short_worker(best["prefill"] or best["decode"]):
        name = short_worker(other["decode"])
    return f" ({name}: {_time(other['ttft_s'])})"


def _unattainable(decision: dict[str, Any]) -> str:
    return "; its targets cannot be met, and do not count" if decision["unattainable"] else ""


def _readable(reason: str) -> str:
    return re.sub(r"\s+", " ", reason).strip().rstrip(".")


def _time(seconds: float) -> str:
    """A duration with two or three digits and a unit that fits."""
    if seconds < 0.0995:
        return f"{1e3 * seconds:.2g} ms"
    if seconds < 0.9995:
        return f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
