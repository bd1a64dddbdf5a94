"""Spec-Bench by task, with its harness's own metric: `python -m benchmarks.categories --questions question.jsonl [PREFIX ...]`.

Of every question tokens a second over all turns, prompts included; the speed-up is their mean over that of plain decoding, and tokens a
step the mean over steps of what was accepted and one more, as speed.py of Spec-Bench computes them. A second turn follows the first answer.
At batch 8 the questions of a task run together, rows entering as others finish, and a task has one speed.

METHOD_bB_tT  a drafter at batch B and temperature T, its drafts as long as published and as long as the engine decides ("auto"), beside
              plain decoding, task by task in turn
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence as SequenceOf
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.cells import Cell, Record, asked_of, run_with_settings, said
from benchmarks.questions import Question, encoded, other_questions, read_questions
from benchmarks.workloads import Models, Size, check_drafted, trained_heads
from echelon import LLM, ConfigError, SamplingParams
from echelon.bench.report import table
from echelon.demo import DRAFT
from echelon.methods import method_names
from echelon.model.load.loading import LoadedModel

PROMPT = 512  # tokens of a turn with all before it, at most
EAGLE_2: dict[str, Any] = {"tree": "dynamic", "num_speculative_tokens": 60, "tree_top_k": 10, "tree_depth": 6}
COPIED: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_max": 3}
DRAFTED: dict[str, Any] = {"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": 5}
BATCHES, TEMPERATURES = (1, 8), (0, 1)
HOW = {"drafts": ["published", "auto"]}  # records that lack it are of published lengths alone


class Harness:
    """The grown target with its heads, and the questions by task."""

    def __init__(self, parameters: int, questions: Path | None, count: int, tokens: int) -> None:
        self._size, self._questions, self._count, self._tokens = Size(pair_parameters=parameters), questions, count, tokens
        self._models: dict[str, Models] = {}

    @cached_property
    def tasks(self) -> dict[str, list[Question]]:
        """The first questions of each."""
        found: dict[str, list[Question]] = {}
        for question in read_questions(self._questions):
            own = found.setdefault(question.task, [])
            if len(own) < self._count:
                own.append(question)
        return found

    def drafting(self, method: str) -> tuple[LoadedModel, dict[str, Any]]:
        """The target, and the drafter's settings: EAGLE-2's trees for heads."""
        if method in ("ngram", "draft_model"):
            own = COPIED if method == "ngram" else DRAFTED
            models = self._models.setdefault("", Models(self._size, []))
            return models.grown, own
        target, folders = self._models.setdefault(method, Models(self._size, [method])).with_heads
        return target, {"method": method, "model": folders[method], **EAGLE_2}

    def measured(self, method: str, batch: int, temperature: int) -> Record:
        """Plain decoding, published drafts and those of "auto", on every task in turn.

        Raises
        ------
        ConfigError  a task has fewer questions than the batch has rows
        RuntimeError  a drafter failed, so that there were steps without drafts
        """
        if (fewest := min(map(len, self.tasks.values()))) < batch:
            raise ConfigError(f"a batch of {batch} takes {batch} questions of each task, and here are {fewest}; raise --count")
        target, config = self.drafting(method)
        configs: tuple[dict[str, Any] | None, ...] = (None, config, config | {"num_speculative_tokens": "auto"})
        engines = [LLM(target, c, max_num_seqs=batch, enable_prefix_caching=False) for c in configs]
        params = SamplingParams(temperature=float(temperature), seed=0, max_tokens=self._tokens)
        published: dict[str, Record] = {}
        decided: dict[str, Record] = {}
        for llm in engines:
            self._answered(llm, next(iter(self.tasks.values()))[:1], params, 1)  # warms up
        for task, questions in self.tasks.items():
            plain, *drafted = (self._answered(llm, questions, params, batch) for llm in engines)
            for tasks, (speeds, steps, tokens) in zip((published, decided), drafted, strict=True):
                tasks[task] = {"plain": plain[0], "ours": speeds, "steps": steps, "tokens": tokens}
            said(f"{task}: " + ", ".join(f"{statistics.mean(speeds) / statistics.mean(plain[0]):.2f}" for speeds, *_ in drafted))
        for llm in engines[1:]:
            check_drafted(llm)
        num_questions = sum(map(len, self.tasks.values()))
        return {**summed(published), "auto": summed(decided), "num_questions": num_questions}

    def _answered(self, llm: LLM, questions: SequenceOf[Question], params: SamplingParams, batch: int) -> tuple[list[float], int, int]:
        """Tokens a second of every `batch` questions at once (of all, above one), row steps, and tokens that they emitted."""
        before = llm.stats.num_row_steps, llm.stats.num_emitted_tokens
        groups = [[q] for q in questions] if batch == 1 else [list(questions)]
        speeds = [self._speed(llm, group, params) for group in groups]
        return speeds, llm.stats.num_row_steps - before[0], llm.stats.num_emitted_tokens - before[1]

    def _speed(self, llm: LLM, questions: SequenceOf[Question], params: SamplingParams) -> float:
        texts, count, seconds = ["" for _ in questions], 0, 0.0
        for turn in range(max(len(q.turns) for q in questions)):
            asked = [i for i, q in enumerate(questions) if turn < len(q.turns)]
            for i in asked:
                texts[i] += questions[i].turns[turn] + "\n"
            prompts = [encoded(llm, texts[i], PROMPT) for i in asked]
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds += time.perf_counter() - start
            for i, output in zip(asked, outputs, strict=True):
                texts[i] += output.outputs[0].text + "\n"
                count += len(output.outputs[0].token_ids)
        return count / seconds


def summed(tasks: dict[str, Record]) -> Record:
    """Figures by task, and over all of them."""
    return {"tasks": tasks, "overall": overall(tasks.values())}


def overall(tasks: Any) -> dict[str, float]:
    """Over all questions: the harness's speed-up and tokens a step."""
    own = list(tasks)
    plain, ours = ([speed for task in own for speed in task[key]] for key in ("plain", "ours"))
    steps, tokens = (sum(task[key] for task in own) for key in ("steps", "tokens"))
    return {"speed_up": statistics.mean(ours) / statistics.mean(plain), "tokens_per_step": tokens / steps}


def as_markdown(records: dict[str, Record]) -> str:
    """Speed-up (tokens a step) by cell, its drafts and task."""
    names = list(dict.fromkeys(task for record in records.values() for task in record["tasks"]))
    rows = []
    for name, record in records.items():
        for drafts, part in (("published", record), ("auto", record.get("auto"))):
            if part:
                own = [overall([part["tasks"][task]]) if task in part["tasks"] else None for task in names]
                figures = [f"{o['speed_up']:.2f} ({o['tokens_per_step']:.2f})" if o else "–" for o in [*own, part["overall"]]]
                rows.append([name, drafts, str(record["num_questions"]), *figures])
    return table(["cell", "drafts", "questions", *names, "overall"], rows)


def main(arguments: list[str] | None = None) -> int:
    """Measure the cells that have no record of these settings on this processor; 1 if one fails."""
    more: dict[str, dict[str, Any]] = {
        "--questions": {"type": Path, "help": "Spec-Bench's question.jsonl"},
        "--parameters": {"type": int, "default": 1_100_000_000, "help": "that the embedded target is grown to"},
        "--count": {"type": int, "default": 80, "help": "questions of a task"},
        "--tokens": {"type": int, "default": 128, "help": "new tokens of an answer, at most"},
    }
    asked = asked_of(__doc__, "categories", more, arguments)
    harness = Harness(asked.parameters, asked.questions, asked.count, asked.tokens)
    methods = ["ngram", "draft_model", *method_names(needs="head")]
    asks = other_questions(asked.questions)
    cells = [
        Cell(f"{m}_b{b}_t{t}", partial(harness.measured, m, b, t), inputs=asks | trained_heads([m]))
        for b, t, m in product(BATCHES, TEMPERATURES, methods)
    ]
    settings = {name: getattr(asked, name) for name in ("parameters", "count", "tokens")} | HOW
    return run_with_settings(asked, cells, settings, as_markdown)


if __name__ == "__main__":
    sys.exit(main())
