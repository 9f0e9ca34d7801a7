"""Memory in large pages: zeros, aligned, apart from each other, given back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from kernels.cpu.huge_pages import huge_zeros


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
