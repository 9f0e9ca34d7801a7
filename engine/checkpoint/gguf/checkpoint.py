"""A GGUF file becomes a Hugging Face checkpoint folder: in bfloat16, or with its blocks left where they are.

Knows how five architectures lie in a GGUF file (Llama, Qwen 2 and 3, Phi-3, Gemma 3) and undoes what llama.cpp's
converter did to them: quantised blocks, permuted query and key rows, norm weights with one added, scaled positions as
tensors. It reads one file and writes one folder, which `engine.checkpoint.gguf.store` keeps. Tokenizers are in
`engine.checkpoint.gguf.tokenizer`, blocks in `engine.checkpoint.gguf.blocks`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import TokenType
from safetensors.torch import save_file

from engine.checkpoint.gguf.blocks import form_of, quantised_weight
from engine.checkpoint.gguf.tokenizer import write_tokenizer
from engine.model.rope import RopeConfig, inverse_frequencies
from kernels.quantised_weight import CodeFormat, QuantisedWeight

Array = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]
Metadata = dict[str, Any]

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Tensors that are no weights: by what each frequency of the rotary embedding is divided, of long RoPE in short contexts
# and in long ones.
_ROPE_DIVISORS, _SHORT_DIVISORS, _LONG_DIVISORS = "rope_freqs", "rope_factors_short", "rope_factors_long"
_VOCABULARY = frozenset({"tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"})
# Of Llama 3, its calls of tools, ChatML (Qwen and many a fine-tune), and Phi: llama.cpp, too, goes by these texts.
_TURN_ENDS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>"})
_PROGRESS_STEPS = 4
_GEMMA3_27B_LAYERS = 62
_USUAL_THETA = 10_000.0  # so in llama.cpp, too: files of Llama 2 do not say it
_LLAMA3_LENGTH = 8192  # of the contexts that Llama 3 was first trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What is particular to one architecture: its config, what it calls otherwise, and how tensors were changed.

    `row_order`: from which row of a tensor in the file each row comes; None: they are as they were.
    """

    config: Callable[[Metadata], dict[str, Any]]
    names: dict[str, str]
    row_order: Callable[[str, int, Metadata], Rows | None]
    norm_offset: float  # added to norm weights


def convert_gguf(gguf_file: Path, folder: Path, *, progress: Callable[[str], None]) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files into `folder`.

    Raises ValueError for an architecture that is not known.
    """
    stored, metadata, architecture = _opened(gguf_file)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(_converted(stored, architecture, metadata, progress))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_configs(folder, architecture, metadata, tied="lm_head.weight" not in tensors)
    write_tokenizer(metadata, folder)


def describe_gguf(gguf_file: Path, folder: Path, tokenizer_files: Sequence[Path] = ()) -> None:
    """Write all that `convert_gguf` writes but the weights into `folder`, which exists. `tokenizer_files`: the model's
    own, tokenizer.json first, in place of what the GGUF file says. Raises the same."""
    stored, metadata, architecture = _opened(gguf_file)
    names = {hugging_face_name(tensor.name, architecture.names) for tensor in stored}
    _write_configs(folder, architecture, metadata, tied="lm_head.weight" not in names)
    write_tokenizer(metadata, folder, tokenizer_files)


def stored_gguf_tensors(gguf_file: Path) -> Iterator[tuple[str, torch.Tensor | QuantisedWeight]]:
    """Each tensor by its name in a checkpoint, as the converter found it: blocks where `gguf.blocks` knows their kind,
    else float32. Raises ValueError for an architecture or a tensor that is not known."""
    stored, metadata, architecture = _opened(gguf_file, without=_VOCABULARY)
    for tensor in stored:
        name = hugging_face_name(tensor.name, architecture.names)
        try:
            weight = _stored(tensor, architecture, metadata)
        except ValueError as error:  # such as numpy's, of a damaged file
            raise ValueError(f"tensor {tensor.name!r} of the GGUF file {gguf_file} cannot be used: {error}") from error
        yield name, weight


def stored_gguf_forms(gguf_file: Path) -> dict[str, CodeFormat | None]:
    """How each tensor of `stored_gguf_tensors` has its codes, by the file's header. None: it has none. Raises the
    same."""
    stored, _, architecture = _opened(gguf_file, without=_VOCABULARY)
    return {
        hugging_face_name(tensor.name, architecture.names): (
            None if tensor.name.endswith("norm.weight") else form_of(tensor.tensor_type)
        )
        for tensor in stored
    }


def _stored(tensor: Any, architecture: Architecture, metadata: Metadata) -> torch.Tensor | QuantisedWeight:
    weight = None if tensor.name.endswith("norm.weight") else quantised_weight(tensor.data, tensor.tensor_type)
    if weight is None:
        return torch.from_numpy(_restored(tensor, architecture, metadata))
    order = architecture.row_order(tensor.name, weight.shape[0], metadata)
    return weight if order is None else weight.rows(torch.from_numpy(order))


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """Reads the file through a plain array. Of a `memmap`, as `gguf` has it, each slice looks for the file that it is
    of, and a vocabulary is read in hundreds of thousands of slices."""

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        return self._data

    @data.setter
    def data(self, mapped: npt.NDArray[np.uint8]) -> None:
        self._data = np.asarray(mapped)


def _opened(gguf_file: Path, without: Set[str] = frozenset()) -> tuple[list[Any], Metadata, Architecture]:
    """The file's weights, what it says of them but for the fields `without`, and how its architecture lies there.

    Raises ValueError for an architecture that is not known.
    """
    reader = _Reader(gguf_file)
    metadata = {name: field.contents() for name, field in reader.fields.items() if name not in without}
    name = metadata["general.architecture"]
    if name not in _ARCHITECTURES:
        raise ValueError(f"{gguf_file.name} holds a model of architecture {name!r}; known are {list(_ARCHITECTURES)}")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for divisors in (_ROPE_DIVISORS, _SHORT_DIVISORS, _LONG_DIVISORS):
        if (tensor := tensors.pop(f"{divisors}.weight", None)) is not None:
            metadata[divisors] = np.asarray(tensor.data, dtype=np.float32)
    return list(tensors.values()), metadata, _ARCHITECTURES[name]


def _converted(
    stored: list[Any], architecture: Architecture, metadata: Metadata, progress: Callable[[str], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    num_tensors = len(stored)
    step = max(1, num_tensors // _PROGRESS_STEPS)
    for index, tensor in enumerate(stored, start=1):
        restored = _restored(tensor, architecture, metadata)
        yield hugging_face_name(tensor.name, architecture.names), torch.from_numpy(restored).to(torch.bfloat16)
        if index % step == 0:
            progress(f"  {index} of {num_tensors} tensors converted")


def _restored(tensor: Any, architecture: Architecture, metadata: Metadata) -> Array:
    values = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    order = architecture.row_order(tensor.name, len(values), metadata)
    if order is not None:
        values = values[order]
    if tensor.name.endswith("norm.weight"):
        values = values + architecture.norm_offset
    return np.require(values, requirements=["C", "W"])


def hugging_face_name(name: str, names: dict[str, str]) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`. Raises ValueError for an unknown tensor."""
    stem, _, kind = name.rpartition(".")
    prefix = ""
    if stem.startswith("blk."):
        _, layer, stem = stem.split(".", 2)
        prefix = f"model.layers.{layer}."
    known = names.get(stem) or _TENSOR_NAMES.get(stem)
    if known is None:
        raise ValueError(f"tensor {name!r} of the GGUF file has no place in a checkpoint of this architecture")
    return f"{prefix}{known}.{kind}"


def _write_configs(folder: Path, architecture: Architecture, metadata: Metadata, *, tied: bool) -> None:
    special = {
        f"{name}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    if turn_ends := _turn_ends(metadata) - {special["eos_token_id"]}:  # of chats, beside the end of a text
        special["eos_token_id"] = sorted({special["eos_token_id"], *turn_ends} - {None})
    from transformers import AutoConfig  # takes seconds to import, and only a conversion needs it

    config = AutoConfig.for_model(
        **architecture.config(metadata), **special, tie_word_embeddings=tied, dtype="bfloat16", use_cache=True
    )
    config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n")


def _turn_ends(metadata: Metadata) -> set[int]:
    """The tokens that end a turn of a chat, by the names that a file has for them, and by how they are spelt: most
    files name one at most, also of models with several."""
    names = {f"tokenizer.ggml.{key}_token_id" for key in ("eot", "eom")}
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    spelt = (
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == TokenType.CONTROL and token in _TURN_ENDS
    )
    return {*(metadata[name] for name in names & metadata.keys()), *spelt}


def _common_config(metadata: Metadata, prefix: str) -> dict[str, Any]:
    return {
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": metadata[f"{prefix}.embedding_length"],
        "intermediate_size": metadata[f"{prefix}.feed_forward_length"],
        "num_hidden_layers": metadata[f"{prefix}.block_count"],
        "num_attention_heads": metadata[f"{prefix}.attention.head_count"],
        "num_key_value_heads": metadata[f"{prefix}.attention.head_count_kv"],
        "max_position_embeddings": metadata[f"{prefix}.context_length"],
        "rms_norm_eps": _shortest_float(metadata[f"{prefix}.attention.layer_norm_rms_epsilon"]),
    }


def _shortest_float(value: float) -> float:
    """GGUF holds floats in 32 bits: 1e-5 reads as 9.999999747378752e-06. Gives the decimal that was meant."""
    return float(str(np.float32(value)))


def _rope(metadata: Metadata, prefix: str) -> dict[str, Any]:
    """The rotary embedding; of Gemma 3, that of its full layers. Raises ValueError for a scaling that is not known."""
    theta = metadata.get(f"{prefix}.rope.freq_base", _USUAL_THETA)
    if (divisors := metadata.get(_ROPE_DIVISORS)) is not None:
        return _llama3_rope(theta, divisors)
    if _SHORT_DIVISORS in metadata:
        return {
            "rope_type": "longrope",
            "rope_theta": theta,
            "short_factor": [*map(_shortest_float, metadata[_SHORT_DIVISORS])],
            "long_factor": [*map(_shortest_float, metadata[_LONG_DIVISORS])],
            "original_max_position_embeddings": metadata[f"{prefix}.rope.scaling.original_context_length"],
        }
    factor: float = metadata.get(f"{prefix}.rope.scaling.factor") or metadata.get(f"{prefix}.rope.scale_linear") or 1.0
    kind = metadata.get(f"{prefix}.rope.scaling.type", "linear")  # so in llama.cpp, too
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    if kind != "linear":
        raise ValueError(f"its rotary embedding is scaled by {kind!r}; known are 'none' and 'linear'")
    return {"rope_type": "linear", "factor": _shortest_float(factor), "rope_theta": theta}


def _llama3_rope(theta: float, divisors: Array) -> dict[str, Any]:
    """The scaling from Llama 3.1 on, of which the file has what comes of it: a divisor for each frequency. All that
    were published differ in the factor alone, which the slowest frequency is divided by. Raises ValueError if another
    scaling comes to these divisors."""
    rope = RopeConfig(
        theta=theta, kind="llama3", factor=float(divisors.max()), original_max_position_embeddings=_LLAMA3_LENGTH
    )
    head_dim = 2 * len(divisors)
    plain = inverse_frequencies(RopeConfig(theta=theta), head_dim)
    if not np.allclose((plain / inverse_frequencies(rope, head_dim)).numpy(), divisors, rtol=1e-4):
        raise ValueError(
            "its rotary embedding is scaled by other divisors (rope_freqs) than that of Llama 3.1 and later"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }


def _llama_config(metadata: Metadata) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "rope_parameters": _rope(metadata, "llama"),
        **_common_config(metadata, "llama"),
    }


def _llama_row_order(name: str, num_rows: int, metadata: Metadata) -> Rows | None:
    """llama.cpp rotates neighbouring rows of a head, Hugging Face the two halves: query and key rows are permuted."""
    heads_key = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(name.split(".")[-2])
    if heads_key is None:
        return None
    num_heads = metadata[f"llama.attention.{heads_key}"]
    return np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _qwen_config(metadata: Metadata) -> dict[str, Any]:
    """Of Qwen 2, 2.5 and 3, which keep their rows and their positions as they were."""
    name = metadata["general.architecture"]
    width = metadata[f"{name}.embedding_length"] // metadata[f"{name}.attention.head_count"]
    return {
        "model_type": name,
        "architectures": [f"{name.capitalize()}ForCausalLM"],
        "head_dim": metadata.get(f"{name}.attention.key_length", width),
        "rope_parameters": _rope(metadata, name),
        **_common_config(metadata, name),
    }


def _phi3_config(metadata: Metadata) -> dict[str, Any]:
    """Of Phi-3 and 4. A part of each head may turn."""
    width = metadata["phi3.embedding_length"] // metadata["phi3.attention.head_count"]
    turning = metadata.get("phi3.rope.dimension_count", width) / width
    common = _common_config(metadata, "phi3")
    rope = {**_rope(metadata, "phi3"), "partial_rotary_factor": turning}
    return {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "sliding_window": metadata.get("phi3.attention.sliding_window") or None,  # 0: Phi-4's
        "rope_parameters": rope,
        "original_max_position_embeddings": rope.get(
            "original_max_position_embeddings", common["max_position_embeddings"]
        ),
        **common,
    }


def _gemma3_config(metadata: Metadata) -> dict[str, Any]:
    """The GGUF file leaves out what all Gemma 3 share: five sliding layers, then a full one, and the sliding theta; and
    that the largest scales attention otherwise, which llama.cpp, too, knows by its layers. Raises ValueError for other
    rows of layers."""
    if (pattern := metadata.get("gemma3.attention.sliding_window_pattern", 6)) != 6:
        raise ValueError(f"its sliding_window_pattern is {pattern!r}; known is 6")
    head_dim, num_heads = metadata["gemma3.attention.key_length"], metadata["gemma3.attention.head_count"]
    is_27b = metadata["gemma3.block_count"] == _GEMMA3_27B_LAYERS
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": head_dim,
        "query_pre_attn_scalar": metadata["gemma3.embedding_length"] // num_heads if is_27b else head_dim,
        "sliding_window": metadata["gemma3.attention.sliding_window"],
        "layer_types": [
            "full_attention" if layer % 6 == 5 else "sliding_attention"
            for layer in range(metadata["gemma3.block_count"])
        ],
        "rope_parameters": {
            "full_attention": _rope(metadata, "gemma3"),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": metadata.get("gemma3.rope.freq_base_swa", 10_000.0),
            },
        },
        "final_logit_softcapping": metadata.get("gemma3.final_logit_softcapping"),
        **_common_config(metadata, "gemma3"),
    }


_QWEN = Architecture(
    config=_qwen_config,
    names={"ffn_norm": "post_attention_layernorm"},
    row_order=lambda name, num_rows, metadata: None,
    norm_offset=0.0,
)
_ARCHITECTURES = {
    "llama": Architecture(
        config=_llama_config,
        names={"ffn_norm": "post_attention_layernorm"},
        row_order=_llama_row_order,
        norm_offset=0.0,
    ),
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "phi3": Architecture(
        config=_phi3_config,
        names={
            "attn_qkv": "self_attn.qkv_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_norm": "post_attention_layernorm",
        },
        row_order=lambda name, num_rows, metadata: None,
        norm_offset=0.0,
    ),
    "gemma3": Architecture(
        config=_gemma3_config,
        names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        row_order=lambda name, num_rows, metadata: None,
        norm_offset=-1.0,  # Gemma scales by `1 + weight`; llama.cpp stores the sum
    ),
}
