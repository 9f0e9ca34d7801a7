"""Runs the kernel of `kernels.triton.attention.hopper` on a device: `test_hopper_attention.py` starts it.

Says what it is about to do before it does it.
"""

from __future__ import annotations

import torch

from kernels.triton.attention import hopper
from kernels.triton.attention.tiles import Operands
from tests.interpreted.attention_worlds import Case, assert_like_twin, build

_MANY_LAUNCHES = 300  # one behind the other, as a measurement does

_CASES = {
    "one sequence": Case(segments=((300, 700),), head_dim=128, num_heads=32, num_kv_heads=8),
    "one item": Case(segments=((37, 37),), head_dim=128, num_heads=2, num_kv_heads=1),
    "a context of whole tiles": Case(segments=((256, 512),), head_dim=128, num_heads=8, num_kv_heads=2),
    "several, beside decode": Case(segments=((40, 63), (1, 1000), (3, 63), (129, 129)), head_dim=128, num_heads=4),
    "7 queries to a key, blocks of 32": Case(segments=((12, 400), (30, 257)), head_dim=128, num_heads=7, block_size=32),
    "several items a program": Case(
        segments=((300, 700), (1, 200), (257, 257), (65, 330)), head_dim=128, num_heads=32, num_kv_heads=8
    ),
}


def main() -> None:
    hopper.IN_USE = True
    for dtype in (torch.bfloat16, torch.float16):
        for name, case in _CASES.items():
            print(f"{name}, {dtype}", flush=True)
            world = build(case, dtype)
            assert hopper.suits(Operands.of(world.q, world.geometry, softcap=None, window=None))
            actual = world.actual()
            assert_like_twin(actual, world.expected())
            print("  again", flush=True)
            assert torch.equal(actual, world.actual())
            print("  many times", flush=True)
            for _ in range(_MANY_LAUNCHES):
                again = world.actual()
            assert torch.equal(actual, again)


if __name__ == "__main__":
    main()
