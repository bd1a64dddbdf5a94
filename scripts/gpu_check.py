"""What must hold on a CUDA device, measured cell by cell, in one table: `scripts/gpu_check.sh [--fresh] [--minutes N] [PREFIX ...]`.

A cell's results go to docs/evidence/gpu_check.json as soon as they are there. One that was measured with the same settings and commit on
the same device is not measured again, so that a run which was cut off goes on where it was; none is begun after `--minutes`. Without a
CUDA device nothing is measured (exit 2); `--device cpu --small` runs the same code on tiny models, where speeds mean nothing. Exit 1:
something does not hold, or has not been measured.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers
from gpu_cells import SMALL, Cells, Size
from gpu_report import gpu_table

from echelon import ConfigError
from echelon.bench.report import described, write_json
from echelon.bench.throughput import environment
from echelon.ops.devices import chosen_device

EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence" / "gpu_check.json"
Record = dict[str, Any]


def same(record: Record, other: Record) -> bool:
    """Measured alike: settings, commit and device. Of a tree without history nobody knows."""
    commit = other["environment"]["commit"]
    return all(record[k] == other[k] for k in ("settings", "device")) and record["environment"]["commit"] == commit != "unknown"


def measure(cells: Cells, asked: list[str], known: Record, output: Path, deadline: float) -> dict[str, Record]:
    """Records of all cells that were measured so, by name; a cell that fails takes no other with it, and is tried again by the next run."""
    records: dict[str, Record] = json.loads(output.read_text("utf-8")) if output.exists() else {}
    records = {name: r for name, r in records.items() if same(r, known) and "failed" not in r}
    waiting = [name for name in asked if name not in records]
    print(f"{len(asked) - len(waiting)} of {len(asked)} cells are measured already", flush=True)
    for place, name in enumerate(waiting, 1):
        if time.monotonic() > deadline:
            print(f"out of time: {len(waiting) - place + 1} cells are left for another run", flush=True)
            break
        print(f"[{place}/{len(waiting)}] {name}", flush=True)
        start = time.monotonic()
        try:
            found = cells.all[name]()
        except Exception as error:
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}", "lines": [["", f"failed: {type(error).__name__}", "", False]]}
        records[name] = known | {"seconds": round(time.monotonic() - start, 1)} | found
        write_json(output, records)
        print(gpu_table([name], records)[0], flush=True)
    return records


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="PREFIX", help="measure only cells whose names begin so")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models and runs: does everything work?")
    parser.add_argument("--numerics", choices=("invariant", "fast"), default="invariant", help="of linear layers in EMS-SD's table")
    parser.add_argument("--minutes", type=float, default=8.5, help="begin no cell after these")
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured")
    parser.add_argument("--output", type=Path, default=EVIDENCE)
    asked = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * asked.minutes
    try:
        device = chosen_device(asked.device)
    except ConfigError as error:
        print(f"nothing was measured: {error}")
        return 2
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    cells = Cells(SMALL if asked.small else Size(), device, asked.numerics)
    where = environment()
    settings = json.loads(json.dumps(asdict(cells.size) | {"numerics": asked.numerics}))
    known = {"settings": settings, "device": where.get("gpu", "") if device.type == "cuda" else "cpu", "environment": where}
    names = [name for name in cells.all if not asked.cells or name.startswith(tuple(asked.cells))]
    if asked.fresh:
        asked.output.unlink(missing_ok=True)
    records = measure(cells, names, known, asked.output, deadline)
    text, holds = gpu_table(names, records)
    print(f"\n{described(where)}\n\n{text}")
    return 0 if holds else 1


if __name__ == "__main__":
    logging.getLogger("echelon").setLevel(logging.ERROR)  # replayed texts mean nothing, and nobody reads them
    sys.exit(main())
