"""Prefill and decode workers of different tensor-parallel degrees: every hand-off converts, the tokens are exact."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.support.parallel_handoffs import check_handoffs
from tests.support.small_models import SmallModel


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    """Of keys and values: four ranks have each of them twice."""
    return SmallModel("qwen3", tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize(("prefill", "decode", "transport"), [(1, 2, "shm"), (4, 2, "tcp")])
async def test_with_two_heads(
    two_heads: SmallModel, prefill: int, decode: int, transport: Literal["shm", "tcp"]
) -> None:
    await check_handoffs(two_heads, prefill, decode, transport)
