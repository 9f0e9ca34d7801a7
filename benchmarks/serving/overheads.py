"""What a first and a second token cost beside steps: of lone requests on an idle cluster, by size of the prompt.

Knows what the workers say their steps take; what is beyond that is HTTP, gateway, messages and the hand-off.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean, median

import uvloop

from benchmarks.common.cluster_watch import ClusterWatch
from benchmarks.common.part import Json
from benchmarks.common.sse_client import stream_one
from benchmarks.common.workload import MODEL, draw_prompts
from cluster.load.timing import RequestTiming
from engine.cost_model.step_cost import StepCost, StepWork
from kv_transfer.messages.fields import Role

PROMPT_TOKENS = (40, 120, 200, 280, 360, 440)
OUTPUT_TOKENS = 8
REPEATS = 4


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds. `gateway_s`: of a first token, beyond the prompt's step. `handoff_s` and for each prompt token
    `handoff_token_s`: between the first two tokens, beyond decode's step."""

    gateway_s: float
    handoff_s: float
    handoff_token_s: float

    def describe(self) -> Json:
        return {name: float(f"{seconds:.3g}") for name, seconds in asdict(self).items()}

    def __str__(self) -> str:
        return (
            f"overheads: {1e3 * self.gateway_s:.1f} ms of HTTP and gateway in a first token, hand-off "
            f"{1e3 * self.handoff_s:.1f} ms and {1e6 * self.handoff_token_s:.1f} us for each token of the prompt"
        )


def lone_overheads(port: int, watch: ClusterWatch, computing: Role = "prefill") -> Overheads:
    """Measure one request after the other; their steps' costs are those that the workers report while they run.
    `computing`: the role of those that compute prompts."""
    lone = uvloop.run(_lone(port))
    watch.look()
    return overheads_of(lone, watch.worker(computing).cost, watch.worker("decode").cost)


def overheads_of(lone: list[tuple[int, RequestTiming]], prefill: StepCost, decode: StepCost) -> Overheads:
    """`lone`: tokens of the prompt, and when its answer came."""
    gateway = [timing.ttft_s - prefill.prefill_s(num_tokens) for num_tokens, timing in lone]
    gaps = [
        (num_tokens, timing.gaps_s[0] - decode.step_s(StepWork(decodes=1, context_tokens=num_tokens)))
        for num_tokens, timing in lone
        if timing.gaps_s
    ]
    token_s = max(0.0, _slope(gaps))
    return Overheads(
        gateway_s=max(0.0, median(gateway)),
        handoff_s=max(0.0, median(gap - token_s * num_tokens for num_tokens, gap in gaps)),
        handoff_token_s=token_s,
    )


async def _lone(port: int) -> list[tuple[int, RequestTiming]]:
    return [
        (num_tokens, await stream_one(port, MODEL, draw_prompts(1, num_tokens)[0], OUTPUT_TOKENS))
        for _ in range(REPEATS)
        for num_tokens in PROMPT_TOKENS
    ]


def _slope(points: list[tuple[int, float]]) -> float:
    """The slope by least squares over the medians of equal sizes."""
    medians = {x: median(y for other, y in points if other == x) for x, _ in points}
    mean_x, mean_y = fmean(medians), fmean(medians.values())
    return sum((x - mean_x) * (y - mean_y) for x, y in medians.items()) / sum((x - mean_x) ** 2 for x in medians)
