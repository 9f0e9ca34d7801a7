"""The main rows once more by GuideLLM, a load generator that others trust, beside ours: same server, same load.

A new request follows each answer, so that so many are open from beginning to end and rates are higher than those of a
wave. Its prompts are texts of as many tokens, and it says nothing of a temperature, so that both have drawn tokens.
"""

from __future__ import annotations

import functools
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.common.part import Json
from benchmarks.common.workload import Wave
from benchmarks.peers.engines.http_asker import HttpAsker
from benchmarks.peers.engines.installation import Workshop, model_folder
from benchmarks.peers.peer import Answer, Asker, Draw, PeerUnavailableError, Request

VERSION = "0.8.1"
PROMPT_TOKENS, OUTPUT_TOKENS = 256, 128
LOADS = ((1, 4), (8, 24), (32, 64))  # requests open at any time, requests in all
# Its usual ten processes would take the cores of the server that is measured.
_ENVIRONMENT = {"GUIDELLM__MAX_WORKER_PROCESSES": "1"}


def install() -> None:
    shop = Workshop("guidellm")
    shop.once(f"environment-{VERSION}", functools.partial(_install, shop))


def _install(shop: Workshop) -> None:
    shop.make_environment()
    shop.pip("install", "torch==2.13.0")
    shop.pip("install", "torch==2.13.0", f"guidellm=={VERSION}")


def confirm(num_open: int, num_requests: int, asker: Asker, draw: Draw) -> Json:
    """Ours, GuideLLM's, and by how many percent its rate differs from ours."""
    if not isinstance(asker, HttpAsker):
        raise PeerUnavailableError("GuideLLM asks servers only")
    requests = [
        Request(prompt=draw(PROMPT_TOKENS), num_tokens=OUTPUT_TOKENS, seed=number) for number in range(num_requests)
    ]
    ours = summed_up(asker.keep_open(requests, num_open))
    shop = Workshop("guidellm")
    output = shop.folder / f"{num_open}-open.json"
    output.unlink(missing_ok=True)
    shop.run(*command(asker, num_open, num_requests, output), niceness=0, environment=_ENVIRONMENT)
    theirs = read_output(output)
    rates = ours["output_tokens_per_s"], theirs["output_tokens_per_s"]
    return {**ours, **{f"guidellm_{key}": value for key, value in theirs.items()}, "differs_percent": _differs(*rates)}


def _differs(ours: float, theirs: float) -> float:
    return (theirs / ours - 1) * 100


def summed_up(answers: list[Answer]) -> dict[str, float]:
    """Sum up answers as GuideLLM does: all tokens by the time from the first request to the last token."""
    wave = Wave(tuple(answer.timing for answer in answers))
    return {
        "output_tokens_per_s": wave.tokens_per_s,
        "ttft_ms": statistics.median(timing.ttft_s for timing in wave.requests) * 1e3,
        "tpot_ms": statistics.median(timing.tpot_s for timing in wave.requests) * 1e3,
    }


def command(asker: HttpAsker, num_open: int, num_requests: int, output: Path) -> list[str]:
    settings = {
        "backend": f"kind=openai_http,target=http://127.0.0.1:{asker.port},model={asker.model},"
        "request_format=/v1/completions,validate_backend=false",
        "profile": f"kind=concurrent,streams={num_open}",
        "constraint": f"kind=max_requests,count={num_requests}",
        "data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        # All made before the first is sent: by itself it makes thousands while the server is measured.
        "data-loader": f"kind=pytorch,samples={num_requests},prefetch_factor=2",
        "tokenizer": f"kind=hf_auto,model={model_folder()}",
        "output": f"kind=json,path={output}",
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    return ["venv/bin/guidellm", "run", *words, "--disable-console"]


def read_output(path: Path) -> dict[str, float]:
    """The figures of a GuideLLM report's only benchmark. Raises ValueError where requests failed."""
    benchmark: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["benchmarks"][0]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    if totals["errored"] or not totals["successful"]:
        raise ValueError(f"guidellm: {totals['errored']} of {totals['total']} requests failed")
    return {
        "output_tokens_per_s": metrics["output_tokens_per_second"]["successful"]["mean"],
        "ttft_ms": metrics["time_to_first_token_ms"]["successful"]["median"],
        "tpot_ms": metrics["inter_token_latency_ms"]["successful"]["median"],
    }
