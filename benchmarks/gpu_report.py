"""The table of `scripts/gpu_check.sh`, and its part of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from echelon.bench.cells import Record, Records
from echelon.bench.report import described, table

VERDICTS = {True: "holds", False: "**misses**", None: "–"}


def gpu_table(names: Iterable[str], records: dict[str, Record]) -> tuple[str, bool]:
    """The lines of these cells, and whether all of them were measured and hold."""
    lines = [line for name in names for line in _lines(name, records.get(name))]
    verdicts = [holds for *_, holds in lines]
    seconds = sum(r["seconds"] for r in records.values())
    summary = f"{verdicts.count(True)} hold, {verdicts.count(False)} do not or were not measured; {seconds / 60:.1f} min of measuring."
    rows = [(*line[:3], VERDICTS[line[3]]) for line in lines]
    return f"{table(['what', 'measured', 'goal', ''], rows)}\n\n{summary}", False not in verdicts


def _lines(name: str, record: Record | None) -> list[list[Any]]:
    if record is None or "failed" in record:
        return [[name, "not measured" if record is None else f"failed: {record['failed']}", "", False]]
    return [[line[0] or name, *line[1:]] for line in record["lines"]]


def gpu_part(evidence: Path) -> list[str]:
    """Of the document; says so where no device has confirmed anything."""
    title = "## On a CUDA device"
    if not evidence.exists():
        return [
            title,
            "**Not measured yet.** Triton's interpreter and a simulated device test the kernels and the engine on the CPU; no GPU has "
            "confirmed them, and no speed there is known. `scripts/gpu_check.sh` measures in one run: equal texts in every dtype, Table 2 "
            "at its own size, plain decoding's share of the memory's speed and the host's gaps, attention, and `transformers` beside it.",
        ]
    records = Records(evidence).read()
    where = next(iter(records.values()))["environment"]
    return [title, f"`scripts/gpu_check.sh` on {described(where)}.", gpu_table(records, records)[0]]
