"""A model's chat template: messages to the text of a prompt.

Rendered by transformers, in its sandbox: templates come with checkpoints, from anybody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]


class ChatTemplate:
    """`templates`: by name, "default" and perhaps "tool_use". `special_tokens` are known to them by name."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, Any]) -> None:
        self._templates = templates
        self._special_tokens = special_tokens
        if self.exists:
            self._load_renderer()

    @property
    def exists(self) -> bool:
        return bool(self._templates)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt. Members of messages that are None count as absent, as templates expect it.

        Raises ValueError or what jinja2 raises where the template refuses the messages.
        """
        if not messages:
            raise ValueError("there is nothing for the chat template to render: a chat needs at least one message")
        if add_generation_prompt and continue_final_message:
            raise ValueError("a last message that is to be continued leaves no room for the beginning of another one")
        given = [{name: value for name, value in message.items() if value is not None} for message in messages]
        (text,), _ = self._load_renderer()(
            conversations=[given],
            tools=tools,
            documents=documents,
            chat_template=self._chosen(with_tools=tools is not None),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **{**self._special_tokens, **variables},
        )
        return str(text)

    def _chosen(self, *, with_tools: bool) -> str:
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise ValueError(f"the model has chat templates {sorted(self._templates)}, but none that is the default")
        return self._templates["default"]

    def _load_renderer(self) -> Any:
        # Not at the top: it brings transformers along, and a model without a template can do without.
        from transformers.utils.chat_template_utils import render_jinja_template

        return render_jinja_template
