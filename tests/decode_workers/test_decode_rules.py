"""The decode scheduler's rules, one by one."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from decode_workers.scheduler import DecodeScheduler, DecodeState, Emission
from engine.drafting.speculation import Speculation
from engine.kv.allocation import BlockAllocator
from engine.kv.block_pool import BlockPool
from engine.model.adapters import TURN_S, AdapterPool, AdapterSlot
from engine.sampling.params import SamplingParams
from engine.sequence import FinishReason, Sequence
from kernels.adapters import Adapter, AdapterLayer
from kv_transfer.messages.requests import AdapterRef
from tests.decode_workers.test_decode_scheduler import guesses
from tests.support.ghost_runner import VOCAB_SIZE, GhostRunner, ghost_loading, next_token
from tests.support.waiting import eventually

EOS = frozenset({0, 1})
BLOCK_SIZE = 4


class Bench:
    """A scheduler on ghost KV, stepped by hand."""

    def __init__(
        self,
        columns: int = 40,
        *,
        max_num_seqs: int = 8,
        token_budget: int = 32,
        speculation: Speculation | None = None,
    ) -> None:
        self.pool = BlockPool(columns)
        allocator = BlockAllocator(self.pool, layer_groups=1, block_size=BLOCK_SIZE)
        self.runner = GhostRunner(allocator)
        self.scheduler = DecodeScheduler(
            allocator,
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            max_model_len=columns * BLOCK_SIZE,
            eos_token_ids=EOS,
            speculation=speculation,
        )

    def hand_over(self, seq: Sequence) -> Sequence:
        """Reserved, received and admitted."""
        self.scheduler.reserve(seq)
        self.runner.receive(seq)
        self.scheduler.admit(seq.key, None if seq.num_received else next_token(seq.prompt_token_ids))
        return seq

    def step(self) -> list[Emission]:
        plan = self.scheduler.plan()
        return self.scheduler.finish_step(plan, self.runner.execute(plan))

    def run(self, max_steps: int = 500) -> list[Emission]:
        emissions = []
        for _ in range(max_steps):
            emissions += self.step()
            if not (self.scheduler.num_running or self.scheduler.num_waiting):
                self.pool.check_idle()
                return emissions
        raise AssertionError("sequences starve")


def _seq(name: str, prompt: list[int], output: list[int] | None = None, **wishes: object) -> Sequence:
    wishes = {"max_tokens": 8, "seed": 0, "ignore_eos": True} | wishes
    return Sequence(
        request_id=name,
        attempt=0,
        params=SamplingParams(**wishes),  # type: ignore[arg-type]
        prompt_token_ids=prompt,
        output_token_ids=list(output or []),
        num_prior_output=len(output or []),
    )


def _expected(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def _prompt_with(wanted: Callable[[list[int]], bool]) -> list[int]:
    """A prompt whose continuation is of some kind."""
    return next(prompt for n in range(5000) if wanted(_expected(prompt := [2, n % 19 + 2, n // 19 + 2], 8)))


ENDS_AT_2 = _prompt_with(lambda out: [token in EOS for token in out[:3]] == [False, False, True])
TWO_ENDS = _prompt_with(lambda out: [token in EOS for token in out[:5]] == [False, True, False, False, True])


def _end(**wishes: object) -> tuple[int, FinishReason | None]:
    bench = Bench()
    bench.scheduler.add(_seq("r", **({"prompt": ENDS_AT_2} | wishes)))  # type: ignore[arg-type]
    last = bench.run()[-1]
    return last.index + 1, last.finish


def test_end_of_sequence_ends_unless_it_is_to_be_ignored() -> None:
    assert _end(ignore_eos=False) == (3, "stop")
    assert _end(ignore_eos=True) == (8, "length")


def test_end_of_sequence_counts_from_min_tokens_on() -> None:
    assert _end(prompt=TWO_ENDS, ignore_eos=False) == (2, "stop")
    assert _end(prompt=TWO_ENDS, ignore_eos=False, min_tokens=2) == (2, "stop")
    assert _end(prompt=TWO_ENDS, ignore_eos=False, min_tokens=3) == (5, "stop")


def test_stop_tokens_end_even_where_end_of_sequence_is_ignored() -> None:
    outputs = _expected(ENDS_AT_2, 8)
    assert _end(stop_token_ids=(outputs[2],)) == (3, "stop")
    first = outputs.index(outputs[4])
    assert _end(stop_token_ids=(outputs[4],)) == (first + 1, "stop")
    assert _end(stop_token_ids=(VOCAB_SIZE + 5,)) == (8, "length")


def test_stop_wins_over_length_on_the_last_token() -> None:
    assert _end(ignore_eos=False, max_tokens=3) == (3, "stop")
    assert _end(ignore_eos=False, max_tokens=2) == (2, "length")


def test_the_model_s_length_ends_a_sequence() -> None:
    bench = Bench(columns=3)
    bench.scheduler.add(_seq("r", [2] * 7, max_tokens=100))
    last = bench.run()[-1]
    assert (last.seq.num_tokens, last.finish) == (12, "length")


def test_a_recovered_request_goes_on_where_it_stopped() -> None:
    """Its earlier tokens count for `max_tokens` and `min_tokens`, and are not put out again."""
    bench = Bench()
    outputs = _expected([2, 3, 4], 8)
    bench.scheduler.add(_seq("r", [2, 3, 4], outputs[:5], prompt_logprobs=0))
    emissions = bench.run()
    assert [e.index for e in emissions] == [5, 6, 7]
    assert [e.token.token_id for e in emissions] == outputs[5:]
    assert emissions[-1].finish == "length"
    assert all(e.prompt_logprobs is None for e in emissions), "they went out with the very first token"


def test_prompt_logprobs_over_several_chunks_come_whole_with_the_first_token() -> None:
    bench = Bench(token_budget=5)
    bench.scheduler.add(_seq("r", [2, 3] * 9, prompt_logprobs=0))
    emissions = bench.run()
    assert emissions[0].prompt_logprobs is not None
    assert [int(p.logprob) for p in emissions[0].prompt_logprobs] == list(range(1, 18))
    assert all(e.prompt_logprobs is None for e in emissions[1:])


def test_prompt_logprobs_are_computed_where_the_prompt_is_cached() -> None:
    bench = Bench()
    for name in ("first", "second"):
        bench.scheduler.add(_seq(name, [2, 3] * 9, prompt_logprobs=0))
        logprobs = bench.run()[0].prompt_logprobs
        assert logprobs is not None
        assert len(logprobs) == 17


def test_preemption_takes_the_youngest_and_loses_no_token() -> None:
    bench = Bench(columns=10)
    for number in range(4):
        bench.scheduler.add(_seq(f"r{number}", [2, 3, number + 4] * 3, max_tokens=12, prompt_logprobs=0))
    emissions = bench.run()
    assert bench.scheduler.num_preemptions > 0
    ends = [e.seq.request_id for e in emissions if e.finish]
    assert ends == ["r0", "r1", "r2", "r3"], "the older ones are never held up by younger ones"
    for number in range(4):
        mine = [e for e in emissions if e.seq.request_id == f"r{number}"]
        assert [e.index for e in mine] == list(range(12))
        assert [e.token.token_id for e in mine] == _expected([2, 3, number + 4] * 3, 12)
        assert [e.prompt_logprobs is not None for e in mine] == [True] + [False] * 11


def test_the_youngest_is_preempted_and_comes_back_before_those_who_wait() -> None:
    bench = Bench(columns=9, max_num_seqs=3)
    for name in ("old", "middle", "young", "newcomer"):
        bench.scheduler.add(_seq(name, [ord(name[0])] * 8, max_tokens=12))
    seen: list[list[str]] = []
    while "newcomer" not in {name for names in seen for name in names}:
        plan = bench.scheduler.plan()
        seen.append([item.seq.request_id for item in plan.items])
        bench.scheduler.finish_step(plan, bench.runner.execute(plan))
    preempted = seen.index(["old", "middle"])
    returned = next(n for n in range(preempted, len(seen)) if "young" in seen[n])
    assert all("newcomer" not in names for names in seen[:returned])
    bench.run()


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    bench = Bench(columns=10)
    first, second = _seq("old", [2] * 12, max_tokens=16), _seq("young", [3] * 12, max_tokens=16)
    bench.scheduler.add(first)
    bench.scheduler.add(second)
    bench.run()
    assert bench.scheduler.num_preemptions == 1
    assert second.num_cached >= 4


def test_no_reservation_while_a_preempted_sequence_waits() -> None:
    bench = Bench(columns=10)
    for name in ("old", "young"):
        bench.scheduler.add(_seq(name, [ord(name[0])] * 12, max_tokens=16))
    while not bench.scheduler.num_waiting or bench.scheduler.num_preemptions == 0:
        bench.step()
    assert bench.pool.num_available >= 2
    assert not bench.scheduler.can_reserve(1)
    bench.run()
    assert bench.scheduler.can_reserve(1)


def test_whose_grammar_may_have_failed_behind_its_drafts_has_no_more() -> None:
    """Nobody's drafts but its own can fail again by it; and each time all would compute alone."""
    bench = Bench(speculation=guesses(3))
    theirs, other = _seq("theirs", [2, 3], max_tokens=30, grammar="start: /a*/"), _seq("other", [4, 5], max_tokens=30)
    for seq in (theirs, other):
        bench.scheduler.add(seq)
    for _ in range(10):
        plan = bench.scheduler.plan()
        if all(item.drafts for item in plan.items):
            break
        bench.scheduler.finish_step(plan, bench.runner.execute(plan))
    assert [bool(item.drafts) for item in plan.items] == [True, True]
    bench.scheduler.abandon_step()
    bench.scheduler.suspect(plan, theirs.key)
    assert (theirs.num_alone, other.num_alone) == (1, 0)
    with_drafts = set()
    while bench.scheduler.num_running:
        plan = bench.scheduler.plan()
        with_drafts |= {item.seq.request_id for item in plan.items if item.drafts}
        bench.scheduler.finish_step(plan, bench.runner.execute(plan))
    assert with_drafts == {"other"}
    assert theirs.output_token_ids == _expected([2, 3], len(theirs.output_token_ids)), "up to the grammar's end"
    assert other.output_token_ids == _expected([4, 5], 30)


def test_who_lacks_its_adapter_keeps_no_room_from_reservations() -> None:
    bench = Bench(columns=10)
    seq = _seq("adapted", [2] * 30)
    seq.adapter = AdapterSlot("digest", Path("folder"))
    bench.scheduler.add(seq)
    assert bench.scheduler.can_reserve(20)
    seq.adapter.loaded = Adapter(lambda _: AdapterLayer(), 0)
    assert not bench.scheduler.can_reserve(20), "it comes first, by now"
    bench.run()


def test_who_lacks_its_adapter_keeps_no_place_from_reservations() -> None:
    bench = Bench(max_num_seqs=2)
    slot = AdapterSlot("digest", Path("folder"))
    for number in range(3):
        seq = _seq(f"adapted {number}", [2] * 3)
        seq.adapter = slot
        bench.scheduler.add(seq)
    assert bench.scheduler.can_reserve(3)
    reserved = _seq("reserved", [2, 3, 4])
    bench.scheduler.reserve(reserved)
    slot.loaded = Adapter(lambda _: AdapterLayer(), 0)
    assert not bench.scheduler.can_reserve(3), "they come first, by now"
    bench.runner.receive(reserved)
    bench.scheduler.admit(reserved.key, next_token([2, 3, 4]))
    bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 2)
    bench.run()


def _adapted(name: str, prompt: list[int], slot: AdapterSlot, *, num_received: int = 0) -> Sequence:
    seq = _seq(name, prompt)
    seq.adapter, seq.num_received = slot, num_received
    return seq


def test_who_lacks_its_adapter_gives_its_blocks_to_who_has_its_own() -> None:
    """Its KV came from another worker, and its adapter may be away for as long as streams of others last."""
    bench, slot = Bench(columns=11), AdapterSlot("digest", Path("folder"))
    waiting = bench.hand_over(_adapted("waiting", [3] * 16, slot))
    running = bench.hand_over(_seq("running", [2] * 16, max_tokens=20))
    while bench.scheduler.state(running.key) is not None:
        assert bench.scheduler.state(running.key) is DecodeState.RUNNING
        bench.step()
    assert running.output_token_ids == _expected([2] * 16, 20)
    assert (bench.scheduler.state(waiting.key), bench.scheduler.num_preemptions) == (DecodeState.WAITING, 1)
    slot.loaded = Adapter(lambda _: AdapterLayer(), 0)
    bench.run()
    assert waiting.output_token_ids == _expected([3] * 16, 8)


def test_who_lacks_its_adapter_keeps_its_blocks_while_nobody_needs_them() -> None:
    bench, slot = Bench(columns=20), AdapterSlot("digest", Path("folder"))
    waiting = bench.hand_over(_adapted("waiting", [3] * 16, slot))
    bench.hand_over(_seq("running", [2] * 16, max_tokens=20))
    for _ in range(20):
        bench.step()
    assert (bench.scheduler.state(waiting.key), bench.scheduler.num_preemptions) == (DecodeState.RUNNING, 0)
    slot.loaded = Adapter(lambda _: AdapterLayer(), 0)
    bench.run()


def test_where_all_who_have_blocks_lack_their_adapters_they_give_them_to_who_does_not() -> None:
    """The adapter lies on a server of files that does not answer."""
    bench, slot = Bench(columns=11), AdapterSlot("digest", Path("folder"))
    waiting = [bench.hand_over(_adapted(f"waiting {number}", [3] * 16, slot)) for number in range(2)]
    assert not bench.scheduler.can_reserve(16)
    assert not bench.scheduler.make_way(16), "it may come at any moment"
    slot.is_stalled = True
    assert not bench.scheduler.make_way(50), "nor would there be room"
    assert bench.scheduler.num_preemptions == 0
    assert bench.scheduler.make_way(16)
    assert [bench.scheduler.state(seq.key) for seq in waiting] == [DecodeState.RUNNING, DecodeState.WAITING]
    newcomer = bench.hand_over(_seq("newcomer", [2] * 16))
    assert not bench.scheduler.make_way(16), "somebody is computed"
    while bench.scheduler.state(newcomer.key) is not None:
        bench.step()
    slot.loaded = Adapter(lambda _: AdapterLayer(), 0)
    bench.run()
    assert all(seq.output_token_ids == _expected([3] * 16, 8) for seq in waiting)


def test_nobody_makes_way_while_an_adapter_that_was_waited_for_is_read_in_time_nor_in_vain_later() -> None:
    """It had waited for its turn: so long that room was kept for the next one that needs it."""
    bench, pool = Bench(columns=11), AdapterPool(lambda digest, folder: Adapter(lambda _: AdapterLayer(), 0), 1)

    def looked_at(now: float) -> AdapterSlot | None:
        return pool.next_load(bench.scheduler.adapter_users(), now)

    runs = bench.hand_over(_adapted("runs", [3] * 16, pool.want("a", Path("a"))))
    loading = looked_at(0.0)
    assert loading is not None
    pool.has_loaded(loading, pool.load("a", Path("a")), 0.0)
    waiting = [bench.hand_over(_adapted("first", [3] * 16, pool.want("b", Path("b"))))]
    for now in (0.0, 2 * TURN_S):
        assert looked_at(now) is None
    while bench.scheduler.state(runs.key) is not None:
        bench.step()
    waiting.append(bench.hand_over(_adapted("second", [3] * 16, pool.want("b", Path("b")))))
    began = 2 * TURN_S
    loading = looked_at(began)
    assert loading is waiting[0].adapter is waiting[1].adapter
    assert looked_at(began + TURN_S / 2) is None
    assert not bench.scheduler.make_way(24) and bench.scheduler.num_preemptions == 0
    assert looked_at(began + TURN_S) is None
    assert bench.scheduler.make_way(24) and bench.scheduler.num_preemptions == 2
    assert loading is not None
    pool.has_loaded(loading, pool.load("b", Path("b")), began + TURN_S)
    bench.run()
    assert all(seq.output_token_ids == _expected([3] * 16, 8) for seq in waiting)


def test_where_all_who_have_blocks_lack_their_adapters_a_prompt_that_does_not_is_computed() -> None:
    bench, slot = Bench(columns=11), AdapterSlot("digest", Path("folder"), is_stalled=True)
    waiting = [bench.hand_over(_adapted(f"waiting {number}", [3] * 16, slot)) for number in range(2)]
    prompt = _seq("prompt", [2] * 16)
    bench.scheduler.add(prompt)
    bench.step()
    assert bench.scheduler.state(prompt.key) is not DecodeState.WAITING
    slot.loaded = Adapter(lambda _: AdapterLayer(), 0)
    bench.run()
    assert all(seq.output_token_ids == _expected([3] * 16, 8) for seq in waiting)


@pytest.mark.parametrize("state", ["RESERVED", "WAITING", "PREFILLING", "RUNNING"])
def test_who_lacks_its_adapter_can_be_dropped_at_any_time(state: str) -> None:
    bench, slot = Bench(columns=10), AdapterSlot("digest", Path("folder"))
    seq = _adapted("dropped", [3] * 16, slot, num_received=4 * (state == "PREFILLING"))
    if state == "WAITING":
        bench.scheduler.add(seq)
    elif state == "RESERVED":
        bench.scheduler.reserve(seq)
    else:
        bench.hand_over(seq)
    assert bench.scheduler.state(seq.key) is DecodeState[state]
    bench.step()
    bench.scheduler.drop(seq.key)
    assert bench.scheduler.state(seq.key) is None
    bench.pool.check_idle()


async def test_who_was_begun_elsewhere_and_finds_no_place_for_its_adapter_is_turned_away() -> None:
    """It has blocks, and no token by which its gateway could tell that it is held up. Who has one stays, and so does
    who waits for its KV."""
    bench, told = Bench(), list[str]()
    pool = AdapterPool(lambda digest, folder: Adapter(lambda _: AdapterLayer(), 0), 1)

    def leave(seq: Sequence, retry_after_s: float) -> None:
        told.append(seq.request_id)
        bench.scheduler.drop(seq.key)

    loading = ghost_loading(pool, bench.scheduler.adapter_users, leave, wait_s=0.0)
    theirs = loading.want(AdapterRef(name="theirs", digest="theirs", folder="theirs"))
    bench.hand_over(_adapted("runs", [2, 3], theirs))
    assert pool.next_load(bench.scheduler.adapter_users(), 0.0) is theirs
    pool.has_loaded(theirs, pool.load("theirs", Path("theirs")), 0.0)
    own = loading.want(AdapterRef(name="own", digest="own", folder="own"))
    decodes, begun, reserved = (
        _adapted(name, [4] * 8, own, num_received=4 * (name == "begun")) for name in ("decodes", "begun", "reserved")
    )
    bench.hand_over(decodes)
    bench.hand_over(begun)
    bench.scheduler.reserve(reserved)
    loading.retry()
    assert told == ["begun"]
    assert bench.scheduler.state(decodes.key) is DecodeState.RUNNING
    assert bench.scheduler.state(reserved.key) is DecodeState.RESERVED
    await loading.close()


async def test_nobody_waits_for_ever_for_an_adapter_that_is_never_read() -> None:
    """Its folder may be of a server that does not answer. One is loaded at a time, so others wait behind it."""
    bench, told, is_read = Bench(), list[str](), threading.Event()

    def load(digest: str, folder: Path) -> Adapter:
        is_read.wait()
        return Adapter(lambda _: AdapterLayer(), 0)

    def leave(seq: Sequence, retry_after_s: float) -> None:
        told.append(seq.request_id)
        bench.scheduler.drop(seq.key)

    loading = ghost_loading(AdapterPool(load, 2), bench.scheduler.adapter_users, leave, wait_s=0.01)
    try:
        for name in ("hangs", "waits"):
            slot = loading.want(AdapterRef(name=name, digest=name, folder=name))
            bench.scheduler.add(_adapted(name, [2, 3], slot))
        await eventually(lambda: sorted(told) == ["hangs", "waits"])
    finally:
        is_read.set()
        await loading.close()


def test_who_waits_behind_an_adapter_that_is_never_read_keeps_no_place_from_others() -> None:
    """Requests that name none would find no room at this worker for as long as a server of adapters does not answer."""
    bench, pool = Bench(max_num_seqs=2), AdapterPool(lambda digest, folder: Adapter(lambda _: AdapterLayer(), 0), 4)
    for name in ("hangs", "waits", "waits, too"):
        bench.scheduler.add(_adapted(name, [2, 3], pool.want(name, Path(name))))
    assert pool.next_load(bench.scheduler.adapter_users(), 0.0) is not None
    for now in (1.0, 10.0):
        assert pool.next_load(bench.scheduler.adapter_users(), now) is None
        assert bench.scheduler.can_reserve(3)


def test_decodes_go_on_while_a_long_prompt_is_computed_in_chunks() -> None:
    bench = Bench(token_budget=6)
    bench.scheduler.add(_seq("short", [2, 3], max_tokens=20))
    bench.step()
    bench.scheduler.add(_seq("long", [4] * 40, max_tokens=2))
    for _ in range(7):
        plan = bench.scheduler.plan()
        assert [(i.seq.request_id, i.num_tokens) for i in plan.items] == [("short", 1), ("long", 5)]
        assert [e.seq.request_id for e in bench.scheduler.finish_step(plan, bench.runner.execute(plan))] == ["short"]


def test_at_most_max_num_seqs_run() -> None:
    bench = Bench(max_num_seqs=3)
    for number in range(7):
        bench.scheduler.add(_seq(f"r{number}", [2, number]))
    bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (3, 4)
    assert not bench.scheduler.can_reserve(1)
    bench.run()


def test_as_many_are_handed_over_as_leave_a_prompt_a_token_of_each_step() -> None:
    """Or steps would be larger than what memory was planned for, and nothing would be computed beside them."""
    bench = Bench(max_num_seqs=8, token_budget=4)
    for number in range(8):
        seq = _seq(f"r{number}", [2, number + 2])
        if bench.scheduler.can_reserve(seq.num_tokens):
            bench.scheduler.reserve(seq)
            bench.runner.receive(seq)
            bench.scheduler.admit(seq.key, next_token(seq.prompt_token_ids))
    assert bench.scheduler.num_running == 3
    assert bench.scheduler.plan().num_tokens == 3


def test_a_sequence_is_handed_over_renewed_and_admitted() -> None:
    bench = Bench()
    reserved = _seq("r", [2, 3, 4, 5, 6])
    bench.scheduler.reserve(reserved)
    newer = dataclasses.replace(_seq("r", [2, 3, 4, 5, 6], _expected([2, 3, 4, 5, 6], 4)), attempt=1)
    lease = reserved.lease
    assert bench.scheduler.renew(reserved.key, newer)
    assert newer.lease is lease and reserved.lease is None
    assert reserved.key not in bench.scheduler
    bench.runner.receive(newer)
    bench.scheduler.admit(newer.key, _expected([2, 3, 4, 5, 6], 5)[4])
    emissions = bench.run()
    assert [e.token.token_id for e in emissions] == _expected([2, 3, 4, 5, 6], 8)[5:]
    assert [e.index for e in emissions] == [5, 6, 7]


def test_a_renewal_that_does_not_fit_changes_nothing() -> None:
    bench = Bench(columns=3)
    reserved = _seq("r", [2, 3, 4])
    bench.scheduler.reserve(reserved)
    newer = dataclasses.replace(_seq("r", [2, 3, 4], [5] * 10), attempt=1)
    assert not bench.scheduler.renew(reserved.key, newer)
    assert bench.scheduler.state(reserved.key) is DecodeState.RESERVED
    assert newer.lease is None
    bench.scheduler.drop(reserved.key)
    bench.pool.check_idle()


@pytest.mark.parametrize("keeps", ["doomed", "alive"])
def test_blocks_of_a_step_in_flight_are_freed_only_after_it(keeps: str) -> None:
    bench = Bench()
    seq = _seq("r", [2, 3, 4])
    bench.scheduler.add(seq)
    plan = bench.scheduler.plan()
    if keeps == "doomed":
        bench.scheduler.drop(seq.key)
        assert seq.key in bench.scheduler
    assert bench.pool.num_held == 1
    emissions = bench.scheduler.finish_step(plan, bench.runner.execute(plan))
    assert bool(emissions) is (keeps == "alive")
    assert bench.pool.num_held == int(keeps == "alive")
