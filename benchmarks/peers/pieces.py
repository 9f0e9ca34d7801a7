"""The comparison in pieces of some minutes. Ratios are taken within a piece; one that was disturbed can be repeated."""

from __future__ import annotations

import json
from dataclasses import dataclass

from benchmarks.peers.drafts import legato_with_drafts, with_drafts
from benchmarks.peers.engines.installation import MIXTURE
from benchmarks.peers.engines.legato import APART, COLOCATED, in_process, legato, quantised
from benchmarks.peers.engines.llama_cpp import llama_cpp
from benchmarks.peers.engines.openvino_genai import openvino
from benchmarks.peers.engines.vllm_cpu import vllm
from benchmarks.peers.peer import THREADS, Peer
from benchmarks.peers.works import GROUPS

SPEED = ("one_stream", "prefill", "concurrent", "shared_prefix")
ASKED = (*SPEED, "company")
SERVED = (*ASKED, "guidellm")
SCHEMED = (*SERVED, "schema")  # by `structured_outputs`
# `generate` pads a batch and knows no seed for each request, and has no prefix cache over requests.
PLAIN = ("one_stream", "prefill", "concurrent")
LIGHT = ("one_stream",)
VLLM_NGRAM = json.dumps(
    {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
)


def peers() -> tuple[Peer, ...]:
    return (
        legato("legato", "one worker for both, over HTTP, bf16", COLOCATED, (*SCHEMED, "steady")),
        legato("legato-1p1d", "1 prefill + 1 decode worker, a core each, over HTTP, bf16", APART, (*SERVED, "steady")),
        in_process("legato-in-process", "legato", "Legato's engine, bf16", ASKED),
        llama_cpp("llama.cpp", "BF16", SERVED),
        openvino("openvino", "fp16", SERVED),
        vllm("vllm", SCHEMED),
        in_process("transformers", "transformers", "transformers `generate`, bf16", PLAIN),
        legato("legato-int8", "one worker for both, over HTTP, int8", quantised("int8"), SPEED),
        legato("legato-int4", "one worker for both, over HTTP, int4", quantised("int4"), LIGHT),
        in_process("legato-int8-in-process", "legato", "Legato's engine, int8", SPEED, "int8"),
        in_process("legato-int4-in-process", "legato", "Legato's engine, int4", LIGHT, "int4"),
        llama_cpp("llama.cpp-q8_0", "Q8_0", SPEED),
        llama_cpp("llama.cpp-q4_0", "Q4_0", LIGHT),
        openvino("openvino-int8", "int8", SPEED),
        legato_with_drafts("legato-drafts"),
        with_drafts(
            "legato-drafts-in-process",
            in_process("legato", "legato-drafts", f"Legato's engine, bf16, {THREADS} threads", ()),
            in_process("legato", "legato", "Legato's engine", ()),
        ),
        with_drafts(
            "llama.cpp-ngram",
            llama_cpp("llama.cpp", "BF16", (), "--spec-type", "ngram-simple"),
            llama_cpp("llama.cpp", "BF16", ()),
        ),
        with_drafts("vllm-ngram", vllm("vllm", (), "--speculative-config", VLLM_NGRAM), vllm("vllm", ())),
        legato("legato-experts", "one worker for both, over HTTP, bf16, 8 experts", COLOCATED, PLAIN, MIXTURE),
        in_process("legato-experts-in-process", "legato", "Legato's engine, bf16, 8 experts", PLAIN, model=MIXTURE),
        llama_cpp("llama.cpp-experts", "BF16", PLAIN, model=MIXTURE),
        vllm("vllm-experts", PLAIN, model=MIXTURE),
        in_process("transformers-experts", "transformers", "`generate`, bf16, 8 experts", PLAIN, model=MIXTURE),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Peers that are asked these groups of works, in turns; `rounds` unless others are asked for."""

    name: str
    peers: tuple[str, ...]
    groups: tuple[str, ...]
    rounds: int = 2

    def only(self, peers: tuple[str, ...], groups: tuple[str, ...]) -> Piece:
        """The part of the piece with these peers and groups; an empty list leaves out nothing."""
        return Piece(
            name=self.name,
            peers=tuple(name for name in self.peers if not peers or name in peers),
            groups=tuple(group for group in self.groups if not groups or group in groups),
            rounds=self.rounds,
        )


_SPEED = ("one_stream", "prefill", "concurrent", "shared_prefix")
_SERVERS = ("legato", "llama.cpp", "openvino", "vllm")

_DRAFTING = ("legato-drafts-in-process", "legato-drafts", "llama.cpp-ngram", "vllm-ngram")

PIECES = (
    Piece(name="bf16", peers=("legato-in-process", *_SERVERS, "transformers", "legato-1p1d"), groups=_SPEED),
    Piece(
        name="int8",
        peers=("legato-int8-in-process", "openvino-int8", "llama.cpp-q8_0", "legato-int8"),
        groups=_SPEED,
    ),
    Piece(name="int4", peers=("legato-int4-in-process", "llama.cpp-q4_0", "legato-int4"), groups=("one_stream",)),
    Piece(name="steady", peers=("legato", "legato-1p1d"), groups=("steady",)),
    Piece(
        name="company",
        peers=("legato-in-process", *_SERVERS, "legato-1p1d"),
        groups=("company",),
        rounds=1,
    ),
    Piece(name="schema", peers=("legato", "vllm"), groups=("schema",)),
    Piece(name="drafts", peers=_DRAFTING, groups=("drafts",), rounds=1),
    Piece(
        name="experts",
        peers=(
            "legato-experts-in-process",
            "llama.cpp-experts",
            "vllm-experts",
            "transformers-experts",
            "legato-experts",
        ),
        groups=PLAIN,
    ),
    Piece(name="guidellm", peers=_SERVERS, groups=("guidellm",), rounds=1),
)
PART = "part"  # the name of one put together on the command line


def chosen(names: tuple[str, ...], of_peers: tuple[str, ...], of_groups: tuple[str, ...]) -> list[Piece]:
    """All; those named, or of them a part; or one put together from peers and groups."""
    if not names and (of_peers or of_groups):
        everybody = tuple(peer.name for peer in peers())
        return [Piece(name=PART, peers=of_peers or everybody, groups=of_groups or GROUPS)]
    pieces = [piece.only(of_peers, of_groups) for piece in PIECES if not names or piece.name in names]
    return [piece for piece in pieces if piece.peers and piece.groups]


def in_order(piece: Piece) -> list[Peer]:
    known = {peer.name: peer for peer in peers()}
    return [known[name] for name in piece.peers]
