"""Clover's result in its own form: tokens a second with trees of 4, over plain decoding and over Medusa, by batch, on two sizes.

`python -m benchmarks.clover [--rounds N] [PREFIX ...]` after `make heads`. The embedded target with its heads, grown; rows enter as others
finish. Trees are Clover's dynamic ones of 4 tokens for both heads, and beside them the trees that the engine chooses by itself ("auto").

small_bBB, large_bBB  the target grown to 300 million and to 1.1 billion parameters
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import cached_property, partial
from itertools import product
from typing import Any

from benchmarks.cells import Cell, Record, asked_of, run_with_settings, said
from benchmarks.workloads import Models, Size, greedy, source, trained_heads
from echelon.bench.report import table
from echelon.bench.throughput import DecodingMethod, ThroughputResult, measure

SIZES = {"small": 300_000_000, "large": 1_100_000_000}
BATCHES = (4, 8, 16, 24, 32, 48)
HEADS = ("clover", "medusa")
TREES: dict[str, dict[str, Any]] = {
    "4": {"tree": "dynamic", "num_speculative_tokens": 4},
    "auto": {"tree": "dynamic", "num_speculative_tokens": "auto"},
}
PROMPT = 64


class CloverStudy:
    """Both sizes with their heads, each grown when first asked for."""

    def __init__(self, rows: int, rounds: int, tokens: int) -> None:
        self.rows, self.rounds, self.tokens = rows, rounds, tokens

    @cached_property
    def models(self) -> dict[str, Models]:
        return {name: Models(Size(pair_parameters=parameters), HEADS) for name, parameters in SIZES.items()}

    def measured(self, size: str, batch: int) -> Record:
        """Plain decoding, and both heads with both trees, by turns."""
        target, folders = self.models[size].with_heads
        prompts = source(target, max(2 * batch, self.rows), PROMPT, is_ragged=False)
        methods = [DecodingMethod("plain", None)]
        methods += [DecodingMethod(f"{h}, {t}", {"method": h, "model": folders[h], **TREES[t]}) for h, t in product(HEADS, TREES)]
        results = measure(target, None, methods, prompts, greedy(self.tokens), batch, self.rounds, [], said)
        return {"rows": len(prompts), "results": [asdict(r) for r in results]}


def as_markdown(records: dict[str, Record]) -> str:
    """A line a cell: over plain decoding."""
    names = [f"{h}, {t}" for h, t in product(HEADS, TREES)]
    rows = []
    for cell, record in records.items():
        found = {r["method"]: ThroughputResult(**r) for r in record["results"]}
        plain = found["plain"].decode_median
        rows.append([cell, f"{plain:.1f}", *(f"{found[n].decode_median / plain:.2f} ({found[n].tokens_per_step:.2f})" for n in names)])
    return table(["cell", "plain, tokens/s", *(f"{n} (tokens a step)" for n in names)], rows)


def main(arguments: list[str] | None = None) -> int:
    """Measure the cells that have no record of these settings on this processor; 1 if one fails."""
    more: dict[str, dict[str, Any]] = {
        "--rows": {"type": int, "default": 48, "help": "prompts of a cell, at least, and two batches of them"},
        "--rounds": {"type": int, "default": 3},
        "--tokens": {"type": int, "default": 64, "help": "new tokens of a row"},
    }
    asked = asked_of(__doc__, "clover", more, arguments)
    study = CloverStudy(asked.rows, asked.rounds, asked.tokens)
    heads = trained_heads(HEADS)
    cells = [Cell(f"{size}_b{batch:02d}", partial(study.measured, size, batch), inputs=heads) for size, batch in product(SIZES, BATCHES)]
    return run_with_settings(asked, cells, {name: getattr(asked, name) for name in ("rows", "rounds", "tokens")}, as_markdown)


if __name__ == "__main__":
    sys.exit(main())
