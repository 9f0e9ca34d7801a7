"""The reports of `goodput` and `decisions` as tables, and the numbers that aims are set for."""

from __future__ import annotations

from typing import Final

from benchmarks.cells import Report, table, tail
from benchmarks.summary import Json

# The benchmark's own report, and those of runs with other options, stored by hand (100 ms, 8B, where not named).
GOODPUT: Final = (
    "goodput",
    "goodput_mooncake",
    "goodput_azure",
    "goodput_64",
    "goodput_64_azure",
    "goodput_70b",
    "goodput_70b_azure",
    "goodput_20ms",
    "goodput_30ms",
    "goodput_split",
)
_OUTCOMES = ("placed", "waiting", "rejected")


def goodput_tables(results: Report) -> str:
    target = f"{results['targets']}; TTFT at least {results['stretch']:g} times an idle worker's."
    return "\n".join([target + "\n", *(_setting(line) for line in results["settings"])])


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


def _whole_trace(simulated: Report) -> str:
    return (
        f"\n{simulated['num_requests']} requests ({simulated['requests']}) on {simulated['workers']}: simulated in"
        f" {simulated['cpu_s']:g} s of CPU time and {simulated['memory_mib']:g} MiB.\n"
    )


def _name(line: Report) -> str:
    return f"{line['trace']} ({line['source']}), {line['model']}, {line['workers']} workers"


def _setting(line: Report) -> str:
    best = line["routers"][line["best_baseline"]]["highest_load"]
    mean = sum(best) / len(best)
    rows: list[list[object]] = [
        [
            router,
            found["layout"],
            ", ".join(_loads(found, line.get("resolution", 1.0))),
            f"{sum(found['highest_load']) / len(found['highest_load']) / mean:.2f}" if mean else "",
        ]
        for router, found in line["routers"].items()
    ]
    columns = [_name(line), "prefill + decode", f"highest load, slices of {line['requests']}", "of the best baseline"]
    parts = [table(columns, rows), _beside(line), _by_class(line["by_class"])]
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
    all_served, cheapest = ([f"{pair[which]:.2f}" for pair in line["bounds"]] for which in (0, 1))
    given = ", ".join(line.get("given_layouts", ()))
    return (
        (f"Layouts given, not looked for: {given}. " if given else "")
        + f"Loads to within {line['resolution']:.1%}. Times the best baseline, slice by slice: {ratios}. The workers'"
        f" time would be used up at {', '.join(all_served)} with everyone served, at {', '.join(cheapest)} with the"
        " nine tenths that take the least.\n"
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
