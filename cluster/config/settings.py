"""Legato's configuration: one frozen tree, checked once when it is loaded and never written back.

The tree is what `args` of the application in a Serve config file holds (see `ray_configs/`); `cluster.config.load`
loads it. Knows what is plausible in itself; what depends on the model or the machine (does the context fit the KV
memory?) is checked when a worker starts. `docs/guide/configuration.md` has a table of every setting, which a test
compares with this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from cluster.config.autoscaling import AutoscalingSettings
from cluster.config.fields import Settings, SizeBytes
from cluster.config.kv import KvPoolSettings, KvSettings
from cluster.config.model import ModelSettings
from cluster.config.slo import SloSettings
from cluster.slo.classes import NO_TARGETS, SloConfig

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


class PoolSettings(Settings):
    """What both pools of workers have."""

    num_cpus: float = Field(
        0.5,
        ge=0,
        description="CPUs that Ray sets aside for each worker, in its books: it binds nobody to a core, `threads` says"
        " what computes.",
    )
    num_gpus: float = Field(
        0.0, ge=0, description="GPUs that Ray sets aside for each worker; 0: it computes on the CPU."
    )
    resources: dict[str, float] = Field(
        {}, description="Custom Ray resources that each worker takes, to put a pool on nodes of one kind."
    )
    threads: int = Field(
        1, ge=1, description="The most threads that compute a step of each worker on a CPU; of each of its processes."
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="Processes among which each worker's model is divided; its heads must divide. Pools may differ. On"
        " GPUs each process has one: `num_gpus` is as many.",
    )
    max_waiting: int = Field(256, ge=1, description="Sequences that may wait in one worker; it refuses more.")
    calibration_s: float = Field(
        2.0,
        ge=0,
        description="How long a worker tries steps out at its start, so that its first requests are predicted well;"
        " 0: it learns from them.",
    )
    autoscaling: AutoscalingSettings | None = Field(
        None, description="Let the number of workers follow the load; `replicas` is then the number at start."
    )


class PrefillSettings(PoolSettings):
    replicas: int = Field(1, ge=0, description="Prefill workers; 0: the decode workers do both (colocated).")
    chunk_tokens: int = Field(512, ge=1, description="Prompt tokens computed in one step, over all sequences.")


class DecodeSettings(PoolSettings):
    replicas: int = Field(1, ge=1, description="Decode workers.")
    max_num_seqs: int = Field(64, ge=1, description="Sequences that one decode step may hold.")
    chunk_tokens: int = Field(256, ge=1, description="Prompt tokens a decode worker computes itself in one step.")
    reserve_wait_s: float = Field(
        60.0, ge=0, description="How long a reservation may wait for free KV blocks before it is refused."
    )
    max_in_flight: int = Field(
        256, ge=1, description="Sequences that one worker may hold in all its tiers, with LayerKV; the others pause."
    )
    overlap_steps: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Prepare the next decode step while one computes, and take its tokens in while the next one does;"
        " `auto`: on a GPU.",
    )
    cuda_graphs: Literal["auto", "off"] = Field(
        "auto",
        description="Record the forward pass of decode steps at a worker's start, for a few numbers of sequences up to"
        " `max_num_seqs`, and replay it; `auto`: on a GPU, without `tensor_parallel`.",
    )
    tpot_target_ms: float = Field(
        100.0, gt=0, description="Time per output token that sequences are paced by: those ahead of it wait first."
    )

    @model_validator(mode="after")
    def _check_in_flight(self) -> Self:
        if self.max_in_flight < self.max_num_seqs:
            raise ValueError(
                f"max_in_flight is {self.max_in_flight}, fewer than one step may hold (max_num_seqs is"
                f" {self.max_num_seqs}); raise the first or lower the second"
            )
        return self


class TransferSettings(Settings):
    transport: Literal["auto", "cuda_ipc", "nccl", "gloo", "shm", "tcp"] = Field(
        "auto",
        description="How KV moves; `auto`: shared memory on one node, TCP between nodes. `cuda_ipc`: within a GPU that"
        " both ends use, else like `auto`. `nccl` (GPUs) and `gloo` (CPUs): process groups of `torch.distributed`, or"
        " TCP where none can be made.",
    )
    slab_bytes: SizeBytes = Field(8 * 2**20, description="Size of one slab: the most KV that is sent as one piece.")
    num_slabs: int = Field(8, ge=2, description="Slabs of each link; two is the least that lets copying overlap.")
    num_connections: int = Field(2, ge=1, le=16, description="TCP connections of one link, for large slabs.")
    digest: Literal["auto", "xxh3_64", "row_sum_64"] = Field(
        "auto",
        description="How KV is verified; `auto`: by XXH3, but by a digest that GPUs compute where one end is on a GPU.",
    )
    lease_ttl_s: float = Field(10.0, gt=0, description="A reservation lapses when nothing is heard of it for so long.")


class GatewaySettings(Settings):
    replicas: int = Field(1, ge=1, description="Gateway replicas.")
    num_cpus: float = Field(0.5, ge=0, description="CPUs that Ray sets aside for each gateway.")
    max_body_bytes: SizeBytes = Field(4 * 2**20, description="Largest request body; more is answered with 413.")
    max_arriving_bytes: SizeBytes = Field(
        64 * 2**20,
        description="Of all bodies that have not arrived in full; beyond it the one that has been on its way longest is"
        " answered with 503.",
    )
    body_timeout_s: float = Field(30.0, gt=0, description="A request body must have arrived within this time.")
    request_deadline_s: float = Field(600.0, gt=0, description="A request that takes longer ends with 504.")
    max_concurrent: int = Field(
        512,
        ge=1,
        description="Sequences (choices) in flight in one gateway; more are answered with 429, and so is a request for"
        " several that would take more than half of what is left by others.",
    )
    unread_timeout_s: float = Field(
        30.0,
        gt=0,
        description="An answer of which the client takes nothing for so long is ended, and counted as `unread`.",
    )
    max_unread_bytes: SizeBytes = Field(
        256 * 2**20,
        description="Output that may wait in memory for clients to read it; beyond it the answer with most of it is"
        " ended, and one with more than half of it at once.",
    )
    retries: int = Field(
        3,
        ge=0,
        description="How often in a row a sequence is placed again after a failure without progress.",
    )
    share_prefixes: bool = Field(
        False,
        description="Reuse the KV of prompts among clients with different keys, too: a client that guesses another's"
        " prompt can then tell, by `cached_tokens` and by the time, that it was sent before.",
    )
    trust_tenant_header: bool = Field(
        False,
        description="`x-tenant` says whose a request is. Only where a proxy in front sets it and drops what clients"
        " send: whoever writes it has that tenant's share and prefixes.",
    )
    request_log: str | None = Field(
        None,
        min_length=1,
        description="File that each request is appended to when it ends, for `python -m cluster whatif`; empty: none.",
    )

    @model_validator(mode="after")
    def _check_arriving(self) -> Self:
        if self.max_arriving_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_arriving_bytes is {self.max_arriving_bytes}, less than one body may have (max_body_bytes is"
                f" {self.max_body_bytes}); raise the first or lower the second"
            )
        return self


class NetworkSettings(Settings):
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address that workers and the scheduler listen on; `node`: each node's own, for several machines.",
    )
    require_ray_token: bool = Field(
        True,
        description="Where `host` is not loopback, refuse a Ray that does not ask for its token"
        " (`RAY_AUTH_MODE=token`): whoever reaches such a Ray can run anything on it.",
    )


class SchedulerSettings(Settings):
    num_cpus: float = Field(0.1, ge=0, description="CPUs that Ray sets aside for the global scheduler.")
    heartbeat_s: float = Field(0.5, gt=0, description="Workers report this often.")
    stale_after_s: float = Field(3.0, gt=0, description="A worker silent for so long gets no new work.")
    local_prefill_below_tokens: int = Field(
        0, ge=0, description="Prompts shorter than this are prefilled by the decode worker itself; 0: none."
    )
    max_queued_tokens: int = Field(
        131_072, ge=1, description="Waiting prompt tokens per worker; more requests are answered with 429."
    )
    max_wait_s: float = Field(
        60.0, gt=0, description="A request without a target for its first token waits this long for room, then 429."
    )
    decision_log: str | None = Field(
        None,
        min_length=1,
        description="File that every placement, wait and refusal is appended to, as a line of JSON; empty: none.",
    )
    role_flips: bool = Field(
        False,
        description="Let a worker change its role where its pool can spare it and the other one lacks workers.",
    )

    @model_validator(mode="after")
    def _check_patience(self) -> Self:
        if self.stale_after_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"stale_after_s is {self.stale_after_s} with a heartbeat every {self.heartbeat_s} s; "
                "make it at least twice heartbeat_s, or one late report takes a worker out"
            )
        return self


class LegatoConfig(Settings):
    """The whole configuration."""

    model: ModelSettings = Field(ModelSettings(), description="What is served.")
    kv: KvSettings = Field(KvSettings(), description="KV cache.")
    prefill: PrefillSettings = Field(PrefillSettings(), description="The pool that computes prompts.")
    decode: DecodeSettings = Field(DecodeSettings(), description="The pool that generates tokens.")
    transfer: TransferSettings = Field(TransferSettings(), description="Moving KV from prefill to decode.")
    gateway: GatewaySettings = Field(GatewaySettings(), description="HTTP.")
    scheduler: SchedulerSettings = Field(SchedulerSettings(), description="Placement of requests.")
    slo: SloSettings | None = Field(
        None, description="Classes of service and their targets; empty: one class, `default`, without targets."
    )
    network: NetworkSettings = Field(NetworkSettings(), description="Between Legato's own processes.")
    wait_for_nodes: bool = Field(
        False,
        description="Ray adds nodes by itself (an autoscaler): start although the nodes that are there now do not hold"
        " everything.",
    )
    max_log_bytes: SizeBytes = Field(
        256 * 2**20,
        description="Size from which the file of `gateway.request_log` or `scheduler.decision_log` is renamed to"
        " NAME.1, in place of the one before, and another one begun.",
    )
    log_level: LogLevel = Field("INFO", description="Least severe messages that are logged.")

    @property
    def slo_classes(self) -> SloConfig:
        return NO_TARGETS if self.slo is None else self.slo.config()

    @property
    def colocated(self) -> bool:
        """One pool does both prefill and decode."""
        return self.prefill.replicas == 0 and self.prefill.autoscaling is None

    @model_validator(mode="before")
    @classmethod
    def _refuse_secret(cls, tree: Any) -> Any:
        if isinstance(tree, Mapping) and "secret" in tree:
            raise ValueError(
                "secret is no setting: Ray's dashboard shows a file's settings to whoever may look at it. Draw another"
                " one, set the variable LEGATO_SECRET to it on every node before Ray starts there, and remove this one"
            )
        return tree

    @model_validator(mode="after")
    def _check_pools(self) -> Self:
        pools: Mapping[str, PrefillSettings | DecodeSettings] = {"prefill": self.prefill, "decode": self.decode}
        for name, pool in pools.items():
            scaling = pool.autoscaling
            if scaling is not None and not scaling.min_replicas <= pool.replicas <= scaling.max_replicas:
                raise ValueError(
                    f"{name}.replicas is {pool.replicas}, outside {name}.autoscaling "
                    f"({scaling.min_replicas} to {scaling.max_replicas}); it is the number at start, so keep it within"
                )
        if self.decode.autoscaling is not None and self.decode.autoscaling.min_replicas == 0:
            raise ValueError("decode.autoscaling.min_replicas is 0; without a decode worker nothing is served: use 1")
        return self

    @model_validator(mode="after")
    def _check_batch_invariance(self) -> Self:
        if self.model.batch_invariant:
            for name, pool in (("prefill", self.prefill), ("decode", self.decode)):
                if pool.replicas and not pool.num_gpus:
                    raise ValueError(
                        f"model.batch_invariant is on, but {name}.num_gpus is 0, and only GPUs have such kernels; give"
                        " the pool GPUs or leave it off"
                    )
        return self

    @model_validator(mode="after")
    def _check_transport(self) -> Self:
        transport = self.transfer.transport
        for name, pool in (("prefill", self.prefill), ("decode", self.decode)):
            if pool.replicas and transport in (("gloo",) if pool.num_gpus else ("cuda_ipc", "nccl")):
                raise ValueError(
                    f"transfer.transport is {transport!r}, which does not move KV of {name} workers with"
                    f" {name}.num_gpus: {pool.num_gpus:g}; leave it at 'auto'"
                )
        return self

    @model_validator(mode="after")
    def _check_flips(self) -> Self:
        if self.scheduler.role_flips and self.colocated:
            raise ValueError(
                "scheduler.role_flips is on, but prefill.replicas is 0, so there is only one role; have prefill workers"
                " or leave it off"
            )
        return self

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        for name, pool, kv in (("prefill", self.prefill, self.kv.prefill), ("decode", self.decode, self.kv.decode)):
            if pool.tensor_parallel == 1:
                continue
            if pool.num_gpus:
                _check_group_on_gpus(name, pool, kv)
        return self

    @model_validator(mode="after")
    def _check_context(self) -> Self:
        context = self.model.max_model_len
        if context is None:
            return self
        for name, pool in (("prefill", self.kv.prefill), ("decode", self.kv.decode)):
            if pool.block_size > context:
                raise ValueError(
                    f"kv.{name}.block_size is {pool.block_size}, more than model.max_model_len ({context}), so that "
                    "no block could ever be full; use a smaller one, 16 for example"
                )
        if not self.colocated and self.scheduler.local_prefill_below_tokens > context:
            raise ValueError(
                f"scheduler.local_prefill_below_tokens is {self.scheduler.local_prefill_below_tokens}, beyond "
                f"model.max_model_len ({context}), so no prompt would ever be handed over; lower it, or say so with "
                "prefill.replicas: 0"
            )
        return self


def _check_group_on_gpus(name: str, pool: PoolSettings, kv: KvPoolSettings) -> None:
    """Raises ValueError."""
    if pool.num_gpus < pool.tensor_parallel:
        raise ValueError(
            f"{name}.tensor_parallel is {pool.tensor_parallel}, but {name}.num_gpus is {pool.num_gpus:g}, and each of"
            f" the processes has a GPU of its own; set {name}.num_gpus: {pool.tensor_parallel}"
        )
    if kv.has_host_memory:
        raise ValueError(
            f"{name}.tensor_parallel is {pool.tensor_parallel} with GPUs and kv.{name}.host_memory, but between host"
            f" memory and several GPUs no KV can be moved yet; set kv.{name}.host_memory: 0"
        )
