"""The reports of `goodput`, `decisions` and `model_swing` as tables, and the numbers that aims are set for."""

from __future__ import annotations

from typing import Final

from benchmarks.common.part import Json
from benchmarks.report.cells import Report, table, tail
from cluster.slo.countings import COUNTINGS, TOLD, Counting

# The benchmark's own report, and those of runs with other options, stored by hand.
GOODPUT: Final = (
    "goodput",
    "goodput_countings",
    "goodput_azure",
    "goodput_64",
    "goodput_70b",
)
_OUTCOMES = ("all", "placed", "waiting", "rejected")
_MISSED: Final = {
    "turned away": "turned away",
    "first token": "late with the first token",
    "mean": "slow in the mean",
    "gaps": "with late gaps",
}
_PROMISED: Final = {"tpot": "a mean of {ms:g} ms between tokens", "gap": "99 of 100 gaps within {ms:g} ms"}
_SWING_COUNTS: Final = ("turned_away", "changes", "moved")
OLD: Final = (
    "What was stored here before 2026-11-23 does not compare with what is measured now, and is gone. It counted 90 % of"
    " the requests alone. No published router ran without prefill workers or with limits of its own choice. Clients who"
    " were turned away had no second try. [The log](../../docs/log/goodput.md) has those figures.\n"
)


def goodput_tables(results: Report) -> str:
    """A table for each trace, cluster and promise: every counting side by side, the headline first."""
    countings: dict[str, float] = results["countings"]
    order = sorted(COUNTINGS, key=lambda counting: counting != results["headline"])
    return "\n".join([f"{results['targets']}.\n", *(_setting(line, order, countings) for line in results["settings"])])


def goodput_headline(results: Report) -> Json:
    return {
        _name(line): line["countings"][results["headline"]]["ratio"]
        for line in results["settings"]
        if results["headline"] in line["countings"]
    }


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


def swing_table(results: Report) -> str:
    rows: list[list[object]] = [
        [
            demand,
            row,
            results["in_time"][demand][row],
            f"{min(min(run['by_model'].values()) for run in runs):.1%}",
            *(f"{min(run[name] for run in runs)}–{max(run[name] for run in runs)}" for name in _SWING_COUNTS),
            len(runs),
        ]
        for demand, kept in results["runs"].items()
        for row, runs in kept.items()
    ]
    head = (
        f"{results['workers']} workers of one type, two models, {results['load']:.0%} of the workers' time in the mean,"
        f" a swing of {results['period_s']:g} s; changing a model takes {results['change_s']:g} s beside draining.\n\n"
    )
    columns = ["demand", "workers", "in time", "of the model served least", "turned away", "changes", "moved", "runs"]
    return head + table(columns, rows)


def swing_headline(results: Report) -> Json:
    return {name: rows["changing"] for name, rows in results["in_time"].items()}


def _whole_trace(simulated: Report) -> str:
    return (
        f"\n{simulated['num_requests']} requests ({simulated['requests']}) on {simulated['workers']}: simulated in"
        f" {simulated['cpu_s']:g} s of CPU time and {simulated['memory_mib']:g} MiB.\n"
    )


def _name(line: Report) -> str:
    workers = f"{line['trace']} ({line['source']}), {line['model']}, {line['workers']} workers"
    return f"{workers}, {_PROMISED[line['promise']].format(ms=line['target_ms'])}"


def _setting(line: Report, order: list[Counting], countings: dict[str, float]) -> str:
    found: dict[Counting, Report] = {
        counting: line["countings"][counting] for counting in order if counting in line["countings"]
    }
    routers = list(next(iter(found.values()))["routers"])
    columns = [_name(line), *(TOLD[counting].format(share=countings[counting]) for counting in found)]
    rows: list[list[object]] = [
        [router, *(_loads(each["routers"][router], best=each["best_baseline"] == router) for each in found.values())]
        for router in routers
    ]
    rows.append([f"{routers[0]}, times the best of the others", *map(_ratio, found.values())])
    for variant in next(iter(found.values())).get("ratio_to_variants", {}):
        ratios = (each["ratio_to_variants"].get(variant) for each in found.values())
        rows.append([f"times {variant}", *("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)])
    rows.append(["what it lacks at the next load", *(_lack(each["routers"][routers[0]]) for each in found.values())])
    everyone, cheapest = (sum(bound) / len(bound) for bound in zip(*line["bounds"], strict=True))
    told = (
        f"Highest loads, to within {line['resolution']:.0%}: median [least–most] of {len(line['runs'])} runs (slices of"
        f" {line['requests']} requests and seeds); behind each, what it was tuned to. The workers' time would be used"
        f" up at {everyone:.2f} with everyone served, at {cheapest:.2f} with the nine tenths that take the least.\n"
    )
    given = ", ".join(line["given_layouts"])
    parts = [table(columns, rows), told, f"Layouts given, not looked for: {given}.\n" if given else ""]
    if line["overload"]:
        parts.append(_overload(line["overload"]))
    return "\n".join(filter(None, parts))


def _loads(row: Report, *, best: bool) -> str:
    median = f"**{row['median']:.2f}**" if best else f"{row['median']:.2f}"
    return f"{median} [{row['least']:.2f}–{row['most']:.2f}]; {row['layout']}"


def _lack(row: Report) -> str:
    """What is lacking, of results that say it."""
    lacks = row.get("lacks")
    if not lacks or not lacks["misses"]:
        return "–"
    reasons = ", ".join(f"{count} {_MISSED[miss]}" for miss, count in lacks["misses"].items())
    return f"{lacks['least']}: {lacks['share']:.0%} in time; {reasons}"


def _ratio(found: Report) -> str:
    if found["ratio"] is None or found["ratio_by_run"] is None:
        return "–"
    spread = found["ratio_by_run"]
    return f"**{found['ratio']:.2f}** [{spread['least']:.2f}–{spread['most']:.2f} by run]"


def _overload(found: Report) -> str:
    rows: list[list[object]] = [
        [
            f"{row['load']:g}, {router}",
            f"{row['goodput']:.2f}",
            *(f"{share:.0%}" for share in row["shares"].values()),
            row["least"],
            row["came_back"],
            "" if row["came_back_in_time"] is None else f"{row['came_back_in_time']:.0%}",
        ]
        for router, each in found.items()
        if router != "load"
        for row in each
    ]
    shares = next(iter(each[0]["shares"] for router, each in found.items() if router != "load"))
    columns = ["load", "in time per second", *shares, "the least", "came back", "of them in time"]
    return table(columns, rows)
