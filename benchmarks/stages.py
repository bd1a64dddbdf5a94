"""SpecMemo's eight stages (arXiv 2506.01986) on paper: Llama-2-70B in eight stages, Medusa's trees against plain decoding in batches.

Nothing runs here: times of stages are those of the roofline of a published device, or of steps that were measured on this machine, scaled;
what a round of all lanes takes is simulated. Run by `python -m benchmarks.on_paper`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import Record
from echelon.adaptive.cost_table import CostCurve
from echelon.estimate.devices import Device, read_devices
from echelon.estimate.drafting import Acceptance, DraftingCost, drafting_of
from echelon.estimate.layout import Pass, split_among
from echelon.estimate.pipeline import Visit, run_once
from echelon.estimate.shapes import PaperModel, without_weights
from echelon.estimate.speed import Cluster, Speed
from echelon.speculative_config import SpeculativeConfig
from echelon.trees import best_paths, expected_tokens

STEP = Path("docs/evidence/step.json")
STAGES, CONTEXT, NEW = 8, 512, 128  # stages; tokens before a row's own; tokens of each text
BATCHES = (1, 2, 4, 8, 10)
PUBLISHED = {1: 5.7, 2: 14.5, 4: 28.8, 8: 41.6, 10: 46.0}  # tokens/s, speculative
PUBLISHED_PLAIN = {4: 14.2, 10: 29.8}
FIXED = 43  # drafted tokens of SpecMemo's tree 1-10-16-17
NODES = (4, 8, 16, 32, FIXED, 63)
# Medusa's repository, heads of 33B: how often the first, and one of the first five, is right
ACCURACIES = ((0.605, 0.822), (0.356, 0.596), (0.225, 0.446), (0.160, 0.376), (0.137, 0.326))
RANKS = 10
TRIALS = 2000


@cache
def ranked_accuracies() -> list[list[float]]:
    """Chances of the ten likeliest tokens of each head: the first's is published, others fall by a power of their rank that meets the
    published sum of five.
    """
    return [_falling(first, five) for first, five in ACCURACIES]


def _falling(first: float, five: float) -> list[float]:
    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        total = sum(first * rank**-middle for rank in range(1, 6))
        low, high = (middle, high) if total > five else (low, middle)
    return [first * rank**-high for rank in range(1, RANKS + 1)]


def medusa_tokens(nodes: int) -> float:
    """Tokens a step of Medusa's best tree of so many nodes, the target's own included."""
    return 1.0 + expected_tokens(ranked_accuracies(), best_paths(ranked_accuracies(), nodes))


def lengths(nodes: int) -> list[float]:
    """Chances that 0, 1, 2 … drafted tokens are accepted of the best tree of so many nodes."""
    accuracies = ranked_accuracies()
    reached = [1.0] + [0.0] * (len(accuracies) + 1)
    for path in best_paths(accuracies, nodes):
        reached[len(path)] += float(np.prod([accuracies[d][r] for d, r in enumerate(path)]))
    return [a - b for a, b in pairwise(reached)]


def static_share(rows: int, nodes: int, seed: int = 0) -> float:
    """Share of the steps of a batch that ends with its last text that a row is not done, on average, where all texts have NEW tokens."""
    if rows == 1:
        return 1.0
    chances = np.array(lengths(nodes))
    draws = np.random.default_rng(seed).choice(len(chances), size=(TRIALS, rows, NEW), p=chances / chances.sum()) + 1
    steps = (np.cumsum(draws, -1) < NEW).sum(-1) + 1
    return float((steps.mean(1) / steps.max(1)).mean())


class WaitingCluster(Cluster):
    """The same where all rows are drafted for together, and have the output layer run once the last lane is back; in the number of lanes
    that is fastest.
    """

    def speed(self, rows: int, context: int, drafting: DraftingCost | None = None, lanes: int | None = None) -> Speed:
        counts = range(1, min(rows, len(self.stages)) + 1) if lanes is None else (lanes,)
        found = [super(WaitingCluster, self).speed(rows, context, drafting, count) for count in counts]
        return min(found, key=lambda s: round(s.seconds, 9))

    def run_step(self, rounds: list[list[Visit]]) -> tuple[float, tuple[float, ...]]:
        around = sum(visits[0].seconds + visits[-1].seconds for visits in rounds)
        ran = run_once([visits[1:-1] for visits in rounds])
        seconds = around + ran.seconds
        return seconds, tuple((b * ran.seconds + (0.0 if stage else around)) / seconds for stage, b in enumerate(ran.busy))


@dataclass(frozen=True)
class MeasuredCluster(Cluster):
    """Stages that take their part of a step that was measured, by its tokens; `share`: of all layers' time that a stage takes."""

    curve: CostCurve
    share: float

    def terms(self, stage: int, run: Pass) -> dict[str, float]:  # noqa: ARG002
        return {"measured": float(self.curve.at(np.array(round(run.num_tokens)))) * 1e-3 * self.share}

    def output_terms(self, run: Pass) -> dict[str, float]:  # noqa: ARG002
        return {}

    def draft_seconds(self, drafting: DraftingCost | None, rows: int) -> float:
        """Heads of Medusa: what their numbers are of the target's, for a row each."""
        if drafting is None:
            return 0.0
        heads = sum(level.held.matrices for level in drafting.levels)
        layers = sum(part.held.matrices for ranks in self.stages for part in ranks)
        return float(self.curve.at(np.array(rows))) * 1e-3 * STAGES * self.share * heads / layers


class WaitingMeasuredCluster(WaitingCluster, MeasuredCluster):
    """Stages that were measured, where lanes wait for one another."""


@dataclass(frozen=True)
class SlowCluster(Cluster):
    """Stages of a system that takes `row_seconds` more for every row of a pass, in every stage."""

    row_seconds: float

    def terms(self, stage: int, run: Pass) -> dict[str, float]:
        return super().terms(stage, run) | {"rows": self.row_seconds * run.rows}


class StageStudy:
    """The model in eight stages, with the drafts of every size that is tried."""

    def __init__(self, shape: str = "llama-70b", device: str = "mi250-die") -> None:
        self.model: PaperModel = without_weights(shape)
        self.parts = split_among(self.model, 1, STAGES)
        self.device = read_devices()[device]
        self.draftings = {nodes: self._drafting(nodes) for nodes in NODES}

    def _drafting(self, nodes: int) -> DraftingCost:
        spec = SpeculativeConfig(method="medusa", tree="static", num_speculative_tokens=nodes)
        return drafting_of(spec, self.model, Acceptance(medusa_tokens(nodes), nodes, True), nodes, "bfloat16")

    def cluster(self, kind: Callable[..., Cluster] = Cluster, device: Device | None = None, **more: Any) -> Cluster:
        return kind(self.parts, device or self.device, "bfloat16", self.model.hidden_size, 2, **more)

    def measured(self, kind: type[MeasuredCluster] = MeasuredCluster) -> Cluster:
        """Stages of this machine: steps of a model of 1.1 billion parameters, made longer by the ratio of numbers."""
        record = json.loads(STEP.read_text("utf-8"))
        results = record["results"]
        curve = CostCurve(tokens=tuple(r["tokens"] for r in results), milliseconds=tuple(r["milliseconds"] for r in results))
        small = split_among(without_weights(record["model"]), 1, 1)[0][0]
        mine = sum(part.held.matrices + part.output.matrices for ranks in self.parts for part in ranks)
        return self.cluster(kind, curve=curve, share=mine / (small.held.matrices + small.output.matrices) / STAGES)

    def slow(self) -> Cluster:
        """The published system: what a layer and a row take besides is such that plain decoding is as published at batch 4 and 10."""
        few, many = sorted(PUBLISHED_PLAIN)
        taken = {b: b / PUBLISHED_PLAIN[b] for b in (few, many)}
        ours = {b: self.cluster().speed(b, CONTEXT, None, 1).seconds for b in (few, many)}
        a_row = ((taken[many] - ours[many]) - (taken[few] - ours[few])) / (many - few)
        fixed = taken[few] - ours[few] - few * a_row
        layers = sum(ranks[0].held.layers for ranks in self.parts)
        device = self.device.model_copy(update={"layer_us": fixed / layers * 1e6})
        return self.cluster(SlowCluster, device, row_seconds=a_row / STAGES)

    def variants(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What is compared, the first as our engine runs it: what tree sizes there are, lanes, and the rest."""
        yield "as the engine runs it", {}
        yield "lanes that wait for one another", {"cluster": self.cluster(WaitingCluster)}
        yield f"trees of {FIXED} nodes at every batch", {"nodes": (FIXED,)}
        yield "one lane: one stage works at a time", {"lanes": 1}
        yield f"both: {FIXED} nodes, one stage at a time", {"nodes": (FIXED,), "lanes": 1}
        yield "… and static batches", {"nodes": (FIXED,), "lanes": 1, "is_static": True}
        slow = {"cluster": self.slow(), "nodes": (FIXED,), "lanes": 1, "is_static": True}
        yield "… and the time that the published system takes besides", slow
        yield "whole MI250 cards as devices", {"cluster": self.cluster(device=read_devices()["mi250"])}
        yield "A100 of 80 GB", {"cluster": self.cluster(device=read_devices()["a100-80gb"])}
        yield "stages of this machine, measured and scaled", {"cluster": self.measured()}
        yield "… where lanes wait for one another", {"cluster": self.measured(WaitingMeasuredCluster)}

    def run(
        self,
        cluster: Cluster | None = None,
        nodes: tuple[int, ...] = NODES,
        lanes: int | None = None,
        is_static: bool = False,
    ) -> dict[str, list[float] | list[int]]:
        """Tokens/s by batch, plain and speculative, and drafted tokens."""
        used, plain, speculative, drafted = cluster or self.cluster(), [], [], []
        for batch in BATCHES:
            plain.append(used.speed(batch, CONTEXT, None, lanes).tokens_per_second)
            found = []
            for count in nodes:
                drafting = self.draftings[count]
                share = static_share(batch, count) if is_static else 1.0
                kept = replace(drafting, emitted=drafting.emitted * share)
                found.append((used.speed(batch, CONTEXT, kept, lanes).tokens_per_second, count))
            best = max(found)
            speculative.append(best[0])
            drafted.append(best[1])
        return {"plain": plain, "speculative": speculative, "drafted": drafted}


def stages() -> Record:
    """Every variant."""
    study = StageStudy()
    slow = study.slow()
    assert isinstance(slow, SlowCluster)
    found = {name: study.run(**how) for name, how in study.variants()}
    return {
        "batches": BATCHES,
        "published": {"speculative": PUBLISHED, "plain": PUBLISHED_PLAIN},
        "tokens_per_step": {nodes: medusa_tokens(nodes) for nodes in NODES},
        "static_share": {batch: static_share(batch, FIXED) for batch in BATCHES},
        "besides": {"layer_us": slow.device.layer_us, "row_us": slow.row_seconds * 1e6},
        "variants": found,
    }
