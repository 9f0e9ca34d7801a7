"""Nobody waits for ever on a decode worker, however many others keep coming."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from decode_workers.scheduler import DecodeState
from engine.model.adapters import TURN_S, AdapterPool, AdapterSlot
from engine.sequence import Sequence, StepPlan
from kernels.adapters import Adapter, AdapterLayer
from tests.decode_workers.test_tiered_decode import FAST, LATE, Bench, Speeds, sequence
from tests.support.ghost_runner import next_token


class Newcomers:
    """Hands a short sequence over before every step, if the scheduler has room for it."""

    def __init__(self, bench: Bench, *, prompt_tokens: int = 4, max_tokens: int = 6) -> None:
        self.bench = bench
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.num_taken = 0

    def come(self) -> None:
        while self.bench.scheduler.can_reserve(self.prompt_tokens):
            self.num_taken += 1
            prompt = [2 + self.num_taken % 7] * self.prompt_tokens
            self.bench.hand_over(f"n{self.num_taken}", prompt, self.max_tokens)


def _computes(plan: StepPlan, seq: Sequence) -> bool:
    return any(item.seq is seq for item in plan.items)


def _longest_wait(bench: Bench, seq: Sequence, come: Callable[[], None], num_steps: int) -> int:
    """Steps in a row that did nothing for `seq` before it ended."""
    longest = waiting = 0
    for _ in range(num_steps):
        come()
        waiting = 0 if _computes(bench.step(), seq) else waiting + 1
        longest = max(longest, waiting)
        if seq.key not in bench.scheduler:
            return longest
    raise AssertionError(f"{seq.request_id} has not ended in {num_steps} steps")


def _prompt_behind_newcomers(bench: Bench, max_tokens: int) -> Newcomers:
    """Have a prompt computed that comes behind the first of newcomers without an end, and check that it need not wait
    long."""
    newcomers = Newcomers(bench)
    newcomers.come()
    prompt = sequence("prompt", [5] * 20, max_tokens)
    bench.scheduler.add(prompt)
    assert _longest_wait(bench, prompt, newcomers.come, 60) <= 12
    return newcomers


def test_a_prompt_that_waits_for_blocks_comes_before_new_reservations() -> None:
    bench = Bench(columns=8, host_columns=1)
    assert _prompt_behind_newcomers(bench, max_tokens=4).num_taken > 2


def test_a_preempted_sequence_comes_before_new_reservations() -> None:
    bench = Bench(columns=9, host_columns=1)
    newcomers = Newcomers(bench, prompt_tokens=3, max_tokens=5)
    seqs = [bench.hand_over(f"r{number}", [2, number + 3] * 4, max_tokens=24) for number in range(2)]
    assert _longest_wait(bench, seqs[1], newcomers.come, 150) <= 30
    assert bench.scheduler.num_preemptions > 0
    assert newcomers.num_taken > 1


def test_two_on_the_device_do_not_wait_for_each_other_s_blocks_for_ever() -> None:
    """Each needs a column, none can be moved to the host, which newcomers keep full, and these always go on."""
    bench = Bench(columns=10, host_columns=8)
    seqs = [bench.hand_over(name, [2, number] * 6, max_tokens=28) for number, name in enumerate("ab")]
    newcomers = Newcomers(bench)
    newcomers.come()
    assert not any(seq.host_groups for seq in seqs) and bench.host_pool.num_available < 8
    for seq in seqs:
        assert _longest_wait(bench, seq, newcomers.come, 200) <= 20
    assert newcomers.num_taken > 5


def test_what_outgrew_the_ring_and_who_is_on_the_device_do_not_wait_for_each_other_s_blocks_for_ever() -> None:
    """One is on its way back with half of its layers, for the others there is no room; nor for the other's column."""
    bench = Bench(columns=8, host_columns=20, staging_columns=4)
    device, outgrown = bench.hand_over("device", [2] * 16, max_tokens=12), bench.hand_over("outgrown", [3] * 15, 8)
    assert not device.host_groups and outgrown.host_groups
    newcomers = Newcomers(bench)
    assert _longest_wait(bench, device, newcomers.come, 100) <= 20
    assert _longest_wait(bench, outgrown, newcomers.come, 100) <= 20
    assert newcomers.num_taken > 20


def test_who_lacks_its_adapter_on_a_full_device_keeps_nobody_from_host_memory() -> None:
    bench = Bench(columns=12, host_columns=40, staging_columns=4)
    device = bench.hand_over("device", [2] * 15, max_tokens=20)
    awaited = sequence("its KV is on the way", [3] * 27, 2)
    assert bench.scheduler.can_reserve(awaited.num_tokens)
    bench.scheduler.reserve(awaited)
    host = bench.hand_over("host", [4] * 4, max_tokens=11)
    assert host.host_groups and not (device.host_groups or awaited.host_groups)
    while _computes(bench.step(), device):
        pass
    assert bench.scheduler.state(device.key) is DecodeState.RUNNING and not device.host_groups
    assert not bench.scheduler.can_reserve(4), "it waits for a block"
    device.adapter = AdapterSlot("digest", Path("folder"))
    assert bench.scheduler.can_reserve(4), "it waits for its adapter"


def test_a_prompt_comes_to_its_adapter_s_turn_however_many_have_their_blocks_and_want_another() -> None:
    """There is room for one adapter. Who is handed over has blocks at once, and needs its adapter more than a prompt
    that has none."""
    bench = Bench(columns=8, host_columns=1)
    pool, num_loads = AdapterPool(lambda digest, folder: Adapter(lambda _: AdapterLayer(), 0), 1), 0

    def adapted(name: str, adapter: str, prompt: list[int], max_tokens: int) -> Sequence:
        seq = sequence(name, prompt, max_tokens)
        seq.adapter, seq.accepted_at = pool.want(adapter, Path(adapter)), bench.now
        return seq

    def come() -> None:
        nonlocal num_loads
        while bench.scheduler.can_reserve(4):
            seq = adapted(f"n{bench.now} {len(newcomers)}", "theirs", [2, 3, 4, 5], 6)
            newcomers.append(seq)
            bench.scheduler.reserve(seq)
            bench.runner.receive(seq)
            bench.scheduler.admit(seq.key, next_token(seq.prompt_token_ids))
        while (slot := pool.next_load(bench.scheduler.adapter_users(), bench.now)) is not None:
            num_loads += 1
            pool.has_loaded(slot, pool.load(slot.digest, slot.folder), bench.now)

    newcomers: list[Sequence] = []
    come()
    prompt = adapted("prompt", "its own", [5] * 20, 2)
    bench.scheduler.add(prompt)
    num_steps = round(TURN_S / bench.step_s)
    assert _longest_wait(bench, prompt, come, 4 * num_steps) <= 2 * num_steps
    assert num_loads <= 4
    assert len(newcomers) > num_steps / 6


def test_a_prompt_that_waits_for_blocks_has_room_beside_the_columns_that_newcomers_will_take() -> None:
    """The device holds the prompt and a newcomer, and no column for the growth of that one, which it is to have."""
    bench = Bench(columns=7, host_columns=1)
    _prompt_behind_newcomers(bench, max_tokens=2)


def test_a_prompt_in_host_memory_is_computed_beside_an_endless_stream_of_short_ones() -> None:
    """Decodes in host memory take most of the ring in every step, and other prompts need none of it."""
    bench = Bench(columns=8, host_columns=60, staging_columns=14, max_num_seqs=4, step_s=0.06)
    device = bench.hand_over("device", [2] * 8, max_tokens=400)
    decodes = [bench.hand_over(f"h{number}", [3, number + 4] * 10, max_tokens=80) for number in range(3)]
    assert not device.host_groups and all(seq.host_groups for seq in decodes)
    prompt = sequence("prompt", [5] * 40, 2)
    bench.scheduler.add(prompt)
    number = 0

    def come() -> None:
        nonlocal number
        number += 1
        bench.scheduler.add(sequence(f"short{number}", [6 + number % 5] * 3, 1))

    for _ in range(12):
        come()
        bench.step()
    assert prompt.num_computed == 40, "a chunk every five steps"
    assert bench.tiers.num_restores == 0, "they stay where they are"


def test_a_long_sequence_has_its_turns_although_short_ones_would_always_fit() -> None:
    """It needs all of the ring, of which they need one column each; and new ones keep coming."""
    bench = Bench(columns=1, host_columns=60, staging_columns=12, max_num_seqs=16)
    long = bench.hand_over("long", [5] * 40, max_tokens=7)
    newcomers = Newcomers(bench)

    def come() -> None:
        if bench.scheduler.num_running < 10:
            newcomers.num_taken += 1
            bench.hand_over(f"n{newcomers.num_taken}", [2 + newcomers.num_taken % 7] * 4, 6)

    assert _longest_wait(bench, long, come, 200) <= 20
    assert newcomers.num_taken > 10


def test_who_lacks_a_column_of_host_memory_comes_before_newcomers() -> None:
    """The host is full with sequences that have all come to the end of their columns; only the device has room."""
    bench = Bench(columns=10, host_columns=9, staging_columns=14, speeds=FAST)
    device = bench.hand_over("device", [2] * 30, max_tokens=8)
    waiting = [bench.hand_over(f"h{number}", [3, number + 4] * 6, max_tokens=26) for number in range(2)]
    assert not device.host_groups and all(seq.host_groups for seq in waiting)
    newcomers = Newcomers(bench, max_tokens=9)
    for seq in waiting:
        _longest_wait(bench, seq, newcomers.come, 200)
    assert newcomers.num_taken > 2


def test_a_prompt_that_lacks_its_adapter_keeps_no_room_of_the_ring() -> None:
    """The device is full, so somebody has to give way; what is kept for an overdue prompt says that it will do so."""
    bench = Bench(columns=9, host_columns=8, staging_columns=8, speeds=Speeds())
    running = [bench.hand_over(name, [2, number] * 6, max_tokens=20) for number, name in enumerate("ab")]
    begun = sequence("begun elsewhere", [5] * 18, 2)
    begun.num_received, begun.adapter = 3, AdapterSlot("digest", Path("folder"))
    bench.scheduler.reserve(begun)
    bench.runner.receive(begun)
    bench.scheduler.admit(begun.key, None)
    assert begun.host_groups
    waiting = sequence("waiting", [6] * 11, 2)
    bench.scheduler.add(waiting)
    for _ in range(200):
        bench.step()
    assert [len(seq.output_token_ids) for seq in (*running, waiting)] == [20, 20, 2]
    begun.adapter.loaded = Adapter(lambda _: AdapterLayer(), 0)
    bench.run()


def test_decodes_that_are_late_let_a_prompt_in_and_go_on_themselves() -> None:
    bench = Bench(columns=40, speeds=LATE, step_s=1.0)
    running = bench.hand_over("running", [2, 3], max_tokens=30)
    prompt = sequence("prompt", [5] * 70, 2)
    bench.scheduler.add(prompt)
    newcomers = Newcomers(bench)
    assert _longest_wait(bench, running, newcomers.come, 60) == 0
    assert bench.scheduler.state(prompt.key) in (DecodeState.PREFILLING, DecodeState.RUNNING, None)
    assert next_token([2, 3]) == running.output_token_ids[0]
