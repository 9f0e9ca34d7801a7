"""What workers report to the global scheduler, and its orders to them."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from pydantic import Field

from engine.cost_model.noise import DEVIATES
from kv_transfer.messages.codec import Message, message, record
from kv_transfer.messages.fields import Count, Flag, Items, NonNegative, PrefixSource, Role, SourceName, Text, Tier
from kv_transfer.messages.requests import Endpoint

Ratio = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0.0)]
Ratios = Annotated[list[Ratio], Field(fail_fast=True, min_length=len(DEVIATES), max_length=len(DEVIATES))]
Correlation = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0.0, lt=1.0)]


@record
class WorkerInfo:
    """What never changes in a worker's life."""

    worker_id: Text
    role: Role
    endpoint: Endpoint
    pid: Count
    model: Text
    compatibility: Text
    max_model_len: Count
    num_blocks: Count
    block_size: Count
    layer_groups: Count
    chunk_tokens: Count = 0  # the budget of one step; 0: unknown
    max_num_seqs: Count = 0  # held at once; 0: not bounded by their number
    home: Role | None = None  # of the pool that it was started in; None: its role
    home_model: Text | None = None  # of that pool; None: its model
    models: Items[Text] = field(default_factory=list)  # others that it may become a worker of
    load_s: NonNegative = 0.0  # that its model took from when it was wanted, but for compiling kernels; 0: unknown
    keeps_prefixes: Flag = True  # prompts find what earlier ones left
    arithmetic: Text = ""  # equal where sums have the same bits, as `kernels.ops.arithmetic` has it; "": unknown

    def serves(self, model: str) -> bool:
        """Whether requests for this model are its own; "": for whichever there is."""
        return model in ("", self.model)


@record
class TierBlocks:
    """Blocks of one tier; on disk a block is a whole column."""

    free: Count
    cached: Count
    held: Count


@record
class DiskReport:
    """What a worker's disk tier did since it was opened, in columns where the name does not say otherwise."""

    restored: Count = 0  # found in the folder at the start
    lost: Count = 0  # there, but damaged or unreadable
    stored: Count = 0
    dropped_queue: Count = 0  # not written because as much as allowed was queued already
    dropped_paused: Count = 0  # not written because writing had failed repeatedly before
    dropped_slots: Count = 0  # not written because all slots were being read
    write_errors: Count = 0
    read_bytes: Count = 0
    written_bytes: Count = 0


@record
class TiersReport:
    """A worker's memory tiers: what they hold now, and what was done with them since the worker's start."""

    blocks: dict[Tier, TierBlocks] = field(default_factory=dict)
    num_in_host: Count = 0  # sequences of which a part, or all, rests in host memory now
    host_bytes_per_s: NonNegative = 0.0  # measured, of copies between device and host; 0 without host memory
    num_host_landings: Count = 0  # sequences that had a part in host memory when they got their blocks
    num_offloads: Count = 0
    num_restores: Count = 0
    num_offloaded_blocks: Count = 0  # moved by those
    num_restored_blocks: Count = 0
    num_preemptions: Count = 0
    hit_tokens: dict[PrefixSource, Count] = field(default_factory=dict)  # of prompts computed here
    missed_tokens: Count = 0  # of the same prompts
    loaded_columns: dict[SourceName, Count] = field(default_factory=dict)  # into host memory
    failed_columns: dict[SourceName, Count] = field(default_factory=dict)  # that a load did not bring in time
    host_stored_columns: Count = 0
    host_dropped_columns: Count = 0  # not copied to host memory: no room, or too many copies queued
    disk: DiskReport | None = None


@record
class StepNoiseReport:
    """How steps of one kind scatter: see `engine.cost_model.noise.StepNoise`."""

    ratios: Ratios
    correlation: Correlation


@record
class StepCostReport:
    """A worker's cost model as it is fitted to its own steps: see `engine.cost_model.step_cost.StepCost`, in seconds.

    The errors are medians of |measured / predicted - 1| over its latest steps of each kind; without any, its first
    guess's own. The stretches are what those steps took, all together, over what was predicted: more than 1 where some
    take several times as long as usual. No noise: it is not known yet.
    """

    base_s: NonNegative
    prefill_token_s: NonNegative
    prefill_pair_s: NonNegative
    decode_s: NonNegative
    context_token_s: NonNegative
    prefill_base_s: NonNegative = 0.0
    prefill_error: NonNegative = 0.0
    decode_error: NonNegative = 0.0
    prefill_stretch: NonNegative = 1.0
    decode_stretch: NonNegative = 1.0
    prefill_noise: StepNoiseReport | None = None
    decode_noise: StepNoiseReport | None = None


@record
class StepsReport:
    """What a worker has computed since its start, in steps that succeeded."""

    num_prefill: Count = 0  # steps with prompt tokens
    prefill_tokens: Count = 0  # of these steps: of prompts, and the next ones of sequences that decode; no drafts
    num_decode: Count = 0  # the other steps
    decode_tokens: Count = 0


@record
class DraftReport:
    """Tokens that one drafter guessed since the worker's start, and that steps checked."""

    num_drafted: Count = 0
    num_accepted: Count = 0  # of those, the ones that became tokens


@record
class LinkReport:
    """A worker's hand-offs to one other that this one has verified, since the start of either."""

    num_handoffs: Count = 0
    num_bytes: Count = 0
    num_hidden_bytes: Count = 0  # sent before the prompt's last step was over
    exposed_s: NonNegative = 0.0  # from the ends of the prompts' last steps until decode could go on with them


@record
class WorkerSnapshot:
    """What changes. `sequence_number` grows with each snapshot of a worker.

    `draining`: it takes nothing new, as it is sick, is about to change its role or model, or is `stopping`: its process
    ends, and Serve counts it no more. A sick one Serve counts until it replaces it.
    """

    worker_id: Text
    sequence_number: Count
    draining: Flag
    num_running: Count
    num_waiting: Count
    queued_prefill_tokens: Count  # uncomputed tokens of everything accepted
    blocks_available: Count
    num_leases: Count
    num_paused: Count = 0  # of the running, those that take turns because they rest in host memory
    context_tokens: Count = 0  # of the running decodes, together
    num_local_waiting: Count = 0  # prompts that a decode worker is to compute itself, and has not
    num_pending: Count = 0  # reservations that wait for room
    num_handing_over: Count = 0  # of the running and waiting, those whose prompts it computes for another worker
    oldest_wait_s: NonNegative = 0.0  # of the waiting, since the first of them came; 0 without any
    steps: StepsReport = field(default_factory=StepsReport)
    drafts: dict[Text, DraftReport] = field(default_factory=dict)  # by drafter
    tokens_per_step: NonNegative = 1.0  # that a decoding sequence had of each of its steps lately, in the mean
    drafts_stretch: NonNegative = 1.0  # how many times as long these took as they would have without drafts
    links: dict[Text, LinkReport] = field(default_factory=dict)  # by the other worker's id, of the latest ones
    num_failed_handoffs: Count = 0  # that came to nothing here, since its start
    unreachable: Items[Text] = field(default_factory=list)  # decode workers to whom it could make no link lately
    step_cost: StepCostReport | None = None  # None until there is one
    tiers: TiersReport = field(default_factory=TiersReport)
    adapters: Items[Text] = field(default_factory=list)  # digests of those that are loaded and drain for no other
    adapter_load_s: NonNegative = 0.0  # that the last one took to load, and what there is to wait for a place now
    stopping: Flag = False


KnownWorker = tuple[WorkerInfo, WorkerSnapshot]
"""A worker and its newest snapshot."""


@record
class LoadingReport:
    """How far a worker is that has yet to load its model, in bytes of the checkpoint's files: see
    `engine.checkpoint.weights.LoadProgress`."""

    worker_id: Text
    role: Role
    model: Text
    home: Role  # of the pool that it was started in
    home_model: Text  # of that pool
    pid: Count
    total_bytes: Count = 0  # 0: it has not begun to read
    read_bytes: Count = 0
    placed_bytes: Count = 0  # all: it makes what else it needs, and tries steps out


@message
class Loading(Message):
    """Worker to scheduler, twice a second until it registers, on a connection of its own: so far am I."""

    report: LoadingReport


@message
class Register(Message):
    """Worker to scheduler, first on each connection but that of its `Loading`: here I am."""

    info: WorkerInfo
    snapshot: WorkerSnapshot


@message
class Heartbeat(Message):
    """Worker to scheduler, every half second or so, and when there is reason to."""

    snapshot: WorkerSnapshot


@message
class PoolTarget(Message):
    """Scheduler to worker: so many workers should there be in the pool that it was started in."""

    num_workers: Count


@message
class ChangeRole(Message):
    """Scheduler to worker: go on in this role, with the same weights, or those of `model`. What runs after `drain_s`
    goes elsewhere. `step_cost`: of one who is what it becomes; None: nobody is, or none is known."""

    role: Role
    drain_s: NonNegative
    model: Text = ""  # "": the one that it has
    step_cost: StepCostReport | None = None
