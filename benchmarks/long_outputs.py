"""Long texts: is speculation still right, and still faster, at their end? `python -m benchmarks.long_outputs [PREFIX ...]`.

The embedded target grown, its context raised to what is asked for (texts beyond 2,048 tokens mean nothing, and are as long to compute and
as easy to compare as others), with its draft model.

bBB  B rows of 4,096 new tokens: rows equal to plain decoding alone to the last token; speed by quarter of the text, plain and drafted;
     tokens a step by quarter; and the most bytes of keys and values
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

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
DRAFTED = {"method": "draft_model", "num_speculative_tokens": 4}


@dataclass(frozen=True)
class LongRun:
    """Texts, and of each quarter of them tokens a second and tokens a step; bytes of keys and values at the most."""

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
        """Plain and drafted, and each row alone where the batch has several."""
        prompts = self.prompts(batch)
        plain, drafted = (self._run(config, prompts) for config in (None, DRAFTED))
        said("both are decoded")
        alone = plain.texts if batch == 1 else [self._run(None, [p]).texts[0] for p in prompts]
        return {
            "num_rows": len(prompts),
            "num_exact": sum(a == b for a, b in zip(drafted.texts, alone, strict=True)),
            "plain": plain.speed,
            "speed": drafted.speed,
            "tokens_per_step": drafted.tokens_per_step,
            "kv_bytes": [plain.kv_bytes, drafted.kv_bytes],
        }

    def _run(self, config: dict[str, Any] | None, prompts: list[list[int]]) -> LongRun:
        draft = self.draft if config else None
        llm = LLM(self.target, config, draft, max_num_seqs=len(prompts), enable_prefix_caching=False)
        params, size = greedy(self.tokens), self.tokens * len(prompts) // QUARTERS
        marks: list[tuple[float, int, int]] = []
        with llm.exclusive() as engine:
            rows = [sequence_of(llm, row, prompt, params) for row, prompt in enumerate(prompts)]
            for row in rows:
                engine.add(row)
            engine.step()
            marks.append((time.perf_counter(), llm.stats.num_emitted_tokens, llm.stats.num_row_steps))
            while engine.has_work:
                engine.step()
                emitted = llm.stats.num_emitted_tokens
                if emitted >= len(marks) * size or not engine.has_work:
                    marks.append((time.perf_counter(), emitted, llm.stats.num_row_steps))
        pairs = list(pairwise(marks))[:QUARTERS]
        speed = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs]
        a_step = [(b[1] - a[1]) / (b[2] - a[2]) for a, b in pairs]
        return LongRun([r.output_tokens for r in rows], speed, a_step, llm.stats.target.largest_kv_bytes_reserved)


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
    return run_with_settings(asked, cells, {"parameters": asked.parameters, "tokens": asked.tokens}, as_markdown)


if __name__ == "__main__":
    sys.exit(main())
