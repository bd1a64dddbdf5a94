"""Tiny heads that are right now and then: with and without attention, with and without a reading of what they drafted."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from echelon.heads.base import Head
from echelon.model.attention import IMPLEMENTATION


def tied(target: Any) -> tuple[Tensor, Tensor]:
    """Output rows and input embeddings of a target."""
    return target.get_output_embeddings().weight.detach().clone(), target.get_input_embeddings().weight.detach().clone()


class Independent(Head):
    """Medusa-like: every depth reads the target's last hidden state alone, through a matrix of its own."""

    method, hidden_state_names, max_depth = "medusa", ("last",), 4

    def __init__(self, target: Any, seed: int = 0) -> None:
        super().__init__()
        output, _ = tied(target)
        generator = torch.Generator().manual_seed(seed)
        size = output.shape[1]
        self.matrices = nn.ParameterList(
            torch.eye(size) + torch.randn(size, size, generator=generator) * 0.3 for _ in range(self.max_depth)
        ).to(output.dtype)
        self.output = nn.Parameter(output)

    def encode(self, features: Tensor, tokens: Tensor, positions: Tensor, **context: Any) -> Tensor:
        return features

    def extend(self, states: Tensor, tokens: Tensor, positions: Tensor, depth: int, **context: Any) -> Tensor:
        return states

    def logits(self, states: Tensor, depth: int) -> Tensor:
        return F.linear(F.linear(states, self.matrices[depth]), self.output)


class Recurrent(Head):
    """Clover-like: an attention layer over the text, and a recurrence without attention over what is drafted."""

    method, hidden_state_names, max_depth = "clover", ("last_unnormed",), None

    def __init__(self, target: Any, seed: int = 0) -> None:
        super().__init__()
        output, embeddings = tied(target)
        self.layer = Layer(target, seed)
        self.embeddings, self.output = nn.Parameter(embeddings), nn.Parameter(output)

    def encode(self, features: Tensor, tokens: Tensor, positions: Tensor, **context: Any) -> Tensor:
        return self.layer(features + self.embeddings[tokens], positions, context)

    def extend(self, states: Tensor, tokens: Tensor, positions: Tensor, depth: int, **context: Any) -> Tensor:
        return 0.5 * states + self.embeddings[tokens]

    def logits(self, states: Tensor, depth: int) -> Tensor:
        return F.linear(F.layer_norm(states, states.shape[-1:]), self.output)


class Autoregressive(Recurrent):
    """EAGLE-like: the same attention layer for the text and for what is drafted."""

    method = "eagle"

    def extend(self, states: Tensor, tokens: Tensor, positions: Tensor, depth: int, **context: Any) -> Tensor:
        return self.layer(states + self.embeddings[tokens], positions, context)


class Deep(Autoregressive):
    """EAGLE-3-like: fuses the inputs of two layers and the last state."""

    method, hidden_state_names = "eagle3", ("layer:0", "layer:1", "last")

    def encode(self, features: Tensor, tokens: Tensor, positions: Tensor, **context: Any) -> Tensor:
        return super().encode(sum(features.chunk(3, -1)), tokens, positions, **context)  # type: ignore[arg-type]


class Layer(nn.Module):
    """One decoder layer of random weights."""

    def __init__(self, target: Any, seed: int) -> None:
        super().__init__()
        given = target.config
        config = LlamaConfig(
            hidden_size=given.hidden_size,
            intermediate_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=1,
            head_dim=16,
        )
        config._attn_implementation = IMPLEMENTATION
        self.block = LlamaDecoderLayer(config, 0)
        self.rotary = LlamaRotaryEmbedding(config)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.block.parameters():
            if parameter.ndim >= 2:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        self.to(target.dtype)

    def forward(self, x: Tensor, positions: Tensor, context: dict[str, Any]) -> Tensor:
        out = self.block(x[None], position_embeddings=self.rotary(x[None], positions[None]), **context)
        return (out[0] if isinstance(out, tuple) else out)[0]


class Knowing(Head):
    """A head that has also read the true texts: after some tokens it ranks first what follows them there most often."""

    method = "eagle"

    def __init__(self, inner: Head, texts: list[list[int]], vocabulary: int, share: float = 0.8) -> None:
        super().__init__()
        self.inner, self.hidden_state_names, self.max_depth = inner, inner.hidden_state_names, inner.max_depth
        self.method = inner.method  # type: ignore[misc]
        self.follows = torch.zeros(5, vocabulary, vocabulary)  # after how many more tokens
        for text in texts:
            for ahead in range(5):
                for a, b in zip(text, text[ahead + 1 :], strict=False):
                    self.follows[ahead, a, b] += 1
        self.knows = torch.rand(vocabulary, generator=torch.Generator().manual_seed(7)) < share

    def encode(self, features: Tensor, tokens: Tensor, positions: Tensor, **context: Any) -> Tensor:
        states = self.inner.encode(features, tokens, positions, **context)
        return torch.cat([states, tokens[:, None].to(states.dtype)], 1)

    def extend(self, states: Tensor, tokens: Tensor, positions: Tensor, depth: int, **context: Any) -> Tensor:
        if isinstance(self.inner, Independent):
            return states
        inner = self.inner.extend(states[:, :-1].contiguous(), tokens, positions, depth, **context)
        return torch.cat([inner, tokens[:, None].to(inner.dtype)], 1)

    def logits(self, states: Tensor, depth: int) -> Tensor:
        last, ahead = states[:, -1].long(), depth if isinstance(self.inner, Independent) else 0
        return self.inner.logits(states[:, :-1], depth).float() + 20 * (self.knows[last, None] * self.follows[ahead, last])


KINDS = {"independent": Independent, "recurrent": Recurrent, "autoregressive": Autoregressive, "deep": Deep}
