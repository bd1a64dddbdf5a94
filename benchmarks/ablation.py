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
import statistics
import time
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from benchmarks.cells import Cell, Record, Records, chosen, run_cells
from benchmarks.options import parser_of
from benchmarks.workloads import EVIDENCE, ROOT, greedy, source
from echelon import LLM
from echelon.bench.report import columns, described, table, write_json
from echelon.bench.throughput import environment
from echelon.demo import TARGET
from echelon.heads.base import Head
from echelon.heads.checkpoints import build_head
from echelon.model.load.loading import LoadedModel, load_model, load_plain
from echelon.train.examples import Teacher
from echelon.train.heads import TrainingConfig, learn, train_head
from echelon.train.text import Data, prepare

PROMPT_TOKENS, BATCH_SIZE, CALIBRATION_STEPS = 128, 16, 6
BLOCKS = ("augmenting", "regressive", "attention_decoder")
CLOVER_TREE = {"tree": "dynamic", "num_speculative_tokens": 4}  # four tokens a step, as in the paper
EAGLE_TREES = {
    "dynamic": {"tree": "dynamic", "num_speculative_tokens": 25, "tree_top_k": 10, "tree_depth": 5},
    "static": {"tree": "static", "num_speculative_tokens": 25},
}
CHAIN = {"chain": {"tree": "chain", "num_speculative_tokens": 6}}
Trees = dict[str, dict[str, Any]]
Found = dict[str, list[Record]]  # by variant, a cell a seed


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
LADDER = {
    "clover-medusa": "Medusa",
    "clover-augmenting": "+ Augmenting Block",
    "clover-regressive": "+ Regressive Connection",
    "clover-full": "+ Attention Decoder (Clover)",
}
EAGLES = {"eagle": "EAGLE", "eagle3-training-time-test": "EAGLE-3"}
TRAINED_WITH = {
    "eagle3-one-step": "one step",
    "eagle3-training-time-test": "training-time test (7 steps, 2 in the first half)",
    "eagle": "EAGLE, for comparison",
}
# points of top-5 accuracy that each block brings to heads 1, 2 and 3 (Xiao et al. 2024, ablation on the small model)
PUBLISHED = {"clover-augmenting": (4.3, 8.1, 8.9), "clover-regressive": (2.6, 4.6, 6.0), "clover-full": (4.8, 9.0, 11.5)}
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
            learn(teacher, self.data.batch(0, step, plan.batch_size), depth, plan, step)
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
        start = time.perf_counter()
        llm.generate(self.prompts, greedy(self.asked.max_tokens))
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


def observed(shares: SequenceOf[float]) -> list[float]:
    """Up to the first depth at which nothing was kept: beyond it nothing was tried."""
    return list(shares[: shares.index(0.0) + 1]) if 0.0 in shares else list(shares)


def write_document(records: Records, output: Path, settings: dict[str, Any]) -> None:
    """Write ablation.json and ablation.md into `output`, with the published values beside. A variant that has as many cells of these
    settings as `output` has of it is replaced by them as a whole; of the others stays what is there.
    """
    found, measured = known(output), Found()
    for cell in records.read().values():
        if "failed" not in cell and cell.get("settings") == settings:
            measured.setdefault(cell["variant"], []).append(cell)
    found |= {name: cells for name, cells in measured.items() if len(cells) >= len(found.get(name, []))}
    write_json(output / "ablation.json", {"cells": found})
    parts = [
        "# What the parts of trained drafters bring",
        f"`python -m benchmarks.ablation` on the embedded target; {_measured(found)}. "
        "Mean over seeds, smallest to largest in brackets. Accuracies are on held-out text that the target wrote itself; tokens_per_step "
        "is greedy, on held-out prompts, with the target's own token.",
        _clover(found),
        _trees(found),
        _training_time_test(found),
    ]
    (output / "ablation.md").write_text("\n\n".join(p for p in parts if p) + "\n", "utf-8")


def known(output: Path) -> Found:
    """Cells by variant that `output` has; older files have one entry of settings for all."""
    file = output / "ablation.json"
    record = json.loads(file.read_text("utf-8")) if file.exists() else {"cells": {}}
    common = {"settings": record["settings"]} if "settings" in record else {}
    return {name: [common | cell for cell in cells] for name, cells in record["cells"].items()}


def _measured(found: Found) -> str:
    """Which variants were trained and measured where, at which commit and with which settings."""
    variants: dict[str, list[str]] = {}
    for name, cells in sorted(found.items()):
        for where in dict.fromkeys(f"{described(c['environment'])}, settings {json.dumps(c['settings'])}" for c in cells):
            variants.setdefault(where, []).append(name)
    return "; ".join(f"{', '.join(names)}: {where}" for where, names in variants.items())


def _of(found: Found, names: Iterable[str]) -> list[list[Record]]:
    """The cells of each of these variants that has some."""
    return [found[name] for name in names if found.get(name)]


def _spread(values: SequenceOf[float], form: str = "{:.2f}") -> str:
    """Mean, and what lies outermost where there is more than one."""
    mean = form.format(statistics.fmean(values))
    return mean if len(values) < 2 else f"{mean} ({form.format(min(values))}–{form.format(max(values))})"


def _each(values: Iterable[SequenceOf[float]], form: str) -> str:
    """One spread for every head or depth, of a row a cell; some rows may end sooner."""
    return ", ".join(_spread([x for x in v if x is not None], form) for v in zip_longest(*values))


def _percent(shares: SequenceOf[float]) -> list[float]:
    return [100 * x for x in shares]


def _emitted(cell: Record, tree: str) -> float:
    return float(cell["trees"][tree]["tokens_per_step"])


def _clover(found: Found) -> str:
    ladder = _of(found, LADDER)
    if not ladder:
        return ""
    base = {c["seed"]: _emitted(c, "budget 4") - 1 for c in found.get("clover-medusa", [])}

    def over_medusa(cells: list[Record]) -> str:
        gains = [100 * ((_emitted(c, "budget 4") - 1) / base[c["seed"]] - 1) for c in cells if base.get(c["seed"])]
        return _spread(gains, "{:+.0f}") if gains and cells[0]["variant"] != "clover-medusa" else "–"

    rungs = columns(
        ladder,
        {
            "": lambda cells: LADDER[cells[0]["variant"]],
            "seeds": len,
            "batches": lambda cells: cells[0]["plan"]["steps"],
            "loss": lambda cells: _spread([c["loss"] for c in cells]),
            "top-1 of heads 1, 2, 3, %": lambda cells: _each((_percent(c["top1"]) for c in cells), "{:.1f}"),
            "top-5, %": lambda cells: _each((_percent(c["top5"]) for c in cells), "{:.1f}"),
            "extra tokens a step": lambda cells: _spread([_emitted(c, "budget 4") - 1 for c in cells], "{:.3f}"),
            "over Medusa, %": over_medusa,
        },
    )
    steps = columns(
        pairwise(ladder),
        {
            "block": lambda pair: LADDER[pair[1][0]["variant"]],
            "points of top-5 that it brings to heads 1, 2, 3": lambda pair: _difference(*pair),
            "published": lambda pair: ", ".join(f"{x:.1f}" for x in PUBLISHED[pair[1][0]["variant"]]),
        },
    )
    published = "Published: +50 to +76 % extra tokens of Clover over Medusa."
    return "\n\n".join(["## Clover's blocks, tree of 4 tokens", rungs, published, *([steps] if len(ladder) > 1 else [])])


def _difference(before: SequenceOf[Record], after: SequenceOf[Record]) -> str:
    """Points of top-5 by head, seed by seed."""
    by_seed = {c["seed"]: c for c in before}
    pairs = [(by_seed[c["seed"]], c) for c in after if c["seed"] in by_seed]
    return _each(([100 * (b - a) for a, b in zip(one["top5"], other["top5"], strict=True)] for one, other in pairs), "{:+.1f}") or "–"


def _trees(found: Found) -> str:
    rows = []
    for cells in _of(found, EAGLES):
        static, dynamic = ([_emitted(c, tree) for c in cells] for tree in ("static", "dynamic"))
        sizes = [_spread([c["trees"][tree]["drafted_a_step"] for c in cells], "{:.1f}") for tree in ("static", "dynamic")]
        gains = [100 * (d / s - 1) for d, s in zip(dynamic, static, strict=True)]
        rows.append(
            [EAGLES[cells[0]["variant"]], len(cells), _spread(static), sizes[0], _spread(dynamic), sizes[1], _spread(gains, "{:+.1f}")]
        )
    if not rows:
        return ""
    head = ["head", "seeds", "static tree, tokens_per_step", "nodes a step", "dynamic tree, tokens_per_step", "nodes a step", "gain, %"]
    published = (
        "Published (EAGLE-2's ablation, Vicuna 7B, MT-bench, mean accepted length): 3.92 without ranking by joint probability, 4.98 with "
        "it, at 60 nodes."
    )
    return f"## EAGLE-2's dynamic tree against EAGLE-1's static one, 25 nodes, depth 5\n\n{table(head, rows)}\n\n{published}"


def _training_time_test(found: Found) -> str:
    trained = _of(found, TRAINED_WITH)
    if not trained:
        return ""
    by_training = columns(
        trained,
        {
            "trained with": lambda cells: TRAINED_WITH[cells[0]["variant"]],
            "seeds": len,
            "batches": lambda cells: cells[0]["plan"]["steps"],
            "accepted at depth 1, 2, … where all before was, %": lambda cells: _each(
                (_percent(observed(c["trees"]["chain"]["accepted_by_depth"])) for c in cells), "{:.0f}"
            ),
            "tokens_per_step, chain of 6": lambda cells: _spread([_emitted(c, "chain") for c in cells]),
        },
    )
    published = "Published: with training-time test acceptance stays level over depth, without it falls (EAGLE-3, figure)."
    return f"## EAGLE-3 with and without training-time test\n\n{by_training}\n\n{published}"


def said(name: str, seed: int, done: int, of: int, loss: float) -> None:
    if done % 20 == 0 or done == of:
        print(f"  {name}, seed {seed}: {done}/{of}, loss {loss:.3f}", flush=True)


def main() -> None:
    asked = parser_of(
        __doc__,
        {
            "prefixes": {"nargs": "*", "metavar": "PREFIX", "help": "only the variants whose names begin so"},
            "--minutes": {"type": float, "default": 4.0, "help": "of the slowest training of each family"},
            "--steps": {"type": int, "default": 0, "help": "batches of every training, instead of --minutes"},
            "--seeds": {"type": int, "default": 3},
            "--num-continuations": {"type": int, "default": 2048, "help": "texts that the target writes to be learned from"},
            "--num-prompts": {"type": int, "default": 64},
            "--max-tokens": {"type": int, "default": 128},
            "--runs": {"type": Path, "default": ROOT / "build" / "ablation"},
            "--output": {"type": Path, "default": EVIDENCE},
        },
    ).parse_args()
    transformers.logging.set_verbosity_error()
    logging.basicConfig(level=logging.WARNING)
    where = environment()  # its commit is that of the code as it was loaded: a run takes hours, and the tree may move on meanwhile
    study, records = studied(asked), Records(asked.runs / "cells")
    settings = {name: getattr(asked, name) for name in ("minutes", "steps", "num_continuations", "num_prompts", "max_tokens")}
    # a whole seed first: a run that is cut off has every variant
    cells = [Cell(f"{name}-{seed}", partial(study.run, name, seed)) for seed in range(asked.seeds) for name in VARIANTS]
    run_cells(
        chosen(cells, asked.prefixes),
        records,
        {"environment": where, "settings": settings},
        lambda _, record: record.get("settings") == settings,
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
