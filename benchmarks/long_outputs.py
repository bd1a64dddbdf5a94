"""Long texts: is speculation still right, and still faster, at their end? `python -m benchmarks.long_outputs [PREFIX ...]`.

The embedded target grown, its context raised to what is asked for (texts beyond 2,048 tokens mean nothing, and are as long to compute and
as easy to compare as others), with its draft model.

bBB  B rows of 4,096 new tokens: rows equal to plain decoding to the last token, the first one to plain decoding alone; the speed of plain
     decoding and of drafts as long as the engine decides, step by step in turn, and tokens a step, by quarter of the tokens that are there
     when the first row ends: rows that draft come to their ends apart, and a step of fewer rows is no faster decoding; and the most bytes
     of keys and values
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

from benchmarks.cells import Cell, Record, asked_of, run_with_settings, said
from benchmarks.workloads import Models, Size, greedy
from echelon import LLM, ConfigError
from echelon.bench.inflate import inflate, plan_growth
from echelon.bench.latency import sequence_of
from echelon.bench.report import columns
from echelon.bench.throughput import Stepping, ended, in_turn
from echelon.bench.workloads import code_prompts
from echelon.demo import DRAFT, TARGET, held_out_files
from echelon.model.load.loading import LoadedModel, adopt_model, load_plain

BATCHES, QUARTERS, PROMPT = (1, 8), 4, 64
DRAFTED = {"method": "draft_model"}
HOW = {"drafts": "auto", "quarters": "until the first row ends, in turn"}  # records that lack it were measured otherwise


class Step(NamedTuple):
    """A step of all rows: tokens of all texts before it, and those that it emitted, in how many seconds."""

    before: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class LongRun:
    """Texts, the steps of all rows that read no prompt, and the most bytes of keys and values."""

    texts: list[list[int]]
    steps: list[Step]
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
        plain, drafted = in_turn({name: self._run(how, prompts) for name, how in (("plain", None), ("drafted", DRAFTED))}).values()
        said("both are decoded")
        expected = plain.texts if batch == 1 else [*ended(self._run(None, prompts[:1])).texts, *plain.texts[1:]]
        together = min(run.steps[-1].before + run.steps[-1].tokens for run in (plain, drafted))
        speeds = [by_quarter(run.steps, together) for run in (plain, drafted)]
        return {
            "num_rows": len(prompts),
            "num_exact": sum(a == b for a, b in zip(drafted.texts, expected, strict=True)),
            "plain": [own.speed for own in speeds[0]],
            "speed": [own.speed for own in speeds[1]],
            "tokens_per_step": [own.a_step / batch for own in speeds[1]],
            "tokens_a_row": together / batch,
            "kv_bytes": [plain.kv_bytes, drafted.kv_bytes],
        }

    def _run(self, config: dict[str, Any] | None, prompts: list[list[int]]) -> Stepping[LongRun]:
        draft = self.draft if config else None
        llm = LLM(self.target, config, draft, max_num_seqs=len(prompts), enable_prefix_caching=False)
        with llm.exclusive() as engine:
            rows = [sequence_of(llm, row, prompt, greedy(self.tokens)) for row, prompt in enumerate(prompts)]
            for row in rows:
                engine.add(row)
            steps = list[Step]()
            while engine.has_work:
                before, is_whole = sum(r.num_output_tokens for r in rows), all(r.num_output_tokens and not r.is_finished for r in rows)
                start = time.perf_counter()
                engine.step()
                seconds = time.perf_counter() - start
                if is_whole:
                    steps.append(Step(before, sum(r.num_output_tokens for r in rows) - before, seconds))
                yield
        return LongRun([r.output_tokens for r in rows], steps, llm.stats.target.largest_kv_bytes_reserved)


class Quarter(NamedTuple):
    """Tokens a second and a step, of all rows together."""

    speed: float
    a_step: float


def by_quarter(steps: SequenceOf[Step], tokens: int) -> list[Quarter]:
    """Of the steps that begin in each quarter of so many tokens.

    Raises
    ------
    ConfigError  none does: texts are too short
    """
    quarters: list[list[Step]] = [[] for _ in range(QUARTERS)]
    for step in steps:
        if step.before < tokens:
            quarters[step.before * QUARTERS // tokens].append(step)
    if not all(quarters):
        raise ConfigError("a quarter of the tokens has no step; take longer texts")
    emitted = [sum(step.tokens for step in own) for own in quarters]
    return [Quarter(t / sum(step.seconds for step in own), t / len(own)) for t, own in zip(emitted, quarters, strict=True)]


def as_markdown(records: dict[str, Record]) -> str:
    """A line a cell."""

    def listed(key: str, form: str) -> Any:
        return lambda item: ", ".join(form.format(v) for v in item[1][key])

    return columns(
        records.items(),
        {
            "cell": lambda item: item[0],
            "equal": lambda item: f"{item[1]['num_exact']} of {item[1]['num_rows']}",
            "tokens of a row when the first one ends": lambda item: f"{item[1]['tokens_a_row']:,.0f}",
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
