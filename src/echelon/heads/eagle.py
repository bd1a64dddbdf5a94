"""EAGLE (Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty"); EAGLE-2 grows other trees on its weights.

A state is a predicted feature, the target's hidden state after its final norm one token on: f' = layer(W [e; f] + b) of a feature f, or a
predicted one, and the token that follows it. The layer has no norm before its attention and none follows it.

Scylla (Yan et al. 2025, "Scaling Laws for Speculative Decoding") is EAGLE's features and losses with more layers, pretrained on raw text. A
norm behind the layers keeps predicted features in the range of the target's own, however many layers there are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from echelon.heads.base import Head, HiddenStateName, Recipe
from echelon.heads.parts import Norm, Rotary, Shared, copy_norm, llama_layers, prepare, run_layer


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
        self.norm: nn.Module = nn.Identity()

    def encode(self, features: Tensor, tokens: Tensor, positions: Tensor, **context: Any) -> Tensor:
        x = self.fc(torch.cat([self.shared.embed(tokens).to(features.dtype), features], -1))
        for layer in self.layers:
            x = run_layer(layer, self.rotary, x, positions, context)
        return self.norm(x)  # type: ignore[no-any-return]

    def extend(self, states: Tensor, tokens: Tensor, positions: Tensor, depth: int, **context: Any) -> Tensor:  # noqa: ARG002
        return self.encode(states, tokens, positions, **context)

    def features(self, states: Tensor) -> Tensor:
        """[M, d]: the predicted hidden states themselves."""
        return states

    def logits(self, states: Tensor, depth: int) -> Tensor:  # noqa: ARG002
        return self.shared.output(states)


@dataclass(frozen=True)
class ScyllaOptions(EagleOptions):
    """Number of decoder layers; `norm`: an RMSNorm follows them."""

    num_layers: int = 2
    norm: bool = True


class ScyllaHead(EagleHead):
    """EAGLE's head with `num_layers` layers and a norm behind them."""

    method: ClassVar[str] = "scylla"
    options_class: ClassVar[type] = ScyllaOptions
    recipe = replace(EagleHead.recipe, pretrains=True)
    options: ScyllaOptions

    def __init__(self, config: LlamaConfig, shared: Shared, options: ScyllaOptions) -> None:
        super().__init__(config, shared, options)
        self.layers.extend(llama_layers(config, options.num_layers)[1:])
        if options.norm:
            self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def start_from(self, target: nn.Module) -> None:
        """The norm begins as the target's own, whose output the features are."""
        if isinstance(self.norm, Norm):
            copy_norm(self.norm, target)
