"""The definition of every operation of `contract.Backend`, in plain PyTorch.

A framework matmul may round differently when the number of rows in the call changes, but with a fixed shape its result for one row
depends neither on the row's index in the call nor on the other rows. So matmuls here run in calls of fixed shape; work that does
not fill a call is filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.ops.contract import Activation, Float64, Int64, PackedWeight, QuantisedWeight, RmsWeight
from echelon.ops.reference_attention import ragged_attention as ragged_attention
from echelon.ops.slots import scatter_slots
from echelon.sampling import Sampler, noise_at, noise_key

ROWS_PER_CALL = 16  # rows of one linear call: where arithmetic and reading the weights balance on CPUs with bf16 instructions
LARGEST_CALL = 128  # rows of the largest linear call that is tried
FOLD = 16
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.NONE: lambda x: x,
    Activation.RELU: F.relu,
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
}

# ---- linear layers


class RowCounts:
    """Row counts whose calls round like calls of ROWS_PER_CALL, found by trying; one object for all layers of a shape.

    Summation order is a property of a kernel, not of the data, so one random input whose every output bit agrees shows that a larger
    call may stand for several small ones. Where it does not agree (most shapes on CPUs with AMX), small calls are made.
    """

    def __init__(self) -> None:
        self._agreeing: dict[int, list[int]] = {}  # number of threads → row counts, falling

    def agreeing(self, weight: Tensor, bias: Tensor | None) -> list[int]:
        """Row counts that may be used for this weight, largest first; the last is ROWS_PER_CALL."""
        threads = torch.get_num_threads()
        if threads not in self._agreeing:
            self._agreeing[threads] = self._try(weight, bias)
        return self._agreeing[threads]

    def _try(self, weight: Tensor, bias: Tensor | None) -> list[int]:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(LARGEST_CALL, weight.shape[1], generator=generator).to(weight.dtype)
        small = torch.cat([F.linear(part, weight, bias) for part in torch.split(rows, ROWS_PER_CALL)])
        if not bool(torch.isfinite(small).all()) or float(small.float().std()) == 0.0:
            return [ROWS_PER_CALL]  # nothing to compare: a weight of zeros agrees with everything
        sizes = range(2 * ROWS_PER_CALL, LARGEST_CALL + 1, ROWS_PER_CALL)
        agreeing = [n for n in sizes if torch.equal(F.linear(rows[:n], weight, bias), small[:n])]
        return [*reversed(agreeing), ROWS_PER_CALL]


def fixed_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None, counts: RowCounts | None = None) -> Tensor:
    """x [..., K] @ weight [N, K]ᵀ + bias [N] → [..., N], each row's result independent of the number of rows. `counts`: larger calls are
    tried.
    """
    rows = x.reshape(-1, x.shape[-1])
    num_rows = len(rows)
    if num_rows == 0:  # a pass that only fills the cache wants no logits
        return x.new_empty(*x.shape[:-1], weight.shape[0])
    missing = -num_rows % ROWS_PER_CALL
    if missing:
        rows = F.pad(rows, (0, 0, 0, missing))
    parts = []
    start = 0
    while start < len(rows):
        sizes = [ROWS_PER_CALL] if counts is None else counts.agreeing(weight, bias)
        size = next(n for n in sizes if n <= len(rows) - start)
        parts.append(F.linear(rows[start : start + size], weight, bias))
        start += size
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out[:num_rows].view(*x.shape[:-1], weight.shape[0])


def pack(weight: Tensor, is_fast: bool = False, in_place: bool = False) -> PackedWeight:  # noqa: ARG001
    """The weight [N, K] as it is, by rows."""
    return PackedWeight(weight.contiguous(), len(weight), weight.shape[1], is_fast)


def packed_linear(
    x: Tensor, packed: PackedWeight, bias: Tensor | None = None, activation: Activation = Activation.NONE, float32: bool = False
) -> Tensor:
    """x [..., K], bias [N] → [..., N]: float32 products and sums in calls of ROWS_PER_CALL rows."""
    out = ACTIVATIONS[activation](fixed_rows_linear(x.float(), packed.data.float(), None if bias is None else bias.float()))
    return out if float32 else out.to(x.dtype)


def integer_linear(
    x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None, activation: Activation = Activation.NONE, float32: bool = False
) -> Tensor:
    """x [T, K], bias float32 [N] → [T, N]: what `packed_linear` is over a weight of integers. float64 products of integers are exact.

    Scales of 4 bits are rounded to float16 after a power of two has brought a column's largest to 2¹⁴.
    """
    rows = x.float()
    largest = rows.abs().amax(1, keepdim=True)
    inverse = torch.where(largest > 2.0**-100, torch.full_like(largest, 127) / largest, 0.0)  # 127 / x would be 127 · (1 / x)
    integers = (rows * inverse).round().nan_to_num().double()
    zeros = torch.full_like(weight.scales, 8) if weight.zeros is None and weight.bits == 4 else weight.zeros
    signed = weight.values.double() - (128.0 if zeros is None else zeros.double().repeat_interleave(weight.group_size, 1))
    scales, factors = weight.scales, torch.ones(len(weight.scales), 1)
    if weight.bits == 4:
        factors = 2.0 ** (15 - torch.frexp(scales.abs().amax(1, keepdim=True)).exponent)
        scales = (scales * factors).half().float()
    total = torch.zeros(len(rows), len(signed))
    for g in range(scales.shape[1]):
        entries = slice(g * weight.group_size, (g + 1) * weight.group_size)
        sums = (integers[:, entries] @ signed[:, entries].t()).float()
        total = sums if weight.bits == 8 else total + sums * scales[:, g]
    of_row = torch.where(largest.isfinite(), largest / 127.0, torch.nan)
    out = total * (of_row * (scales[:, 0] if weight.bits == 8 else 1.0 / factors[:, 0]))
    out = ACTIVATIONS[activation](out if bias is None else out + bias)
    return out if float32 else out.to(x.dtype)


def packed_rows(packed: PackedWeight, ids: Tensor) -> Tensor:
    """int64 [...] → [..., K]."""
    return F.embedding(ids, packed.data)


# ---- row by row


def rms_norm(x: Tensor, weight: Tensor, eps: float, how: RmsWeight) -> Tensor:
    """x [..., N], weight [N] → [..., N]."""
    y, w = x.float(), weight.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if how == RmsWeight.AFTER_ROUNDING:
        y = y.to(x.dtype).float()
    return ((1.0 + w if how == RmsWeight.ONE_PLUS else w) * y).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., N], weight and bias [N] → [..., N]."""
    w, b = (None if t is None else t.float() for t in (weight, bias))
    return F.layer_norm(x.float(), x.shape[-1:], w, b, eps).to(x.dtype)


def activate(x: Tensor, kind: Activation, other: Tensor | None = None) -> Tensor:
    """kind(x), or kind(x) · other: [..., N] → [..., N]."""
    y = ACTIVATIONS[kind](x.float())
    return (y if other is None else y * other.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [1, H, T, D], cos and sin [1, T, R] → [1, H, T, D]: pairs of values R / 2 apart are turned by their angles."""
    rotary = cos.shape[-1]
    turned, rest = x[..., :rotary].float(), x[..., rotary:]
    low, high = turned.chunk(2, -1)
    turned = turned * cos.float()[:, None] + torch.cat([-high, low], -1) * sin.float()[:, None]
    return torch.cat([turned.to(x.dtype), rest], -1)


def write_slots(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """keys [T, Hkv, D] and values [T, Hkv, Dv] to `slots` int64 [T]."""
    scatter_slots(key_cache, slots, keys)
    scatter_slots(value_cache, slots, values)


def read_memory(tensor: Tensor) -> None:
    """Read a contiguous tensor once, as the framework's sum does."""
    tensor.flatten().view(torch.int32).sum()


# ---- drawing and ranking tokens


def sample_rows(logits: Sequence[Tensor], samplers: Sequence[Sampler], positions: Sequence[int]) -> list[int]:
    """The token of every row of logits float32 [V], by its sampler."""
    rows = [(values.numpy(), sampler, position) for values, sampler, position in zip(logits, samplers, positions, strict=True)]
    return [s.choose_processed(values, position) if np.isfinite(values.max()) else -1 for values, s, position in rows]


def likeliest_rows(
    logits: Tensor,
    samplers: Sequence[Sampler],
    positions: Sequence[int],
    width: int,
    count: int,
    only_ranks: bool,
    sharpness: float = 1.0,
) -> tuple[Int64, Float64]:
    """`contract.Backend.likeliest_rows` by PyTorch and NumPy; only the likeliest come to the host."""
    is_drawn = np.array([not s.params.is_greedy for s in samplers], np.bool_)
    largest, places = largest_of(logits.float(), count)
    tokens, values = places.cpu().numpy(), largest.double().cpu().numpy()
    with np.errstate(invalid="ignore"):  # of logits that no token can come from
        scores = (values - values[:, :1]) * sharpness
    if not only_ranks and not is_drawn.all():
        greedy = torch.from_numpy(np.flatnonzero(~is_drawn))
        whole = (logits[greedy].float() * sharpness).logsumexp(-1, keepdim=True)
        scores[greedy] = (largest[greedy] * sharpness - whole).double().cpu().numpy()
    if is_drawn.any():
        at = np.flatnonzero(is_drawn)
        with np.errstate(all="ignore"):
            drawn, places_drawn = [samplers[i] for i in at.tolist()], [positions[i] for i in at.tolist()]
            scores[at] = _perturbed(values[at], tokens[at], drawn, places_drawn, sharpness)
        order = np.argsort(-scores[at], 1, kind="stable")
        scores[at], tokens[at] = np.take_along_axis(scores[at], order, 1), np.take_along_axis(tokens[at], order, 1)
    scores[~logits.amax(-1).isfinite().cpu().numpy()] = -np.inf
    return tokens[:, :width], scores[:, :width]


def largest_of(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of float32 [M, V], descending, and their places; of equals the first. Without NaN.

    Columns V/16 apart are taken together: the largest lie in the `count` groups with the largest maxima, which are found at vector speed.
    """
    num_rows, width = logits.shape
    stride = width // FOLD
    keys = _ordered(logits)
    if count * FOLD * 2 > width:
        places = keys.topk(count).indices
    else:
        folded = keys[:, : stride * FOLD].view(num_rows, FOLD, stride)
        groups = folded.amax(1).topk(count, sorted=False).indices
        inside = folded.gather(2, groups[:, None].expand(-1, FOLD, -1)).flatten(1)
        at = (groups[:, None] + torch.arange(FOLD, device=logits.device)[:, None] * stride).flatten(1)
        rest = torch.arange(stride * FOLD, width, device=logits.device).expand(num_rows, -1)
        top = torch.cat([inside, keys[:, stride * FOLD :]], 1).topk(count)
        places = torch.cat([at, rest], 1).gather(1, top.indices)
    return logits.gather(1, places), places


def _ordered(logits: Tensor) -> Tensor:
    """int64 [M, V], all different, in the order of the logits float32 [M, V] and of equals by falling place."""
    bits = (logits + 0.0).view(torch.int32)  # the sum turns −0 into 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.long() * 2**32 + torch.arange(logits.shape[1], 0, -1, device=logits.device)


def _perturbed(values: Float64, tokens: Int64, samplers: Sequence[Sampler], positions: Sequence[int], sharpness: float) -> Float64:
    """log-softmax of perturbed logits times `sharpness`, −∞ where a filter drops a token; values float64 [M, C] descend."""
    params = [s.params for s in samplers]
    column = np.array([(p.temperature, p.top_p, p.min_p, p.top_k if p.top_k > 0 else np.inf) for p in params])[:, :, None]
    temperature, top_p, min_p, top_k = column[:, 0], column[:, 1], column[:, 2], column[:, 3]
    scaled = (values - values[:, :1]) / temperature
    is_kept = (np.exp(scaled) >= min_p) & (np.arange(values.shape[1]) < top_k)
    share = np.exp(scaled) * is_kept
    mass = np.cumsum(share, 1)
    is_kept &= (mass - share < top_p * mass[:, -1:]) & (share > 0)
    keys = np.array([noise_key(s.seed, s.index, position) for s, position in zip(samplers, positions, strict=True)], np.uint64)
    noise = -np.log(-np.log(noise_at(keys[:, None], tokens)))
    perturbed = np.where(is_kept, scaled + noise, -np.inf)
    perturbed = (perturbed - perturbed.max(1, keepdims=True)) * sharpness
    return np.asarray(perturbed - np.log(np.exp(perturbed).sum(1, keepdims=True)))
