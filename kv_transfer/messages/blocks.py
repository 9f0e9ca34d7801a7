"""Which blocks workers' tiers hold: changes, numbered, and snapshots to start again from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kv_transfer.messages.codec import Message, message, record
from kv_transfer.messages.fields import MAX_EVENT_CHANGES, Count, Flag, Hashes, Text, Tier


@record
class BlockChange:
    """Columns of blocks that a tier of a worker has held, or has not held any more, since the change before it."""

    tier: Tier
    stored: Hashes
    removed: Hashes


@message
class BlockEvents(Message):
    """Worker to scheduler: what changed in its tiers, numbered from `first_id` on within the epoch.

    An epoch is one life of the worker's tiers. Without changes it says that none is missing before `first_id`.
    """

    worker_id: Text
    epoch: Count
    first_id: Count
    changes: Annotated[list[BlockChange], Field(fail_fast=True, max_length=MAX_EVENT_CHANGES)]


@message
class BlockIndexRequest(Message):
    """Scheduler to worker: changes are missing here; send all that your tiers hold."""

    worker_id: Text


@message
class BlockIndexSnapshot(Message):
    """Worker to scheduler: part of all that its tiers hold, as before the change `next_id`. Parts come in order."""

    worker_id: Text
    epoch: Count
    next_id: Count
    part: Count
    num_parts: Count
    tier: Tier
    hashes: Hashes


@record
class IndexReport:
    """What the scheduler's block index knows of one worker, and what befell it since the worker registered."""

    worker_id: Text
    in_step: Flag  # False: changes are missing, and a snapshot is awaited
    columns: dict[Tier, Count]
    num_gaps: Count
    num_snapshots_asked: Count
    num_snapshots_taken: Count
