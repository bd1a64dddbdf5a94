"""What a step costs besides the model: scheduling, packing, verifying, greedy sampling, settling.

The real engine runs on a model that returns prepared logits at once; its time is taken out. The drafter proposes a chain for every
row, of which a random part is right; or a head that returns prepared logits at once grows EAGLE-2's trees, of which next to nothing is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from echelon.batch import RaggedBatch
from echelon.draft import Draft, Verdict
from echelon.drafters.base import Drafter
from echelon.drafters.heads import AttachedHead, HeadDrafter
from echelon.engine import Engine
from echelon.heads.base import Head, HiddenStateName
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache
from echelon.model.runner import ModelRunner
from echelon.sampling import Sampler, SamplingParams
from echelon.scheduler import DraftLimits, Scheduler
from echelon.sequence import PlannedRow, Sequence
from echelon.stats import Usage
from echelon.trees import BestFirst

PROMPT_LENGTH = 256
NUM_STEPS = 120
TREE_NODES, TREE_TOP_K, TREE_DEPTH = 24, 10, 5  # as many nodes as EAGLE-1 verifies


@dataclass(frozen=True)
class Overhead:
    """Milliseconds a step, model excluded."""

    batch_size: int
    num_draft_tokens: int
    temperature: float
    median_ms: float
    largest_ms: float
    has_trees: bool = False


class PreparedRunner(ModelRunner):
    """Returns the first rows of fixed logits, and hidden states of one entry; `seconds` is what that took in the last step."""

    def __init__(self, cache: KVCache, logits: Tensor) -> None:
        self.cache, self._logits, self.seconds, self.usage = cache, logits, 0.0, Usage()

    def run(self, batch: RaggedBatch) -> tuple[Tensor, Tensor | None]:
        start = time.perf_counter()
        logits = self._logits[: len(batch.logit_rows)]
        self.seconds = time.perf_counter() - start
        return logits, torch.zeros(batch.num_tokens, 1)


class PreparedDrafter(Drafter):
    """Proposes what the prepared logits will say, up to a random place in each row."""

    hidden_state_names: tuple[str, ...] = ()

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

    def observe(self, rows: SequenceOf[PlannedRow], verdict: Verdict, hidden_states: Tensor | None) -> None: ...

    def forget(self, row: int) -> None: ...


class PreparedHead(Head):
    """Returns the first rows of fixed logits."""

    method: ClassVar[str] = "eagle"
    hidden_state_names: tuple[HiddenStateName, ...] = ("last",)

    def __init__(self, prepared: Tensor) -> None:
        super().__init__()
        self._prepared = prepared

    def encode(self, features: Tensor, tokens: Tensor, positions: Tensor, **step: Any) -> Tensor:  # noqa: ARG002
        return features

    def extend(self, states: Tensor, tokens: Tensor, positions: Tensor, depth: int, **step: Any) -> Tensor:  # noqa: ARG002
        return states.clone()

    def logits(self, states: Tensor, depth: int) -> Tensor:  # noqa: ARG002
        return self._prepared[: len(states)]


def tree_drafter(rng: np.random.Generator, batch_size: int, vocab_size: int) -> HeadDrafter:
    prepared = torch.from_numpy(rng.standard_normal((batch_size * TREE_TOP_K, vocab_size), np.float32))
    reader: Any = SimpleNamespace(names=PreparedHead.hidden_state_names)
    return HeadDrafter(AttachedHead(PreparedHead(prepared), reader, [], False), BestFirst(TREE_TOP_K, TREE_DEPTH), None)


def measure_overhead(
    batch_size: int, num_draft_tokens: int, temperature: float, vocab_size: int = 32_000, has_trees: bool = False
) -> Overhead:
    """Median and largest step of NUM_STEPS, after the prompts have been fed."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.standard_normal((batch_size * (1 + num_draft_tokens), vocab_size), np.float32))
    max_len = PROMPT_LENGTH + (NUM_STEPS + 2) * (num_draft_tokens + 1)
    tables = BlockTables(batch_size * (max_len // 16 + 1), 16, max_len // 16 + 1)
    runner = PreparedRunner(KVCache([], tables, torch.float32, torch.device("cpu")), logits)
    scheduler = Scheduler([tables], batch_size, batch_size * PROMPT_LENGTH, DraftLimits(num_draft_tokens, grows_trees=has_trees))
    drafter: Drafter = PreparedDrafter(logits.argmax(-1).tolist(), rng)
    engine = Engine(runner, tree_drafter(rng, batch_size, vocab_size) if has_trees else drafter, scheduler)
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
    return Overhead(batch_size, num_draft_tokens, temperature, statistics.median(milliseconds), max(milliseconds), has_trees)


def measure_all(has_trees: bool = False) -> list[Overhead]:
    """Chains, or trees of TREE_NODES tokens."""
    sizes = (TREE_NODES,) if has_trees else (0, 4)
    return [measure_overhead(b, k, t, has_trees=has_trees) for b in (8, 64) for k in sizes for t in (0.0, 0.8)]
