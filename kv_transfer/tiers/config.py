"""How much memory and disk a worker's KV tiers may take, and where. Checked before a worker starts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """An amount of memory: bytes, or a share of what the machine has. Exactly one of the two is set. 0 bytes: the tier
    is not used."""

    num_bytes: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if (self.num_bytes is None) == (self.share is None):
            raise ValueError("give a budget either in bytes or as a share")
        if self.num_bytes is not None and self.num_bytes < 0:
            raise ValueError(f"a budget of {self.num_bytes} bytes means nothing; use 0 to do without")
        if self.share is not None and not 0 < self.share <= 0.9:
            raise ValueError(f"a share of {self.share:.0%} leaves too little or takes nothing; use 1% to 90%, or 0")

    def resolve(self, total_bytes: int) -> int:
        """The budget in bytes where there are `total_bytes` in all."""
        return self.num_bytes if self.num_bytes is not None else int((self.share or 0.0) * total_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskConfig:
    """`folder` holds a subfolder for each worker of the node. `sync`: a block counts as kept once the disk says so."""

    folder: str
    budget: Budget
    sync: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersConfig:
    """One worker's tiers below the device. `host_folder` must lie in shared memory; `disk` None: no disk tier. A prefix
    that is not loaded within `load_timeout_s` is computed."""

    host: Budget
    host_folder: str = "/dev/shm"
    disk: DiskConfig | None = None
    load_timeout_s: float = 2.0
