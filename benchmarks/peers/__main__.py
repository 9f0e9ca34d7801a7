"""`make bench-peers`: Legato beside its peers in one run: the same weights, requests and load generator, in turns.

    python -m benchmarks.peers --peers "llama.cpp legato" --work "one_stream prefill" --rounds 1
    python -m benchmarks.peers --prepare                # install and convert everything, measure nothing
    python -m benchmarks.peers --confirm                # adds the main rows as GuideLLM sees them to the last run's
    python -m benchmarks.peers --records FILE           # the report of records that were kept

Stores `benchmarks/results/peers.json` and `peers.svg`; of a part of the whole, `peers_part.json` and `peers_part.svg`.
Prints the tables and, last, one line of JSON. Records are kept as they come, in `peers/records.jsonl` of the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.part import note
from benchmarks.peers.confirm import confirm
from benchmarks.peers.peer import Peer
from benchmarks.peers.plots import plot_peers
from benchmarks.peers.registry import peers
from benchmarks.peers.report import results
from benchmarks.peers.rounds import prepared, run_rounds
from benchmarks.peers.works import GROUPS
from benchmarks.peers_table import peers_headline, peers_tables
from benchmarks.provenance import provenance
from benchmarks.summary import Json
from benchmarks.table import RESULTS, write_table
from kernels.cache_folder import default_cache_dir

ROUNDS = 3


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended on the way out
    known = {peer.name: peer for peer in peers()}
    chosen = [known[name] for name in _choice("peers", arguments.peers, list(known))]
    groups = _choice("work", arguments.work, list(GROUPS))
    kept = Kept(
        arguments.records or default_cache_dir() / "peers" / "records.jsonl",
        new=not (arguments.records or arguments.confirm or arguments.prepare),
    )
    if arguments.prepare:
        return len(chosen) != len(prepared(chosen, kept.add))
    if arguments.confirm:
        confirm(chosen, kept.add)
    elif not arguments.records:
        _run(chosen, groups, arguments.rounds, kept)
    whole = len(chosen) == len(known) and len(groups) == len(GROUPS)
    return _report(kept.records, chosen, "peers" if whole else "peers_part")


def _run(chosen: Sequence[Peer], groups: Sequence[str], num_rounds: int, kept: Kept) -> None:
    kept.add({"run": provenance()})
    began_s = time.perf_counter()
    run_rounds(chosen, groups, num_rounds, kept.add)
    duration_s = round(time.perf_counter() - began_s)
    kept.add({"run": {"duration_s": duration_s, "load_average_after": round(os.getloadavg()[0], 2)}})


def _report(records: Sequence[dict[str, Any]], chosen: Sequence[Peer], name: str) -> int:
    """Exit code 1 where something was not measured."""
    found = results(records, {peer.name: peer.told for peer in chosen})
    report: dict[str, Any] = {"part": "peers", "status": "ok", "duration_s": None, "load_average_after": None}
    for record in records:
        report |= record.get("run", {})
    report["results"] = found
    print(peers_tables(found), flush=True)
    plot_peers(found, RESULTS / f"{name}.svg")
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if name == "peers":
        write_table()
    print(json.dumps({"status": "ok", "failures": len(found["failures"]), **peers_headline(found)}), flush=True)
    return bool(found["failures"])


class Kept:
    """Records in a file, a line each, so that a run that is broken off leaves what it measured."""

    def __init__(self, path: Path, *, new: bool) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if new:
            path.write_text("", encoding="utf-8")
        self.records: list[Any] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def add(self, record: Json) -> None:
        self.records.append(record)
        with self._path.open("a", encoding="utf-8") as file:
            print(json.dumps(record, ensure_ascii=False), file=file)
        if "figures" in record:
            note(f"{record['peer']}, {record['work']}: {_brief(record['figures'])}")


def _brief(figures: Any) -> str:
    """Without what is pooled."""
    return ", ".join(f"{key} {value:.4g}" for key, value in figures.items() if not isinstance(value, list))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default="", metavar="NAMES", help="separated by spaces; default: all")
    parser.add_argument("--work", default="", metavar="NAMES", help=f"any of {', '.join(GROUPS)}; default: all")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="starts of each peer; default: %(default)s")
    parser.add_argument(
        "--confirm", action="store_true", help="ask servers by GuideLLM; added to the last run's records"
    )
    parser.add_argument("--prepare", action="store_true", help="install what is missing, and no more")
    parser.add_argument("--records", type=Path, metavar="FILE", help="report these records, and measure nothing")
    return parser.parse_args()


def _choice(what: str, given: str, known: list[str]) -> list[str]:
    unknown = [name for name in given.split() if name not in known]
    if unknown:
        raise SystemExit(f"--{what}: there is no {unknown[0]!r}; choose from {' '.join(known)}")
    return given.split() or known


if __name__ == "__main__":
    sys.exit(main())
