"""Memory in large pages: zeros, aligned, apart from each other, given back."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from kernels.cpu.huge_pages import huge_zeros, memory_apart


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_tensors_are_zero_aligned_and_apart(dtype: torch.dtype) -> None:
    made = [huge_zeros((3, 7), dtype) for _ in range(5)] + [huge_zeros((5 << 20,), torch.float32)]
    for number, tensor in enumerate(made):
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.any()
        tensor.fill_(number + 1)
    assert all((tensor == number + 1).all() for number, tensor in enumerate(made))
    assert made[0].shape == (3, 7)


def test_a_large_one_has_memory_of_its_own_that_goes_with_it() -> None:
    tensor = huge_zeros((20 << 20,), torch.uint8)
    storage = weakref.ref(tensor.untyped_storage())
    small = huge_zeros((1,), torch.uint8)
    assert not tensor.data_ptr() <= small.data_ptr() < tensor.data_ptr() + tensor.nbytes
    del tensor
    gc.collect()
    assert storage() is None


def test_what_was_packed_apart_lies_together_and_goes_with_the_last_of_it() -> None:
    def is_mapped(address: int) -> bool:
        ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
        return any(int(first, 16) <= address < int(stop, 16) for first, stop in ranges)

    def leave(packed: torch.Tensor) -> None:
        assert not packed.any()

    def fill(packed: torch.Tensor) -> None:
        packed.fill_(2.0)

    pack = memory_apart(7 * 64 + 4 * 64 + (40 << 20))
    first, second = pack(100, torch.float32, leave), pack(100, torch.bfloat16, fill)
    large = pack(40 << 20, torch.uint8, leave)
    assert large.data_ptr() - second.data_ptr() == 4 * 64
    elsewhere = huge_zeros((100,), torch.float32)
    addresses = first.data_ptr(), second.data_ptr()
    assert addresses[1] - addresses[0] == 7 * 64
    assert not first.any() and (second == 2.0).all()
    del pack, first, large
    gc.collect()
    assert is_mapped(addresses[1])
    del second
    gc.collect()
    assert not is_mapped(addresses[0]) and is_mapped(elsewhere.data_ptr())
