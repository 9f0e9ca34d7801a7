"""The bodies of requests, as OpenAI's API defines them, plus the sampling fields that open models' servers share.

Unknown fields are refused, so that a typing error never silently changes an answer. What Legato cannot honour yet is
declared `Unsupported` and refused with a sentence; what makes no difference is `Harmless`. Null means "not given",
whatever the field.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from cluster.http.openai.fields import (
    BadWords,
    ChosenTools,
    Content,
    Documents,
    Harmless,
    LogitBias,
    Parameters,
    Prompts,
    Stop,
    TemplateKwargs,
    TextOnly,
    TokenIds,
    ToolChoice,
    Unsupported,
    field_error,
)
from cluster.http.openai.structured import ResponseFormat, StructuredOutputs
from engine.sampling.params import MAX_ALLOWED_TOKEN_IDS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from engine.text.output import MAX_NAME_CHARS
from kv_transfer.messages.fields import Role

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
INT32_MAX = 2**31 - 1
MAX_TOOLS = 128
MAX_TOOLS_CHARS = 2**18  # of their schemas and descriptions
MAX_MESSAGES = 2**14  # of a chat: to work on more would take too long at a stretch
FunctionName = Annotated[str, Field(pattern=f"^[a-zA-Z0-9_-]{{1,{MAX_NAME_CHARS}}}$")]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, fields: Any) -> Any:
        """Drop fields that are null, whatever their name: clients that send back what they were given write all that
        their types have. Of unknown ones leave one, which is enough to refuse a body: a million must not cost a million
        error reports."""
        if not isinstance(fields, dict):
            return fields
        if None in fields.values():
            fields = {name: value for name, value in fields.items() if value is not None}
        if len(fields) <= len(cls.model_fields):
            return fields
        known = [field.alias or name for name, field in cls.model_fields.items()]
        stranger = next(name for name in fields if name not in known)
        return {name: fields[name] for name in (*known, stranger) if name in fields}


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Harmless = None
    continuous_usage_stats: bool | None = None  # vLLM's


class Prediction(Body):
    """A text that the answer will be much like, such as a file before it is changed."""

    type: Literal["content"]
    content: Content


class ServedBody(Body):
    """The fields of all bodies that ask a model for something: which model, who asks, and on which terms."""

    model: str
    service_tier: str | None = None
    safety_identifier: str | None = None
    user: str | None = None


class SampledBody(ServedBody):
    """The fields of all bodies that ask for text: how it is sampled, and whose cached prefixes it may use."""

    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT64_MAX)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias = {}
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    stop: Stop = []
    cache_salt: str | None = Field(None, max_length=256)
    prompt_cache_key: Harmless = None
    prompt_cache_retention: Harmless = None
    prompt_cache_options: Harmless = None


class GenerationBody(SampledBody):
    """The fields that chat and text completions share."""

    n: int | None = Field(None, ge=1, le=128)
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=0, le=INT64_MAX)
    min_tokens: int | None = Field(None, ge=0, le=INT64_MAX)
    stop_token_ids: TokenIds | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    bad_words: BadWords = []
    allowed_token_ids: TokenIds | None = Field(None, min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Harmless = None  # a text is its tokens' bytes: there is nothing to choose
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=INT64_MAX)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    metadata: Harmless = None
    store: Harmless = None
    response_format: ResponseFormat = None
    structured_outputs: StructuredOutputs = None
    prediction: Prediction | None = None  # in completions Legato's


class FunctionCall(Body):
    name: FunctionName
    arguments: str  # JSON, where the model wrote it well
    parsed_arguments: Harmless = None  # what OpenAI's client makes of them, and sends back
    provider_specific_fields: Harmless = None


class ToolCall(Body):
    """A call that an assistant made in an earlier turn."""

    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Harmless = None
    provider_specific_fields: Harmless = None
    extra_content: Harmless = None  # of other vendors, such as Gemini's signatures of its thoughts


class Function(Body):
    name: FunctionName
    description: str | None = None
    parameters: Parameters = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


def _check_tools(tools: list[Tool]) -> list[Tool]:
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise field_error("invalid_value", "two functions have the same name")
    num_chars = sum(len(json.dumps(tool.function.parameters)) + len(tool.function.description or "") for tool in tools)
    if num_chars > MAX_TOOLS_CHARS:
        raise field_error("invalid_value", f"they have {num_chars} characters; at most {MAX_TOOLS_CHARS} are possible")
    return tools


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(_check_tools)]


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    function_call: Unsupported = None
    tool_call_id: str | None = Field(None, max_length=256)
    audio: Unsupported = None
    refusal: Harmless = None
    annotations: Harmless = None
    reasoning: str | None = None  # that of an assistant's earlier turn; its older name follows
    reasoning_content: str | None = None
    # What clients make of an answer, and send back: OpenAI's of its content, litellm's of what vendors add to it, and
    # of the reasoning in the forms of other APIs.
    parsed: Harmless = None
    provider_specific_fields: Harmless = None
    thinking_blocks: Harmless = None
    reasoning_items: Harmless = None

    @model_validator(mode="before")
    @classmethod
    def _an_assistant_need_not_say_anything(cls, fields: Any) -> Any:
        """Who called, refused or only thought has no content. What it refused with is what it said."""
        if not isinstance(fields, dict) or fields.get("role") != "assistant" or fields.get("content") is not None:
            return fields
        said = [fields.get(name) for name in ("refusal", "tool_calls", "reasoning", "reasoning_content")]
        return {**fields, "content": said[0] or ""} if any(said) else fields

    @model_validator(mode="after")
    def _calls_in_their_place(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise field_error("invalid_value", "tool_calls are only possible in an assistant's message")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise field_error("invalid_value", "a tool_call_id belongs to each message of the role 'tool' alone")
        return self


class TemplateBody(Body):
    """The fields that say what the chat template is told besides the messages."""

    chat_template_kwargs: TemplateKwargs = {}
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Documents = []


class ChatBody(GenerationBody, TemplateBody):
    """`POST /v1/chat/completions`"""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, le=INT64_MAX)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    modalities: TextOnly = None
    thinking_token_budget: int | None = Field(None, ge=-1, le=INT32_MAX)  # vLLM's; -1: none
    include_reasoning: bool | None = None  # vLLM's
    parallel_tool_calls: bool | None = None
    tool_choice: ChosenTools = ToolChoice("auto")
    tools: Tools | None = None
    functions: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    moderation: Unsupported = None

    def offered_tools(self) -> list[Tool]:
        """The tools that the model is told of."""
        choice: ToolChoice = self.tool_choice
        return [] if choice.mode == "none" else self.tools or []

    def callable_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        names = self.tool_choice.names
        return [tool for tool in self.offered_tools() if names is None or tool.function.name in names]


class CompletionBody(GenerationBody):
    """`POST /v1/completions`"""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None
    suffix: Unsupported = None


class TokenizeBody(TemplateBody):
    """`POST /tokenize`: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: Tools | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`"""

    model: str | None = None
    tokens: TokenIds


class RoleBody(Body):
    """`POST /cluster/workers/{worker_id}/role`. What still runs on the worker after `drain_s` goes on elsewhere.
    `model` "": it keeps the one that it has."""

    role: Role
    drain_s: float = Field(20.0, ge=0, le=600)
    model: str = ""


class LoadAdapterBody(Body):
    """`POST /v1/load_lora_adapter`. `load_inplace`: in the place of another one that was loaded under the name.
    `base_model_name`: whose adapter it is, where several models have some."""

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False
    base_model_name: str | None = None


class UnloadAdapterBody(Body):
    """`POST /v1/unload_lora_adapter`. The id is vLLM's own number, and is not looked at. `base_model_name`: whose,
    where several models have one of the name."""

    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = None
    base_model_name: str | None = None
