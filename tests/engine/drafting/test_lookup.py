"""What drafters find in texts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.drafting.drafter import Draft
from engine.drafting.lookup import HistoryDrafter, LookupDrafter, PredictionDrafter, TokenText
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence

PARAMS = SamplingParams(max_tokens=100, seed=0)
few = st.lists(st.sampled_from([1, 2, 256, 65_536, 16_777_216]), max_size=30)  # whose bytes look alike


def sequence(prompt: list[int], output: list[int] | None = None, **fields: object) -> Sequence:
    return Sequence(
        request_id="r",
        attempt=0,
        params=PARAMS,
        prompt_token_ids=prompt,
        output_token_ids=output or [],
        **fields,  # type: ignore[arg-type]
    )


@given(text=few, run=st.lists(st.sampled_from([1, 2, 256, 65_536]), min_size=1, max_size=3), before=st.integers(0, 30))
def test_runs_are_found_where_they_stand(text: list[int], run: list[int], before: int) -> None:
    """As by looking at every place; a search among alike bytes may be given up, and finds no wrong place."""
    before = min(before, len(text))
    ends = [end for end in range(len(run), before + 1) if text[end - len(run) : end] == run]
    found = TokenText(text).after_last(tuple(run), before)
    assert found in (max(ends, default=None), None)
    first = TokenText(text).after_first(tuple(run), 0, before)
    assert first in (min(ends, default=None), None)


def test_the_last_place_of_the_longest_run_counts() -> None:
    seq = sequence([1, 2, 3, 4, 5, 6, 70, 71, 4, 5, 6, 80, 81, 1, 2, 3], [4, 5, 6])
    drafter = LookupDrafter()
    assert drafter.propose(seq, 2) == Draft((70, 71), "lookup", 6)
    seq.output_token_ids += [9, 4, 5, 6]
    assert drafter.propose(seq, 3) == Draft((9, 4, 5), "lookup", 3)
    seq.output_token_ids.append(500)
    assert drafter.propose(seq, 3) is None


def test_earlier_answers_are_found_under_the_same_salt_only() -> None:
    drafter = HistoryDrafter()
    drafter.ended(sequence([1], [10, 11, 12, 13, 14], cache_salt="a"))
    drafter.ended(sequence([1], [10, 11, 12, 90], cache_salt="b"))
    assert drafter.propose(sequence([7], [10, 11, 12], cache_salt="a"), 5) == Draft((13, 14), "history", 3)
    assert drafter.propose(sequence([7], [10, 11, 12], cache_salt="b"), 5) == Draft((90,), "history", 3)
    assert drafter.propose(sequence([7], [10, 11, 12]), 5) is None
    assert drafter.propose(sequence([7], [12, 13, 14], cache_salt="a"), 5) is None, "another answer does not follow"


def test_history_is_bounded() -> None:
    drafter = HistoryDrafter()
    for number in range(200):
        drafter.ended(sequence([1], list(range(number, number + 1000)), cache_salt=str(number % 100)))
    assert drafter.propose(sequence([7], [20, 21, 22], cache_salt="0"), 1) is None, "64 salts are kept, the newest"
    for number in range(20):
        drafter.ended(sequence([1], list(range(1000 * number, 1000 * number + 1000)), cache_salt="x"))
    oldest, newest = [1, 2, 3], [19_001, 19_002, 19_003]
    assert drafter.propose(sequence([7], oldest, cache_salt="x"), 1) is None, "16,384 tokens are kept, the newest"
    assert drafter.propose(sequence([7], newest, cache_salt="x"), 1) == Draft((19_004,), "history", 3)


def test_a_prediction_is_followed_from_its_first_token() -> None:
    seq = sequence([1, 2], prediction_token_ids=[10, 11, 12, 13, 14, 15])
    drafter = PredictionDrafter()
    assert drafter.propose(seq, 3) == Draft((10, 11, 12), "prediction", 0)
    seq.output_token_ids += [10, 11]
    assert drafter.propose(seq, 2) == Draft((12, 13), "prediction", 2)


def test_a_prediction_is_found_again_after_a_change() -> None:
    drafter = PredictionDrafter()
    predicted = list(range(100, 140))
    one_other = sequence([1], [100, 101, 7], prediction_token_ids=predicted)
    assert drafter.propose(one_other, 2) == Draft((103, 104), "prediction", 0), "in its place"
    inserted = sequence([1], [100, 101, 7, 8, 9, 102, 103], prediction_token_ids=predicted)
    assert drafter.propose(inserted, 2) == Draft((104, 105), "prediction", 2)
    left_out = sequence([1], [100, 101, 120, 121, 122], prediction_token_ids=predicted)
    assert drafter.propose(left_out, 2) == Draft((123, 124), "prediction", 3)
    at_its_end = sequence([1], predicted, prediction_token_ids=predicted)
    assert drafter.propose(at_its_end, 2) is None
    assert drafter.propose(sequence([1]), 2) is None


def test_what_a_sequence_had_before_an_attempt_ended_is_known_to_the_next() -> None:
    """Another worker goes on: the drafter has seen nothing of the sequence, and says the same."""
    seq = sequence([1], [100, 7, 102, 103], prediction_token_ids=list(range(100, 120)))
    followed, begun = PredictionDrafter(), PredictionDrafter()
    again = sequence([1], prediction_token_ids=list(range(100, 120)))
    for token in seq.output_token_ids:
        again.output_token_ids.append(token)
        draft = followed.propose(again, 3)
    assert draft is not None
    found = begun.propose(seq, 3)
    assert found is not None and found.token_ids == draft.token_ids
