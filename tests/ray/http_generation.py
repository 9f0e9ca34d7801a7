"""Many token-level requests against a served cluster at once, as benchmarks and real clients send them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Answer:
    """What one streamed completion brought."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    cached_tokens: int = 0
    status: int = 0
    error: dict[str, Any] | None = None


async def stream_events(client: httpx.AsyncClient, body: dict[str, Any], answer: Answer) -> AsyncIterator[Answer]:
    """Send one streaming completion; yields the answer after each event that it grew by."""
    request = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, **body}
    async with client.stream("POST", "/v1/completions", json=request) as response:
        answer.status = response.status_code
        if response.status_code != 200:
            answer.error = json.loads(await response.aread())["error"]
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            answer.error = event.get("error", answer.error)
            if event.get("usage"):
                answer.cached_tokens = event["usage"]["prompt_tokens_details"]["cached_tokens"]
            for choice in event.get("choices", ()):
                answer.text += choice["text"]
                answer.token_ids += choice.get("token_ids", ())
                answer.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", ())
                answer.finish_reason = choice["finish_reason"] or answer.finish_reason
            yield answer


async def complete(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    answer = Answer()
    async for _ in stream_events(client, body, answer):
        pass
    return answer


def greedy_body(model: str, prompt: Sequence[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        **fields,
    }


def http_client(url: str, timeout_s: float = 300.0) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=256)
    return httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits)


async def complete_all(url: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Answer]:
    """All of these, at most `concurrency` at a time."""
    gate = asyncio.Semaphore(concurrency)
    async with http_client(url) as client:

        async def one(body: dict[str, Any]) -> Answer:
            async with gate:
                return await complete(client, body)

        return await asyncio.gather(*(one(body) for body in bodies))
