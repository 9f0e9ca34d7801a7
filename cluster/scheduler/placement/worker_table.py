"""The scheduler's arithmetic state of all workers, in arrays: a row per worker, a slot per request that decodes there.

Knows numbers only; who may write them, and when, is the ledger's business. Time is in seconds on the scheduler's clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.cost_model.step_cost import DECODES_PART, KEPT, StepCost, StepWork, margin_of
from kv_transfer.messages.workers import WorkerInfo

RESIDUAL_STEP: Final = 0.125
PROMPTS_OVER_S: Final = 10.0  # over which a worker's share of time for prompts is smoothed
_MOST_PROMPTS: Final = 0.9  # of its time
_LEAST_ROOM: Final = 0.1  # of what decodes take, for prompts, however tight the promises
_MOST_TOKENS_PER_STEP: Final = 16.0
_ADAPTER_S: Final = 0.02  # of 10 MB, from a file that is in memory
_ANY_CHUNK: Final = 1e15  # tokens of a step that nobody told a bound of: no infinity, which times no cost is no number
Floats = NDArray[np.float64]
Rows = NDArray[np.intp]


class _Facts(NamedTuple):
    """What is known of a worker, by number."""

    BASE_S: int = 0  # its step cost, up to RELATIVE_ERROR
    PREFILL_TOKEN_S: int = 1
    PREFILL_PAIR_S: int = 2
    DECODE_S: int = 3
    CONTEXT_TOKEN_S: int = 4
    RELATIVE_ERROR: int = 5
    CHUNK_TOKENS: int = 6
    DRAINED_AT: int = 7  # when all prompts placed there will have been computed
    STEPS: int = 8  # decode steps done, as of AS_OF: as many as tokens of who decodes there
    AS_OF: int = 9
    STEP_S: int = 10  # predicted seconds of its decode steps since AS_OF, over TOKENS_PER_STEP
    EXTRA_DECODES: int = 11  # sequences that it reports and nobody placed: from before this scheduler's time
    EXTRA_CONTEXT: int = 12
    KV_TOKENS: int = 13  # its capacity
    MAX_MODEL_LEN: int = 14
    COMPATIBILITY: int = 15  # equal numbers can hand over to each other
    DRAINING: int = 16
    BOOKED: int = 17  # requests that decode or will decode there: the slots that are taken, from the first on
    BOOKED_CONTEXT: int = 18  # their prompts' tokens
    BLOCK_SIZE: int = 19
    STRETCH: int = 20  # of its decode steps, by prompts that it computes itself; STEP_S includes it
    MAX_SEQUENCES: int = 21  # held at once
    PROMPTS_S: int = 22  # seconds for prompts placed there, the older the less, as of PROMPTS_AT
    PROMPTS_AT: int = 23
    PREFILL_BASE_S: int = 24  # of its step cost, too
    LIMIT_S: int = 25  # of its steps with prompts, by what those booked there were promised; inf: nothing
    TOKENS_PER_STEP: int = 26  # that a decoding sequence has in the time of a step without drafts: 1 and more
    ADAPTER_S: int = 27  # to load an adapter
    LENT_TOKENS: int = 28  # of prompts to be computed there for other workers: it keeps room for them until they are
    SHARED: int = 29  # of the contexts that decode there, the part that takes no memory: prefixes are held once for all
    WITH_PROMPTS_S: int = 30  # a step's seconds before any tokens of prompts, where it has some
    ROOM_S: int = 31  # and for these, at most; inf: nobody decodes there
    CHUNK_LEFT: int = 32  # of prompts, so many tokens a step at most


class _SlotFacts(NamedTuple):
    """What is known of a request on its decode worker, by number. A slot is empty where OUTPUT is 0."""

    TOKENS: int = 0  # of its prompt
    OUTPUT: int = 1  # expected in all
    MAX_OUTPUT: int = 2  # at most
    FIRST_AT: int = 3  # its first token came, or is predicted
    JOINED_STEP: int = 4  # STEPS when it began to decode; inf: has not begun
    TPOT_TARGET_S: int = 5
    WEIGHT: int = 6  # how probable it was, when it was placed, that it meets its targets
    GAP_TARGET_S: int = 7


# Plain integers, since arrays are indexed by them dozens of times a decision, and an enumeration's members are slower.
Fact: Final = _Facts()
Slot: Final = _SlotFacts()


class WorkerTable:
    """The facts of all workers that placement goes by. Workers' rows are in order, so that a pool is a slice: the
    prefill workers, then the decode workers, each by id. Rows move as workers come and go; whoever keeps a worker keeps
    its id. The table grows by doubling.

    `adapters`: digests of those that are loaded, by worker. `unreachable`: by worker, the decode workers to whom it
    cannot hand over; without those that reach everybody. `num_prefills`: of its rows. `ids`: by row. `kinds`: the
    different values of COMPATIBILITY. `residuals`: what an output still has to come after 0, 1, 2... times
    `RESIDUAL_STEP` of its expected length, as a share of that.
    """

    def __init__(self, num_rows: int = 8, num_slots: int = 8) -> None:
        self.facts = np.zeros((len(Fact), num_rows))
        # In memory a worker's slots lie together: a decision looks at all of a few workers, which no cache has.
        self.slots = np.zeros((num_rows, len(Slot), num_slots)).transpose(1, 0, 2)
        self.ids: list[str] = []
        self.adapters: dict[str, frozenset[str]] = {}
        self.unreachable: dict[str, frozenset[str]] = {}
        self.kinds: list[float] = []
        self.residuals = np.ones(1)
        self._order: list[tuple[bool, str]] = []  # whether it decodes, and its id
        self.num_prefills = 0
        self._row_of: dict[str, int] = {}
        self._codes: dict[str, int] = {}

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._row_of

    def __len__(self) -> int:
        return len(self._order)

    def row(self, worker_id: str) -> int:
        return self._row_of[worker_id]

    def rows_of(self, worker_ids: Iterable[str]) -> Rows:
        """-1 for those that are not known."""
        return np.fromiter((self._row_of.get(worker_id, -1) for worker_id in worker_ids), np.intp)

    def pools(self) -> tuple[slice, slice]:
        """The rows of the prefill workers and of the decode workers."""
        return slice(0, self.num_prefills), slice(self.num_prefills, len(self))

    def decodes(self, worker_id: str) -> bool:
        """Whether it is a decode worker."""
        return self._row_of[worker_id] >= self.num_prefills

    def free_at(self, worker_id: str) -> list[float]:
        """When this worker and those of its pool that take requests will have computed the prompts placed there, the
        first one first."""
        row = self.row(worker_id)
        pool = self.pools()[row >= self.num_prefills]
        takes = self.facts[Fact.DRAINING, pool] == 0.0
        takes[row - pool.start] = True
        free_at: list[float] = np.sort(self.facts[Fact.DRAINED_AT, pool][takes]).tolist()
        return free_at

    @property
    def num_taking(self) -> int:
        """The number of workers that take requests."""
        return int(np.count_nonzero(self.facts[Fact.DRAINING, : len(self)] == 0.0))

    def add(self, info: WorkerInfo, now: float) -> None:
        key = (info.role == "decode", info.worker_id)
        row, end = bisect_left(self._order, key), len(self)
        if end == self.facts.shape[1]:
            self.facts = np.concatenate([self.facts, np.zeros_like(self.facts)], axis=1)
            self.slots = np.concatenate([self.slots, np.zeros_like(self.slots)], axis=1)
        for facts in (self.facts, self.slots):
            facts[:, row + 1 : end + 1] = facts[:, row:end]
            facts[:, row] = 0.0
        self._order.insert(row, key)
        facts = self.facts[:, row]
        facts[Fact.DRAINED_AT], facts[Fact.AS_OF], facts[Fact.STRETCH], facts[Fact.LIMIT_S] = now, now, 1.0, np.inf
        facts[Fact.TOKENS_PER_STEP] = 1.0
        facts[Fact.CHUNK_TOKENS] = info.chunk_tokens or _ANY_CHUNK
        facts[Fact.MAX_SEQUENCES] = info.max_num_seqs or np.inf
        facts[Fact.KV_TOKENS] = info.num_blocks // info.layer_groups * info.block_size
        facts[Fact.BLOCK_SIZE] = info.block_size
        facts[Fact.MAX_MODEL_LEN] = info.max_model_len
        facts[Fact.COMPATIBILITY] = self._codes.setdefault(info.compatibility, len(self._codes))
        self._number()

    def remove(self, worker_id: str) -> None:
        row, end = self.row(worker_id), len(self)
        for facts in (self.facts, self.slots):
            facts[:, row : end - 1] = facts[:, row + 1 : end]
            facts[:, end - 1] = 0.0
        del self._order[row]
        self.adapters.pop(worker_id, None)
        self.unreachable.pop(worker_id, None)
        self._number()

    def has_targets(self) -> bool:
        """Whether anyone who is booked anywhere should keep a pace."""
        return bool((self.facts[Fact.LIMIT_S, : len(self)] < np.inf).any())

    def prompt_shares(self, rows: int | slice | Rows, now: float) -> Floats:
        """The share of the workers' time lately that prompts placed there take."""
        recent_s, at = self.facts[Fact.PROMPTS_S, rows], self.facts[Fact.PROMPTS_AT, rows]
        shares: Floats = recent_s * np.exp((at - now) / PROMPTS_OVER_S) / PROMPTS_OVER_S
        return shares

    def busy_shares(self, now: float) -> tuple[float, float]:
        """The share of each pool's time lately that prompts placed there take: above 1 where they queue."""
        shares = self.prompt_shares(slice(0, len(self)), now)
        of_prefill, of_decode = (float(shares[pool].sum()) / max(1, pool.stop - pool.start) for pool in self.pools())
        return of_prefill, of_decode

    # --- the pace of a worker's decode steps ---

    def alone_s(self, rows: int | slice, num_tokens: int) -> Floats:
        """Seconds of the workers' steps with nothing but one sequence of so many tokens, which decodes."""
        facts = self.facts[:, rows]
        seconds: Floats = facts[Fact.BASE_S] + facts[Fact.DECODE_S] + facts[Fact.CONTEXT_TOKEN_S] * num_tokens
        return seconds

    def advance(self, row: int, now: float) -> None:
        """Count the decode steps that were done since."""
        facts = self.facts[:, row]
        if facts[Fact.STEP_S] > 0.0:
            facts[Fact.STEPS] += max(0.0, now - facts[Fact.AS_OF]) / facts[Fact.STEP_S]
        facts[Fact.AS_OF] = now

    def count_prompt(self, row: int, num_tokens: float, num_cached: float, now: float) -> None:
        """One more prompt was placed there."""
        cost, facts = self.cost(row), self.facts[:, row]
        recent_s = PROMPTS_OVER_S * self.prompt_shares(row, now)
        added_s = cost.step_s(StepWork.of_prefill(num_tokens, num_cached)) - cost.base_s
        facts[Fact.PROMPTS_S], facts[Fact.PROMPTS_AT] = recent_s + added_s, now

    def predict_step(self, row: int, now: float) -> None:
        """How long its steps take, with those that decode now, and their contexts, and as much time for prompts as
        lately, or as those who are booked there leave; and how much of a prompt each takes. Called after whatever
        changes who is there, or what steps cost.

        So many tokens of a prompt go into a step that all who decode there keep the pace that they were promised, and
        no more than save time: the fuller the worker, the more steps a prompt takes. Whoever can hardly keep it without
        prompts holds them up no further, so that there is an end to it."""
        facts = self.facts[:, row]
        known = facts.tolist()  # a sum of plain numbers takes a tenth of a call into numpy
        booked, num_tokens = int(known[Fact.BOOKED]), known[Fact.TOKENS_PER_STEP]
        decodes, context, limit_s = known[Fact.EXTRA_DECODES], known[Fact.EXTRA_CONTEXT], math.inf
        if booked:
            slots = self.slots[:, row, :booked]
            joined = slots[Slot.JOINED_STEP] < math.inf
            emitted = (known[Fact.STEPS] - slots[Slot.JOINED_STEP])[joined]
            context += float((slots[Slot.TOKENS][joined] + emitted).sum())
            decodes += np.count_nonzero(joined)
            gaps_s = slots[Slot.GAP_TARGET_S] / margin_of(known[Fact.RELATIVE_ERROR])  # which nearly all keep
            limit_s = KEPT * float(np.minimum(num_tokens * slots[Slot.TPOT_TARGET_S], gaps_s).min())
        step_s = known[Fact.BASE_S] + known[Fact.DECODE_S] * decodes + known[Fact.CONTEXT_TOKEN_S] * context
        share = min(_MOST_PROMPTS, float(self.prompt_shares(row, now)))
        stretch = max(1.0, min(1.0 / (1.0 - share), limit_s / max(step_s, 1e-9)))
        token_s = step_s * stretch / num_tokens
        alone_s = token_s * num_tokens / stretch
        with_prompts_s, room_s = alone_s + known[Fact.PREFILL_BASE_S], math.inf
        if booked or known[Fact.EXTRA_DECODES]:
            bears_s = max(limit_s - with_prompts_s, _LEAST_ROOM * alone_s)
            room_s = max(min(bears_s, (1.0 / DECODES_PART - 1.0) * with_prompts_s), 1e-9)
        facts[Fact.LIMIT_S], facts[Fact.STRETCH], facts[Fact.STEP_S] = limit_s, stretch, token_s
        facts[Fact.WITH_PROMPTS_S], facts[Fact.ROOM_S] = with_prompts_s, room_s
        # Each that decodes takes a token of the step's budget.
        facts[Fact.CHUNK_LEFT] = max(known[Fact.CHUNK_TOKENS] - booked, 1.0)

    # --- costs and slots ---

    def set_cost(self, row: int, cost: StepCost) -> None:
        self.facts[: Fact.CHUNK_TOKENS, row] = (
            cost.base_s,
            cost.prefill_token_s,
            cost.prefill_pair_s,
            cost.decode_s,
            cost.context_token_s,
            cost.relative_error,
        )
        self.facts[Fact.PREFILL_BASE_S, row] = cost.prefill_base_s

    def set_tokens_per_step(self, row: int, num_tokens: float) -> None:
        """Note what the worker says of its tokens per step. What nobody can have is a mistake, and moves no more than
        what somebody can."""
        self.facts[Fact.TOKENS_PER_STEP, row] = min(max(1.0, num_tokens), _MOST_TOKENS_PER_STEP)

    def set_adapters(self, worker_id: str, loaded: Sequence[str], load_s: float) -> None:
        """Note which adapters a worker has loaded. `load_s` 0: it has not loaded any yet."""
        self.adapters[worker_id] = frozenset(loaded)
        self.facts[Fact.ADAPTER_S, self.row(worker_id)] = load_s or _ADAPTER_S

    def set_unreachable(self, worker_id: str, others: Sequence[str]) -> None:
        """Note to whom a worker cannot hand over."""
        if others:
            self.unreachable[worker_id] = frozenset(others)
        else:
            self.unreachable.pop(worker_id, None)

    def adapter_s(self, digest: str) -> Floats:
        """Seconds that loading this adapter takes on each worker; 0 where it is loaded."""
        lacks = [digest not in self.adapters.get(worker_id, ()) for worker_id in self.ids]
        seconds: Floats = self.facts[Fact.ADAPTER_S, : len(self)] * lacks
        return seconds

    def cost(self, row: int) -> StepCost:
        base, token, pair, decode, context, error = self.facts[: Fact.CHUNK_TOKENS, row].tolist()
        return StepCost(
            base_s=base,
            prefill_token_s=token,
            prefill_pair_s=pair,
            decode_s=decode,
            context_token_s=context,
            prefill_base_s=float(self.facts[Fact.PREFILL_BASE_S, row]),
            relative_error=error,
        )

    def take_slot(self, row: int) -> int:
        slot = int(self.facts[Fact.BOOKED, row])
        if slot == self.slots.shape[2]:
            self.slots = np.concatenate([self.slots, np.zeros_like(self.slots)], axis=2)
        self.facts[Fact.BOOKED, row] += 1
        return slot

    def free_slot(self, row: int, slot: int) -> int:
        """The slots stay dense: returns the one whose content now lies in `slot` (itself, if it was the last)."""
        self.facts[Fact.BOOKED, row] -= 1
        last = int(self.facts[Fact.BOOKED, row])
        self.slots[:, row, slot] = self.slots[:, row, last]
        self.slots[:, row, last] = 0.0
        return last

    def _number(self) -> None:
        self.ids = [worker_id for _, worker_id in self._order]
        self._row_of = {worker_id: row for row, worker_id in enumerate(self.ids)}
        self.num_prefills = bisect_left(self._order, (True, ""))
        self.kinds = sorted(set(self.facts[Fact.COMPATIBILITY, : len(self)].tolist()))
