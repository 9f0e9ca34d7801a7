"""What a step should cost, and what a worker should keep in its devices' memory, by a model's shape and a device's
datasheet, with nothing measured.

Knows arithmetic, bytes and stated efficiencies; no scheduler and no running device. For planning, for simulation, and
as the seed of a fit: good for proportions, within some tens of percent in seconds. In memory weights and KV are
arithmetic; activations are an estimate of the widest moment of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engine.cost_model.step_cost import StepCost

if TYPE_CHECKING:
    from engine.model.config import DecoderConfig, ExpertsConfig, LatentConfig

# Of the relative error to expect of such an estimate; a fit seeded with it believes its own steps soon.
ROOFLINE_ERROR = 0.3

USABLE_SHARE: Final = 0.9
"""The rest of a device is for its driver, libraries' buffers and fragmentation."""

_MLP_WIDTH: Final = 5  # intermediate sizes held at once, as measured: gate and up, and what is made of them
_LOGIT_BYTES: Final = 16  # in 16 bits, in float32, and what sampling makes of that


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only transformer with grouped-query attention and gated MLPs."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    bytes_per_value: int = 2  # of weights and of KV
    num_sparse_layers: int = 0  # whose MLP is a mixture of experts
    experts: ExpertsConfig | None = None  # of such a layer
    latent: LatentConfig | None = None

    @classmethod
    def of(cls, config: DecoderConfig, *, bytes_per_value: int) -> ModelShape:
        """The shape of a model. A mixture that transformers computes counts as if it were dense."""
        from engine.model.config import ModelConfig  # brings torch, which who simulates by shapes does without

        native = config if isinstance(config, ModelConfig) else None
        layers = native.layers if native else ()
        mixtures = [layer.experts for layer in layers if layer.experts is not None]
        return cls(
            name=config.architecture,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            tied_embeddings=config.tied_embeddings,
            bytes_per_value=bytes_per_value,
            num_sparse_layers=len(mixtures),
            experts=mixtures[0] if mixtures else None,
            latent=native.latent if native else None,
        )

    @property
    def layer_weights(self) -> int:
        """The number of weights of all layers that every token is multiplied by: of a mixture, the experts that are
        chosen for it."""
        return self._layer_weights(0 if self.experts is None else self.experts.per_token)

    @property
    def held_layer_weights(self) -> int:
        """The number of weights of all layers with all experts: what memory holds, and what a step of many tokens
        reads."""
        return self._layer_weights(0 if self.experts is None else self.experts.num_experts)

    def _layer_weights(self, num_experts: int) -> int:
        attention = self._attention_weights
        dense = 3 * self.hidden_size * self.intermediate_size
        sparse = 0
        if self.experts is not None:
            router = self.hidden_size * self.experts.num_experts
            sparse = router + 3 * self.hidden_size * (num_experts * self.experts.width + self.experts.shared_width)
        return (
            self.num_layers * attention
            + (self.num_layers - self.num_sparse_layers) * dense
            + self.num_sparse_layers * sparse
        )

    @property
    def _attention_weights(self) -> int:
        """The number of attention's weights in one layer."""
        latent = self.latent
        if latent is None:
            return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        queries = self.num_heads * (latent.plain_dim + latent.rotary_dim)
        asked = self.hidden_size * queries
        if latent.query_rank is not None:
            asked = latent.query_rank * (self.hidden_size + queries)
        keys_and_values = self.num_heads * (latent.plain_dim + latent.value_dim) * latent.rank
        return asked + self.hidden_size * (self.head_dim + self.num_heads * latent.value_dim) + keys_and_values

    @property
    def widest_mlp(self) -> int:
        """Intermediate values of a token in one layer, those of all its experts together."""
        sparse = 0
        if self.experts is not None:
            sparse = self.experts.per_token * self.experts.width + self.experts.shared_width
        return max(sparse, self.intermediate_size if self.num_sparse_layers < self.num_layers else 0)

    @property
    def head_weights(self) -> int:
        """The number of weights of the output layer, which only tokens that sample are multiplied by."""
        return self.vocab_size * self.hidden_size

    @property
    def num_weights(self) -> int:
        return self.held_layer_weights + self.head_weights * (1 if self.tied_embeddings else 2)

    @property
    def weight_bytes(self) -> int:
        return self.num_weights * self.bytes_per_value

    @property
    def kv_bytes_per_token(self) -> int:
        planes = 2 if self.latent is None else 1
        return planes * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_value

    def kv_copies(self, num_devices: int) -> int:
        """How many of the devices that share the model have the same KV: none has a part of a latent."""
        return 1 if self.latent is None else num_devices

    @property
    def flops_per_pair(self) -> int:
        """Operations of attention for one query and one key: their product and the share of a value, in every head and
        layer."""
        value_dim = self.head_dim if self.latent is None else self.latent.rank
        return 2 * self.num_layers * self.num_heads * (self.head_dim + value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A datasheet, and which shares of it serving engines reach.

    `step_s`: of any step beside the model's work: launches, scheduling, sampling. Links are between the devices that
    share a model, each way; `link_s` is the latency of one reduction among them.
    """

    name: str
    flops: float  # dense, in 16 bits
    memory_bytes_per_s: float
    memory_bytes: float
    matmul_share: float
    attention_share: float
    memory_share: float
    step_s: float
    link_bytes_per_s: float = 0.0
    link_s: float = 0.0


# Efficiencies of the GPUs: of matrix products such that an 8B model's prompts of 2,048 tokens take 25,000 tokens/s on
# an H100 and a decode step about 7 ms; of attention about what FlashAttention-2's forward pass reaches on an A100 in
# causal form, half of it on Hopper's far faster units. Datasheets: NVIDIA's of H100 SXM5, A100 SXM 80 GB and L40S.
H100_SXM = Device(
    name="H100 SXM 80 GB",
    flops=989e12,
    memory_bytes_per_s=3.35e12,
    memory_bytes=80e9,
    matmul_share=0.42,
    attention_share=0.3,
    memory_share=0.8,
    step_s=1e-3,
    link_bytes_per_s=450e9,
    link_s=10e-6,
)
A100_SXM = Device(
    name="A100 SXM 80 GB",
    flops=312e12,
    memory_bytes_per_s=2.039e12,
    memory_bytes=80e9,
    matmul_share=0.55,
    attention_share=0.5,
    memory_share=0.8,
    step_s=1.2e-3,
    link_bytes_per_s=300e9,
    link_s=12e-6,
)
L40S = Device(
    name="L40S 48 GB",
    flops=362e12,
    memory_bytes_per_s=0.864e12,
    memory_bytes=48e9,
    matmul_share=0.5,
    attention_share=0.4,
    memory_share=0.8,
    step_s=1.2e-3,
    link_bytes_per_s=32e9,  # PCIe 4
    link_s=30e-6,
)
# One core, as measured: bf16 products by oneDNN at 0.21 TFLOP/s and reads at 23 GB/s; the shares are this engine's.
CPU_CORE = Device(
    name="one Zen 4 core",
    flops=0.21e12,
    memory_bytes_per_s=23e9,
    memory_bytes=12e9,
    matmul_share=0.75,
    attention_share=0.3,
    memory_share=0.6,
    step_s=5e-3,
)

LLAMA_3_1_8B = ModelShape(
    name="Llama-3.1-8B",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    tied_embeddings=False,
)
LLAMA_3_1_70B = ModelShape(
    name="Llama-3.1-70B",
    num_layers=80,
    hidden_size=8192,
    intermediate_size=28672,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    tied_embeddings=False,
)


def roofline_cost(shape: ModelShape, device: Device, *, num_devices: int = 1) -> StepCost:
    """The model split over `num_devices` tensor-parallel devices.

    `StepCost` adds where a device overlaps: a long prompt's step is charged for reading the weights on top of its
    arithmetic (8 % of 2,048 tokens of an 8B model on an H100), which errs to the safe side. So does a mixture's step of
    few tokens, which is charged for reading all experts: n tokens that choose k of x read x (1 - (1 - k / x)^n).
    """
    _require_fit(shape, device, num_devices)
    flops = num_devices * device.flops
    bandwidth = num_devices * device.memory_bytes_per_s * device.memory_share
    read_bytes = (shape.held_layer_weights + shape.head_weights) * shape.bytes_per_value
    reduced_s = _reduction_bytes_per_token(shape, num_devices) / device.link_bytes_per_s if num_devices > 1 else 0.0
    token_s = 2 * shape.layer_weights / (flops * device.matmul_share) + reduced_s
    return StepCost(
        base_s=device.step_s + read_bytes / bandwidth + _reductions_s(shape, device, num_devices),
        prefill_token_s=token_s,
        prefill_pair_s=shape.flops_per_pair / (flops * device.attention_share),
        decode_s=token_s + 2 * shape.head_weights / (flops * device.matmul_share),
        context_token_s=shape.kv_copies(num_devices) * shape.kv_bytes_per_token / bandwidth,
        relative_error=ROOFLINE_ERROR,
    )


def kv_capacity_tokens(
    shape: ModelShape,
    device: Device,
    *,
    num_devices: int = 1,
    usable_share: float = USABLE_SHARE,
    other_bytes: float = 0.0,
) -> int:
    """Tokens whose KV fits beside the weights in the usable share of all devices' memory, less `other_bytes` on each.

    Raises ValueError where not even the weights fit.
    """
    _require_fit(shape, device, num_devices)
    room = num_devices * (device.memory_bytes * usable_share - other_bytes) - shape.weight_bytes
    if room < 0:
        raise ValueError(
            f"{shape.name} has {shape.weight_bytes / 1e9:.0f} GB of weights; {num_devices} x {device.name} leave"
            f" {(room + shape.weight_bytes) / 1e9:.0f} GB for them and KV: use more devices"
        )
    return int(room // (shape.kv_copies(num_devices) * shape.kv_bytes_per_token))


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


def _require_fit(shape: ModelShape, device: Device, num_devices: int) -> None:
    """KV heads are not split, so that many devices are the most among which KV can be shared out evenly; of a latent,
    which each device has, query heads are shared out."""
    num_heads, kind = (shape.num_kv_heads, "KV") if shape.latent is None else (shape.num_heads, "query")
    if num_devices < 1 or num_heads % num_devices:
        raise ValueError(f"{shape.name} has {num_heads} {kind} heads, which {num_devices} devices cannot share evenly")
    if num_devices > 1 and not device.link_bytes_per_s:
        raise ValueError(f"{device.name} states no link to others of its kind; use one device")


def _reductions_s(shape: ModelShape, device: Device, num_devices: int) -> float:
    """Latency of a step's reductions: two in each layer."""
    return 2 * shape.num_layers * device.link_s if num_devices > 1 else 0.0


def _reduction_bytes_per_token(shape: ModelShape, num_devices: int) -> float:
    """Over each device's link: a ring reduction sends 2 (n - 1) / n of what is reduced."""
    ring = 2 * (num_devices - 1) / num_devices
    return 2 * shape.num_layers * shape.hidden_size * shape.bytes_per_value * ring
