"""Medusa (Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads").

Head k reads the last hidden state at t and says what stands at t + k + 1; no head knows what the others said. A state is that hidden
state, whatever has been drafted since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from echelon.heads.base import Head, HiddenStateName, Recipe
from echelon.heads.parts import ResBlock, Shared


@dataclass(frozen=True)
class MedusaOptions:
    """`own_output`: every head has an output layer of its own, as in the paper; otherwise all use the target's."""

    num_heads: int = 5
    num_layers: int = 1
    own_output: bool = False


class MedusaHead(Head):
    """Residual blocks, one stack a depth. A state [s = d] is the target's hidden state."""

    method: ClassVar[str] = "medusa"
    is_by_place: ClassVar[bool] = True
    options_class: ClassVar[type] = MedusaOptions
    recipe = Recipe(depth=16, decay=0.8, tokens=1.0)
    hidden_state_names: tuple[HiddenStateName, ...] = ("last",)

    def __init__(self, config: LlamaConfig, shared: Shared, options: MedusaOptions) -> None:
        super().__init__()
        self.config, self.shared, self.options, self.max_depth = config, shared, options, options.num_heads
        hidden = config.hidden_size
        self.blocks = nn.ModuleList(nn.Sequential(*(ResBlock(hidden) for _ in range(options.num_layers))) for _ in range(options.num_heads))
        outputs = options.num_heads if options.own_output else 0
        self.outputs = nn.ModuleList(nn.Linear(hidden, config.vocab_size, bias=False) for _ in range(outputs))

    def encode(self, features: Tensor, tokens: Tensor, positions: Tensor, **context: Any) -> Tensor:  # noqa: ARG002
        return features

    def extend(self, states: Tensor, tokens: Tensor, positions: Tensor, depth: int, **context: Any) -> Tensor:  # noqa: ARG002
        return states

    def logits(self, states: Tensor, depth: int) -> Tensor:
        hidden = self.blocks[depth](states)
        logits: Tensor = self.outputs[depth](hidden) if self.options.own_output else self.shared.output(hidden)
        return logits

    def keep(self, depth: int) -> None:
        """The first `depth` heads."""
        if depth < len(self.blocks):
            self.blocks, self.outputs, self.max_depth = self.blocks[:depth], self.outputs[:depth], depth

    @torch.no_grad()
    def start_from(self, target: nn.Module) -> None:
        """Every output layer is the target's."""
        for output in self.outputs:
            output.weight.copy_(target.get_output_embeddings().weight)  # type: ignore[operator]
