"""A linear layer whose rows do not know how many they are: one shape of blocks for any number of rows, and one order over K.

A few rows take as long as the weight is read, which wants every processor of the device and much on its way; more rows are read again for
every block of columns. So blocks are large, and K is cut into splits, as many as there are processors for: by the weight alone. The sums of
splits are added in order. One program may walk all of them, or each has one of its own and the last to arrive adds them up: the result is
the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from threading import get_ident

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from echelon.ops.contract import Activation, PackedWeight
from echelon.ops.triton.elementwise import activate
from echelon.ops.triton.launch import EXACT, dot, narrow

ROWS, COLUMNS = 128, 128  # of a block; other shapes could be other instructions, which add in other orders
STEP = 128  # bytes of a row and of a column that are multiplied at a time
SHORTEST = 256  # values of a split
PROGRAMS = 128  # that an H200, of 132 processors, runs at a time: a block and what is on its way fill one


@triton.jit
def _finish(acc, bias, out, place, column, is_inside, is_column, has_bias: tl.constexpr):
    if has_bias:
        acc += tl.load(bias + column, is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(out + place, narrow(acc, out.dtype.element_ty), is_inside)


@triton.jit(do_not_specialize=["num_rows"])  # one version for any number of rows
def _linear(
    x, weight, bias, out, sums, arrived, num_rows, num_columns, depth, x_row, weight_row, num_splits, split,
    is_shared: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr, has_bias: tl.constexpr,
):  # fmt: skip
    """One block of the result, or one split of it. Programs of the same columns follow one another, so that their weights are read from
    memory once. `split`: values of K in each.
    """
    blocks = tl.cdiv(num_rows, rows)
    block = tl.program_id(0)
    row = (block % blocks * rows + tl.arange(0, rows)).to(tl.int64)
    column = (block // blocks * columns + tl.arange(0, columns)).to(tl.int64)
    is_row, is_column = row < num_rows, column < num_columns
    is_inside = is_row[:, None] & is_column[None, :]
    place = row[:, None] * num_columns + column[None, :]
    total = tl.zeros([rows, columns], tl.float32)
    first = tl.program_id(1)
    for number in range(first, first + 1 if is_shared else num_splits):
        acc = tl.zeros([rows, columns], tl.float32)
        for start in range(number * split, tl.minimum((number + 1) * split, depth), step):
            k = start + tl.arange(0, step)
            a = tl.load(x + row[:, None] * x_row + k[None, :], is_row[:, None] & (k < depth)[None, :], other=0.0)
            b = tl.load(weight + column[None, :] * weight_row + k[:, None], is_column[None, :] & (k < depth)[:, None], other=0.0)
            acc = dot(a, b, acc)
        total += acc
    if is_shared:
        size = num_rows.to(tl.int64) * num_columns
        tl.store(sums + first * size + place, total, is_inside)
        tl.debug_barrier()  # all threads have stored before one says so
        if tl.atomic_add(arrived + block, 1, sem="acq_rel") == num_splits - 1:
            total = tl.zeros([rows, columns], tl.float32)
            for number in range(num_splits):
                total += tl.load(sums + number * size + place, is_inside, other=0.0, cache_modifier=".cg")
            tl.store(arrived + block, 0)
            _finish(total, bias, out, place, column, is_inside, is_column, has_bias)
    else:
        _finish(total, bias, out, place, column, is_inside, is_column, has_bias)


def splits_of(num_columns: int, depth: int) -> int:
    """By the weight alone, so that the number of rows changes nothing."""
    return max(1, min(PROGRAMS // -(-num_columns // COLUMNS), depth // SHORTEST))


def new_counters(device: torch.device) -> Tensor:
    """int32 [PROGRAMS]: programs that are done with a block. Zero between launches, which therefore follow one another on the device."""
    return torch.zeros(PROGRAMS, dtype=torch.int32, device=device)


@cache
def _counters_of_thread(device: torch.device, num_blocks: int, thread: int) -> Tensor:  # noqa: ARG001
    """Those of launches by one thread, which share a stream."""
    return new_counters(device)


_OWN: ContextVar[Tensor | None] = ContextVar("counters of a graph", default=None)


@contextmanager
def counting_in(counters: Tensor) -> Iterator[None]:
    """Launches inside count in `counters`, int32 [PROGRAMS]. A graph keeps the address, and may be replayed by another thread than
    captured it, beside launches of that one.
    """
    token = _OWN.set(counters)
    try:
        yield
    finally:
        _OWN.reset(token)


def _counters(device: torch.device) -> Tensor:
    own = _OWN.get()
    return _counters_of_thread(device, PROGRAMS, get_ident()) if own is None else own


def linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None, float32: bool = False) -> Tensor:
    """x [..., K] · weight [N, K]ᵀ + bias [N] → [..., N], summed in float32 and rounded once, to x's dtype or float32 where asked.

    x and weight share a dtype; a bias may have another. Each row's result is the same bits whatever the number of rows and its place.
    """
    flat, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (x.reshape(-1, x.shape[-1]), weight))
    (num_rows, depth), num_columns, step = flat.shape, len(weight), STEP // x.itemsize
    out = flat.new_empty(num_rows, num_columns, dtype=torch.float32 if float32 else x.dtype)
    if num_rows:
        num_blocks, num_splits = triton.cdiv(num_rows, ROWS) * triton.cdiv(num_columns, COLUMNS), splits_of(num_columns, depth)
        is_shared = num_splits > 1 and num_blocks < PROGRAMS
        sums = flat.new_empty(num_splits if is_shared else 0, num_rows, num_columns, dtype=torch.float32)
        _linear[num_blocks, num_splits if is_shared else 1](
            flat, weight, bias, out, sums, _counters(x.device), num_rows, num_columns, depth, flat.stride(0),
            weight.stride(0), num_splits, triton.cdiv(triton.cdiv(depth, num_splits), step) * step,
            is_shared=is_shared, rows=ROWS, columns=COLUMNS, step=step, has_bias=bias is not None, num_warps=8, num_stages=4, **EXACT,
        )  # fmt: skip
    return out.view(*x.shape[:-1], num_columns)


def packed_linear(
    x: Tensor, packed: PackedWeight, bias: Tensor | None = None, activation: Activation = Activation.NONE, float32: bool = False
) -> Tensor:
    """x [..., K], bias [N] → [..., N]. What comes after the sum is element by element, and so the same for any number of rows.

    The vendor's library gives x's dtype alone: float32, as the output layer wants it, is always Triton's.
    """
    is_rounded = activation == Activation.NONE and not float32
    if packed.is_fast and not float32:
        out = F.linear(x, packed.data, None if bias is None else bias.to(x.dtype))
    else:
        out = linear_invariant(x, packed.data, bias, float32=not is_rounded)
    if activation != Activation.NONE:
        out = activate(out, activation)
    return out if float32 else out.to(x.dtype)
