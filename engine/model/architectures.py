"""Every language model that transformers names, by its `model_type`: served, natively or by its own code, or why not.

Who is in `SERVED` gives Hugging Face's greedy tokens in float32 (`tests/with_models/test_any_decoder.py`); a folder's
own config is tried all the same (`engine.model.hugging_face`), since it may switch on what its relatives do without.
`python -m engine.model.architectures` prints the table of docs/guide/models.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

_SERVED: Final = """
    afmoe apertus arcee aria_text axk1 beam biogpt bitnet cohere cohere2 cohere2_moe cohere_compass_text ctrl cwm
    deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2
    gemma3_text gemma3n_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite
    granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3
    hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna llama mellum minicpm3 minimax_m2 ministral ministral3
    mistral mixtral modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2
    qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu
    """

SERVED: Final = frozenset(_SERVED.split())

_REASONS: Final = {
    "its layers keep a state beside KV (state space, recurrence, linear attention, convolution), which is neither paged"
    " nor handed over": "bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid inkling2_text inkling_text jamba"
    " kimi_linear lfm2 lfm2_moe lfm3 mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text"
    " qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma rwkv xlstm zamba zamba2 zaya",
    "it is an encoder: it attends in both directions": "bert bert-generation big_bird camembert data2vec-text electra"
    " ernie megatron-bert rembert roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet"
    " xmod",
    "it is the decoder of an encoder-decoder, whose code does not take the positions of tokens": "bart bigbird_pegasus"
    " blenderbot blenderbot-small marian mbart musicgen musicgen_melody mvp pegasus plbart prophetnet trocr whisper",
    "it computes attention by itself, not by a function that can be given to it": "codegen cpmant doge falcon gpt_neo"
    " gpt_neox_japanese gptj openai-gpt reformer xglm",
    "it adds a bias of the distance to attention (ALiBi), which no kernel computes, by itself": "bloom mpt",
    "it attends to states that it compresses beside KV": "deepseek_v4",
    "it chooses by an index of its own, beside KV, what it attends to": "axk2 deepseek_v32 dots3_note dots3_note_text"
    " glm_moe_dsa hy_v4 minimax_m3_vl_text",
    "it attends within chunks of the prompt, which no kernel computes": "llama4_text",
    "its layers have key/value heads of different numbers or sizes": "gemma4_text gemma4_unified_text mimo_v2_flash",
    "it takes images or audio, and Legato takes text": "emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified git got_ocr2"
    " llama4 mllama moshi moss_transcribe_diarize phi4_multimodal",
    "it drafts over the KV of another model": "gemma4_assistant gemma4_unified_assistant",
    "it takes bytes, and cuts them into patches by a model of their own": "blt",
    "its experts are chosen outside of torch, so that it cannot be tried without weights": "dbrx jetmoe longcat_flash",
}

REFUSED: Final = {model_type: reason for reason, types in _REASONS.items() for model_type in types.split()}


def models_table() -> str:
    """A row for each of transformers' language models, as Markdown."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # takes seconds

    def rows() -> Iterator[str]:
        for model_type, architecture in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
            yield f"| `{model_type}` | {architecture} | {_way_of_serving(model_type, architecture)} |"

    return "\n".join(["| `model_type` | architecture | served |", "|---|---|---|", *rows()])


def _way_of_serving(model_type: str, architecture: str) -> str:
    from engine.model.config import SUPPORTED_ARCHITECTURES

    if architecture in SUPPORTED_ARCHITECTURES and model_type in SERVED:
        return "natively, or by transformers"
    return "by transformers" if model_type in SERVED else f"no: {REFUSED[model_type]}"


if __name__ == "__main__":
    print(models_table())
