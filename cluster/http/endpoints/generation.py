"""The routes that answer with generated tokens, chat and text completions, and the shapes of their answers."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from cluster.http.api import ApiOf
from cluster.http.openai.choice import Delta
from cluster.http.openai.events import ChoiceEvents, Reading, chat_members, chat_message
from cluster.http.openai.logprobs import (
    CompletionToken,
    chat_logprobs,
    completion_logprobs,
    output_tokens,
    prompt_logprobs,
    prompt_tokens,
)
from cluster.http.openai.schemas import ChatBody, CompletionBody
from cluster.http.openai.sse import AnswerShape, dumps, dumps_large
from cluster.http.parse import Job, prepare_chat, prepare_completion
from cluster.http.response import GenerationResponse
from cluster.http.server.body import JsonRoute
from engine.text.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatBody, request: Request, api: ApiOf) -> GenerationResponse:
    asked = await api.find_model(body.model)
    timeline = asked.timeline("/v1/chat/completions", request, body)
    async with api.preparing(timeline.terms):
        job = await prepare_chat(body, asked, timeline.terms)
    tokenizer = asked.model.tokenizer
    shape = ChatShape(job, tokenizer) if job.reading is None else ReadChatShape(job, job.reading, tokenizer)
    return GenerationResponse(api, timeline, shape)


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionBody, request: Request, api: ApiOf) -> GenerationResponse:
    asked = await api.find_model(body.model)
    timeline = asked.timeline("/v1/completions", request, body)
    async with api.preparing(timeline.terms):
        job = await prepare_completion(body, asked, timeline.terms)
    return GenerationResponse(api, timeline, CompletionShape(job, asked.model.tokenizer))


class ChatShape(AnswerShape):
    """OpenAI's `chat.completion` and `chat.completion.chunk`."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        super().__init__(job, chunk_name="chat.completion.chunk", whole_name="chat.completion")
        self._tokenizer = tokenizer

    def opening(self, index: int) -> bytes:
        beside = b""
        if self.job.return_token_ids:
            beside = b',"prompt_token_ids":' + dumps_large(self.job.choices[0].spec.prompt_token_ids)
        return self._event(index, b'"delta":{"role":"assistant","content":""}', None, None, beside)

    def chunk(self, index: int, delta: Delta) -> bytes:
        content = b'"delta":{"content":%b}' % dumps(delta.text) if delta.text else b'"delta":{}'
        return self._event(index, content, self._logprobs(delta), delta)

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        return {
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs(delta),
        }

    def of_prompt(self) -> dict[str, Any]:
        return prompt_members(self.job, 0, self._tokenizer)

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return chat_logprobs(delta.entries, self._tokenizer, as_ids=self.job.tokens_as_ids)


def prompt_members(job: Job, index: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """The members by which vLLM's answers tell of the prompt of choice `index`: those that were asked for."""
    choice, members = job.choices[index], dict[str, Any]()
    token_ids, num_top = choice.spec.prompt_token_ids, job.num_prompt_logprobs
    if num_top is not None:
        assert choice.prompt_logprobs is not None, "the first token came without the prompt's logprobs"
        members["prompt_logprobs"] = prompt_logprobs(token_ids, choice.prompt_logprobs, num_top, tokenizer)
    if job.return_token_ids:
        members["prompt_token_ids"] = token_ids
    return members


class ReadChatShape(ChatShape):
    """OpenAI's `chat.completion` and `chat.completion.chunk`, with calls and reasoning apart from the content."""

    def __init__(self, job: Job, reading: Reading, tokenizer: Tokenizer) -> None:
        super().__init__(job, tokenizer)
        self._reasons = reading.reasoning is not None and reading.tells_reasoning
        self._choices = [ChoiceEvents(reading, one_text=True) for _ in job.choices]

    def chunk(self, index: int, delta: Delta) -> bytes:
        members = chat_members(self._choices[index].read(delta))
        if not (members or delta.entries or delta.token_ids or delta.finish_reason):
            return b""  # the text that came may be the beginning of a mark
        return self._event(index, b'"delta":' + dumps(members), self._logprobs(delta), delta)

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        message = chat_message(self._choices[index].read(delta), reasons=self._reasons)
        return {**super().choice(index, delta), "message": message}

    def finish_reason(self, index: int, delta: Delta) -> str | None:
        called = delta.finish_reason == "stop" and self._choices[index].can_call
        return "tool_calls" if called else delta.finish_reason


class CompletionShape(AnswerShape):
    """OpenAI's `text_completion`, streamed or not. An echo opens each choice, together with the prompt's logprobs."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        super().__init__(job, chunk_name="text_completion", whole_name="text_completion")
        self._tokenizer = tokenizer

    def opening(self, index: int) -> bytes:
        echo, tokens = self.job.choices[index].echo, self._prompt_tokens(index)
        if not (echo or tokens or self.job.return_token_ids):
            return b""
        content = b'"text":' + dumps_large(echo)
        if self.job.return_token_ids:
            content += b',"prompt_token_ids":' + dumps_large(self.job.choices[index].spec.prompt_token_ids)
        return self._event(index, content, self._logprobs(tokens), None)

    def chunk(self, index: int, delta: Delta) -> bytes:
        tokens = output_tokens(delta.entries, len(self.job.choices[index].echo))
        return self._event(index, b'"text":' + dumps(delta.text), self._logprobs(tokens), delta)

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        echo = self.job.choices[index].echo
        tokens = self._prompt_tokens(index) + output_tokens(delta.entries, len(echo))
        told = prompt_members(self.job, index, self._tokenizer)
        return {"text": echo + delta.text, "logprobs": self._logprobs(tokens), **told}

    def _logprobs(self, tokens: list[CompletionToken]) -> dict[str, Any] | None:
        return completion_logprobs(tokens, self._tokenizer, as_ids=self.job.tokens_as_ids)

    def _prompt_tokens(self, index: int) -> list[CompletionToken]:
        """The tokens of the echoed prompt, if their log probabilities were asked for."""
        choice, num_top = self.job.choices[index], self.job.num_output_logprobs
        if not choice.has_echo or num_top is None:
            return []
        assert choice.prompt_logprobs is not None, "the first token came without the prompt's logprobs"
        return prompt_tokens(
            choice.spec.prompt_token_ids,
            choice.prompt_logprobs,
            num_top,
            self._tokenizer,
            skip_special_tokens=self.job.skip_special_tokens,
        )
