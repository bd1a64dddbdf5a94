"""What the parts of trained drafters bring, on the embedded target: `python -m benchmarks.ablation [--minutes M] [--seeds N] [PREFIX ...]`.

Clover's ablation (Medusa, then one block after the other), EAGLE-2's dynamic tree against a static one of equal size, and EAGLE-3 with
and without training-time test. Every training of a family has the same number of batches: as many as its slowest member does within
`--minutes`, counted once. A cell is one training with what is measured on its head; RUNS/cells/CELL.json is written when it is done, and a
run that was cut off goes on in the middle of a training. The tables stand in docs/evidence/ablation.md and .json, anew after every cell.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from benchmarks.ablation_document import write_document
from benchmarks.cells import Cell, Record, Records, chosen, run_cells
from benchmarks.options import parser_of
from benchmarks.workloads import EVIDENCE, ROOT, source
from echelon import LLM, SamplingParams
from echelon.bench.report import write_json
from echelon.bench.throughput import environment
from echelon.demo import TARGET
from echelon.heads.base import Head
from echelon.heads.checkpoints import build_head
from echelon.model.load.loading import LoadedModel, load_model, load_plain
from echelon.train.examples import Teacher
from echelon.train.heads import ROWS_PER_BATCH, TrainingConfig, learn, train_head
from echelon.train.text import Data, prepare

PROMPT_TOKENS, BATCH_SIZE, CALIBRATION_STEPS = 128, 16, 6
BLOCKS = ("augmenting", "regressive", "attention_decoder")
CLOVER_TREE = {"tree": "dynamic", "num_speculative_tokens": 4}  # four tokens a step, as in the paper
EAGLE_TREES = {
    "dynamic": {"tree": "dynamic", "num_speculative_tokens": 25, "tree_top_k": 10, "tree_depth": 5},
    "static": {"tree": "static", "num_speculative_tokens": 25},
}
CHAIN = {"chain": {"tree": "chain", "num_speculative_tokens": 6}}
OPTIONS: dict[str, dict[str, Any]] = {
    "prefixes": {"nargs": "*", "metavar": "PREFIX", "help": "only the variants whose names begin so"},
    "--minutes": {"type": float, "default": 4.0, "help": "of the slowest training of each family"},
    "--steps": {"type": int, "default": 0, "help": "batches of every training, instead of --minutes"},
    "--seeds": {"type": int, "default": 3},
    "--num-continuations": {"type": int, "default": 2048, "help": "texts that the target writes to be learned from"},
    "--num-prompts": {"type": int, "default": 64},
    "--max-tokens": {"type": int, "default": 128},
    "--runs": {"type": Path, "default": ROOT / "build" / "ablation"},
    "--output": {"type": Path, "default": EVIDENCE},
}
Trees = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Variant:
    """A way to train a head, in a family whose members get equally many batches, and the trees that are grown on it."""

    family: str
    method: str
    trees: Trees
    options: tuple[tuple[str, Any], ...] = ()
    depth: int | None = None

    def plan(self, steps: int, seed: int) -> TrainingConfig:
        return TrainingConfig(self.method, steps, every=max(1, min(200, steps // 4)), seed=seed, options=self.options, depth=self.depth)


def clover(num_blocks: int) -> Variant:
    """Clover with its first blocks; with none it is Medusa with the target's output layer."""
    return Variant("clover", "clover", {"budget 4": CLOVER_TREE}, tuple((b, i < num_blocks) for i, b in enumerate(BLOCKS)))


VARIANTS = {
    "clover-medusa": clover(0),
    "clover-augmenting": clover(1),
    "clover-regressive": clover(2),
    "clover-full": clover(3),
    "eagle3-one-step": Variant("eagle3", "eagle3", CHAIN, depth=1),
    "eagle3-training-time-test": Variant("eagle3", "eagle3", CHAIN | EAGLE_TREES),
    "eagle": Variant("eagle", "eagle", CHAIN | EAGLE_TREES),
}
SLOWEST = {"clover": "clover-full", "eagle3": "eagle3-training-time-test", "eagle": "eagle"}


@dataclass
class Study:
    """The target twice, as training and as the engine have it, the texts, and where everything goes."""

    asked: argparse.Namespace
    plain: PreTrainedModel
    served: LoadedModel
    data: Data
    prompts: list[list[int]]

    def steps_of(self, family: str) -> int:
        """Batches of every training of a family, counted once for a folder."""
        if self.asked.steps:
            return int(self.asked.steps)
        file = self.asked.runs / "steps.json"
        known = json.loads(file.read_text("utf-8")) if file.exists() else {}
        key = f"{family}, {self.asked.minutes:g} minutes"
        if key not in known:
            known[key] = max(1, int(self.asked.minutes * 60 / self._seconds_a_step(VARIANTS[SLOWEST[family]])))
            write_json(file, known)
        return int(known[key])

    def _seconds_a_step(self, variant: Variant) -> float:
        plan = variant.plan(CALIBRATION_STEPS, 0)
        head: Any = build_head(plan.method, self.plain, **dict(plan.options))
        teacher, depth = Teacher(self.plain, head), min(plan.recipe.depth, head.max_depth or plan.recipe.depth)
        times = []
        for step in range(CALIBRATION_STEPS):
            start = time.perf_counter()
            learn(teacher, self.data.batch(0, step, ROWS_PER_BATCH), depth, plan, step)
            times.append(time.perf_counter() - start)
        return sorted(times)[CALIBRATION_STEPS // 2] * 1.15  # the optimisers' share, and the evaluations

    def run(self, name: str, seed: int) -> Record:
        """Train one head, or go on with it, and measure it."""
        variant = VARIANTS[name]
        plan = variant.plan(self.steps_of(variant.family), seed)
        folder = self.asked.runs / f"{name}-{seed}"
        head = train_head(self.plain, self.data, folder, plan, lambda done, of, loss: said(name, seed, done, of, loss))
        lines = [json.loads(x) for x in (folder / "log.jsonl").read_text("utf-8").splitlines()]
        losses, last = [x for x in lines if "loss" in x], next(x for x in reversed(lines) if "top1" in x)
        return {
            "variant": name,
            "seed": seed,
            "plan": asdict(plan),
            "parameters": sum(p.numel() for p in head.parameters()),
            "loss": sum(x["loss"] for x in losses[-20:]) / len(losses[-20:]),
            "losses": [x["loss"] for x in losses[:: max(1, len(losses) // 50)]],
            "top1": last["top1"],
            "top5": last["top5"],
            "trees": {tree: self._drafted(head, folder, tree, config) for tree, config in variant.trees.items()},
        }

    def _drafted(self, head: Head, folder: Path, tree: str, config: dict[str, Any]) -> dict[str, Any]:
        """What the engine accepts of a head's drafts on held-out prompts; greedy, so that every drafter is asked about the same text."""
        config = {"method": head.method, "model": str(folder), **config}
        llm = LLM(self.served, config, max_num_seqs=BATCH_SIZE)
        params = SamplingParams(temperature=0.0, max_tokens=self.asked.max_tokens, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(self.prompts, params)
        stats = llm.stats
        return {
            "config": config | {"model": folder.name},
            "tokens_per_step": stats.tokens_per_step,
            "acceptance_rate": stats.acceptance_rate,
            "drafted_a_step": stats.num_draft_tokens / stats.num_row_steps,
            "accepted_by_depth": _conditional(stats.num_drafts_by_position, stats.num_accepted_by_position) if tree == "chain" else None,
            "seconds": time.perf_counter() - start,
        }


def _conditional(drafted: SequenceOf[int], accepted: SequenceOf[int]) -> list[float]:
    """How often a chain's token at each depth is kept where all before it were, and it was drafted."""
    tried = [drafted[0], *(min(a, d) for a, d in zip(accepted, drafted[1:], strict=False))] if drafted else []
    return [a / t if t else 0.0 for a, t in zip(accepted, tried, strict=True)]


def said(name: str, seed: int, done: int, of: int, loss: float) -> None:
    if done % 20 == 0 or done == of:
        print(f"  {name}, seed {seed}: {done}/{of}, loss {loss:.3f}", flush=True)


def main() -> None:
    asked = parser_of(__doc__, OPTIONS).parse_args()
    transformers.logging.set_verbosity_error()
    logging.basicConfig(level=logging.WARNING)
    where = environment()  # its commit is that of the code as it was loaded: a run takes hours, and the tree may move on meanwhile
    study, records = studied(asked), Records(asked.runs / "cells")
    settings = {name: getattr(asked, name) for name in ("seeds", "num_continuations", "num_prompts", "max_tokens")}
    # a whole seed first: a run that is cut off has every variant
    cells = [Cell(f"{name}-{seed}", partial(study.run, name, seed)) for seed in range(asked.seeds) for name in VARIANTS]
    run_cells(
        chosen(cells, asked.prefixes),
        records,
        {"environment": where},
        lambda _, __: True,
        on_record=lambda _, __: write_document(records, asked.output, settings),
    )
    write_document(records, asked.output, settings)


def studied(asked: argparse.Namespace) -> Study:
    plain, tokenizer = load_plain(str(TARGET))
    data = prepare(plain, tokenizer, None, asked.runs / "data", asked.num_continuations)
    served = load_model(str(TARGET), device="cpu")
    return Study(asked, plain, served, data, source(served, asked.num_prompts, PROMPT_TOKENS, is_ragged=False))


if __name__ == "__main__":
    main()
