"""EAGLE (Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty"); EAGLE-2 grows other trees on its weights.

A state is a predicted feature, the target's hidden state after its final norm one token on: f' = layer(W [e; f] + b) of a feature f, or a
predicted one, and the token that follows it. The layer has no norm before its attention and none follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from echelon.heads.base import Head, HiddenStateName, Recipe
from echelon.heads.parts import Rotary, Shared, llama_layers, prepare, run_layer


@dataclass(frozen=True)
class EagleOptions:
    """`bias` of the layer that joins token and feature."""

    bias: bool = False


class EagleHead(Head):
    """One decoder layer; a state [s = d] is the predicted feature."""

    method: ClassVar[str] = "eagle"
    options_class: ClassVar[type] = EagleOptions
    recipe = Recipe(depth=1, decay=1.0, tokens=0.1, feature=1.0, is_soft=True, noise=0.1)
    hidden_state_names: tuple[HiddenStateName, ...] = ("last",)

    def __init__(self, config: LlamaConfig, shared: Shared, options: EagleOptions) -> None:
        super().__init__()
        self.config, self.shared, self.options = prepare(config), shared, options
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=options.bias)
        self.layers, self.rotary = llama_layers(config, 1), Rotary(config)
        self.layers[0].input_layernorm = nn.Identity()

    def encode(self, features: Tensor, tokens: Tensor, positions: Tensor, **context: Any) -> Tensor:
        x = self.fc(torch.cat([self.shared.embed(tokens).to(features.dtype), features], -1))
        return run_layer(self.layers[0], self.rotary, x, positions, context)

    def extend(self, states: Tensor, tokens: Tensor, positions: Tensor, depth: int, **context: Any) -> Tensor:  # noqa: ARG002
        return self.encode(states, tokens, positions, **context)

    def features(self, states: Tensor) -> Tensor:
        """[M, d]: the predicted hidden states themselves."""
        return states

    def logits(self, states: Tensor, depth: int) -> Tensor:  # noqa: ARG002
        return self.shared.output(states)
