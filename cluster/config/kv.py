"""The settings of KV memory: how large each tier is, and what may rest where.

Knows what must hold between them; how much memory a machine has is found out when a worker starts.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from cluster.config.fields import BudgetField, KvMemory, Settings, SizeBytes
from kv_transfer.tiers.config import Budget


class KvPoolSettings(Settings):
    block_size: int = Field(16, ge=1, le=1024, description="Tokens per KV block.")
    memory: KvMemory = Field(
        KvMemory(num_bytes=2**30),
        description="KV cache of one worker: bytes, a text such as 2GiB, a number of blocks such as 4096 blocks, or a"
        " share such as 90%: what is left of that share of the device's memory, as measured at the start.",
    )
    host_memory: BudgetField = Field(
        Budget(num_bytes=2**30),
        description="Host memory of one worker's KV, on top: bytes, a size, or a share of the machine's memory such as"
        " 20%; 0: no host tier.",
    )
    staging: SizeBytes = Field(
        64 * 2**20,
        description="Device memory, on top, through which layers that rest in host memory pass while they compute:"
        " bounds what one step can fetch.",
    )

    @property
    def has_host_memory(self) -> bool:
        return self.host_memory.num_bytes != 0


class DiskSettings(Settings):
    path: str = Field(
        min_length=1, description="Folder on each node; survives restarts. Each worker takes a subfolder."
    )
    budget: BudgetField = Field(
        Budget(num_bytes=10 * 2**30), description="Most that one worker keeps there: a size, or a share of the disk."
    )
    sync: bool = Field(
        False,
        description="Wait for the disk to confirm each block; without, a crash of the machine may lose the newest.",
    )

    @field_validator("budget")
    @classmethod
    def _check_budget(cls, budget: Budget) -> Budget:
        if budget.num_bytes == 0:
            raise ValueError("a disk tier of 0 bytes keeps nothing; leave kv.disk out instead")
        return budget


class KvSettings(Settings):
    layerkv: Literal["auto", "off"] = Field(
        "auto",
        description="`auto`: layers of a sequence may rest in host memory wherever a worker has some, so that requests"
        " do not queue for device KV; `off`: a sequence is computed on the device only.",
    )
    disk: DiskSettings | None = Field(None, description="Keep the KV of prompts on disk as well; empty: no disk tier.")
    prefix_cache: bool = Field(True, description="Reuse the KV of prompts that begin alike.")
    prefill: KvPoolSettings = Field(KvPoolSettings(), description="Memory of each prefill worker.")
    decode: KvPoolSettings = Field(KvPoolSettings(), description="Memory of each decode worker.")

    @model_validator(mode="after")
    def _check_disk(self) -> Self:
        if self.disk is None:
            return self
        if not self.prefix_cache:
            raise ValueError("kv.disk keeps prompts for the prefix cache; set kv.prefix_cache: true or leave it out")
        if not (self.prefill.has_host_memory or self.decode.has_host_memory):
            raise ValueError(
                "kv.disk is filled from host memory, and no worker has any; give kv.prefill.host_memory or"
                " kv.decode.host_memory a size"
            )
        return self
