"""SmolLM2 with some of its unused tokens renamed to the marks of other families.

`thinker`: marks of reasoning, as Qwen3 has them, added and not special. Its chat template opens the reasoning where a
client asks for it, and a budget closes it. `harmonist`: gpt-oss's, special, of which two end an answer, and a chat
template that writes as that one's does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from engine.checkpoint.store import resolve_model

MODEL: Final = "smollm2-135m-instruct"
MARKS: Final = {"<empty_output>": "<think>", "<jupyter_script>": "</think>"}
ASKED_TO_THINK: Final = "{% if add_generation_prompt and (enable_thinking or reasoning_effort) %}<think>\n{% endif %}"
HARMONY: Final = {
    "<empty_output>": "<|start|>",
    "<jupyter_script>": "<|channel|>",
    "<jupyter_start>": "<|constrain|>",
    "<jupyter_text>": "<|message|>",
    "<jupyter_code>": "<|end|>",
    "<jupyter_output>": "<|call|>",
    "<issue_start>": "<|return|>",
}
HARMONY_TEMPLATE: Final = """
{%- if tools %}<|start|>developer<|message|># Tools
{%- for tool in tools %}
type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }}) => any;
{%- endfor %}<|end|>{% endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == "tool" -%}
{%- if last_tool_call.name is none %}{{ raise_exception("no previous message with a tool call") }}{% endif -%}
<|start|>functions.{{ last_tool_call.name }} to=assistant<|channel|>commentary<|message|>{{ message.content }}<|end|>
{%- elif message.tool_calls -%}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif -%}
{%- set f = message.tool_calls[0].function -%}
<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>
{%- set last_tool_call.name = f.name %}
{%- elif message.role == "assistant" -%}
{%- set last_tool_call.name = none -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- else -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


def thinker(folder: Path) -> Path:
    """The checkpoint, in this folder, which is made for it."""
    _rename(folder, MARKS, special=False)
    template = (resolve_model(MODEL) / "chat_template.jinja").read_text(encoding="utf-8")
    replace(folder / "chat_template.jinja", template + ASKED_TO_THINK)
    return folder


def harmonist(folder: Path) -> Path:
    """Likewise."""
    vocab = _rename(folder, HARMONY, special=True)
    replace(folder / "chat_template.jinja", HARMONY_TEMPLATE)
    config = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    config["eos_token_id"] = [vocab["<|return|>"], vocab["<|call|>"]]
    replace(folder / "generation_config.json", json.dumps(config))
    return folder


def _rename(folder: Path, marks: dict[str, str], *, special: bool) -> dict[str, int]:
    """Returns the vocabulary."""
    source = resolve_model(MODEL)
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    for token in tokenizer["added_tokens"]:
        if mark := marks.get(token["content"]):
            vocab[mark] = vocab.pop(token["content"])
            token.update(content=mark, special=special)
    replace(folder / "tokenizer.json", json.dumps(tokenizer))
    return dict(vocab)


def replace(link: Path, text: str) -> None:
    link.unlink()
    link.write_text(text, encoding="utf-8")
