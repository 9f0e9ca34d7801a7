"""`GET /slo`: how well promises are kept, as JSON in milliseconds."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from cluster.http.api import Api
from cluster.slo.account import Scope
from cluster.slo.classes import SloClass
from cluster.slo.tracker import Burn, SeriesSnapshot

router = APIRouter()


@router.get("/slo", response_model=None)
async def slo(request: Request, scope: Scope = "cluster") -> dict[str, Any]:
    """Targets, and figures of the sliding windows: of each class, and of each class on each worker."""
    api: Api = request.app.state.api
    return {
        "scope": scope,
        "default_class": api.slo.classes.default,
        "targets": {slo_class.name: _targets(slo_class) for slo_class in api.slo.classes.classes},
        "classes": [_figures(snapshot) for snapshot in api.slo.totals(scope)],
        "workers": [{"worker": snapshot.key.replica, **_figures(snapshot)} for snapshot in api.slo.replicas(scope)],
    }


def _targets(slo_class: SloClass) -> dict[str, Any]:
    return {
        "ttft_ms": _ms(slo_class.ttft_s),
        "tpot_ms": _ms(slo_class.tpot_s),
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
    return {"window_s": burn.window_s, "attainment": burn.attainment, "burn_rate": burn.rate}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
