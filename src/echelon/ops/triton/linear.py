"""A linear layer whose rows do not know how many they are: blocks of one shape for any number of rows, and one order over K."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.ops.triton.launch import EXACT, dot, narrow

ROWS = 64  # of a block; other shapes could be other instructions, which add in other orders


class Block(NamedTuple):
    """What of a weight a program reads at a time, and how many such pieces it has on their way (one of them being multiplied)."""

    columns: int
    depth: int
    stages: int


BLOCKS = {8192: Block(64, 64, 4), 4096: Block(32, 128, 4), 0: Block(16, 128, 5)}  # by the columns that a weight has at least


@triton.jit(do_not_specialize=["num_rows"])  # one version for any number of rows
def _linear(
    x, weight, bias, out, num_rows, num_columns, depth, x_row, weight_row,
    rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr, has_bias: tl.constexpr,
):  # fmt: skip
    """One block of the result. Programs of the same columns follow one another, so that their weights are read from memory once."""
    blocks = tl.cdiv(num_rows, rows)
    row = (tl.program_id(0) % blocks * rows + tl.arange(0, rows)).to(tl.int64)
    column = (tl.program_id(0) // blocks * columns + tl.arange(0, columns)).to(tl.int64)
    is_row, is_column = row < num_rows, column < num_columns
    acc = tl.zeros([rows, columns], tl.float32)
    for start in range(0, depth, step):
        k = start + tl.arange(0, step)
        a = tl.load(x + row[:, None] * x_row + k[None, :], is_row[:, None] & (k < depth)[None, :], other=0.0)
        b = tl.load(weight + column[None, :] * weight_row + k[:, None], is_column[None, :] & (k < depth)[:, None], other=0.0)
        acc = dot(a, b, acc)
    if has_bias:
        acc += tl.load(bias + column, is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row[:, None] * num_columns + column[None, :], narrow(acc, out.dtype.element_ty), is_row[:, None] & is_column[None, :])


def block_of(num_columns: int) -> Block:
    """By the weight alone, so that the number of rows changes nothing.

    A few rows take as long as the weight is read. Memory that delivers 4.8 TB/s after 0.7 µs (H200) wants 3.4 MB on their way, from all of
    132 processors, each of which has room for two programs or more: narrow weights are cut into narrow and deep pieces.
    """
    return next(block for least, block in BLOCKS.items() if num_columns >= least)


def linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None, float32: bool = False) -> Tensor:
    """x [..., K] · weight [N, K]ᵀ + bias [N] → [..., N], summed in float32 and rounded once, to x's dtype or float32 where asked.

    x and weight share a dtype; a bias may have another. Each row's result is the same bits whatever the number of rows and its place.
    """
    flat, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (x.reshape(-1, x.shape[-1]), weight))
    num_rows, num_columns = len(flat), len(weight)
    out = flat.new_empty(num_rows, num_columns, dtype=torch.float32 if float32 else x.dtype)
    if num_rows:
        block = block_of(num_columns)
        grid = (triton.cdiv(num_rows, ROWS) * triton.cdiv(num_columns, block.columns),)
        strides = (flat.stride(0), weight.stride(0))
        _linear[grid](
            flat, weight, bias, out, num_rows, num_columns, flat.shape[1], *strides,
            rows=ROWS, columns=block.columns, step=block.depth, has_bias=bias is not None, num_warps=4, num_stages=block.stages, **EXACT,
        )  # fmt: skip
    return out.view(*x.shape[:-1], num_columns)
