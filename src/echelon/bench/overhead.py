"""What a step costs besides the model: scheduling, packing, verifying, greedy sampling, settling.

The real engine runs on a model that returns prepared logits at once; its time is taken out. The drafter proposes a chain for every
row, of which a random part is right.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.batch import RaggedBatch
from echelon.draft import Draft
from echelon.engine import Engine
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache
from echelon.sampling import Sampler, SamplingParams
from echelon.scheduler import Scheduler
from echelon.sequence import PlannedRow, Sequence
from echelon.stats import Usage
from echelon.target.runner import ModelRunner
from echelon.verify import Verdict

PROMPT_LENGTH = 256
NUM_STEPS = 120


@dataclass(frozen=True)
class Overhead:
    """Milliseconds a step, model excluded."""

    batch_size: int
    num_draft_tokens: int
    temperature: float
    median_ms: float
    largest_ms: float


class PreparedRunner(ModelRunner):
    """Returns the first rows of fixed logits; `seconds` is what that took in the last step."""

    def __init__(self, cache: KVCache, logits: Tensor) -> None:
        self.cache, self._logits, self.seconds, self.usage = cache, logits, 0.0, Usage()

    def run(self, batch: RaggedBatch) -> tuple[Tensor, Tensor | None]:
        start = time.perf_counter()
        logits = self._logits[: len(batch.logit_rows)]
        self.seconds = time.perf_counter() - start
        return logits, None


class PreparedDrafter:
    """Proposes what the prepared logits will say, up to a random place in each row."""

    taps: tuple[str, ...] = ()

    def __init__(self, own: list[int], rng: np.random.Generator) -> None:
        self._own, self._rng = own, rng

    def propose(self, rows: SequenceOf[PlannedRow]) -> Draft:
        proposals, start = [], 0
        for row in rows:
            right = int(self._rng.integers(0, row.max_draft_tokens + 1))
            chain = self._own[start : start + row.max_draft_tokens]
            proposals.append([t if i < right else t ^ 1 for i, t in enumerate(chain)])
            start += 1 + row.max_draft_tokens
        return Draft.chains(proposals)

    def observe(self, rows: SequenceOf[PlannedRow], verdict: Verdict, taps: Tensor | None) -> None: ...

    def forget(self, row: int) -> None: ...


def measure_overhead(batch_size: int, num_draft_tokens: int, temperature: float, vocab_size: int = 32_000) -> Overhead:
    """Median and largest step of NUM_STEPS, after the prompts have been fed."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.standard_normal((batch_size * (1 + num_draft_tokens), vocab_size), np.float32))
    max_len = PROMPT_LENGTH + (NUM_STEPS + 2) * (num_draft_tokens + 1)
    tables = BlockTables(batch_size * (max_len // 16 + 1), 16, max_len // 16 + 1)
    runner = PreparedRunner(KVCache([], tables, torch.float32, torch.device("cpu")), logits)
    scheduler = Scheduler([tables], batch_size, batch_size * PROMPT_LENGTH, num_draft_tokens)
    engine = Engine(runner, PreparedDrafter(logits.argmax(-1).tolist(), rng), scheduler)
    params = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_len - PROMPT_LENGTH)
    for i in range(batch_size):
        prompt = rng.integers(0, vocab_size, PROMPT_LENGTH).tolist()
        engine.add(Sequence(i, prompt, PROMPT_LENGTH, Sampler(params, seed=i, num_prompt_tokens=PROMPT_LENGTH), frozenset(), max_len))
    engine.step()
    milliseconds = []
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        engine.step()
        milliseconds.append((time.perf_counter() - start - runner.seconds) * 1e3)
    return Overhead(batch_size, num_draft_tokens, temperature, statistics.median(milliseconds), max(milliseconds))


def measure_all() -> list[Overhead]:
    cases: list[dict[str, Any]] = [
        {"batch_size": b, "num_draft_tokens": k, "temperature": t} for b in (8, 64) for k in (0, 4) for t in (0.0, 0.8)
    ]
    return [measure_overhead(**case) for case in cases]
