"""The bodies of requests, as OpenAI's API defines them, plus the sampling fields that open models' servers share.

Unknown fields are refused, so that a typing error never silently changes an answer. What Legato cannot honour yet is
declared `Unsupported` and refused with a sentence; what makes no difference is `Harmless`. Null means "not given".
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cluster.http.openai.fields import (
    Content,
    Harmless,
    LogitBias,
    Prompts,
    Stop,
    TextFormat,
    TextOnly,
    TokenIds,
    Unsupported,
)
from engine.sampling.params import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from kv_transfer.messages.fields import Role

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_MESSAGES = 2**14  # of a chat: what is made of more takes long at a stretch


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_stranger(cls, fields: Any) -> Any:
        """One unknown field is enough to refuse a body: a million must not cost a million error reports."""
        if not isinstance(fields, dict) or len(fields) <= len(cls.model_fields):
            return fields
        stranger = next(name for name in fields if name not in cls.model_fields)
        return {name: fields[name] for name in (*cls.model_fields, stranger) if name in fields}


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Harmless = None
    continuous_usage_stats: Harmless = None  # vLLM's, which load generators send: usage comes with the last event only


class GenerationBody(Body):
    """What chat and text completions share."""

    model: str
    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=0, le=INT64_MAX)
    min_tokens: int | None = Field(None, ge=0, le=INT64_MAX)
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
    stop_token_ids: TokenIds | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = Field(None, max_length=256)
    service_tier: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    metadata: Harmless = None
    store: Harmless = None
    prompt_cache_key: Harmless = None
    prompt_cache_retention: Harmless = None
    response_format: TextFormat = None


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None
    tool_calls: Unsupported = None
    function_call: Unsupported = None
    tool_call_id: Unsupported = None
    audio: Unsupported = None
    refusal: Harmless = None
    annotations: Harmless = None


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`"""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, le=INT64_MAX)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    modalities: TextOnly = None
    parallel_tool_calls: Harmless = None
    tool_choice: Unsupported = None
    tools: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None


class CompletionBody(GenerationBody):
    """`POST /v1/completions`"""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None
    suffix: Unsupported = None


class TokenizeBody(Body):
    """`POST /tokenize`: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    """`POST /detokenize`"""

    model: str | None = None
    tokens: TokenIds


class RoleBody(Body):
    """`POST /cluster/workers/{worker_id}/role`: what still runs there after `drain_s` goes on elsewhere."""

    role: Role
    drain_s: float = Field(20.0, ge=0, le=600)
