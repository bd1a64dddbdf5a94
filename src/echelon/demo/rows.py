"""A row of the demo's tables: one method at one batch size, prompts and decoding apart, with a limit of time."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from echelon import LLM, SamplingParams
from echelon.bench.framework import FrameworkRun
from echelon.bench.latency import sequence_of
from echelon.bench.throughput import Stepping
from echelon.sequence import Sequence

Prompts = SequenceOf[SequenceOf[int]]
OnTokens = Callable[[int], None]  # so many new tokens are there


@dataclass(frozen=True)
class DemoRow:
    """What came of a method at a batch size; `steps` and the tokens and seconds of decoding are those after all first tokens were there.

    step_ms  of the steps in which all rows of the batch ran
    """

    method: str
    batch_size: int
    outputs: list[list[int]]
    steps: int
    tokens: int
    seconds: float
    tokens_per_step: float  # of a row
    was_cut: bool = False
    step_ms: SequenceOf[float] = ()

    @property
    def spread(self) -> tuple[float, float]:
        """Quartiles of these, milliseconds."""
        low, high = np.percentile(self.step_ms, [25, 75]).tolist()
        return low, high

    @property
    def speed(self) -> float:
        """New tokens a second, prompts left out; 0 where nothing was decoded in time."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def num_identical(self, truth: Prompts) -> int:
        """Rows that equal plain decoding, of the first prompts of `truth`, as far as both came: on a busy machine that is cut too."""
        pairs = [(own, list(expected), min(len(own), len(expected))) for own, expected in zip(self.outputs, truth, strict=False)]
        return sum(own[:count] == expected[:count] for own, expected, count in pairs)


def engine_row(
    llm: LLM, method: str, prompts: Prompts, batch_size: int, params: SamplingParams, limit: float, on_tokens: OnTokens = lambda _: None
) -> Stepping[DemoRow]:
    """Generate for batches of prompts, for `limit` seconds of decoding at most; what happens between two steps takes no time."""
    outputs: list[list[int]] = []
    steps = tokens = row_steps = 0
    seconds, step_ms = 0.0, list[float]()
    with llm.exclusive() as engine:
        for first in range(0, len(prompts), batch_size):
            rows = [sequence_of(llm, first + i, prompt, params) for i, prompt in enumerate(prompts[first : first + batch_size])]
            for row in rows:
                engine.add(row)
            while not all(row.num_output_tokens for row in rows):
                engine.step()
                yield
            before = _count(rows)
            on_tokens(before)
            while engine.has_work and seconds < limit:
                known, running, start = _count(rows), sum(not row.is_finished for row in rows), time.perf_counter()
                engine.step()
                taken = time.perf_counter() - start
                step_ms += [1e3 * taken] if running == batch_size else []
                steps, row_steps, seconds = steps + 1, row_steps + running, seconds + taken
                on_tokens(_count(rows) - known)
                yield
            tokens += _count(rows) - before
            for row in rows:
                if not row.is_finished:
                    engine.abort(row)
            outputs += [row.tokens[row.num_prompt_tokens :] for row in rows]
    was_cut = any(len(o) < params.most_tokens for o in outputs)
    return DemoRow(method, batch_size, outputs, steps, tokens, seconds, tokens / row_steps if row_steps else 1.0, was_cut, step_ms)


def run_framework(model: PreTrainedModel, prompts: Prompts, batch_size: int, params: SamplingParams, limit: float) -> DemoRow:
    """The same by plain `generate` of `transformers` on left-padded batches."""
    run = FrameworkRun("transformers", model, batch_size, max_time=limit).run(prompts, params)
    tokens, seconds = run.decode
    was_cut = any(len(o) < params.most_tokens for o in run.outputs)
    return DemoRow("transformers", batch_size, run.outputs, round(tokens / batch_size), int(tokens), seconds, 1.0, was_cut)


def _count(rows: SequenceOf[Sequence]) -> int:
    return sum(row.num_output_tokens for row in rows)
