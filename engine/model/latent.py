"""Attention by a latent (DeepSeek's MLA, arXiv:2405.04434, section 2.1): what is cached of a token is one vector of a
layer, for all heads.

A head's key is a projection of the latent, and beside it numbers that are rotated by the token's position and are all
heads' own; its value is another projection of the latent. Both are moved to the other side of attention: queries are
projected into the latent's space, and what attention sums up are latents, which become values afterwards. So attention
is that of many query heads over one key, of which the first numbers are the value, and no head's keys are ever made.

Shape legend: T packed tokens, E hidden size, Q query heads, P a head's numbers that are not rotated, R those that are,
L the latent; V a head's value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.config import LatentConfig
from kernels.interface import HeadwiseLinear, Kernels, Layer, Linear

_NORM_EPS = 1e-6  # of the norms of latents, whatever the model's other norms have


def first_projection_rows(config: LatentConfig, num_heads: int) -> Tensor:
    """The order in which a layer's first projection has the outputs of queries (or of their latent), then of the latent
    and what is rotated beside it: the rotated ones between the others, next to those of queries."""
    queries = query_rows(config, num_heads) if config.query_rank is None else torch.arange(config.query_rank)
    latent = torch.arange(config.rank) + len(queries)
    rotated = _rotated(config) + len(queries) + config.rank
    return torch.cat((queries, rotated, latent))


def query_rows(config: LatentConfig, num_heads: int) -> Tensor:
    """The order in which the projection of queries has its outputs: of all heads what is not rotated, then what is."""
    heads = torch.arange(num_heads).unsqueeze(1) * (config.plain_dim + config.rotary_dim)
    plain, rotated = heads + torch.arange(config.plain_dim), heads + config.plain_dim + _rotated(config)
    return torch.cat((plain.flatten(), rotated.flatten()))


def _rotated(config: LatentConfig) -> Tensor:
    """Pairs that turn together lie side by side in most checkpoints; ours are half a head apart."""
    order = torch.arange(config.rotary_dim)
    return order.view(-1, 2).t().flatten() if config.interleaved else order


def pack_keys_and_values(
    weight: Tensor, config: LatentConfig, num_heads: int, kernels: Kernels
) -> tuple[HeadwiseLinear, HeadwiseLinear]:
    """Pack the projections that make a latent each head's key and value, from `weight [Q * (P + V), L]`: P -> L for
    queries, L -> V."""
    heads = torch.unflatten(weight, 0, (num_heads, -1))
    keys, values = heads[:, : config.plain_dim], heads[:, config.plain_dim :]
    return kernels.pack_heads(keys.transpose(1, 2)), kernels.pack_heads(values)


@dataclass(frozen=True, slots=True)
class LatentOutput:
    """`Q * L -> E`: each head's sum of latents becomes its value, and all of them the layer's output."""

    values: HeadwiseLinear
    output: Linear
    rank: int

    def __call__(self, x: Tensor) -> Tensor:
        return self.output(self._values(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self.output.add_to(residual, self._values(x))

    def _values(self, x: Tensor) -> Tensor:
        return self.values(torch.unflatten(x, 1, (-1, self.rank))).flatten(1)


def project(
    normed: Tensor, layer: Layer, config: LatentConfig, num_heads: int, kernels: Kernels
) -> tuple[Tensor, Tensor, Tensor]:
    """Project a layer's input. Returns, of queries, what is not rotated, in the latent's space `[T, Q, L]`; what will
    be rotated of queries and key `[T, Q + 1, R]`; the latent `[T, 1, L]`."""
    latent = layer.latent
    assert latent is not None
    plain_width = num_heads * config.plain_dim
    projected = layer.qkv(normed)
    first, rotary_dim = projected.shape[1] - config.rank, config.rotary_dim
    cached = kernels.rms_norm(projected[:, first:].unsqueeze(1), latent.latent_norm, _NORM_EPS)
    if latent.query is None:
        plain, rotated = projected[:, :plain_width], projected[:, plain_width:first]
    else:
        assert latent.query_norm is not None
        compressed = projected[:, : first - rotary_dim].unsqueeze(1)
        queries = latent.query(kernels.rms_norm(compressed, latent.query_norm, _NORM_EPS).flatten(1))
        plain = queries[:, :plain_width]
        rotated = torch.cat((queries[:, plain_width:], projected[:, first - rotary_dim : first]), 1)
    heads = torch.unflatten(plain, 1, (num_heads, -1))
    return latent.keys(heads), torch.unflatten(rotated, 1, (num_heads + 1, -1)), cached
