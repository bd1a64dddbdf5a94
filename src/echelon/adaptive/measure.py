"""The costs of a model and its drafter on this machine, measured before the first request: a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any

import numpy as np
import torch

from echelon.adaptive.cost_table import CostTable, monotone
from echelon.batch import Span
from echelon.drafters.base import LevelDrafter
from echelon.model.runner import Runner
from echelon.ops.sample import SampleRow, choose, raw_rows
from echelon.sampling import Sampler, SamplingParams

TOKENS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # of a pass
PER_ROW = 4  # new tokens of a row in such passes
TURNS, LONG_TURNS = 4, 2  # of every pass at least; of one
LONG_MS = 250.0  # long
ALIKE = 1.1  # times the least time the next one may be: a single short turn on a busy machine would make what is next to it look dear
PATIENCE = 15.0  # seconds after which the least is taken as it is
LEAST_START = 0.1  # times a level is what the first takes besides: it can be corrected by a factor only if it is something
LONG = 1024  # keys of a row whose reading is measured


def reach_of(num_tokens: int) -> int:
    """The width of TOKENS up to which a table of steps of so many tokens is measured."""
    return next((n for n in TOKENS if n >= num_tokens), TOKENS[-1])


def measured_steps(target: Runner[Any], reach: int) -> CostTable:
    """Costs of steps of up to `reach` tokens, as far as the cache holds them, the least of interleaved passes; nothing is left in it."""
    tables, num_rows = target.cache.tables, _num_rows(target)
    widths = [n for n in TOKENS if n == 1 or (n <= reach and _is_held(target, _shares(n, num_rows)))]
    long = max(1, min(LONG, tables.capacity - 1, tables.max_tokens_per_row - 1))
    logits = raw_rows(torch.from_numpy(np.random.default_rng(0).standard_normal((PER_ROW, target.loaded.vocab_size), np.float32)))
    works: list[Callable[[], object]] = [
        *(partial(_pass, target, n, num_rows) for n in (*widths, 1)),
        partial(_pass, target, 1, 1, long),
        partial(choose, _drawing(logits)),
    ]
    *times, short, far, drawing = _least(works, _waiting(target))
    return CostTable(step=monotone(widths, times), key_ms=max(0.0, far - short) / long, place_ms=drawing / PER_ROW)


def with_drafting(table: CostTable, target: Runner[Any], drafter: LevelDrafter, reach: int) -> CostTable:
    """The table with costs of drafting a level for up to `reach` rows, as far as the cache holds them, and of the first after a step."""
    counts = [n for n in TOKENS if n <= min(reach, _num_rows(target, max(PER_ROW + 1, drafter.breadth)))]
    levels = _least([partial(drafter.rehearse, n) for n in counts], _waiting(target))
    after_step = _least([partial(drafter.rehearse, counts[0])], _waiting(target), partial(_pass, target, 1, 1))
    start_ms = max(LEAST_START * levels[0], after_step[0] - levels[0])
    return table.model_copy(update={"drafting": monotone(counts, levels), "start_ms": start_ms})


def pool_of(target: Runner[Any]) -> str:
    """How far the cache bounds what can be measured."""
    tables = target.cache.tables
    is_large = min(tables.capacity, tables.max_tokens_per_row) > LONG and _num_rows(target) == TOKENS[-1]
    return "a pool that bounds nothing" if is_large else f"{tables.num_blocks} blocks, {tables.max_tokens_per_row} tokens a row"


def _num_rows(target: Runner[Any], num_tokens: int = PER_ROW + 1) -> int:
    """Rows of so many tokens that the cache holds, as far as they are of use."""
    tables = target.cache.tables
    return max(1, min(TOKENS[-1], tables.num_blocks // max(1, tables.num_missing(0, num_tokens))))


def _shares(num_tokens: int, num_rows: int) -> list[int]:
    """Tokens of each row of a pass over so many."""
    per_row = max(PER_ROW, -(-num_tokens // num_rows))
    return [min(per_row, num_tokens - first) for first in range(0, num_tokens, per_row)]


def _is_held(target: Runner[Any], counts: list[int]) -> bool:
    """Whether the cache holds rows of so many tokens at once."""
    tables = target.cache.tables
    return max(counts) < tables.max_tokens_per_row and sum(tables.num_missing(0, count) for count in counts) <= tables.num_blocks


def _waiting(target: Runner[Any]) -> Callable[[], object]:
    return torch.cuda.synchronize if target.loaded.device.type == "cuda" else _nothing


def _pass(target: Runner[Any], num_tokens: int, num_rows: int, num_keys: int = 0) -> None:
    """A pass over so many tokens of rows with so many keys before them: PER_ROW a row, and more only where rows are lacking."""
    tables, counts = target.cache.tables, _shares(num_tokens, num_rows)
    for row, count in enumerate(counts):
        tables.reserve(row, num_keys + count)
    target.run(target.pack([Span(row, num_keys, [0] * n, n, num_keys + n) for row, n in enumerate(counts)]))
    for row in range(len(counts)):
        tables.release(row)


def _drawing(logits: Any) -> list[SampleRow]:
    samplers = [Sampler(SamplingParams(temperature=1.0, seed=i), i) for i in range(len(logits))]
    return [SampleRow(sampler, line, [0]) for sampler, line in zip(samplers, logits, strict=True)]


def _nothing() -> None:
    """A processor has done its work when a call returns."""


def _least(
    works: SequenceOf[Callable[[], object]],
    wait: Callable[[], object],
    prepare: Callable[[], object] = _nothing,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Milliseconds of each of these, the least of turns that go on until another was about as short; the first is not counted. `wait`
    returns when all that was asked for is done, and `prepare` comes before each.
    """
    taken: list[list[float]] = [[] for _ in works]
    works[0]()
    begin = clock()
    while any(waiting := [not _is_sure(times) for times in taken]):
        if clock() - begin > PATIENCE and all(len(times) > 1 for times in taken):
            break
        for work, times, is_waiting in zip(works, taken, waiting, strict=True):
            if not is_waiting:
                continue
            prepare()
            wait()
            start = clock()
            work()
            wait()
            times.append((clock() - start) * 1e3)
    return [max(min(times[1:]), 1e-6) for times in taken]


def _is_sure(times: SequenceOf[float]) -> bool:
    """Whether enough turns were taken, of which two were about as short."""
    counted = sorted(times[1:])
    enough = LONG_TURNS if counted and counted[0] > LONG_MS else TURNS
    return len(counted) >= enough and counted[1] <= ALIKE * counted[0]
