"""Which layout would have served most, simulated from a real log in a process of its own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from cluster.errors import ConflictError, UnavailableError
from cluster.gateway import layout_study
from cluster.gateway.layout_study import LayoutStudy
from cluster.simulation.whatif import best_layout
from tests.cluster.simulation.test_whatif import CLUSTER, lived, written
from tests.support.waiting import HANGS_S


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other tests, what has the least priority takes minutes to start."""
    monkeypatch.setattr(layout_study, "WITH_LEAST_PRIORITY", ())
    monkeypatch.setattr(layout_study, "START_S", 3 * HANGS_S)


async def test_a_log_is_studied_once_for_all_who_ask(tmp_path: Path) -> None:
    requests = lived()[:40]
    study = LayoutStudy(written(tmp_path / "log.jsonl", CLUSTER, requests))
    first, second = await asyncio.gather(study.ask(), study.ask())
    assert first is second
    assert await study.ask() is first, "it is told again, not made again"
    assert study.newest is first
    assert first == json.loads(json.dumps(best_layout(CLUSTER, requests).as_json()))


async def test_who_asks_and_goes_away_does_not_end_it_for_others(tmp_path: Path) -> None:
    study = LayoutStudy(written(tmp_path / "log.jsonl", CLUSTER, lived()[:10]))
    gone, waits = asyncio.create_task(study.ask()), asyncio.create_task(study.ask())
    await asyncio.sleep(0)
    gone.cancel()
    assert (await waits)["num_requests"] == 10


async def test_without_requests_nothing_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match=r"gateway\.request_log"):
        await LayoutStudy().ask()
    for path in (tmp_path / "none.jsonl", written(tmp_path / "empty.jsonl", CLUSTER, [])):
        study = LayoutStudy(path)
        with pytest.raises(UnavailableError, match=r"No such file|no requests"):
            await study.ask()
        assert study.newest is None
