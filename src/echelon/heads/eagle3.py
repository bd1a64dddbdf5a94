"""EAGLE-3 (Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test").

g = W [h_low; h_mid; h_high] joins the target's hidden states at three depths. One decoder layer attends over [RMSNorm(e); RMSNorm(g)],
twice as wide as its residual g; its output is the state, and takes the place of g when the head goes on alone. An output layer of its own
reads the normed state, for the tokens of a smaller vocabulary: token i there is token i + d2t[i] of the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from echelon.errors import ConfigError, ModelLoadError
from echelon.heads.base import Head, Recipe
from echelon.heads.parts import Norm, Rotary, Shared, copy_norm, prepare, run_layer


@dataclass(frozen=True)
class Eagle3Options:
    """`depths`: the head reads the inputs of these decoder layers, in the order of the layers however they are given, as vLLM and SGLang
    collect them. `norm_before_residual`: the residual is RMSNorm(g), not g.
    """

    depths: tuple[int, int, int]
    draft_vocab_size: int
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "depths", tuple(sorted(self.depths)))


def default_depths(num_layers: int) -> tuple[int, int, int]:
    """Inputs of layers 2, n / 2 and n − 3, as the authors and vLLM have it; quarters where that is too shallow to be three depths."""
    if num_layers >= 7:
        return 2, num_layers // 2, num_layers - 3
    return num_layers // 4, num_layers // 2, 3 * num_layers // 4


class WideLayer(nn.Module):
    """A decoder layer whose attention reads token and hidden state side by side: x [1, T, 2d], the hidden state in the second half."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = norm_before_residual
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * hidden, narrow.out_features, bias=narrow.bias is not None))
        self.mlp = LlamaMLP(config)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (Norm(hidden, eps) for _ in range(3))

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        embeddings, hidden = x.chunk(2, -1)
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        x = residual + self.self_attn(torch.cat([self.input_layernorm(embeddings), normed], -1), **context)[0]
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3Head(Head):
    """One wide decoder layer and an output layer of its own; a state [s = d] is the layer's output."""

    method: ClassVar[str] = "eagle3"
    num_features: ClassVar[int] = 3
    options_class: ClassVar[type] = Eagle3Options
    recipe = Recipe(depth=7, decay=0.8, tokens=1.0, is_soft=True, rate=6e-3, fall=1.0, first_part=0.5, first_depth=2)
    d2t: Tensor  # int64[draft_vocab_size]
    t2d: Tensor  # bool[V]: the token can be drafted

    def __init__(self, config: LlamaConfig, shared: Shared, options: Eagle3Options) -> None:
        super().__init__()
        if not 0 < options.draft_vocab_size <= config.vocab_size:
            raise ConfigError(f"draft_vocab_size = {options.draft_vocab_size}, of a vocabulary of {config.vocab_size}; give 1 to that")
        self.config, self.shared, self.options, hidden = prepare(config), shared, options, config.hidden_size
        self.hidden_state_names = tuple(f"layer:{i}" for i in options.depths)
        self.fc = nn.Linear(self.num_features * hidden, hidden, bias=False)
        self.layers, self.rotary = nn.ModuleList([WideLayer(config, options.norm_before_residual)]), Rotary(config)
        self.norm = Norm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, options.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(options.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < options.draft_vocab_size)

    @classmethod
    def default_options(cls, target: PreTrainedModel) -> dict[str, Any]:
        text = target.config.get_text_config()
        return {"depths": default_depths(text.num_hidden_layers), "draft_vocab_size": min(text.vocab_size, 32000)}

    def encode(self, features: Tensor, tokens: Tensor, positions: Tensor, **context: Any) -> Tensor:
        return self._layer(self.fc(features), tokens, positions, context)

    def extend(self, states: Tensor, tokens: Tensor, positions: Tensor, depth: int, **context: Any) -> Tensor:  # noqa: ARG002
        return self._layer(states, tokens, positions, context)

    def _layer(self, hidden: Tensor, tokens: Tensor, positions: Tensor, context: dict[str, Any]) -> Tensor:
        x = torch.cat([self.shared.embed(tokens).to(hidden.dtype), hidden], -1)
        return run_layer(self.layers[0], self.rotary, x, positions, context)

    @property
    def draft_ids(self) -> Tensor:
        """int64[W]: ids of the tokens that the head can draft, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def draft_logits(self, states: Tensor, depth: int) -> Tensor:  # noqa: ARG002
        """Logits [N, W] over the draft vocabulary, from states [N, s]."""
        out: Tensor = self.lm_head(self.norm(states))
        return out

    def logits(self, states: Tensor, depth: int) -> Tensor:
        drafted = self.draft_logits(states, depth)
        return drafted.new_full((len(states), self.config.vocab_size), -torch.inf).index_copy(1, self.draft_ids, drafted)

    @torch.no_grad()
    def choose_vocabulary(self, counts: Tensor) -> None:
        """Draft the most frequent tokens."""
        chosen = counts.argsort(descending=True, stable=True)[: len(self.d2t)].sort().values
        self.d2t.copy_(chosen - torch.arange(len(chosen)))
        self.t2d.zero_()[chosen] = True

    @torch.no_grad()
    def start_from(self, target: nn.Module) -> None:
        """Output layer and norm are the target's, the rest is random."""
        self.lm_head.weight.copy_(target.get_output_embeddings().weight[self.draft_ids])  # type: ignore[operator]
        copy_norm(self.norm, target)

    def check(self, name: str) -> None:
        ids = self.draft_ids
        is_sound = bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < self.config.vocab_size
        if not is_sound or int(self.t2d.sum()) != len(ids) or not bool(self.t2d[ids].all()):
            raise ModelLoadError(
                f"d2t and t2d of the head {name!r} contradict each other: i + d2t[i] must rise, and t2d must mark the same tokens"
            )
