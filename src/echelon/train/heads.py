"""One trainer for every head, on a frozen target whose hidden states are computed as they are needed.

A run lives in one folder: `training.json` (its settings), `checkpoint.pt`, `log.jsonl`, `curves.png` and, at the end, the head. Batch n and
the noise in it are functions of (seed, n), so a run that was killed goes on to the same weights.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr
from torch import Tensor
from transformers import PreTrainedModel

from echelon.errors import ConfigError
from echelon.heads.base import Head, Recipe
from echelon.heads.checkpoints import build_head, save_head
from echelon.inputs import check_callable, check_fields, check_kind, name_of, shown
from echelon.methods import Can, head_class, method_names
from echelon.train.curves import draw
from echelon.train.data import Data, fingerprint
from echelon.train.files import only_trainer, write_text, writing
from echelon.train.lessons import lesson, unroll
from echelon.train.loop import Loop
from echelon.train.losses import depth_loss, noised

ROWS_PER_BATCH = 8
MOST_SEEDS = 2**31  # a batch's seed is ten million times this one's, and 64 bits hold it
DEPTHS_EVALUATED = 5  # of heads that can go on for ever
Report = Callable[[int, int, float], None]  # steps done, steps in all, loss


@dataclass(frozen=True)
class Plan:
    """Settings of a run; `ConfigError` for one that is out of its range.

    `rate`: peak learning rate; `is_soft`: the targets are the frozen model's distributions; `depth`: tokens ahead that training looks;
    None: the recipe's. `options` are the head's.
    """

    method: StrictStr
    steps: Annotated[StrictInt, Field(ge=1)]
    rate: Annotated[StrictFloat, Field(ge=0.0, allow_inf_nan=False)] | None = None
    every: Annotated[StrictInt, Field(ge=1)] = 100
    seed: Annotated[StrictInt, Field(ge=0, lt=MOST_SEEDS)] = 0
    is_soft: StrictBool | None = None
    options: tuple[tuple[StrictStr, Any], ...] = ()
    depth: Annotated[StrictInt, Field(ge=1)] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.method not in (heads := method_names(Can.TRAIN, needs="head")):
            raise ConfigError(f"there is no recipe for {shown(self.method)}; known: {', '.join(heads)}, draft_model")

    @property
    def recipe(self) -> Recipe:
        changed = {"rate": self.rate, "is_soft": self.is_soft, "depth": self.depth}
        published: Recipe = head_class(self.method).recipe
        return replace(published, **{k: v for k, v in changed.items() if v is not None})  # type: ignore[arg-type]

    def depth_at(self, step: int) -> int:
        """How many tokens ahead this step looks."""
        recipe = self.recipe
        return min(recipe.depth, recipe.first_depth) if step < recipe.first_part * self.steps else recipe.depth


@dataclass(frozen=True)
class Accuracy:
    """By depth: share of held-out places where the target's token is the head's first, or among its first five, on the true path.

    `tokens_per_step` is what a greedy chain of all depths would emit a step, the target's own token included.
    """

    top1: list[float]
    top5: list[float]
    tokens_per_step: float


def train_head(target: PreTrainedModel, data: Data, out: Path, plan: Plan, report: Report = lambda *_: None) -> Head:
    """Train, or go on where an interrupted run in `out` stopped; the head is written to `out`.

    Raises
    ------
    ConfigError     `out` holds a run with other settings or one that goes on in another process, or the head has no such options
    OutputError     a file of the run cannot be written
    ModelLoadError  the run's checkpoints are damaged
    """
    check_kind("target", target, PreTrainedModel)
    check_kind("data", data, Data)
    check_kind("plan", plan, Plan)
    check_callable("report", report, ConfigError)
    out = Path(name_of(out, "out"))
    head, recipe = _new_head(target, data, plan), plan.recipe
    with only_trainer(out):
        _train(head, recipe, target, data, out, plan, report)
    return head


def _train(head: Head, recipe: Recipe, target: PreTrainedModel, data: Data, out: Path, plan: Plan, report: Report) -> None:
    """Train a head in a folder that no other process trains in, and write it there."""
    _check_same_run(out / "training.json", asdict(plan) | asdict(recipe) | {"target": fingerprint(target)})
    falling = max(1, int(recipe.fall * plan.steps))
    loop = Loop({"head": head}, out / "checkpoint.pt", plan.steps, falling, recipe.rate, recipe.warm_up)
    log = Log(out / "log.jsonl", loop.first)
    start = time.monotonic()
    for step in range(loop.first, plan.steps):
        depth = plan.depth_at(step)
        loss = learn(head, target, data.batch(plan.seed, step, ROWS_PER_BATCH), min(depth, head.max_depth or depth), plan, step)
        loop.apply(step)
        log.write(step=step + 1, loss=loss, seconds=time.monotonic() - start)
        if (step + 1) % plan.every == 0 or step + 1 == plan.steps:
            log.write(step=step + 1, **asdict(evaluate(head, target, data.said_held_out)))
            loop.save(step + 1)
        report(step + 1, plan.steps, loss)
    with writing(out / "model.safetensors"):
        save_head(head, out, target)
    with writing(out / "curves.png"):
        draw(log.lines, out / "curves.png", plan.method)


def learn(head: Head, target: PreTrainedModel, ids: Tensor, depth: int, plan: Plan, step: int) -> float:
    """Add up the gradients of the recipe's loss over `ids` int64[B, N]; the loss.

    Each depth is differentiated down to its states at once, so that the logits of one depth alone are held.
    """
    recipe, total = plan.recipe, 0.0
    generator = torch.Generator().manual_seed(plan.seed * 10_000_000 + step)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = lesson(target, head, ids, depth, recipe.is_soft)
        features = noised(given.features, recipe, given.num_places, generator)
        states = list(unroll(head, given, features, depth))
        leaves = [s.detach().requires_grad_(s.requires_grad) for s in states]
        for k, leaf in enumerate(leaves):
            loss = depth_loss(head, leaf, given, k, recipe)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
    roots = [(s, leaf) for s, leaf in zip(states, leaves, strict=True) if s.requires_grad]
    if roots:
        torch.autograd.backward([s for s, _ in roots], [leaf.grad for _, leaf in roots])
    return total


@torch.no_grad()
def evaluate(head: Head, target: PreTrainedModel, texts: np.ndarray) -> Accuracy:
    """Accuracies over `texts` [n, N]."""
    depth = head.max_depth or DEPTHS_EVALUATED
    hits: list[list[Tensor]] = [[] for _ in range(depth)]
    for rows in np.array_split(texts, max(1, len(texts) // ROWS_PER_BATCH)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            given = lesson(target, head, torch.from_numpy(rows.astype(np.int64)), depth, False)
            for k, states in enumerate(unroll(head, given, given.features, depth)):
                hits[k].append(head.logits(states, k).topk(5).indices == given.token(2 + k)[:, None])
    found = torch.stack([torch.cat(h) for h in hits]).float()  # [depth, places, 5]
    first = found[..., 0]
    chain = 1 + float(first.cumprod(0).mean(1).sum())
    return Accuracy(first.mean(1).tolist(), found.sum(-1).mean(1).tolist(), chain)


def _new_head(target: PreTrainedModel, data: Data, plan: Plan) -> Head:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        head = build_head(plan.method, target, **dict(plan.options))
    head.choose_vocabulary(torch.from_numpy(np.bincount(data.said.ravel(), minlength=target.config.get_text_config().vocab_size)))
    head.start_from(target)
    return head


def _check_same_run(file: Path, settings: dict[str, Any]) -> None:
    settings = json.loads(json.dumps(settings))
    before = json.loads(file.read_text("utf-8")) if file.exists() else settings
    if other := [f"{k} = {before.get(k)!r} there, {v!r} here" for k, v in settings.items() if before.get(k) != v]:
        raise ConfigError(f"{file.parent} holds a run with other settings ({'; '.join(other)}); choose another folder, or repeat those")
    write_text(file, json.dumps(settings, indent=1) + "\n")


class Log:
    """Lines of numbers, one a step; what a killed run wrote after its last checkpoint is dropped."""

    def __init__(self, file: Path, first: int) -> None:
        self._file = file
        lines = file.read_text("utf-8").splitlines() if file.exists() else []
        self.lines: list[dict[str, Any]] = [x for line in lines if (x := _whole(line)) and x["step"] <= first]
        write_text(file, "".join(json.dumps(x) + "\n" for x in self.lines))

    def write(self, **values: Any) -> None:
        self.lines.append(values)
        with writing(self._file), self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def _whole(line: str) -> dict[str, Any] | None:
    """A line of the log, or None where the run was killed in the middle of it."""
    try:
        values: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return values
