"""Linear layers over packed weights, by compiled kernels (csrc/linear.h); `compiled.is_built` says whether they are there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.ops.compiled import kernels

Activation = str  # "none", "relu", "silu", "gelu" or "gelu_tanh"


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] in the kernels' layout, with N filled up to tiles of 32; `data` is [⌈N / 32⌉, K' / g, 32, g] (csrc/linear.h)."""

    data: Tensor
    columns: int  # N
    depth: int  # K

    @classmethod
    def pack(cls, weight: Tensor) -> PackedWeight:
        """weight [N, K] in float32, float16 or bfloat16, in any strides."""
        return cls(kernels.pack_linear(weight), *weight.shape)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight as an embedding table: int64 [...] → [..., K]; RuntimeError for an index outside."""
        return kernels.packed_rows(self.data, self.columns, self.depth, ids)  # type: ignore[no-any-return]


def packed_linear(
    x: Tensor,
    packed: PackedWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: Activation = "none",
    float32: bool = False,
    emulate_amx: bool = False,
) -> Tensor:
    """activation(x [..., K] · weightᵀ + bias) + residual → [..., N], summed in float32 and rounded once.

    bias float32 [N], residual [T, N] in x's dtype for T rows in all. The result is in x's dtype, or float32 where asked. Each row's result
    is the same bits whatever T, its place and the number of threads.
    `emulate_amx` is for tests of the tile registers' control flow.
    """
    return kernels.packed_linear(  # type: ignore[no-any-return]
        x, packed.data, packed.columns, bias, residual, activation, float32, emulate_amx
    )


def linear_family(dtype: torch.dtype) -> str:
    """The instruction family that serves linear layers of this dtype."""
    return str(kernels.linear_family(dtype))


# ---- what kernels are measured against


def read_memory(tensor: Tensor) -> None:
    """Read every byte of a contiguous tensor once, with all threads."""
    kernels.read_memory(tensor)
