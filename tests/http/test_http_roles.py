"""An operator changes a worker's role over HTTP: what reaches the cluster, and what is answered."""

from __future__ import annotations

import pytest

from cluster.errors import UnavailableError
from cluster.scheduler.role_changes import require_ordered
from kv_transfer.messages.scheduling import RoleAnswer
from tests.support.openai_conformance import Target
from tests.support.scripted_generator import Script, ScriptedGenerator

pytestmark = pytest.mark.model

URL = "/cluster/workers/p-1/role"


def test_an_order_is_accepted(target: Target, shared_generator: ScriptedGenerator) -> None:
    shared_generator.role_changes.clear()
    answer = target.http.post(URL, json={"role": "decode"})
    assert (answer.status_code, answer.json()) == (202, {"worker_id": "p-1", "role": "decode", "status": "changing"})
    assert target.http.post(URL, json={"role": "prefill", "drain_s": 0.5}).status_code == 202
    assert shared_generator.role_changes == [("p-1", "decode", 20.0), ("p-1", "prefill", 0.5)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"role": "both"}, "role"),
        ({}, "role"),
        ({"role": "decode", "drain_s": -1.0}, "drain_s"),
        ({"role": "decode", "drain": 1.0}, "drain"),
    ],
)
def test_a_bad_body_is_refused_by_field(target: Target, body: dict[str, object], param: str) -> None:
    answer = target.http.post(URL, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_what_the_scheduler_says_is_passed_on(target: Target, shared_generator: ScriptedGenerator) -> None:
    for outcome, status, code in (("unknown", 404, "worker_not_found"), ("refused", 409, "role_change_refused")):
        answer = RoleAnswer(ask_id=1, outcome=outcome, reason="p-1 is a teapot")  # type: ignore[arg-type]
        with pytest.raises(Exception, match="p-1 is a teapot") as raised:
            require_ordered(answer)
        shared_generator.script = Script(role_error=raised.value)
        got = target.http.post(URL, json={"role": "decode"})
        error = got.json()["error"]
        assert (got.status_code, error["code"], error["param"]) == (status, code, "worker_id")
        assert "p-1 is a teapot" in error["message"]


def test_how_many_workers_are_wanted_is_told_without_the_name_of_the_only_model(target: Target) -> None:
    assert target.http.get("/cluster").json()["wanted"] == {"decode": 3}


def test_no_layout_is_studied_without_a_log_of_requests(target: Target) -> None:
    assert target.http.get("/cluster").json()["layout"] is None
    answer = target.http.get("/cluster/layout")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_request_log")


def test_without_a_scheduler_it_is_unavailable(target: Target, shared_generator: ScriptedGenerator) -> None:
    shared_generator.script = Script(role_error=UnavailableError("Not now.", retry_after_s=0.5))
    got = target.http.post(URL, json={"role": "decode"})
    assert (got.status_code, got.headers["retry-after"]) == (503, "1")
