"""Long texts: is speculation still right, and still faster, at their end? `python -m benchmarks.long_outputs [PREFIX ...]`.

The embedded target grown, its context raised to what is asked for (texts beyond 2,048 tokens mean nothing, and are as long to compute and
as easy to compare as others), with its draft model.

bBB  B rows of 4,096 new tokens: rows equal to plain decoding to the last token, the first one to plain decoding alone; by quarter of the
     text the rows' speeds together, each over its own time in that quarter, plain and with drafts as long as the engine decides, and
     tokens a step; and the most bytes of keys and values
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, pairwise
from typing import Any, NamedTuple

from benchmarks.cells import Cell, Record, asked_of, run_with_settings, said
from benchmarks.workloads import Models, Size, greedy
from echelon import LLM
from echelon.bench.inflate import inflate, plan_growth
from echelon.bench.latency import sequence_of
from echelon.bench.report import columns
from echelon.bench.workloads import code_prompts
from echelon.demo import DRAFT, TARGET, held_out_files
from echelon.model.load.loading import LoadedModel, adopt_model, load_plain

BATCHES, QUARTERS, PROMPT = (1, 8), 4, 64
DRAFTED = {"method": "draft_model"}
HOW = {"drafts": "auto", "quarters": "of each row"}  # records that lack it are of fixed drafts, and of quarters of all that was emitted


class Mark(NamedTuple):
    """Where a row is: when, after how many tokens of its text, and in which step."""

    time: float
    tokens: int
    step: int


@dataclass(frozen=True)
class LongRun:
    """Texts; of each quarter of them the rows' tokens a second together, and tokens a step; bytes of keys and values at the most."""

    texts: list[list[int]]
    speed: list[float]
    tokens_per_step: list[float]
    kv_bytes: int


class LongOutputs:
    """Both models with room for long texts."""

    def __init__(self, parameters: int, tokens: int) -> None:
        self.parameters, self.tokens = parameters, tokens
        self.models = Models(Size(), [])

    def _with_context(self, folder: str, parameters: int) -> LoadedModel:
        plain, tokenizer = load_plain(folder)
        plain.config.max_position_embeddings = self.tokens + PROMPT + 16
        grown = inflate(plain, plan_growth(plain, parameters)) if parameters else plain
        return adopt_model(grown, tokenizer, f"{folder}, for long texts")

    @cached_property
    def target(self) -> LoadedModel:
        return self._with_context(str(TARGET), self.parameters)

    @cached_property
    def draft(self) -> LoadedModel:
        return self._with_context(str(DRAFT), 0)

    def prompts(self, batch: int) -> list[list[int]]:
        assert self.target.tokenizer is not None
        return code_prompts(self.target.tokenizer, held_out_files(), batch, PROMPT)

    def measured(self, batch: int) -> Record:
        """Plain and drafted; where the batch has several rows, the first one alone too."""
        prompts = self.prompts(batch)
        plain, drafted = (self._run(config, prompts) for config in (None, DRAFTED))
        said("both are decoded")
        expected = plain.texts if batch == 1 else [*self._run(None, prompts[:1]).texts, *plain.texts[1:]]
        return {
            "num_rows": len(prompts),
            "num_exact": sum(a == b for a, b in zip(drafted.texts, expected, strict=True)),
            "plain": plain.speed,
            "speed": drafted.speed,
            "tokens_per_step": drafted.tokens_per_step,
            "kv_bytes": [plain.kv_bytes, drafted.kv_bytes],
        }

    def _run(self, config: dict[str, Any] | None, prompts: list[list[int]]) -> LongRun:
        draft = self.draft if config else None
        llm = LLM(self.target, config, draft, max_num_seqs=len(prompts), enable_prefix_caching=False)
        with llm.exclusive() as engine:
            rows = [sequence_of(llm, row, prompt, greedy(self.tokens)) for row, prompt in enumerate(prompts)]
            for row in rows:
                engine.add(row)
            marks: list[list[Mark]] = [[] for _ in rows]
            for step in count():
                if not engine.has_work:
                    break
                engine.step()
                now = time.perf_counter()
                for row, own in zip(rows, marks, strict=True):
                    if len(own) <= QUARTERS and len(row.output_tokens) >= max(1, len(own) * self.tokens // QUARTERS):
                        own.append(Mark(now, len(row.output_tokens), step))
        speed, a_step = by_quarter(marks)
        return LongRun([r.output_tokens for r in rows], speed, a_step, llm.stats.target.largest_kv_bytes_reserved)


def by_quarter(marks: SequenceOf[SequenceOf[Mark]]) -> tuple[list[float], list[float]]:
    """The sum of the rows' tokens a second, and tokens a step, between one mark of a row and its next."""
    quarters = list(zip(*(pairwise(own) for own in marks), strict=True))
    speed = [sum((b.tokens - a.tokens) / (b.time - a.time) for a, b in rows) for rows in quarters]
    a_step = [sum(b.tokens - a.tokens for a, b in rows) / sum(b.step - a.step for a, b in rows) for rows in quarters]
    return speed, a_step


def as_markdown(records: dict[str, Record]) -> str:
    """A line a cell."""

    def listed(key: str, form: str) -> Any:
        return lambda item: ", ".join(form.format(v) for v in item[1][key])

    return columns(
        records.items(),
        {
            "cell": lambda item: item[0],
            "equal": lambda item: f"{item[1]['num_exact']} of {item[1]['num_rows']}",
            "plain, tokens/s by quarter": listed("plain", "{:.0f}"),
            "drafted": listed("speed", "{:.0f}"),
            "tokens a step": listed("tokens_per_step", "{:.2f}"),
            "keys and values, MiB": lambda item: f"{item[1]['kv_bytes'][1] / 2**20:.0f}",
        },
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure the cells that have no record of these settings on this processor; 1 if one fails."""
    more: dict[str, dict[str, Any]] = {
        "--parameters": {"type": int, "default": 1_100_000_000, "help": "that the embedded target is grown to; 0: as it is"},
        "--tokens": {"type": int, "default": 4096, "help": "new tokens of a row"},
    }
    asked = asked_of(__doc__, "long", more, arguments)
    study = LongOutputs(asked.parameters, asked.tokens)
    cells = [Cell(f"b{batch:02d}", partial(study.measured, batch)) for batch in BATCHES]
    return run_with_settings(asked, cells, {"parameters": asked.parameters, "tokens": asked.tokens, **HOW}, as_markdown)


if __name__ == "__main__":
    sys.exit(main())
