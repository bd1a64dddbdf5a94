"""Is a text that of plain decoding alone? Ours, EQSPEC's way, and the published faults re-enacted, on Spec-Bench's questions.

`python -m benchmarks.equivalence --questions question.jsonl [--target DIR] [--count N] [--tokens N] [PREFIX ...]`. The reference is plain
greedy decoding of each question alone, unpadded, in the target's dtype; a row is equal if all of its tokens are.

unpadded, realign  rows of either strategy with a draft model, at batch 1, 4 and 16
FAULT              the same with a fault that Zhang et al. 2025 found in earlier systems, at batch 1 and 4 (tests/support/faults.py)
rows               10,000 rows of every kind of drafter, greedy and drawn, at batch 16: what a release is worth, once
"""

from __future__ import annotations

import sys
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tools  # noqa: F401  # the faults are with the helpers of the tests, which this makes importable
from benchmarks.cells import Cell, Record, asked_of, run_with_settings, said
from benchmarks.questions import encoded, other_questions, read_questions, spread
from echelon import LLM, SamplingParams
from echelon.bench.report import columns
from echelon.bench.verify import STRATEGY_SETTINGS, cut, first_difference
from echelon.demo import DRAFT, EAGLE, TARGET
from echelon.model.load.loading import LoadedModel, load_model, load_plain
from echelon.train.text import fingerprint

from faults import FAULTS, enacted  # isort: skip

PROMPT = 512  # tokens of a question, at most
BATCHES, FAULTY_BATCHES, ROWS_BATCH = (1, 4, 16), (1, 4), 16
NUM_ROWS = 10_000
DRAFT_MODEL: dict[str, Any] = {"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": 4}
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 2},
    "draft model": DRAFT_MODEL,
    "draft model, tree": DRAFT_MODEL | {"tree": "dynamic", "num_speculative_tokens": 12},
    "eagle, tree": {"method": "eagle", "model": str(EAGLE), "tree": "dynamic", "num_speculative_tokens": 12},
}


class Equivalence:
    """The target, the questions, and what plain decoding answers."""

    def __init__(self, target: str, questions: Path | None, count: int, tokens: int) -> None:
        self._target, self.questions, self._count, self._tokens = target, questions, count, tokens
        self._truths: dict[int, list[list[int]]] = {}

    @cached_property
    def target(self) -> LoadedModel:
        return load_model(self._target, device="cpu")

    @cached_property
    def prompts(self) -> list[list[int]]:
        llm, most = LLM(self.target, max_num_seqs=1), min(PROMPT, self.target.max_len - self._tokens - 1)
        return [encoded(llm, q.turns[0], most) for q in spread(read_questions(self.questions), self._count)]

    def params(self, seed: int) -> SamplingParams:
        """Greedy for seed 0, else drawn."""
        return SamplingParams(temperature=0.8 if seed else 0.0, seed=seed, max_tokens=self._tokens)

    def truth(self, seed: int) -> list[list[int]]:
        """Plain decoding of each question alone."""
        if seed not in self._truths:
            alone = LLM(self.target, max_num_seqs=1, enable_prefix_caching=False)
            outputs = [alone.generate([p], self.params(seed), use_tqdm=False)[0] for p in self.prompts]
            self._truths[seed] = [o.outputs[0].token_ids for o in outputs]
        return self._truths[seed]

    def compared(self, config: dict[str, Any], batch: int, seed: int = 0, **settings: Any) -> Record:
        """Equal rows, and the mean share of a text before its first difference."""
        truth = self.truth(seed)  # before any fault is enacted
        llm = LLM(self.target, config, max_num_seqs=batch, enable_prefix_caching=False, **settings)
        outputs = [o.outputs[0].token_ids for o in llm.generate(self.prompts, self.params(seed), use_tqdm=False)]
        ends = self.target.eos_token_ids
        places = [first_difference(cut(a, ends), cut(b, ends)) for a, b in zip(outputs, truth, strict=True)]
        partial_match = sum(1.0 if p is None else p / max(1, len(b)) for p, b in zip(places, truth, strict=True)) / len(truth)
        said(f"batch {batch}, seed {seed}: {places.count(None)} of {len(truth)}")
        return {"batch_size": batch, "num_rows": len(truth), "num_exact": places.count(None), "partial_match": partial_match}

    def strategy(self, name: str) -> Record:
        return {"results": [self.compared(DRAFT_MODEL, batch, **STRATEGY_SETTINGS[name]) for batch in BATCHES]}

    def fault(self, name: str) -> Record:
        self.truth(0)
        with enacted(name):
            return {"results": [self.compared(DRAFT_MODEL, batch, strategy=FAULTS[name][1]) for batch in FAULTY_BATCHES]}

    def rows(self) -> Record:
        """Every drafter on every question, with one seed more until there are enough rows."""
        results, seed = list[Record](), 0
        while sum(r["num_rows"] for r in results) < NUM_ROWS:
            results += [{"drafter": name, "seed": seed} | self.compared(c, ROWS_BATCH, seed) for name, c in DRAFTERS.items()]
            self._truths.pop(seed)
            seed += 1
        totals = {key: sum(r[key] for r in results) for key in ("num_rows", "num_exact")}
        return totals | {"results": results}


def cells(study: Equivalence) -> list[Cell]:
    """Everything that the page of claims is made of."""
    asks = other_questions(study.questions)
    ours = [Cell(name, partial(study.strategy, name), inputs=asks) for name in ("unpadded", "realign")]
    faulty = [Cell(name.replace(" ", "_"), partial(study.fault, name), inputs=asks) for name in FAULTS]
    return [*ours, *faulty, Cell("rows", study.rows, inputs=asks)]


def as_markdown(records: dict[str, Record]) -> str:
    """A line a cell and batch."""
    found = [(name, r) for name, record in records.items() for r in record["results"]]
    return columns(
        found,
        {
            "cell": lambda x: x[0],
            "batch": lambda x: x[1]["batch_size"],
            "equal": lambda x: f"{x[1]['num_exact']} of {x[1]['num_rows']}",
            "equal, %": lambda x: f"{100 * x[1]['num_exact'] / x[1]['num_rows']:.1f}",
            "before the first difference, %": lambda x: f"{100 * x[1]['partial_match']:.1f}",
        },
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure the cells that have no record of these settings; 1 if one fails."""
    more: dict[str, dict[str, Any]] = {
        "--questions": {"type": Path, "help": "Spec-Bench's question.jsonl"},
        "--target": {"default": str(TARGET), "help": "folder of the model that answers; the embedded draft model must fit it"},
        "--count": {"type": int, "default": 480, "help": "questions, evenly apart"},
        "--tokens": {"type": int, "default": 50, "help": "new tokens of an answer, at most"},
    }
    asked = asked_of(__doc__, "equivalence", more, arguments)
    study = Equivalence(asked.target, asked.questions, asked.count, asked.tokens)
    settings = {"target": fingerprint(load_plain(asked.target)[0]), "count": asked.count, "tokens": asked.tokens}
    return run_with_settings(asked, cells(study), settings, as_markdown)


if __name__ == "__main__":
    sys.exit(main())
