"""The tokenizer that a GGUF file describes, written as tokenizer.json, tokenizer_config.json and chat template.

A GGUF file holds vocabulary, scores or merges, and token types, but only *names* the rules that split and normalise
text. Those rules are spelled out here for the two kinds in use: SmolLM2's byte-level BPE and Gemma's
SentencePiece-like BPE; files with other rules are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

Metadata = dict[str, Any]

# llama.cpp's token types.
_CONTROL = 3
_USER_DEFINED = 4

_SPACE = "▁"


def write_tokenizer(metadata: Metadata, folder: Path) -> None:
    """Raises ValueError for a tokenizer whose splitting rule is not known: a guess would change every token."""
    kind = f"{metadata['tokenizer.ggml.model']}/{metadata.get('tokenizer.ggml.pre')}"
    build = {"gpt2/smollm": _smollm_tokenizer, "llama/default": _gemma_tokenizer}.get(kind)
    if build is None:
        raise ValueError(f"the GGUF file names the tokenizer {kind}, whose rules are unknown here")
    is_gemma = metadata["general.architecture"] == "gemma3"
    if build is _gemma_tokenizer and metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma):
        raise ValueError(  # Llama 2's goes by the same name, and mostly says nothing of it
            f"the GGUF file names the tokenizer {kind}, and its texts begin with a space (add_space_prefix), as Gemma's"
            " do not; its rules are unknown here"
        )
    tokenizer = build(metadata)
    tokenizer.add_special_tokens(_added_tokens(metadata, _CONTROL))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(metadata), indent=2) + "\n")
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)


def _tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for name, key in keys.items()}
    return {
        # The plain class: one that is named after a model rebuilds the splitting rules of its own from the vocabulary.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata[f"{metadata['general.architecture']}.context_length"],
        "clean_up_tokenization_spaces": False,
        **special,
    }


def _smollm_tokenizer(metadata: Metadata) -> Tokenizer:
    """Byte-level BPE, with each digit split off before: no merge ever joins two digits."""
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    first_second = [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[(first, second) for first, second in first_second]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gemma_tokenizer(metadata: Metadata) -> Tokenizer:
    """BPE over characters with `▁` for the space, and single bytes for characters outside the vocabulary."""
    tokens = [_with_visible_spaces(token) for token in metadata["tokenizer.ggml.tokens"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=_merges_by_position(vocabulary),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    bos = metadata["tokenizer.ggml.tokens"][metadata["tokenizer.ggml.bos_token_id"]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
    )
    tokenizer.add_tokens(_added_tokens(metadata, _USER_DEFINED))
    return tokenizer


def _with_visible_spaces(token: str) -> str:
    """The file spells its runs of spaces with spaces; text is matched after each space became `▁`."""
    return _SPACE * len(token) if token.strip(" ") == "" else token


def _added_tokens(metadata: Metadata, token_type: int) -> list[AddedToken]:
    """Tokens of one type, which text is searched for before any other rule applies.

    Runs of spaces are left to the merges, of which they are the first: an added token would be searched for before
    the spaces of the text became `▁`.
    """
    types = metadata["tokenizer.ggml.token_type"]
    return [
        AddedToken(token, normalized=False, special=token_type == _CONTROL)
        for token, kind in zip(metadata["tokenizer.ggml.tokens"], types, strict=True)
        if kind == token_type and token.strip(" ")
    ]


def _merges_by_position(vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The merges that lead to each token, in the order of the vocabulary, which is the order they were learned in."""
    return [
        merge
        for token in vocabulary
        for merge in sorted(
            (
                (token[:cut], token[cut:])
                for cut in range(1, len(token))
                if token[:cut] in vocabulary and token[cut:] in vocabulary
            ),
            key=lambda merge: (vocabulary[merge[0]], vocabulary[merge[1]]),
        )
    ]
