"""The two ends of a hand-off agree on a digest: of both kinds, over real transports, on damage, and by device."""

from __future__ import annotations

import pytest
import torch

from engine.memory.streams import Event
from engine.sampling.params import SamplingParams
from kv_transfer.digest import DIGEST_KINDS, DigestKind, agreed_kind, slab_digest
from kv_transfer.handoff import receiver as receiving
from kv_transfer.handoff import sender as sending
from kv_transfer.handoff.slab_copy import fill_slab, write_slab
from kv_transfer.transports.choose import TransferConfig, TransportKind
from prefill_workers.worker import PrefillWorkerConfig
from tests.interpreted.test_copying import NUM_TOKENS, End, slab_for
from tests.support.clusters.mini_cluster import MiniClusterConfig, mini_cluster
from tests.support.small_models import SmallModel

PROMPT = [7 + (3 * n) % 90 for n in range(150)]


@pytest.mark.parametrize(
    ("prefill", "decode", "agreed"),
    [
        ("xxh3_64", "xxh3_64", "xxh3_64"),
        ("row_sum_64", "xxh3_64", "row_sum_64"),
        ("xxh3_64", "row_sum_64", "row_sum_64"),
        ("row_sum_64", "row_sum_64", "row_sum_64"),
    ],
)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_hand_offs_use_what_was_agreed(
    llama: SmallModel,
    monkeypatch: pytest.MonkeyPatch,
    transport: TransportKind,
    prefill: DigestKind,
    decode: DigestKind,
    agreed: DigestKind,
) -> None:
    used: dict[str, set[str]] = {"fill": set(), "write": set()}

    def filling(*arguments: object, after: Event | None) -> int:
        used["fill"].add(str(arguments[-1]))
        return fill_slab(*arguments, after=after)  # type: ignore[arg-type]

    def writing(*arguments: object, after: Event | None) -> int:
        used["write"].add(str(arguments[-1]))
        return write_slab(*arguments, after=after)  # type: ignore[arg-type]

    monkeypatch.setattr(sending, "fill_slab", filling)
    monkeypatch.setattr(receiving, "write_slab", writing)
    config = MiniClusterConfig(
        model_ref=str(llama.folder),
        prefill_engine={"block_size": 8},
        decode_engine={"block_size": 5},
        prefill=PrefillWorkerConfig(chunk_tokens=64, max_slab_bytes=7 * 256),
        transfer=TransferConfig(transport=transport),
        digest_kinds={"prefill": prefill, "decode": decode},
    )
    params = SamplingParams(max_tokens=8, seed=1, temperature=0.0, ignore_eos=True)
    async with mini_cluster(config) as cluster:
        events = await cluster.generate("r", PROMPT, params)
        await cluster.idle()
    assert [event.token_id for event in events] == llama.local(PROMPT, params).tokens
    assert used == {"fill": {agreed}, "write": {agreed}}


@pytest.mark.parametrize("kind", DIGEST_KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_ends_find_the_same_whatever_their_blocks(kind: DigestKind, dtype: torch.dtype) -> None:
    source, target = End.make(3, 1, dtype, seed=1), End.make(16, 3, dtype, seed=2)
    slab = slab_for(source, NUM_TOKENS)
    sent = fill_slab(source.cache, source.row(2), 2, 0, NUM_TOKENS, memoryview(slab), kind)
    assert sent == slab_digest(slab, kind)
    assert write_slab(target.cache, target.row(2), 2, 0, NUM_TOKENS, memoryview(slab), kind) == sent
    slab[100] ^= 64
    assert write_slab(target.cache, target.row(2), 2, 0, NUM_TOKENS, memoryview(slab), kind) != sent


def test_the_kind_follows_the_device_unless_it_is_set() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 3)
    assert TransferConfig().digest_kind(cpu) == "xxh3_64"
    assert TransferConfig().digest_kind(gpu) == "row_sum_64"
    for kind in DIGEST_KINDS:
        assert TransferConfig(digest=kind).digest_kind(cpu) == TransferConfig(digest=kind).digest_kind(gpu) == kind


def test_agreement_is_the_same_from_both_ends() -> None:
    for ours in DIGEST_KINDS:
        assert agreed_kind(ours, ours) == ours
        for theirs in DIGEST_KINDS:
            assert agreed_kind(ours, theirs) == agreed_kind(theirs, ours)
