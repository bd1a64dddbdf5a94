"""Row-wise operations around the linear layers, and the writing of keys and values to their slots.

All compute in float32 and round once. A program holds a whole row (or a piece of fixed size where places do not meet), so that the order
of additions depends on the size of a row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.ops.contract import Activation, RmsWeight
from echelon.ops.triton.launch import EXACT, narrow, power_of_two

PIECE = 1024  # values of a row that one program activates
RELU, SILU, GELU, GELU_TANH = (tl.constexpr(int(a)) for a in (Activation.RELU, Activation.SILU, Activation.GELU, Activation.GELU_TANH))


@triton.jit
def _rms_norm(x, weight, out, x_row, eps, size: tl.constexpr, padded: tl.constexpr, how: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, padded)
    values = tl.load(x + row * x_row + i, i < size, other=0.0).to(tl.float32)
    w = tl.load(weight + i, i < size, other=0.0).to(tl.float32)
    y = values * (1.0 / tl.sqrt_rn(tl.sum(values * values) / size + eps))
    if how == 0:
        y = narrow(y, out.dtype.element_ty).to(tl.float32)
    if how == 2:
        w += 1.0
    tl.store(out + row * size + i, narrow(w * y, out.dtype.element_ty), i < size)


@triton.jit
def _layer_norm(
    x, weight, bias, out, x_row, eps, size: tl.constexpr, padded: tl.constexpr, has_weight: tl.constexpr, has_bias: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, padded)
    values = tl.load(x + row * x_row + i, i < size, other=0.0).to(tl.float32)
    centred = tl.where(i < size, values - tl.sum(values) / size, 0.0)
    y = centred * (1.0 / tl.sqrt_rn(tl.sum(centred * centred) / size + eps))
    if has_weight:
        y *= tl.load(weight + i, i < size, other=0.0).to(tl.float32)
    if has_bias:
        y += tl.load(bias + i, i < size, other=0.0).to(tl.float32)
    tl.store(out + row * size + i, narrow(y, out.dtype.element_ty), i < size)


@triton.jit
def _activate(x, other, out, x_row, other_row, size, piece: tl.constexpr, kind: tl.constexpr, has_other: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * piece + tl.arange(0, piece)
    v = tl.load(x + row * x_row + i, i < size, other=0.0).to(tl.float32)
    if kind == SILU:
        y = v / (1.0 + tl.exp(tl.minimum(-v, 88.0)))
    elif kind == GELU_TANH:  # (1 + tanh u) / 2 = 1 / (1 + exp(−2u))
        y = v / (1.0 + tl.exp(tl.minimum(-1.59576912 * (v + 0.044715 * v * v * v), 88.0)))
    elif kind == GELU:
        y = v * 0.5 * (1.0 + tl.erf(v * 0.70710678))
    elif kind == RELU:
        y = tl.where(v < 0.0, 0.0, v)
    else:
        y = v
    if has_other:
        y *= tl.load(other + row * other_row + i, i < size, other=0.0).to(tl.float32)
    tl.store(out + row * size + i, narrow(y, out.dtype.element_ty), i < size)


@triton.jit
def _rotate(
    x, cos, sin, out, x_head, x_token, num_heads, size: tl.constexpr, rotary: tl.constexpr, heads: tl.constexpr, half: tl.constexpr,
    rest: tl.constexpr,
):  # fmt: skip
    """All heads of one token; `half` and `rest` are the blocks that hold half of the rotated values and the others."""
    token = tl.program_id(0).to(tl.int64)
    head, i = tl.arange(0, heads)[:, None], tl.arange(0, half)[None, :]
    is_pair = (head < num_heads) & (i < rotary // 2)
    source, target = x + token * x_token + head * x_head, out + (token * num_heads + head) * size
    angle = token * rotary + i
    low = tl.load(source + i, is_pair, other=0.0).to(tl.float32)
    high = tl.load(source + rotary // 2 + i, is_pair, other=0.0).to(tl.float32)
    low_cos, low_sin = tl.load(cos + angle, i < rotary // 2).to(tl.float32), tl.load(sin + angle, i < rotary // 2).to(tl.float32)
    angle += rotary // 2
    high_cos, high_sin = tl.load(cos + angle, i < rotary // 2).to(tl.float32), tl.load(sin + angle, i < rotary // 2).to(tl.float32)
    tl.store(target + i, narrow(low * low_cos - high * low_sin, out.dtype.element_ty), is_pair)
    tl.store(target + rotary // 2 + i, narrow(high * high_cos + low * high_sin, out.dtype.element_ty), is_pair)
    if rotary < size:
        j = rotary + tl.arange(0, rest)[None, :]
        is_left = (head < num_heads) & (j < size)
        tl.store(target + j, tl.load(source + j, is_left), is_left)


@triton.jit
def _write_slots(
    rows, cache, slots, row_token, row_head, block, block_head, block_slot, block_size, size: tl.constexpr, padded: tl.constexpr
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    i = tl.arange(0, padded)
    target = cache + slot // block_size * block + head * block_head + slot % block_size * block_slot
    tl.store(target + i, tl.load(rows + token * row_token + head * row_head + i, i < size), i < size)


def rms_norm(x: Tensor, weight: Tensor, eps: float, how: RmsWeight) -> Tensor:
    """x [..., N], weight [N] → [..., N]."""
    flat, out, size = _aligned_rows(x), torch.empty_like(x, memory_format=torch.contiguous_format), x.shape[-1]
    if len(flat):
        _rms_norm[(len(flat),)](flat, weight, out, flat.stride(0), eps, size=size, padded=power_of_two(size), how=int(how), **EXACT)
    return out


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., N], weight and bias [N] → [..., N]."""
    flat, out, size = _aligned_rows(x), torch.empty_like(x, memory_format=torch.contiguous_format), x.shape[-1]
    if len(flat):
        _layer_norm[(len(flat),)](
            flat, weight, bias, out, flat.stride(0), eps,
            size=size, padded=power_of_two(size), has_weight=weight is not None, has_bias=bias is not None, **EXACT,
        )  # fmt: skip
    return out


def activate(x: Tensor, kind: Activation, other: Tensor | None = None) -> Tensor:
    """act(x), or act(x) · other: [..., N] → [..., N]."""
    flat, out, size = _rows(x), torch.empty_like(x, memory_format=torch.contiguous_format), x.shape[-1]
    by = flat if other is None else _rows(other)
    if len(flat):
        _activate[len(flat), triton.cdiv(size, PIECE)](
            flat, by, out, flat.stride(0), by.stride(0), size, piece=PIECE, kind=int(kind), has_other=other is not None, **EXACT
        )
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding by halves of the first R values of every head: x [1, H, T, D], cos and sin [1, T, R] → [1, H, T, D]."""
    x, cos, sin = x if x.stride(3) == 1 else x.contiguous(), cos.contiguous(), sin.contiguous()
    _, num_heads, num_tokens, size = x.shape
    rotary = cos.shape[-1]
    out = x.new_empty(1, num_tokens, num_heads, size)
    if num_tokens:
        _rotate[(num_tokens,)](
            x, cos, sin, out, x.stride(1), x.stride(2), num_heads, size=size, rotary=rotary,
            heads=int(triton.next_power_of_2(num_heads)), half=power_of_two(rotary // 2), rest=power_of_two(size - rotary), **EXACT,
        )  # fmt: skip
    return out.transpose(1, 2)


def write_slots(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """keys [T, Hkv, D] and values [T, Hkv, Dv] to `slots` int64 [T] of the caches (`ops.slots`).

    Slots are not checked against the caches: that would wait for the device.
    """
    for given, cache in ((keys, key_cache), (values, value_cache)):
        rows = given if given.stride(2) == 1 else given.contiguous()
        if len(rows):
            _write_slots[rows.shape[:2]](
                rows, cache, slots, *rows.stride()[:2], *cache.stride()[:3], cache.shape[2],
                size=rows.shape[2], padded=power_of_two(rows.shape[2]), **EXACT,
            )  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    """The last dimension as rows: a view where the others collapse into one stride, otherwise a copy."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _aligned_rows(x: Tensor) -> Tensor:
    """The same, one after another from an aligned address: that decides how wide they are loaded, and so in which order a sum adds."""
    flat = _rows(x)
    return flat if flat.stride(0) == flat.shape[1] and flat.data_ptr() % 16 == 0 else flat.clone(memory_format=torch.contiguous_format)
