"""What `legato top` draws of what a cluster says."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.command.top import Picture, frame, render

BLOCKS = {"device": {"free": 10, "cached": 0, "held": 90}, "host": {"free": 75, "cached": 25, "held": 0}}


def worker(worker_id: str, role: str, **more: Any) -> dict[str, Any]:
    return {
        "worker_id": worker_id,
        "role": role,
        "num_running": 3,
        "num_waiting": 2,
        "queued_prefill_tokens": 512,
        "num_leases": 4,
        "connected": True,
        "suspect": False,
        "draining": False,
        "tiers": {"blocks": BLOCKS},
        **more,
    }


def figures(p99_ms: float, burn: float) -> dict[str, Any]:
    return {
        "slo_class": "chat",
        "latency_ms": {"ttft": {"p99": p99_ms}, "tpot": {"p99": 9.87}},
        "goodput_requests_per_s": 1.5,
        "tokens_per_s": 80.25,
        "windows": {"short": {"attainment": 0.981, "burn_rate": burn}},
    }


def drawn(workers: list[dict[str, Any]], *, p99_ms: float = 100.0, burn: float = 0.5) -> list[list[tuple[str, str]]]:
    targets = {"chat": {"ttft_ms": 200.0, "tpot_ms": None, "gap_ms": None}, "idle": {"ttft_ms": 1.0}}
    picture = Picture(
        url="http://here",
        cluster={"workers": workers, "wanted": {"prefill": 2}},
        slo={"classes": [figures(p99_ms, burn)], "targets": targets},
        running=7,
        outcomes={"finished": 12.0, "failed": 1.0},
    )
    return [list(line) for line in frame(picture)]


def text(lines: list[list[tuple[str, str]]]) -> list[str]:
    return [render(line, 200, colour=False) for line in lines]


def test_pools_with_their_workers() -> None:
    lines = text(drawn([worker("d-1", "decode"), worker("p-2", "prefill"), worker("p-1", "prefill")]))
    assert lines[0] == "Legato at http://here   3 workers   7 requests running   ended: 1 failed, 12 finished"
    names = [line.split()[0] for line in lines if line[:2] in ("p-", "d-") or line.startswith(("PREFILL", "DECODE"))]
    assert names == ["PREFILL", "p-1", "p-2", "DECODE", "d-1"]
    (row,) = [line for line in lines if line.startswith("d-1")]
    assert row.split()[1:5] == ["3", "2", "512", "4"]
    assert "device [#########.]  90%" in row and "host [==........]   0%" in row
    assert "PREFILL 2 of 2 wanted" in lines and "DECODE 1" in lines


def endpoint(host: str, node_id: str) -> dict[str, Any]:
    return {"endpoint": {"host": host, "port": 1, "node_id": node_id, "offers": []}}


def test_of_several_nodes_each_worker_s_is_named() -> None:
    """By its address, or where several have the same, as on one machine, by Ray's id."""
    places = {"p-1": ("10.0.0.1", "a" * 56), "d-1": ("127.0.0.1", "b" * 56), "d-2": ("127.0.0.1", "c" * 56)}
    workers = [worker(name, "prefill" if name[0] == "p" else "decode", **endpoint(*at)) for name, at in places.items()]
    lines = text(drawn([*workers, worker("d-3", "decode")]))
    named = {line.split()[0]: line.split()[5] for line in lines if line[:2] in ("p-", "d-")}
    assert named == {"p-1": "10.0.0.1", "d-1": "b" * 15, "d-2": "c" * 15, "d-3": "-"}
    heads = [line for line in lines if line.startswith("worker")]
    (row,) = [line for line in lines if line.startswith("p-1")]
    assert {line.index("node") for line in heads} == {row.index("10.0.0.1")}
    assert {line.index("held of KV") for line in heads} == {row.index("device")}
    assert not any("node" in line or "127.0.0.1" in line for line in text(drawn(workers[1:2])))


@pytest.mark.parametrize(("field", "told"), [("suspect", "suspect"), ("draining", "draining")])
def test_a_worker_that_is_not_well(field: str, told: str) -> None:
    (row,) = [line for line in text(drawn([worker("d-1", "decode", **{field: True})])) if line.startswith("d-1")]
    assert row.endswith(told)
    (row,) = [line for line in text(drawn([worker("d-1", "decode", connected=False)])) if line.startswith("d-1")]
    assert row.endswith("not connected")


def test_promises_beside_what_was_measured() -> None:
    lines = drawn([], p99_ms=250.0, burn=3.0)
    (row,) = [line for line in lines if line and line[0][0].startswith("chat")]
    told = render(row, 200, colour=False).split()
    assert told == ["chat", "250", "/", "200", "9.9", "/", "-", "-", "/", "-", "98.1%", "1.50", "80.2", "3.0"]
    assert row[1][1] == "bad" and row[-1][1] == "bad" and row[2][1] == ""
    (row,) = [line for line in drawn([]) if line and line[0][0].startswith("chat")]
    assert row[1][1] == "good" and row[-1][1] == ""
    assert any(line.startswith("idle") and line.endswith("no requests") for line in text(lines))
    assert "No worker is there: none has come up yet, or all are gone." in text(lines)


def test_of_several_models_each_has_its_pools_and_its_promises() -> None:
    workers = [worker(f"d-{index}", "decode", model=model) for index, model in enumerate("abb")]
    rows = [{**figures(p99_ms, 0.5), "model": model} for model, p99_ms in (("a", 111.0), ("b", 222.0))]
    slo = {"classes": rows, "targets": {"chat": {"ttft_ms": 200.0}}}
    cluster = {"workers": workers, "wanted": {"a": {"decode": 2}}}
    lines = text([list(line) for line in frame(Picture(url="", cluster=cluster, slo=slo, running=0, outcomes={}))])
    assert "DECODE of a 1 of 2 wanted" in lines and "DECODE of b 2" in lines
    told = [(line.split()[1], line.split()[-1]) for line in lines if line.startswith("chat")]
    assert told == [("111", "a"), ("222", "b")]


def test_a_line_is_cut_to_the_width_with_and_without_colours() -> None:
    line = [("abc", "bad"), ("def", ""), ("ghi", "good")]
    assert render(line, 5, colour=False) == "abcde"
    assert render(line, 7, colour=True) == "\x1b[31mabc\x1b[0mdef\x1b[32mg\x1b[0m"
    assert render(line, 3, colour=True) == "\x1b[31mabc\x1b[0m"
