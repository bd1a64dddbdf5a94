"""Clover-2 (Xiao et al. 2024, "Clover-2: Accurate Inference for Regressive Lightweight Speculative Decoding").

x = AttentionDecoder₁(h, e₁) of the hidden state h before the final norm and the token that follows it; two decoder layers and a norm give
s₁ = g; after that s_i = AttentionDecoder₂(s_{i−1}, e_i). The predicted feature is norm(FC₁ g) at first and norm(FC₂ [s_i; e_i]) later, and
the target's output layer reads it. Names and initial weights are those of the authors' code. A state is [s; predicted feature].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from echelon.heads.base import Head, HiddenStateName, Recipe
from echelon.heads.parts import (
    AttentionDecoder,
    Rotary,
    Shared,
    copy_last_layer,
    copy_norm,
    llama_layers,
    near_identity,
    prepare,
    run_layer,
)


@dataclass(frozen=True)
class Clover2Options:
    """`own_rows`: the head keeps a copy of the output layer's rows, because the target's embedding is another table."""

    num_layers: int = 2
    own_rows: bool = False


class Clover2Head(Head):
    """Attention decoders and decoder layers; a state [s = 2d] holds s and the predicted feature."""

    method: ClassVar[str] = "clover2"
    options_class: ClassVar[type] = Clover2Options
    recipe = Recipe(depth=5, decay=0.7, tokens=1.0, feature=10.0, is_soft=True)
    hidden_state_names: tuple[HiddenStateName, ...] = ("last_unnormed",)

    def __init__(self, config: LlamaConfig, shared: Shared, options: Clover2Options) -> None:
        super().__init__()
        self.config, self.shared, self.options, hidden = prepare(config), shared, options, config.hidden_size
        if options.own_rows:
            self.clover_embed_tokens = nn.Embedding(config.vocab_size, hidden).requires_grad_(False)
        self.layers, self.rotary = llama_layers(config, options.num_layers), Rotary(config)
        self.clover_norm, self.clover_head_norm = (LlamaRMSNorm(hidden, config.rms_norm_eps) for _ in range(2))
        self.clover_head_mlp, self.clover_head_mlp2 = nn.Linear(hidden, hidden), nn.Linear(2 * hidden, hidden)
        near_identity(self.clover_head_mlp)
        near_identity(self.clover_head_mlp2)
        self.clover_head_mlp_rnn, self.clover_head_mlp_rnn2 = (AttentionDecoder(config, is_second=True) for _ in range(2))

    def _rows(self, tokens: Tensor, like: Tensor) -> Tensor:
        embed = self.clover_embed_tokens if self.options.own_rows else self.shared.embed
        return embed(tokens).to(like.dtype)

    @classmethod
    def default_options(cls, target: PreTrainedModel) -> dict[str, Any]:
        return {"own_rows": not target.config.get_text_config().tie_word_embeddings}

    def encode(self, features: Tensor, tokens: Tensor, positions: Tensor, **context: Any) -> Tensor:
        x = self.clover_head_mlp_rnn(features, self._rows(tokens, features))
        for layer in self.layers:
            x = run_layer(layer, self.rotary, x, positions, context)
        x = self.clover_norm(x)
        return torch.cat([x, self.clover_head_norm(self.clover_head_mlp(x))], -1)

    def extend(self, states: Tensor, tokens: Tensor, positions: Tensor, depth: int, **context: Any) -> Tensor:  # noqa: ARG002
        before = states[:, : self.config.hidden_size]
        rows = self._rows(tokens, before)
        x = self.clover_head_mlp_rnn2(before, rows)
        return torch.cat([x, self.clover_head_norm(self.clover_head_mlp2(torch.cat([x, rows], -1)))], -1)

    def features(self, states: Tensor) -> Tensor:
        """[M, d]: the predicted hidden state of the target, after its final norm, at the last token taken in."""
        return states[:, self.config.hidden_size :]

    def logits(self, states: Tensor, depth: int) -> Tensor:  # noqa: ARG002
        return self.shared.output(self.features(states))

    @torch.no_grad()
    def start_from(self, target: nn.Module) -> None:
        """Layers and norms are the target's last ones."""
        copy_last_layer(self.layers, target)
        for norm in (self.clover_norm, self.clover_head_norm):
            copy_norm(norm, target)
        if self.options.own_rows:
            self.clover_embed_tokens.weight.copy_(target.get_output_embeddings().weight)  # type: ignore[operator]
