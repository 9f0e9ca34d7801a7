"""The tokenizer that a GGUF file describes, written as tokenizer.json, tokenizer_config.json and chat template.

A GGUF file holds vocabulary, scores or merges, and token types, but only *names* the rules that split and normalise
text. Those rules are spelled out here for the byte-level BPE of SmolLM2, Llama 3, Qwen 2 to 3 and Mistral's Tekken, and
for Gemma's SentencePiece-like BPE. transformers builds more kinds from a file, but not to the token: Llama 3's and
Tekken's without `ignore_merges`, Qwen's without its normalisation (docs/log/quantisation.md). For files with other
rules the model's own tokenizer.json is taken from beside them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

Metadata = dict[str, Any]

# llama.cpp's token types.
_NORMAL = 1
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5  # the model's vocabulary is padded with them

_SPACE = "▁"


def write_tokenizer(metadata: Metadata, folder: Path, own_files: Sequence[Path] = ()) -> None:
    """Write what the file says, or in its place the model's own files, of which tokenizer.json is the first.

    Raises ValueError for a tokenizer whose splitting rule is not known, since a guess would change every token, and for
    a tokenizer.json that has other tokens than the file.
    """
    if not own_files:
        _built(metadata).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(metadata), indent=2) + "\n")
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    for path in own_files:
        shutil.copyfile(path, folder / path.name)
    if own_files:
        _require_tokens(Tokenizer.from_file(str(own_files[0])), metadata, own_files[0])


def _require_tokens(tokenizer: Tokenizer, metadata: Metadata, path: Path) -> None:
    """Raises ValueError where a token of the model's is another one, or none, in the tokenizer."""
    ids = tokenizer.get_vocab()
    types = metadata["tokenizer.ggml.token_type"]
    for index, (token, kind) in enumerate(zip(metadata["tokenizer.ggml.tokens"], types, strict=True)):
        if kind == _NORMAL and ids.get(token) != index:
            raise ValueError(
                f"{path} lies beside it and is another model's: token {index} is {token!r} in the GGUF file, and"
                f" {tokenizer.id_to_token(index)!r} there; give the GGUF file a folder of its own"
            )


def _built(metadata: Metadata) -> Tokenizer:
    kind = f"{metadata['tokenizer.ggml.model']}/{metadata.get('tokenizer.ggml.pre')}"
    build = _BUILDERS.get(kind)
    is_gemma = metadata["general.architecture"] == "gemma3"
    # Llama 2's and Mistral's go by the name of Gemma's. After special tokens some of them put a space, and some do not.
    if build is _gemma_tokenizer and metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma):
        kind, build = f"{kind}, and its texts begin with a space (add_space_prefix)", None
    if build is None:
        raise ValueError(
            f"the GGUF file names the tokenizer {kind}, whose rules are unknown here; put the model's own"
            " tokenizer.json beside it"
        )
    tokenizer = build(metadata)
    _add_ends(tokenizer, metadata, begins=kind in _BEGUN)
    tokenizer.add_tokens(_added_tokens(metadata, _USER_DEFINED))
    tokenizer.add_special_tokens(_added_tokens(metadata, _CONTROL))
    return tokenizer


def _add_ends(tokenizer: Tokenizer, metadata: Metadata, *, begins: bool) -> None:
    """What a text begins and ends with, as the file says; else `begins`, and nothing."""
    added = [
        _special_token(metadata, name) if metadata.get(f"tokenizer.ggml.add_{name}_token", usual) else None
        for name, usual in (("bos", begins), ("eos", False))
    ]
    if added == [None, None]:
        return
    bos, eos = ([] if token is None else [token] for token in added)
    vocabulary = tokenizer.get_vocab()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        pair=[*bos, "$A", *eos, *bos, "$B", *eos],
        special_tokens=[(token, vocabulary[token]) for token in (*bos, *eos)],
    )


def _special_token(metadata: Metadata, key: str) -> str | None:
    """None: the file names none."""
    index = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return None if index is None else metadata["tokenizer.ggml.tokens"][index]


def _tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: _special_token(metadata, key) for name, key in keys.items()}
    return {
        # The plain class: one that is named after a model rebuilds the splitting rules of its own from the vocabulary.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata[f"{metadata['general.architecture']}.context_length"],
        "clean_up_tokenization_spaces": False,
        **{name: token for name, token in special.items() if token is not None},
    }


def _byte_level_tokenizer(
    metadata: Metadata,
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    normalizer: normalizers.Normalizer | None = None,
    *,
    ignore_merges: bool = False,
) -> Tokenizer:
    """BPE over bytes, each written as one printable character. `ignore_merges`: a word that is a token is that token,
    also where no merges lead to it."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    vocabulary = {
        token: index for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED
    }
    first_second = [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]]
    merges = [(first, second) for first, second in first_second]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Words are what the pattern matches, one after the other."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


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


# What a word is, as each model's tokenizer.json says it. Of a pattern's alternatives the first that matches counts.
_SMOLLM = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_MARKS_AND_SPACES: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3: Final = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS_AND_SPACES}"
_QWEN_2: Final = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_MARKS_AND_SPACES}"
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_BUILDERS: Final[dict[str, Callable[[Metadata], Tokenizer]]] = {
    "llama/default": _gemma_tokenizer,
    "gpt2/smollm": partial(_byte_level_tokenizer, pre_tokenizer=_SMOLLM),
    "gpt2/llama-bpe": partial(_byte_level_tokenizer, pre_tokenizer=_split_by(_LLAMA_3), ignore_merges=True),
    "gpt2/qwen2": partial(_byte_level_tokenizer, pre_tokenizer=_split_by(_QWEN_2), normalizer=normalizers.NFC()),
    "gpt2/tekken": partial(_byte_level_tokenizer, pre_tokenizer=_split_by(_TEKKEN), ignore_merges=True),
}
_BEGUN: Final = {"llama/default", "gpt2/llama-bpe", "gpt2/tekken"}  # so in llama.cpp, too: older files do not say it
