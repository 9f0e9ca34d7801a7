"""What Legato is to reach beside its peers, as ratios of medians within one run, or in absolute terms."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.summary import Json, percentile

BF16 = ("llama.cpp", "openvino", "vllm", "transformers")
ONE = "one stream 128 -> 128"
LEGATOS = ("legato", "legato-1p1d", "legato-in-process")


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """`ours` beside the best of `others` in one figure; without others, against `least` itself.

    `least`: the ratio ours/best, where more is better, and best/ours where less is. `share`: of pooled figures, which
    percentile is compared instead of the median.
    """

    work: str
    figure: str
    ours: str
    others: tuple[str, ...]
    least: float
    less_is_better: bool = False
    share: float | None = None

    def judge(self, ours: Sequence[float], others: Mapping[str, Sequence[float]]) -> Json:
        value = self._typical(ours)
        best = self._best(others)
        rate = self._ratio(value, self._typical(others[best])) if best else value
        reached = rate <= self.least if self.less_is_better and not best else rate >= self.least
        return {
            "work": self.work,
            "figure": self.figure + (f" P{self.share * 100:g}" if self.share else ""),
            "ours": self.ours,
            "best": best,
            "ratio": float(f"{rate:.3g}"),
            "aim": self.least,
            "reached": reached,
        }

    def _typical(self, values: Sequence[float]) -> float:
        return statistics.median(values) if self.share is None else percentile(values, self.share)

    def _best(self, others: Mapping[str, Sequence[float]]) -> str | None:
        pick = min if self.less_is_better else max
        return pick(others, key=lambda name: self._typical(others[name]), default=None)

    def _ratio(self, ours: float, best: float) -> float:
        return best / ours if self.less_is_better else ours / best


def _rates(work: str, figure: str, least: float) -> list[Aim]:
    """The same for Legato's three configurations."""
    return [Aim(work=work, figure=figure, ours=ours, others=BF16, least=least) for ours in LEGATOS]


def _concurrent(num: int, least: float) -> list[Aim]:
    work = f"{num} concurrent 256 -> 128"
    tails = [
        Aim(work=work, figure=figure, ours="legato", others=BF16[:3], least=1.0, less_is_better=True, share=0.99)
        for figure in ("all_ttft_ms", "all_tpot_ms")
    ]
    return _rates(work, "output_tokens_per_s", least) + tails


def _quantised(ours: str) -> list[Aim]:
    """INT8 beside OpenVINO's, which rounds activations too; one stream beside llama.cpp."""
    rates = {
        **{f"prefill {num}": "tokens_per_s" for num in (512, 2048, 8000)},
        **{f"{num} concurrent 256 -> 128": "output_tokens_per_s" for num in (8, 32)},
    }
    one = Aim(work=ONE, figure="decode_tokens_per_s", ours=ours, others=("llama.cpp-q8_0",), least=1.0)
    return [one] + [
        Aim(work=work, figure=figure, ours=ours, others=("openvino-int8",), least=1.0) for work, figure in rates.items()
    ]


AIMS = (
    *(Aim(work=ONE, figure="decode_tokens_per_s", ours=ours, others=("llama.cpp",), least=1.0) for ours in LEGATOS),
    *_quantised("legato-int8"),
    *_quantised("legato-int8-in-process"),
    *(
        Aim(work=ONE, figure="decode_tokens_per_s", ours=ours, others=("llama.cpp-q4_0",), least=1.0)
        for ours in ("legato-int4", "legato-int4-in-process")
    ),
    *_rates("prefill 512", "tokens_per_s", 1.1),
    *_rates("prefill 2048", "tokens_per_s", 1.1),
    *_rates("prefill 8000", "tokens_per_s", 1.5),
    *_concurrent(8, 1.2),
    *_concurrent(32, 1.3),
    *(
        Aim(work="shared prefix of 1500", figure="ttft_ms", ours=ours, others=BF16[:3], least=1.0, less_is_better=True)
        for ours in LEGATOS
    ),
    Aim(
        work="4 decodes beside prompts of 4000",
        figure="all_gaps_ms",
        ours="legato-1p1d",
        others=("legato",),
        least=5.0,
        less_is_better=True,
        share=0.99,
    ),
    *(
        Aim(work="the same answer in company", figure=figure, ours=ours, others=(), least=0, less_is_better=True)
        for ours in LEGATOS
        for figure in ("greedy_changed", "seeded_changed")
    ),
    *(
        Aim(work="start to first token", figure="seconds", ours=ours, others=(), least=20, less_is_better=True)
        for ours in LEGATOS[:2]
    ),
)
