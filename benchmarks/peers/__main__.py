"""`make bench-peers`: Legato beside its peers, in pieces of some minutes: same weights, requests and load generator.

    python -m benchmarks.peers                                   # all pieces
    python -m benchmarks.peers --pieces "bf16 int8" --rounds 1   # some, and merged with those that were stored before
    python -m benchmarks.peers --pieces bf16 --peers "vllm legato" --work one_stream   # a part of one, merged
    python -m benchmarks.peers --peers "llama.cpp legato" --work one_stream   # apart: peers_part.json and .svg
    python -m benchmarks.peers --prepare                         # install and convert everything, measure nothing
    python -m benchmarks.peers --records FILE                    # a piece that was broken off, from its records

Stores `benchmarks/results/peers.json` and `peers.svg` after each piece. Prints the tables and, last, one line of JSON.
Records are kept as they come, in `peers/records.jsonl` of the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common.part import Json, note, provenance
from benchmarks.peers.pieces import PART, PIECES, Piece, chosen, in_order, peers
from benchmarks.peers.report import piece_of
from benchmarks.peers.rounds import prepared, prepared_works, run_rounds
from benchmarks.peers.stored import Stored
from benchmarks.peers.works import GROUPS
from benchmarks.report.peers import peers_headline, peers_tables
from benchmarks.report.table import RESULTS
from kernels.cache_folder import default_cache_dir


def main() -> int:
    """Exit code 1 where something was not measured."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended on the way out
    pieces = chosen(arguments.pieces, arguments.peers, arguments.work)
    began_s = time.perf_counter()
    if arguments.prepare:
        return _prepare(pieces)
    if arguments.records:
        kept = Kept(arguments.records)
        stored = Stored(RESULTS, kept.name)
        stored.add(piece_of(kept.records, _told()))
    else:
        stored = Stored(RESULTS, "peers_part" if pieces[0].name == PART else "peers")
        for piece in pieces:
            stored.add(_measured(piece, arguments.rounds or piece.rounds))
    return _tell(stored.results, time.perf_counter() - began_s)


def _prepare(pieces: list[Piece]) -> int:
    wanted = {peer.name: peer for piece in pieces for peer in in_order(piece)}
    failures: list[Json] = []
    prepared_works([group for piece in pieces for group in piece.groups], failures.append)
    prepared(list(wanted.values()), failures.append)
    return bool(failures)


def _measured(piece: Piece, num_rounds: int) -> dict[str, Any]:
    kept = Kept(default_cache_dir() / "peers" / "records.jsonl", new=True)
    kept.add({"run": {"piece": piece.name, "rounds": num_rounds, **provenance()}})
    note(f"piece {piece.name}: {', '.join(piece.peers)}")
    began_s = time.perf_counter()
    run_rounds(in_order(piece), piece.groups, num_rounds, kept.add)
    duration_s = round(time.perf_counter() - began_s)
    kept.add({"run": {"duration_s": duration_s, "load_average_after": round(os.getloadavg()[0], 2)}})
    note(f"piece {piece.name} took {duration_s} s")
    return piece_of(kept.records, _told())


def _told() -> dict[str, str]:
    """What each peer says of itself, by name. Ask after the installation, which some of it depends on."""
    return {peer.name: peer.told for peer in peers()}


def _tell(results: dict[str, Any], lasted_s: float) -> int:
    print(peers_tables(results), flush=True)
    note(f"{lasted_s / 60:.1f} minutes in all")
    failures = sum(len(piece["failures"]) for piece in results["pieces"])
    told = {"status": "ok", "duration_s": round(lasted_s), "failures": failures, **peers_headline(results)}
    print(json.dumps(told), flush=True)
    return bool(failures)


class Kept:
    """Records in a file, a line each, so that a run that is broken off leaves what it measured."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if new:
            path.write_text("", encoding="utf-8")
        self.records: list[Any] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    @property
    def name(self) -> str:
        """The name of the report that its piece belongs to."""
        return "peers_part" if self.records[0]["run"]["piece"] == PART else "peers"

    def add(self, record: Json) -> None:
        self.records.append(record)
        with self._path.open("a", encoding="utf-8") as file:
            print(json.dumps(record, ensure_ascii=False), file=file)
        if "figures" in record:
            note(f"{record['peer']}, {record['work']}: {_brief(record['figures'])}")


def _brief(figures: Any) -> str:
    """The figures in one line, without what is pooled."""
    return ", ".join(f"{key} {value:.4g}" for key, value in figures.items() if not isinstance(value, list))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = {
        "pieces": [piece.name for piece in PIECES],
        "peers": [peer.name for peer in peers()],
        "work": list(GROUPS),
    }
    for what, names in known.items():
        told = f"separated by spaces, of {', '.join(names)}; default: all"
        parser.add_argument(f"--{what}", type=_some_of(names), default=(), metavar="NAMES", help=told)
    parser.add_argument("--rounds", type=int, help="starts of each peer; default: what the piece says")
    parser.add_argument("--prepare", action="store_true", help="install what is missing, and no more")
    parser.add_argument("--records", type=Path, metavar="FILE", help="report these records, and measure nothing")
    return parser.parse_args()


def _some_of(known: list[str]) -> Any:
    def parse(given: str) -> tuple[str, ...]:
        unknown = [name for name in given.split() if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; choose from {' '.join(known)}")
        return tuple(given.split())

    return parse


if __name__ == "__main__":
    sys.exit(main())
