"""What a simulated worker is: its speed, its room and its limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from engine.cost_model.step_cost import StepCost

_LEAST_ERROR: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShape:
    """What a worker is, apart from its id. `token_budget` bounds a step. `kv_tokens`: the room of its pool.

    The exposed part of a hand-off, from the prompt's last step until decode may go on: `handoff_s`, and for each token
    of the prompt's last chunk `handoff_token_s` (the last layer's slab, which nothing is left to hide behind).

    Steps take what `cost` says, or that times a log-normal factor of mean 1 and sigma `step_noise`, whose
    logarithm correlates with the next step's by `step_correlation`. `cost` is also what the worker reports, with
    its `relative_error`.
    """

    cost: StepCost
    kv_tokens: int
    token_budget: int = 2048
    block_size: int = 64
    max_num_seqs: int = 256
    max_model_len: int = 131_072
    max_waiting: int = 256
    reserve_wait_s: float = 10.0
    handoff_s: float = 0.002
    handoff_token_s: float = 0.0
    prefix_caching: bool = True
    step_noise: float = 0.0
    step_correlation: float = 0.0
    fast_forward: bool = True

    def __post_init__(self) -> None:
        if self.kv_tokens < self.block_size:
            raise ValueError(f"{self.kv_tokens} tokens of KV are less than one block of {self.block_size}")
        if self.step_noise < 0:
            raise ValueError(f"step_noise is {self.step_noise}; 0 means none, 0.1 that steps vary by a tenth")
        if not 0 <= self.step_correlation < 1:
            raise ValueError(f"step_correlation is {self.step_correlation}; it must be at least 0 and less than 1")


def measured(cost: StepCost, step_noise: float = 0.0) -> StepCost:
    """`cost` with about the error that a worker would measure of it: 0.8 of the noise of its steps, at least 2 %."""
    return replace(cost, relative_error=max(_LEAST_ERROR, 0.8 * step_noise))
