"""All tiers of two workers at once, under whatever may come between any two moments.

After each operation every pool is whole, the segment's index is the pool's, and every block that can be found, in any
tier, holds what its name says: nobody writes where another may read. In the end everyone has been answered, exactly,
and nothing is held.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.kv.prefix import block_hashes
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence
from tests.kv_transfer.tiers.tier_world import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MODEL_COLUMNS,
    SHARED_MEMORY,
    DecodeNode,
    PrefillNode,
    Sizes,
    Truth,
)
from tests.support.thoroughness import examples
from tests.support.waiting import HANGS_S, eventually

CONVERSATIONS = [[random.Random(number).randrange(2, 20) for _ in range(MAX_MODEL_LEN)] for number in range(3)]
some = st.integers(0, 2**16)
prompts = st.tuples(
    st.integers(0, len(CONVERSATIONS) - 1), st.integers(1, 27), st.lists(st.integers(20, 21), max_size=2)
)


def _damage(path: Path, at: int, torn: bool) -> None:
    with path.open("r+b") as file:
        size = len(content := file.read())
        if torn and size:
            file.truncate(at % size)
        elif size:
            file.seek(at % size)
            file.write(bytes([content[at % size] ^ 1 << at % 8]))


class TiersMachine(RuleBasedStateMachine):
    @initialize(
        columns=st.integers(MODEL_COLUMNS, 14),
        host_columns=st.integers(2, 24),
        staging_columns=st.integers(3, 12),
        disk_columns=st.integers(1, 24),
        loads=st.sampled_from([True, True, False]),
    )
    def set_out(self, columns: int, host_columns: int, staging_columns: int, disk_columns: int, loads: bool) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="legato-tiers-"))
        sizes = Sizes(
            columns=columns,
            host_columns=host_columns,
            staging_columns=staging_columns,
            disk_columns=disk_columns,
            loads=loads,
            scope=uuid.uuid4().hex,
            disk_folder=self.folder,
        )
        self.truth = Truth()
        self.digests: dict[bytes, None] = {}
        self.num_requests = 0
        self.decode, self.prefill = DecodeNode(sizes), PrefillNode(sizes)
        for worker in self.workers:
            self.loop.run_until_complete(_open(worker))

    @property
    def workers(self) -> tuple[DecodeNode, PrefillNode]:
        return self.decode, self.prefill

    # --- requests ---

    @rule(
        wanted=st.lists(prompts, min_size=1, max_size=4),
        max_tokens=st.integers(1, 10),
        salt=st.sampled_from(["", "", "tenant"]),
    )
    def compute_at_decode(self, wanted: list[tuple[int, int, list[int]]], max_tokens: int, salt: str) -> None:
        for prompt in wanted:
            self._with_loop(self.decode.add, self._sequence(prompt, max_tokens, salt))

    @rule(prompt=prompts, salt=st.sampled_from(["", "", "tenant"]))
    def compute_at_prefill(self, prompt: tuple[int, int, list[int]], salt: str) -> None:
        self._with_loop(self.prefill.add, self._sequence(prompt, 1, salt))

    @rule(prompt=prompts, max_tokens=st.integers(2, 10))
    def hand_over(self, prompt: tuple[int, int, list[int]], max_tokens: int) -> None:
        seq = self._sequence(prompt, max_tokens, "")
        if self.decode.scheduler.can_reserve(seq.num_tokens):
            self.decode.scheduler.reserve(seq)
            self.decode.stories[seq.key] = seq
            self._with_loop(self.decode.receive, seq)

    @rule(which=some)
    def end_hand_over(self, which: int) -> None:
        # No precondition: what threads have done by now must not decide which rules Hypothesis may choose from.
        keys = list(self.prefill.handing_over)
        if keys:
            self._with_loop(self.prefill.drop, keys[which % len(keys)])

    @rule(which=some, at_decode=st.booleans())
    def cancel(self, which: int, at_decode: bool) -> None:
        worker = self.workers[not at_decode]
        keys = list(worker.stories)
        if keys:
            self._with_loop(worker.drop, keys[which % len(keys)])

    # --- steps ---

    @rule(at_decode=st.booleans(), count=st.integers(1, 8))
    def step(self, at_decode: bool, count: int) -> None:
        """The end of one that is under way, then whole ones."""
        worker = self.workers[not at_decode]
        for _ in range(count):
            if worker.plan is None and not worker.begin_step():
                return
            self._with_loop(worker.finish_step)
            self.every_tier_is_whole()

    @rule(at_decode=st.booleans())
    def calm(self, at_decode: bool) -> None:
        """All that is under way between the tiers comes to its end."""
        worker = self.workers[not at_decode]
        if worker.plan is None:
            self.loop.run_until_complete(eventually(lambda: not worker.prefix.num_loading))
            assert worker.disk.flush(HANGS_S)
            self.loop.run_until_complete(asyncio.sleep(0.001))

    @rule(at_decode=st.booleans())
    def begin_step(self, at_decode: bool) -> None:
        worker = self.workers[not at_decode]
        if worker.plan is None:
            worker.begin_step()

    @rule(at_decode=st.booleans())
    def fail_step(self, at_decode: bool) -> None:
        worker = self.workers[not at_decode]
        if worker.plan is not None or worker.begin_step():
            self._with_loop(worker.fail_step)

    # --- time, and what goes wrong ---

    @rule(milliseconds=st.integers(0, 4))
    def breathe(self, milliseconds: int) -> None:
        """The tiers' threads get on with it, and report."""
        self.loop.run_until_complete(asyncio.sleep(milliseconds / 1e3))

    @rule(at_decode=st.booleans(), tiers=st.sampled_from(["device", "host", "device and host"]))
    def evict(self, at_decode: bool, tiers: str) -> None:
        worker = self.workers[not at_decode]
        for name, memory in (("device", worker.device), ("host", worker.host)):
            if name in tiers:
                memory.pool.drop_cached()

    @rule(which=some, at=some, torn=st.booleans())
    def damage(self, which: int, at: int, torn: bool) -> None:
        paths = sorted(self.folder.rglob("*.kv"))
        if paths:
            with suppress(FileNotFoundError):  # a tier's thread may just have given the slot up
                _damage(paths[which % len(paths)], at, torn)

    @rule(at_decode=st.booleans(), crash=st.booleans())
    def restart(self, at_decode: bool, crash: bool) -> None:
        worker = self.workers[not at_decode]
        self.loop.run_until_complete(worker.close(crash=crash))
        kept = set(worker.host.pool.findable()) if crash else set()
        self.loop.run_until_complete(_open(worker))
        assert worker.segment.adopted is crash
        assert set(worker.host.pool.findable()) == kept, "a crash loses no block in host memory"

    # --- what must hold ---

    @invariant()
    def every_tier_is_whole(self) -> None:
        if hasattr(self, "loop"):
            for worker in self.workers:
                worker.check(self.truth)
            self.prefill.verify_hand_overs()

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            for worker in self.workers:
                self.loop.run_until_complete(self._run_out(worker))
                self.every_tier_is_whole()
                worker.check_disk(self.truth, list(self.digests))
        finally:
            for worker in self.workers:
                self.loop.run_until_complete(worker.close(crash=False))
                worker.disk.check_idle()
            self.loop.close()
            shutil.rmtree(self.folder)
            assert not list(SHARED_MEMORY.glob(f"*{self.decode.sizes.scope}*"))

    async def _run_out(self, worker: DecodeNode | PrefillNode) -> None:
        """Everyone is answered in a bounded number of steps, and then nothing is held."""
        if worker.plan is not None:  # it may be of such alone as have left
            self._gets_on(worker)
        for _ in range(60 * len(worker.stories) + 20):
            # At times its threads hold what it waits for.
            await eventually(lambda: not worker.stories or self._gets_on(worker), what="someone starves")
        assert not worker.stories, f"{sorted(worker.stories)} starve"
        await eventually(lambda: worker.is_quiet, what="something is held for nobody")
        worker.device.pool.check_idle()
        worker.host.pool.check_idle()
        assert worker.scheduler.num_running == worker.scheduler.num_waiting == 0

    # --- helpers ---

    def _gets_on(self, worker: DecodeNode | PrefillNode) -> bool:
        """One step, or the end of a hand-off, if there is one to make."""
        if worker.plan is not None or worker.begin_step():
            worker.finish_step()
            self.every_tier_is_whole()
        elif worker is self.prefill and self.prefill.handing_over:
            worker.drop(next(iter(self.prefill.handing_over)))
        else:
            return False
        return True

    def _with_loop(self, call: object, *args: object) -> None:
        """What workers do on their loop."""

        async def called() -> None:
            call(*args)  # type: ignore[operator]

        self.loop.run_until_complete(called())

    def _sequence(self, prompt: tuple[int, int, list[int]], max_tokens: int, salt: str) -> Sequence:
        self.num_requests += 1
        conversation, length, tail = prompt
        seq = Sequence(
            request_id=f"r{self.num_requests}",
            attempt=0,
            params=SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True),
            prompt_token_ids=CONVERSATIONS[conversation][:length] + tail,
            cache_salt=salt,
        )
        self.truth.add(seq)
        self.digests.update(dict.fromkeys(block_hashes(seq.prompt_token_ids, BLOCK_SIZE, salt)))
        return seq


async def _open(worker: DecodeNode | PrefillNode) -> None:
    worker.open()


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(
    max_examples=examples(60), stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
