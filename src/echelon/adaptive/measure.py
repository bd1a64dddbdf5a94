"""The costs of a model and its drafter on this machine, measured before the first request: a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from echelon.adaptive.cost_table import CostTable, thinned
from echelon.batch import Span
from echelon.drafters.base import Drafter, Rehearsing
from echelon.model.runner import Runner
from echelon.ops.sample import SampleRow, choose, raw_rows
from echelon.sampling import Sampler, SamplingParams

TOKENS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # of a pass
PER_ROW = 4  # new tokens of a row in such passes
ROUNDS = 3
LONG = 1024  # keys of a row whose reading is measured


def measured_costs(target: Runner[Any], drafter: Drafter, max_num_seqs: int) -> CostTable:
    """Costs of steps of the target and of drafting, as the medians of interleaved passes; nothing is left in the cache."""
    reach = min(TOKENS[-1], PER_ROW * max_num_seqs, PER_ROW * (target.cache.tables.capacity // (2 * PER_ROW)))
    widths = [n for n in TOKENS if n <= max(reach, 2)]
    passes = {n: _pass_over(target, n) for n in widths}
    step = thinned(widths, _medians([passes[n] for n in widths]))
    counts = [n for n in TOKENS if n <= max(2, max_num_seqs)]
    drafting = thinned(counts, _medians([_rehearsal(drafter, n) for n in counts])) if isinstance(drafter, Rehearsing) else None
    return CostTable(step=step, key_ms=_key_ms(target), place_ms=_place_ms(target.loaded.vocab_size), drafting=drafting)


def _rehearsal(drafter: Rehearsing, num_rows: int) -> Callable[[], object]:
    return lambda: drafter.rehearse(num_rows)


def _pass_over(target: Runner[Any], num_tokens: int, num_keys: int = 1) -> Callable[[], object]:
    """A pass over so many tokens, PER_ROW a row, of rows with so many keys."""

    def work() -> None:
        tables, rows = target.cache.tables, range(-(-num_tokens // PER_ROW))
        counts = [min(PER_ROW, num_tokens - PER_ROW * row) for row in rows]
        for row, count in zip(rows, counts, strict=True):
            tables.reserve(row, num_keys + count)
        target.run(target.pack([Span(row, num_keys, [0] * n, n, num_keys + 1, n - 1) for row, n in zip(rows, counts, strict=True)]))
        for row in rows:
            tables.release(row)

    return work


def _key_ms(target: Runner[Any]) -> float:
    """Milliseconds that a key of a row adds to a pass."""
    tables = target.cache.tables
    count = min(LONG, tables.capacity - PER_ROW, tables.max_tokens_per_row - PER_ROW)
    if count < 2:
        return 0.0
    short, long = _medians([_pass_over(target, 1), _pass_over(target, 1, count)])
    return max(0.0, long - short) / count


def _place_ms(vocab_size: int) -> float:
    """Milliseconds that drawing a token takes."""
    logits = raw_rows(torch.from_numpy(np.random.default_rng(0).standard_normal((4, vocab_size), np.float32)))
    samplers = [Sampler(SamplingParams(temperature=1.0, seed=i), i) for i in range(4)]
    rows = [SampleRow(sampler, line, [0]) for sampler, line in zip(samplers, logits, strict=True)]
    return _medians([lambda: choose(rows)])[0] / len(rows)


def _medians(works: list[Callable[[], object]]) -> list[float]:
    """Milliseconds of each of these, done by turns; the first turn is not counted."""
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(ROUNDS + 1):
        for work, times in zip(works, taken, strict=True):
            start = time.perf_counter()
            work()
            times.append((time.perf_counter() - start) * 1e3)
    return [max(float(np.median(times[1:])), 1e-6) for times in taken]
