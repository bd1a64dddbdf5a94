"""Row-wise operations around the linear layers, compiled; see csrc/elementwise.h for what each computes and in which order. On CUDA devices
`ops.triton` computes them.

They are there where `devices.has_kernels`. A row's result depends on that row alone, bit for bit, whatever the
number of rows, their place and the number of threads. All take float32, bfloat16 or float16, compute in float32 and round once.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from torch import Tensor

from echelon.ops import devices
from echelon.ops.compiled import kernels


class RmsWeight(IntEnum):
    """How the weight w meets the normalised row y: w · round(y), round(w · y), round((1 + w) · y)."""

    AFTER_ROUNDING = 0
    IN_FLOAT32 = 1
    ONE_PLUS = 2


class Activation(IntEnum):
    SILU = 0
    GELU_TANH = 1
    GELU = 2


def rms_norm(x: Tensor, weight: Tensor, eps: float, how: RmsWeight) -> Tensor:
    """x [..., N], weight [N] → [..., N] (Zhang and Sennrich 2019)."""
    if devices.by_triton(x):
        return _triton().rms_norm(x, weight, eps, how)  # type: ignore[no-any-return]
    out: Tensor = kernels.rms_norm(x, weight, eps, int(how))
    return out


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., N], weight and bias [N] → [..., N] (Ba et al. 2016)."""
    if devices.by_triton(x):
        return _triton().layer_norm(x, weight, bias, eps)  # type: ignore[no-any-return]
    out: Tensor = kernels.layer_norm(x, weight, bias, eps)
    return out


def activate(x: Tensor, kind: Activation, other: Tensor | None = None) -> Tensor:
    """act(x), or act(x) · other: [..., N] → [..., N]."""
    if devices.by_triton(x):
        return _triton().activate(x, kind, other)  # type: ignore[no-any-return]
    out: Tensor = kernels.activate(x, other, int(kind))
    return out


def write_slots(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """keys [T, Hkv, D] and values [T, Hkv, Dv] to `slots` int64 [T] of the caches (`ops.slots`).

    RuntimeError for a slot outside; on CUDA slots are not checked.
    """
    if devices.by_triton(keys):
        _triton().write_slots(keys, values, key_cache, value_cache, slots)
    else:
        kernels.write_slots(keys, values, key_cache, value_cache, slots)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding by halves of the first R values of every head: x [1, H, T, D], cos and sin [1, T, R] → [1, H, T, D].

    cos and sin have the dtype of x, or float32.
    """
    if devices.by_triton(x):
        return _triton().rotate(x, cos, sin)  # type: ignore[no-any-return]
    out: Tensor = kernels.rotate(x, cos, sin)
    return out


def _triton() -> Any:
    from echelon.ops.triton import elementwise  # imports Triton

    return elementwise
