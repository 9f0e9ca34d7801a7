"""Hand-offs between groups that cut the heads at different places: two ranks and three."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from tests.support.parallel_handoffs import check_handoffs
from tests.support.small_models import SmallModel


@pytest.fixture(scope="module")
def six_heads(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    """Two and three ranks cut them at different places."""
    sizes: dict[str, Any] = {
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "intermediate_size": 96,
    }
    return SmallModel("llama", tmp_path_factory.mktemp("six"), **sizes)


@pytest.mark.parametrize(("prefill", "decode", "transport"), [(2, 3, "shm"), (3, 1, "tcp")])
async def test_with_six_heads(
    six_heads: SmallModel, prefill: int, decode: int, transport: Literal["shm", "tcp"]
) -> None:
    await check_handoffs(six_heads, prefill, decode, transport)
