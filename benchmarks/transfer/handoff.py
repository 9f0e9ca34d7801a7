"""What a hand-off costs: how much of it prefill's computing hides, and how long decode waits after the first token.

Stamps come from the prefill worker itself (`kv_transfer.handoff.sender`). `exposed` is the time from the first token,
which the client already has, until decode's word that every byte is verified.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Literal

import uvloop

from benchmarks.common.part import Json, note, run_part, spread
from benchmarks.common.quiet import QuietMachine
from benchmarks.common.workload import draw_prompts
from benchmarks.transfer.handoff_cluster import HandoffCluster, running_handoffs
from kv_transfer.digest import slab_digest
from kv_transfer.handoff.sender import HandoffTimeline

PROMPT_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096)
BUSY_STREAMS = 8
BUSY_PROMPT_TOKENS = (256, 1024)
CACHED_PROMPT_TOKENS = (512, 2048)
AIM = 0.05  # of prefill time


def measure() -> Json:
    rows: list[Json] = []
    quiet = QuietMachine()
    for transport in ("shm", "tcp"):
        rows += uvloop.run(_measure(transport, quiet))
    return {
        "aim": f"exposed at most {AIM:.0%} of prefill time",
        "digest": _digest_cost(),
        "rows": rows,
        "quiet": quiet.report(),
    }


async def _measure(transport: Literal["shm", "tcp"], quiet: QuietMachine) -> list[Json]:
    async with running_handoffs(transport) as cluster:
        rows = [await _idle(cluster, quiet, transport, num_tokens) for num_tokens in PROMPT_TOKENS]
        rows += [await _cached(cluster, quiet, transport, num_tokens) for num_tokens in CACHED_PROMPT_TOKENS]
        rows += [await _busy(cluster, quiet, transport, num_tokens) for num_tokens in BUSY_PROMPT_TOKENS]
    return rows


async def _hand_over(
    cluster: HandoffCluster, quiet: QuietMachine, draw: Callable[[], list[list[int]]]
) -> list[HandoffTimeline]:
    """The prompts drawn, one after the other; other ones where they have to be repeated."""

    async def all_of_them() -> list[HandoffTimeline]:
        return [await cluster.hand_over(prompt) for prompt in draw()]

    return await quiet.run_async(all_of_them)


def _repeats(num_tokens: int) -> int:
    return 7 if num_tokens <= 1024 else 3


async def _idle(cluster: HandoffCluster, quiet: QuietMachine, transport: str, num_tokens: int) -> Json:
    timelines = await _hand_over(cluster, quiet, lambda: draw_prompts(_repeats(num_tokens), num_tokens))
    return _row("decode idle", transport, timelines)


async def _cached(cluster: HandoffCluster, quiet: QuietMachine, transport: str, num_tokens: int) -> Json:
    """The prompt is in prefill's prefix cache but for its last block: hardly any compute to hide behind."""
    prompt = draw_prompts(1, num_tokens)[0]
    await cluster.hand_over(prompt)
    return _row("prompt cached", transport, await _hand_over(cluster, quiet, lambda: [prompt] * 5))


async def _busy(cluster: HandoffCluster, quiet: QuietMachine, transport: str, num_tokens: int) -> Json:
    """Decode computes for others meanwhile: what it does for the hand-off takes turns with that on one core."""
    background = [
        asyncio.create_task(cluster.generate(f"{transport}-{num_tokens}-{number}", prompt, num_tokens=4_000))
        for number, prompt in enumerate(draw_prompts(BUSY_STREAMS, 64))
    ]
    try:
        timelines = await _hand_over(cluster, quiet, lambda: draw_prompts(_repeats(num_tokens), num_tokens))
        return _row(f"decode busy with {BUSY_STREAMS} streams", transport, timelines)
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)


def _row(situation: str, transport: str, timelines: list[HandoffTimeline]) -> Json:
    share = statistics.median(t.exposed_s / t.prefill_s for t in timelines)
    hidden = statistics.median(t.num_hidden_bytes / t.num_bytes for t in timelines)
    exposed_ms = [t.exposed_s * 1e3 for t in timelines]
    first = timelines[0]
    note(
        f"{transport} {first.num_tokens:5d} tokens, {situation}: exposed {statistics.median(exposed_ms):.2f} ms, "
        f"{share:.1%} of prefill; {hidden:.0%} of {first.num_bytes / 1e6:.1f} MB hidden"
    )
    return {
        "transport": transport,
        "situation": situation,
        "prompt_tokens": first.num_tokens,
        "kv_bytes": first.num_bytes,
        "slabs": first.num_slabs,
        "prefill_ms": spread([t.prefill_s * 1e3 for t in timelines]),
        "exposed_ms": spread(exposed_ms),
        "exposed_share_of_prefill": round(share, 4),
        "hidden_share_of_bytes": round(hidden, 4),
        # From the ticket to decode's word; where there is compute to hide behind, compute sets this pace.
        "gb_per_s": spread([t.num_bytes / (t.verified_s - t.begun_s) / 1e9 for t in timelines]),
        "reaches_aim": share <= AIM,
    }


def _digest_cost() -> Json:
    """What digesting one layer of a chunk of 512 tokens costs. Each end digests every byte once."""
    slab = bytearray(512 * 768)
    started = time.perf_counter()
    repeats = 2_000
    for _ in range(repeats):
        slab_digest(slab)
    seconds = (time.perf_counter() - started) / repeats
    return {"name": "xxh3_64", "slab_bytes": len(slab), "gb_per_s": round(len(slab) / seconds / 1e9, 1)}


if __name__ == "__main__":
    run_part("handoff", measure)
