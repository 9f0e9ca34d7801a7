"""A small, randomly initialised model of any decoder that transformers' code computes, by its config's own class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.thoroughness import THOROUGH

VOCAB_SIZE = 307
WINDOW = 9  # of those that have one: shorter than most prompts

# What a config has of these, by whatever it calls them; grouped queries 4:2, one dense layer before the experts.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "hidden_size": 64,
    "n_embd": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 96,
    "n_inner": 96,
    "ffn_dim": 96,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
# A config's None says that the model does without; these do not.
_OPTIONAL = {"sliding_window", "head_dim", "num_key_value_heads", "n_inner", "q_lora_rank"}
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}  # keys of 24 numbers, values of 16
_GROUPED = {"head_dim": 16, "num_key_value_heads": 2}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"), _LATENT),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral", "nemotron"), _GROUPED),
    "cohere_compass_text": {
        "layer_types": _ALTERNATING,
        "rope_parameters": {"full_attention": None, "sliding_attention": _ROPE | {"mrope_section": [4, 2, 2]}},
    },
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "intermediate_size": [96] * 6,
        "activation_sparsity_pattern": None,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
}


def small_config(model_type: str, **changes: Any) -> Any:
    """Of a few layers, with every kind of layer that the family's default has."""
    config_class = CONFIG_MAPPING[model_type]
    default = config_class().to_dict()
    renamed = getattr(config_class, "attribute_map", None) or {}
    sizes = {
        name: size
        for name, size in _SIZES.items()
        if name in default and name not in renamed and not (default[name] is None and name in _OPTIONAL)
    }
    if isinstance(default.get("layer_types"), list):
        kinds = list(dict.fromkeys(default["layer_types"]))
        sizes["layer_types"] = [kinds[layer % len(kinds)] for layer in range(sizes["num_hidden_layers"])]
    return config_class(**(sizes | _OWN.get(model_type, {}) | changes))


def build_decoder(model_type: str, folder: Path, **changes: Any) -> Any:
    """The `transformers` model in float32, loaded from its checkpoint in `folder`."""
    torch.manual_seed(sum(model_type.encode()))
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    model = model_class(small_config(model_type, **changes)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
            else:  # as norms and biases are initialised, they do nothing
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    loaded = model_class.from_pretrained(folder).eval()
    loaded.generation_config.eos_token_id = None  # no early end
    return loaded


def greedy_tokens(model: Any, prompt: list[int], num_tokens: int, guess: Sequence[int] = ()) -> list[int]:
    """By Hugging Face's `generate`. A right `guess` is found to be so by one pass over all of it, in an eighth of the
    time; not in `make test-long`."""
    if len(guess) == num_tokens and not THOROUGH:
        best: list[int] = logits_behind(model, prompt, guess).argmax(-1).tolist()
        if best == list(guess):
            return best
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def logits_behind(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """`[len(tokens), V]`: of each of these tokens, behind the prompt and those before it."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    return logits
