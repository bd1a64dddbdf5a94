"""What docs/benchmarks.md says of a CUDA device, and what `scripts/gpu_check.sh` prints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.cells import Record, Records
from benchmarks.claims_of_padding import LAUNCHED, SPEED_UPS
from benchmarks.document_parts import PUBLISHED
from echelon.bench.report import described, table
from echelon.bench.throughput import ThroughputResult

Line = list[Any]  # what, measured, goal, and whether it holds; None where nothing is asked
VERDICTS = {True: "holds", False: "**misses**", None: "–"}
PADDINGS = {"padded": "vanilla", "padded-inputs": "unpad KV only", "padded-kv": "unpad inputs only", "unpadded": "EMS"}
ON_DEVICE = {  # by how the names of its cells begin
    "tests": "the tests that need a device",
    "equality": "equal texts in every dtype",
    "attention": "attention",
    "plain": "plain decoding's share of the memory's speed and the host's gaps",
    "table": "Table 2 at its own size",
    "transformers": "`transformers` beside it",
}


def gpu_table(names: Iterable[str], records: dict[str, Record]) -> tuple[str, bool]:
    """The lines of these cells, which `scripts/gpu_check.sh` prints, and whether all of them were measured and hold."""
    lines = [line for name in names for line in _lines(name, records.get(name))]
    verdicts = [holds for *_, holds in lines]
    minutes = sum(r["seconds"] for r in records.values()) / 60
    summary = f"{verdicts.count(True)} hold, {verdicts.count(False)} do not or were not measured; {minutes:.1f} min of measuring."
    rows = [(*line[:3], VERDICTS[line[3]]) for line in lines]
    return f"{table(['what', 'measured', 'goal', ''], rows)}\n\n{summary}", False not in verdicts


def _lines(name: str, record: Record | None) -> list[Line]:
    if record is None or "failed" in record:
        return [[name, "not measured" if record is None else f"failed: {record['failed']}", "", False]]
    return [[line[0] or name, *line[1:]] for line in _judged(name, record)]


def _judged(name: str, record: Record) -> list[Line]:
    """As the record says, but for ratios of speeds: by the speeds, since an older record may have judged others."""
    model, _, batch = name.removeprefix("table-").rpartition("-")
    if not name.startswith("table-") or "results" not in record:
        lines: list[Line] = record["lines"]
        return lines
    return table_lines(model, int(batch), [ThroughputResult(**r) for r in record["results"]])


def gpu_part(evidence: Path) -> list[str]:
    """Of the document; says so where no device has confirmed anything."""
    title = "## On a CUDA device"
    if not evidence.exists():
        return [
            title,
            "**Not measured yet.** Triton's interpreter and a simulated device test the kernels and the engine on the CPU; no GPU has "
            f"confirmed them, and no speed there is known. `scripts/gpu_check.sh` measures {', '.join(ON_DEVICE.values())}.",
        ]
    records = Records(evidence).read()
    places = dict.fromkeys(described(record["environment"]) for record in records.values())
    missing = [what for cell, what in ON_DEVICE.items() if not any(name.startswith(cell) for name in records)]
    rest = [f"Not measured yet: {', '.join(missing)}."] if missing else []
    tables = []
    for place in places:
        own = {name: record for name, record in records.items() if described(record["environment"]) == place}
        tables += [f"`scripts/gpu_check.sh` on {place}.", gpu_table(own, own)[0]]
    return [title, *tables, *rest]


def table_lines(name: str, batch: int, results: list[ThroughputResult]) -> list[Line]:
    """Speeds of all strategies; LLMA's unpadded ones beside the published."""
    speed = {(r.method, r.strategy): r.decode_median for r in results}
    plain, lines = speed["plain", "unpadded"], list[Line]()
    for method in ("replay LLMA", "replay draft model"):
        per_step = next(r.tokens_per_step for r in results if r.method == method and r.strategy == "unpadded")
        all_of_them = ", ".join(f"{PADDINGS[s]} {speed[method, s] / plain:.2f}" for s in PADDINGS if (method, s) in speed)
        what = f"{name}, batch {batch}, {method.removeprefix('replay ')} at {per_step:.2f} tokens a step"
        lines.append([f"{what}: × plain decoding ({plain:,.0f} tokens/s)", all_of_them, "", None])
        if method == "replay LLMA":
            goals = [("unpadded / plain", speed[method, "unpadded"] / plain, SPEED_UPS.get(batch))]
            if launched := speed.get((LAUNCHED, "unpadded")):
                goals.append(("unpadded / padded, both without graphs", launched / speed[method, "padded"], PUBLISHED.get(batch)))
            lines += [
                [f"{what}: {ratio}", f"{value:.2f}", f"≥ {published}", value >= published]
                for ratio, value, published in goals
                if published is not None
            ]
    return lines
