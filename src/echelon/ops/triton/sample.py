"""Drawing tokens: `echelon.sampling.Sampler.choose_processed` on a device, one program a row.

The same noise from the same keys and the same arithmetic: values are divided by the temperature in float32, correctly rounded, and weights,
noise and scores are float64. So the tokens are those of the definition; only a tie closer than the last bits of a float64 logarithm, or
a nucleus that ends within the rounding of a float64 sum, could tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from echelon.ops.triton.launch import EXACT
from echelon.sampling import Sampler, SamplingParams, noise_key

BLOCK = 512
SMALLEST = np.float32(2.0**-149)  # above 0: a temperature that is not 0 draws, or makes logits overflow
GOLDEN, FIRST, SECOND = (
    c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # as int64, whose products wrap


@triton.jit
def _scaled(logits, row, i, size, temperature):
    """Logits by temperature, −∞ beyond the vocabulary."""
    value = tl.load(logits + row * size + i, i < size, other=float("-inf"))
    return tl.div_rn(value, tl.zeros_like(value) + temperature)


@triton.jit
def _order(value):
    """uint32 in the order of float32 values; −0 is 0."""
    bits = (value + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _smallest(logits, row, size, temperature, highest, threshold, wanted, by_weight: tl.constexpr, block: tl.constexpr):
    """The smallest value, in `_order`, for which all larger ones together weigh less than `wanted`; of those of at least `threshold`.

    Each weighs 1; or, where `by_weight`, exp(value − highest), and `wanted` is a share of the whole. Digit by digit, 4 bits at a time from
    the leading one: a digit weighs what all values do that begin with it and the digits found so far.
    """
    digit = tl.arange(0, 16)
    found = tl.full([], 0, tl.uint32)
    larger = tl.full([], 0.0, tl.float64)
    for level in range(8):
        shift = 28 - level * 4
        weight = tl.zeros([16], tl.float64)
        for start in range(0, size, block):
            i = start + tl.arange(0, block)
            value = _scaled(logits, row, i, size, temperature)
            order = _order(value)
            is_member = (i < size) & (order >= threshold) & ((order.to(tl.uint64) >> (shift + 4)) == (found.to(tl.uint64) >> (shift + 4)))
            if tl.max(is_member.to(tl.int32)) > 0:
                own = tl.where(is_member, 1.0, 0.0).to(tl.float64)
                if by_weight:
                    own = tl.where(is_member, tl.exp((value - highest).to(tl.float64)), 0.0)
                here = (order >> shift & 15).to(tl.int32)
                weight += tl.sum(tl.where(here[:, None] == digit[None, :], own[:, None], 0.0), 0)
        if by_weight:
            wanted = tl.where(level == 0, wanted * tl.sum(weight), wanted)
        above = larger + tl.sum(tl.where(digit[None, :] > digit[:, None], weight[None, :], 0.0), 1)
        chosen = tl.min(tl.where((weight > 0.0) & (above < wanted), digit, 16))
        larger = tl.sum(tl.where(digit == chosen, above, 0.0))
        found = found | (chosen.to(tl.uint32) << shift)
    return found


@triton.jit
def _noise_bits(key, token):
    """The 52 bits of `echelon.sampling.noise_at`."""
    x = key + (token.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return ((x ^ (x >> 31)) >> 12).to(tl.int64)


@triton.jit
def _score(value, key, token):
    uniform = (_noise_bits(key, token).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2⁻⁵²
    return value.to(tl.float64) - tl.log(-tl.log(uniform))


@triton.jit
def _first_largest(logits, row, size, temperature, block: tl.constexpr):
    """The largest value and its first place; a place of −1 where a value is NaN or the largest is not finite."""
    highest = tl.full([], float("-inf"), tl.float32)
    place = tl.full([], -1, tl.int32)
    is_sound = tl.full([], 1, tl.int32)
    for start in range(0, size, block):
        i = start + tl.arange(0, block)
        value = _scaled(logits, row, i, size, temperature)
        is_sound = tl.minimum(is_sound, tl.min((value == value).to(tl.int32)))
        best = tl.max(tl.where(value == value, value, float("-inf")))
        first = tl.min(tl.where(value == best, i, 2147483647))
        place = tl.where(best > highest, first, place)
        highest = tl.maximum(highest, best)
    return highest, tl.where((is_sound == 1) & (highest < float("inf")), place, -1)


@triton.jit
def _draw(logits, row, size, temperature, highest, likeliest, threshold, key, block: tl.constexpr):
    """The token with the largest value plus noise, of those of at least `threshold` in `_order`; the first of equals.

    A token's noise −log(−log u) lifts it above `best` only if −log u < exp(value − best), and 1 − u ≤ −log u, which needs no logarithm:
    float64 ones are taken only in blocks where some token passes that test. `bound` is exp(highest − best), a little more.
    """
    token = likeliest
    best = tl.max(_score(highest + tl.zeros([16], tl.float32), key, likeliest + tl.zeros([16], tl.int32)))
    for start in range(0, size, block):
        i = start + tl.arange(0, block)
        value = _scaled(logits, row, i, size, temperature)
        bound = tl.exp(tl.minimum(highest.to(tl.float64) - best, 80.0)).to(tl.float32) * 1.0001
        distance = (4503599627370495 - _noise_bits(key, i)).to(tl.float32) * 2.220446049250313e-16
        may_win = (i < size) & (_order(value) >= threshold) & (value > float("-inf"))
        may_win = may_win & (distance <= tl.maximum(tl.exp(value - highest), 1e-37) * bound)
        if tl.max(may_win.to(tl.int32)) > 0:
            score = tl.where(may_win, _score(value, key, i), float("-inf"))
            top = tl.max(score)
            first = tl.min(tl.where(score == top, i, 2147483647))
            is_better = (top > best) | ((top == best) & (first < token))
            token = tl.where(is_better, first, token)
            best = tl.maximum(best, top)
    return token


@triton.jit
def _sample_rows(logits, temperatures, top_ks, top_ps, log_min_ps, keys, tokens, size, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    asked = tl.load(temperatures + row)
    temperature = tl.where(asked > 0.0, asked, 1.0)
    highest, token = _first_largest(logits, row, size, temperature, block)
    if (token >= 0) & (asked > 0.0):
        top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
        threshold = _order(highest + tl.load(log_min_ps + row))
        if (top_k > 0) & (top_k < size):
            all_of_them, wanted = tl.full([], 0, tl.uint32), top_k.to(tl.float64)
            kth = _smallest(logits, row, size, temperature, highest, all_of_them, wanted, False, block)
            threshold = tl.maximum(threshold, kth)
        if top_p < 1.0:
            threshold = _smallest(logits, row, size, temperature, highest, threshold, top_p, True, block)
        key = tl.load(keys + row).to(tl.uint64, bitcast=True)
        token = _draw(logits, row, size, temperature, highest, token, threshold, key, block)
    tl.store(tokens + row, token.to(tl.int64))


def sample_rows(logits: Sequence[Tensor], samplers: Sequence[Sampler], positions: Sequence[int]) -> list[int]:
    """The token of each row of logits float32 [V]; the first largest where the temperature is 0."""
    keys = [noise_key(s.seed, s.index, position) for s, position in zip(samplers, positions, strict=True)]
    columns = draw_columns([s.params for s in samplers], keys)
    rows = torch.stack(list(logits))
    tokens: list[int] = draw_rows(rows, *(torch.from_numpy(column).to(rows.device, non_blocking=True) for column in columns)).tolist()
    return tokens


def draw_columns(params: Sequence[SamplingParams], noise_keys: Sequence[int] | Sequence[Sequence[int]]) -> tuple[NDArray[Any], ...]:
    """What `draw_rows` reads of every row, float32, int32, float64, float32 and int64 [R]; `noise_keys` of `sampling.noise_key`, or
    [passes, R], those of several passes.
    """
    with np.errstate(divide="ignore"):  # no min_p: a threshold of −∞
        log_min_p = np.log(np.array([p.min_p for p in params], np.float32))
    top_k, top_p = np.array([p.top_k for p in params], np.int32), np.array([p.top_p for p in params], np.float64)
    asked = np.array([p.temperature for p in params])
    temperature = np.where(asked > 0.0, np.maximum(asked.astype(np.float32), SMALLEST), np.float32(0.0))
    return temperature, top_k, top_p, log_min_p, np.array(noise_keys, np.uint64).view(np.int64)


def draw_rows(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor, noise_keys: Tensor) -> Tensor:
    """The token of each row of float32 [R, V] logits, after everything that may change their order: int64 [R].

    Everything is on the device, the rest as `draw_columns` gives it. −1 where a logit is NaN or the largest is not finite.
    """
    logits = logits.contiguous()
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        _sample_rows[(len(logits),)](
            logits, temperature, top_k, top_p, log_min_p, noise_keys, tokens, logits.shape[1], block=BLOCK, num_warps=8, **EXACT
        )
    return tokens


def noise_keys(row_keys: Tensor, positions: Tensor) -> Tensor:
    """`sampling.noise_key` on a device, as int64: at positions int64 [..., R] of texts whose `sampling.row_key` is int64 [R]."""
    keys = _mixed(row_keys ^ _mixed(positions * GOLDEN + 2))
    return _mixed(keys ^ _mixed(torch.full_like(keys, 3)))


def _mixed(x: Tensor) -> Tensor:
    """`sampling._mix` of every entry; shifts of int64 would draw the sign in."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * FIRST
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * SECOND
    return x ^ (x >> 31 & (1 << 33) - 1)
