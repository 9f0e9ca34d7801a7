"""`python -m benchmarks [part ...]`: run parts one after the other, each in a process of its own; all by default.
Options of a single part follow behind `--`: `python -m benchmarks goodput -- --model 70b`.

Stores each part's report in `benchmarks/results/`, writes the table beside them, prints one line of JSON at the end. A
part that fails is reported and the others still run; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time

from benchmarks.common.part import ROOT, Json, provenance
from benchmarks.common.quiet import PATIENCE_VARIABLE
from benchmarks.report.table import RESULTS, headline, write_table

# Each part's module, with options, and the seconds after which it is stopped: several times what it takes on two
# quiet cores.
PARTS = {
    "transports": ("benchmarks.transfer.transports", 240),
    "gateway": ("benchmarks.serving.gateway", 600),
    "startup": ("benchmarks.serving.startup", 600),
    "handoff": ("benchmarks.transfer.handoff", 300),
    "sampling": ("benchmarks.engine.sampling", 300),
    "grammars": ("benchmarks.engine.grammars", 600),
    "engine": ("benchmarks.engine.speed", 600),
    "experts": ("benchmarks.engine.experts", 900),
    "quantisation": ("benchmarks.engine.quantisation", 900),
    "speculation": ("benchmarks.engine.speculation", 1800),
    "draft_model": ("benchmarks.engine.draft_model", 900),
    "cluster": ("benchmarks.serving.cluster", 600),
    "eviction": ("benchmarks.scheduling.eviction", 180),
    "offload": ("benchmarks.engine.offload", 420),
    "prefix": ("benchmarks.engine.prefix", 300),
    "gaps": ("benchmarks.serving.gaps", 900),
    "adapters": ("benchmarks.serving.adapters", 900),
    "shown": ("benchmarks.serving.shown", 2400),
    "layerkv": ("benchmarks.serving.layerkv", 1800),
    "simulator_honesty": ("benchmarks.serving.simulator_honesty", 1200),
    "simulator_honesty_colocated": ("benchmarks.serving.simulator_honesty --layout colocated", 1200),
    "simulator_honesty_automatic": ("benchmarks.serving.simulator_honesty --layout automatic", 1200),
    "decisions": ("benchmarks.scheduling.decisions", 600),
    "goodput": ("benchmarks.scheduling.goodput", 7200),
    "model_swing": ("benchmarks.scheduling.model_swing", 3600),
}
STOP_TIMEOUT_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"any of {', '.join(PARTS)}; default: all")
    parser.add_argument(
        "--patience",
        type=int,
        default=60,
        metavar="SECONDS",
        help="how long each part may wait, in all, for other processes to let the cores alone; default: %(default)s",
    )
    parser.add_argument("--time-s", type=float, help="after which a part is stopped; default: several times the usual")
    own, options = split_options(sys.argv[1:])
    arguments = parser.parse_args(own)
    parts: list[str] = arguments.parts or list(PARTS)
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    if options and len(parts) != 1:
        parser.error("options behind -- are one part's: name that part alone")
    reports = [_run(part, arguments.patience, arguments.time_s or PARTS[part][1], options) for part in parts]
    write_table()
    failed = [report["part"] for report in reports if report["status"] != "ok"]
    print(json.dumps({"status": "failed" if failed else "ok", "failed": failed, "parts": headline()}), flush=True)
    return bool(failed)


def split_options(words: list[str]) -> tuple[list[str], list[str]]:
    """What is before `--`, and what is behind it."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _run(part: str, patience_s: int, time_s: float, options: list[str]) -> Json:
    """Run one part and store its report."""
    print(f"{part}:", flush=True)
    report = {"part": part, **provenance()}
    if options:
        report["options"] = " ".join(options)
    started = time.perf_counter()
    exit_code, last_line = _watch([*PARTS[part][0].split(), *options], patience_s, time_s)
    duration_s = round(time.perf_counter() - started, 1)
    report |= _understood(last_line, exit_code)
    report.setdefault("duration_s", duration_s)
    report.setdefault("load_average_after", round(os.getloadavg()[0], 2))
    if report["status"] != "ok":
        print(f"  {part} brought no numbers: {report['reason']}", flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{part}.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return report


def _watch(module: list[str], patience_s: int, time_s: float) -> tuple[int, str]:
    """Run it with its options, show what it says as it says it; its exit code and its last line. JSON is not shown."""
    process = subprocess.Popen(
        [sys.executable, "-m", *module],
        cwd=ROOT,
        env={**os.environ, PATIENCE_VARIABLE: str(patience_s)},
        text=True,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    timer = threading.Timer(time_s + patience_s, _stop, (process,))
    timer.start()
    last = ""
    assert process.stdout is not None
    for line in process.stdout:
        last = line
        if not line.startswith("{"):
            print(line, end="", flush=True)
    timer.cancel()
    return process.wait(), last


def _stop(process: subprocess.Popen[str]) -> None:
    """End a part whose time is up: it may end what it started, then it is killed with all of that."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def _understood(last_line: str, exit_code: int) -> Json:
    """What a part's last line reports."""
    try:
        found = json.loads(last_line)
    except ValueError:
        found = None
    if not isinstance(found, dict) or "status" not in found:
        return {"status": "failed", "reason": f"it ended with exit code {exit_code} and without a report"}
    return found


if __name__ == "__main__":
    sys.exit(main())
