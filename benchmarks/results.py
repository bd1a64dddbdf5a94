"""Figures that the parts of docs/benchmarks.md are made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from echelon.bench.throughput import ThroughputResult

Cells = dict[str, dict[str, Any]]


PUBLISHED = {1: 1.00, 2: 1.09, 4: 1.25, 8: 1.59, 16: 1.97, 24: 2.14}  # EMS / vanilla, OPT-6.7B, LLMA, Table 2 of EMS-SD


def results_of(cells: Cells, prefix: str) -> list[ThroughputResult]:
    return [ThroughputResult(**r) for name, cell in cells.items() if name.startswith(prefix) for r in cell.get("results", [])]


def plain_speed(results: list[ThroughputResult]) -> dict[int, float]:
    return {r.batch_size: r.decode_median for r in results if r.method == "plain"}


def by_batch(results: list[ThroughputResult], method: str) -> list[ThroughputResult]:
    return sorted((r for r in results if r.method == method), key=lambda r: r.batch_size)


def tokens_per_step(results: list[ThroughputResult]) -> str:
    values = [r.tokens_per_step for r in results]
    return f"{min(values):.2f}" if max(values) - min(values) < 0.005 else f"{min(values):.2f} to {max(values):.2f}"


def picture(plots: Path, name: str, text: str, draw: Any) -> str:
    """Draw the picture, and refer to it."""
    draw(plots / f"{name}.png")
    return f"![{text}](plots/{name}.png)"
