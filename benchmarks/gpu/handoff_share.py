"""`python -m benchmarks.gpu.handoff_share`: what a hand-off of a long prompt leaves exposed, between two processes.

Llama-3.1-8B's shape, prefill and decode on one GPU, by that GPU's memory and by shared memory of the host. Stamps are
the prefill worker's own; see `benchmarks.transfer.handoff`.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common.part import spread
from benchmarks.common.workload import draw_prompts
from benchmarks.gpu.figures import Figure, Report, run_step
from benchmarks.gpu.random_model import LLAMA_8B, RandomModel, checkpoint
from benchmarks.transfer.handoff_cluster import running_handoffs
from benchmarks.transfer.handoff_worker import Transporting
from kv_transfer.handoff.sender import HandoffTimeline

AIM = 0.02  # of prefill time
NAMES = {"device": "cuda_ipc", "shm": "shm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Chunks and slabs as in `ray_configs/gpu_1p1d.yaml`."""

    model: RandomModel = LLAMA_8B
    ways: tuple[Transporting, ...] = ("device", "shm")
    prompt_tokens: int = 8192
    chunk_tokens: int = 8192
    slab_bytes: int = 32 << 20
    repeats: int = 5
    block_size: int = 16

    @property
    def kv_blocks(self) -> int:
        """Enough blocks for two prompts at once: one may still be acknowledged while the next one comes."""
        return 2 * (self.prompt_tokens // self.block_size + 8)


def measure(report: Report, device: torch.device, scale: Scale = Scale()) -> None:
    folder = checkpoint(scale.model, device)
    report.note(model=scale.model.shape.name, prompt_tokens=scale.prompt_tokens, chunk_tokens=scale.chunk_tokens)
    for way in scale.ways:
        _judge(report, way, asyncio.run(_handed_over(way, folder, device, scale)))


async def _handed_over(way: Transporting, folder: Path, device: torch.device, scale: Scale) -> list[HandoffTimeline]:
    """Hand prompts over, one after the other. The first pays for what is made once."""
    async with running_handoffs(
        way,
        model_ref=str(folder),
        dtype=scale.model.dtype_name,
        device=str(device),
        kv_blocks=scale.kv_blocks,
        chunk_tokens=scale.chunk_tokens,
        slab_bytes=scale.slab_bytes,
    ) as cluster:
        prompts = draw_prompts(scale.repeats + 1, scale.prompt_tokens, below=scale.model.shape.vocab_size)
        return [await cluster.hand_over(prompt) for prompt in prompts][1:]


def _judge(report: Report, way: Transporting, timelines: list[HandoffTimeline]) -> None:
    name, first = NAMES[way], timelines[0]
    exposed_ms = [timeline.exposed_s * 1e3 for timeline in timelines]
    prefill_ms = [timeline.prefill_s * 1e3 for timeline in timelines]
    share = statistics.median(timeline.exposed_s / timeline.prefill_s for timeline in timelines)
    report.note(
        **{
            f"{name}_exposed_ms": spread(exposed_ms),
            f"{name}_prefill_ms": spread(prefill_ms),
            f"{name}_bytes": first.num_bytes,
            f"{name}_slabs": first.num_slabs,
        }
    )
    report.add(
        Figure(name=f"prefill of {first.num_tokens} tokens, {name}", value=statistics.median(prefill_ms), unit="ms")
    )
    report.add(Figure(name=f"exposed by {name}", value=statistics.median(exposed_ms), unit="ms"))
    report.add(Figure(name=f"exposed by {name}, of prefill", value=share, unit="share", at_most=AIM))


if __name__ == "__main__":
    sys.exit(run_step("exposed", measure))
