"""How one part of the benchmarks runs and reports: lines for people, then one line of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable

from benchmarks.common.provenance import provenance
from benchmarks.common.summary import Json


class GateError(Exception):
    """The results are wrong, so no speed may be reported."""


def note(text: str) -> None:
    """A line for whoever watches."""
    print(f"  {text}", flush=True)


def run_part(name: str, measure: Callable[[], Json]) -> None:
    """Measure, print the JSON line, exit: 0 for numbers, 1 for none. The one place where a part's errors end."""
    report: Json = {"part": name, **provenance()}
    started = time.perf_counter()
    try:
        report |= {"status": "ok", "results": measure()}
    except GateError as error:
        report |= {"status": "wrong", "reason": str(error)}
    except Exception as error:
        traceback.print_exc()
        report |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    report |= {
        "duration_s": round(time.perf_counter() - started, 1),
        "load_average_after": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(report, ensure_ascii=False), flush=True)
    sys.exit(report["status"] != "ok")
