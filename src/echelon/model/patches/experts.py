"""Mixtures of experts: each token's experts run on packed weights, and their results are added in the order of the token's own choice.

`transformers` keeps the weights of all experts stacked in 3-D parameters, in classes marked by `use_experts_implementation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.model.patches import PatchedForward, trials
from echelon.model.patches.packing import Packing
from echelon.model.patches.vectors import WholeVectors
from echelon.model.patches.weights import PackedParameter
from echelon.ops import ROWS_PER_CALL, cpu, devices
from echelon.ops.contract import Activation, PackedWeight

STACKED = ("gate_up_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Projection:
    """A packed weight and a float32 bias per expert."""

    weights: list[PackedWeight]
    biases: list[Tensor | None]

    def __call__(self, expert: int, x: Tensor, activation: Activation = Activation.NONE, float32: bool = False) -> Tensor:
        return devices.backend_of(x).packed_linear(x, self.weights[expert], self.biases[expert], activation, float32)


@dataclass(frozen=True)
class Experts:
    """`gate` is None where one projection gives both halves, or there is no gate."""

    module: nn.Module
    gate: Projection | None
    up: Projection
    down: Projection
    activation: Activation

    @property
    def weights(self) -> list[PackedWeight]:
        """All of them."""
        return [w for projection in (self.gate, self.up, self.down) if projection is not None for w in projection.weights]

    def hidden(self, expert: int, x: Tensor) -> Tensor:
        """x [n, K] → [n, I]: what goes into the expert's down projection."""
        if self.gate is not None:
            return self.gate(expert, x, self.activation) * self.up(expert, x)
        both = self.up(expert, x)
        # the module's own element-wise operations see whole blocks of rows, and whole vectors: the framework may round the rest otherwise
        full = F.pad(both, (0, 0, 0, -len(both) % ROWS_PER_CALL))
        module: Any = self.module
        with WholeVectors() if full.device.type == "cpu" else nullcontext():
            gated: Tensor = module._apply_gate(full) if module.has_gate else module.act_fn(full)
        return gated[: len(x)]

    def run(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gather: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Run hidden [T, K] through each token's experts, of index and weight [T, k] → [T, K]. `gather` makes what goes into all down
        projections whole, [T · k, I] in the order of experts, where a rank has some columns of each weight.

        Sums run over a token's experts in the order of `top_k_index`, in float32.
        """
        num_tokens, num_chosen = top_k_index.shape
        chosen = top_k_index.flatten()
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=len(self.down.weights)).tolist()
        inner = (self.hidden(expert, hidden[pairs // num_chosen]) for expert, pairs in _used(order, counts))
        if gather is not None:
            whole = gather(torch.cat(list(inner)))
            inner = (piece for piece in torch.split(whole, [n for n in counts if n]))
        out = torch.empty(len(chosen), self.down.weights[0].columns, dtype=torch.float32, device=hidden.device)
        for (expert, pairs), x in zip(_used(order, counts), inner, strict=True):
            out[pairs] = self.down(expert, x, float32=True)
        module: Any = self.module
        if getattr(module, "has_post_expert_norm", False):
            out = module.post_expert_norm(out.to(hidden.dtype)).float()
        out = out.view(num_tokens, num_chosen, -1) * top_k_weights.float()[..., None]
        total = out[:, 0]
        for k in range(1, num_chosen):
            total = total + out[:, k]
        return total.to(hidden.dtype)


def _used(order: Tensor, counts: list[int]) -> Iterator[tuple[int, Tensor]]:
    """Experts that have something to do, each with its (token, choice) pairs, which stand in `order` [T · k]."""
    return ((expert, pairs) for expert, pairs in enumerate(torch.split(order, counts)) if len(pairs))


def is_experts(module: nn.Module) -> bool:
    """A stack of experts in the form that `use_experts_implementation` marks."""
    return all(hasattr(module, name) for name in ("is_transposed", "has_gate", "has_bias", "down_proj", "num_experts", "_apply_gate"))


def splits_evenly(module: Any, name: str, stacked: Tensor) -> bool:
    """Whether what is packed of a stack [E, N, K], or [E, K, N], can be shared out as `patch_experts` does."""
    return name != "gate_up_proj" or stacked.shape[2 if module.is_transposed else 1] // 2 % cpu.TILE == 0


def patch_experts(module: Any, absent: Callable[[tuple[int, ...], Tensor], Tensor] | None, packing: Packing) -> None:
    """Patch `forward`. Where `absent` is given, the stacked weights are replaced by what it returns."""
    activation = _activation(module)
    gate = None
    if has_plain_gate(module) and activation is not None:
        size = module.gate_up_proj.shape[1 if not module.is_transposed else 2] // 2
        gate = _projection(module, "gate_up_proj", slice(0, size), packing)
        up = _projection(module, "gate_up_proj", slice(size, None), packing)
    else:
        up = _projection(module, "gate_up_proj" if module.has_gate else "up_proj", slice(None), packing)
    experts = Experts(module, gate, up, _projection(module, "down_proj", slice(None), packing), activation or Activation.NONE)
    module.forward = PatchedForward(_forward, experts)
    for name in STACKED:
        if absent is not None and name in module._parameters:
            stacked = module._parameters[name]
            module._parameters[name] = nn.Parameter(absent(tuple(stacked.shape), stacked), requires_grad=False)


def has_plain_gate(module: Any) -> bool:
    """Whether gate and up projections are halves of one weight, whose products are multiplied."""
    default = getattr(type(module)._apply_gate, "__name__", "") == "_default_apply_gate"
    return bool(module.has_gate and default and module.is_concatenated)


def _activation(module: Any) -> Activation | None:
    """The activation of the experts, if `packed_linear` has it."""
    function = getattr(module, "act_fn", None)
    if isinstance(function, nn.ReLU):
        return Activation.RELU
    return None if function is None else trials.activation_of(function, module.down_proj.device)


def _projection(module: Any, name: str, columns: slice, packing: Packing) -> Projection:
    """Columns of every expert's projection; stacked [E, N, K], or [E, K, N] where transposed."""
    stacked = module._parameters[name]
    biases = getattr(module, f"{name}_bias").detach().float()[:, columns].contiguous() if module.has_bias else [None] * len(stacked)
    if isinstance(stacked, PackedParameter):
        first, last, _ = columns.indices(stacked.all_packed[0].columns)
        return Projection([cpu.columns_of(weight, first, last) for weight in stacked.all_packed], list(biases))
    weights = stacked.detach().transpose(1, 2) if module.is_transposed else stacked.detach()
    return Projection([packing.pack(weight[columns]) for weight in weights], list(biases))


def _forward(experts: Experts, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run hidden [T, K] through each token's experts, of index and weight [T, k] → [T, K]."""
    return experts.run(hidden, top_k_index, top_k_weights)
