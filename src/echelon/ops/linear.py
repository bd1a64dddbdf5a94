"""Linear layers over packed weights, by compiled kernels (csrc/linear.h), and on CUDA devices by `ops.triton`; `devices.has_kernels` says
whether they are there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.ops import devices, elementwise
from echelon.ops.compiled import kernels

Activation = str  # "none", "relu", "silu", "gelu" or "gelu_tanh"


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] in the kernels' layout, with N filled up to tiles of 32; `data` is [⌈N / 32⌉, K' / g, 32, g] (csrc/linear.h). On CUDA
    it is [N, K] as it was, by rows; `is_fast`: there the vendor's library may multiply (`EngineConfig.numerics`).
    """

    data: Tensor
    columns: int  # N
    depth: int  # K
    is_fast: bool = False

    @classmethod
    def pack(cls, weight: Tensor, is_fast: bool = False) -> PackedWeight:
        """weight [N, K] in float32, float16 or bfloat16, in any strides."""
        data = weight.contiguous() if devices.by_triton(weight) else kernels.pack_linear(weight)
        return cls(data, len(weight), weight.shape[1], is_fast)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight as an embedding table: int64 [...] → [..., K]; RuntimeError for an index outside."""
        if devices.by_triton(self.data):
            return F.embedding(ids, self.data)
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

    bias float32 [N] (on CUDA in x's dtype too), residual [T, N] in x's dtype for T rows in all. The result is in x's dtype, or float32
    where asked. Each row's result is the same bits whatever T, its place and the number of threads, unless the weight `is_fast`.
    `emulate_amx` is for tests of the tile registers' control flow.
    """
    if devices.by_triton(x):
        return _on_device(x, packed, bias, residual, activation, float32)
    return kernels.packed_linear(  # type: ignore[no-any-return]
        x, packed.data, packed.columns, bias, residual, activation, float32, emulate_amx
    )


def _on_device(
    x: Tensor, packed: PackedWeight, bias: Tensor | None, residual: Tensor | None, activation: Activation, float32: bool
) -> Tensor:
    """`packed_linear` by Triton; what comes after the sum is element by element, and so the same for any number of rows.

    The vendor's library gives x's dtype alone: float32, as the output layer wants it, is always Triton's.
    """
    from echelon.ops.triton.linear import linear_invariant  # imports Triton

    is_rounded = activation == "none" and residual is None and not float32
    if packed.is_fast and not float32:
        out = F.linear(x, packed.data, None if bias is None else bias.to(x.dtype))
    else:
        out = linear_invariant(x, packed.data, bias, float32=not is_rounded)
    if activation == "relu":
        out = out.relu()
    elif activation != "none":
        out = elementwise.activate(out, elementwise.Activation[activation.upper()])
    if residual is not None:
        out = out + residual.view(out.shape)
    return out if float32 else out.to(x.dtype)


def linear_family(dtype: torch.dtype) -> str:
    """The instruction family that serves linear layers of this dtype."""
    return str(kernels.linear_family(dtype))


# ---- what kernels are measured against


def read_memory(tensor: Tensor) -> None:
    """Read every byte of a contiguous tensor once, with all threads; on a CUDA device, as the framework's sum does."""
    if devices.by_triton(tensor):
        tensor.flatten().view(torch.int32).sum()
    else:
        kernels.read_memory(tensor)
