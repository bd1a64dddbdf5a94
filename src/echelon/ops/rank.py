"""The likeliest next tokens of many places as their requests would choose them: what a drafter grows trees from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.ops import devices
from echelon.ops.compiled import is_built, kernels
from echelon.sampling import Sampler, noise_at, noise_key

NUM_CANDIDATES = 128  # likeliest tokens of a sampled place that noise is drawn for
FOLD = 16

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


def likeliest(
    logits: Tensor,
    samplers: Sequence[Sampler],
    positions: Sequence[int],
    width: int,
    only_ranks: bool = False,
    sharpness: float = 1.0,
) -> tuple[Int64, Float64]:
    """Tokens and their log-probabilities, int64 and float64 [M, min(width, V)], the likeliest first; of equals the lower id.

    logits [M, V] have been through everything that changes them; the tokens will have `positions`. A greedy place ranks by probability; its
    scores are those of logits times `sharpness`, and with `only_ranks` relative to the likeliest token's, which saves a pass over V. A
    sampled one ranks by filtered and perturbed logits, with the noise that the target will draw with there: as this noise decides what the
    target chooses, their softmax says how sure that is. The filters see the NUM_CANDIDATES likeliest tokens. A place whose largest logit is
    not finite, or with a NaN, has the score −∞ everywhere. A place's result depends on that place alone; the kernel is csrc/rank.cpp. On
    CUDA devices the framework looks for the likeliest, and only they come to the host; the last bits of greedy scores may differ there with
    M.
    """
    width = min(width, logits.shape[-1])
    is_drawn = any(not s.params.is_greedy for s in samplers)
    count = min(max(width, NUM_CANDIDATES) if is_drawn else width, logits.shape[-1])
    if not is_built() or devices.by_triton(logits):
        return by_framework(logits, samplers, positions, width, count, only_ranks, sharpness)
    params = [s.params for s in samplers]
    tokens, scores = kernels.likeliest_rows(
        logits.float().contiguous(),
        width,
        count,
        sharpness,
        only_ranks,
        [p.temperature for p in params],
        [p.top_k for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        [s.seed for s in samplers],
        [s.index for s in samplers],
        positions,
    )
    return tokens.numpy(), scores.numpy()


def processed(logits: Tensor, samplers: Sequence[Sampler], texts: Sequence[Sequence[int]], paths: Sequence[Sequence[int]]) -> Tensor:
    """float32 [M, V] on the host as each request's own parameters make them, its text and then its drafted path counted; −∞ where these
    fail: the draft ends there, and the target settles it. Without such parameters the logits themselves, where they are.
    """
    if not any(s.changes_logits for s in samplers):
        return logits
    out = logits.cpu().float().clone()
    for i, (sampler, text, path) in enumerate(zip(samplers, texts, paths, strict=True)):
        try:
            out[i] = torch.from_numpy(sampler.checked(out[i].numpy(), text, path))
        except Exception:  # also whatever a request's own processor raises
            out[i] = -torch.inf
    return out


def by_framework(
    logits: Tensor,
    samplers: Sequence[Sampler],
    positions: Sequence[int],
    width: int,
    count: int,
    only_ranks: bool,
    sharpness: float = 1.0,
) -> tuple[Int64, Float64]:
    """The definition: `likeliest` by PyTorch and NumPy, from the `count` likeliest tokens of every place."""
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
            scores[at] = _perturbed(values[at], tokens[at], [samplers[i] for i in at.tolist()], [positions[i] for i in at.tolist()])
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


def _perturbed(values: Float64, tokens: Int64, samplers: Sequence[Sampler], positions: Sequence[int]) -> Float64:
    """log-softmax of perturbed logits, −∞ where a filter drops a token; values float64 [M, C] descend."""
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
    perturbed -= perturbed.max(1, keepdims=True)
    return np.asarray(perturbed - np.log(np.exp(perturbed).sum(1, keepdims=True)))
