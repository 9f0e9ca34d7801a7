"""How long one decision of the global scheduler takes: 1,000 workers, a million indexed blocks, 12,000 requests placed.

Each decision is timed alone on one core, in time of the processor and on the wall: `placed` with the prefixes looked up
and the booking, `turned away` with the outlook, too. Three prompts of ten share a long prefix with others, one of them
with a hundred workers.

Then Mooncake's conversations on as many workers, simulated from the first request to the last with the same scheduler:
its seconds of CPU time and its memory. `--mooncake` (or LEGATO_MOONCAKE_TRACE) names the published trace; without it as
many requests are drawn, with lengths near those of the trace.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Final

from benchmarks.common.part import Json, note, percentiles, run_part
from benchmarks.scheduling.goodput import PUBLISHED
from benchmarks.scheduling.goodput_setting import Layout, Setting, play
from cluster.scheduler.block_index import BlockIndex
from cluster.scheduler.placement.admission import Admission, AdmissionOutcome, AdmissionPolicy
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.policy import DecisionPolicy
from engine.cost_model.roofline import H100_SXM, LLAMA_3_1_8B, kv_capacity_tokens, roofline_cost
from kv_transfer.messages.blocks import BlockIndexSnapshot
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Endpoint
from kv_transfer.messages.scheduling import Place
from kv_transfer.messages.workers import WorkerInfo, WorkerSnapshot
from kv_transfer.worker.cost_report import stated_report

BLOCK_TOKENS: Final = 64
CHUNK_TOKENS: Final = 2048
PREFIX_BLOCKS: Final = 500
WIDE: Final = 100  # workers that hold one common prefix
PER_DECODE: Final = 24  # requests placed, at first
CLOCKS: Final = (time.thread_time, time.perf_counter)


def build(num_workers: int, num_blocks: int) -> tuple[Ledger, BlockIndex]:
    """Half of them prefill workers, with the blocks spread evenly over all."""
    ledger, index = Ledger(), BlockIndex()
    report = stated_report(roofline_cost(LLAMA_3_1_8B, H100_SXM))
    each = num_blocks // num_workers
    for number in range(num_workers):
        role: Role = "prefill" if number % 2 else "decode"
        info = WorkerInfo(
            worker_id=f"{role}-{number}",
            role=role,
            endpoint=Endpoint(host="", port=0, node_id=""),
            pid=0,
            model="simulated",
            compatibility="simulated",
            max_model_len=131_072,
            num_blocks=kv_capacity_tokens(LLAMA_3_1_8B, H100_SXM) // BLOCK_TOKENS,
            block_size=BLOCK_TOKENS,
            layer_groups=1,
            chunk_tokens=CHUNK_TOKENS,
            max_num_seqs=512,
        )
        ledger.register(info, replace(_idle(info), step_cost=report), 0.0)
        common = [_digest(0, block) for block in range(min(PREFIX_BLOCKS, each) if number < WIDE else 0)]
        own = [_digest(number + 1, block) for block in range(each - len(common))]
        index.on_snapshot(
            BlockIndexSnapshot(
                worker_id=info.worker_id,
                epoch=0,
                next_id=0,
                part=0,
                num_parts=1,
                tier="device",
                hashes=b"".join(common + own),
            ),
            0.0,
        )
    return ledger, index


def _idle(info: WorkerInfo) -> WorkerSnapshot:
    return WorkerSnapshot(
        worker_id=info.worker_id,
        sequence_number=1,
        draining=False,
        num_running=0,
        num_waiting=0,
        queued_prefill_tokens=0,
        blocks_available=info.num_blocks,
        num_leases=0,
    )


def _report_all(ledger: Ledger, now: float) -> None:
    for info, before in [*ledger.workers()]:
        num_running = len(ledger.booked_on(info.worker_id)) if info.role == "decode" else 0
        told = replace(before, sequence_number=before.sequence_number + 1, num_running=num_running)
        ledger.heartbeat(told, now)


def _digest(owner: int, block: int) -> bytes:
    return owner.to_bytes(8, "little") + block.to_bytes(8, "little")


def _query(rng: random.Random, number: int, num_workers: int, now: float, ttft_s: float) -> Place:
    num_tokens = min(120_000, max(64, round(rng.lognormvariate(8.5, 1.0))))
    num_blocks, shares = num_tokens // BLOCK_TOKENS, rng.random()
    owner = 0 if shares < 0.1 else rng.randrange(1, num_workers) if shares < 0.3 else num_workers + number
    return Place(
        request_id=f"r{number}",
        attempt=0,
        num_tokens=num_tokens,
        max_new_tokens=1000,
        ttft_s=ttft_s,
        tpot_s=0.1,
        tenant=f"t{number % 50}",
        slo_class="interactive",
        prefix_hashes=b"".join(_digest(owner, block) for block in range(num_blocks)),
    )


def timed_decisions(
    num_workers: int, num_blocks: int, num_decisions: int, clocks: Sequence[Callable[[], float]] = CLOCKS
) -> dict[AdmissionOutcome, list[tuple[float, ...]]]:
    """Seconds of each on each clock, by what became of it. Half of them ask for what no worker can do in time."""
    ledger, index = build(num_workers, num_blocks)
    admission = Admission(ledger, index.longest_prefix, DecisionPolicy(), AdmissionPolicy())
    taken: dict[AdmissionOutcome, list[tuple[float, ...]]] = {outcome: [] for outcome in AdmissionOutcome}
    rng, now = random.Random(0), 0.0
    first = PER_DECODE * num_workers // 2
    for number in range(first + num_decisions):
        now += 0.001
        if number == first:
            for _ in range(2):  # workers have told what they hold of what they computed
                now += 0.5
                _report_all(ledger, now)
        hopeless = number >= first and number % 2 == 1
        query = _query(rng, number, num_workers, now, 0.2 if hopeless else 30.0)
        began = [clock() for clock in clocks]
        verdict = admission.ask(query, now)
        elapsed = tuple(clock() - at for clock, at in zip(clocks, began, strict=True))
        if number >= first:
            taken[verdict.outcome].append(elapsed)
        elif verdict.outcome is AdmissionOutcome.PLACED:
            ledger.first_token(query.request_id, now)  # it decodes
    return taken


def simulated(path: Path | None, num_workers: int, num_requests: int) -> Json:
    """What it takes to simulate them; the process's memory, so it should have done nothing else before."""
    setting = Setting(
        trace="mooncake",
        path=path,
        num_workers=num_workers,
        num_requests=num_requests,
        noise=0.0,
        max_returns=0,
        has_tenants=False,
    )
    layout = Layout(num_prefill=num_workers // 2, num_decode=num_workers - num_workers // 2)
    began = time.process_time()
    overall = play(setting, "legato", layout, 1.0, 0).summary.overall
    cpu_s = time.process_time() - began
    return {
        "requests": path.name if path is not None else "drawn",
        "num_requests": num_requests,
        "workers": str(layout),
        "cpu_s": round(cpu_s, 1),
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "in_time": round(overall.attainment, 4),
    }


def measure(arguments: argparse.Namespace) -> Json:
    report = measure_decisions(arguments)
    # In a process of its own, for its memory.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        whole = pool.submit(simulated, arguments.mooncake, arguments.workers, arguments.requests).result()
    note(f"{whole['num_requests']} requests ({whole['requests']}) simulated: {whole['cpu_s']} s of CPU time")
    return {**report, "simulated": whole}


def measure_decisions(arguments: argparse.Namespace) -> Json:
    gc.collect()
    gc.freeze()  # as the scheduler's process does when it starts
    taken = timed_decisions(arguments.workers, arguments.blocks, arguments.decisions)
    report: Json = {"workers": arguments.workers, "blocks": arguments.blocks}
    named = {
        "all": [*chain.from_iterable(taken.values())],
        **{outcome.name.lower(): taken[outcome] for outcome in taken},
    }
    for name, seconds in named.items():
        if seconds:
            cpu, wall = (percentiles(times, 1e-3) for times in zip(*seconds, strict=True))
            report[name] = {**cpu, "wall": wall}
            of_cpu, of_wall = (f"{found['p50']} ms, P99 {found['p99']} ms" for found in (cpu, wall))
            note(f"{name}: {of_cpu} (wall {of_wall}) of {cpu['samples']}")
    return report


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scheduling.decisions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = os.environ.get("LEGATO_MOONCAKE_TRACE")
    parser.add_argument("--mooncake", type=Path, default=default and Path(default), help="the trace's file")
    parser.add_argument("--requests", type=int, default=PUBLISHED["mooncake"], help="simulated; default: %(default)s")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--decisions", type=int, default=2000)
    return parser.parse_args()


if __name__ == "__main__":
    chosen = _arguments()
    run_part("decisions", lambda: measure(chosen))
