"""A head in a file of its own: one linear layer over the last hidden state and the token after it, for every drafted token again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from echelon.heads.base import Head, HiddenStateName, Recipe
from echelon.heads.parts import Shared


@dataclass(frozen=True)
class ToyOptions:
    bias: bool = True


class ToyHead(Head):
    method: ClassVar[str] = "toy_head"
    options_class: ClassVar[type] = ToyOptions
    recipe = Recipe(depth=2, decay=0.5, tokens=1.0)
    hidden_state_names: tuple[HiddenStateName, ...] = ("last",)

    def __init__(self, config: LlamaConfig, shared: Shared, options: ToyOptions) -> None:
        super().__init__()
        self.config, self.shared, self.options = config, shared, options
        self.mix = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=options.bias)

    def encode(self, features: Tensor, tokens: Tensor, positions: Tensor, **context: Any) -> Tensor:
        out: Tensor = self.mix(torch.cat([features, self.shared.embed(tokens).to(features.dtype)], -1))
        return out

    def extend(self, states: Tensor, tokens: Tensor, positions: Tensor, depth: int, **context: Any) -> Tensor:
        return self.encode(states, tokens, positions)

    def logits(self, states: Tensor, depth: int) -> Tensor:
        return self.shared.output(states)
