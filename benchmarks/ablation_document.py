"""The tables of `python -m benchmarks.ablation`, from its cells, with the published values beside."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

from echelon.bench.cells import Records
from echelon.bench.report import described, table, write_json

LADDER = {
    "clover-medusa": "Medusa",
    "clover-augmenting": "+ Augmenting Block",
    "clover-regressive": "+ Regressive Connection",
    "clover-full": "+ Attention Decoder (Clover)",
}
# points of top-5 accuracy that each block brings to heads 1, 2 and 3 (Xiao et al. 2024, ablation on the small model)
PUBLISHED = {"clover-augmenting": (4.3, 8.1, 8.9), "clover-regressive": (2.6, 4.6, 6.0), "clover-full": (4.8, 9.0, 11.5)}
PUBLISHED_EXTRA = "+50 to +76 %"
Cell = dict[str, Any]
Cells = dict[str, list[Cell]]


def write_document(records: Records, output: Path, settings: dict[str, Any]) -> None:
    """Write ablation.json and ablation.md into `output`, from all cells that are done."""
    found: Cells = {}
    for cell in records.read().values():
        if "failed" not in cell:
            found.setdefault(cell["variant"], []).append(cell)
    write_json(output / "ablation.json", {"settings": settings, "cells": found})
    parts = [
        "# What the parts of trained drafters bring",
        f"`python -m benchmarks.ablation` on the embedded target; {_measured(found)}. Settings: {json.dumps(settings)}. "
        "Mean over seeds, smallest to largest in brackets. Accuracies are on held-out text that the target wrote itself; tokens_per_step "
        "is greedy, on held-out prompts, with the target's own token.",
        _clover(found),
        _trees(found),
        _training_time_test(found),
    ]
    (output / "ablation.md").write_text("\n\n".join(p for p in parts if p) + "\n", "utf-8")


def _measured(found: Cells) -> str:
    """Which variants were trained and measured where, and at which commit."""
    variants: dict[str, list[str]] = {}
    for name, cells in found.items():
        for environment in dict.fromkeys(described(c["environment"]) for c in cells):
            variants.setdefault(environment, []).append(name)
    return "; ".join(f"{', '.join(names)}: {environment}" for environment, names in variants.items())


def _spread(values: SequenceOf[float], form: str = "{:.2f}") -> str:
    """Mean, and what lies outermost where there is more than one."""
    mean = form.format(statistics.fmean(values))
    return mean if len(values) < 2 else f"{mean} ({form.format(min(values))}–{form.format(max(values))})"


def _each(cells: SequenceOf[Cell], value: Callable[[Cell], SequenceOf[float]], form: str) -> str:
    """One spread for every head or depth."""
    return ", ".join(_spread(v, form) for v in zip(*(value(c) for c in cells), strict=True))


def _percent(key: str) -> Callable[[Cell], list[float]]:
    return lambda cell: [100 * x for x in cell[key]]


def _tree(name: str) -> Callable[[Cell], float]:
    return lambda cell: float(cell["trees"][name]["tokens_per_step"])


def _clover(found: Cells) -> str:
    rows: list[list[str]] = []
    steps: list[list[str]] = []
    before: list[Cell] = []
    base = {c["seed"]: _tree("budget 4")(c) - 1 for c in found.get("clover-medusa", [])}
    for name, title in LADDER.items():
        cells = found.get(name, [])
        if not cells:
            continue
        extra = [_tree("budget 4")(c) - 1 for c in cells]
        gains = [100 * ((_tree("budget 4")(c) - 1) / base[c["seed"]] - 1) for c in cells if base.get(c["seed"])]
        gain = _spread(gains, "{:+.0f}") if gains and name != "clover-medusa" else "–"
        accuracies = _each(cells, _percent("top1"), "{:.1f}"), _each(cells, _percent("top5"), "{:.1f}")
        trained = str(len(cells)), str(cells[0]["plan"]["steps"]), _spread([c["loss"] for c in cells])
        rows.append([title, *trained, *accuracies, _spread(extra, "{:.3f}"), gain])
        if before and name in PUBLISHED:
            steps.append([title, _difference(before, cells), ", ".join(f"{x:.1f}" for x in PUBLISHED[name])])
        before = cells
    if not rows:
        return ""
    head = ["", "seeds", "batches", "loss", "top-1 of heads 1, 2, 3, %", "top-5, %", "extra tokens a step", "over Medusa, %"]
    published = f"Published: {PUBLISHED_EXTRA} extra tokens of Clover over Medusa."
    text = f"## Clover's blocks, tree of 4 tokens\n\n{table(head, rows)}\n\n{published}"
    if steps:
        text += f"\n\n{table(['block', 'points of top-5 that it brings to heads 1, 2, 3', 'published'], steps)}"
    return text


def _difference(before: SequenceOf[Cell], after: SequenceOf[Cell]) -> str:
    """Points of top-5 by head, seed by seed."""
    by_seed = {c["seed"]: c for c in before}
    pairs = [(by_seed[c["seed"]], c) for c in after if c["seed"] in by_seed]
    gains = [[100 * (b - a) for a, b in zip(one["top5"], other["top5"], strict=True)] for one, other in pairs]
    return ", ".join(_spread(values, "{:+.1f}") for values in zip(*gains, strict=True)) if gains else "–"


def _trees(found: Cells) -> str:
    rows = []
    for name, title in (("eagle", "EAGLE"), ("eagle3-training-time-test", "EAGLE-3")):
        cells = found.get(name, [])
        if not cells:
            continue
        static, dynamic = ([_tree(tree)(c) for c in cells] for tree in ("static", "dynamic"))
        sizes = [_spread([c["trees"][tree]["drafted_a_step"] for c in cells], "{:.1f}") for tree in ("static", "dynamic")]
        gains = [100 * (d / s - 1) for d, s in zip(dynamic, static, strict=True)]
        rows.append([title, str(len(cells)), _spread(static), sizes[0], _spread(dynamic), sizes[1], _spread(gains, "{:+.1f}")])
    if not rows:
        return ""
    head = ["head", "seeds", "static tree, tokens_per_step", "nodes a step", "dynamic tree, tokens_per_step", "nodes a step", "gain, %"]
    published = (
        "Published (EAGLE-2's ablation, Vicuna 7B, MT-bench, mean accepted length): 3.92 without ranking by joint probability, 4.98 with "
        "it, at 60 nodes."
    )
    return f"## EAGLE-2's dynamic tree against EAGLE-1's static one, 25 nodes, depth 5\n\n{table(head, rows)}\n\n{published}"


def _training_time_test(found: Cells) -> str:
    names = {
        "eagle3-one-step": "one step",
        "eagle3-training-time-test": "training-time test (7 steps, 2 in the first half)",
        "eagle": "EAGLE, for comparison",
    }
    rows = []
    for name, title in names.items():
        if cells := found.get(name, []):
            by_depth = _each(cells, lambda c: [100 * x for x in c["trees"]["chain"]["accepted_by_depth"]], "{:.0f}")
            rows.append([title, str(len(cells)), str(cells[0]["plan"]["steps"]), by_depth, _spread([_tree("chain")(c) for c in cells])])
    if not rows:
        return ""
    head = ["trained with", "seeds", "batches", "accepted at depth 1, 2, … where all before was, %", "tokens_per_step, chain of 6"]
    published = "Published: with training-time test acceptance stays level over depth, without it falls (EAGLE-3, figure)."
    return f"## EAGLE-3 with and without training-time test\n\n{table(head, rows)}\n\n{published}"
