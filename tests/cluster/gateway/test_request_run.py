"""What a gateway makes of the events of prefill, decode and older attempts: each index once and in order."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.gateway.placing import hash_prompt, name_prompt
from cluster.gateway.request_state import TERMINAL, AttemptFailedError, RequestRun, RequestState
from cluster.gateway.timeline import Drafts, SequenceTimeline
from cluster.slo.classes import RequestTerms, SloConfig
from engine.sampling.params import SamplingParams
from engine.sequence import FinishReason
from kv_transfer.messages import decode, encode
from kv_transfer.messages.requests import RequestSpec, Start, TokenEvent
from kv_transfer.messages.scheduling import Placement
from kv_transfer.worker.sequences import sequence_of
from tests.support.thoroughness import examples

NUM_TOKENS = 7
WORKERS = ("prefill", "decode", "older-decode")


def _run(attempt: int = 0, output: list[int] | None = None) -> RequestRun:
    request = RequestSpec(
        request_id="r",
        attempt=attempt,
        prompt_token_ids=[1, 2, 3],
        params=SamplingParams(max_tokens=10, seed=0),
        output_token_ids=output or [],
    )
    run = RequestRun(request, 100.0)
    run.placed(_placement(attempt))
    return run


def _placement(attempt: int = 0) -> Placement:
    return Placement(request_id="r", attempt=attempt, prefill="prefill", decode="decode")


def _event(
    index: int, *, attempt: int = 0, token_id: int | None = None, finish: FinishReason | None = None
) -> TokenEvent:
    token_id = 100 + index if token_id is None else token_id
    return TokenEvent(request_id="r", attempt=attempt, index=index, token_id=token_id, finish_reason=finish)


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[str, TokenEvent]]:
    """All events of a finished attempt, some of them twice, with those of other attempts, in any order."""
    whole = [_event(index, finish="length" if index == NUM_TOKENS - 1 else None) for index in range(NUM_TOKENS)]
    repeated = draw(st.lists(st.sampled_from(whole), max_size=6))
    strangers = draw(st.lists(st.builds(_event, st.integers(0, 9), attempt=st.just(5), token_id=st.just(999))))
    events = draw(st.permutations([*whole, *repeated, *strangers]))
    return [(draw(st.sampled_from(WORKERS)), event) for event in events]


@settings(max_examples=examples(300), deadline=None)
@given(arrivals())
def test_each_index_comes_once_and_in_order_whatever_arrives_when(arrivals: list[tuple[str, TokenEvent]]) -> None:
    run = _run()
    out = [ready for worker_id, event in arrivals for ready in run.merge(worker_id, event)]
    assert [event.index for event in out] == list(range(NUM_TOKENS))
    assert run.emitted == [event.token_id for event in out] == [100 + index for index in range(NUM_TOKENS)]
    assert run.state is RequestState.FINISHED


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_attempts_continue_each_other(data: st.DataObject) -> None:
    """Each attempt delivers some of its events, in any order, before it fails; the last one all of them."""
    run = _run()
    out: list[TokenEvent] = []
    past: list[TokenEvent] = []
    while not run.ended:
        start, attempt = len(run.emitted), run.attempt
        mine = [
            _event(
                index,
                attempt=attempt,
                token_id=1000 * attempt + index,
                finish="length" if index == NUM_TOKENS - 1 else None,
            )
            for index in range(start, NUM_TOKENS)
        ]
        arriving = [event for event in mine if attempt == 4 or data.draw(st.booleans())]
        late = data.draw(st.lists(st.sampled_from(past), max_size=3)) if past else []
        for event in data.draw(st.permutations([*arriving, *late])):
            ready = run.merge(data.draw(st.sampled_from(WORKERS)), event)
            assert all(event.attempt == attempt for event in ready), "what an older attempt said too early is void"
            out += ready
        past += mine
        if not run.ended:
            run.next_attempt("decode")
            assert run.spec().output_token_ids == [event.token_id for event in out]
            run.placed(_placement(run.attempt))
    assert [event.index for event in out] == list(range(NUM_TOKENS))
    assert run.emitted == [1000 * event.attempt + event.index for event in out]


def test_nothing_follows_the_last_token() -> None:
    run = _run()
    assert run.merge("decode", _event(1)) == []
    assert run.merge("decode", _event(2)) == []
    assert [e.index for e in run.merge("prefill", _event(0, finish="stop"))] == [0]
    assert run.merge("decode", _event(1)) == []
    assert run.emitted == [100]


def test_a_request_with_earlier_tokens_goes_on_after_them() -> None:
    run = _run(attempt=3, output=[50, 51])
    assert run.merge("prefill", _event(0, attempt=3)) == []
    assert [e.index for e in run.merge("prefill", _event(2, attempt=3))] == [2]
    query = run.place_query(prefer_decode=None)
    assert (query.num_tokens, query.max_new_tokens) == (6, 7), "10 tokens in all were asked for, and 3 are here"


@pytest.mark.parametrize("headers", [{}, {"x-slo-tpot-ms": "15"}, {"x-slo-tpot-ms": "30", "x-slo-gap-ms": "200"}])
def test_what_was_promised_reaches_scheduler_and_workers_in_every_attempt(headers: dict[str, str]) -> None:
    slo = SloConfig().choose(None, headers)
    timeline = SequenceTimeline(RequestTerms(slo=slo))
    run = RequestRun(_run().request, 100.0, timeline)
    for _ in range(2):
        place = run.place_query(prefer_decode=None)
        assert (place.ttft_s, place.tpot_s, place.gap_s) == (slo.ttft_s, slo.tpot_s, slo.gap_s)
        told = decode(encode(Start(request=run.spec(), ticket=None)))
        assert isinstance(told, Start)
        seq = sequence_of(told.request)
        assert (seq.attempt, seq.tpot_s, seq.gap_s) == (run.attempt, slo.tpot_s, slo.gap_s)
        run.next_attempt(None)


def test_repetitions_are_not_kept() -> None:
    run = _run()
    for index in (0, 1):
        run.merge("decode", _event(index))
    again = _event(0)
    num_references = sys.getrefcount(again)
    run.merge("decode", again)
    assert sys.getrefcount(again) == num_references


@pytest.mark.parametrize("state", [s for s in RequestState if s in TERMINAL])
def test_only_the_first_end_counts(state: RequestState) -> None:
    run = _run()
    run.end(state)
    for other in TERMINAL:
        run.end(other)
    assert run.state is state
    assert run.merge("decode", _event(0)) == []
    assert not run.concerns("decode")


def test_whose_end_concerns_an_attempt() -> None:
    run = _run()
    assert run.concerns("prefill") and run.concerns("decode") and not run.concerns("another")
    run.merge("prefill", _event(0))
    assert run.concerns("prefill"), "decode may not have the KV yet"
    run.merge("decode", _event(1))
    assert not run.concerns("prefill") and run.concerns("decode")
    run.next_attempt("decode")
    assert not run.concerns("decode"), "nobody is on it"


def test_only_who_sampled_the_first_token_can_bring_it() -> None:
    """Decode goes on behind it, and says it never."""
    run = _run()
    run.state, run.computing_on = RequestState.PREFILLING, {"prefill", "decode"}
    assert run.merge("decode", _event(1)) == []
    assert run.concerns("prefill") and run.concerns("decode")
    assert run.computing_on == {"decode"}, "whatever prefill's next step does, this request is not in it"
    run.merge("prefill", _event(0))
    assert not run.concerns("prefill") and run.concerns("decode")


@pytest.mark.parametrize(
    ("state", "is_started"),
    [(RequestState.RESERVING, False), (RequestState.PREFILLING, True), (RequestState.DECODING, True)],
)
def test_when_workers_may_begin_with_an_attempt(state: RequestState, is_started: bool) -> None:
    run = _run()
    run.state = state
    assert run.is_started is is_started
    run.next_attempt("decode")
    assert not run.is_started


def test_who_handed_over_concerns_an_attempt_no_more() -> None:
    run = _run()
    run.state = RequestState.PREFILLING
    run.computing_on = {"prefill"}
    assert not run.on_handed_over("prefill", 5), "it is of another attempt"
    assert run.concerns("prefill")
    assert run.on_handed_over("prefill", 0), "no token came: the rest is computed"
    assert (run.concerns("prefill"), run.concerns("decode"), run.computing_on) == (False, True, set())
    run.merge("decode", _event(0))
    assert not run.on_handed_over("prefill", 0)


def test_a_split_reaches_the_workers_unless_the_prompt_s_logprobs_are_asked_for() -> None:
    for prompt_logprobs, split_at in ((None, 2), (0, 0)):
        run = _run()
        run.request = replace(run.request, params=replace(run.request.params, prompt_logprobs=prompt_logprobs))
        run.placed(replace(_placement(), split_at=2))
        assert run.spec().split_at == split_at
    part, whole = (sequence_of(replace(_run().request, split_at=2), hands_over=h) for h in (True, False))
    assert (part.num_tokens, part.is_part, whole.num_tokens, whole.is_part) == (2, True, 3, False)


def test_a_new_attempt_avoids_who_failed_the_last_one_only() -> None:
    run = _run()
    run.next_attempt("decode")
    assert run.place_query(prefer_decode=None).exclude == ["decode"]
    run.next_attempt("prefill")
    query = run.place_query(prefer_decode="decode")
    assert (query.exclude, query.prefer_decode, query.attempt) == (["prefill"], "decode", 2)
    assert run.spec() == replace(run.request, attempt=2)


def test_what_was_said_of_an_attempt_is_void_in_the_next() -> None:
    run = _run()
    for _ in range(2):  # two workers may go at once
        run.notify(AttemptFailedError("the worker is gone", "decode"))
    run.inbox.popleft()
    run.next_attempt("decode")
    assert not run.inbox


@pytest.mark.parametrize(
    ("state", "failed", "expected"),
    [
        (RequestState.RESERVING, "decode", ["decode"]),
        (RequestState.PREFILLING, "decode", ["decode", "prefill"]),
        (RequestState.PREFILLING, "prefill", ["prefill"]),
    ],
)
def test_a_failed_hand_off_may_be_either_end_s_fault(state: RequestState, failed: str, expected: list[str]) -> None:
    run = _run()
    run.state = state
    run.next_attempt(failed)
    assert run.place_query(prefer_decode=None).exclude == expected


def test_a_decode_to_which_two_in_a_row_can_hand_nothing_over_is_avoided_with_both() -> None:
    run = _run()
    found: list[list[str]] = []
    for attempt, prefill in enumerate(("p1", "p2", "p3")):
        run.placed(replace(_placement(attempt), prefill=prefill))
        run.state = RequestState.PREFILLING
        run.next_attempt(prefill)
        found.append(run.place_query(prefer_decode=None).exclude)
    assert found == [["p1"], ["decode", "p1", "p2"], ["decode", "p1", "p2", "p3"]]
    run.placed(_placement(3))
    for index in range(2):
        run.merge("prefill", _event(index, attempt=3))
    run.next_attempt("prefill")
    assert run.place_query(prefer_decode=None).exclude == ["prefill"], "it went on since"


def test_a_decode_keeps_its_reservation_however_many_prefills_die() -> None:
    run = _run()
    for attempt, prefill in enumerate(("p1", "p2", "p3")):
        run.placed(replace(_placement(attempt), prefill=prefill))
        run.state = RequestState.PREFILLING
        run.next_attempt(prefill, is_gone=True)
        assert run.place_query(prefer_decode=None).exclude == [prefill]


def test_a_decode_that_fails_on_its_own_casts_no_doubt_on_prefill() -> None:
    run = _run()
    run.state = RequestState.PREFILLING
    run.merge("prefill", _event(0))
    run.merge("decode", _event(1))
    run.next_attempt("decode")
    assert run.place_query(prefer_decode=None).exclude == ["decode"]


def test_tokens_that_nobody_has_asked_for_yet_are_given_on_together_each_with_its_time() -> None:
    run = _run()
    assert run.take("decode", _event(0), 1.0)
    assert not run.take("decode", _event(2), 2.0), "its turn has not come"
    assert run.take("decode", _event(1), 3.0)
    assert [token.index for token in run.take_ready()] == [0, 1, 2]
    assert list(run.timeline.token_times) == [1.0, 3.0, 3.0]
    assert run.take_ready() == []


def test_the_last_token_ends_the_run_when_it_comes_and_waits_to_be_given_on() -> None:
    run = _run()
    assert run.take("decode", _event(0, finish="stop"), 1.0)
    assert run.ended and run.num_output_tokens == 1
    assert not run.concerns("decode"), "nobody's death can undo what has come"
    assert [token.finish_reason for token in run.take_ready()] == ["stop"]


def test_what_was_drafted_is_told_of_all_attempts_once() -> None:
    run = _run()
    first = [replace(_event(index), drafted=("lookup", 1, 2) if index == 2 else None) for index in range(3)]
    for event in (*first, *first):
        run.merge("decode", event)
    run.next_attempt("decode")
    run.placed(_placement(1))
    for event in (replace(_event(3, attempt=1), drafted=("lookup", 0, 1)), _event(4, attempt=1, finish="stop")):
        run.merge("decode", event)
    run.merge("decode", replace(_event(3, attempt=0), drafted=("lookup", 5, 5)))
    assert run.timeline.drafts == {"lookup": Drafts(drafted=4, accepted=1)}


async def test_prompts_with_all_full_blocks_in_common_are_different_questions() -> None:
    async def question(*last: int, salt: str = "", prompt: tuple[int, ...] = tuple(range(40))) -> Hashable:
        run = _run()
        run.request = replace(run.request, prompt_token_ids=[*prompt, *last], cache_salt=salt)
        run.timeline.prefix_hashes = await name_prompt(run.request, 16)
        run.timeline.prompt_hash = hash_prompt(run.request, 16, run.timeline.prefix_hashes)
        return run.place_query(prefer_decode=None).question

    assert await question(7, 8) == await question(7, 8)
    assert await question(7, 8) != await question(8, 7)
    assert await question(7, 8) != await question(7, 8, salt="another client's")
    assert await question(7, 8, prompt=(1,)) != await question(8, 7, prompt=(1,)), "no block is full"
    assert await question(*range(8)) != await question(*range(8), prompt=tuple(range(1, 41))), "the text before differs"


def test_how_long_an_attempt_waited_comes_with_its_first_token() -> None:
    run = _run()
    run.merge("prefill", replace(_event(0), waited_s=0.5))
    run.merge("decode", _event(1))
    assert [attempt.waited_s for attempt in run.timeline.attempts] == [0.5]
