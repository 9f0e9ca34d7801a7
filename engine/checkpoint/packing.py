"""Checkpoints of AWQ, GPTQ, MXFP4, FP8 and compressed-tensors: small numbers packed into larger ones, taken apart, or
scaled ones made values again.

Knows how each stores a projection's codes, zero points and scales, and what of their configs says so; no models.

Shape legend: I inputs, O outputs, G groups of inputs, P codes in a word of 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from kernels.quantised_weight import LOWEST_E2M1, LOWEST_E4M3, QuantisedWeight

# Which of eight consecutive outputs AWQ ("gemm") puts into a word's nibbles, the lowest first.
_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPacking:
    """How the projections of a checkpoint are packed. A value is `(code - zero) * scale`, the last two of its group;
    in FP8 it is a number times the scale of its block, channel or tensor."""

    method: Literal["awq", "gptq", "mxfp4", "fp8", "compressed-tensors"]  # which in FP8 is fp8
    bits: int
    zero_offset: int = 0  # what is to be added to stored zero points
    has_zeros: bool = False  # of compressed-tensors: else zero points are 0
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale, where they do by blocks
    group_size: int | None = None  # of compressed-tensors: inputs that share a scale, where they do by groups

    @property
    def stays_packed(self) -> bool:
        """Whether projections are codes, that no other rounding may follow. FP8's numbers may be rounded as values."""
        return self.method != "fp8"

    @classmethod
    def from_config(cls, quantization: Mapping[str, Any], folder: Path) -> WeightPacking:
        """Read the packing from `quantization_config` of config.json. Raises ValueError for what cannot be taken
        apart."""
        method, bits = quantization.get("quant_method"), quantization.get("bits", 4)
        if method == "awq":
            version = quantization.get("version", "gemm")
            if (bits, version) != (4, "gemm"):
                raise ValueError(
                    f"the model in {folder} is quantised by AWQ with {bits} bits in the version {version!r}; supported"
                    " are 4 bits in 'gemm'"
                )
            return cls(method="awq", bits=4)
        if method == "gptq":
            if bits not in (4, 8):
                raise ValueError(f"the model in {folder} is quantised by GPTQ with {bits} bits; supported are 4 and 8")
            # The first version of the format stores zero points less one.
            return cls(
                method="gptq", bits=bits, zero_offset=0 if quantization.get("checkpoint_format") == "gptq_v2" else 1
            )
        if method == "mxfp4":
            return cls(method="mxfp4", bits=4)
        if method == "fp8":
            if quantization.get("expert_dtype", "fp8") != "fp8":
                raise ValueError(
                    f"the model in {folder} has experts in {quantization['expert_dtype']!r} beside FP8, which is not"
                    " supported; use a checkpoint whose experts are in FP8"
                )
            # A scale for each block is transformers' default; files in which a tensor has one say nothing of blocks.
            block = _block(quantization.get("weight_block_size", _FP8_BLOCK), folder)
            return cls(method="fp8", bits=8, block=block)
        if method == "compressed-tensors":
            return _compressed_tensors(quantization, folder)
        raise ValueError(
            f"the model in {folder} is quantised by {method!r}; supported are awq, gptq, mxfp4, fp8, compressed-tensors"
            " and GGUF files, or use a checkpoint in bfloat16, float16 or float32"
        )

    def unpack(self, parts: Mapping[str, Tensor], where: str) -> QuantisedWeight:
        """Unpack a projection from its `qweight`, `qzeros`, `scales` and perhaps `g_idx`. Raises ValueError.

        `qweight` is `[I, O / P]` for AWQ and `[I / P, O]` for GPTQ, `qzeros [G, O / P]`, `scales [G, O]`. Of
        compressed-tensors the parts are `weight [O, I]` or `weight_packed [O, I / P]` with the `weight_shape` of the
        former, `weight_scale` of 1 or `[O, G]`, and perhaps a `weight_zero_point` like it, or `[O / P, G]` packed.
        """
        if self.method == "compressed-tensors":
            return self._unpack_codes_around_zero(parts, where)
        scales = parts["scales"].float().t().contiguous()
        if self.method == "awq":
            codes = _in_order(_words(parts["qweight"], 4).flatten(1)).t()
            zeros = _in_order(_words(parts["qzeros"], 4).flatten(1)).t()
        else:
            codes = _words(parts["qweight"], self.bits).transpose(1, 2).flatten(0, 1).t()
            zeros = _words(parts["qzeros"], self.bits).flatten(1).t()
        self._check(codes, zeros, scales, parts.get("g_idx"), where)
        return self._weight(codes, zeros + self.zero_offset, scales)

    def _unpack_codes_around_zero(self, parts: Mapping[str, Tensor], where: str) -> QuantisedWeight:
        """Raises ValueError. Packed ones are stored higher by half of their range, and so they are worked with."""
        middle = 2 ** (self.bits - 1)
        if "weight_packed" in parts:
            packed, shape = parts["weight_packed"], parts["weight_shape"].tolist()
            codes = _words(packed, self.bits).flatten(1)[:, : shape[-1]]
            if packed.dtype != torch.int32 or list(codes.shape) != shape:
                raise ValueError(f"{where} is {list(packed.shape)} of {packed.dtype} for {shape}; fetch it again")
        else:
            codes = parts["weight"]
            if codes.dtype != torch.int8 or self.bits != 8:
                raise ValueError(f"{where} is {codes.dtype} where codes of {self.bits} bits should be; fetch it again")
            codes = codes.int() + middle
        scales = parts["weight_scale"].float()
        if not scales.isfinite().all():
            raise ValueError(f"{where} has scales that are no numbers; fetch it again")
        by_row = len(codes), 1
        scales = scales.view(1, 1).expand(by_row).contiguous() if scales.numel() == 1 else scales
        if self.group_size is not None and scales.shape[-1] * self.group_size != codes.shape[1]:
            raise ValueError(
                f"{where} has {codes.shape[1]} inputs and {scales.shape[-1]} scales for each output, which is not one"
                f" for each group of {self.group_size}; fetch it again"
            )
        zeros = parts.get("weight_zero_point")
        if zeros is None:
            zeros = torch.full(scales.shape, middle)
        elif "weight_packed" in parts and zeros.dtype == torch.int32:
            words, per_word = zeros, 32 // self.bits
            if len(words) != -(-len(codes) // per_word):
                raise ValueError(
                    f"{where} has {len(words)} words of zero points for {len(codes)} outputs; fetch it again"
                )
            zeros = _words(words.t(), self.bits).flatten(1).t()[: len(codes)]
        elif zeros.dtype == torch.int8:
            zeros = zeros.int() + middle
        else:
            raise ValueError(f"{where} has zero points of {zeros.dtype}, which is not supported; fetch it again")
        zeros = zeros.view(1, 1).expand(by_row) if zeros.numel() == 1 else zeros
        groups = parts.get("weight_g_idx")
        is_ordered = groups is not None and not (groups == -1).any()  # -1: as they lie
        self._check(codes, zeros, scales, groups if is_ordered else None, where)
        return self._weight(codes, zeros, scales)

    def _check(self, codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None, where: str) -> None:
        """`codes [O, I]`, `zeros` and `scales [O, G]`, `groups [I]`."""
        num_inputs, num_groups = codes.shape[1], scales.shape[-1]
        is_grouped = scales.ndim == 2 and len(codes) == len(scales) and num_inputs % num_groups == 0
        if zeros.shape != scales.shape or not is_grouped:
            raise ValueError(
                f"{where} has codes, zero points and scales that do not fit together: {list(codes.shape)},"
                f" {list(zeros.shape)}, {list(scales.shape)}; fetch it again"
            )
        if groups is not None and not torch.equal(
            groups.long(), torch.arange(num_inputs) // (num_inputs // num_groups)
        ):
            raise ValueError(
                f"{where} has groups of inputs that are not side by side (desc_act, or actorder: group), which is not"
                " supported; use a checkpoint that was made with desc_act: false"
            )

    def _weight(self, codes: Tensor, zeros: Tensor, scales: Tensor) -> QuantisedWeight:
        """The weight as `scale * code + minimum`, which is exact: products of a scale of 11 bits and a code are below
        24 bits."""
        middle = 2 ** (self.bits - 1)
        symmetric = bool((zeros == middle).all())
        lowest = -middle if symmetric or self.bits == 8 else 0
        return QuantisedWeight(
            codes=(codes + lowest).to(torch.int8).contiguous(),
            scales=scales,
            minimums=None if symmetric else -(zeros + lowest) * scales,
            bits=self.bits,
            lowest=lowest,
        )

    def scaled(self, numbers: Tensor, scales: Tensor, where: str) -> QuantisedWeight | Tensor:
        """FP8's `numbers [O, I]` with their `scales`: one of all, `[O, 1]`, or one of each block, of which the last
        ones may be smaller. Where inputs end amid a block, the values in float32. Raises ValueError."""
        if numbers.ndim != 2 or numbers.dtype != torch.float8_e4m3fn or scales.dtype not in _SCALE_DTYPES:
            raise ValueError(
                f"{where} is {list(numbers.shape)} of {numbers.dtype} with scales of {scales.dtype}; of FP8 only"
                " matrices of float8_e4m3fn can be loaded, with scales of float32, bfloat16, float16 or float8_e8m0fnu"
            )
        factors = scales.float()
        if not factors.isfinite().all():
            raise ValueError(f"{where} has scales that are no numbers; fetch it again")
        num_outputs, num_inputs = numbers.shape
        block_outputs, block_inputs = self.block or (num_outputs, num_inputs)
        by_block = -(-num_outputs // block_outputs), -(-num_inputs // block_inputs)
        if factors.numel() == 1:
            factors = factors.view(1, 1).expand(num_outputs, 1)
        elif tuple(factors.shape) == by_block != (num_outputs, 1):
            factors = factors.repeat_interleave(block_outputs, dim=0)[:num_outputs]
        elif tuple(factors.shape) != (num_outputs, 1):
            blocks = f", or {list(by_block)} for blocks of {list(self.block)}" if self.block else ""
            raise ValueError(
                f"{where} is {list(numbers.shape)} with scales of {list(factors.shape)}; they have to be one number,"
                f" {[num_outputs, 1]}{blocks}; fetch it again"
            )
        if factors.shape[1] > 1 and num_inputs % block_inputs:
            return numbers.float().mul_(factors.repeat_interleave(block_inputs, dim=1)[:, :num_inputs])
        return QuantisedWeight(codes=numbers, scales=factors.contiguous(), minimums=None, bits=8, lowest=LOWEST_E4M3)


_FP8_BLOCK: Final = (128, 128)
_SCALE_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
# Of compressed-tensors, with the types and bits that each may have.
_COMPRESSED_FORMATS: Final = {
    "float-quantized": {("float", 8)},
    "int-quantized": {("int", 8)},
    "naive-quantized": {("float", 8), ("int", 8)},
    "pack-quantized": {("int", 4), ("int", 8)},
}


def _block(stated: object, folder: Path) -> tuple[int, int] | None:
    """Raises ValueError for what is no block."""
    numbers = stated.split("x") if isinstance(stated, str) else stated  # as old configs of compressed-tensors say it
    if numbers is None:
        return None
    if isinstance(numbers, Sequence) and len(numbers) == 2 and all(str(number).isdecimal() for number in numbers):
        outputs, inputs = map(int, numbers)
        if min(outputs, inputs) > 0:
            return outputs, inputs
    raise ValueError(
        f"config.json in {folder} says that weights are scaled by blocks of {stated!r}; expected are two sizes, as in"
        " [128, 128]"
    )


def _group_size(stated: object) -> int | None:
    """None: inputs do not share scales by groups, which some say by -1."""
    return stated if isinstance(stated, int) and stated > 0 else None


def _compressed_tensors(quantization: Mapping[str, Any], folder: Path) -> WeightPacking:
    """The packing, which all groups of modules must have in common. Raises ValueError for any other."""
    for key in ("sparsity_config", "transform_config"):
        if quantization.get(key) and quantization[key].get("format") != "dense":
            raise ValueError(
                f"the model in {folder} is compressed with a {key}, which is not supported; use a checkpoint without"
            )
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"config.json in {folder} has no config_groups for compressed-tensors; fetch it again")
    found = [
        _group_packing(weights, str(group.get("format") or quantization.get("format")), folder)
        for group in groups.values()
        if (weights := group.get("weights")) is not None  # else it rounds activations alone
    ]
    if not found:
        raise ValueError(f"config.json in {folder} says of no weights how compressed-tensors quantised them")
    blocks = {packing.block for packing in found} - {None}
    ways = {replace(packing, block=next(iter(blocks), None)) for packing in found}  # the shape says who has no blocks
    if len(ways) > 1 or len(blocks) > 1 or (blocks and found[0].stays_packed):
        raise ValueError(
            f"the model in {folder} is quantised by compressed-tensors in several ways, or to whole numbers by blocks,"
            " which is not supported; use a checkpoint in one of FP8, 8 or 4 bits"
        )
    return ways.pop()


def _group_packing(weights: Mapping[str, Any], stored: str, folder: Path) -> WeightPacking:
    """How compressed-tensors packs the weights of one group of modules, in the format `stored`. Raises ValueError for a
    way that is not known."""
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    if (kind, bits) not in _COMPRESSED_FORMATS.get(stored, ()):
        raise ValueError(
            f"the model in {folder} is quantised by compressed-tensors with {bits} bits of the type {kind!r} in the"
            f" format {stored!r}; supported are 8 bits in 'float-quantized', 'int-quantized' and 'naive-quantized', 4"
            " and 8 of 'int' in 'pack-quantized', or a checkpoint in bfloat16, float16 or float32"
        )
    block = _block(weights.get("block_structure"), folder)
    if kind == "float":
        return WeightPacking(method="fp8", bits=bits, has_zeros=False, block=block, group_size=None)
    return WeightPacking(
        method="compressed-tensors",
        bits=bits,
        has_zeros=not weights.get("symmetric", True),
        block=block,
        group_size=_group_size(weights.get("group_size")),
    )


MXFP4_GROUP: Final = 32
"""Inputs that share a scale."""

# Twice what E2M1's codes stand for: whole numbers.
_DOUBLED_E2M1 = torch.tensor((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), dtype=torch.int8)


def mxfp4_weight(blocks: Tensor, scales: Tensor) -> QuantisedWeight:
    """Take `blocks [O, G, 16]` and `scales [O, G]` apart, which are bytes: two inputs' E2M1 in each of the former, the
    earlier one in the lower half; the exponents of two, 127 too high (OCP Microscaling Formats 1.0). Its values are
    exact."""
    blocks = blocks.cpu().int()
    codes = _DOUBLED_E2M1[torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)]
    exponents = scales.cpu().int() - 128  # one less, since codes are doubled
    powers = torch.ldexp(torch.ones(exponents.shape), exponents)
    return QuantisedWeight(codes=codes, scales=powers, minimums=None, bits=4, lowest=LOWEST_E2M1)


def _words(packed: Tensor, bits: int) -> Tensor:
    """`[.., N]` int32 to `[.., N, P]` int32 codes, those of the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return torch.bitwise_right_shift(packed.unsqueeze(-1), shifts).bitwise_and(2**bits - 1)


def _in_order(codes: Tensor) -> Tensor:
    """`[.., O]` as AWQ's words give them, by their outputs."""
    order = torch.empty(8, dtype=torch.int64)
    order[list(_AWQ_OUTPUTS)] = torch.arange(8)
    return codes.view(*codes.shape[:-1], -1, 8)[..., order].flatten(-2)
