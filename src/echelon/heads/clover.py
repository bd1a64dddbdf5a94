"""Clover (Xiao et al. 2024, "Clover: Regressive Lightweight Speculative Decoding with Sequential Knowledge").

Medusa's heads with three blocks, each of which can be left out; without any of them this is Medusa with the target's output layer:

augmenting          one more decoder layer over the whole text, begun as the target's last, before the first head
regressive          the state of head i takes in the token that head i − 1 drafted: h_i = h_{i−1} + SiLU(W [RMSNorm(h_{i−1}); e])
attention_decoder   does so by attention instead: h_i = h_{i−1} + SiLU((q·k) v), with q of the state and k, v of the token

e is the token's row of the output layer, normalised to length 1. The paper leaves open where the final norm stands; here states live
after it, so the augmenting block reads the hidden state before the target's norm and ends in a norm of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from echelon.errors import ConfigError
from echelon.heads.base import Head, Recipe
from echelon.heads.parts import (
    AttentionDecoder,
    ResBlock,
    Rotary,
    Shared,
    copy_last_layer,
    copy_norm,
    llama_layers,
    prepare,
    run_layer,
)


@dataclass(frozen=True)
class CloverOptions:
    """`own_rows`: the head keeps a copy of the output layer's rows, because the target's embedding is another table."""

    num_heads: int = 3
    augmenting: bool = True
    regressive: bool = True
    attention_decoder: bool = True
    own_rows: bool = False

    def __post_init__(self) -> None:
        if self.attention_decoder and not self.regressive:
            raise ConfigError("Clover's attention decoder reads the token that its regressive connection brings; ablate both, or neither")


class Regression(nn.Module):
    """The regressive connection without attention, the identity at first."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.linear = nn.Linear(2 * config.hidden_size, config.hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor, embeddings: Tensor) -> Tensor:
        return states + F.silu(self.linear(torch.cat([self.input_layernorm(states), embeddings], -1)))


class CloverHead(Head):
    """Clover (Xiao et al. 2024): a recurrent head over the target's last hidden state."""

    rows: Tensor  # [V, d] of the output layer, where the head keeps its own
    method: ClassVar[str] = "clover"
    options_class: ClassVar[type] = CloverOptions
    recipe = Recipe(depth=16, decay=0.8, tokens=1.0)

    def __init__(self, config: LlamaConfig, shared: Shared, options: CloverOptions) -> None:
        super().__init__()
        self.config, self.shared, self.options, self.max_depth = prepare(config), shared, options, options.num_heads
        self.hidden_state_names = ("last_unnormed",) if options.augmenting else ("last",)
        self.heads = nn.ModuleList(ResBlock(config.hidden_size) for _ in range(options.num_heads))
        self.layers = llama_layers(config, 1 if options.augmenting else 0)
        if options.augmenting:
            self.rotary, self.norm = Rotary(config), LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        if options.regressive:
            self.cell = AttentionDecoder(config, is_second=False) if options.attention_decoder else Regression(config)
        if options.own_rows and options.regressive:
            self.register_buffer("rows", torch.zeros(config.vocab_size, config.hidden_size))

    @classmethod
    def default_options(cls, target: PreTrainedModel) -> dict[str, Any]:
        return {"own_rows": not target.config.get_text_config().tie_word_embeddings}

    def encode(self, features: Tensor, tokens: Tensor, positions: Tensor, **context: Any) -> Tensor:
        for layer in self.layers:
            features = self.norm(run_layer(layer, self.rotary, features, positions, context))
        return self._take_in(features, tokens)

    def extend(self, states: Tensor, tokens: Tensor, positions: Tensor, depth: int, **context: Any) -> Tensor:  # noqa: ARG002
        return self._take_in(states, tokens)

    def _take_in(self, states: Tensor, tokens: Tensor) -> Tensor:
        if not self.options.regressive:
            return states
        rows = F.embedding(tokens, self.rows) if self.options.own_rows else self.shared.embed(tokens)
        out: Tensor = self.cell(states, F.normalize(rows, dim=-1).to(states.dtype))
        return out

    def logits(self, states: Tensor, depth: int) -> Tensor:
        return self.shared.output(self.heads[depth](states))

    @torch.no_grad()
    def start_from(self, target: nn.Module) -> None:
        """Initial weights: the augmenting block is the target's last layer and final norm."""
        copy_last_layer(self.layers, target)
        if self.options.augmenting:
            copy_norm(self.norm, target)
        if self.options.own_rows and self.options.regressive:
            self.rows.copy_(target.get_output_embeddings().weight)  # type: ignore[operator]
