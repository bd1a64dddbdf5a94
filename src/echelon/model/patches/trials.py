"""Trials of what a module or function computes, in float32 over all values that may come.

Inputs reach from far below rounding to far beyond any clamp, finely where activations bend, and results are compared value by value: a
function that differs anywhere by more than rounding is another function.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from echelon.ops import devices
from echelon.ops.contract import Activation

ROUNDING = 4e-6  # of float32 arithmetic, relative to the input of an activation
TRIED = (Activation.SILU, Activation.GELU_TANH, Activation.GELU)  # what rounds by the batch in the framework
BENDS, LARGEST = 16.0, 1e6  # activations bend within the one, and clamps lie within the other
Function = Callable[[Tensor], Tensor]


def inputs(device: torch.device, fine: int = 4001, coarse: int = 481) -> Tensor:
    """float32 [N], both signs: `fine` values in ±BENDS, `coarse` in ±8 BENDS, `coarse` magnitudes up to LARGEST."""
    far = torch.logspace(-12, 6, coarse // 2)
    near = torch.linspace(-BENDS, BENDS, fine)
    values = torch.cat([near, torch.linspace(-8 * BENDS, 8 * BENDS, coarse), far, -far, torch.tensor([0.0, LARGEST, -LARGEST])])
    return values.to(device)


def activation_of(function: Any, device: torch.device) -> Activation | None:
    """Find which activation of TRIED a module or function is."""
    if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
        return None
    x = inputs(device)[None]
    expected = _result(function, x)
    for kind in TRIED:
        if expected is not None and _agrees(expected, devices.backend_of(x).activate(x, kind), x):
            return kind
    return None


def is_gated_mlp(module: nn.Module, kind: Activation, device: torch.device) -> bool:
    """Whether a module with `gate_proj`, `up_proj` and `down_proj`, or `gate_up_proj` and `down_proj`, is down(kind(gate(x)) · up(x)).

    Its forward runs with projections that hand out halves of its input, so that gate and up are what they are made to be.
    """
    gate = inputs(device, 801, 241)
    up = torch.cat([inputs(device, 17, 31), torch.tensor([0.3, -0.3, 1.0], device=device)])
    gates, ups = gate.expand(len(up), -1), up[:, None].expand(-1, len(gate))
    stand_ins: dict[str, nn.Module] = {"down_proj": nn.Identity()}
    if "gate_up_proj" in module._modules:
        stand_ins["gate_up_proj"] = nn.Identity()
    else:
        stand_ins |= {"gate_proj": _Half(0), "up_proj": _Half(1)}
    bare = copy.copy(module)
    bare._modules = {**module._modules, **stand_ins}
    expected = _result(lambda x: type(module).forward(bare, x), torch.cat([gates, ups], -1)[None])
    got = devices.backend_of(gates).activate(gates.contiguous(), kind, ups.contiguous())[None]
    return expected is not None and _agrees(expected, got, (gates * ups)[None])


def is_same(function: Function, ours: Function, x: Tensor) -> bool:
    """Whether two functions of rows [T, N] agree to rounding, relative to each row's largest value."""
    expected = _result(function, x)
    return expected is not None and _agrees(expected, ours(x), expected.abs().amax(-1, keepdim=True))


def rows(size: int, device: torch.device) -> Tensor:
    """float32 [T, size]: rows of many magnitudes, with a mean and without, and a row of zeros."""
    drawn = torch.randn(9, size, generator=torch.Generator().manual_seed(0))
    scales = torch.tensor([1e-6, 1e-4, 3e-3, 0.1, 1.0, 2.0, 30.0, 1e3, 0.0])[:, None]
    return torch.cat([drawn * scales, drawn * scales + 3 * scales]).to(device)


class _Half(nn.Module):
    """Stands for a projection: the first or the second half of its input."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.which = which

    def forward(self, x: Tensor) -> Tensor:
        return x.chunk(2, -1)[self.which]


def _result(function: Any, x: Tensor) -> Tensor | None:
    """Call `function`; None where it cannot be called so."""
    try:
        out = function(x.clone())
    except Exception:  # code of the model's: it stays with the framework, whatever it raises
        return None
    return out if isinstance(out, Tensor) and out.dtype == x.dtype else None


def _agrees(expected: Tensor, got: Tensor, scale: Tensor) -> bool:
    """Whether all values agree, to rounding at `scale`."""
    if expected.shape != got.shape:
        return False
    return bool(((expected.double() - got.double()).abs() <= ROUNDING * scale.abs().double() + 1e-30).all())
