"""Cells: measurements whose records are kept as soon as they are there, so that a run which was cut off goes on where it was."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.options import parser_of
from echelon.bench.report import described, write_json
from echelon.bench.throughput import environment
from echelon.errors import ConfigError

Record = dict[str, Any]  # what was measured, with settings, commit and machine; "failed": why nothing was


@dataclass(frozen=True)
class Cell:
    """A measurement by name; `seconds`: about how long it takes, 0 where nobody knows; `inputs`: digests of files that it reads and that
    may be others another time.
    """

    name: str
    measure: Callable[[], Record]
    seconds: float = 0.0
    inputs: Record = field(default_factory=dict)


@dataclass(frozen=True)
class Records:
    """Records by the names of their cells: in one file, or, where `path` is a folder, in a file each."""

    path: Path

    def read(self) -> dict[str, Record]:
        if self.path.suffix != ".json":
            return {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(self.path.glob("*.json"))}
        known: dict[str, Record] = json.loads(self.path.read_text("utf-8")) if self.path.exists() else {}
        return known

    def write(self, name: str, record: Record) -> None:
        """Keep one record, whole or not at all; what another run has written meanwhile stays."""
        is_one_file = self.path.suffix == ".json"
        path = self.path if is_one_file else self.path / f"{name}.json"
        write_json(path.with_suffix(".tmp"), self.read() | {name: record} if is_one_file else record).replace(path)


def chosen(cells: Iterable[Cell], prefixes: SequenceOf[str]) -> list[Cell]:
    """Those whose names begin so; all where no prefix is given."""
    return [cell for cell in cells if not prefixes or cell.name.startswith(tuple(prefixes))]


def run_cells(
    cells: SequenceOf[Cell],
    records: Records,
    common: Record,
    is_current: Callable[[str, Record], bool],
    seconds: float = inf,
    on_record: Callable[[str, Record], None] = lambda _, __: None,
) -> dict[str, Record]:
    """Measure every cell that has no current record, and begin none after `seconds`; returns the current records by name.

    A record is `common`, the cell's inputs, the seconds that it took, and what it measured. A cell that fails takes no other with it, and
    is tried again by the next run; what had been measured of it before stays.
    """
    kept = {name: record for name, record in records.read().items() if "failed" not in record}
    known = {
        c.name: kept[c.name]
        for c in cells
        if c.name in kept and kept[c.name].get("inputs", {}) == c.inputs and is_current(c.name, kept[c.name])
    }
    waiting = [cell for cell in cells if cell.name not in known]
    print(f"{len(cells) - len(waiting)} of {len(cells)} cells are measured already", flush=True)
    if any(cell.seconds for cell in waiting):
        print("to measure, and about how long each takes on two cores:", *(f"  {c.name:<20} {c.seconds:5.0f} s" for c in waiting), sep="\n")
    start = time.monotonic()
    for number, cell in enumerate(waiting):
        spent = time.monotonic() - start
        if spent >= seconds:
            print(f"out of time: {len(waiting) - number} cells are left for another run", flush=True)
            break
        print(f"[{number + 1}/{len(waiting)}] {cell.name}{_outlook(waiting, number, spent)}", flush=True)
        known[cell.name] = common | ({"inputs": cell.inputs} if cell.inputs else {}) | _measured(cell)
        if "failed" in known[cell.name] and cell.name in kept:
            print("  the record that there was of it stays", flush=True)
            continue
        records.write(cell.name, known[cell.name])
        on_record(cell.name, known[cell.name])
    return known


def asked_of(
    about: str | None, folder: str, more: Mapping[str, Mapping[str, Any]] | None = None, arguments: SequenceOf[str] | None = None
) -> argparse.Namespace:
    """What a command that measures cells was asked: `prefixes` of their names, a folder `output` for records, and what it has besides."""
    asked = parser_of(
        about,
        {
            "prefixes": {"nargs": "*", "metavar": "PREFIX"},
            "--output": {"type": Path, "default": Path("docs/evidence") / folder},
            **(more or {}),
        },
    ).parse_args(arguments)
    asked.output.mkdir(parents=True, exist_ok=True)
    return asked


def run_asked(
    asked: argparse.Namespace, cells: Iterable[Cell], as_markdown: Callable[[dict[str, Record]], str] | None = None
) -> tuple[dict[str, Record], int]:
    """Measure what was asked for and has no record of this commit on this processor, and print the figures: they by name, and 1 if any cell
    failed.
    """
    common = {"environment": environment()}

    def is_current(_: str, record: Record) -> bool:
        return is_committed(record, common["environment"]["commit"]) and is_here(record, common["environment"])

    found = run_cells(chosen(cells, asked.prefixes), Records(asked.output), common, is_current)
    measured = {name: record for name, record in found.items() if "failed" not in record}
    if measured and as_markdown:
        print(f"On {described(common['environment'])}.\n\n{as_markdown(measured)}")
    return measured, int(len(measured) < len(found))


def run_with_settings(
    asked: argparse.Namespace,
    cells: Iterable[Cell],
    settings: Record,
    as_markdown: Callable[[dict[str, Record]], str],
    is_enough: Callable[[Record], bool] = lambda _: True,
) -> int:
    """Measure what was asked for and has no record of these settings on this processor that is enough, whatever the commit, and print the
    figures of all that is known of it; 1 if any cell failed.
    """
    where = environment()

    def is_current(_: str, record: Record) -> bool:
        return record.get("settings") == settings and is_here(record, where) and is_enough(record)

    found = run_cells(chosen(cells, asked.prefixes), Records(asked.output), {"settings": settings, "environment": where}, is_current)
    measured = {name: record for name, record in found.items() if "failed" not in record}
    if measured:
        places = dict.fromkeys(described(record["environment"]) for record in measured.values())
        print(f"On {'; on '.join(places)}.\n\n{as_markdown(measured)}")
    return int(len(measured) < len(found))


def is_committed(record: Record, commit: str) -> bool:
    """Whether a record is of this commit; of sources that are in none nobody knows."""
    return record["environment"]["commit"] == commit != "unknown" and not commit.endswith("+")


def is_here(record: Record, where: Mapping[str, str]) -> bool:
    """Whether a record is of this processor, with as many instructions and threads, where it says so."""
    return all(record["environment"].get(name, where[name]) == where[name] for name in ("cpu", "isa", "threads"))


def said(name: str) -> None:
    """A part of a cell is done."""
    print(f"  {name}", flush=True)


def _measured(cell: Cell) -> Record:
    start = time.monotonic()
    try:
        measured = cell.measure()
    except Exception as error:
        print(f"  failed: {error}", flush=True)
        if not isinstance(error, ConfigError):
            traceback.print_exc()
        measured = {"failed": f"{type(error).__name__}: {error}"}
    return {"seconds": round(time.monotonic() - start, 1)} | measured


def _outlook(cells: SequenceOf[Cell], number: int, spent: float) -> str:
    """How long the rest will take, at the pace of the cells before."""
    done, left = (sum(cell.seconds for cell in part) for part in (cells[:number], cells[number:]))
    pace = spent / done if done else 1.0
    return f", about {cells[number].seconds:.0f} s; {spent / 60:.1f} min so far, about {left * pace / 60:.0f} min to go" if left else ""
