"""What Legato is to reach beside its peers, as ratios of medians within one piece, or in absolute terms."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.common.part import Json
from benchmarks.peers.drafts import KINDS, work_of
from benchmarks.peers.report import Pieces, Report, together
from benchmarks.peers.works import ONE_STREAM, START

BF16 = ("llama.cpp", "openvino", "vllm", "transformers")
SERVERS = BF16[:3]
LEGATOS = ("legato", "legato-1p1d", "legato-in-process")
INT8 = ("legato-int8", "legato-int8-in-process")
INT4 = ("legato-int4", "legato-int4-in-process")


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """An aim: each of `ours` beside each of `others` in one figure; without others, the figure itself beside `least`.

    `least`: the ratio of ours to theirs where more is better, of theirs to ours where less is. `tail`: P99 is compared,
    not the median. `weights`: for the reader.
    """

    work: str
    figure: str
    ours: tuple[str, ...]
    others: tuple[str, ...]
    least: float
    less_is_better: bool = False
    tail: bool = False
    weights: str = "bf16"

    def judge(self, pieces: Pieces) -> Json:
        return {
            "work": self.work,
            "weights": self.weights,
            "figure": self.figure + (" P99" if self.tail else ""),
            "aim": self.least,
            "beside": list(self.others),
            "by": {name: self._judged(pieces, name) for name in self.ours},
        }

    def _judged(self, pieces: Pieces, ours: str) -> Json | None:
        """How far the aim is met; None where it was not measured, or beside nobody."""
        return self._beside_others(pieces, ours) if self.others else self._by_itself(pieces, ours)

    def _by_itself(self, pieces: Pieces, ours: str) -> Json | None:
        found = together(pieces, self.work, [ours])
        if found is None:
            return None
        value = self._typical(found[0])
        return {"value": value, "reached": value <= self.least if self.less_is_better else value >= self.least}

    def _beside_others(self, pieces: Pieces, ours: str) -> Json | None:
        """Judge beside the one that is hardest to reach."""
        pairs = {other: together(pieces, self.work, [ours, other]) for other in self.others}
        ratios = {other: self._ratio(*pair) for other, pair in pairs.items() if pair is not None}
        if not ratios:
            return None
        best = min(ratios, key=lambda other: ratios[other])
        return {
            "ratio": float(f"{ratios[best]:.3g}"),
            "best": best,
            "reached": ratios[best] >= self.least,
            "not_beside": [other for other in self.others if other not in ratios],
        }

    def _ratio(self, ours: Report, theirs: Report) -> float:
        our, their = self._typical(ours), self._typical(theirs)
        return their / our if self.less_is_better else our / their

    def _typical(self, figures: Report) -> float:
        return float(figures[self.figure]["p99" if self.tail else "median"])


def _prefill(num_tokens: int, least: float) -> Aim:
    return Aim(work=f"prefill {num_tokens}", figure="tokens_per_s", ours=LEGATOS, others=BF16, least=least)


def _concurrent(num: int, least: float) -> tuple[Aim, ...]:
    """Tails beside servers: a batch that `generate` is given has none."""
    work = f"{num} concurrent 256 -> 128"
    rate = Aim(work=work, figure="output_tokens_per_s", ours=LEGATOS, others=BF16, least=least)
    tails = (
        Aim(work=work, figure=figure, ours=LEGATOS, others=SERVERS, least=1.0, less_is_better=True, tail=True)
        for figure in ("all_ttft_ms", "all_tpot_ms")
    )
    return rate, *tails


def _one_stream(ours: tuple[str, ...], other: str, weights: str = "bf16") -> Aim:
    return Aim(work=ONE_STREAM, figure="decode_tokens_per_s", ours=ours, others=(other,), least=1.0, weights=weights)


def _int8() -> tuple[Aim, ...]:
    """The aims of int8, beside OpenVINO's, which rounds activations too."""
    rates = {
        **{f"prefill {num}": "tokens_per_s" for num in (512, 2048, 8000)},
        **{f"{num} concurrent 256 -> 128": "output_tokens_per_s" for num in (8, 32)},
    }
    return tuple(
        Aim(work=work, figure=figure, ours=INT8, others=("openvino-int8",), least=1.0, weights="int8")
        for work, figure in rates.items()
    )


def _experts() -> tuple[Aim, ...]:
    """The aims of a mixture of experts, beside who loads it; `generate` is to be outrun by far."""
    ours, weights = ("legato-experts", "legato-experts-in-process"), "bf16, 8 experts"
    rates = {
        ONE_STREAM: "decode_tokens_per_s",
        "prefill 2048": "tokens_per_s",
        **{f"{num} concurrent 256 -> 128": "output_tokens_per_s" for num in (8, 32)},
    }
    return tuple(
        Aim(work=work, figure=figure, ours=ours, others=others, least=least, weights=weights)
        for work, figure in rates.items()
        for others, least in ((("llama.cpp-experts", "vllm-experts"), 1.0), (("transformers-experts",), 2.0))
    )


def _drafts() -> tuple[Aim, ...]:
    """Faster than the others with theirs, and none of its own answers another one."""
    ours, others = ("legato-drafts", "legato-drafts-in-process"), ("llama.cpp-ngram", "vllm-ngram")
    return tuple(
        aim
        for work in map(work_of, KINDS)
        for aim in (
            Aim(work=work, figure="drafts_tokens_per_s", ours=ours, others=others, least=1.0),
            Aim(work=work, figure="changed", ours=ours, others=(), least=0, less_is_better=True),
        )
    )


AIMS = (
    _one_stream(LEGATOS, "llama.cpp"),
    _prefill(512, 1.1),
    _prefill(2048, 1.1),
    _prefill(8000, 1.5),
    *_concurrent(8, 1.2),
    *_concurrent(32, 1.3),
    _one_stream(INT8, "llama.cpp-q8_0", "int8"),
    _one_stream(INT4, "llama.cpp-q4_0", "int4"),
    *_int8(),
    *_experts(),
    Aim(work="shared prefix of 1500", figure="ttft_ms", ours=LEGATOS, others=SERVERS, least=1.0, less_is_better=True),
    Aim(
        work="4 decodes beside prompts of 4000",
        figure="all_gaps_ms",
        ours=("legato-1p1d",),
        others=("legato",),
        least=5.0,
        less_is_better=True,
        tail=True,
    ),
    *(
        Aim(
            work=f"{num} concurrent 128 -> 64 under a schema",
            figure="share_kept",
            ours=("legato",),
            others=("vllm",),
            least=1.0,
        )
        for num in (1, 8, 32)
    ),
    *(
        Aim(work="the same answer in company", figure=figure, ours=LEGATOS, others=(), least=0, less_is_better=True)
        for figure in ("greedy_changed", "seeded_changed")
    ),
    *_drafts(),
    Aim(work=START, figure="seconds", ours=LEGATOS[:2], others=(), least=20, less_is_better=True),
)
