"""An OpenAI server around OpenVINO GenAI's continuous batching, which brings none: runs in that peer's environment.

    python -P openvino_server.py IR_FOLDER TOKENIZER_JSON PORT NUM_THREADS BATCHED_TOKENS

`/v1/completions` of token ids, streamed, greedy or seeded. One thread: between two steps of the pipeline the event loop
takes requests and sends tokens. Imports nothing of Legato, which is not there.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

CACHE_GB = 2
MAX_NUM_SEQS = 64


class Stepper:
    """Steps the pipeline while there are requests, and hands each its tokens."""

    def __init__(self, folder: str, num_threads: int, batched_tokens: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = MAX_NUM_SEQS
        scheduler.max_num_batched_tokens = batched_tokens
        properties = {"INFERENCE_NUM_THREADS": num_threads, "INFERENCE_PRECISION_HINT": "bf16"}
        self._pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self._numbers = itertools.count()
        self._open: dict[int, tuple[Any, asyncio.Queue[list[int]]]] = {}
        self._wake = asyncio.Event()

    def add(self, fields: dict[str, Any]) -> tuple[int, asyncio.Queue[list[int]]]:
        number = next(self._numbers)
        prompt = ov.Tensor(np.array([fields["prompt"]], dtype=np.int64))
        queue: asyncio.Queue[list[int]] = asyncio.Queue()
        self._open[number] = (self._pipeline.add_request(number, prompt, generation_config(fields)), queue)
        self._wake.set()
        return number, queue

    def drop(self, number: int) -> None:
        found = self._open.pop(number, None)
        if found is not None:
            found[0].stop()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()
                self._deliver()
                await asyncio.sleep(0)  # the loop's turn

    def _deliver(self) -> None:
        for handle, queue in self._open.values():
            while handle.can_read():
                queue.put_nowait([token for output in handle.read().values() for token in output.generated_ids])


def generation_config(fields: dict[str, Any]) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens = fields["max_tokens"]
    config.ignore_eos = True
    config.do_sample = fields.get("temperature", 1) > 0
    if config.do_sample:
        config.temperature = fields.get("temperature", 1)
        config.rng_seed = fields.get("seed", 0)
        config.top_k = sys.maxsize
    return config


async def answer(stepper: Stepper, tokenizer: Tokenizer, reader: Any, writer: Any) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            (int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-l")), 0
        )
        if not head.startswith("POST /v1/completions"):
            model = {"object": "list", "data": [{"id": "openvino", "object": "model", "owned_by": "openvino"}]}
            body = json.dumps(model).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n")
            writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
            return
        fields = json.loads(await reader.readexactly(length))
        if isinstance(fields["prompt"], str):
            fields["prompt"] = tokenizer.encode(fields["prompt"]).ids
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        await stream(stepper, tokenizer, fields, writer)
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass  # the client has gone
    finally:
        writer.close()


async def stream(stepper: Stepper, tokenizer: Tokenizer, fields: dict[str, Any], writer: Any) -> None:
    number, queue = stepper.add(fields)
    decoder = DecodeStream(skip_special_tokens=False)
    num_tokens = 0
    try:
        while num_tokens < fields["max_tokens"]:
            tokens = await queue.get()
            num_tokens += len(tokens)
            text = "".join(decoder.step(tokenizer, token) or "" for token in tokens)
            last = num_tokens >= fields["max_tokens"]
            choice = {"index": 0, "text": text, "finish_reason": "length" if last else None}
            send(writer, {"object": "text_completion", "model": fields["model"], "choices": [choice]})
            if writer.is_closing():
                return
    finally:
        stepper.drop(number)
    counted = {"prompt_tokens": len(fields["prompt"]), "completion_tokens": num_tokens}
    usage = counted | {"total_tokens": sum(counted.values())}
    send(writer, {"object": "text_completion", "model": fields["model"], "choices": [], "usage": usage})
    chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")


def send(writer: Any, event: dict[str, Any]) -> None:
    chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def chunk(writer: Any, data: bytes) -> None:
    writer.write(b"%x\r\n" % len(data) + data + b"\r\n")


async def serve(folder: str, tokenizer_json: str, port: int, num_threads: int, batched_tokens: int) -> None:
    stepper = Stepper(folder, num_threads, batched_tokens)
    tokenizer = Tokenizer.from_file(tokenizer_json)
    stepping = asyncio.create_task(stepper.run())
    server = await asyncio.start_server(
        lambda reader, writer: answer(stepper, tokenizer, reader, writer), "127.0.0.1", port, limit=2**20
    )
    print("ready", flush=True)
    async with server:
        await stepping


if __name__ == "__main__":
    ir_folder, tokenizer_path, *numbers = sys.argv[1:]
    assert Path(ir_folder).is_dir()
    asyncio.run(serve(ir_folder, tokenizer_path, *map(int, numbers)))
