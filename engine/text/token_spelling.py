"""How a tokenizer spells a token as bytes, read from the decoder that its tokenizer.json declares.

Text is the concatenation of its tokens' bytes, decoded as UTF-8. That holds for the two kinds of tokenizer that the
supported model families use, and lets text be produced token by token in constant time:

* byte-level BPE (Llama 3, Qwen, SmolLM2): every byte is written as one printable character;
* SentencePiece-like BPE (Gemma, Llama 2, Mistral): `▁` stands for a space, `<0x0A>` for one byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Spelling = Callable[[str], bytes]
"""A token as the vocabulary writes it -> the bytes it stands for."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


def read_spelling(decoder: dict[str, Any] | None) -> tuple[Spelling, bool]:
    """The spelling, and whether one space at the very start of a text is dropped.

    `decoder` is that part of tokenizer.json. Raises ValueError for one of another kind.
    """
    steps = _steps(decoder)
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return spell_byte_level, False
    replaces_space = any(
        step["type"] == "Replace" and step["pattern"] == {"String": _SPACE} and step["content"] == " " for step in steps
    )
    if replaces_space and "ByteFallback" in kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return spell_sentencepiece, "Strip" in kinds
    raise ValueError(
        f"the tokenizer decodes with {sorted(kinds) or 'nothing'}; supported are byte-level and SentencePiece-like BPE"
    )


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def spell_byte_level(token: str) -> bytes:
    """A token with a character outside the byte alphabet was added as plain text and stands for itself."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


def spell_sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return token.replace(_SPACE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Bytes that Latin-1 prints stand for themselves; the others follow, in order, from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
