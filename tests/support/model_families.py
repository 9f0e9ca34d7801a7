"""One small, randomly initialised model of each supported family, made and saved by `transformers`: the oracle.

Sizes are chosen to catch mistakes: grouped queries 4:2, an odd vocabulary, heads that are not hidden / num_heads,
windows shorter than the prompts, layers that differ from each other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 307
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _llama(**changes: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**_COMMON | changes))


def _mistral() -> Any:
    return MistralForCausalLM(MistralConfig(**_COMMON, sliding_window=9, head_dim=24))


def _qwen2(**changes: Any) -> Any:
    return Qwen2ForCausalLM(Qwen2Config(**_COMMON | changes))


def _qwen3(**changes: Any) -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**_COMMON | {"head_dim": 32, "rope_parameters": _YARN_ROPE} | changes))


def _gemma3(**changes: Any) -> Any:
    config = Gemma3TextConfig(
        **_COMMON,
        head_dim=32,
        query_pre_attn_scalar=40,
        sliding_window=7,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 500_000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        final_logit_softcapping=3.0,
        attn_logit_softcapping=0.7,  # is there, and nobody computes it
        **changes,
    )
    return Gemma3ForCausalLM(config)


def _gemma2() -> Any:
    config = Gemma2Config(
        **_COMMON,
        head_dim=32,
        query_pre_attn_scalar=40,
        sliding_window=7,
        attn_logit_softcapping=0.7,
        final_logit_softcapping=3.0,
    )
    return Gemma2ForCausalLM(config)


def _mixtral(**changes: Any) -> Any:
    return MixtralForCausalLM(MixtralConfig(**_COMMON | changes, num_local_experts=8, num_experts_per_tok=2))


def _qwen3_moe(**changes: Any) -> Any:
    """Its first layer is dense."""
    config = Qwen3MoeConfig(
        **_COMMON
        | {"head_dim": 32, "moe_intermediate_size": 48, "num_experts": 12, "num_experts_per_tok": 3}
        | changes,
        mlp_only_layers=[0],
    )
    return Qwen3MoeForCausalLM(config)


def _qwen2_moe(**changes: Any) -> Any:
    """Its last layer is dense."""
    config = Qwen2MoeConfig(
        **_COMMON
        | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 80, "num_experts": 12}
        | {"num_experts_per_tok": 3, "mlp_only_layers": [3]}
        | changes
    )
    return Qwen2MoeForCausalLM(config)


def _phi3(**changes: Any) -> Any:
    return Phi3ForCausalLM(Phi3Config(**_COMMON | {"sliding_window": 9} | changes))


_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.3 * pair for pair in range(6)],
    "long_factor": [4.0] * 6,
}


def _glm(**changes: Any) -> Any:
    return GlmForCausalLM(GlmConfig(**_COMMON | {"head_dim": 32} | changes))


def _glm4(**changes: Any) -> Any:
    return Glm4ForCausalLM(Glm4Config(**_COMMON | {"head_dim": 24, "attention_bias": False} | changes))


def _glm4_moe(**changes: Any) -> Any:
    config = Glm4MoeConfig(
        **_COMMON
        | {"head_dim": 32, "moe_intermediate_size": 40, "n_routed_experts": 12, "num_experts_per_tok": 3}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "use_qk_norm": True, "attention_bias": True}
        | changes
    )
    return Glm4MoeForCausalLM(config)


def _olmo2(**changes: Any) -> Any:
    return Olmo2ForCausalLM(Olmo2Config(**_COMMON | changes))


def _olmo3(**changes: Any) -> Any:
    config = Olmo3Config(
        **_COMMON | {"sliding_window": 9, "attention_bias": True} | changes,
        rope_parameters={
            "full_attention": dict(_YARN_ROPE),
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )
    return Olmo3ForCausalLM(config)


def _olmoe(**changes: Any) -> Any:
    return OlmoeForCausalLM(OlmoeConfig(**_COMMON | {"num_experts": 12, "num_experts_per_tok": 3} | changes))


def _gpt_oss(**changes: Any) -> Any:
    config = GptOssConfig(
        **_COMMON
        | {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 9}
        | {"intermediate_size": 96, "rope_parameters": _YARN_ROPE | {"truncate": False}}
        | changes
    )
    return GptOssForCausalLM(config)


# Of keys and values of all heads, 768 numbers a layer; of the latent and what is rotated beside it, 40.
_LATENT: dict[str, Any] = _COMMON | {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
}


def _deepseek_v2(**changes: Any) -> Any:
    """As DeepSeek-V2-Lite: queries are projected at once."""
    return DeepseekV2ForCausalLM(DeepseekV2Config(**_LATENT | {"q_lora_rank": None} | changes))


def _deepseek_v3(**changes: Any) -> Any:
    config = _LATENT | {"q_lora_rank": 28, "n_group": 4, "topk_group": 2}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**config | changes))


FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": _llama,
    "llama-tied-biased-llama3": lambda: _llama(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_parameters=dict(_LLAMA3_ROPE)
    ),
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen2-windowed": lambda **changes: _qwen2(
        **{"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2} | changes
    ),
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "mixtral": _mixtral,
    "qwen3-moe": _qwen3_moe,
    "gpt-oss": _gpt_oss,
    "qwen3-moe-normalised": lambda: _qwen3_moe(norm_topk_prob=True, tie_word_embeddings=True, num_experts_per_tok=8),
    "qwen2-moe": _qwen2_moe,
    "phi-3": _phi3,
    "phi-3-long": lambda **changes: _phi3(
        **{"sliding_window": None, "max_position_embeddings": 1024, "original_max_position_embeddings": 256}
        | {"rope_parameters": dict(_LONG_ROPE), "tie_word_embeddings": True}
        | changes
    ),
    "glm": _glm,
    "glm-4": _glm4,
    "glm-4-moe": _glm4_moe,
    "olmo-2": _olmo2,
    "olmo-3": _olmo3,
    "olmoe": _olmoe,
    "deepseek-v2": _deepseek_v2,
    "deepseek-v2-grouped": lambda: _deepseek_v2(
        q_lora_rank=20,
        attention_bias=True,
        topk_method="group_limited_greedy",
        n_group=3,
        topk_group=2,
        rope_parameters=_YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.9},
    ),
    "deepseek-v3": _deepseek_v3,
    "deepseek-v3-dense": lambda: _deepseek_v3(
        first_k_dense_replace=4, q_lora_rank=None, rope_interleave=False, attention_bias=True, tie_word_embeddings=True
    ),
}
WITH_HEADS = tuple(family for family in FAMILIES if not family.startswith("deepseek"))
"""Those that cache keys and values of heads. The others, with a latent, have no adapters or fused layers."""
WITH_FUSED_LAYERS = tuple(family for family in WITH_HEADS if family not in ("qwen2-moe", "glm-4-moe"))
"""Those without an MLP beside experts."""


def build_oracle(family: str, folder: Path, **changes: Any) -> Any:
    """The `transformers` model of a family in float32, its config changed; its checkpoint is saved in `folder`."""
    torch.manual_seed(sum(family.encode()))
    model = FAMILIES[family](**changes).eval()
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name or name.endswith(("bias", "sinks")):  # as they are initialised, they do nothing
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, safe_serialization=True)
    return model
