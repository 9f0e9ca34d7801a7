"""The reports of `goodput` and `decisions` as tables, and the numbers that aims are set for."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Final

from benchmarks.common.summary import Json
from benchmarks.report.cells import Report, table, tail

# The benchmark's own report, and those of runs with other options, stored by hand (100 ms, 8B, where not named).
GOODPUT: Final = (
    "goodput",
    "goodput_mooncake",
    "goodput_azure",
    "goodput_64",
    "goodput_64_azure",
    "goodput_70b",
    "goodput_70b_azure",
    "goodput_70b_64",
    "goodput_70b_64_azure",
    "goodput_20ms",
    "goodput_30ms",
    "goodput_split",
)
AIM: Final = 1.3  # times what the best baseline serves
_OUTCOMES = ("all", "placed", "waiting", "rejected")


def goodput_tables(results: Report) -> str:
    target = f"{results['targets']}; TTFT at least {results['stretch']:g} times an idle worker's."
    return "\n".join([target + "\n", *(_setting(line) for line in results["settings"])])


def goodput_overview(reports: Iterable[Report]) -> str:
    """A line for each setting whose bounds are known: how much more than the best baseline could be served at all."""
    lines = [line for results in reports for line in results["settings"] if "bounds" in line]
    columns = [
        *("means over slices", "a slice", "loads to within", "Legato", "the best baseline"),
        *("times as much", "bound, cheapest nine tenths", "bound, times the best baseline", f"{AIM:g} times it"),
    ]
    return _OVERVIEW + "\n" + table(columns, [_overview_row(line) for line in lines])


_OVERVIEW: Final = (
    "What the workers have time for is a bound for every router: the load at which their time is used up with the nine"
    " tenths of the requests that take the least, everybody's steps as full as TPOT allows, a prefix cache that forgets"
    " nothing, and nobody waiting. Runs end, and what is left to decode then competes with nobody: where arrivals last"
    " half a minute and more, a run can be beyond the bound by a tenth; where they do not, it says little.\n"
)


def _overview_row(line: Report) -> list[object]:
    best = line["best_baseline"]
    own, other = (fmean(line["routers"][router]["highest_load"]) for router in (next(iter(line["ratio"])), best))
    bound = fmean(cheapest for _, cheapest in line["bounds"])
    within_reach = "is within the bound" if AIM * other <= bound else f"is {AIM * other / bound:.2f} times the bound"
    return [
        *(_name(line), f"{line['requests']} requests in {fmean(line['spans_s']) / own:.0f} s"),
        *(f"{line['resolution']:.0%}", f"{own:.2f}"),
        *(f"{other:.2f} ({best})", f"**{own / other:.2f}**" if own < AIM * other else f"{own / other:.2f}"),
        *(f"{bound:.2f}", f"{bound / other:.2f}", within_reach),
    ]


def goodput_headline(results: Report) -> Json:
    return {_name(line): line["ratio"] for line in results["settings"]}


def decisions_table(results: Report) -> str:
    rows: list[list[object]] = [
        [name, tail(results[name]), tail(results[name]["wall"]), results[name]["samples"]]
        for name in _OUTCOMES
        if name in results
    ]
    sizes = f"{results['workers']} workers, {results['blocks']} blocks"
    decisions = table([sizes, "P50 / P99 of processor time, ms", "on the wall", "decisions"], rows)
    return decisions + _whole_trace(results["simulated"])


def decisions_headline(results: Report) -> Json:
    """Placed ones' where it was stored before all were told together."""
    return {"p99_ms": results["all" if "all" in results else "placed"]["p99"]}


def _whole_trace(simulated: Report) -> str:
    return (
        f"\n{simulated['num_requests']} requests ({simulated['requests']}) on {simulated['workers']}: simulated in"
        f" {simulated['cpu_s']:g} s of CPU time and {simulated['memory_mib']:g} MiB.\n"
    )


def _name(line: Report) -> str:
    return f"{line['trace']} ({line['source']}), {line['model']}, {line['workers']} workers"


def _setting(line: Report) -> str:
    best = line["routers"][line["best_baseline"]]["highest_load"]
    bound = fmean(cheapest for _, cheapest in line.get("bounds", [(0.0, 0.0)]))  # 0: stored before it was reported
    rows: list[list[object]] = [
        [
            router,
            found["layout"],
            ", ".join(_loads(found, line.get("resolution", 1.0))),
            *(f"{fmean(found['highest_load']) / whole:.2f}" if whole else "" for whole in (fmean(best), bound)),
        ]
        for router, found in line["routers"].items()
    ]
    if bound:
        rows.append(["(bound)", "", ", ".join(f"{cheapest:.2f}" for _, cheapest in line["bounds"]), "", "1.00"])
        rows[-1][3] = f"{bound / fmean(best):.2f}" if fmean(best) else ""
    columns = [
        *(_name(line), "prefill + decode", f"highest load, slices of {line['requests']}"),
        *("of the best baseline", "of the bound"),
    ]
    parts = [table(columns, rows), _beside(line)]
    if line["by_class"]:
        parts.append(_by_class(line["by_class"]))
    if line["overload"]:
        parts.append(_overload(line["overload"]))
    return "\n".join(parts)


def _loads(found: Report, resolution: float) -> list[str]:
    """A range where it was not looked for as closely as others."""
    lows: list[float] = found["highest_load"]
    highs: list[float] = found.get("not_served", lows)
    return [
        f"{low:.2f}–{high:.2f}" if high > 1.01 * (1.0 + resolution) * low else f"{low:.2f}"
        for low, high in zip(lows, highs, strict=True)
    ]


def _beside(line: Report) -> str:
    if "bounds" not in line:  # stored before they were reported
        return ""
    ratios = ", ".join("–" if ratio is None else f"{ratio:.2f}" for ratio in line["ratio_by_slice"])
    all_served = ", ".join(f"{everyone:.2f}" for everyone, _ in line["bounds"])
    bests = zip(
        *(found["highest_load"] for name, found in line["routers"].items() if name not in line["ratio"]), strict=True
    )
    aims = ", ".join(f"{AIM * max(loads) / most:.2f}" for loads, (_, most) in zip(bests, line["bounds"], strict=True))
    given = ", ".join(line.get("given_layouts", ()))
    return (
        (f"Layouts given, not looked for: {given}. " if given else "")
        + f"Loads to within {line['resolution']:.1%}. Times the best baseline, slice by slice: {ratios}. The workers'"
        f" time would be used up at {all_served} with everyone served, at the bound with the nine tenths that take the"
        f" least; {AIM:g} times the best baseline would be {aims} times the bound.\n"
    )


def _by_class(found: Report) -> str:
    routers = [name for name in found if name != "load"]
    rows: list[list[object]] = [
        [name, num_requests, *(f"{found[router][name][1]:.1%}" for router in routers)]
        for name, (num_requests, _) in found[routers[0]].items()
    ]
    return table([f"in time at load {found['load']:g}, prompts", "requests", *routers], rows)


def _overload(found: list[Report]) -> str:
    rows: list[list[object]] = [
        [
            f"{row['times_capacity']:g} times the highest load",
            f"{row['goodput']:.2f}",
            row["came_back"],
            "" if row["came_back_in_time"] is None else f"{row['came_back_in_time']:.1%}",
        ]
        for row in found
    ]
    return table(["overload", "in time per second", "came back", "of them in time"], rows)
