"""The endpoints for operators: the cluster's workers, its decisions, requests, how promises are kept, and metrics.

Those of clients are beside it: `generation` for what generates, `service` for models, tokens and health, which says
what belongs to another one.

Each asks the `ClusterView` or the SLO account of its gateway. For one that asks the scheduler something new: a route
here, a method of `ClusterView` (`cluster.gateway.generator`), its implementation in `SchedulerClient` and in the two
that stand in for it (`tests/support/scripted_generator.py`, `benchmarks/serving/gateway_server.py`), messages in
`kv_transfer.messages.scheduling` (with `PROTOCOL_VERSION`), what `cluster.scheduler.server` answers, and a line in
`docs/guide/http-api.md`; what does not begin with `/cluster` is also a row of what proxies keep from clients
(`docs/guide/security.md`). Tests: `test_http_api.py`, `test_placed_records.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import asdict
from heapq import nlargest
from itertools import islice
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client import Metric as Family

from cluster.errors import InvalidRequestError, NotFoundError
from cluster.gateway.recent_requests import MAX_ENDED, waterfall
from cluster.http.api import Api, ApiOf
from cluster.http.openai.schemas import RoleBody
from cluster.http.other_gateways import GatheredAnswers, OtherGateways
from cluster.http.server.body import JsonRoute
from cluster.metrics.ray_export import SAMPLES_AT_ONCE
from cluster.slo.account import Scope
from cluster.slo.classes import SloClass
from cluster.slo.tracker import Burn, SeriesSnapshot
from kv_transfer.messages.scheduling import MAX_DECISIONS

router = APIRouter(route_class=JsonRoute)


@router.get("/cluster", response_model=None)
async def cluster(api: ApiOf) -> dict[str, Any]:
    """The workers as this gateway knows them: role, pid, load, KV blocks. Also workers that are still loading their
    model, how many workers each pool should have (of several models, by model), and which layout would have served
    most, as it was found last."""
    wanted = api.cluster.pools
    return {
        "workers": api.cluster.describe_workers(),
        "loading": [asdict(report) for report in api.cluster.loading],
        "wanted": wanted if len(api.models) > 1 else next(iter(wanted.values()), {}),
        "layout": api.layouts.newest,
    }


@router.get("/cluster/layout", response_model=None)
async def layout(api: ApiOf) -> dict[str, Any]:
    """How the automatic layout and fixed ones would have served the newest requests of the log, by simulation. If that
    is not known yet, the answer takes a minute."""
    return await api.layouts.ask()


@router.post("/cluster/workers/{worker_id}/role", response_model=None, status_code=202)
async def change_role(worker_id: str, body: RoleBody, api: ApiOf) -> dict[str, Any]:
    """Tells a worker to change its role, or its model. It comes back under another name: see `/cluster`."""
    await api.cluster.change_role(worker_id, body.role, body.drain_s, body.model)
    asked = {"role": body.role} | ({"model": body.model} if body.model else {})
    return {"worker_id": worker_id, **asked, "status": "changing"}


@router.get("/cluster/decisions", response_model=None)
async def decisions(
    api: ApiOf,
    limit: Annotated[int, Query(ge=1, le=MAX_DECISIONS)] = 20,
    format: Literal["json", "text"] = "json",
) -> Response:
    """The scheduler's newest decisions, newest first. `format=text`: as the tables that they were made from.
    `scheduler.decision_log` has all of them."""
    as_text = format == "text"
    told = await api.cluster.decisions(limit, as_text=as_text)
    if as_text:
        return PlainTextResponse("\n\n".join(told) + "\n")
    return JSONResponse({"decisions": [json.loads(line) for line in told]})


async def _others(request: Request) -> OtherGateways:
    others: OtherGateways = request.app.state.others
    return others


OthersOf = Annotated[OtherGateways, Depends(_others)]


@router.get("/cluster/requests", response_model=None)
async def requests(
    api: ApiOf,
    others: OthersOf,
    limit: Annotated[int, Query(ge=1, le=MAX_ENDED)] = 50,
    since: Annotated[int, Query(ge=0)] = 0,
    scope: Scope = "cluster",
) -> Response:
    """Requests that run, and those that have ended since the `version` of an earlier answer, the newest first.
    `version`, `since` and `kept` are this gateway's. Other gateways add all that are new enough for the list, at most
    `MAX_ROWS` each; `silent` are those that did not answer."""
    version = api.recent.version
    rows = await api.rows(api.recent.newest(limit, since))
    found = await others.newest(limit) if scope == "cluster" else GatheredAnswers([api.cluster.gateway], [], {})
    for told in found.told.values():
        rows += told["rows"]
    rows = nlargest(limit, rows, key=lambda row: row["started_at"])
    return JSONResponse(
        {
            "gateway": api.cluster.gateway,
            "gateways": found.asked,
            "silent": found.silent,
            "version": version,
            "kept": len(api.recent),
            "requests": rows,
        }
    )


@router.get("/cluster/requests/{request_id}", response_model=None)
async def request(
    request_id: str,
    api: ApiOf,
    others: OthersOf,
    accept: Annotated[str, Header()] = "",
    format: Literal["json", "text"] | None = None,
    choice: Annotated[int | None, Query(ge=0)] = None,
) -> Response:
    """Where one request's time went, also while it runs, whichever gateway has it. With `format=text` or
    `Accept: text/plain` the answer is a picture in text. `choice`: the choice to tell of; by default the one whose
    first byte was sent first."""
    timeline = api.recent.find(request_id)
    if timeline is None:
        details, found = await others.find(request_id, choice)
        if details is None:
            raise _not_kept(request_id, api, found)
        _require_choice(choice, details["choices"])
    else:
        _require_choice(choice, len(timeline.sequences))
        details = api.details(timeline, choice)
    if format == "text" or (format is None and accept.startswith("text/plain")):
        return PlainTextResponse(waterfall(details))
    return JSONResponse(details)


def _require_choice(choice: int | None, num_choices: int) -> None:
    if choice is not None and choice >= num_choices:
        raise InvalidRequestError(f"The request has {num_choices} choices, the first of which is 0.", param="choice")


def _not_kept(request_id: str, api: Api, found: GatheredAnswers) -> NotFoundError:
    whose = "this gateway keeps"
    if others := len(found.asked) - 1 - len(found.silent):
        whose += f", nor at the {others} other{'s' * (others > 1)} that answered"
    silent = f" {len(found.silent)} of {len(found.asked)} gateways did not answer: ask again." if found.silent else ""
    return NotFoundError(
        f"There is no request {request_id[:200]!r} among the {len(api.recent)} that {whose}. Each keeps those that run,"
        f" and the newest {MAX_ENDED} or fewer that it has generated.{silent}",
        param="request_id",
        code="request_not_found",
    )


@router.get("/metrics", response_model=None)
async def metrics(api: ApiOf) -> Response:
    """The Prometheus metrics that this gateway replica has. When counters began is left out, as in Ray's."""
    text = bytearray()
    for family in api.metrics.registry.collect():
        samples = (sample for sample in family.samples if not sample.name.endswith("_created"))
        is_first = True
        while (some := list(islice(samples, SAMPLES_AT_ONCE))) or is_first:
            told = Family(family.name, family.documentation, family.type, family.unit)
            told.samples = some
            written = generate_latest(_OneFamily(told))
            text += written if is_first else written.split(b"\n", 2)[2]  # it begins with its HELP and TYPE each time
            is_first = False
            await asyncio.sleep(0)
    return Response(bytes(text), media_type=CONTENT_TYPE_LATEST)


class _OneFamily(CollectorRegistry):
    """What `generate_latest` writes at once."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self._family = family

    def collect(self) -> Iterable[Family]:
        return [self._family]


@router.get("/slo", response_model=None)
async def slo(api: ApiOf, scope: Scope = "cluster") -> dict[str, Any]:
    """Targets, and figures of the sliding windows, for each class, and for each class on each worker."""
    workers: list[dict[str, Any]] = []
    for snapshot in api.slo.workers(scope):
        workers.append({"worker": snapshot.key.worker, **_figures(snapshot)})
        await asyncio.sleep(0)
    return {
        "scope": scope,
        "default_class": api.slo.classes.default,
        "targets": {slo_class.name: _targets(slo_class) for slo_class in api.slo.classes.classes},
        "classes": [_figures(snapshot) for snapshot in api.slo.totals(scope)],
        "workers": workers,
    }


def _targets(slo_class: SloClass) -> dict[str, Any]:
    return {
        "ttft_ms": _ms(slo_class.ttft_s),
        "tpot_ms": _ms(slo_class.tpot_s),
        "gap_ms": _ms(slo_class.gap_s),
        "share": slo_class.share,
        "service_tiers": list(slo_class.service_tiers),
    }


def _figures(snapshot: SeriesSnapshot) -> dict[str, Any]:
    return {
        "slo_class": snapshot.key.slo_class,
        "model": snapshot.key.model,
        "covered_s": round(snapshot.covered_s, 3),
        "latency_ms": {
            metric.name.lower(): {
                "count": found.count,
                "p50": _ms(found.p50_s),
                "p95": _ms(found.p95_s),
                "p99": _ms(found.p99_s),
            }
            for metric, found in snapshot.latencies.items()
        },
        "counts": snapshot.counts._asdict(),
        "goodput_requests_per_s": snapshot.goodput_rps,
        "goodput_tokens_per_s": snapshot.goodput_tokens_s,
        "tokens_per_s": snapshot.tokens_s,
        "windows": {"short": _burn(snapshot.short), "long": _burn(snapshot.long)},
    }


def _burn(burn: Burn) -> dict[str, Any]:
    return {
        "window_s": burn.window_s,
        "attainment": burn.attainment,
        "burn_rate": burn.rate,
        "burn_rate_by": {"ttft": burn.ttft_rate, "tpot": burn.tpot_rate, "gap": burn.gap_rate},
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
