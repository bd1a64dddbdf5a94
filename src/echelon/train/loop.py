"""The steps of a training phase: learning rate, optimisers, checkpoints that survive being killed."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from echelon.train.files import load_checkpoint, save_checkpoint


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


class Loop:
    """Steps of one training phase. A rerun resumes at the last checkpoint."""

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

    def update(self, step: int, loss: Tensor) -> None:
        """One optimiser step at the rate of this step."""
        loss.backward()  # type: ignore[no-untyped-call]
        self.apply(step)

    def apply(self, step: int) -> None:
        """The same for gradients that are there already."""
        factor = rate_factor(step, self.steps, self.decay, self.warm_up)
        for model in self.models.values():
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def save(self, done: int) -> None:
        states = {name: model.state_dict() for name, model in self.models.items()}
        save_checkpoint({"step": done, **states, "optims": [o.state_dict() for o in self.optimizers]}, self.checkpoint)
