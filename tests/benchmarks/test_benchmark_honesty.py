"""The parts of the simulator's honesty that need no cluster: what is sent, what is learned from lone requests."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest

from benchmarks.common.cluster_process import cluster_document
from benchmarks.common.workload import describe_requests, in_time
from benchmarks.serving.overheads import Overheads, overheads_of
from benchmarks.serving.simulator_honesty import LAYOUTS, NUM_WARM, compared
from benchmarks.serving.traced_load import OUTPUT_TOKENS, PROMPT_TOKENS, RUN_TOKENS, drawn, shrunk, stretched, timed
from cluster.config.settings import LegatoConfig
from cluster.gateway.request_log import LoggedRequest
from cluster.load.timing import RequestTiming
from cluster.simulation.records import Gaps, RequestRecord
from cluster.simulation.workload.prompts import content_hashes
from cluster.simulation.workload.traces import TraceRequest
from cluster.slo.classes import NO_TARGETS, SloClass
from engine.cost_model.step_cost import StepCost, StepWork

COST = StepCost(base_s=0.02, prefill_token_s=1e-3, prefill_pair_s=1e-6, decode_s=5e-3, context_token_s=1e-5)


def test_equal_names_are_equal_tokens_and_others_differ() -> None:
    long = TraceRequest(request_id="a", arrival_s=0.0, prompt_tokens=2048, output_tokens=400, content=(1, 2, 3, 4))
    other = TraceRequest(request_id="b", arrival_s=9.0, prompt_tokens=1536, output_tokens=10, content=(1, 2, 5))
    first, second = timed(stretched(shrunk([long, other], 5), 2.0))
    assert (first.request.prompt_tokens, first.output_tokens, first.arrival_s) == (64, 40, 0.0)
    assert (second.request.prompt_tokens, second.output_tokens, second.arrival_s) == (48, 8, 18.0)
    assert first.prompt[: 2 * RUN_TOKENS] == second.prompt[: 2 * RUN_TOKENS]
    assert all(x != y for x, y in zip(first.prompt[2 * RUN_TOKENS :], second.prompt[2 * RUN_TOKENS :], strict=False))


def test_drawn_requests_fit_the_cpu_and_share_prefixes() -> None:
    requests = shrunk(drawn(), 200)
    assert all(r.prompt_tokens in PROMPT_TOKENS and r.output_tokens in OUTPUT_TOKENS for r in requests)
    assert all(one.arrival_s <= other.arrival_s for one, other in pairwise(requests))
    blocks = [content_hashes(request, number, 16) for number, request in enumerate(requests)]
    assert len({digest for named in blocks for digest in named}) < 0.9 * sum(map(len, blocks))


@pytest.mark.parametrize(("layout", "pools"), [("apart", (1, 1)), ("colocated", (0, 1)), ("automatic", (0, 2))])
def test_each_layout_is_one_that_a_cluster_can_have(layout: str, pools: tuple[int, int]) -> None:
    """And no more threads compute than the two cores have."""
    settings = cluster_document(LAYOUTS[layout].settings)["applications"][0]["args"]
    config = LegatoConfig.model_validate(settings)
    assert (config.prefill.replicas, config.decode.replicas) == pools
    assert (config.workers is not None) == (layout == "automatic")
    threads = {"prefill": config.prefill.threads, "decode": config.decode.threads}
    assert sum(number * (count or 0) for number, count in zip(pools, threads.values(), strict=True)) == 2


@pytest.mark.parametrize("handoff_token_s", [0.0, 2e-5])
def test_what_lone_requests_take_beside_steps_is_found(handoff_token_s: float) -> None:
    truth = Overheads(gateway_s=0.03, handoff_s=0.01, handoff_token_s=handoff_token_s)
    lone = []
    for num_tokens in (40, 200, 400):
        first_s = truth.gateway_s + COST.prefill_s(num_tokens)
        second_s = first_s + truth.handoff_s + num_tokens * handoff_token_s
        second_s += COST.step_s(StepWork(decodes=1, context_tokens=num_tokens))
        timing = RequestTiming(
            sent_s=0.0, first_s=first_s, last_s=second_s, num_tokens=2, arrivals_s=[first_s, second_s]
        )
        lone += [(num_tokens, timing)] * 3
    found = overheads_of(lone, COST, COST)
    assert found.gateway_s == pytest.approx(truth.gateway_s)
    assert found.handoff_s == pytest.approx(truth.handoff_s)
    assert found.handoff_token_s == pytest.approx(handoff_token_s, abs=1e-9)


def test_only_what_comes_after_the_warm_up_is_judged() -> None:
    """At first everything is ten times as slow in life, then a fifth slower than simulated."""
    log, records = [], []
    for number in range(2 * NUM_WARM):
        seconds = 10.0 if number < NUM_WARM else 1.2
        log.append(
            LoggedRequest(
                request_id=f"r{number}",
                arrival_s=float(number),
                prompt_tokens=10,
                output_tokens=11,
                ttft_s=seconds,
                tpot_s=0.1 * seconds,
            )
        )
        record = RequestRecord(
            request_id=f"r{number}",
            slo=NO_TARGETS.classes[0],
            first_arrival_s=float(number),
            arrival_s=float(number),
            prompt_tokens=10,
            output_tokens=11,
        )
        record.first_token_s, record.end_s = number + 1.0, number + 2.0
        record.gaps = Gaps.between([number + 1.0 + 0.1 * index for index in range(11)])
        records.append(record)
    rows = compared(log, records, [0.12] * 10 * NUM_WARM)
    assert [row["error"] for row in rows] == [
        *[pytest.approx(1 / 1.2 - 1, abs=1e-4)] * 4,
        *[pytest.approx(1 / 1.2 - 1, abs=0.01)] * 2,
    ]
    assert not any(row["in_aim"] for row in rows), "a sixth is more than the aim at any quantile"


def answer(*gaps_s: float, ttft_s: float = 1.0) -> RequestTiming:
    """Tokens after these gaps, each in a piece of its own."""
    arrivals = [*accumulate(gaps_s, initial=5.0 + ttft_s)]
    return RequestTiming(
        sent_s=5.0, first_s=arrivals[0], last_s=arrivals[-1], num_tokens=len(arrivals), arrivals_s=arrivals
    )


def test_what_is_in_time_by_requests_and_by_tokens() -> None:
    """A long answer that is steady, a short one that stalls, a slow one without a stall, and a late one."""
    promise = SloClass(name="chat", ttft_s=2.0, tpot_s=0.1, gap_s=0.2)
    answers = [
        answer(*[0.05] * 59),
        answer(*[0.01] * 8, 0.7),
        answer(*[0.15] * 19),
        answer(*[0.05] * 9, ttft_s=3.0),
    ]
    found = describe_requests(answers, promise)
    assert (
        found["in_time"]
        == in_time(answers, promise)
        == {
            "ttft_ms": 2000.0,
            "tpot_ms": 100.0,
            "gap_ms": 200.0,
            "ttft_and_tpot": {"requests": 0.5, "tokens": 0.7},
            "ttft_and_gap": {"requests": 0.5, "tokens": 0.8},
        }
    )
    assert found["gap_ms"] == {"p50": 50.0, "p99": 700.0, "samples": 96}
    for unseen in answers:
        unseen.arrivals_s = []
    assert describe_requests(answers).keys() == {"ttft_ms", "tpot_ms"}
