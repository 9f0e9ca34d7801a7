"""Who is compared, and who is asked what."""

from __future__ import annotations

from benchmarks.peers.legato import APART, COLOCATED, in_process, legato, quantised
from benchmarks.peers.llama_cpp import llama_cpp
from benchmarks.peers.openvino_genai import openvino
from benchmarks.peers.peer import Peer
from benchmarks.peers.vllm_cpu import vllm

SPEED = ("one_stream", "prefill", "concurrent", "shared_prefix")
ASKED = (*SPEED, "company")
SERVED = (*ASKED, "guidellm")
# `generate` pads a batch and knows no seed for each request, and has no prefix cache over requests.
PLAIN = ("one_stream", "prefill", "concurrent")
LIGHT = ("one_stream",)


def peers() -> tuple[Peer, ...]:
    return (
        legato("legato", "one worker for both, over HTTP, bf16", COLOCATED, (*SERVED, "steady")),
        legato("legato-1p1d", "1 prefill + 1 decode worker, a core each, over HTTP, bf16", APART, (*SERVED, "steady")),
        in_process("legato-in-process", "legato", "Legato's engine, bf16", ASKED),
        llama_cpp("llama.cpp", "BF16", SERVED),
        openvino("openvino", "fp16", SERVED),
        vllm("vllm", SERVED),
        in_process("transformers", "transformers", "transformers `generate`, bf16", PLAIN),
        legato("legato-int8", "one worker for both, over HTTP, int8", quantised("int8"), SPEED),
        legato("legato-int4", "one worker for both, over HTTP, int4", quantised("int4"), LIGHT),
        in_process("legato-int8-in-process", "legato", "Legato's engine, int8", SPEED, "int8"),
        in_process("legato-int4-in-process", "legato", "Legato's engine, int4", LIGHT, "int4"),
        llama_cpp("llama.cpp-q8_0", "Q8_0", SPEED),
        llama_cpp("llama.cpp-q4_0", "Q4_0", LIGHT),
        openvino("openvino-int8", "int8", SPEED),
    )
