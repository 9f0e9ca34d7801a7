"""The decode scheduler with host memory: under everything that can come between two steps, and its rules one by one."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from decode_workers.pacing import LayerKvConfig, Speeds
from decode_workers.residency import Residency
from decode_workers.scheduler import DecodeScheduler
from engine.allocation import BlockAllocator
from engine.block_pool import BlockPool
from tests.ghost_runner import GhostRunner
from tests.test_decode_scheduler import BLOCK_SIZE, EOS, MAX_MODEL_LEN, TOKEN_BUDGET, DecodeMachine

GROUPS = 2
MODEL_COLUMNS = MAX_MODEL_LEN // BLOCK_SIZE
FAST = Speeds(prefill_tokens_per_s=1e3, decode_step_s=0.01, host_bytes_per_s=1e6)
SLOW_MEMORY = Speeds(prefill_tokens_per_s=1e5, decode_step_s=0.01, host_bytes_per_s=10.0)
LATE = Speeds(prefill_tokens_per_s=50.0, decode_step_s=1.0, host_bytes_per_s=1e3)


class TieredMachine(DecodeMachine):
    """The same stories, on a device that is too small and a host that may be."""

    patience = 12

    @initialize(
        columns=st.integers(2, 8),
        host_columns=st.integers(MODEL_COLUMNS, 14),
        staging_columns=st.integers(3, 12),
        max_num_seqs=st.integers(1, 6),
        speeds=st.sampled_from([FAST, SLOW_MEMORY, LATE, Speeds()]),
    )
    def set_out_in_tiers(
        self, columns: int, host_columns: int, staging_columns: int, max_num_seqs: int, speeds: Speeds
    ) -> None:
        longest = max(columns, min(host_columns, staging_columns)) * BLOCK_SIZE
        columns = columns if longest >= MAX_MODEL_LEN else MODEL_COLUMNS
        self.pool, self.host_pool = BlockPool(columns * GROUPS), BlockPool(host_columns * GROUPS)
        allocator = BlockAllocator(self.pool, layer_groups=GROUPS, block_size=BLOCK_SIZE, host_pool=self.host_pool)
        self.staging_columns = staging_columns
        self.runner = GhostRunner(allocator)
        config = LayerKvConfig(max_in_flight=8, growth_tokens=4, max_steps_without_prefill=3)
        tiers = Residency(allocator, config, staging_columns=staging_columns, block_bytes=10, speeds=lambda: speeds)
        self.scheduler = DecodeScheduler(
            allocator,
            max_num_seqs=max_num_seqs,
            token_budget=TOKEN_BUDGET,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=EOS,
            tiers=tiers,
        )

    @invariant()
    def the_host_pool_is_whole(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.host_pool.check()
        if self.plan is not None:
            staged = [item.seq for item in self.plan.items if item.seq.host_groups]
            assert sum(-(-seq.num_tokens // BLOCK_SIZE) for seq in staged) <= self.staging_columns

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "scheduler"):
            self.host_pool.check_idle()


TieredMachine.set_out = None  # type: ignore[assignment,method-assign]
TestTieredDecode = TieredMachine.TestCase
TestTieredDecode.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
