"""What kind of model a folder holds: sizes, and the choices in which the supported families differ.

`ModelConfig` says everything the model needs; nothing else looks at config.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

from pydantic import TypeAdapter

from engine.checkpoint.cache import remembered
from engine.checkpoint.packing import WeightPacking
from engine.model.rope import ROPE_KINDS, RopeConfig, yarn_magnitude
from kernels.interface import SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT, Activation

if TYPE_CHECKING:
    from engine.model.hugging_face import HuggingFaceConfig

# Another family is named here; its sizes and choices are read below; `engine.checkpoint.weights` knows the names and
# shapes of its tensors, and `engine.model.shards` how ranks cut those that they do; `tests/support/model_families.py`
# makes a small one, which `test_models.py` compares with transformers, while `test_compilation.py` asks whether kernels
# for GPUs are shipped for the family's own sizes (`_ALSO_SAID`); the README and docs/guide/configuration.md list it.
# Many need no more: norms in other places, projections that are stored as one, or pairs that rotate otherwise are data;
# what may differ from layer to layer is `LayerConfig`. What no family has computed yet is also
# `engine.model.transformer` and `kernels.interface.Layer`. The fused layers in C++ leave out unheard what they do not
# know: until `kernels/native/layers.py` (`_NORMS`) and `kernels/native/src/layers.cpp` compute it, have `_fuse` of the
# transformer give None for it, and leave the family out of `WITH_FUSED_LAYERS`.
# `python -m engine.model.architectures` prints docs/guide/models.md anew.
SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "Qwen2MoeForCausalLM",
    "Phi3ForCausalLM",
    "GlmForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoeForCausalLM",
)

_LATENT = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
_GLM = ("GlmForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM")

# All of what decides how a config is read.
_CODE = [
    Path(__file__),
    Path(__file__).with_name("rope.py"),
    Path(__file__).parents[1] / "checkpoint" / "packing.py",
]

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swigluoai": "swigluoai",
}


Backend = Literal["auto", "native", "transformers"]
"""Whose code computes a model: Legato's, or that of transformers over Legato's KV. `auto`: Legato's where it can."""


class DecoderConfig(Protocol):
    """What everything above a model knows of it, whoever computes it."""

    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def latent_dim(self) -> int | None:
        """Numbers of a key that are its value, too; None: values are cached beside keys."""
        ...

    @property
    def num_layers(self) -> int: ...
    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Tokens that each layer's attention sees, the newest included; None: all."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """Tokens of a sequence that the model was made for."""
        ...

    @property
    def longest_context(self) -> int:
        """Tokens of a sequence that may be asked for."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def tied_embeddings(self) -> bool: ...


def read_config(folder: str | Path, backend: Backend = "auto") -> ModelConfig | HuggingFaceConfig:
    """The config of the model in a folder, as it will be computed: a `ModelConfig` natively. Raises ValueError for what
    cannot be served so."""
    if backend == "native":
        return ModelConfig.from_folder(folder)
    refused: ValueError | None = None
    if backend == "auto":
        try:
            return ModelConfig.from_folder(folder)
        except ValueError as error:
            refused = error
    from engine.model.hugging_face import HuggingFaceConfig  # takes seconds to import

    try:
        return HuggingFaceConfig.from_folder(folder)
    except ValueError:
        if refused is not None and _named_architecture(Path(folder)) in SUPPORTED_ARCHITECTURES:
            raise refused from None  # what its own model lacks is nearer
        raise


Config = TypeVar("Config", bound="ModelConfig | HuggingFaceConfig")


def remembered_config(kind: type[Config], folder: Path, read: Callable[[Path], Config], code: Iterable[Path]) -> Config:
    """What `read` makes of a folder's config.json and generation_config.json, by the files of `code`; next time as it
    was."""
    sources = [*code, folder / "config.json", folder / "generation_config.json"]
    known = remembered(kind.__name__, sources, lambda: asdict(read(folder)))
    if kind.__name__ not in _ADAPTERS:
        _ADAPTERS[kind.__name__] = TypeAdapter(kind)
    config: Config = _ADAPTERS[kind.__name__].validate_python(known)
    return config


_ADAPTERS: Final[dict[str, TypeAdapter[Any]]] = {}  # to make one takes longer than all else there


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A layer's mixture of experts: gated MLPs, of which a router chooses a few for each token."""

    num_experts: int
    per_token: int
    width: int  # of each, as `ModelConfig.intermediate_size` is a dense MLP's
    normalised: bool  # the weights of a token's experts sum to 1; else each is its share among all experts
    router_bias: bool = False
    router_in_float32: bool = False
    scale: float = 1.0  # of those weights
    groups: int = 1  # of experts; a token's are all of `groups_per_token` of them
    groups_per_token: int = 1
    corrected: bool = False  # chosen by sigmoids and a correction of the checkpoint: see `ExpertChoice`
    shared_width: int = 0  # of one more MLP, which is every token's
    shared_gate: bool = False  # that one counts by the sigmoid of a projection of the token


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Attention over latents: see `engine.model.latent`."""

    rank: int  # of the latent
    query_rank: int | None  # of the queries' own; None: they are projected at once
    plain_dim: int  # of a head's query and key, what is not rotated
    rotary_dim: int  # and what is; keys have it in common
    value_dim: int  # of a head
    interleaved: bool  # whether pairs that turn together lie side by side in the checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorms:
    """What a layer's norms are called in the checkpoint. None: there is none at that place."""

    attention: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp: str | None = "post_attention_layernorm"
    mlp_output: str | None = None


QkNorm = Literal["each head", "all heads"]
"""Over which numbers of a token queries and keys are normalised before they are rotated: over each head's own, or over
those of all query heads and of all key heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What may differ from layer to layer of a model."""

    window: int | None  # tokens that attention sees, the newest included; None: all
    rope: RopeConfig
    experts: ExpertsConfig | None = None  # None: one MLP for all tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer: grouped-query attention with rotary positions, gated MLP, RMS norms.

    With a latent, `num_kv_heads` and `head_dim` are those of what is cached: one key of the latent and what is rotated.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    rms_norm_eps: float
    activation: Activation
    tied_embeddings: bool
    attention_scale: float
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's output projection
    mlp_bias: bool = False
    qk_norm: QkNorm | None = None
    norms: LayerNorms = LayerNorms()
    norm_weight_offset: float = 0.0  # added to every norm weight, in float32
    embedding_scale: float | None = None
    attention_softcap: float | None = None
    attention_sinks: bool = False  # each query head has a logit of its own beside those of keys
    logit_softcap: float | None = None
    packing: WeightPacking | None = None  # of the projections' weights in the checkpoint
    latent: LatentConfig | None = None
    num_drafting_layers: int = 0  # that a checkpoint may have behind the others (MTP): they are not read

    @property
    def latent_dim(self) -> int | None:
        return None if self.latent is None else self.latent.rank

    @property
    def query_dim(self) -> int:
        """The numbers of a query head as it is projected: with a latent, before it is in the latent's space."""
        return self.head_dim if self.latent is None else self.latent.plain_dim + self.latent.rotary_dim

    @property
    def value_dim(self) -> int:
        """The numbers of a head of which the output projection makes the layer's."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def rotary_dim(self) -> int:
        """The number of a head's values that are rotated."""
        return self.head_dim if self.latent is None else self.latent.rotary_dim

    @property
    def reorders_heads(self) -> bool:
        """Whether keys are cached in another order of a head's numbers than the checkpoint's."""
        return any(layer.rope.reorders_heads for layer in self.layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        return tuple(layer.window for layer in self.layers)

    @property
    def longest_context(self) -> int:
        """A multiple of `max_position_embeddings` where all layers scale positions linearly: whether that is the length
        before or behind it, configs do not tell."""
        ropes = (layer.rope for layer in self.layers)
        return int(self.max_position_embeddings * min(rope.factor if rope.kind == "linear" else 1.0 for rope in ropes))

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read config.json and generation_config.json. Raises ValueError for what this engine cannot run."""
        return remembered_config(cls, Path(folder), cls._read, _CODE)

    @classmethod
    def _read(cls, folder: Path) -> ModelConfig:
        architecture = _architecture(folder)
        hf = load_hf_config(folder)
        quantization = getattr(hf, "quantization_config", None)
        config = _translate(hf, architecture, eos_token_ids(hf, folder), folder)
        return replace(config, packing=WeightPacking.from_config(quantization, folder)) if quantization else config


_GEMMAS_NORMS = LayerNorms(
    attention_output="post_attention_layernorm",
    mlp="pre_feedforward_layernorm",
    mlp_output="post_feedforward_layernorm",
)
_OLMOS_NORMS = LayerNorms(
    attention=None, attention_output="post_attention_layernorm", mlp=None, mlp_output="post_feedforward_layernorm"
)
_NORMS: Mapping[str, LayerNorms] = {
    "Gemma2ForCausalLM": _GEMMAS_NORMS,
    "Gemma3ForCausalLM": _GEMMAS_NORMS,
    "Glm4ForCausalLM": LayerNorms(attention_output="post_self_attn_layernorm", mlp_output="post_mlp_layernorm"),
    "Olmo2ForCausalLM": _OLMOS_NORMS,
    "Olmo3ForCausalLM": _OLMOS_NORMS,
}
_QK_NORMS: Mapping[str, QkNorm] = {
    "Qwen3ForCausalLM": "each head",
    "Qwen3MoeForCausalLM": "each head",
    "Gemma3ForCausalLM": "each head",
    "Glm4MoeForCausalLM": "each head",
    "Olmo2ForCausalLM": "all heads",
    "Olmo3ForCausalLM": "all heads",
    "OlmoeForCausalLM": "all heads",
}


def _architecture(folder: Path) -> str:
    named = _named_architecture(folder)
    if named not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ValueError(f"the model in {folder} has the architecture {named}; supported are {supported}")
    return named


def _named_architecture(folder: Path) -> str:
    listed = read_json(folder / "config.json").get("architectures")
    named = str(listed[0]) if listed and isinstance(listed, list) else "(none)"
    # One that was saved without its head is the same model; the weights tell whether it can do without.
    whole = named.removesuffix("Model") + "ForCausalLM" if named.endswith("Model") else named
    return whole if whole in SUPPORTED_ARCHITECTURES else named


def read_json(path: Path) -> dict[str, Any]:
    """Raises ValueError where the file is missing or broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist: a model folder holds config.json and safetensors files") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; fetch it again")
    return content


# What config.json says of a model's size, by its names in one family or another: at least 1, where it is there.
_SIZES = (
    "vocab_size",
    *("hidden_size", "n_embd", "intermediate_size", "head_dim", "query_pre_attn_scalar"),
    *("num_attention_heads", "n_head", "num_key_value_heads"),
    *("num_hidden_layers", "n_layer", "decoder_sparse_step"),
    *("max_position_embeddings", "n_positions"),
)


def _require_sizes(path: Path) -> None:
    """Raise ValueError where a config.json has a size that no model has: whoever computes with it would divide by zero,
    or find too late that it fits nothing."""
    config = read_json(path)
    sizes = {name: config[name] for name in _SIZES if isinstance(config.get(name), (int, float))}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{path} says that {name} is {size}, which no model's is; fetch it again")
    heads, kv_heads = sizes.get("num_attention_heads", 0), sizes.get("num_key_value_heads", 1)
    if heads % kv_heads:
        raise ValueError(
            f"{path} says that {heads} attention heads share {kv_heads} key/value heads, which does not come out even;"
            " fetch it again"
        )


def load_hf_config(folder: Path) -> Any:
    """The family's own defaults applied, names of older config versions translated. Raises ValueError."""
    from transformers import AutoConfig  # takes seconds to import: only a checkpoint's first start pays for it

    _require_sizes(folder / "config.json")
    if read_json(folder / "config.json").get("per_layer_config"):
        raise ValueError(f"the model in {folder} has layers of different shapes (per_layer_config): not supported")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except ValueError:
        raise
    except Exception as error:  # whatever transformers raises over what a file holds: it has errors of its own
        said = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"{folder / 'config.json'} cannot be read as a model config: {said}; fetch it again"
        ) from error


def eos_token_ids(hf: Any, folder: Path) -> tuple[int, ...]:
    """The tokens that end an answer, from config.json and generation_config.json: either file may know one that the
    other does not. Where neither names any, the default of transformers' class, which may be another model's."""
    stated = [read_json(folder / "config.json").get("eos_token_id")]
    if (generation := folder / "generation_config.json").exists():
        stated.append(read_json(generation).get("eos_token_id"))
    ids: set[int] = set()
    for entry in stated if any(entry is not None for entry in stated) else [hf.eos_token_id]:
        if entry is not None:
            ids.update([entry] if isinstance(entry, int) else entry)
    return tuple(sorted(ids))


def _translate(hf: Any, architecture: str, eos_token_ids: tuple[int, ...], folder: Path) -> ModelConfig:
    gemma = architecture in ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
    gpt_oss = architecture == "GptOssForCausalLM"
    activation_name = hf.hidden_activation if gemma else _swigluoai(hf, folder) if gpt_oss else hf.hidden_act
    if activation_name not in _ACTIVATIONS:
        raise ValueError(
            f"the model in {folder} uses the activation {activation_name}; supported are {', '.join(_ACTIVATIONS)}"
        )
    if getattr(hf, "use_bidirectional_attention", False) or not getattr(hf, "is_causal", True):
        raise ValueError(f"the model in {folder} attends in both directions; only causal models can generate")
    if getattr(hf, "clip_qkv", None) is not None:
        raise ValueError(f"the model in {folder} cuts queries, keys and values off (clip_qkv), which is not supported")
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    attention_bias = bool(getattr(hf, "attention_bias", False))
    layers = _layers(hf, head_dim, folder)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        layers=layers,
        max_position_embeddings=_longest_exact(hf.max_position_embeddings, layers),
        eos_token_ids=eos_token_ids,
        rms_norm_eps=hf.rms_norm_eps,
        activation=_ACTIVATIONS[activation_name],
        tied_embeddings=bool(hf.tie_word_embeddings),
        attention_scale=float(hf.query_pre_attn_scalar if gemma else head_dim) ** -0.5,
        qkv_bias=attention_bias or getattr(hf, "qkv_bias", architecture == "Qwen2ForCausalLM"),
        output_bias=attention_bias and architecture not in _GLM,
        mlp_bias=gpt_oss or bool(getattr(hf, "mlp_bias", False)),
        qk_norm=_QK_NORMS.get(architecture) if getattr(hf, "use_qk_norm", True) else None,
        norms=_NORMS.get(architecture, LayerNorms()),
        norm_weight_offset=1.0 if gemma else 0.0,
        embedding_scale=hf.hidden_size**0.5 if gemma else None,
        attention_softcap=hf.attn_logit_softcapping if architecture == "Gemma2ForCausalLM" else None,  # not 3's
        logit_softcap=getattr(hf, "final_logit_softcapping", None),
        attention_sinks=gpt_oss,
        num_drafting_layers=getattr(hf, "num_nextn_predict_layers", None) or 0,
    )
    return _with_latent(config, hf, folder) if architecture in _LATENT else config


def _with_latent(config: ModelConfig, hf: Any, folder: Path) -> ModelConfig:
    if config.mlp_bias:
        raise ValueError(f"the model in {folder} has biases in its MLPs, which is not supported beside a latent")
    latent = LatentConfig(
        rank=hf.kv_lora_rank,
        query_rank=hf.q_lora_rank,
        plain_dim=hf.qk_nope_head_dim,
        rotary_dim=hf.qk_rope_head_dim,
        value_dim=hf.v_head_dim,
        interleaved=getattr(hf, "rope_interleave", True),
    )
    magnitude = 1.0
    if hf.rope_parameters.get("rope_type", "default") != "default" and hf.rope_parameters.get("mscale_all_dim"):
        magnitude = yarn_magnitude(hf.rope_parameters["factor"], hf.rope_parameters["mscale_all_dim"])
    return replace(
        config,
        num_kv_heads=1,
        head_dim=latent.rank + latent.rotary_dim,
        attention_scale=(latent.plain_dim + latent.rotary_dim) ** -0.5 * magnitude**2,
        latent=latent,
    )


def _swigluoai(hf: Any, folder: Path) -> str:
    if (hf.swiglu_alpha, hf.swiglu_limit) != (SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT):
        raise ValueError(
            f"the model in {folder} activates its experts with alpha {hf.swiglu_alpha} and the limit"
            f" {hf.swiglu_limit}; supported are {SWIGLUOAI_ALPHA} and {SWIGLUOAI_LIMIT}"
        )
    return "swigluoai"


def _longest_exact(positions: int, layers: Iterable[LayerConfig]) -> int:
    """Tokens that the model was made for: YaRN stretches its original length, whether or not `positions` say so.

    No more than up to which a row does not depend on the longest row beside it: long RoPE has other frequencies beyond.
    """
    ropes = {layer.rope for layer in layers}
    stretched = (int(rope.factor * rope.original_max_position_embeddings) for rope in ropes if rope.kind == "yarn")
    originals = (rope.original_max_position_embeddings for rope in ropes if rope.kind == "longrope")
    return min(originals, default=max(positions, *stretched, 0))


def _layers(hf: Any, head_dim: int, folder: Path) -> tuple[LayerConfig, ...]:
    window = getattr(hf, "sliding_window", None)
    types = getattr(hf, "layer_types", None)
    if types is None:  # no choice per layer: a window, if there is one, is every layer's
        types = ["full_attention" if window is None else "sliding_attention"] * hf.num_hidden_layers
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"the model in {folder} has layers of the type {sorted(unknown)[0]}, which is not supported")
    ropes = {kind: _rope(hf, kind, head_dim, folder) for kind in set(types)}
    return tuple(
        LayerConfig(
            window=window if kind == "sliding_attention" else None,
            rope=ropes[kind],
            experts=(_deepseeks_experts if hasattr(hf, "n_routed_experts") else _experts)(hf, index, folder),
        )
        for index, kind in enumerate(types)
    )


def _experts(hf: Any, layer: int, folder: Path) -> ExpertsConfig | None:
    num_experts = getattr(hf, "num_experts", 0)  # those of Mixtral and gpt-oss call it so, too
    dense = getattr(hf, "mlp_only_layers", None) or []
    if not num_experts or layer in dense or (layer + 1) % getattr(hf, "decoder_sparse_step", 1):
        return None
    if not 0 < hf.num_experts_per_tok <= num_experts:
        raise ValueError(
            f"the model in {folder} chooses {hf.num_experts_per_tok} of {num_experts} experts for each token, which"
            " cannot be; fetch its config.json again"
        )
    shared_width = getattr(hf, "shared_expert_intermediate_size", None) or 0  # Qwen3-Coder's config says 0
    return ExpertsConfig(
        num_experts=num_experts,
        per_token=hf.num_experts_per_tok,
        width=getattr(hf, "moe_intermediate_size", hf.intermediate_size),
        normalised=getattr(hf, "norm_topk_prob", True),  # Mixtral and gpt-oss always do
        router_bias=hf.model_type == "gpt_oss",
        shared_width=shared_width,
        shared_gate=bool(shared_width),
    )


def _deepseeks_experts(hf: Any, layer: int, folder: Path) -> ExpertsConfig | None:
    if layer < hf.first_k_dense_replace:
        return None
    num_experts, chosen = hf.n_routed_experts, hf.num_experts_per_tok or 0
    method = getattr(hf, "topk_method", "noaux_tc")
    grouped = method != "greedy"
    groups, groups_chosen = (hf.n_group or 1, hf.topk_group or 1) if grouped else (1, 1)
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise ValueError(f"the model in {folder} chooses experts by {method!r}, which is not supported")
    if groups_chosen > groups or num_experts % groups or not 0 < chosen <= num_experts // groups * groups_chosen:
        raise ValueError(
            f"the model in {folder} chooses {chosen} of {num_experts} experts, of {groups_chosen} of {groups} groups,"
            " for each token, which cannot be; fetch its config.json again"
        )
    is_third = hf.model_type != "deepseek_v2"  # GLM's are like it
    return ExpertsConfig(
        num_experts=num_experts,
        per_token=chosen,
        width=hf.moe_intermediate_size,
        normalised=bool(is_third and hf.norm_topk_prob),  # transformers' DeepseekV2 never does
        router_in_float32=True,
        scale=float(hf.routed_scaling_factor),
        groups=groups,
        groups_per_token=groups_chosen,
        corrected=is_third,
        shared_width=hf.moe_intermediate_size * (hf.n_shared_experts or 0),
    )


def _rope(hf: Any, layer_type: str, head_dim: int, folder: Path) -> RopeConfig:
    """The rotary embedding of a type of layer, from `rope_parameters`, which holds either one set of parameters or one
    per layer type."""
    parameters = hf.rope_parameters.get(layer_type, hf.rope_parameters)
    kind = parameters.get("rope_type", "default")
    if kind not in ROPE_KINDS:
        raise ValueError(
            f"the model in {folder} scales its rotary embedding by {kind!r}; supported are {', '.join(ROPE_KINDS)}"
        )
    rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    if rotary_dim != head_dim and (hf.model_type not in ("phi3", "glm", "glm4", "glm4_moe") or rotary_dim % 2):
        raise ValueError(f"the model in {folder} rotates only part of each head, which is not supported")
    factors = (parameters.get("short_factor") or ()) if kind == "longrope" else ()
    if kind == "longrope" and 2 * len(factors) != rotary_dim:
        raise ValueError(
            f"the model in {folder} has {len(factors)} short_factors for {rotary_dim // 2} pairs of numbers; fetch its"
            " config.json again"
        )
    known = RopeConfig.__dataclass_fields__.keys() - {"theta", "kind", "factor", "short_factor", "magnitude"}
    given = {name: parameters[name] for name in known if parameters.get(name) is not None}
    original = parameters.get("original_max_position_embeddings") or hf.max_position_embeddings
    factor = parameters.get("factor") or hf.max_position_embeddings / original
    theta = parameters["rope_theta"]
    if not isinstance(theta, (int, float)) or theta <= 0:
        raise ValueError(f"{folder / 'config.json'} says that rope_theta is {theta!r}; fetch it again")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        short_factor=tuple(factors),
        magnitude=_magnitude(kind, parameters, factor),
        interleaved=hf.model_type in ("glm", "glm4"),
        **given,
    )


def _magnitude(kind: str, parameters: Mapping[str, Any], factor: float) -> float:
    """That of YaRN and long RoPE: as given, or from the factor; DeepSeek's variant of YaRN divides two of them."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    if kind == "longrope":  # arXiv:2402.13753, section 3.3
        original = parameters["original_max_position_embeddings"]
        return math.sqrt(1 + max(0.0, math.log(factor)) / math.log(original))
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return yarn_magnitude(factor)
