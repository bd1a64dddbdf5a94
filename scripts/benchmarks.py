"""docs/benchmarks.md with its plots: `python scripts/benchmarks.py [--small] [--output FOLDER] [PREFIX ...]`.

A cell is one batch size of one experiment. Its results go to evidence/benchmarks/CELL.json, with settings, commit and machine, as soon as
they are there; a cell that was measured with the same settings on the same machine is not measured again (delete its file to repeat it), so
that a run which was cut off goes on where it was. What matters most comes first. The document is written anew at the end of every run,
also of one that is stopped (Ctrl-C), and says which cells it misses.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers
from benchmarks_cells import SMALL, Bench, Cell, Size
from benchmarks_document import write_document

from echelon import ConfigError
from echelon.bench.report import write_json
from echelon.bench.throughput import environment

ROOT = Path(__file__).parents[1]


def is_done(path: Path, settings: dict[str, Any]) -> bool:
    """Measured with these settings on this machine."""
    if not path.exists():
        return False
    known = json.loads(path.read_text("utf-8"))
    return "skipped" not in known and known["settings"] == settings and known["environment"]["cpu"] == environment()["cpu"]


def listed(cells: dict[str, Cell]) -> str:
    lines = [f"  {name:<20} {cell.seconds:5.0f} s" for name, cell in cells.items()]
    return "\n".join(["to measure, and about how long each takes on two cores:", *lines, f"  {minutes(cells.values())} in all"])


def minutes(cells: Iterable[Cell], pace: float = 1.0) -> str:
    return f"about {sum(c.seconds for c in cells) * pace / 60:.0f} min"


def run_cells(bench: Bench, prefixes: list[str], settings: dict[str, Any]) -> int:
    """How many failed. `pace`: measured over estimated seconds so far."""
    asked = {n: c for n, c in bench.cells.items() if not prefixes or n.startswith(tuple(prefixes))}
    waiting = {n: c for n, c in asked.items() if not is_done(bench.folder / f"{n}.json", settings)}
    print(f"{len(asked) - len(waiting)} of {len(asked)} cells are measured already", flush=True)
    if waiting:
        print(listed(waiting), flush=True)
    start, estimated, num_failed = time.perf_counter(), 0.0, 0
    for place, (name, cell) in enumerate(waiting.items()):
        spent = time.perf_counter() - start
        left = minutes(list(waiting.values())[place:], spent / estimated if estimated else 1.0)
        print(f"[{place + 1}/{len(waiting)}] {name}, about {cell.seconds:.0f} s; {spent / 60:.1f} min so far, {left} to go", flush=True)
        num_failed += not measure_cell(bench.folder / f"{name}.json", cell, settings)
        estimated += cell.seconds
    return num_failed


def measure_cell(path: Path, cell: Cell, settings: dict[str, Any]) -> bool:
    """Whether it could be measured; a cell that fails takes no other with it, and is tried again by the next run."""
    before = time.perf_counter()
    try:
        found = cell.measure()
    except Exception as error:
        print(f"  failed: {error}", flush=True)
        if not isinstance(error, ConfigError):
            traceback.print_exc()
        found = {"skipped": f"{type(error).__name__}: {error}"}
    seconds = round(time.perf_counter() - before, 1)
    write_json(path, {"cell": path.stem, "settings": settings, "environment": environment(), "seconds": seconds, **found})
    return "skipped" not in found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="PREFIX", help="measure only cells whose names begin so")
    parser.add_argument("--small", action="store_true", help="tiny models and runs: does everything work?")
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help="folder of the document; evidence and plots lie below it")
    asked = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    bench = Bench(SMALL if asked.small else Size(), asked.output / "evidence" / "benchmarks")
    settings = json.loads(json.dumps(asdict(bench.size)))
    try:
        return 1 if run_cells(bench, asked.cells, settings) else 0
    except KeyboardInterrupt:
        return 130
    finally:
        print(f"wrote {write_document(asked.output, list(bench.cells), settings)}")


if __name__ == "__main__":
    logging.getLogger("echelon").setLevel(logging.ERROR)  # the document says that replayed texts mean nothing
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` stops a run as Ctrl-C does
    sys.exit(main())
