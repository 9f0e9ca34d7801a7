"""One model as a gateway serves it: what of a request depends on which model it asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from cluster.errors import InvalidRequestError, UnavailableError
from cluster.gateway.generator import ServingLimits
from cluster.http.openai.structured import Grammars
from engine.checkpoint.pooling import CheckpointPooling
from engine.text.formats import OutputFormats, ReasoningFormatName, ToolFormatName, output_formats
from engine.text.tokenizer import Tokenizer
from kv_transfer.messages.requests import AdapterRef

if TYPE_CHECKING:
    from cluster.gateway.adapter_folder import (  # brings torch, which only who has adapters needs
        AdapterFolder,
        ListedAdapter,
    )

NO_WORKER: Final = "No decode worker is there: none has come up yet, or all are gone."


@dataclass(slots=True, kw_only=True)
class ServedModel:
    """`name`: what clients write into `model`, and what its workers say that they have. `limits`: what these can do
    together; it returns None while none is known. `adapters` None: it is served without any. `sampling`: fields of
    `SamplingParams` for requests that leave them out; `chat_template_kwargs`: what the chat template is told where a
    request does not say it."""

    name: str
    tokenizer: Tokenizer
    pooling: CheckpointPooling
    limits: Callable[[], ServingLimits | None]
    tool_format: InitVar[ToolFormatName] = "auto"
    reasoning_format: InitVar[ReasoningFormatName] = "auto"
    adapters: AdapterFolder | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    formats: OutputFormats = field(init=False)
    grammars: Grammars = field(init=False)

    def __post_init__(self, tool_format: ToolFormatName, reasoning_format: ReasoningFormatName) -> None:
        tokenizer = self.tokenizer
        self.formats = output_formats(
            tool_format,
            reasoning_format,
            tokenizer.chat_template,
            tokenizer.tools_template,
            tokenizer.response_template,
        )
        self.grammars = Grammars(tokenizer)

    async def adapter(self, name: str) -> AdapterRef | None:
        """Its adapter of that name; None: it has none. Raises InvalidRequestError for one that cannot be computed."""
        if self.adapters is None:
            return None
        try:
            return await self.adapters.in_thread(self.adapters.find, name)
        except (ValueError, OSError) as error:
            raise InvalidRequestError(f"The model {name!r} cannot be used: {error}.", param="model") from error

    async def listed_adapters(self) -> list[ListedAdapter]:
        """The adapters that there are."""
        return [] if self.adapters is None else await self.adapters.in_thread(self.adapters.listed)

    async def listed_adapter(self, name: str) -> ListedAdapter | None:
        """The one of that name, whether or not it can be computed; None: there is none."""
        return None if self.adapters is None else await self.adapters.in_thread(self.adapters.look, name)

    def require_limits(self) -> ServingLimits:
        """What its live workers can do together. Raises UnavailableError while none is known."""
        limits = self.limits()
        if limits is None:
            raise UnavailableError(f"{NO_WORKER} Try again shortly.", retry_after_s=2.0)
        return limits
