"""What a worker keeps in the memory of each of its devices: predicted from the model's shape, nothing measured.

Weights and KV are arithmetic; activations are an estimate of the widest moment of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine.cost_model.roofline import Device, ModelShape, kv_capacity_tokens

USABLE_SHARE: Final = 0.9
"""The rest of a device is for its driver, libraries' buffers and fragmentation."""

_MLP_WIDTH: Final = 5  # intermediate sizes held at once, as measured: gate and up, and what is made of them
_LOGIT_BYTES: Final = 16  # in 16 bits, in float32, and what sampling makes of that


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """The memory of one device, in bytes. `kv_tokens`: what all devices of the worker have room for, each with its
    share of heads, or with the latents of all."""

    weights_bytes: int
    activation_bytes: int
    ring_bytes: int
    kv_bytes: int
    unused_bytes: int
    kv_tokens: int


def predict_memory(
    shape: ModelShape,
    device: Device,
    *,
    num_devices: int = 1,
    token_budget: int,
    max_num_seqs: int,
    ring_bytes: int = 0,
) -> WorkerMemory:
    """The memory for steps of up to `token_budget` tokens, of which up to `max_num_seqs` sample; `ring_bytes` of
    staging ring on each device. All KV that fits beside that. Raises ValueError, with advice, where the rest does not
    fit."""
    activations = activation_bytes(shape, num_devices=num_devices, token_budget=token_budget, max_num_seqs=max_num_seqs)
    kv_tokens = kv_capacity_tokens(
        shape, device, num_devices=num_devices, usable_share=USABLE_SHARE, other_bytes=activations + ring_bytes
    )
    weights = -(-shape.weight_bytes // num_devices)
    kv_bytes = kv_tokens * shape.kv_bytes_per_token * shape.kv_copies(num_devices) // num_devices
    return WorkerMemory(
        weights_bytes=weights,
        activation_bytes=activations,
        ring_bytes=ring_bytes,
        kv_bytes=kv_bytes,
        unused_bytes=int(device.memory_bytes) - weights - activations - ring_bytes - kv_bytes,
        kv_tokens=kv_tokens,
    )


def activation_bytes(shape: ModelShape, *, num_devices: int = 1, token_budget: int, max_num_seqs: int) -> int:
    """The bytes of activations at the widest moment of a step on one device: in the MLP or in attention, the residual
    stream and its norm are held beside it; or at the end, when logits are, which every device has of all tokens."""
    mlp = _MLP_WIDTH * shape.widest_mlp / num_devices
    if shape.experts is not None:  # a row for each of a token's experts goes in, and one comes out
        mlp += 2 * shape.experts.per_token * shape.hidden_size
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim / num_devices
    layer = token_budget * (2 * shape.hidden_size + max(mlp, attention)) * shape.bytes_per_value
    head = max_num_seqs * shape.vocab_size * _LOGIT_BYTES
    return int(max(layer, head))
