"""Whether tokens are the same when prefill and decode are two processes.

`python -m benchmarks.gpu.handoff_exactness WAY DEVICE` hands over by that way and no other. Tokens are compared with
those of one process on the CPU, which are Hugging Face's. What each hand-off left exposed is printed beside them, since
it costs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import cast

import uvloop

from benchmarks.common.workload import MODEL, draw_prompts
from benchmarks.gpu.exactness import generated, model_or_stand_in
from benchmarks.transfer.handoff_cluster import running_handoffs
from benchmarks.transfer.handoff_worker import Transporting

PROMPT_TOKENS = (64, 1000, 4000)


def handed_over_tokens(
    transport: Transporting, prompts: Sequence[list[int]], *, num_tokens: int, model_ref: str = MODEL, device: str
) -> list[list[int]]:
    """Greedy tokens in float32 of prompts that were each handed over by this way and no other."""

    async def run() -> list[list[int]]:
        outputs: list[list[int]] = []
        async with running_handoffs(transport, model_ref=model_ref, dtype="float32", device=device) as cluster:
            for prompt in prompts:
                tokens, timeline = await cluster.hand_over_and_decode(prompt, num_tokens=num_tokens)
                share = timeline.exposed_s / timeline.prefill_s
                print(
                    f"  {transport}, {len(prompt)} tokens: exposed {timeline.exposed_s * 1e3:.2f} ms, {share:.1%}"
                    f" of prefill; {timeline.num_bytes / 1e6:.1f} MB in {timeline.num_slabs} slabs",
                    flush=True,
                )
                outputs.append(tokens)
        return outputs

    outputs: list[list[int]] = uvloop.run(run())
    return outputs


def main() -> int:
    transport, device = cast(Transporting, sys.argv[1]), sys.argv[2]
    prompts = [draw_prompts(1, num_tokens)[0] for num_tokens in PROMPT_TOKENS]
    model_ref = model_or_stand_in()
    expected = generated(model_ref, "cpu", prompts)
    actual = handed_over_tokens(transport, prompts, num_tokens=len(expected[0]), model_ref=model_ref, device=device)
    print(f"  {transport}: {'equal' if actual == expected else f'{actual} instead of {expected}'}", flush=True)
    return 0 if actual == expected else 1


if __name__ == "__main__":
    sys.exit(main())
