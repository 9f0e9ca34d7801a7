"""How many prompt tokens a step takes: as many as the time allows, neither fewer nor more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cost_model.fit import scaled
from engine.cost_model.step_cost import DECODES_PART, StepCost, StepWork, tokens_within
from engine.cost_model.step_room import LEAST_CHUNK, StepRoom

COST = StepCost(base_s=0.01, prefill_token_s=1e-3, prefill_pair_s=1e-6, decode_s=1e-3, context_token_s=1e-6)
DECODES = StepWork(decodes=10, context_tokens=10_000)  # 0.03 s with what a step costs in any case
PLENTY = 10**6

seconds = st.floats(1e-9, 1.0)
costs = st.builds(
    StepCost,
    base_s=seconds,
    prefill_token_s=st.just(0.0) | seconds,
    prefill_pair_s=st.just(0.0) | st.floats(1e-12, 1e-3),
    decode_s=seconds,
    context_token_s=seconds,
    prefill_base_s=st.just(0.0) | seconds,
)
works = st.builds(
    StepWork,
    prefill_tokens=st.integers(0, 4096),
    prefill_pairs=st.integers(0, 10**9),
    decodes=st.integers(0, 256),
    context_tokens=st.integers(0, 10**6),
)


@given(
    cost=costs, beside=works, num_cached=st.integers(0, 10**6), allowed_s=st.floats(0, 1e4), most=st.integers(1, 8192)
)
def test_the_largest_chunk_is_in_time_and_one_more_token_would_not_be(
    cost: StepCost, beside: StepWork, num_cached: int, allowed_s: float, most: int
) -> None:
    found = cost.largest_chunk(beside, num_cached, allowed_s, most)

    def is_in_time(num_tokens: int) -> bool:
        return cost.step_s(beside + StepWork.of_prefill(num_tokens, num_cached)) <= allowed_s

    assert 0 <= found <= most
    assert found == 0 or is_in_time(found)
    assert found == most or not is_in_time(found + 1)


def test_many_chunks_are_found_at_once() -> None:
    contexts = np.array([0, 1000, 100_000])
    found = tokens_within(0.1, COST.prefill_token_s, COST.prefill_pair_s, contexts)
    for num_cached, tokens in zip(contexts, found, strict=True):
        assert int(tokens) == COST.largest_chunk(StepWork(), int(num_cached), COST.base_s + 0.1, PLENTY)


def test_a_prompt_alone_has_the_whole_budget_and_others_share_what_saves_time() -> None:
    room = StepRoom(COST, most_tokens=2048)
    assert room.chunk(5000, 0) == 2048
    room.add(70, 0)
    assert room.chunk(5000, 0) == pytest.approx(90 - 70, abs=4), "the step's own cost is a tenth of it"
    room.add(room.chunk(5000, 0), 0)
    assert not room.is_open


def test_beside_decodes_a_step_is_as_long_as_pays() -> None:
    room = StepRoom(COST, most_tokens=2048, beside=DECODES)
    num_tokens = room.chunk(5000, 100)
    step_s = COST.step_s(DECODES + StepWork.of_prefill(num_tokens, 100))
    assert COST.step_s(DECODES) == pytest.approx(DECODES_PART * step_s, rel=0.1)
    assert StepRoom(COST, most_tokens=50, beside=DECODES).chunk(5000, 100) == 50


def test_nobody_stands_still_for_more_than_a_second() -> None:
    slow, slower = scaled(COST, 10), scaled(COST, 100)  # 0.3 and 3 s without prompts
    assert slow.longest_that_pays_s(DECODES) == 1.0
    assert slower.longest_that_pays_s(DECODES) == pytest.approx(6.0), "prompts have as much time as decodes"


def test_prompts_share_the_time_that_is_allowed_not_the_tokens() -> None:
    room = StepRoom(COST, most_tokens=2048, beside=DECODES, allowed_s=0.15)
    room.add(room.chunk(40, 0), 0)
    left = room.chunk(500, 4000)
    work = DECODES + StepWork.of_prefill(40) + StepWork.of_prefill(left, 4000)
    assert COST.step_s(work) <= 0.15 < COST.step_s(work + StepWork.of_prefill(1, 4000 + left))


def test_too_little_for_a_chunk_is_left_but_not_for_ever() -> None:
    little_s = COST.step_s(DECODES) + (LEAST_CHUNK - 1) * COST.prefill_token_s
    room = StepRoom(COST, most_tokens=2048, beside=DECODES, allowed_s=little_s)
    assert not room.is_open
    assert room.chunk(500, 0) == 0
    assert room.chunk(5, 0) == 5, "a prompt's end is a chunk however short"
    due = StepRoom(COST, most_tokens=2048, beside=DECODES, allowed_s=0.0, is_due=True)
    assert due.chunk(500, 0) == LEAST_CHUNK
    due.add(LEAST_CHUNK, 0)
    assert not due.is_open


def test_as_long_as_no_cost_is_known_tokens_alone_count() -> None:
    room = StepRoom(None, most_tokens=100, beside=DECODES, allowed_s=0.0)
    room.add(room.chunk(60, 0), 0)
    assert room.chunk(60, 0) == 40
