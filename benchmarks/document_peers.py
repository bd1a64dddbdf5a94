"""The part of docs/benchmarks.md about other engines: what `echelon bench peers --output docs/evidence/peers/NAME.json` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.bench.peers import as_markdown
from echelon.bench.report import described
from echelon.bench.throughput import ThroughputResult


@dataclass(frozen=True)
class Run:
    """One call of `echelon bench peers`."""

    command: str
    environment: dict[str, Any]
    versions: dict[str, str]
    ours: list[ThroughputResult]
    theirs: list[ThroughputResult]


def read_runs(folder: Path) -> list[Run]:
    runs = []
    for path in sorted(folder.glob("*.json")):
        value = json.loads(path.read_text("utf-8"))
        ours, theirs = [ThroughputResult(**r) for r in value["ours"]], [ThroughputResult(**p["result"]) for p in value["peers"]]
        runs.append(Run(value["command"], value["environment"], value["versions"], ours, theirs))
    return runs


def peers_part(runs: SequenceOf[Run]) -> list[str]:
    if not runs:
        return []
    parts = ["## (e) Beside vLLM and OpenVINO GenAI", "The same prompts and the same model folder, greedy, bfloat16, a process each."]
    for run in runs:
        parts += [f"`{run.command}` on {described(run.environment)}:", as_markdown([*run.ours, *run.theirs], run.versions)]
    return parts


def peers_findings(runs: SequenceOf[Run]) -> list[str]:
    """Plain decoding against the faster plain one, our better drafter against their best mode, at every batch size."""
    lines = [line for run in runs for line in _comparisons(run)]
    return ["- Beside other engines (decoding speed, ours over the best of theirs):", *lines] if lines else []


def _comparisons(run: Run) -> Iterator[str]:
    for batch in sorted({r.batch_size for r in run.ours}):
        ours = {r.method: r for r in run.ours if r.batch_size == batch}
        theirs = [r for r in run.theirs if r.batch_size == batch]
        rivals = [r for r in theirs if r.method.endswith(", plain")]
        if "plain" in ours and rivals:
            yield _compared(f"batch {batch}, plain decoding", ours.pop("plain"), rivals)
        if ours and theirs:
            best = max(ours.values(), key=lambda r: r.decode_median)
            yield _compared(f"batch {batch}, best drafter (tokens_per_step {best.tokens_per_step:.2f})", best, theirs)


def _compared(what: str, ours: ThroughputResult, theirs: SequenceOf[ThroughputResult]) -> str:
    best = max(theirs, key=lambda r: r.decode_median)
    return f"  - {what}: {ours.method} {ours.decode_median / best.decode_median:.2f} × {best.method}"
