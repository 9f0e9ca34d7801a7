"""A decision of the scheduler as a sentence for people, made from its line of `/cluster/decisions`."""

from __future__ import annotations

import re
from typing import Any, Final

_TAIL: Final = 4  # characters of an id by which people tell things apart at a glance


def short_request(request_id: str) -> str:
    """`chatcmpl-0123456789abcdef-0` as `…cdef`; of several choices all but the first say which."""
    job, _, index = request_id.rpartition("-")
    if not job or not index.isdigit():
        job, index = request_id, "0"
    return f"…{job[-_TAIL:]}" + (f"/{index}" if index != "0" else "")


def short_worker(worker_id: str) -> str:
    """`decode-x1y2z3ab-4711` as `decode 4711`: its role, and the process that an operator would look for."""
    role, dash, rest = worker_id.partition("-")
    return f"{role} {rest.rpartition('-')[2]}" if dash else worker_id


def decision_sentence(decision: dict[str, Any]) -> str:
    """What was decided, for whom, and what is expected of it. `decision`: one line of `/cluster/decisions`."""
    what = _named(decision)
    candidates = decision["candidates"]
    if decision["outcome"] == "placed" and candidates:
        return f"{what} {_placed(candidates[0], decision)}{_others(candidates)}{_unattainable(decision)}."
    if decision["outcome"] == "waiting":
        return f"{what} waits for room: {_readable(decision['reason'])}."
    retry_s = decision["retry_after_s"]
    comes_back = "it never could be served" if retry_s is None else f"it may come back in {_time(retry_s)}"
    return f"{what} was turned away: {_readable(decision['reason'])}; {comes_back}."


def _named(decision: dict[str, Any]) -> str:
    """Who asks: its class, name, length, and which attempt it is."""
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
    """What the next best one would have brought."""
    if len(candidates) < 2 or candidates[1]["ttft_s"] is None:
        return ""
    best, other = candidates[0], candidates[1]
    name = short_worker(other["prefill"] or other["decode"])
    if name == short_worker(best["prefill"] or best["decode"]):
        name = short_worker(other["decode"])
    return f" ({name}: {_time(other['ttft_s'])})"


def _unattainable(decision: dict[str, Any]) -> str:
    return "; its targets cannot be met even on an idle cluster" if decision["unattainable"] else ""


def _readable(reason: str) -> str:
    return re.sub(r"\s+", " ", reason).strip().rstrip(".")


def _time(seconds: float) -> str:
    """With two or three digits and a unit that fits."""
    if seconds < 0.0995:
        return f"{1e3 * seconds:.2g} ms"
    if seconds < 0.9995:
        return f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
