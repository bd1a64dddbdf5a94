"""Python face of the compiled kernels; `is_built()` says whether they are there."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_kernels: Any
try:
    _kernels = importlib.import_module("echelon._kernels")
except ImportError as error:  # no compiler at installation, or another PyTorch than the one it was built against
    _kernels, REASON = None, str(error).splitlines()[0]
else:
    REASON = ""


def is_built() -> bool:
    """The extension is there and fits the PyTorch that is running."""
    return _kernels is not None


def isa() -> str:
    """The instruction family that serves: generic, avx2, avx512, avx512_bf16 or amx."""
    return str(_kernels.isa())


def set_isa(name: str) -> None:
    """Use a lesser family than the machine offers; ValueError for one that it lacks."""
    _kernels.set_isa(name)


# ---- linear layers over packed weights

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
        return cls(_kernels.pack_linear(weight), *weight.shape)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight as an embedding table: int64 [...] → [..., K]; RuntimeError for an index outside."""
        return _kernels.packed_rows(self.data, self.columns, self.depth, ids)  # type: ignore[no-any-return]


def packed_linear(
    x: Tensor,
    packed: PackedWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: Activation = "none",
    float32: bool = False,
    rows: int | None = None,
    emulate_amx: bool = False,
) -> Tensor:
    """activation(x [T, K] · weightᵀ + bias) + residual → [T, N], summed in float32 and rounded once.

    bias float32 [N], residual [T, N] in x's dtype. The result is in x's dtype, or float32 where asked. Each row's result is the
    same bits whatever T, its place and the number of threads. `rows`: only so many rows are real; the others' results are zero.
    `emulate_amx` is for tests of the tile registers' control flow.
    """
    return _kernels.packed_linear(  # type: ignore[no-any-return]
        x, packed.data, packed.columns, bias, residual, activation, float32, rows, emulate_amx
    )


def linear_family(dtype: torch.dtype) -> str:
    """The instruction family that serves linear layers of this dtype."""
    return str(_kernels.linear_family(dtype))


# ---- what kernels are measured against


def read_memory(tensor: Tensor) -> None:
    """Read every byte of a contiguous tensor once, with all threads."""
    _kernels.read_memory(tensor)
