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

TILE = 32  # columns of a packed tile; in bfloat16 K is filled up to as many
PIECE = 2**16  # entries packed at a time where a weight is packed in place
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
    def pack(cls, weight: Tensor, is_fast: bool = False, in_place: bool = False) -> PackedWeight:
        """weight [N, K] in float32, float16 or bfloat16, in any strides. `in_place`: the packed weight takes its memory where it fits."""
        if devices.by_triton(weight):
            data = weight.contiguous()
        elif in_place and _fills_its_tiles(weight):
            data = _pack_over(weight)
        else:
            data = kernels.pack_linear(weight)
        return cls(data, len(weight), weight.shape[1], is_fast)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight as an embedding table: int64 [...] → [..., K]; RuntimeError for an index outside."""
        if devices.by_triton(self.data):
            return F.embedding(ids, self.data)
        return kernels.packed_rows(self.data, self.columns, self.depth, ids)  # type: ignore[no-any-return]


def _fills_its_tiles(weight: Tensor) -> bool:
    """Whether [N, K] takes as much memory packed as it does now (csrc/linear.h)."""
    return weight.is_contiguous() and len(weight) % TILE == 0 and (weight.dtype != torch.bfloat16 or weight.shape[1] % TILE == 0)


def _pack_over(weight: Tensor) -> Tensor:
    """Pack [N, K] into its own memory, some tiles at a time: each is made of rows that stand where it will stand."""
    columns, depth = weight.shape
    grain = 2 if weight.dtype == torch.bfloat16 else 1
    packed = weight.view(columns // TILE, depth // grain, TILE, grain)
    rows = max(1, PIECE // (depth * TILE)) * TILE
    for first in range(0, columns, rows):
        piece = kernels.pack_linear(weight[first : first + rows])
        packed[first // TILE : first // TILE + len(piece)] = piece
    return packed


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
