"""How long heads learn and what it takes: `python -m benchmarks.plateau [--runs FOLDER] [METHOD ...]`, after `make heads`.

Of every run in FOLDER/METHOD the batches until its loss stays within two per cent of where it ends; seconds a batch and memory come from
a few batches of the same run in a process of its own, so that it does not matter how busy the machine was while the head was trained.
Written to docs/evidence/training.md and .json, beside what stands there of other methods. Succeeds where every head is there in at most
20 minutes with less than 2 GB.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import transformers

from benchmarks.options import parser_of
from benchmarks.workloads import EVIDENCE, ROOT
from echelon.bench.report import columns, described, write_json
from echelon.bench.throughput import environment
from echelon.demo import TARGET
from echelon.methods import method_names
from echelon.model.load.loading import load_plain
from echelon.train.heads import TrainingConfig, train_head
from echelon.train.text import prepare

HEADS = method_names(needs="head")
TOLERANCE, SMOOTHED = 0.02, 0.05  # of the loss; of a run's batches
MINUTES, BYTES = 20.0, 2e9  # what is promised
BATCHES = 16  # enough for the allocator to reach its peak


@dataclass(frozen=True)
class Learnt:
    """One run. `reached`: batches after which the loss stays within `TOLERANCE` of its end; `seconds_a_batch`: mean until then; top1, of
    held-out text, by depth; `commit`: of the code whose seconds and memory these are.
    """

    method: str
    batches: int
    reached: int
    seconds_a_batch: float
    memory_bytes: int
    loss: float
    top1: list[float]
    tokens_per_step: float
    commit: str

    @property
    def minutes(self) -> float:
        return self.reached * self.seconds_a_batch / 60

    @property
    def holds(self) -> bool:
        return self.minutes <= MINUTES and self.memory_bytes < BYTES


def plateau(losses: Sequence[float], first: int = 0) -> tuple[int, float]:
    """After how many batches the smoothed loss stays within `TOLERANCE` of its last value, and that value. The first ones do not count:
    they looked less far, so their losses are sums of fewer depths.
    """
    width = max(1, round(SMOOTHED * len(losses)))
    smooth = np.convolve(losses[first:], np.full(width, 1 / width), "valid")
    above = np.flatnonzero(smooth > (1 + TOLERANCE) * smooth[-1])
    return first + width + (int(above[-1]) + 1 if len(above) else 0), float(smooth[-1])


def cost(run: Path, data: Path) -> tuple[dict[int, float], int]:
    """Seconds a batch by how many tokens ahead it looks, and the most bytes held, of a few batches of the run's own settings, which nothing
    else shares the process with.
    """
    plain, tokenizer = load_plain(str(TARGET))
    count = json.loads((data / "data.json").read_text("utf-8"))["continuations"]
    plan, clock = replace(plan_of(run), steps=BATCHES, every=BATCHES), [time.perf_counter()]
    with tempfile.TemporaryDirectory() as folder:
        train_head(plain, prepare(plain, tokenizer, None, data, count), Path(folder), plan, lambda *_: clock.append(time.perf_counter()))
    seconds: dict[int, list[float]] = {}
    for step, taken in enumerate(np.diff(clock)):
        seconds.setdefault(plan.depth_at(step), []).append(float(taken))
    by_depth = {depth: statistics.median(taken[len(taken) // 4 :]) for depth, taken in seconds.items()}
    return by_depth, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def plan_of(run: Path) -> TrainingConfig:
    settings = json.loads((run / "training.json").read_text("utf-8"))
    return TrainingConfig(
        **{f.name: settings[f.name] for f in fields(TrainingConfig)} | {"options": tuple(map(tuple, settings["options"]))}
    )


def learnt(run: Path, data: Path, commit: str) -> Learnt:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text("utf-8").splitlines()]
    losses, last = [x["loss"] for x in lines if "loss" in x], next(x for x in reversed(lines) if "top1" in x)
    plan = plan_of(run)
    reached, loss = plateau(losses, sum(plan.depth_at(step) < plan.recipe.depth for step in range(plan.steps)))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        by_depth, memory = alone.submit(cost, run, data).result()
    seconds = statistics.fmean(by_depth[plan.depth_at(step)] for step in range(reached))
    return Learnt(run.name, len(losses), reached, seconds, memory, loss, last["top1"], last["tokens_per_step"], commit)


def others(file: Path, methods: Sequence[str]) -> list[Learnt]:
    """What `file` says of methods that are not among these."""
    if not file.exists():
        return []
    before = json.loads(file.read_text("utf-8"))
    return [Learnt(**{"commit": before["environment"]["commit"], **run}) for run in before["runs"] if run["method"] not in methods]


def as_markdown(found: Sequence[Learnt], where: dict[str, str]) -> str:
    text = (
        f"`python -m benchmarks.plateau` after `make heads`, on {described(where)}. Batches are of 2,056 tokens; the rate falls in the "
        "last quarter of a run, EAGLE-3's all along, and the loss with it, so a run is at its plateau when it ends, and a longer one has a "
        "lower plateau of its own."
    )
    by_head = columns(
        found,
        {
            "head": lambda f: f.method,
            "batches": lambda f: f.batches,
            "within 2 % of the last loss after": lambda f: f.reached,
            "seconds a batch": lambda f: f"{f.seconds_a_batch:.2f}",
            "minutes until then": lambda f: f"{f.minutes:.1f}",
            "memory, GB": lambda f: f"{f.memory_bytes / 1e9:.2f}",
            "loss": lambda f: f"{f.loss:.3f}",
            "top-1 of held-out text by depth, %": lambda f: ", ".join(f"{100 * x:.0f}" for x in f.top1),
            "tokens_per_step of a greedy chain": lambda f: f"{f.tokens_per_step:.2f}",
            "commit": lambda f: f.commit,
        },
    )
    return f"# How long heads learn\n\n{text}\n\n{by_head}\n"


def main() -> int:
    asked = parser_of(
        __doc__,
        {
            "methods": {"nargs": "*", "metavar": "METHOD", "default": HEADS},
            "--runs": {"type": Path, "default": ROOT / "build" / "heads"},
            "--output": {"type": Path, "default": EVIDENCE},
        },
    ).parse_args()
    transformers.logging.set_verbosity_error()
    where, file = environment(), asked.output / "training.json"
    found = [learnt(asked.runs / method, asked.runs / "data", where["commit"]) for method in asked.methods]
    found = sorted([*found, *others(file, asked.methods)], key=lambda f: HEADS.index(f.method))
    write_json(file, {"environment": where, "runs": [asdict(f) for f in found]})
    (asked.output / "training.md").write_text(text := as_markdown(found, where), "utf-8")
    print(text)
    return 0 if all(f.holds for f in found) else 1


if __name__ == "__main__":
    sys.exit(main())
