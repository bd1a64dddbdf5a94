"""What the parts of docs/benchmarks.md share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from echelon.bench.throughput import ThroughputResult

Cells = dict[str, dict[str, Any]]


def results_of(cells: Cells, prefix: str) -> list[ThroughputResult]:
    return [ThroughputResult(**r) for name, cell in cells.items() if name.startswith(prefix) for r in cell.get("results", [])]


def plain_speed(found: list[ThroughputResult]) -> dict[int, float]:
    return {r.batch_size: r.decode_median for r in found if r.method == "plain"}


def by_batch(found: list[ThroughputResult], method: str) -> list[ThroughputResult]:
    return sorted((r for r in found if r.method == method), key=lambda r: r.batch_size)


def tokens_per_step(found: list[ThroughputResult]) -> str:
    values = [r.tokens_per_step for r in found]
    return f"{min(values):.2f}" if max(values) - min(values) < 0.005 else f"{min(values):.2f} to {max(values):.2f}"


def picture(plots: Path, name: str, text: str, draw: Any) -> str:
    """Draw the picture, and refer to it."""
    draw(plots / f"{name}.png")
    return f"![{text}](plots/{name}.png)"
