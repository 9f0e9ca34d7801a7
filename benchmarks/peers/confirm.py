"""The main rows once more, asked by GuideLLM instead of our own load generator, in its own virtual environment.

Its prompts are texts of as many tokens, and a new request follows each answer: with eight or 32 requests open from
beginning to end its rate is higher than that of a wave, for everyone. The order of the peers is what it confirms.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.part import note
from benchmarks.peers.http_asker import HttpAsker
from benchmarks.peers.installation import Workshop
from benchmarks.peers.peer import Peer, PeerUnavailableError
from benchmarks.peers.rounds import FAILURES, Record, prepared, reason
from benchmarks.peers.weights import model_folder
from benchmarks.peers.works import warm_up
from benchmarks.summary import Json

VERSION = "0.8.1"
# (requests open at any time, requests in all)
LOADS = ((1, 4), (8, 24), (32, 64))


def confirm(peers: Sequence[Peer], record: Record) -> None:
    """A record for each peer with a server and each load; one with the reason where there is none."""
    shop = Workshop("guidellm")
    try:
        shop.once(f"environment-{VERSION}", functools.partial(_install, shop))
    except PeerUnavailableError as error:
        record({"peer": "guidellm", "work": None, "round": 0, "reason": reason(error)})
        return
    for peer in prepared(peers, record):
        note(f"guidellm: {peer.name}")
        try:
            with peer.start() as asker:
                if isinstance(asker, HttpAsker):
                    warm_up(asker)
                    _ask(shop, peer, asker, record)
        except FAILURES as error:
            record({"peer": peer.name, "work": "guidellm", "round": 0, "reason": reason(error)})


def _install(shop: Workshop) -> None:
    shop.make_environment()
    shop.pip("install", "torch==2.13.0")
    shop.pip("install", "torch==2.13.0", f"guidellm=={VERSION}")


def _ask(shop: Workshop, peer: Peer, asker: HttpAsker, record: Record) -> None:
    for streams, num_requests in LOADS:
        output = shop.folder / f"{peer.name}-{streams}.json"
        shop.run(*command(asker, streams, num_requests, output))
        figures = read_output(output)
        record({"peer": peer.name, "work": f"guidellm, {streams} open, 256 -> 128", "round": 0, "figures": figures})


def command(asker: HttpAsker, streams: int, num_requests: int, output: Path) -> list[str]:
    settings = {
        "backend": f"kind=openai_http,target=http://127.0.0.1:{asker.port},model={asker.model},"
        "request_format=/v1/completions,validate_backend=false",
        "profile": f"kind=concurrent,streams={streams}",
        "constraint": f"kind=max_requests,count={num_requests}",
        "data": "kind=synthetic_text,prompt_tokens=256,output_tokens=128",
        "tokenizer": f"kind=hf_auto,model={model_folder()}",
        "output": f"kind=json,path={output}",
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    return ["venv/bin/guidellm", "run", *words, "--disable-console"]


def read_output(path: Path) -> Json:
    """Of its only benchmark. Raises ValueError where requests failed."""
    benchmark: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["benchmarks"][0]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    if totals["errored"] or not totals["successful"]:
        raise ValueError(f"guidellm: {totals['errored']} of {totals['total']} requests failed")
    return {
        "guidellm_tokens_per_s": metrics["output_tokens_per_second"]["successful"]["mean"],
        "ttft_ms": metrics["time_to_first_token_ms"]["successful"]["median"],
        "tpot_ms": metrics["inter_token_latency_ms"]["successful"]["median"],
    }
