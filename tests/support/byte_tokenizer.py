"""A tokenizer whose tokens are bytes, as a model's folder has one."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE


def write_byte_tokenizer(folder: Path) -> None:
    """Three special tokens and one for each byte; the models have more ids, which stand for nothing."""
    vocabulary = ["<s>", "<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = tokenizers.Tokenizer(BPE({token: number for number, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(vocabulary[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
