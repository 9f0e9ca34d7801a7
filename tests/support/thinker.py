"""SmolLM2 with two of its unused tokens renamed to marks of reasoning, as Qwen3 has them: added, and not special. Its
chat template opens the reasoning where a client asks for it, and a budget closes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from engine.checkpoint.store import resolve_model

MARKS: Final = {"<empty_output>": "<think>", "<jupyter_script>": "</think>"}
ASKED_TO_THINK: Final = "{% if add_generation_prompt and (enable_thinking or reasoning_effort) %}<think>\n{% endif %}"


def thinker(folder: Path) -> Path:
    """The checkpoint, in this folder, which is made for it."""
    source = resolve_model("smollm2-135m-instruct")
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    for token in tokenizer["added_tokens"]:
        if mark := MARKS.get(token["content"]):
            vocab[mark] = vocab.pop(token["content"])
            token.update(content=mark, special=False)
    template = (source / "chat_template.jinja").read_text(encoding="utf-8")
    replace(folder / "tokenizer.json", json.dumps(tokenizer))
    replace(folder / "chat_template.jinja", template + ASKED_TO_THINK)
    return folder


def replace(link: Path, text: str) -> None:
    link.unlink()
    link.write_text(text, encoding="utf-8")
