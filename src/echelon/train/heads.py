"""Training of heads, on a frozen target whose hidden states are computed as they are needed.

A run lives in one folder: `training.json` (its settings), `checkpoint.pt`, `log.jsonl`, `curves.png` and, at the end, the head. Batch n and
the noise in it are functions of (seed, n), so a run that was killed goes on to the same weights.
"""

from __future__ import annotations

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
from echelon.pyplot import pyplot_or_refusal
from echelon.train.examples import Teacher, unroll
from echelon.train.files import check_same_run, only_trainer, writing
from echelon.train.losses import depth_loss, noised
from echelon.train.precision import mixed_precision, teaching
from echelon.train.text import Data, fingerprint
from echelon.train.trainer import Log, Trainer, draw

MOST_SEEDS = 2**31  # a batch's seed is ten million times this one's, and 64 bits hold it
TEXTS_EVALUATED = 8  # at once
DEPTHS_EVALUATED = 5  # of heads that can go on for ever
Report = Callable[[int, int, float], None]  # steps done, steps in all, loss


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of a run; `ConfigError` for one that is out of its range.

    `batch_size`: texts a step; `rate`: peak learning rate; `is_soft`: the targets are the frozen model's distributions; `depth`: tokens
    ahead that training looks; None: the recipe's. `options` are the head's. Of a method that pretrains, `steps` are those of pretraining,
    which may be none; then come `fine_tuning`, a quarter as many without.
    """

    method: StrictStr
    steps: Annotated[StrictInt, Field(ge=0)]
    rate: Annotated[StrictFloat, Field(ge=0.0, allow_inf_nan=False)] | None = None
    every: Annotated[StrictInt, Field(ge=1)] = 100
    seed: Annotated[StrictInt, Field(ge=0, lt=MOST_SEEDS)] = 0
    is_soft: StrictBool | None = None
    options: tuple[tuple[StrictStr, Any], ...] = ()
    depth: Annotated[StrictInt, Field(ge=1, le=64)] | None = None
    fine_tuning: Annotated[StrictInt, Field(ge=0)] | None = None
    batch_size: Annotated[StrictInt, Field(ge=2)] = 8

    def __post_init__(self) -> None:
        check_fields(self)
        if self.method not in (heads := method_names(Can.TRAIN, needs="head")):
            raise ConfigError(f"there is no recipe for {shown(self.method)}; known: {', '.join(heads)}, draft_model")
        if self.fine_tuning is not None and not self.recipe.pretrains:
            raise ConfigError(f"method {self.method} does not pretrain, so it has no fine_tuning; leave it out")
        if not self.num_steps:
            raise ConfigError("a run of no steps trains nothing; give at least 1")

    @property
    def num_steps(self) -> int:
        """All steps of the run."""
        return self.steps + self._num_fine_tuning

    @property
    def _num_fine_tuning(self) -> int:
        if not self.recipe.pretrains:
            return 0
        return max(1, self.steps // 4) if self.fine_tuning is None else self.fine_tuning

    @property
    def falling(self) -> int:
        """Steps at the end over which the rate falls."""
        return max(1, self._num_fine_tuning or int(self.recipe.fall * self.steps))

    def ids(self, data: Data, step: int) -> Tensor:
        """int64[batch_size, N]: the texts of a step."""
        if not self.recipe.pretrains:
            return data.batch(self.seed, step, self.batch_size)
        take = data.text_batch if step < self.steps else data.continuation_batch
        return take(self.seed, step, self.batch_size)

    @property
    def recipe(self) -> Recipe:
        """The method's recipe with the settings given here."""
        changed = {"rate": self.rate, "is_soft": self.is_soft, "depth": self.depth}
        published: Recipe = head_class(self.method).recipe
        return replace(published, **{k: v for k, v in changed.items() if v is not None})  # type: ignore[arg-type]

    def depth_at(self, step: int) -> int:
        """How many tokens ahead this step looks."""
        recipe = self.recipe
        return min(recipe.depth, recipe.first_depth) if step < recipe.first_part * self.steps else recipe.depth


@dataclass(frozen=True)
class Accuracy:
    """Accuracy by depth: share of held-out positions where the target's token is the head's first,
    or among its first five, on the true path.

    `tokens_per_step` is what a greedy chain of all depths would emit a step, the target's own token included.
    """

    top1: list[float]
    top5: list[float]
    tokens_per_step: float


def train_head(target: PreTrainedModel, data: Data, out: Path, config: TrainingConfig, report: Report = lambda *_: None) -> Head:
    """Train, or go on where an interrupted run in `out` stopped; the head is written to `out`.

    Raises
    ------
    ConfigError        `out` holds a run with other settings or one that goes on in another process, or the head has no such options
    OutputError        a file of the run cannot be written
    ModelLoadError     the run's checkpoints are damaged
    MissingExtraError  matplotlib is not installed
    """
    check_kind("target", target, PreTrainedModel)
    check_kind("data", data, Data)
    check_kind("config", config, TrainingConfig)
    check_callable("report", report, ConfigError)
    pyplot_or_refusal()  # it ends by drawing its curves
    out = Path(name_of(out, "out"))
    teacher = teaching(target)
    head = _new_head(teacher, data, config)
    with only_trainer(out):
        log = _train(Teacher(teacher, head), data, out, config, report)
        with writing(out / "model.safetensors"):
            save_head(head, out, target)
        with writing(out / "curves.png"):
            draw(log.lines, out / "curves.png", config.method)
    return head


def _train(teacher: Teacher, data: Data, out: Path, config: TrainingConfig, report: Report) -> Log:
    """Train a head in a folder that no other process trains in; the log of the run."""
    recipe, head = config.recipe, teacher.head
    settings = asdict(config) | asdict(recipe) | {"target": fingerprint(teacher.target), "data": data.digest}
    check_same_run(out / "training.json", settings)
    trainer = Trainer({"head": head}, out / "checkpoint.pt", config.num_steps, config.falling, recipe.rate, recipe.warm_up)
    log = Log(out / "log.jsonl", trainer.first)

    def learn_step(step: int) -> dict[str, float]:
        depth = config.depth_at(step)
        return {"loss": learn(teacher, config.ids(data, step), min(depth, head.max_depth or depth), config, step)}

    trainer.run(
        learn_step,
        lambda _: asdict(evaluate(teacher, data.held_out_continuations)),
        log,
        config.every,
        lambda done, losses: report(done, config.num_steps, losses["loss"]),
    )
    return log


def learn(teacher: Teacher, ids: Tensor, depth: int, config: TrainingConfig, step: int) -> float:
    """Add up the gradients of the recipe's loss over `ids` int64[B, N]; the loss.

    Each depth is differentiated down to its states at once, so that the logits of one depth alone are held.
    """
    head, recipe, total = teacher.head, config.recipe, 0.0
    generator = torch.Generator().manual_seed(config.seed * 10_000_000 + step)
    ids = ids.to(teacher.device)
    with mixed_precision(teacher.target):
        examples = teacher.examples(ids, depth, recipe.is_soft)
        features = noised(examples.features, recipe, examples.num_positions, generator)
        states = list(unroll(head, examples, features, depth))
        leaves = [s.detach().requires_grad_(s.requires_grad) for s in states]
        for k, leaf in enumerate(leaves):
            loss = depth_loss(head, leaf, examples, k, recipe)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
    roots = [(s, leaf) for s, leaf in zip(states, leaves, strict=True) if s.requires_grad]
    if roots:
        torch.autograd.backward([s for s, _ in roots], [leaf.grad for _, leaf in roots])
    return total


@torch.no_grad()
def evaluate(teacher: Teacher, texts: np.ndarray) -> Accuracy:
    """Accuracies over `texts` [n, N]."""
    head = teacher.head
    depth = head.max_depth or DEPTHS_EVALUATED
    hits: list[list[Tensor]] = [[] for _ in range(depth)]
    for rows in np.array_split(texts, max(1, len(texts) // TEXTS_EVALUATED)):
        with mixed_precision(teacher.target):
            examples = teacher.examples(torch.from_numpy(rows.astype(np.int64)).to(teacher.device), depth, False)
            for k, states in enumerate(unroll(head, examples, examples.features, depth)):
                hits[k].append(head.logits(states, k).topk(5).indices == examples.token(2 + k)[:, None])
    is_hit = torch.stack([torch.cat(h) for h in hits]).float()  # [depth, positions, 5]
    first = is_hit[..., 0]
    chain = 1 + float(first.cumprod(0).mean(1).sum())
    return Accuracy(first.mean(1).tolist(), is_hit.sum(-1).mean(1).tolist(), chain)


def _new_head(target: PreTrainedModel, data: Data, config: TrainingConfig) -> Head:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        head = build_head(config.method, target, **dict(config.options))
    head.choose_vocabulary(torch.from_numpy(np.bincount(data.continuations.ravel(), minlength=target.config.get_text_config().vocab_size)))
    head.start_from(target)
    head.to(target.device)
    return head
