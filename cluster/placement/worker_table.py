"""The scheduler's arithmetic state of all workers, in arrays: a row per worker, a slot per request that decodes there.

Knows numbers only; who may write them, and when, is the ledger's business. Time is in seconds on the scheduler's clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.step_cost import StepCost
from kv_transfer.messages import WorkerInfo

RESIDUAL_STEP: Final = 0.125
PROMPTS_OVER_S: Final = 10.0  # over which a worker's share of time for prompts is smoothed
Floats = NDArray[np.float64]
Rows = NDArray[np.intp]


class Row(IntEnum):
    """What is known of a worker."""

    BASE_S, PREFILL_TOKEN_S, PREFILL_PAIR_S, DECODE_S, CONTEXT_TOKEN_S, RELATIVE_ERROR = range(6)  # its step cost
    CHUNK_TOKENS = 6
    DRAINED_AT = 7  # when all prompts placed there will have been computed
    STEPS = 8  # decode steps done, as of AS_OF
    AS_OF = 9
    STEP_S = 10  # predicted seconds of its decode steps since AS_OF
    EXTRA_DECODES = 11  # sequences that it reports and nobody placed: from before this scheduler's time
    EXTRA_CONTEXT = 12
    KV_TOKENS = 13  # its capacity
    MAX_MODEL_LEN = 14
    COMPATIBILITY = 15  # equal numbers can hand over to each other
    DECODES = 16  # 1 for a decode worker
    DRAINING = 17
    BOOKED = 18  # requests that decode or will decode there
    BOOKED_CONTEXT = 19  # their prompts' tokens
    BLOCK_SIZE = 20
    STRETCH = 21  # of its decode steps, by prompts that it computes itself; STEP_S includes it
    MAX_SEQUENCES = 22  # held at once
    PROMPTS_S, PROMPTS_AT = range(23, 25)  # seconds for prompts placed there, the older the less, as of then


class Slot(IntEnum):
    """What is known of a request on its decode worker. A slot is empty where OUTPUT is 0."""

    TOKENS, OUTPUT, MAX_OUTPUT = range(3)  # of its prompt; expected in all; at most
    FIRST_AT = 3  # its first token came, or is predicted
    JOINED_STEP = 4  # STEPS when it began to decode; inf: has not begun
    TPOT_TARGET_S = 5
    WEIGHT = 6  # how probable it was, when it was placed, that it meets its targets


class WorkerTable:
    """Grows by doubling. Rows are found by worker id; `rank` orders them by id, whatever their history.

    `residuals`: what an output still has to come after 0, 1, 2... times `RESIDUAL_STEP` of its expected length, as a
    share of that.
    """

    def __init__(self, num_rows: int = 8, num_slots: int = 8) -> None:
        self.rows = np.zeros((len(Row), num_rows))
        self.slots = np.zeros((len(Slot), num_rows, num_slots))
        self.rank = np.zeros(num_rows, dtype=np.intp)
        self.ids: list[str | None] = [None] * num_rows
        self.residuals = np.ones(1)
        self._row_of: dict[str, int] = {}
        self._used = [0] * num_rows  # slots, from the first on
        self._codes: dict[str, int] = {}
        self._live = np.zeros(0, dtype=np.intp)
        self._pools = self._live, self._live

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._row_of

    def __len__(self) -> int:
        return len(self._row_of)

    def row(self, worker_id: str) -> int:
        return self._row_of[worker_id]

    def rows_of(self, worker_ids: Iterable[str]) -> Rows:
        """-1 for those that are not known."""
        return np.array([self._row_of.get(worker_id, -1) for worker_id in worker_ids], dtype=np.intp)

    def live(self) -> Rows:
        """The rows in use, by worker id."""
        return self._live

    def pools(self) -> tuple[Rows, Rows]:
        """Of those, the prefill workers and the decode workers."""
        return self._pools

    def is_idle(self) -> bool:
        """Nothing is placed anywhere, and no worker reports what nobody placed."""
        return not self.rows[Row.BOOKED, self._live].any() and not self.rows[Row.EXTRA_DECODES, self._live].any()

    def num_used(self, row: int) -> int:
        return self._used[row]

    def add(self, info: WorkerInfo, chunk_tokens: float, max_num_seqs: float, now: float) -> int:
        row = self._free_row()
        self._row_of[info.worker_id], self.ids[row] = row, info.worker_id
        facts = self.rows[:, row]
        facts[:] = 0.0
        facts[Row.CHUNK_TOKENS], facts[Row.DRAINED_AT], facts[Row.AS_OF] = chunk_tokens, now, now
        facts[Row.STRETCH], facts[Row.MAX_SEQUENCES] = 1.0, max_num_seqs
        facts[Row.KV_TOKENS] = info.num_blocks // info.layer_groups * info.block_size
        facts[Row.BLOCK_SIZE] = info.block_size
        facts[Row.MAX_MODEL_LEN] = info.max_model_len
        facts[Row.COMPATIBILITY] = self._codes.setdefault(info.compatibility, len(self._codes))
        facts[Row.DECODES] = info.role == "decode"
        self._rank()
        return row

    def remove(self, worker_id: str) -> None:
        row = self._row_of.pop(worker_id)
        self.ids[row], self._used[row] = None, 0
        self.slots[:, row] = 0.0
        self._rank()

    def has_targets(self) -> bool:
        """Whether anyone who is booked anywhere should keep a pace."""
        booked = self.slots[Slot.OUTPUT] > 0.0
        return bool((booked & (self.slots[Slot.TPOT_TARGET_S] < np.inf)).any())

    def prompt_share(self, rows: Rows | int, now: float) -> Floats:
        """Of the workers' time lately, what prompts placed there take."""
        recent_s, at = self.rows[Row.PROMPTS_S, rows], self.rows[Row.PROMPTS_AT, rows]
        share: Floats = recent_s * np.exp((at - now) / PROMPTS_OVER_S) / PROMPTS_OVER_S
        return share

    def set_cost(self, row: int, cost: StepCost) -> None:
        self.rows[: Row.CHUNK_TOKENS, row] = (
            cost.base_s,
            cost.prefill_token_s,
            cost.prefill_pair_s,
            cost.decode_s,
            cost.context_token_s,
            cost.relative_error,
        )

    def cost(self, row: int) -> StepCost:
        base, token, pair, decode, context, error = self.rows[: Row.CHUNK_TOKENS, row].tolist()
        return StepCost(
            base_s=base,
            prefill_token_s=token,
            prefill_pair_s=pair,
            decode_s=decode,
            context_token_s=context,
            relative_error=error,
        )

    def take_slot(self, row: int) -> int:
        slot = self._used[row]
        if slot == self.slots.shape[2]:
            self.slots = np.concatenate([self.slots, np.zeros_like(self.slots)], axis=2)
        self._used[row] += 1
        return slot

    def free_slot(self, row: int, slot: int) -> int:
        """The slots stay dense: returns the one whose content now lies in `slot` (itself, if it was the last)."""
        self._used[row] -= 1
        last = self._used[row]
        self.slots[:, row, slot] = self.slots[:, row, last]
        self.slots[:, row, last] = 0.0
        return last

    def _free_row(self) -> int:
        if len(self) == len(self.ids):
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)], axis=1)
            self.slots = np.concatenate([self.slots, np.zeros_like(self.slots)], axis=1)
            self.rank = np.zeros(2 * len(self.ids), dtype=np.intp)
            self._used += [0] * len(self.ids)
            self.ids += [None] * len(self.ids)
        return self.ids.index(None)

    def _rank(self) -> None:
        self.rank[:] = -1
        self._live = np.array([self._row_of[worker_id] for worker_id in sorted(self._row_of)], dtype=np.intp)
        self.rank[self._live] = np.arange(len(self._live))
        decodes = self.rows[Row.DECODES, self._live] == 1.0
        self._pools = self._live[~decodes], self._live[decodes]
