"""The planner: its search against known shares, its estimates against arithmetic, its memory against arithmetic too."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.__main__ import main
from cluster.simulation.plan.command import Hardware, Problem, plan_models
from cluster.simulation.plan.demand import Estimate, Targets, busiest, demand_of, estimate
from cluster.simulation.plan.report import LayoutResult
from cluster.simulation.plan.search import Layout, OutOfTime, Search
from cluster.simulation.workload.synthetic import LogNormal, Workload, draw_requests
from cluster.simulation.workload.traces import TraceRequest, paced, swing
from engine.cost_model.roofline import (
    CPU_CORE,
    H100_SXM,
    LLAMA_3_1_8B,
    LLAMA_3_1_70B,
    Device,
    ModelShape,
    predict_memory,
    roofline_cost,
)
from engine.cost_model.step_cost import StepCost

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "scaling.md"
STREAMS, CONTEXT = 64, 2_000


def needs(enough: Callable[[Layout], bool]) -> Callable[[Layout], float]:
    return lambda layout: 1.0 if enough(layout) else 0.8 - 0.1 / layout.num_gpus


def guessed(devices_per_worker: int, num_workers: int, prefill_share: float) -> Estimate:
    prefill = num_workers * prefill_share
    return Estimate(devices_per_worker=devices_per_worker, prefill=prefill, decode=num_workers - prefill)


def searched(achieves: Callable[[Layout], float], *guesses: Estimate, max_gpus: int = 64) -> Search:
    found = Search(achieves, share=0.9, max_gpus=max_gpus)
    found.run(guesses)
    return found


@pytest.mark.parametrize("guess", [1, 4, 11, 12, 13, 40])
@pytest.mark.parametrize("fewest", [1, 2, 12])
def test_the_fewest_workers_are_found_from_any_guess(guess: int, fewest: int) -> None:
    found = searched(needs(lambda layout: layout.num_workers >= fewest), guessed(1, guess, 0.5), max_gpus=64)
    assert found.answer is not None
    assert found.answer.num_workers == fewest
    assert found.is_complete
    cheaper = found.next_cheaper
    assert (cheaper is None) if fewest == 1 else (cheaper is not None and cheaper.num_workers == fewest - 1)


def test_the_split_is_climbed_to() -> None:
    """Only 4 prefill workers beside 2 are enough; the guess was 2 beside 4."""

    def achieves(layout: Layout) -> float:
        if layout.num_workers > 6:
            return 1.0
        return 0.9 - 0.02 * abs(layout.num_prefill - 4) if layout.num_workers == 6 else 0.5

    found = searched(achieves, guessed(1, 6, 0.3), max_gpus=64)
    assert found.answer == Layout(1, 4, 2)


def test_a_higher_degree_is_chosen_where_it_takes_fewer_gpus() -> None:
    enough = needs(lambda layout: layout.num_gpus >= (12 if layout.devices_per_worker == 1 else 8))
    found = searched(enough, guessed(1, 12, 0.5), guessed(2, 6, 0.5), guessed(4, 4, 0.5), max_gpus=64)
    assert found.answer is not None
    assert (found.answer.num_gpus, found.answer.devices_per_worker) == (8, 2)
    assert all(layout.num_gpus < 16 for layout in found.shares if layout.devices_per_worker == 4)


def test_where_nothing_is_enough_the_best_is_known() -> None:
    found = searched(needs(lambda layout: False), guessed(2, 3, 0.5), max_gpus=9)
    assert found.answer is None
    assert found.is_complete
    assert found.next_cheaper is not None
    assert found.next_cheaper.num_gpus == 8


def test_when_time_is_over_the_best_so_far_stands() -> None:
    tried: list[Layout] = []

    def achieves(layout: Layout) -> float:
        tried.append(layout)
        if len(tried) > 1:
            raise OutOfTime
        return 1.0

    found = searched(achieves, guessed(1, 9, 0.5), max_gpus=64)
    assert (found.answer, found.is_complete) == (tried[0], False)


def at(arrival_s: float, content: tuple[int, ...] = (), prompt_tokens: int = 1000) -> TraceRequest:
    return TraceRequest(
        request_id=f"r{arrival_s}",
        arrival_s=arrival_s,
        prompt_tokens=prompt_tokens,
        output_tokens=100,
        content=content,
        content_tokens=400,
    )


def test_the_busiest_stretch() -> None:
    requests = [at(t) for t in (0.0, 5.0, 6.0, 7.0, 20.0)]
    assert [r.arrival_s for r in busiest(requests, 3)] == [5.0, 6.0, 7.0]
    assert busiest(requests, 9) == requests


def test_what_a_trace_asks_for_leaves_out_what_was_computed_before() -> None:
    demand = demand_of([at(0.0, (1, 2, 3)), at(10.0, (1, 2, 4)), at(20.0, (1, 2, 3))])
    assert demand.prompts == ((1000, 0), (200, 800), (1, 999))
    assert demand.requests_per_s == pytest.approx(3 / 20)
    assert demand.context_tokens == pytest.approx(1050)
    with pytest.raises(ValueError, match="fewer than two requests"):
        demand_of([at(0.0)])


def test_decode_workers_by_littles_law() -> None:
    """10 requests/s of 100 tokens; 50 ms hold a batch of 40, hence 800 tokens/s on each of 1.25 workers."""
    cost = StepCost(base_s=0.01, prefill_token_s=0.0, prefill_pair_s=0.0, decode_s=0.001, context_token_s=0.0)
    demand = demand_of([at(0.1 * i) for i in range(1001)])
    targets = Targets(ttft_s=1.0, tpot_s=0.05, share=0.9)
    guess = estimate(demand, targets, cost, chunk_tokens=2048, kv_tokens=10**6, max_num_seqs=256)
    assert guess.decode == pytest.approx(1.25, rel=0.01)
    assert guess.prefill == pytest.approx(0.1, rel=0.01)  # 10/s of 10 ms each
    assert (guess.workers, guess.reachable) == (2, 1.0)
    steady = Targets(ttft_s=1.0, tpot_s=0.05, gap_s=0.03, share=0.9)  # hold 20, hence 667 tokens/s
    tight = estimate(demand, steady, cost, chunk_tokens=2048, kv_tokens=10**6, max_num_seqs=256)
    assert tight.decode == pytest.approx(1.5, rel=0.01) and tight.reachable == 1.0
    short = estimate(demand, targets, cost, chunk_tokens=2048, kv_tokens=10_500, max_num_seqs=256)
    assert short.decode == pytest.approx(1000 / (10 / 0.02), rel=0.01)  # room for 10 at once


def test_more_prompts_take_more_prefill_workers() -> None:
    """1 s of work each: at 4 /s more than 4 workers, and more again where the wait must be shorter."""
    cost = StepCost(base_s=0.0, prefill_token_s=0.001, prefill_pair_s=0.0, decode_s=0.0001, context_token_s=0.0)
    demand = demand_of([at(0.25 * i) for i in range(400)])

    def workers(ttft_s: float) -> float:
        targets = Targets(ttft_s=ttft_s, tpot_s=0.05, share=0.9)
        return estimate(demand, targets, cost, chunk_tokens=2048, kv_tokens=10**6, max_num_seqs=256).prefill

    assert 4 < workers(20.0) <= 6 < workers(2.0) < 20


def test_a_layout_is_enough_or_not() -> None:
    requests = list(draw_requests(Workload(requests_per_s=40.0, num_requests=100), 0))
    problem = Problem(
        requests, Targets(ttft_s=1.0, tpot_s=0.05, share=0.9), Hardware(model=LLAMA_3_1_8B, device=H100_SXM)
    )
    few, many = (problem.play(layout).summary.overall.attainment for layout in (Layout(1, 0, 1), Layout(1, 2, 3)))
    assert few < 0.9 < many
    stalling = replace(problem.targets, gap_s=1e-3)  # no step is as short
    played = Problem(requests, stalling, problem.hardware).play(Layout(1, 2, 3))
    result = LayoutResult.of(Layout(1, 2, 3), played)
    assert result.share <= 1.0 - result.late_gaps < 0.5
    assert problem.play(Layout(1, 0, 1), load=0.1).summary.overall.attainment > few


def test_drafts_keep_promises_that_no_step_alone_keeps() -> None:
    """A step reads 16 GB, which takes 6 ms."""
    requests = list(draw_requests(Workload(requests_per_s=4.0, num_requests=50), 0))
    targets = Targets(ttft_s=1.0, tpot_s=0.005, share=0.9)
    plain = Hardware(model=LLAMA_3_1_8B, device=H100_SXM)
    assert Problem(requests, targets, plain).estimate(1).reachable == 0.0
    drafting = Problem(requests, targets, replace(plain, acceptance=0.8))
    assert drafting.estimate(1).reachable > 0.9
    assert drafting.play(Layout(1, 1, 1)).summary.overall.attainment > 0.9


def test_simulations_end_with_the_time_for_them() -> None:
    requests = list(draw_requests(Workload(requests_per_s=4.0, num_requests=50), 0))
    hardware = Hardware(model=LLAMA_3_1_8B, device=H100_SXM)
    seconds = iter(range(100))
    targets = Targets(ttft_s=1.0, tpot_s=0.05, share=0.9)
    problem = Problem(requests, targets, hardware, deadline=20.0, clock=lambda: next(seconds))
    with pytest.raises(OutOfTime):
        problem.play(Layout(1, 1, 1))
    assert next(seconds) == 22


def shape(name: str, layers: int, hidden: int, intermediate: int, heads: int, *, tied: bool = False) -> ModelShape:
    """One of Qwen3's."""
    return replace(
        LLAMA_3_1_8B,
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        vocab_size=151_936,
        tied_embeddings=tied,
    )


SMOLLM2 = replace(shape("SmolLM2-135M", 30, 576, 1536, 9, tied=True), num_kv_heads=3, head_dim=64, vocab_size=49_152)
QWEN3 = [
    shape("Qwen3-1.7B", 28, 2048, 6144, 16, tied=True),
    shape("Qwen3-4B", 36, 2560, 9728, 32, tied=True),
    shape("Qwen3-8B", 36, 4096, 12288, 32),
    shape("Qwen3-14B", 40, 5120, 17408, 40),
    shape("Qwen3-32B", 64, 5120, 25600, 64),
]


def room(model: ModelShape, gigabytes: int, num_devices: int = 1) -> int:
    """Tokens of KV beside the weights, 0 where these do not fit."""
    gpu = replace(H100_SXM, memory_bytes=gigabytes * 1e9)
    with contextlib.suppress(ValueError):
        return predict_memory(model, gpu, num_devices=num_devices, token_budget=2304, max_num_seqs=256).kv_tokens
    return 0


def speeds(model: ModelShape, device: Device, num_devices: int = 1) -> tuple[float, float, float]:
    """Prompt tokens a second, and the ms of a step of one stream and of STREAMS."""
    cost = roofline_cost(model, device, num_devices=num_devices)
    prompt_s = cost.base_s + 2048 * cost.prefill_token_s + 2048**2 / 2 * cost.prefill_pair_s
    one, many = (1e3 * (cost.base_s + n * (cost.decode_s + CONTEXT * cost.context_token_s)) for n in (1, STREAMS))
    return 2048 / prompt_s, one, many


def rounded(number: float) -> str:
    """To two digits that count."""
    return f"{float(f'{number:.2g}'):,g}"


def row_of_the_guide(model: ModelShape) -> str:
    """What is predicted of a model. On four H100 where one has no room for the streams."""
    rooms = [room(model, 24), room(model, 48), room(model, 80), room(model, 141), room(model, 80, 4)]
    number = 1 if rooms[2] >= STREAMS * CONTEXT else 4
    prompt, one, many = map(rounded, speeds(model, H100_SXM, number))
    told = [f"{tokens // 1000:,}" if tokens else "" for tokens in rooms]
    sizes = f"{model.weight_bytes / 1e9:.1f} | {model.kv_bytes_per_token / 1e3:.0f}"
    return f"| {model.name} | {sizes} | {' | '.join(told)} | {'four: ' * (number > 1)}{prompt} | {one}, {many} |"


def test_the_guide_tells_what_is_predicted() -> None:
    rows = [row_of_the_guide(model) for model in (*QWEN3, LLAMA_3_1_8B, LLAMA_3_1_70B)]
    cores = [
        f"{model.name}'s prompts at {prompt} tokens/s and a token in {one} ms"
        for model, (prompt, one, _) in ((m, map(rounded, speeds(m, CPU_CORE))) for m in (SMOLLM2, QWEN3[0]))
    ]
    text = GUIDE.read_text(encoding="utf-8")
    assert [told for told in (*rows, *cores) if told not in text] == []


def plan(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    drawn = ["--format", "synthetic", "--requests", "60", "--rate", "12"]
    monkeypatch.setattr(sys, "argv", ["cluster", "plan", *drawn, *arguments])
    return main()


def test_the_command_plans(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(monkeypatch, "--tpot-ms", "14", "--share", "0.97", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_complete"]
    assert report["answer"]["share"] >= 0.97 > report["next_cheaper"]["share"]
    assert report["answer"]["num_gpus"] > report["next_cheaper"]["num_gpus"]
    assert report["at_load"]["0.8"] >= report["at_load"]["1.2"]
    assert report["memory"]["decode"]["weights_bytes"] > 0
    assert plan(monkeypatch, "--tpot-ms", "14", "--gap-ms", "1000", "--share", "0.97") == 0
    out = capsys.readouterr().out
    assert "TTFT 2 s, TPOT 14 ms, gaps 1000 ms for 97% of them" in out
    assert "fails: only" in out
    assert "KV tokens" in out


def test_the_command_says_what_is_impossible(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert plan(monkeypatch, "--gap-ms", "0.5") == plan(monkeypatch, "--tpot-ms", "0.5") == 1
    assert "even an idle worker serves only 0.0% in time" in capsys.readouterr().err
    assert plan(monkeypatch, "--tpot-ms", "14", "--rate", "60", "--max-gpus", "1") == 3
    assert "No layout of up to 1 GPUs is enough" in capsys.readouterr().out
    assert plan(monkeypatch, "--time-s", "0") == 3
    assert "Time was over after 0 layouts" in capsys.readouterr().out
    assert plan(monkeypatch, "--model", str(tmp_path)) == 1
    assert "nor a folder with a config.json" in capsys.readouterr().err


# --- several models ---


def swinging_problem(number: int, period_s: float = 400.0) -> Problem:
    """The requests for one of two models, whose demand swings from one to the other, on a device that takes five
    seconds for a prompt."""
    slow = replace(H100_SXM, flops=H100_SXM.flops / 40, memory_bytes_per_s=H100_SXM.memory_bytes_per_s / 8, name="slow")
    workload = Workload(
        requests_per_s=0.28,
        num_requests=1000,
        turn=LogNormal(median=3500, sigma=0.3, most=7000),
        output=LogNormal(median=8, sigma=0.3, most=24),
        num_systems=1,
        system_tokens=0,
        follow_up=0.0,
    )
    coming = paced(draw_requests(workload, number), swing(period_s, number / 2))
    requests = [request for request in coming if request.arrival_s < period_s]
    targets = Targets(ttft_s=30.0, tpot_s=0.5, share=0.95)
    return Problem(requests, targets, Hardware(model=LLAMA_3_1_8B, device=slow, block_size=512))


def test_workers_that_follow_the_demand_are_fewer() -> None:
    """Four serve 95 % of the peak of each model, where pools of their own take six."""
    problems = {name: swinging_problem(number) for number, name in enumerate("ab")}
    plan = plan_models(problems, (1,), limit=40, change_s=1.0, max_gpus=16)
    assert plan.is_enough and plan.is_complete
    assert plan.changing is not None and plan.next_cheaper is not None and plan.num_gpus is not None
    assert plan.changing.num_gpus <= 4 < plan.num_gpus
    assert plan.next_cheaper.num_gpus == plan.changing.num_gpus - 1
    assert plan.changing.share >= 0.95 > plan.next_cheaper.share
    assert plan.changing.num_changes > 0
    assert all(result.layout.num_decode >= 1 for result in plan.changing.results.values())
    assert "GPUs are enough where workers change their model in 1 s" in plan.text()


TWO = ["--model", "llama-3.1-8b", "--model", "llama-3.1-8b", "--tpot-ms", "14", "--tensor-parallel", "1"]


def test_each_model_has_the_plan_that_it_has_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--requests", "30", "--json")
    assert plan(monkeypatch, *TWO, *few) == 0
    told = json.loads(capsys.readouterr().out)
    for seed, (name, report) in enumerate(told["by_model"].items()):
        assert plan(monkeypatch, *TWO[2:], "--seed", str(seed), *few) == 0
        assert {**json.loads(capsys.readouterr().out), "model": name} == report
    assert told["num_gpus"] == sum(report["answer"]["num_gpus"] for report in told["by_model"].values())
    assert (told["changing"], told["is_complete"]) == (None, True)


def test_the_command_plans_for_several_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, *TWO, "--swing", "10", "--model-flips", "0.5", "--requests", "20") == 0
    out = capsys.readouterr().out
    assert "llama-3.1-8b on H100" in out and "llama-3.1-8b#2 on H100" in out
    assert "GPUs where workers keep their model." in out
    assert plan(monkeypatch, *TWO, "--max-gpus", "1", "--requests", "20") == 3
    assert "All models: 2 GPUs where workers keep their model, more than --max-gpus 1." in capsys.readouterr().out


def test_each_of_several_models_has_a_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In a format of its own; one without a trace is told before anything is planned."""
    mooncake, azure = tmp_path / "requests.jsonl", tmp_path / "requests.csv"
    mooncake.write_text(
        "".join(
            f'{{"timestamp": {500 * n}, "input_length": 800, "output_length": 20, "hash_ids": [{n}, {n + 99}]}}\n'
            for n in range(12)
        )
    )
    rows = [f"2023-11-16 18:15:{n:02}.0000000,{900 + n},{15 + n}\n" for n in range(8)]
    azure.write_text("".join(["TIMESTAMP,ContextTokens,GeneratedTokens\n", *rows]))
    options = ["cluster", "plan", "--trace", str(mooncake), *TWO]
    monkeypatch.setattr(
        sys, "argv", [*options, "--trace", str(azure), "--format", "mooncake", "--format", "azure", "--json"]
    )
    assert main() == 0
    told = json.loads(capsys.readouterr().out)["by_model"]
    assert [report["demand"]["requests"] for report in told.values()] == [12, 8]
    monkeypatch.setattr(sys, "argv", options)
    assert main() == 1
    assert "for 2 models there are 1 traces" in capsys.readouterr().err
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    monkeypatch.setattr(sys, "argv", [*options, "--trace", str(azure), "--format", "mooncake", "--format", "azure"])
    assert main() == 1
    assert "error: llama-3.1-8b#2: nothing can be planned for: the trace holds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--model-flips", "1"], "give --model several times"),
        (["--model", "llama-3.1-8b", "--model", "nowhere"], "nowhere is neither one of"),
        ([*TWO, "--gap-ms", "0.5"], "llama-3.1-8b: no number of workers meets the targets"),
        ([*TWO, *2 * ["--format", "synthetic"]], "each trace a --format"),
    ],
)
def test_what_cannot_be_planned_for_several_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], advice: str
) -> None:
    assert plan(monkeypatch, *options) == 1
    assert advice in capsys.readouterr().err.splitlines()[-1]
