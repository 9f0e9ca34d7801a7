"""Traffic that shifts every five minutes: workers of one type beside eight in each fixed layout, in the simulator.

Two kinds of requests take turns, `PIECE_S` each: Mooncake's conversations, long prompts with short answers, and Azure's
with prompt and answer exchanged (of `LONGEST_ANSWER` tokens at most), short prompts with long answers. Each kind comes
at the same share of the load at which the workers' time would be used up by it alone (`bounds`), whatever the layout:
that share is the load here. Where a kind comes again it goes on where it stopped, and after its end from its beginning.
Targets and counting are the goodput benchmark's (`benchmarks.scheduling.goodput`), but lengths and tenants are told
apart by kind: else the short prompts, of which there are many more, would be nine tenths of all.

    python -m benchmarks.scheduling.shifting --tpot-ms 30 --load 0.6 --load 0.7 --keep shifting.jsonl
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import count, cycle
from pathlib import Path
from typing import Final

from benchmarks.common.part import Json, note, run_part
from benchmarks.report.cells import Report
from benchmarks.scheduling.goodput_comparison import bounds
from benchmarks.scheduling.goodput_kept import Kept, TimeUpError
from benchmarks.scheduling.goodput_setting import SMALL, Layout, Setting, add_trace_paths, counted, length_class
from cluster.simulation.workload.traces import TraceRequest
from cluster.slo.countings import HEADLINE, SHARES

PIECE_S: Final = 300.0
LONGEST_ANSWER: Final = 2048
NUM_PREFILL: Final = (0, 2, 4, 5, 6)
_NUM_IN_BOUND: Final = {"conversations": 4800, "exchanged": 9600}  # requests of the second half that a bound is told of


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged(Setting):
    """Prompts as long as the trace's answers, and answers as long as its prompts."""

    def requests(self, first: int, load: float) -> Iterable[TraceRequest]:
        for r in Setting.requests(self, first, load):
            prompt, output = r.output_tokens, min(r.prompt_tokens, LONGEST_ANSWER)
            yield replace(r, prompt_tokens=prompt, output_tokens=output, slo_class=length_class(prompt), content=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Shifting(Setting):
    """`kinds`: by name, and where in its trace each begins. `num_pieces`, of `piece_s` seconds each."""

    kinds: dict[str, tuple[Setting, int]]
    num_pieces: int
    piece_s: float = PIECE_S

    def requests(self, first: int, load: float) -> Iterator[TraceRequest]:
        """`load`: of each kind's bound."""
        come = {
            name: endless(list(kind.requests(begin, load * _bound(kind, begin))))
            for name, (kind, begin) in self.kinds.items()
        }
        waiting: dict[str, tuple[float, TraceRequest]] = {}
        passed = dict.fromkeys(come, 0.0)  # of each kind's own time
        for number, name in zip(range(self.num_pieces), cycle(come), strict=False):
            until = passed[name] + self.piece_s
            at, request = waiting.pop(name) if name in waiting else next(come[name])
            while at < until:
                arrival_s = number * self.piece_s + at - passed[name]
                yield replace(request, arrival_s=arrival_s, request_id=f"{name} {request.request_id}")
                at, request = next(come[name])
            waiting[name], passed[name] = (at, request), until

    def kind(self, request: TraceRequest) -> str:
        return request.request_id.partition(" ")[0]

    def key(self) -> Json:
        kinds = {name: {**kind.key(), "first": begin} for name, (kind, begin) in self.kinds.items()}
        own = {name: value for name, value in asdict(self).items() if name not in ("kinds", "path")}
        return {**own, "kinds": kinds, "longest_answer": LONGEST_ANSWER}


@lru_cache(maxsize=8)
def _bound(kind: Setting, first: int) -> float:
    """The load at which the workers' time is used up by this kind."""
    return bounds(kind, first)[0]


def endless(requests: Sequence[TraceRequest]) -> Iterator[tuple[float, TraceRequest]]:
    """Yields the requests again and again, under other names, each with when it comes."""
    lasts_s = requests[-1].arrival_s * (1.0 + 1.0 / len(requests))
    for turn in count():
        for request in requests:
            again = replace(request, request_id=f"{request.request_id} {turn}") if turn else request
            yield turn * lasts_s + request.arrival_s, again


def shifting(mooncake: Path | None, azure: Path | None, tpot_s: float, num_pieces: int, piece_s: float) -> Shifting:
    """A shifting load made of the reported halves of both traces, or of drawn requests where there are none."""
    one = Setting(trace="mooncake", path=mooncake, num_requests=_NUM_IN_BOUND["conversations"], tpot_s=tpot_s)
    other = Exchanged(trace="azure", path=azure, num_requests=_NUM_IN_BOUND["exchanged"], tpot_s=tpot_s)
    kinds: dict[str, tuple[Setting, int]] = {"conversations": (one, 6015), "exchanged": (other, 9683)}
    return Shifting(
        trace="mooncake",
        path=None,
        num_requests=0,
        tpot_s=tpot_s,
        kinds=kinds,
        num_pieces=num_pieces,
        piece_s=piece_s,
    )


def measure(arguments: argparse.Namespace) -> Report:
    setting = shifting(
        arguments.mooncake, arguments.azure, arguments.tpot_ms / 1000, arguments.pieces, arguments.piece_s
    )
    kept = Kept(arguments.keep, arguments.time_s)
    choices = {"legato-auto": Layout(num_prefill=0, num_decode=SMALL)}
    for number in arguments.prefill or NUM_PREFILL:
        choices[f"legato {number}+{SMALL - number}"] = Layout(num_prefill=number, num_decode=SMALL - number)
    rows: dict[str, Report] = {}
    for load in arguments.load:
        for name, layout in choices.items():
            try:
                rows.setdefault(name, {})[f"{load:g}"] = _count(kept, setting, name.split()[0], layout, load)
            except TimeUpError:
                note(f"{name} at {load:g}: no time left")
            else:
                note(f"{name} at {load:g}: {rows[name][f'{load:g}']}")
    highest = {
        name: max((float(load) for load, found in row.items() if found["serves"]), default=0.0)
        for name, row in rows.items()
    }
    fixed = {name: load for name, load in highest.items() if name != "legato-auto"}
    best = max(fixed, key=lambda name: fixed[name], default=None)
    return {
        "load": "share of the bound of each kind",
        "counting": f"{SHARES[HEADLINE]:g} of each length and tenant of each kind",
        "bounds": {name: round(_bound(kind, begin), 3) for name, (kind, begin) in setting.kinds.items()},
        "piece_s": setting.piece_s,
        "pieces": setting.num_pieces,
        "rows": rows,
        "highest_load": highest,
        "best_fixed": best,
        "ratio": round(highest["legato-auto"] / fixed[best], 3) if best and fixed[best] else None,
    }


def _count(kept: Kept, setting: Shifting, router: str, layout: Layout, load: float) -> Report:
    def find() -> Json:
        [result] = [
            asdict(found)
            for (_, counting), found in counted(setting, router, layout, load, 0).results().items()
            if counting == HEADLINE
        ]
        return result

    return kept.find({**setting.key(), "router": router, "layout": asdict(layout), "load": load}, find)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scheduling.shifting",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_trace_paths(parser)
    parser.add_argument("--tpot-ms", type=float, default=30.0, help="promised mean; default: %(default)s")
    parser.add_argument("--load", type=float, action="append", required=True, help="share of the bound of each kind")
    parser.add_argument("--prefill", type=int, action="append", help=f"of the fixed layouts; default: {NUM_PREFILL}")
    parser.add_argument("--pieces", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--piece-s", type=float, default=PIECE_S, help="default: %(default)s")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="of what was found, to go on from")
    parser.add_argument("--time-s", type=float, default=math.inf, help="after which nothing is begun; default: no end")
    return parser.parse_args()


if __name__ == "__main__":
    chosen = _arguments()
    run_part("shifting", lambda: measure(chosen))
