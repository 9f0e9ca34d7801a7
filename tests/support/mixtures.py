"""Mixtures of experts whose router's logits are exact in every type, so that all kernels choose the same experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import Activation, ExpertChoice, GatedMlp, InFloat32, Kernels, Linear
from kernels.quantised_weight import QuantisedWeight


@dataclass(frozen=True, kw_only=True)
class Mixture:
    num_experts: int = 8
    per_row: int = 2
    hidden: int = 64
    width: int = 48
    normalised: bool = True
    activation: Activation = "silu"
    biased: bool = False  # experts have biases: their weights' first columns
    scale: float = 1.0
    groups: int = 1
    groups_per_row: int = 1
    corrected: bool = False
    router_in_float32: bool = False

    def choice(self, device: torch.device) -> ExpertChoice:
        correction = torch.linspace(0.3, -0.4, self.num_experts)[torch.arange(self.num_experts) * 7 % self.num_experts]
        return ExpertChoice(
            per_row=self.per_row,
            normalised=self.normalised,
            scale=self.scale,
            groups=self.groups,
            groups_per_row=self.groups_per_row,
            correction=correction.to(device) if self.corrected else None,
        )

    def rows(self, count: int, dtype: torch.dtype) -> Tensor:
        """The first inputs of a row are its logits: all numbers from 0 on in steps of 1/8, in some order."""
        x = torch.randn(count, self.hidden)
        for row in x:
            row[: self.num_experts] = torch.randperm(self.num_experts) / 8
        return x.to(dtype)

    def weights(self, dtype: torch.dtype) -> list[Tensor]:
        """The router's `[X, E]`; then `[2 * width, E]` and `[E, width]` of each expert."""
        experts = [
            torch.randn(shape) / shape[1] ** 0.5
            for _ in range(self.num_experts)
            for shape in ((2 * self.width, self.hidden), (self.hidden, self.width))
        ]
        return [weight.to(dtype) for weight in (torch.eye(self.num_experts, self.hidden), *experts)]

    def packed(
        self, kernels: Kernels, weights: list[Tensor], *, quantised: bool = False, held: range | None = None
    ) -> Linear:
        """By the `held` experts alone; None: by all."""

        def pack(weight: Tensor) -> Linear:
            bias = weight[:, 0].contiguous() if self.biased else None
            if quantised:
                return kernels.pack_quantised(_eight_bits(weight), bias, weight.dtype)
            return kernels.pack_linear(weight, bias)

        experts = [
            GatedMlp(
                gate_up=pack(gate_up), down=pack(down), activation=self.activation, activate=kernels.gated_activation
            )
            if held is None or number in held
            else None
            for number, (gate_up, down) in enumerate(zip(weights[1::2], weights[2::2], strict=True))
        ]
        router: Linear = kernels.pack_linear(weights[0], None)
        if self.router_in_float32:
            router = InFloat32(kernels.pack_linear(weights[0].float(), None))
        return kernels.pack_experts(router, experts, self.choice(weights[0].device))

    def shares(self) -> list[range]:
        """Its experts divided among up to three processes, which have different numbers of them."""
        stops = sorted({1, max(1, self.num_experts // 3), self.num_experts})
        return [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]

    def close_call(self, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
        """Weights and a row whose logits rise from expert to expert by less than what bfloat16 tells apart."""
        weights = self.weights(dtype)
        router = torch.zeros(self.num_experts, self.hidden)
        router[:, 0], router[:, 1] = 8.0, torch.arange(self.num_experts) / 256
        return [router.to(dtype), *weights[1:]], torch.ones(1, self.hidden, dtype=dtype)


MIXTURES = {
    "two of eight": Mixture(),
    "all of three, their shares among all": Mixture(num_experts=3, per_row=3, normalised=False),
    "four of eight, biased": Mixture(per_row=4, activation="swigluoai", biased=True),
    "one": Mixture(num_experts=1, per_row=1),
    "seven of sixty": Mixture(num_experts=60, per_row=7, hidden=96, width=16, normalised=False, activation="gelu_tanh"),
    "three of two groups of four": Mixture(
        num_experts=20, per_row=3, normalised=False, scale=1.5, groups=4, groups_per_row=2
    ),
    "four by corrected sigmoids": Mixture(num_experts=18, per_row=4, scale=1.25, corrected=True),
    "four of three groups of six, by corrected sigmoids in float32, biased": Mixture(
        num_experts=18,
        per_row=4,
        normalised=False,
        scale=0.5,
        groups=6,
        groups_per_row=3,
        corrected=True,
        biased=True,
        router_in_float32=True,
    ),
}


def _eight_bits(weight: Tensor) -> QuantisedWeight:
    groups = weight.float().view(len(weight), -1, 16)
    scales = groups.abs().amax(-1) / 127
    codes = (groups / scales.unsqueeze(-1)).round().to(torch.int8).view(weight.shape)
    return QuantisedWeight(codes=codes, scales=scales, minimums=None, bits=8, lowest=-128)
