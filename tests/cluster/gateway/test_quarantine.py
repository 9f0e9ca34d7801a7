"""Who is suspected, tried, cleared and found guilty, without workers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from cluster.errors import DeadlineError, PoisonRequestError
from cluster.gateway import quarantine
from cluster.gateway.quarantine import Quarantine
from cluster.gateway.request_state import RequestRun, RequestState
from engine.sampling.params import SamplingParams
from kv_transfer.messages.requests import RequestSpec, TokenEvent
from kv_transfer.messages.scheduling import Placement
from kv_transfer.worker.sequences import NUM_ALONE
from tests.support.waiting import HANGS_S, eventually


def a_run(name: str, prompt: int = 1, *, seed: int = 0, salt: str = "", deadline_s: float = HANGS_S) -> RequestRun:
    params = SamplingParams(max_tokens=50, seed=seed)
    spec = RequestSpec(request_id=name, attempt=0, prompt_token_ids=[prompt] * 9, params=params, cache_salt=salt)
    return RequestRun(spec, time.monotonic() + deadline_s)


def is_free(run: RequestRun) -> bool:
    """To share steps."""
    return not run.alone


def brings(run: RequestRun, num_tokens: int, *, prefill: str | None = None, split_at: int = 0) -> None:
    """From a decode worker, which does all of it unless a `prefill` worker has a part."""
    placed = {"request_id": run.request_id, "attempt": run.attempt, "prefill": prefill, "split_at": split_at}
    run.placed(Placement(decode="d", **placed))  # type: ignore[arg-type]
    for index in range(len(run.emitted), len(run.emitted) + num_tokens):
        run.merge("d", TokenEvent(request_id=run.request_id, attempt=run.attempt, index=index, token_id=7))


async def test_who_is_in_the_steps_of_two_lost_workers_is_guilty_and_so_are_its_copies() -> None:
    book, poison = Quarantine(), a_run("p")
    await book.admit(poison)
    assert is_free(poison) and book.allows(poison)
    assert not book.on_worker_lost("w1", [poison, a_run("i", 2)])
    await book.admit(poison)
    assert not is_free(poison)
    assert book.on_worker_lost("w2", [poison])
    for guilty in (poison, a_run("copy"), a_run("other seed", seed=5)):
        with pytest.raises(PoisonRequestError):
            await book.admit(guilty)
    for other in (a_run("prompt", 3), a_run("salt", salt="x")):
        await book.admit(other)


async def test_more_may_be_in_a_lost_step_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "_MAX_RECORDS", 3)
    book, runs = Quarantine(), [a_run(str(n), n) for n in range(5)]
    assert not book.on_worker_lost("w1", runs)
    assert len(book) == 3
    assert not book.on_worker_lost("w2", runs)
    assert book.on_worker_lost("w3", [runs[4]])


async def test_nobody_is_guilty_while_it_may_have_been_one_of_several() -> None:
    book, both = Quarantine(), [a_run("p"), a_run("i", 2)]
    assert not book.on_worker_lost("w1", both)
    assert not book.on_worker_lost("w2", both)
    assert not any(map(book.is_guilty, both))
    assert book.on_worker_lost("w3", [both[0]])
    assert [book.is_guilty(run) for run in both] == [True, False]


async def test_a_worker_is_lost_once_unless_it_is_heard_in_between() -> None:
    book, run = Quarantine(), a_run("r")
    for _ in range(3):
        assert not book.on_worker_lost("w1", [run])
    book.on_tokens_from("w1")
    assert book.on_worker_lost("w1", [run])


async def test_tokens_from_steps_of_its_own_clear_a_suspect() -> None:
    book, run = Quarantine(), a_run("r")
    book.on_worker_lost("w1", [run])
    await book.admit(run)
    brings(run, NUM_ALONE - 1)
    book.on_tokens_of(run)
    assert not is_free(run)
    brings(run, 1)
    book.on_tokens_of(run)
    assert is_free(run) and not len(book)
    assert not book.on_worker_lost("w2", [run]), "what it was suspected of before counts no more"


@pytest.mark.parametrize(("split_at", "num_tokens"), [(0, NUM_ALONE + 1), (4, NUM_ALONE)])
async def test_so_many_come_of_such_steps_on_two_workers(split_at: int, num_tokens: int) -> None:
    """Who computes a part of a prompt has no token to show, and the other worker shares its steps after as many."""
    book, run = Quarantine(), a_run("r")
    book.on_worker_lost("w1", [run])
    await book.admit(run)
    brings(run, num_tokens - 1, prefill="p", split_at=split_at)
    book.on_tokens_of(run)
    assert not is_free(run)
    brings(run, 1, prefill="p", split_at=split_at)
    book.on_tokens_of(run)
    assert is_free(run)


async def test_a_late_token_of_the_last_attempt_clears_nobody() -> None:
    book, run = Quarantine(), a_run("r")
    book.on_worker_lost("w1", [run])
    await book.admit(run)
    brings(run, NUM_ALONE)
    run.next_attempt("d", "fault")
    book.on_tokens_of(run)
    assert not is_free(run)


async def test_copies_are_tried_one_at_a_time_the_furthest_first() -> None:
    book, runs = Quarantine(), [a_run(f"r{n}") for n in range(3)]
    brings(runs[1], 4)
    book.on_worker_lost("w1", runs)
    tasks = [asyncio.create_task(book.admit(run)) for run in runs]
    await eventually(lambda: tasks[1].done())
    await asyncio.sleep(0.01)
    assert [task.done() for task in tasks] == [False, True, False]
    runs[1].next_attempt("w1")
    brings(runs[1], NUM_ALONE)
    book.on_tokens_of(runs[1])
    await asyncio.gather(*tasks)
    assert [run.alone for run in runs] == [True, False, True]


async def test_who_leaves_while_it_is_tried_makes_way_for_a_copy() -> None:
    book, first, second = Quarantine(), a_run("first"), a_run("second")
    book.on_worker_lost("w1", [first])
    await book.admit(first)
    waiting = asyncio.create_task(book.admit(second))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    first.end(RequestState.CANCELLED)
    book.on_ended(first)
    await waiting
    assert not is_free(second), "nothing has cleared the first one"
    assert book.on_worker_lost("w2", [second])


async def test_a_copy_waits_until_its_own_deadline_at_most() -> None:
    book, first = Quarantine(), a_run("first")
    book.on_worker_lost("w1", [first])
    await book.admit(first)
    with pytest.raises(DeadlineError):
        await book.admit(a_run("second", deadline_s=0.02))


async def test_workers_that_copies_were_recalled_from_count_if_they_are_lost_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quarantine, "_SETTLING_S", HANGS_S)
    book, first, copy = Quarantine(), a_run("first"), a_run("copy")
    book.on_worker_lost("w1", [first])
    assert book.recall(copy, {"w2"}) and book.was_recalled_from("w2")
    trial = asyncio.create_task(book.admit(first))
    await asyncio.sleep(0)
    assert not trial.done()
    trial.cancel()
    monkeypatch.setattr(quarantine, "_SETTLING_S", 0.05)
    assert book.recall(copy, {"w2"})
    await book.admit(first)
    assert not book.was_recalled_from("w2"), "it lives"
    again = a_run("again")
    assert book.recall(again, {"w3"})
    assert book.on_worker_lost("w3", [])
    assert book.is_guilty(first)


async def test_so_do_workers_that_begin_with_a_copy_before_they_hear_that_it_was_recalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quarantine, "_SETTLING_S", HANGS_S)
    book, first, copy = Quarantine(), a_run("first"), a_run("copy")
    book.on_worker_lost("w1", [first])
    assert book.recall(copy, set()), "it waits for its turn somewhere"
    assert not book.on_worker_lost("w2", []), "which had not said that it began"
    book.on_computing(copy, "w3")
    assert book.on_worker_lost("w3", [])
    assert book.is_guilty(first)


async def test_whose_steps_fail_on_two_workers_is_guilty() -> None:
    book, run, copy = Quarantine(), a_run("r"), a_run("copy")
    assert not book.on_raised("w1", run)
    assert not book.on_raised("w1", copy)
    assert book.on_raised("w2", copy)
    assert book.is_guilty(run)
    alone = a_run("alone", 2)
    assert not book.on_raised("w1", alone)
    assert book.on_raised("w1", alone), "there may be no other worker"


async def test_what_is_held_against_somebody_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "REMEMBERED_S", 0.01)
    monkeypatch.setattr(quarantine, "_MAX_RECORDS", 3)
    book, run = Quarantine(), a_run("r")
    book.on_worker_lost("w1", [run])
    book.on_worker_lost("w2", [run])
    run.end(RequestState.FAILED)
    book.on_ended(run)
    await asyncio.sleep(0.02)
    await book.admit(a_run("copy"))
    for n in range(9):
        book.on_worker_lost(f"v{n}", [a_run(f"r{n}", 10 + n)])
    assert len(book) == 3


async def test_what_is_forgotten_counts_in_no_later_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no copy comes by whom it would be noticed."""
    monkeypatch.setattr(quarantine, "REMEMBERED_S", -1.0)  # over as soon as nobody is on trial
    monkeypatch.setattr(quarantine, "_LOOK_S", 0.0)

    def held_against_one_that_left() -> Quarantine:
        book, run = Quarantine(), a_run("r")
        book.on_worker_lost("w1", [run])
        assert book.recall(a_run("copy"), {"w2"}) and book.was_recalled_from("w2")
        run.end(RequestState.CANCELLED)
        book.on_ended(run)
        return book

    book = held_against_one_that_left()
    assert not book.on_worker_lost("w2", [])
    assert not len(book)
    assert not held_against_one_that_left().was_recalled_from("w2")
    book = held_against_one_that_left()
    await book.admit(a_run("another", 2))
    assert not len(book)


def test_the_seed_alone_makes_no_other_request() -> None:
    book, run = Quarantine(), a_run("r")
    warmer = a_run("warmer")
    warmer.request = replace(warmer.request, params=replace(warmer.request.params, temperature=0.5))
    assert book.fingerprint(run) == book.fingerprint(a_run("x", seed=9)) != book.fingerprint(warmer)


def test_of_whom_nothing_can_be_held_no_prompt_is_hashed_whole() -> None:
    """A worker's loss asks it of all requests in one turn of the gateway's loop."""
    book, lost, beside = Quarantine(), a_run("p"), a_run("another", 2)
    book.on_worker_lost("w1", [lost])
    assert not book.recall(beside, {"w2"}) and not book.is_guilty(beside)
    assert beside.fingerprint is None
    assert book.recall(a_run("copy"), {"w2"})
    assert not book.recall(a_run("salt", salt="x"), {"w2"}), "which the last tokens do not tell"


async def test_whoever_is_asked_for_is_looked_up_by_one_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is asked for, and however many are suspected."""
    monkeypatch.setattr(quarantine, "_MAX_RECORDS", 3)
    run = a_run("beside", 9)
    hashed: list[int] = []

    class Counted(Quarantine):
        def _hash(self, before: bytes, tokens: list[int]) -> bytes:
            hashed.append(len(tokens))
            return super()._hash(before, tokens)

    book = Counted()
    for n in range(5):
        book.suspect(a_run(str(n), n))
    hashed.clear()
    for _ in range(9):
        assert not book.is_guilty(run) and book.allows(run)
    assert len(hashed) == 1
    assert [book.recall(a_run(f"copy {n}", n), ()) for n in range(5)] == [False, False, True, True, True]
    last = a_run("4", 4)
    await book.admit(last)
    brings(last, NUM_ALONE)
    book.on_tokens_of(last)
    assert len(book) == 2 and len(book._beginnings) == 2
