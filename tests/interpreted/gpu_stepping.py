"""Drives the engine on given kernels, on the device that there is."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from engine.checkpoint.weights import load_weights
from engine.kv.cache import KVCache, KVLayout
from engine.model.config import ModelConfig
from engine.steps.runner import ModelRunner
from kernels.interface import Kernels
from tests.support.interpreted import device
from tests.support.stepping import RecordingSampler, Stepper

SMALL_VOCABULARY = 48
LENGTHS = (1, 11, 23)


def prompts() -> list[list[int]]:
    chooser = random.Random(0)
    return [[chooser.randrange(3, SMALL_VOCABULARY) for _ in range(length)] for length in LENGTHS]


def stepper_on(kernels: Kernels, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Stepper, RecordingSampler]:
    """A runner over a KV cache full of NaN."""
    config = ModelConfig.from_folder(folder)
    layout = KVLayout(
        num_layers=config.num_layers,
        layers_per_group=2,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        latent_dim=config.latent_dim,
        block_size=5,
        dtype=dtype,
    )
    kv_cache = KVCache(layout, 200, device())
    kv_cache.tensor.fill_(torch.nan)
    sampler = RecordingSampler()
    weights = load_weights(folder, config, dtype=dtype, device=device())
    return Stepper(ModelRunner(config, weights, kv_cache, sampler=sampler, kernels=kernels)), sampler
