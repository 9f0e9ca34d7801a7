"""The board's sentences about decisions that a scheduler really made, and its differences between pictures."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.http.board.board import difference
from cluster.http.board.picture import decision_sentence, short_request, short_worker
from cluster.scheduler.placement.admission import AdmissionPolicy
from cluster.scheduler.scheduler import GlobalScheduler
from kv_transfer.messages.scheduling import Queued
from tests.cluster.scheduler.scheduler_world import TARGETS, measured, place, placed, refused
from tests.support.clusters.worker_reports import CLOSE

PICTURES = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from("abcd"), PICTURES, max_size=4)


def merged(old: Any, patch: Any) -> Any:
    """As RFC 7396 says."""
    if not isinstance(patch, dict):
        return patch
    found = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = merged(found.get(name), value)
    return found


@given(OBJECTS, OBJECTS)
def test_a_difference_makes_the_new_picture_of_the_old_one(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert merged(old, difference(old, new)) == new
    assert difference(old, old) == {}


def test_a_difference_holds_what_differs_and_no_more() -> None:
    old = {
        "workers": {"a": {"running": 1, "state": "up"}, "b": {"running": 2}},
        "requests": {"r": {"marks": [[1, "queue"]]}},
    }
    new = {"workers": {"a": {"running": 3, "state": "up"}}, "requests": {"r": {"marks": [[1, "queue"]]}}}
    assert difference(old, new) == {"workers": {"a": {"running": 3}, "b": None}}


def _said(scheduler: GlobalScheduler) -> str:
    [newest] = scheduler.log.newest(1)
    return decision_sentence(json.loads(newest.as_json(0.0)))


def test_a_placement_is_told_with_its_figures_and_the_next_best() -> None:
    scheduler = measured("p-1", "p-2", "d-1")
    answer = placed(scheduler, "chatcmpl-abcdef-0", num_tokens=1000, **TARGETS)
    said = _said(scheduler)
    assert answer.prefill is not None
    assert said.startswith(
        f"{TARGETS['slo_class']} …cdef (1000 tokens) is computed by {short_worker(answer.prefill)} and goes on in d 1;"
    )
    assert "first token after 1.0" in said and "% likely in time" in said and "(p 2: " in said, said


def test_other_ends_of_a_decision() -> None:
    alone = measured("d-1")
    placed(alone, "r", num_tokens=100, attempt=1)
    assert "…r (100 tokens, attempt 2) runs on d 1 alone" in _said(alone)
    assert "(d" not in _said(alone), "there was no other candidate"
    placed(alone, "late", num_tokens=5000, **TARGETS)
    assert _said(alone).endswith("its targets cannot be met, and do not count.")
    refused(alone, "long", num_tokens=99_000)
    assert _said(alone).endswith(
        "turned away: no decode worker holds more than 10000 tokens; it never could be served."
    )
    nobody = measured()
    refused(nobody, "r")
    assert _said(nobody).endswith("turned away: no decode worker is ready; it may come back in 1 s.")
    crowded = measured("p-1", "d-1", admission=AdmissionPolicy(max_contenders=10))
    for n in range(5):  # they just keep their pace
        placed(crowded, f"close-{n}", **CLOSE)
        crowded.first_token(f"close-{n}", 0.0)
    assert isinstance(crowded.place(place("late", **CLOSE), 0.0), Queued)
    assert _said(crowded).endswith("…late (100 tokens) waits for room.")


@pytest.mark.parametrize(
    ("long", "short"),
    [("chatcmpl-0123456789abcdef-0", "…cdef"), ("cmpl-0123456789abcdef-3", "…cdef/3"), ("r", "…r")],
)
def test_short_names_of_requests(long: str, short: str) -> None:
    assert short_request(long) == short


def test_short_names_of_workers_are_what_kill_takes() -> None:
    assert (short_worker("decode-x1y2z3ab-4711.1"), short_worker("scripted")) == ("decode 4711.1", "scripted")
