"""Parts of heads, and what they borrow from their target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from echelon.checkpoint.facts import context_of, num_heads_of
from echelon.errors import UnsupportedModelError

# A hidden state that a head reads must not depend on the other rows of a call: these rotary embeddings read the largest position of all.
ROPE_OF_THE_WHOLE_CALL = {"dynamic", "longrope"}


@dataclass(frozen=True)
class Output:
    """The target's logits of states [M, d]: its output layer, and a factor (Granite, Cohere) or cap (Gemma) that its model puts behind."""

    layer: Callable[[Tensor], Tensor]
    factor: float = 1.0
    cap: float | None = None

    def __call__(self, states: Tensor) -> Tensor:
        logits = self.layer(states)
        logits = logits if self.factor == 1.0 else logits * self.factor
        return logits if not self.cap else torch.tanh(logits / self.cap) * self.cap


@dataclass(frozen=True)
class Shared:
    """The target's own embedding and output layer, called and never copied: int64[M] → [M, d], and [M, d] → [M, V]."""

    embed: Callable[[Tensor], Tensor]
    output: Callable[[Tensor], Tensor]


def head_config(target: Any) -> LlamaConfig:
    """The shape of one decoder layer beside a target with this configuration, in the words of Llama."""
    text = target.get_text_config()
    hidden, (num_heads, num_kv_heads) = int(text.hidden_size), num_heads_of(target)
    rope = getattr(text, "rope_parameters", None)
    theta = float(rope["rope_theta"]) if isinstance(rope, dict) and "rope_theta" in rope else 10000.0
    return LlamaConfig(
        vocab_size=int(text.vocab_size),
        hidden_size=hidden,
        intermediate_size=int(getattr(text, "intermediate_size", None) or getattr(text, "ffn_dim", None) or 4 * hidden),
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=int(getattr(text, "head_dim", None) or hidden // num_heads),
        max_position_embeddings=context_of(target),
        rms_norm_eps=float(getattr(text, "rms_norm_eps", None) or 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=False,
    )


def prepare(config: LlamaConfig) -> LlamaConfig:
    """The configuration of layers whose attention a context answers."""
    kind = config.rope_parameters["rope_type"]
    if kind in ROPE_OF_THE_WHOLE_CALL:
        raise UnsupportedModelError(
            f"a head with rope_type {kind!r} would read a row's length from its neighbours; train one with default, linear, yarn or llama3"
        )
    config._attn_implementation = "echelon"
    return config


class Rotary(LlamaRotaryEmbedding):  # type: ignore[misc]
    """Cosines and sines whose frequencies stay float32 when the head is cast, and are there when the head is built without memory."""

    def __init__(self, config: LlamaConfig) -> None:
        with torch.device("cpu"):
            super().__init__(config)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        exact: Tensor = self.inv_freq  # type: ignore[has-type]
        super()._apply(fn, recurse)
        self.inv_freq = exact.to(self.inv_freq.device)  # type: ignore[has-type]
        return self


def run_layer(layer: nn.Module, rotary: nn.Module, x: Tensor, positions: Tensor, context: dict[str, Any]) -> Tensor:
    """Run a decoder layer over packed tokens: [T, d'] at positions int[T] → [T, d]."""
    out: Tensor = layer(x[None], position_embeddings=rotary(x[None], positions[None]), **context)[0]
    return out


class Norm(LlamaRMSNorm):  # type: ignore[misc]
    """Llama's; where gradients are wanted, in the dtype of its input, which autograd's own would narrow for each matrix that reads it."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)  # type: ignore[no-any-return]
        out: Tensor = _Normed.apply(x, self.weight, self.variance_epsilon)  # type: ignore[no-untyped-call]
        return out


class _Normed(torch.autograd.Function):
    """weight · x / sqrt(mean(x²) + eps) of x [..., d], a few rows at a time: what is float32 on the way stays in the processor's caches."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps, out = eps, torch.empty_like(x)
        for rows, out_rows in zip(_pieces(x), _pieces(out), strict=True):
            out_rows.copy_(_over_rms(rows, eps)[0].mul_(weight))
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = torch.empty_like(x), torch.zeros_like(weight)
        for rows, above, out_rows in zip(_pieces(x), _pieces(upstream.contiguous()), _pieces(of_x), strict=True):
            normed, scale = _over_rms(rows, ctx.eps)
            product = above * normed
            of_weight += product.sum(0)
            along = product.mul_(weight).mean(-1, keepdim=True)
            out_rows.copy_((above * weight).sub_(normed.mul_(along)).mul_(scale))
        return of_x, of_weight, None


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x.view(-1, x.shape[-1]), 512)


def _over_rms(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """float32 [n, d]: x over its root mean square, and the factor [n, 1]."""
    x = x.float()
    scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return x * scale, scale


class ResBlock(nn.Module):
    """x + SiLU(W x + b), the identity at first (Cai et al. 2024)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class AttentionDecoder(nn.Module):
    """Clover's cell (Xiao et al. 2024): a state attends to one token, so each attention head has one weight in place of a softmax.

    The first paper takes SiLU of weight · value, the weight being a dot product; the second has biases, cosines and no SiLU.
    """

    def __init__(self, config: LlamaConfig, is_second: bool) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.num_heads, self.is_second, self.eps = config.num_attention_heads, is_second, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.q, self.k, self.v = (nn.Linear(hidden, hidden, bias=is_second) for _ in range(3))
        for linear in (self.q, self.k):
            near_identity(linear)
        if is_second:
            near_zero(self.v)
        else:
            nn.init.zeros_(self.v.weight)

    def forward(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """[M, d] from states [M, d] and the embeddings [M, d] of one token each."""
        query, key, value = (
            linear(x).unflatten(-1, (self.num_heads, -1))
            for linear, x in ((self.q, self.input_layernorm(states)), (self.k, embeddings), (self.v, embeddings))
        )
        if self.is_second:
            weight = F.cosine_similarity(query, key, dim=-1, eps=self.eps).unsqueeze(-1)
            taken: Tensor = (weight * value).flatten(-2)
        else:
            taken = F.silu(((query * key).sum(-1, keepdim=True) * value).flatten(-2))
        return states + taken


@torch.no_grad()
def near_zero(linear: nn.Linear) -> None:
    """U(0, 0.01), as Clover-2's code has it; no bias."""
    linear.weight.uniform_(0, 0.01)
    if linear.bias is not None:
        linear.bias.zero_()


@torch.no_grad()
def near_identity(linear: nn.Linear) -> None:
    """The identity on the first inputs, plus U(0, 0.01)."""
    near_zero(linear)
    linear.weight += torch.eye(*linear.weight.shape)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a causal language model of transformers."""
    num_layers = model.config.get_text_config().num_hidden_layers  # type: ignore[union-attr,operator]
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise UnsupportedModelError(f"{type(model).__name__} keeps its {num_layers} decoder layers in no list that could be found")


def copy_last_layer(layers: nn.ModuleList, target: nn.Module) -> None:
    """Start layers of a head as the target's last one, where it has the same tensors; else they stay random."""
    module = decoder_layers(target)[-1]
    last = module.state_dict()
    for layer in layers:
        own = layer.state_dict()
        if {k: v.shape for k, v in last.items()} == {k: v.shape for k, v in own.items()}:
            norms = {name: module.get_submodule(name) for name, norm in layer.named_modules() if isinstance(norm, LlamaRMSNorm)}
            layer.load_state_dict(last | {f"{name}.weight": factors_of(norm) for name, norm in norms.items()})


def copy_norm(norm: LlamaRMSNorm, target: nn.Module) -> None:
    """Start a norm as the target's final RMSNorm, if it has one under a known name."""
    final = getattr(target.get_decoder(), "norm", None)  # type: ignore[operator]
    weight = getattr(final, "weight", None)
    if isinstance(weight, Tensor) and getattr(final, "bias", None) is None:
        with torch.no_grad():
            norm.weight.copy_(factors_of(final))


@torch.no_grad()
def factors_of(norm: Any) -> Tensor:
    """What a norm multiplies by [d]: its weight w, or 1 + w as in Gemma."""
    weight: Tensor = norm.weight
    given = norm(torch.ones(1, len(weight), dtype=torch.float32, device=weight.device))[0]
    return 1.0 + weight if torch.allclose(given.float(), 1.0 + weight.float(), rtol=1e-2, atol=1e-2) else weight


def llama_layers(config: LlamaConfig, count: int) -> nn.ModuleList:
    """Build `count` decoder layers of Llama."""
    return nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(count))
