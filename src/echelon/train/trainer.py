"""The one training loop: learning rate, optimisers, log and its curves, evaluations and checkpoints that survive being killed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.pyplot import pyplot_or_refusal
from echelon.train.files import load_checkpoint, replacing, save_checkpoint, writing


def optimizers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan 2024) for the matrices inside the layers, AdamW for embeddings, output layers, norms and biases; frozen ones stay."""
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    is_inside = [p.ndim == 2 and "embed" not in n and "lm_head" not in n and "outputs" not in n for n, p in trained]
    inside, outside = ([p for (_, p), i in zip(trained, is_inside, strict=True) if i == wanted] for wanted in (True, False))
    return [
        *([torch.optim.Muon(inside, lr=rate, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw")] if inside else []),
        *([torch.optim.AdamW(outside, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)] if outside else []),
    ]


def rate_factor(step: int, steps: int, decay: int, warm_up: int) -> float:
    """Up linearly over `warm_up` steps, constant, and down linearly to zero over the last `decay` steps."""
    return min((step + 1) / warm_up, 1.0, (steps - step) / decay)


class Trainer:
    """Trains models for `steps` steps. A rerun resumes at the last checkpoint, to the same weights."""

    def __init__(self, models: dict[str, nn.Module], checkpoint: Path, steps: int, decay: int, rate: float, warm_up: int = 100) -> None:
        self.models, self.checkpoint, self.steps, self.decay = models, checkpoint, steps, decay
        self.rate, self.warm_up = rate, warm_up
        self.optimizers = [o for model in models.values() for o in optimizers(model, rate)]
        self.first = 0
        if (state := load_checkpoint(checkpoint)) is not None:
            self.first = int(state["step"])
            for name, model in models.items():
                model.load_state_dict(state[name])
            for optimizer, saved in zip(self.optimizers, state["optims"], strict=True):
                optimizer.load_state_dict(saved)

    def run(
        self,
        learn: Callable[[int], dict[str, float]],
        evaluate: Callable[[int], dict[str, Any]],
        log: Log,
        every: int,
        report: Callable[[int, dict[str, float]], None],
    ) -> None:
        """Make the steps that are left. `learn(step)` adds up gradients and gives losses by name; after every `every` steps, and the last,
        the results of `evaluate(steps done)` are logged and a checkpoint is saved; `report(steps done, losses)` follows each step.
        """
        start = time.monotonic()
        for step in range(self.first, self.steps):
            losses, done = learn(step), step + 1
            self._update(step)
            log.write(step=done, **losses, seconds=time.monotonic() - start)
            if done % every == 0 or done == self.steps:
                log.write(step=done, **evaluate(done))
                self._save(done)
            report(done, losses)

    def _update(self, step: int) -> None:
        """One optimiser step at the rate of this step."""
        factor = rate_factor(step, self.steps, self.decay, self.warm_up)
        for model in self.models.values():
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _save(self, done: int) -> None:
        states = {name: model.state_dict() for name, model in self.models.items()}
        save_checkpoint({"step": done, **states, "optims": [o.state_dict() for o in self.optimizers]}, self.checkpoint)


class Log:
    """Lines of numbers, at least one a step; what a killed run wrote after its last checkpoint is dropped.

    The phases of a run may share a file: each line bears the `fields` of its phase.
    """

    def __init__(self, file: Path, first: int, **fields: str) -> None:
        self._file, self._fields = file, fields
        lines = file.read_text("utf-8").splitlines() if file.exists() else []
        self.lines = [x for line in lines if (x := _whole(line)) and (x["step"] <= first or not fields.items() <= x.items())]
        with replacing(file) as part:
            part.write_text("".join(json.dumps(x) + "\n" for x in self.lines), "utf-8")

    def write(self, **values: Any) -> None:
        """Append a line."""
        values = self._fields | values
        self.lines.append(values)
        with writing(self._file), self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def _whole(line: str) -> dict[str, Any] | None:
    """A line of the log, or None where the run was killed in the middle of it."""
    try:
        return dict(json.loads(line))
    except ValueError:
        return None


def draw(lines: list[dict[str, Any]], file: Path, title: str) -> None:
    """Loss, and top-1 and top-5 accuracy by depth, over the steps of a log."""
    pyplot = pyplot_or_refusal()
    losses = [x for x in lines if "loss" in x]
    measured = [x for x in lines if "top1" in x]
    figure, (left, *rest) = pyplot.subplots(1, 3, figsize=(13, 4))
    left.plot([x["step"] for x in losses], [x["loss"] for x in losses], linewidth=0.8)
    left.set(title=f"{title}: loss", xlabel="step", ylabel="nats a place")
    for axes, key in zip(rest, ("top1", "top5"), strict=True):
        for depth in range(len(measured[0][key]) if measured else 0):
            axes.plot([x["step"] for x in measured], [100 * x[key][depth] for x in measured], marker=".", label=f"depth {depth}")
        axes.set(title=f"{key[:3]}-{key[3:]} accuracy on held-out text of the target", xlabel="step", ylabel="%", ylim=(0, 100))
        axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
