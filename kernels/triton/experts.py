"""A layer's mixture of experts: each row goes through the few gated MLPs that a router chooses for it.

All experts' projections are one grouped product: rows are put in the order of their experts, and each program computes
a tile of one expert's rows. Nothing waits for the host, and sizes follow from the number of rows alone, so that a CUDA
graph can hold it. Sums are taken as in `kernels.triton.matmul`, and a row's experts are added up by their rank: its
result is the same to the bit alone and in any batch.

A process may hold some of the experts. These have the numbers from 0 on here; pairs with others stand behind all that
are computed, and count 0. To the grouped product there are no others.

Shape legend: T rows, E hidden size, X experts, of which H are held; R = T * per_row pairs of a row and an expert;
K inputs, N outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import Activation, ExpertChoice, Linear
from kernels.triton.elementwise import gated_activation
from kernels.triton.matmul import tile_of, tile_product
from kernels.triton.shipped import TYPE_NAMES, Shipped

_MOST_EXPERTS = (64, 512)  # that a kernel looks at
_MOST_RANKS = 16
_BLOCK = 1024  # columns of a sum
_WIDE_ROWS = 64  # of an expert, in the mean, from which tiles are wide


@triton.jit
def choose_kernel(
    logits, correction, numbers, shares, num_experts, first, num_held, per_row, groups, groups_per_row, scale,
    NORMALISED: tl.constexpr, CORRECTED: tl.constexpr, GROUPED: tl.constexpr,
    EXPERTS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Grid: (row). `logits [T, X]`; `numbers`, `shares [T, per_row]`, all contiguous; `correction [X]`. Numbers count
    from the `first` expert that is held, and around from the last of all to the first."""
    row = tl.program_id(0).to(tl.int64)
    experts, ranks = tl.arange(0, EXPERTS), tl.arange(0, RANKS)
    nothing = float("-inf")
    values = tl.load(logits + row * num_experts + experts, mask=experts < num_experts, other=nothing).to(tl.float32)
    if CORRECTED:
        powers = 1.0 / (1.0 + tl.exp(-values))
        total = 1.0
        values = powers + tl.load(correction + experts, mask=experts < num_experts, other=nothing)
    else:
        powers = tl.exp(values - tl.max(values, axis=0))
        total = tl.sum(powers, axis=0)
    if GROUPED:
        values = _of_best_groups(values, experts, num_experts // groups, groups, groups_per_row, CORRECTED, RANKS)
    chosen = tl.zeros((RANKS,), dtype=tl.int64)
    counts = tl.zeros((RANKS,), dtype=tl.float32)
    for rank in range(per_row):
        best = tl.argmax(values, axis=0, tie_break_left=True)
        chosen = tl.where(ranks == rank, best, chosen)
        counts = tl.where(ranks == rank, tl.sum(tl.where(experts == best, powers, 0.0), axis=0), counts)
        values = tl.where(experts == best, nothing, values)
    counts = counts / (tl.sum(counts, axis=0) if NORMALISED else total) * scale
    chosen = (chosen - first + num_experts) % num_experts
    counts = tl.where(chosen < num_held, counts, 0.0)
    tl.store(numbers + row * per_row + ranks, chosen, mask=ranks < per_row)
    tl.store(shares + row * per_row + ranks, counts, mask=ranks < per_row)


@triton.jit
def _of_best_groups(
    values, experts, size, groups, groups_per_row, TWO_BEST: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """`values [X]` of the groups, of `size` experts each, with the largest value, or sum of the TWO_BEST; else none."""
    nothing = float("-inf")
    numbers = tl.arange(0, GROUPS)
    scores = tl.full((GROUPS,), nothing, dtype=tl.float32)
    for group in range(groups):
        own = tl.where(experts // size == group, values, nothing)
        score = tl.max(own, axis=0)
        if TWO_BEST:
            best = tl.argmax(own, axis=0, tie_break_left=True)
            score += tl.max(tl.where(experts == best, nothing, own), axis=0)
        scores = tl.where(numbers == group, score, scores)
    kept = experts < 0
    for _ in range(groups_per_row):
        best = tl.argmax(scores, axis=0, tie_break_left=True)
        kept = kept | (experts // size == best)
        scores = tl.where(numbers == best, nothing, scores)
    return tl.where(kept, values, nothing)


@triton.jit(do_not_specialize=["num_pairs"])
def grouped_matmul_kernel(
    x,
    weight,
    order,
    starts,
    out,
    bias,
    num_pairs,
    num_experts,
    per_row,
    N,
    K,
    GATHERS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: (tile of pairs, tile of outputs); of the former as many as there can be, of which some have nothing to do.

    `order [R]`: pair p, of row `p // per_row`, stands at place i if `order[i]` is p. Those of expert e stand at
    `starts[e]` to `starts[e + 1]`. `weight [X, N, K]`; `bias [X, N]` or None. Where GATHERS, `x [T, K]` and
    `out [R, N]` is by place, else `x [R, K]` is by place and `out [R, N]` by pair.
    """
    tile = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    first = tl.load(starts + experts, mask=experts < num_experts, other=num_pairs).to(tl.int32)
    stop = tl.load(starts + experts + 1, mask=experts < num_experts, other=num_pairs).to(tl.int32)
    tiles = tl.cdiv(stop - first, BLOCK_M)
    ends = tl.cumsum(tiles, axis=0)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    if expert >= num_experts:
        return
    mine = experts == expert
    begin = tl.sum(tl.where(mine, first + (tile - ends + tiles) * BLOCK_M, 0), axis=0)
    end = tl.sum(tl.where(mine, stop, 0), axis=0)
    places = begin + tl.arange(0, BLOCK_M)
    live_places = places < end
    pairs = tl.load(order + places, mask=live_places, other=0)
    # Places beyond the last read the first row instead, and are not stored: no mask in the loop.
    sources = pairs // per_row if GATHERS else tl.where(live_places, places, 0).to(tl.int64)
    targets = places.to(tl.int64) if GATHERS else pairs
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x + sources[:, None] * K
    weight_rows = weight + (expert.to(tl.int64) * N + tl.where(columns < N, columns, 0))[None, :] * K
    total = tile_product(x_rows, weight_rows, K, BLOCK_M, BLOCK_N, BLOCK_K)
    if bias is not None:
        own = tl.load(bias + expert.to(tl.int64) * N + columns, mask=columns < N, other=0.0)
        total += own[None, :].to(tl.float32)
    stored = live_places[:, None] & (columns[None, :] < N)
    tl.store(out + targets[:, None] * N + columns[None, :], total.to(out.dtype.element_ty), mask=stored)


@triton.jit
def sum_experts_kernel(outputs, shares, residual, out, per_row, width, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (row, block of columns). `outputs [T, per_row, width]`, `shares [T, per_row]`; `residual`, `out` are
    `[T, width]`; all contiguous. An output that counts 0 is not read: nobody may have computed it."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in range(per_row):
        pair = row * per_row + rank
        share = tl.load(shares + pair)
        counted = columns < tl.where(share != 0.0, width, 0)
        total += share * tl.load(outputs + pair * width + columns, mask=counted, other=0.0).to(tl.float32)
    if ADDS:
        total += tl.load(residual + row * width + columns, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, total.to(out.dtype.element_ty), mask=live)


@dataclass(frozen=True, slots=True)
class Stacked:
    """One projection of the experts that are held."""

    weight: Tensor  # [H, N, K]
    bias: Tensor | None  # [H, N]

    @classmethod
    def of(cls, projections: Sequence[tuple[Tensor, Tensor | None]]) -> Stacked:
        """Stack the weights and biases of these experts."""
        biases = [bias for _, bias in projections if bias is not None]
        return cls(torch.stack([weight for weight, _ in projections]), torch.stack(biases) if biases else None)


def pack_experts(
    router: Linear,
    gate_up: Stacked,
    down: Stacked,
    activation: Activation,
    choice: ExpertChoice,
    *,
    num_experts: int,
    first: int,
) -> Linear:
    """See `Kernels.pack_experts`; `first` is that of the experts which are held. Raises ValueError for more of them in
    all than the kernels look at."""
    if num_experts > _MOST_EXPERTS[-1] or max(choice.per_row, choice.groups) > _MOST_RANKS:
        raise ValueError(
            f"{choice.per_row} of {num_experts} experts in {choice.groups} groups for each token are more than the"
            f" GPU's kernels can choose: {_MOST_RANKS} of {_MOST_EXPERTS[-1]} in {_MOST_RANKS} groups"
        )
    numbers = torch.arange(len(gate_up.weight) + 1, device=gate_up.weight.device)
    return GpuExperts(router, gate_up, down, numbers, activation, choice, num_experts, first)


@dataclass(frozen=True, slots=True)
class GpuExperts:
    """`kernels.interface.Linear` by the kernels above."""

    router: Linear  # E -> X
    gate_up: Stacked  # E -> 2 * width
    down: Stacked  # width -> E
    numbers: Tensor  # [H + 1]: 0, 1, ...
    activation: Activation
    choice: ExpertChoice
    num_experts: int  # X
    first: int  # of those that are held

    def __call__(self, x: Tensor) -> Tensor:
        return self._sum(x, None)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._sum(x, residual.contiguous())

    def _sum(self, x: Tensor, residual: Tensor | None) -> Tensor:
        x = x.contiguous()
        if not len(x):
            return torch.empty_like(x)
        numbers, shares = choose_experts(self.router(x), self.choice, self.first, len(self.gate_up.weight))
        sorted_numbers, order = numbers.flatten().sort(stable=True)
        starts = torch.searchsorted(sorted_numbers, self.numbers)
        multiply = functools.partial(
            grouped_matmul, order=order, starts=starts, per_row=self.choice.per_row, num_experts=self.num_experts
        )
        gate_up = multiply(x, self.gate_up, gathers=True)
        outputs = multiply(gated_activation(gate_up, self.activation), self.down, gathers=False)
        return sum_experts(outputs, shares, residual)


def choose_experts(
    logits: Tensor, choice: ExpertChoice, first: int = 0, num_held: int | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each row of `logits [T, X]`: their numbers `[T, per_row]` and how much each counts,
    likewise. Numbers count from the `first` one that is held; those beyond the held ones count 0. None: all are."""
    num_rows, num_experts = logits.shape
    numbers = torch.empty(num_rows, choice.per_row, dtype=torch.int64, device=logits.device)
    shares = torch.empty(num_rows, choice.per_row, dtype=torch.float32, device=logits.device)
    _choosing(
        logits.dtype, choice.normalised, choice.correction is not None, choice.groups > 1, _most(num_experts)
    ).launch(
        (num_rows,),
        logits=logits.contiguous(),
        correction=shares if choice.correction is None else choice.correction,
        numbers=numbers,
        shares=shares,
        num_experts=num_experts,
        first=first,
        num_held=num_experts if num_held is None else num_held,
        per_row=choice.per_row,
        groups=choice.groups,
        groups_per_row=choice.groups_per_row,
        scale=choice.scale,
    )
    return numbers, shares


def grouped_matmul(
    x: Tensor, by: Stacked, *, order: Tensor, starts: Tensor, per_row: int, num_experts: int, gathers: bool
) -> Tensor:
    """Rows of `x` by the weights of their experts: see `grouped_matmul_kernel`. Returns `[R, N]`, where pairs have
    nothing whose expert is not held. `num_experts`: of all, held or not."""
    weight = by.weight
    (num_held, N, K), num_pairs = weight.shape, len(order)
    assert x.is_contiguous() and weight.is_contiguous() and x.shape[1] == K
    out = torch.empty(num_pairs, N, dtype=x.dtype, device=x.device)
    # In float32, wide tiles have no registers left for places and rows on Blackwell.
    wide = num_pairs >= num_experts * _WIDE_ROWS and x.dtype != torch.float32
    shipped = _grouped(x.dtype, wide, gathers, _most(num_held), by.bias is not None)
    tile = shipped.constants
    most_tiles = num_pairs // tile["BLOCK_M"] + min(num_held, num_pairs)  # each expert's last one may be cut
    shipped.launch(
        (most_tiles, triton.cdiv(N, tile["BLOCK_N"])),
        x=x,
        weight=weight,
        order=order,
        starts=starts,
        out=out,
        bias=by.bias,
        num_pairs=num_pairs,
        num_experts=num_held,
        per_row=per_row,
        N=N,
        K=K,
    )
    return out


def sum_experts(outputs: Tensor, shares: Tensor, residual: Tensor | None) -> Tensor:
    """Add to `residual [T, E]`, if there is one, `outputs [R, E]` as much as `shares [T, per_row]` say."""
    num_rows, per_row = shares.shape
    width = outputs.shape[1]
    out = torch.empty(num_rows, width, dtype=outputs.dtype, device=outputs.device)
    _summing(outputs.dtype, residual is not None).launch(
        (num_rows, triton.cdiv(width, _BLOCK)),
        outputs=outputs,
        shares=shares,
        residual=out if residual is None else residual,
        out=out,
        per_row=per_row,
        width=width,
    )
    return out


def _most(num_experts: int) -> int:
    return next(most for most in _MOST_EXPERTS if num_experts <= most)


@functools.cache
def _choosing(dtype: torch.dtype, normalised: bool, corrected: bool, grouped: bool, most: int) -> Shipped:
    element = TYPE_NAMES[dtype]
    kinds = {"normalised": normalised, "corrected": corrected, "grouped": grouped}
    marks = "".join(f"{kind}-" for kind, chosen in kinds.items() if chosen)
    return Shipped(
        name=f"choose_experts-{marks}{element}-{most}",
        kernel=choose_kernel,
        types={
            "logits": f"*{element}",
            "correction": "*fp32",
            "numbers": "*i64",
            "shares": "*fp32",
            "num_experts": "i32",
            "first": "i32",
            "num_held": "i32",
            "per_row": "i32",
            "groups": "i32",
            "groups_per_row": "i32",
            "scale": "fp32",
        },
        constants={
            "NORMALISED": normalised,
            "CORRECTED": corrected,
            "GROUPED": grouped,
            "EXPERTS": most,
            "RANKS": _MOST_RANKS,
        },
        num_warps=1 if most <= 64 else 4,
        num_stages=1,
    )


@functools.cache
def _grouped(dtype: torch.dtype, wide: bool, gathers: bool, most: int, biased: bool) -> Shipped:
    element, tile = TYPE_NAMES[dtype], tile_of(dtype, wide)
    marks = (element, "wide" if wide else "narrow", "in" if gathers else "out", str(most), *["bias"] * biased)
    elements = ("x", "weight", "out", "bias") if biased else ("x", "weight", "out")
    pointers = dict.fromkeys(elements, f"*{element}") | {"order": "*i64", "starts": "*i64"}
    integers = dict.fromkeys(("num_pairs", "num_experts", "per_row", "N", "K"), "i32")
    return Shipped(
        name="-".join(("grouped_matmul", *marks)),
        kernel=grouped_matmul_kernel,
        types=pointers | integers,
        constants={"GATHERS": gathers, "EXPERTS": most, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k}
        | ({} if biased else {"bias": None}),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=frozenset({"N", "K"}),
    )


@functools.cache
def _summing(dtype: torch.dtype, adds: bool) -> Shipped:
    element = TYPE_NAMES[dtype]
    return Shipped(
        name=f"sum_experts-{'add-' if adds else ''}{element}",
        kernel=sum_experts_kernel,
        types=dict.fromkeys(("outputs", "residual", "out"), f"*{element}")
        | {"shares": "*fp32", "per_row": "i32", "width": "i32"},
        constants={"ADDS": adds, "BLOCK": _BLOCK},
        num_warps=4,
        num_stages=1,
        aligned=frozenset({"width"}),
    )


def shipped() -> list[Shipped]:
    both = (False, True)
    return [
        *(
            _choosing(dtype, normalised, corrected, grouped, most)
            for dtype in TYPE_NAMES
            for normalised in both
            for corrected in both
            for grouped in both
            for most in _MOST_EXPERTS
        ),
        *(
            _grouped(dtype, wide, gathers, most, biased)
            for dtype in TYPE_NAMES
            for wide in both
            for gathers in both
            for most in _MOST_EXPERTS
            for biased in both
            if not (wide and dtype == torch.float32)
        ),
        *(_summing(dtype, adds) for dtype in TYPE_NAMES for adds in both),
    ]
